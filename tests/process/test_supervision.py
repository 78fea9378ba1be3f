"""The supervisor with the real launchers over two CPU ranks: a lost rank, a restart, a stop, its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from grounds import make_base
from patience import patience, wait_until
from supervised import marked

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

MARK = "EFFILAUNCH_TEST_MARK"
RECIPE = """\
model: {{name_or_path: model}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
sharding: {sharding}
global_batch_size: 8
trainer: {{max_steps: {steps}, learning_rate: 1.0e-2, logging_steps: 1, save_steps: 2,
          per_device_train_batch_size: 4}}
launch: {{max_restarts: {restarts}}}
"""
LAUNCHERS = [pytest.param("{engine: ddp}", id="accelerate"), pytest.param("{zero_stage: 2}", id="deepspeed")]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model, a tokenizer of 1024 words and rows, all made here."""
    return make_base(tmp_path_factory.mktemp("base"), hidden_size=32, layers=1, heads=2)


class Run:
    """`effilaunch run` as a process of its own."""

    def __init__(self, base: Path, folder: Path, sharding: str, *, steps=6, restarts=0, fault=None) -> None:
        for name in ("model", "rows.jsonl"):
            (folder / name).symlink_to(base / name)
        (folder / "r.yaml").write_text(RECIPE.format(sharding=sharding, steps=steps, restarts=restarts))
        self.out, self.mark, self.tmp = folder / "out", uuid.uuid4().hex, folder / "tmp"
        self.tmp.mkdir()
        drill = {} if fault is None else {"EFFILAUNCH_DRILL": json.dumps(fault)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", "run", str(folder / "r.yaml"), "--on", "2xcpu",
             "--output-dir", str(self.out)],
            env={**os.environ, **drill, MARK: self.mark, "TMPDIR": str(self.tmp)}, start_new_session=True,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(self, code: int) -> str:
        out, _ = self.process.communicate(timeout=patience(400))
        assert self.process.returncode == code, out[-6000:]
        assert marked(MARK, self.mark) == {}
        assert self.left() == []
        return out

    def left(self) -> list[str]:
        """What the launcher has left in TMPDIR."""
        return [path.name for path in self.tmp.iterdir() if path.name.startswith("torchelastic_")]

    def training(self) -> Run:
        wait_until(lambda: (self.out / "metrics.jsonl").is_file() or self.process.poll() is not None, 300)
        assert self.process.poll() is None
        return self

    def result(self) -> dict:
        return json.loads((self.out / "result.json").read_text())


@pytest.mark.parametrize("sharding", LAUNCHERS)
def test_a_killed_rank_ends_the_run_with_its_cause_and_a_restart_finishes_it(base, tmp_path, sharding):
    fault = {"fault": "kill-rank", "step": 3, "rank": 1, "times": 1}
    run = Run(base, tmp_path, sharding, restarts=1, fault=fault)
    said = run.ended(0)
    (row,) = run.result()["restarts"]
    assert (row["step"], row["resumed_from"], row["waited_s"]) == (3, 2, 10.0)
    # deepspeed tells the code of one process alone: of the other one, where that was the first to be seen.
    ways = ("killed by SIGKILL", "lost") if "zero" in sharding else ("killed by SIGKILL",)
    assert any(f"was {way}, last step 3, phase train" in row["cause"] for way in ways)
    assert row["cause"].startswith("rank 1 (pid")
    assert said.count("Traceback (most recent call last)") == 0, "the other rank only missed this one"
    assert "ChildFailedError" not in said
    assert "resumes from" in said
    steps = [json.loads(line)["step"] for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    logs = (run.out / "logs" / "rank-1.log").read_text()
    assert logs.count("==== try 2, ") == 1


@pytest.mark.parametrize("sharding", LAUNCHERS)
def test_a_signal_stops_with_a_checkpoint_and_leaves_nothing(base, tmp_path, sharding):
    run = Run(base, tmp_path, sharding, steps=100_000).training()
    run.process.send_signal(signal.SIGTERM)
    said = run.ended(130)
    stopped = json.loads((run.out / "stopped.json").read_text())
    assert f"the run was stopped after step {stopped['step']}, with {stopped['checkpoint']}" in said
    assert (run.out / "checkpoints" / stopped["checkpoint"] / "manifest.json").is_file()


@pytest.mark.parametrize("sharding", LAUNCHERS)
def test_when_the_supervisor_is_killed_the_ranks_save_and_the_launcher_leaves(base, tmp_path, sharding):
    run = Run(base, tmp_path, sharding, steps=100_000).training()
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not marked(MARK, run.mark), 120, lambda: marked(MARK, run.mark))
    assert (run.out / "stopped.json").is_file()
    assert run.left() == []
    run.process.stdout.close()
