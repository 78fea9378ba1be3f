"""Runs that are watched from outside, and `drill` over real ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import effilaunch
from patience import patience, wait_until

from launcher.errors import Interrupted
from launcher.execute.processes import processes_of
from launcher.execute.signals import ended_by_signals
from launcher.lab import drill
from launcher.lab.drill import MARK, kill_marked, watch_run

ROOT = Path(__file__).resolve().parents[2]

# A child in a session of its own, whose parent does not wait: what a launcher leaves that dies too early.
ORPHAN = """
import json, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(json.dumps({"errors": [{"message": "done for"}]}))
sys.exit(5)
"""


def watched(tmp_path, script: str, limit_s: float | None = None):
    env = {**os.environ, "DRILLED_BY": str(tmp_path)}
    return watch_run([sys.executable, "-c", script], env, tmp_path / "run.log", limit_s)


def alive(tmp_path) -> list[str]:
    """Processes below this test's runs, found without the token that finds them in `launcher`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"DRILLED_BY={tmp_path}".encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


def test_a_process_that_outlives_its_run_is_found_and_ended(tmp_path):
    ended = watched(tmp_path, ORPHAN)
    assert (ended.code, ended.left, ended.cause) == (5, 1, "done for")
    wait_until(lambda: not alive(tmp_path), 60, lambda: alive(tmp_path))


def test_a_run_that_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(drill, "REAP_S", 3600.0)  # for processes that are left
    ended = watched(tmp_path, "import sys; sys.stderr.write('said'); print('no JSON'); sys.exit(3)")
    assert (ended.code, ended.left, ended.cause, dict(ended.answer)) == (3, 0, "", {})
    assert (tmp_path / "run.log").read_text() == "said"
    assert ended.seconds > 0


def test_a_run_that_does_not_end_is_killed_in_its_time(tmp_path):
    ended = watched(tmp_path, "import time; time.sleep(3600)", limit_s=0.5)
    assert ended.code is None
    assert ended.left == 1


def test_processes_are_known_by_their_complete_token(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: "abcdef"}
    )
    try:
        while other.pid not in processes_of("abcdef", MARK):
            time.sleep(0.01)
        assert kill_marked("abc", 0.0) == 0
        assert other.poll() is None
        assert kill_marked("abcdef", 0.0) == 1
        assert other.wait(patience(60)) == -signal.SIGKILL
        assert processes_of("abcdef", MARK) == set()
    finally:
        other.kill()
        other.wait()


SAVES = """
import signal, sys, time
from pathlib import Path

def stop(number, frame):
    Path(sys.argv[1]).write_text("saved")
    sys.exit(130)

signal.signal(signal.SIGTERM, stop)
Path(sys.argv[1]).write_text("began")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_drill_lets_its_run_save(tmp_path, number):
    said = tmp_path / "said"

    def interrupt() -> None:
        while not said.is_file() or said.read_text() != "began":
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    argv = [sys.executable, "-c", SAVES, str(said)]
    with pytest.raises(Interrupted), ended_by_signals():
        watch_run(argv, os.environ, tmp_path / "run.log", None)
    thread.join()
    assert said.read_text() == "saved"


def drilled(folder: Path, *arguments: str, expect: int = 0) -> dict:
    """`effilaunch drill smoke --tiny`."""
    if not (find_spec("torch") and find_spec("deepspeed")):
        pytest.skip("the training stack is not installed")
    given = ("--tiny", "--steps", "6", "--set", "adapter.lora_dropout=0.1", "--output-dir", folder)
    given += arguments
    return effilaunch("drill", ROOT / "recipes/smoke.yaml", *given, expect=expect, OMP_NUM_THREADS="1")


def check_passed(data: dict, names: list[str]) -> None:
    assert [(fault["id"], fault["status"]) for fault in data["faults"]] == [
        (name, "passed") for name in names
    ]
    for fault in data["faults"]:
        assert (fault["left"], fault["compared"], fault["difference"]) == (0, 6, 0.0)
        assert fault["resumed_at"] == fault["checkpoint"] >= 2
        assert fault["seconds"] < 60


@pytest.mark.slow
def test_the_loss_goes_on_after_a_rank_was_killed(tmp_path, warm):
    given = ("--on", "2xcpu", "--set", "sharding.engine=ddp", "--only", "kill-rank")
    data = drilled(tmp_path / "out", *given)
    check_passed(data, ["kill-rank"])
    assert "rank 1" in data["faults"][0]["cause"]
    assert "SIGKILL" in data["faults"][0]["cause"]


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("sharding", ["sharding.zero_stage=2", "sharding.engine=fsdp"])
def test_the_loss_goes_on_after_every_fault_of_sharded_ranks(sharding, tmp_path, warm):
    names = ["terminate", "kill-rank", "kill-all", "disk-full", "kill-save"]
    check_passed(drilled(tmp_path / "out", "--on", "2xcpu", "--set", sharding), names)


# Random states that a resumed run does not get back: dropout then takes away other numbers.
FORGETS = """
import os

import torch
from transformers import TrainerCallback


class Forget(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if os.environ.get("EFFILAUNCH_RESUME"):
            torch.manual_seed(state.global_step)


def callbacks():
    return [Forget()]
"""


@pytest.mark.slow
def test_a_run_that_does_not_go_on_as_it_began_is_found_out(tmp_path, warm):
    (tmp_path / "hooks.py").write_text(FORGETS)
    given = ("--on", "cpu", "--only", "kill-all", "--set", f"python={tmp_path / 'hooks.py'}")
    data = drilled(tmp_path / "out", *given, expect=5)
    (problem,) = data["errors"]
    assert problem["code"] == "drill-failed"
    assert "kill-all: step" in problem["message"]
    assert "bit-identical" in problem["message"]
    assert (tmp_path / "out" / "01-kill-all" / "checkpoints" / "checkpoint-6").is_dir(), "evidence stays"


@pytest.mark.slow
def test_an_interrupted_drill_leaves_no_process_behind(tmp_path, warm):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "drill", str(ROOT / "recipes/smoke.yaml"), "--tiny",
         "--on", "2xcpu", "--set", "sharding.engine=ddp", "--output-dir", str(out), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "DRILLED_BY": str(tmp_path)},
    )  # fmt: skip
    try:
        while len(list(out.glob("00-undisturbed/logs/status-rank-*.json"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=patience(300))
    finally:
        process.kill()
    assert process.returncode == 130
    assert json.loads(said)["errors"][0]["message"] == "stopped at the undisturbed run"
    assert alive(tmp_path) == []
    assert json.loads((out / "drill.json").read_text())["reference"]["runs"] == 0
