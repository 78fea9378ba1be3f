"""No process outlives a run, however it ends: normally, by any signal to anybody, or by our own mistake."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from cases import cases
from patience import patience, wait_until
from supervised import ROOT, marked, ranks

from launcher.execute.start_point import Beginning, beginning

MARK = "EFFILAUNCH_TEST_MARK"
DEAF = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.set_wakeup_fd(-1)
"""
"""A rank that hears no signal."""


class Run:
    """A supervisor in a process of its own, and all that it started."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "supervised.py"), str(folder), json.dumps(settings)],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def training(self) -> Run:
        """Once both ranks have taken a step."""

        def have() -> bool:
            return all(status.get("step", 0) >= 1 for status in self.statuses())

        wait_until(have)
        return self

    def statuses(self) -> list[dict]:
        files = [self.folder / "run" / "logs" / f"status-rank-{rank}.json" for rank in (0, 1)]
        return [json.loads(file.read_text()) if file.is_file() else {} for file in files]

    def send(self, number: int) -> Run:
        self.process.send_signal(number)
        return self

    def launcher(self) -> int:
        return int((self.folder / "run" / "launcher-pid").read_text())

    def ended(self, code: int, within_s: float = 120.0) -> str:
        """The output of a run that ends with `code` and leaves nothing."""
        out, _ = self.process.communicate(timeout=patience(within_s))
        assert self.process.returncode == code, out
        assert marked(MARK, self.mark) == {}, out
        return out

    def kill(self) -> None:
        for pid in [*marked(MARK, self.mark), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path):
    """Starts a run; whatever a failing test leaves is killed."""
    runs = []

    def start(script: str, **settings: object) -> Run:
        runs.append(Run(tmp_path, script=script, **settings))
        return runs[-1]

    yield start
    for one in runs:
        one.kill()


def test_after_a_normal_end(run):
    assert "ranks are started" in run(ranks()).ended(0)


def test_after_a_failure(run):
    out = run(ranks("if rank == 1 and step == 2: sys.exit(7)")).ended(5)
    assert "rank-lost: " in out
    assert "rank 1 (pid" in out
    assert "ended with exit code 7 without an error message, last step 2, phase train" in out


@pytest.mark.parametrize(
    "number", cases([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], signal.SIGTERM)
)
def test_after_one_signal_with_a_checkpoint(run, number):
    began = run(ranks(steps=2000)).training()
    out = began.send(number).ended(130)
    name = signal.Signals(number).name
    assert f"{name}: stopping after a step with a checkpoint; press Ctrl-C again to stop at once" in out
    stopped = json.loads((began.folder / "run" / "stopped.json").read_text())
    assert f"{name}: the run was stopped after step {stopped['step']}, with {stopped['checkpoint']}" in out


@pytest.mark.slow
def test_when_nobody_reads_what_it_prints_a_run_goes_on_and_still_stops_with_a_checkpoint(run):
    """As in `effilaunch run | tee log`, where Ctrl-C ends tee, too."""
    began = run(ranks("print('step', step, flush=True)", steps=2000)).training()
    began.process.stdout.close()
    steps = [status["step"] for status in began.statuses()]
    wait_until(lambda: all(s["step"] > step + 20 for s, step in zip(began.statuses(), steps, strict=True)))
    os.killpg(began.process.pid, signal.SIGINT)
    assert began.process.wait(patience(120)) == 130
    assert marked(MARK, began.mark) == {}
    stopped = json.loads((began.folder / "run" / "stopped.json").read_text())
    assert (began.folder / "run" / "checkpoints" / stopped["checkpoint"] / "manifest.json").is_file()
    log = (began.folder / "run" / "logs" / "launcher.log").read_text()
    assert f"step {stopped['step'] - 1}\n" in log


def test_after_a_second_signal_at_once(run):
    began = run(ranks(steps=10**6, early=DEAF), stop_s=3600.0).training()
    began.send(signal.SIGINT)
    time.sleep(1.5)
    out = began.send(signal.SIGINT).ended(130)
    assert "the run was killed: a second signal" in out


@pytest.mark.slow
def test_usr1_that_is_repeated_does_not_hurry(run):
    began = run(ranks("time.sleep(1.5)", steps=2000)).training()
    began.send(signal.SIGUSR1)
    time.sleep(0.7)
    out = began.send(signal.SIGUSR1).ended(130)
    assert "the run was stopped after step" in out


@pytest.mark.slow
def test_ranks_that_ignore_the_signal_are_killed_in_the_end(run):
    began = run(ranks(steps=2000, early=DEAF), stop_s=0.0).training()
    out = began.send(signal.SIGTERM).ended(130)
    assert re.search(
        r"the run was killed: it took more than \d+ s to stop; its newest complete checkpoint", out
    )


def test_a_signal_before_the_first_step(run):
    began = run(ranks(early="time.sleep(600)"))
    wait_until(lambda: all(status.get("phase") == "load" for status in began.statuses()))
    out = began.send(signal.SIGTERM).ended(130)
    assert "SIGTERM: the run was stopped before its first checkpoint" in out


def test_when_the_supervisor_is_killed_the_ranks_save_and_all_leave(run):
    began = run(ranks(steps=2000)).training()
    began.send(signal.SIGKILL)
    wait_until(lambda: not marked(MARK, began.mark), 30)
    stopped = json.loads((began.folder / "run" / "stopped.json").read_text())
    assert stopped["signal"] == "the supervising process is gone"


def test_the_next_start_waits_for_ranks_of_a_killed_one_and_resumes_what_they_save(run):
    began = run(ranks(steps=2000)).training()
    began.send(signal.SIGKILL)
    began.process.wait()
    said: list[str] = []
    place, file = Beginning(began.folder / "run", takes_newest=True), began.folder / "run" / "stopped.json"
    with beginning(place, said.append) as found:
        assert marked(MARK, began.mark) == {}
        assert found.checkpoint.name == json.loads(file.read_text())["checkpoint"]
    assert len(said) == 1


@pytest.mark.slow
def test_when_the_supervisor_is_killed_what_does_not_leave_is_killed(run):
    deaf = "stopping.stop.ask = lambda number: None\n" + DEAF
    began = run(ranks(steps=100_000, early=deaf), leave_s=2.0).training()
    began.send(signal.SIGKILL)
    began.process.wait()
    time.sleep(1.0)
    assert len(marked(MARK, began.mark)) >= 5, "the guard leaves time for a checkpoint"
    wait_until(lambda: not marked(MARK, began.mark), 15)


def test_when_the_launcher_is_killed(run):
    began = run(ranks(steps=2000)).training()
    os.kill(began.launcher(), signal.SIGKILL)
    out = began.ended(5)
    assert "launcher-lost: " in out
    assert "the launcher was killed by SIGKILL; its ranks stopped after step" in out


@pytest.mark.slow
def test_when_a_scheduler_signals_everybody_but_the_supervisor(run):
    """It ends the run: nothing may start it again."""
    began = run(ranks(steps=2000)).training()
    pids = [status["pid"] for status in began.statuses()]
    for pid in (began.launcher(), *pids):
        os.kill(pid, signal.SIGTERM)
    assert "interrupted: " in (out := began.ended(130))
    assert "SIGTERM: the run was stopped after step" in out


def test_when_one_rank_is_killed(run, tmp_path):
    out = run(ranks("if rank == 1 and step == 3: os.kill(os.getpid(), 9)", steps=2000)).ended(5)
    assert "was killed by SIGKILL, last step 3, phase train" in out
    lost = json.loads((tmp_path / "run" / "logs" / "lost.json").read_text())
    assert (lost["ranks"], "was killed by SIGKILL" in lost["message"]) == ([1], True)
    assert lost["oom"] in (False, None), "nobody's memory ran out"


def test_a_supervisor_without_descriptors_waits_for_them_and_loses_no_rank(run):
    began = run(ranks(steps=2000)).training()
    number, limits = began.process.pid, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(number, resource.RLIMIT_NOFILE, (3, limits[1]))
    steps = began.statuses()[0]["step"]
    wait_until(lambda: began.statuses()[0]["step"] > steps + 40)
    assert began.process.poll() is None
    resource.prlimit(number, resource.RLIMIT_NOFILE, limits)
    os.kill(began.statuses()[1]["pid"], signal.SIGKILL)
    assert "was killed by SIGKILL" in began.ended(5)


@pytest.mark.slow
def test_a_kill_of_a_drill_is_told_as_one(run, tmp_path):
    strike = "(run / 'logs' / '.drilled').write_text('kill-rank 3'); os.kill(os.getpid(), 9)"
    out = run(ranks(f"if rank == 1 and step == 3: {strike}", steps=2000)).ended(5)
    assert "rank-lost: " in out
    assert "phase train: the drill's kill-rank did it" in out
    assert json.loads((tmp_path / "run" / "logs" / "lost.json").read_text())["oom"] is False


@pytest.mark.slow
def test_when_a_rank_is_killed_the_others_hang_and_the_launcher_is_stopped(run):
    """The worst of it: nobody hears anything any more."""
    each = "if step == 3: os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"
    began = run(ranks(each, early=DEAF), limits={"launcher_ends": 2.0, "all_gone": 4.0})
    wait_until(lambda: (began.folder / "run" / "launcher-pid").is_file())
    os.kill(began.launcher(), signal.SIGSTOP)
    out = began.ended(5)
    assert "rank 1 (pid" in out
    assert "was lost, last step 3, phase train" in out, "nobody could say how"


@pytest.mark.slow
def test_when_our_own_code_fails(run):
    out = run(ranks(steps=2000), broken=True).ended(1)
    assert "ValueError: our own code is wrong" in out
