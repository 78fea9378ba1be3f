"""A stop from outside, through the real launchers: the ranks save and end, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import Deadline, patience, wait_until

from launcher.files.rank_status import RankStatus, read_statuses

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

STEPS = 30
RECIPE = """\
model: {{config: {config}, tokenizer: tokenizer}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
hardware: {{num_nodes: 1, devices_per_node: 2, device: cpu}}
sharding: {sharding}
global_batch_size: 8
trainer: {{max_steps: {steps}, learning_rate: 1.0e-2, lr_scheduler_type: linear, logging_steps: 1,
          save_steps: 1000, per_device_train_batch_size: 4}}
launch: {{launcher: {launcher}}}
python: hooks.py
"""
# Long enough for a signal to meet the run between its first and its last step.
SLOW = """
import time

from transformers import TrainerCallback


class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        time.sleep(0.2)


def callbacks():
    return [Slow()]
"""
CONFIG = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def written(folder: Path, launcher: str, sharding: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(1020)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3} w7"} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hooks.py").write_text(SLOW)
    text = RECIPE.format(config=json.dumps(CONFIG), sharding=sharding, launcher=launcher, steps=STEPS)
    (folder / "r.yaml").write_text(text)
    return folder / "r.yaml"


def started(recipe: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """`effilaunch run` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "run", str(recipe), "--output-dir", str(out), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def trained(
    run: subprocess.Popen[str], out: Path, steps: int, timeout_s: float = 500.0
) -> dict[int, RankStatus]:
    """The statuses once both ranks have `steps` steps behind them."""
    deadline = Deadline(timeout_s)
    while run.poll() is None and not deadline.passed():
        found = read_statuses(out)
        if len(found) == 2 and all(s.phase == "train" and s.step >= steps for s in found.values()):
            return found
        time.sleep(0.1)
    run.kill()
    raise AssertionError(run.communicate()[0][-6000:])


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "sharding", "rank", "kind"),
    [
        ("deepspeed", "{engine: deepspeed, zero_stage: 2}", 1, signal.SIGTERM),
        # What `launcher: auto` takes where a stop is long.
        ("accelerate", "{engine: deepspeed, zero_stage: 3}", 1, signal.SIGUSR1),
    ],
)
def test_a_signal_to_one_rank_alone_stops_the_run_and_it_goes_on(launcher, sharding, rank, kind, tmp_path):
    recipe, out = written(tmp_path, launcher, sharding), tmp_path / "out"
    run = started(recipe, out)
    os.kill(trained(run, out, 3)[rank].pid, kind)
    said, _ = run.communicate(timeout=patience(300))
    assert run.returncode == 130, said[-6000:]
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["signal"] == kind.name
    assert stopped["checkpoint"] == f"checkpoint-{stopped['step']}"
    assert stopped["checkpoint"] in said
    assert 3 <= stopped["step"] < STEPS
    last = [(status.phase, status.step, status.code) for status in read_statuses(out).values()]
    assert last == [("ended", stopped["step"], 0)] * 2
    before = losses(out)
    assert list(before) == list(range(1, stopped["step"] + 1))
    again = started(recipe, out, "--resume", "auto")
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said[-6000:]
    after = losses(out)
    assert {step: after[step] for step in before} == before
    assert list(after) == list(range(1, STEPS + 1))
    result = json.loads((out / "result.json").read_text())
    engine = "DEEPSPEED" if "deepspeed" in sharding else "MULTI_CPU"
    assert (result["processes"], result["distributed_type"]) == (2, engine)


DEAF = """
import os, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
beat = pathlib.Path(sys.argv[1]) / f"beat-{os.environ['RANK']}"
while True:
    with beat.open("a") as file:
        file.write(".")
    time.sleep(0.1)
"""


def test_accelerate_launch_waits_as_long_as_the_plan_says(tmp_path):
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT reaches torchrun through `accelerate launch`: 3 s, not 30."""
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
        "machine_rank: 0\ngpu_ids: all\nmixed_precision: 'no'\nuse_cpu: false\nrdzv_backend: static\n"
        "same_network: true\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch",
         "--config_file", str(tmp_path / "accelerate.yaml"), "--main_process_port", "0",
         str(tmp_path / "deaf.py"), str(tmp_path)],
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    beats = [tmp_path / f"beat-{rank}" for rank in (0, 1)]
    try:
        wait_until(lambda: all(beat.is_file() for beat in beats), 120, "the ranks start")
        before, asked = [beat.stat().st_size for beat in beats], time.monotonic()
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=patience(120))
        assert time.monotonic() - asked > 3.0, said[-3000:]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    # Each beat takes 0.1 s or, on a loaded machine, longer: 30 s are hardly less than 300 of them.
    lived = [beat.stat().st_size - count for beat, count in zip(beats, before, strict=True)]
    assert all(0 < count < 120 for count in lived), (lived, said[-3000:])
