"""The job script of docs/supervise.md: a user's own command is stopped by Slurm's warning and resumes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from cluster.conftest import losses
from patience import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import sys
import time

import effilaunch
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step < 400:
            time.sleep(0.02)


torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (64, 8))]
args = TrainingArguments(
    "out", max_steps=500, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
    per_device_train_batch_size=2, disable_tqdm=True,
)
Trainer(model, args, train_dataset=rows, callbacks=[Slow(), effilaunch.callback()]).train()
"""


def test_the_warning_of_slurm_stops_the_command_which_resumes_in_the_requeued_job(cluster, tmp_path):
    page = (ROOT / "docs/supervise.md").read_text()
    (script,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(ROOT)}
    job = cluster.run("sbatch", "--parsable", "job.sh", cwd=tmp_path, env=env).stdout.strip()
    run_dir = tmp_path / "runs/tune"
    wait_until((run_dir / "metrics.jsonl").is_file, 400, lambda: (tmp_path / f"slurm-{job}.out").read_text())
    cluster.run("scancel", "--signal=USR1", job)
    cluster.wait_state(job, "COMPLETED", timeout=600)
    log = (tmp_path / f"slurm-{job}.out").read_text()
    assert "SIGUSR1: stopping" in log
    assert "effilaunch: stopped after step" in log
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 500)
    assert list(losses(run_dir)) == list(range(1, 501))
    assert re.search(r"resumes from \S+/out/checkpoint-\d+", log)
