"""`effilaunch run -- COMMAND`: scripts with a Trainer, under real ranks."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import free_port
from grounds import make_base
from patience import patience, wait_until

pytest.importorskip("torch")
pytest.importorskip("transformers")

from launcher.commands.supervise import supervise_command
from launcher.errors import Interrupted, RunFailed
from launcher.execute.supervise import Limits
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
AT, WHAT, STEPS, *CONFIG = sys.argv[-1].split(",")


class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if WHAT == "slow":
            time.sleep(0.2)
        if state.global_step != int(AT) or args.process_index != args.world_size - 1:
            return
        once = Path(f"{WHAT}-happened")
        if WHAT == "stop" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        if WHAT == "hang":
            time.sleep(600)
        if WHAT == "raise" and not once.exists():
            once.touch()
            raise ConnectionError("the data server does not answer")


torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (64, 8))]
args = TrainingArguments(
    "out", max_steps=int(STEPS), learning_rate=1e-2, logging_steps=1, save_steps=3, report_to="none",
    per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, ddp_find_unused_parameters=False,
    deepspeed=(CONFIG or [None])[0],
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


def test_a_step_that_never_ends_is_a_hang_with_the_calls_of_the_rank(forks, tmp_path, monkeypatch):
    quick = functools.partial(Limits, step=patience(3.0))
    monkeypatch.setattr("launcher.execute.own_command.Limits", quick)
    script(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFailed) as failed:
        supervise(torchrun(forks.python, "4,hang,9"))
    problem = failed.value.problems[0]
    assert problem.code == "hang"
    assert "rank 1 is behind, after step 4, in on_step_begin" in problem.message


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


def test_logs_of_ranks_have_no_values_of_secret_variables(tmp_path, monkeypatch):
    """Of variables with a secret's name, and of those that `launch.env` takes from the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUBAUTH", "abcdefgh1234")
    monkeypatch.setenv("MY_PLACE", "ijklmnop5678")
    code = "import os; print(os.environ['GITHUBAUTH'], os.environ['PLACE'], 'shown')"
    supervise(
        ["env", "RANK=0", "WORLD_SIZE=1", sys.executable, "-c", code], "launch.env.PLACE=${ENV:MY_PLACE}"
    )
    assert (tmp_path / "run/logs/rank-0.log").read_text() == "<secret> <secret> shown\n"


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


def documented() -> tuple[str, str, int]:
    """The script of docs/supervise.md before and after, and the lines that are changed."""
    page = (ROOT / "docs/supervise.md").read_text()
    lines = page.partition("```diff\n")[2].partition("```")[0].splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
    return before, after, sum(line[0] in "+-" for line in lines)


def test_the_documented_script_changes_in_few_lines():
    before, after, changed = documented()
    for text in (before, after):
        compile(text, "train.py", "exec")
    assert "effilaunch" not in before
    assert "callbacks=[effilaunch.callback()]" in after
    assert 0 < changed <= 40


# --- the real launchers


class Run:
    """`effilaunch run -- COMMAND` as a process of its own, in its folder."""

    def __init__(self, folder: Path, words: list[str], *options: str, out: str = "run") -> None:
        self.run_dir = folder / out
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", "run", "--output-dir", out, *options, "--", *words],
            cwd=folder, env={**environ, "PYTHONPATH": str(ROOT)}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def stopped_when(self, condition) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, 300)
        self.process.send_signal(signal.SIGINT)

    def ended(self, code: int) -> str:
        out, _ = self.process.communicate(timeout=patience(400))
        assert self.process.returncode == code, out[-6000:]
        return out

    @property
    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())


