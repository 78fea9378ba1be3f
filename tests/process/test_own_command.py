"""`effilaunch run -- COMMAND`: scripts with a Trainer, under real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import free_port

pytest.importorskip("torch")
pytest.importorskip("transformers")

from launcher.commands.supervise import supervise_command
from launcher.errors import Interrupted, RunFailed
from launcher.files.checkpoint import complete_checkpoints
from launcher.files.rank_status import process_started
from launcher.report.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
LINE
AT, WHAT, STEPS = sys.argv[1].split(",")


class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step != int(AT) or args.process_index != args.world_size - 1:
            return
        once = Path(f"{WHAT}-happened")
        if WHAT == "stop" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        if WHAT == "raise" and not once.exists():
            once.touch()
            raise ConnectionError("the data server does not answer")
        if WHAT == "wait":
            time.sleep(0.5)


torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (64, 8))]
args = TrainingArguments(
    "out", max_steps=int(STEPS), learning_rate=1e-2, logging_steps=1, save_steps=3, report_to="none",
    per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, ddp_find_unused_parameters=False,
)
callbacks = [Fault(), effilaunch.callback()] if "effilaunch" in globals() else [Fault()]
Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
Path("after-train").touch()
"""


def script(folder: Path, *, line: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.replace("LINE", "\nimport effilaunch\n" if line else ""))


def torchrun(python: Path, what: str) -> list[str]:
    return [str(python), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
            str(free_port()), "train.py", what]  # fmt: skip


def supervise(words: list[str], *overrides: str, out: str = "run", resume: str | None = None) -> Outcome:
    return supervise_command(
        own=words, launch=None, overrides=overrides, resume=resume, output_dir=out, as_json=True
    )


def losses(run_dir: Path) -> dict[int, float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def test_two_ranks_stop_at_one_step_and_resume_to_the_same_losses(forks, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    script(whole)
    monkeypatch.chdir(whole)
    supervise(torchrun(forks.python, "9,none,6"))
    script(cut)
    monkeypatch.chdir(cut)
    command = torchrun(forks.python, "3,stop,6")  # the signal reaches rank 1 alone
    with pytest.raises(Interrupted) as stopped:
        supervise(command)
    assert not (cut / "after-train").exists()  # the script does not take a part for the whole
    step = json.loads((cut / "run/stopped.json").read_text())["step"]
    assert step == 4
    assert f"checkpoint-{step}" in stopped.value.problems[0].message
    assert list(complete_checkpoints(cut / "run/checkpoints")) == [3, 4]
    assert json.loads((cut / "run/result.json").read_text())["status"] == "stopped"
    result = supervise(command, resume="auto").data["result"]
    assert (result["status"], result["steps"], result["processes"]) == ("finished", 6, 2)
    assert losses(cut / "run") == losses(whole / "run")
    assert {log.name for log in (cut / "run/logs").glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}
    assert (cut / "after-train").exists()


def test_a_failed_rank_is_named_and_a_restart_resumes(forks, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.execute.own_command.FIRST_PAUSE_S", 0.0)
    script(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = supervise(torchrun(forks.python, "4,raise,5"), "launch.max_restarts=1").data["result"]
    (restart,) = result["restarts"]
    assert "rank 1 failed first: ConnectionError: the data server does not answer" in restart["cause"]
    assert (restart["step"], restart["resumed_from"], result["steps"]) == (4, 3, 5)
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


def test_without_the_line_the_command_is_supervised_and_nothing_is_known_of_its_steps(
    forks, tmp_path, monkeypatch
):
    script(tmp_path, line=False)
    monkeypatch.chdir(tmp_path)
    done = supervise([str(forks.python), "train.py", "9,none,3"])
    assert done.data["result"]["status"] == "finished"
    assert "steps" not in done.data["result"]
    assert "steps" not in done.text
    assert not (tmp_path / "run/metrics.jsonl").exists()
    with pytest.raises(RunFailed) as failed:
        supervise([str(forks.python), "train.py", "1,raise,3"], out="failed")
    assert failed.value.problems[0].code == "run-failed"
    assert json.loads((tmp_path / "failed/result.json").read_text())["exit_code"] == 1


def test_a_command_that_goes_to_the_background_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.execute.own_command.LEAVE_S", 0.3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFailed) as failed:
        supervise(["bash", "-c", "setsid sleep 600 & echo $! > pid"])
    assert failed.value.problems[0].code == "command-left-processes"
    assert "sleep 600" in failed.value.problems[0].message
    assert process_started(int((tmp_path / "pid").read_text())) is None


def test_a_run_of_ones_own_command_has_no_result_of_ours(tmp_path, monkeypatch):
    from launcher.commands.report import report_command
    from launcher.errors import RecipeError
    from launcher.inputs.finished_run import result_run

    monkeypatch.chdir(tmp_path)
    command = ["bash", "-c", "echo $EFFILAUNCH_RUN_DIR $WORD > seen", "--api_key", "abcdef0123456789"]
    monkeypatch.setenv("WORD", "of the shell")
    supervise(command, "launch.env.WORD=of the file")
    assert (tmp_path / "seen").read_text() == f"{tmp_path}/run of the file\n"
    for checkpoint in (None, "checkpoint-1"):
        with pytest.raises(RecipeError) as refused:
            result_run("run", checkpoint)
        assert refused.value.problems[0].code == "own-command"
    report_command(["run"], output=None, serve=False, port=0, as_json=False)
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or "abcdef0123456789" not in file.read_text("utf-8", "replace")
    assert supervise(command, resume="auto").data["result"]["status"] == "finished"
    with pytest.raises(RecipeError) as other:
        supervise(["bash", "-c", "true"], resume="auto")
    assert other.value.problems[0].code == "finished-run"