REAL = [
    pytest.param(["torchrun", "--standalone", "--nproc-per-node", "2"], "", id="torchrun"),
    pytest.param(["deepspeed", "--num_gpus", "2"], "ds.json", id="deepspeed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "config"), REAL)
def test_ctrl_c_stops_real_ranks_with_a_checkpoint_that_is_resumed(tmp_path, launcher, config):
    script(tmp_path)
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    command = [*launcher, "train.py", f"99,slow,400,{config}".rstrip(",")]
    run = Run(tmp_path, command)
    run.stopped_when((tmp_path / "run/metrics.jsonl").is_file)
    run.ended(130)
    step = json.loads((tmp_path / "run/stopped.json").read_text())["step"]
    assert max(complete_checkpoints(tmp_path / "run/checkpoints")) == step
    command[-1] = f"99,slow,{step + 2},{config}".rstrip(",")
    run = Run(tmp_path, command, "--resume", "auto")
    assert "the command differs" in run.ended(0)
    assert (run.result["steps"], run.result["processes"]) == (step + 2, 2)
    assert list(losses(tmp_path / "run")) == list(range(1, step + 3))


@pytest.mark.slow
def test_the_documented_script_trains_before_and_after_with_zero_2(tmp_path):
    make_base(tmp_path, hidden_size=32, layers=1, heads=2)
    (tmp_path / "zero2.json").write_text((ROOT / "ds_configs/zero2.json").read_text())
    for text, launcher in zip(documented(), (["python"], REAL[0].values[0]), strict=False):
        on_cpu = text.replace('report_to="none",', 'report_to="none", use_cpu=True,')
        (tmp_path / "train.py").write_text(on_cpu)
        run = Run(tmp_path, [*launcher, "train.py", "model", "rows.jsonl", "3"], out=launcher[0])
        run.ended(0)
        assert (tmp_path / "final/tokenizer.json").is_file()
        shutil.rmtree(tmp_path / "final")
    assert (run.result["steps"], run.result["processes"]) == (3, 2)
    assert list((tmp_path / "out/checkpoint-3").glob("global_step3/*optim_states.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("line", [False, True], ids=["plain", "with the line"])
def test_the_script_of_trl_as_it_is_published_and_with_the_line(tmp_path, line):
    trl = pytest.importorskip("trl")
    make_base(tmp_path, hidden_size=32, layers=1, heads=2)
    (tmp_path / "data").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "data/train.jsonl")
    text = (Path(trl.__file__).parent / "scripts/sft.py").read_text()
    if line:
        last = "        peft_config=get_peft_config(model_args),\n"
        assert text.count(last) == 1
        text = text.replace(last, f"{last}        callbacks=[effilaunch.callback()],\n")
        text = text.replace("import argparse\n", "import argparse\nimport effilaunch\n", 1)
    (tmp_path / "sft.py").write_text(text)
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "sft.py", "--model_name_or_path", "model",
             "--dataset_name", "data", "--output_dir", "out", "--max_steps", "3", "--logging_steps", "1",
             "--use_cpu", "True", "--bf16", "False", "--report_to", "none"]  # fmt: skip
    run = Run(tmp_path, words)
    run.ended(0)
    assert (run.result["status"], run.result["processes"]) == ("finished", 2)
    assert (tmp_path / "out/model.safetensors").is_file()
    assert run.result.get("steps") == (3 if line else None)
    assert list(complete_checkpoints(run.run_dir / "checkpoints")) == ([3] if line else [])


LOOP = """import time
from pathlib import Path

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.randn(4000, 4), batch_size=4)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
try:
    for step, batch in enumerate(batches):
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {accelerator.process_index} step {step}", flush=True)
        time.sleep(0.1)
except KeyboardInterrupt:
    Path(f"saved-{accelerator.process_index}").touch()
"""


@pytest.mark.slow
def test_a_loop_of_accelerate_without_a_trainer_saves_at_ctrl_c(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    run = Run(tmp_path, ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "loop.py"])
    logs = [tmp_path / f"run/logs/rank-{rank}.log" for rank in range(2)]
    run.stopped_when(lambda: all(log.is_file() and "step 5" in log.read_text() for log in logs))
    out = run.ended(130)
    assert "rank 0 step 5" in out
    assert "rank 1 step 5" not in out
    assert [(tmp_path / f"saved-{rank}").exists() for rank in range(2)] == [True, True]
    assert (run.result["status"], run.result["processes"]) == ("stopped", 2)
