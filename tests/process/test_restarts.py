"""`launch.max_restarts`: a run that failed goes on by itself, from its last whole checkpoint."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from factories import facts, recipe
from supervised import bundle_of, ranks

from launcher.cli import main
from launcher.errors import Interrupted, MachineError, RecipeError, RunFailed
from launcher.execute import start
from launcher.execute.attempts import run_attempts
from launcher.execute.run_dir import (
    claimed,
    default_run_dir,
    locked,
    newest_run_dir,
    write_run_dir,
    written,
)
from launcher.execute.supervise import Limits

KILLED = "if rank == 1 and step == 4 and try_number < TIMES: os.kill(os.getpid(), 9)"
LIMITS = Limits(leave=0.2)


class Tried:
    """A recipe whose ranks are scripts, with restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, []
        self.run_dir = folder / "run"

    def run(self, script: str, restarts: int, limits: Limits = LIMITS, pause_s: float = 0.1) -> dict:
        given = {"launch__max_restarts": restarts, "launch__hang_factor": 2}
        loaded = recipe(self.folder, **given)
        bundle = bundle_of(self.folder, script, **given)
        write_run_dir(bundle, self.run_dir, resume=self.run_dir.exists())
        _, result = run_attempts(
            loaded, facts("2xcpu"), bundle, self.run_dir, gpus=(), resume=None, say=self.said.append,
            limits=limits, first_pause_s=pause_s,
        )  # fmt: skip
        return result

    @property
    def tries(self) -> list[str]:
        """What each was told to continue."""
        return [Path(word).name for word in (self.run_dir / "tries").read_text().split()]

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "restarts.jsonl").read_text().splitlines()]


@pytest.fixture
def tried(tmp_path):
    return Tried(tmp_path)


def test_a_killed_rank_is_restarted_from_the_last_whole_checkpoint(tried):
    result = tried.run(ranks(KILLED.replace("TIMES", "1")), 1)
    assert tried.tries == ["start", "checkpoint-3"]
    (row,) = tried.rows
    assert (row["step"], row["resumed_from"], row["waited_s"]) == (4, 3, 0.1)
    assert "rank 1 (pid" in row["cause"]
    assert "was killed by SIGKILL, last step 4, phase train" in row["cause"]
    assert result["restarts"] == [row]
    assert json.loads((tried.run_dir / "result.json").read_text()) == result
    said = "\n".join(tried.said)
    assert "restart 1 of 1 in 0.1 s: rank 1 (pid" in said
    assert "checkpoint-3 (step 3;" in said
    check_tries_are_told_apart(tried.run_dir)


def check_tries_are_told_apart(run_dir: Path) -> None:
    """In every log, and by their sizes where the second try began."""
    for name in ("launcher.log", "rank-0.log", "rank-1.log"):
        lines = (run_dir / "logs" / name).read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("====")]
        assert line.startswith("==== try 2, ")
        assert line.endswith(", from checkpoint-3 ====")
    bound = json.loads((run_dir / "environment.json").read_text())["bound"]
    launcher = (run_dir / "logs" / "launcher.log").read_text()
    assert launcher[bound["log_bytes"]["launcher.log"] :] == "ranks are started\n"


def test_a_damaged_checkpoint_is_passed_over(tried):
    damage = "(run / 'checkpoints' / 'checkpoint-4' / 'weights').write_text('x')"
    each = (
        f"if rank == 1 and step == 5 and try_number == 0: time.sleep(0.3); {damage}; os.kill(os.getpid(), 9)"
    )
    tried.run(ranks(each, saves=2), 1)
    assert tried.tries == ["start", "checkpoint-2"]
    assert any("checkpoint-4 is skipped: weights" in line for line in tried.said)


def test_without_being_asked_nothing_is_restarted(tried):
    with pytest.raises(RunFailed, match="was killed by SIGKILL"):
        tried.run(ranks(KILLED.replace("TIMES", "9")), 0)
    assert tried.tries == ["start"]
    assert not (tried.run_dir / "restarts.jsonl").exists()


def test_the_same_twice_at_the_same_step_is_not_tried_a_third_time(tried):
    with pytest.raises(RunFailed, match="twice in the same way at step 4") as caught:
        tried.run(ranks(KILLED.replace("TIMES", "9")), 5)
    assert tried.tries == ["start", "checkpoint-3"]
    assert "1 restart before, after: rank 1 (pid" in str(caught.value)
    assert caught.value.problems[0].code == "rank-lost"


@pytest.mark.slow
def test_restarts_that_make_no_progress_are_used_up(tried):
    """It dies in another way than before each time, and before the next checkpoint."""
    each = "if rank == 1 and step == 3: os.kill(os.getpid(), 9) if try_number != 1 else fail('a bug')"
    with pytest.raises(RunFailed, match=r"launch\.max_restarts: 2 is used up; 2 restarts before"):
        tried.run(ranks(each, saves=100), 2)
    assert tried.tries == ["start", "start", "start"]
    assert [row["waited_s"] for row in tried.rows] == [0.1, 0.2]


def test_a_new_checkpoint_counts_anew(tried):
    """Two kills, one restart allowed: each came after a checkpoint more."""
    when = "rank == 1 and try_number < 2 and step == 2 * try_number + 3"
    each = f"if {when}: time.sleep(0.3); os.kill(os.getpid(), 9)"
    result = tried.run(ranks(each, saves=2), 1)
    assert tried.tries == ["start", "checkpoint-2", "checkpoint-4"]
    assert [row["resumed_from"] for row in result["restarts"]] == [2, 4]
    assert [row["waited_s"] for row in tried.rows] == [0.1, 0.1]


def test_what_is_bound_to_fail_again_is_not_restarted(tried):
    what = "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB"
    with pytest.raises(RunFailed, match="CUDA out of memory") as caught:
        tried.run(ranks(f"if rank == 1 and step == 2: fail({what!r})"), 3)
    assert caught.value.problems[0].code == "cuda-oom"
    assert tried.tries == ["start"]


def test_a_signal_ends_the_pause(tried):
    def strike() -> None:
        while not any("restart 1 of 1 in" in line for line in tried.said):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    with pytest.raises(
        Interrupted, match="SIGTERM: stopped while it waited to restart; it had failed: rank 1"
    ):
        tried.run(ranks(KILLED.replace("TIMES", "9")), 1, pause_s=300.0)
    thread.join()
    assert tried.tries == ["start"]


def test_a_hang_is_ended_with_the_rank_that_is_behind_and_restarted(tried):
    """Rank 1 never comes to the step that rank 0 is in; it says that it has taken one step less."""
    each = """if step == 4 and try_number == 0 and rank == 1:
    status().enter("train", step=3)
    time.sleep(600)"""
    patient = Limits(step=2.0, first_steps=2.0, finish=2.0, leave=0.2)
    result = tried.run(ranks(each), 1, limits=patient)
    (row,) = result["restarts"]
    assert row["cause"].startswith("no progress for ")
    assert "rank 1 is behind, after step 3, in <module> (<string>" in row["cause"]
    assert "rank 0 is in meet (<string>" in row["cause"]
    assert tried.tries == ["start", "checkpoint-3"]
    assert "Current thread" in (tried.run_dir / "logs" / "rank-1.log").read_text()


@pytest.mark.slow
def test_a_rank_that_a_signal_has_stopped_is_named_with_its_state(tried, monkeypatch):
    """It is in the same step as the other one, and writes no calls."""
    monkeypatch.setattr("launcher.execute.following._STACKS_S", 2.0)
    each = "if step == 4 and try_number == 0 and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    patient = Limits(step=2.0, first_steps=2.0, finish=2.0, leave=0.2)
    with pytest.raises(RunFailed) as caught:
        tried.run(ranks(each), 0, limits=patient)
    (problem,) = caught.value.problems
    assert (problem.code, Path(problem.file).name) == ("hang", "rank-1.log")
    assert re.search(r"rank 1 \(pid \d+\) is stopped by a signal \(state T ", problem.message)
    assert "rank 0 is in meet (<string>" in problem.message


@pytest.mark.slow
def test_ranks_that_cannot_write_what_they_do_are_not_taken_for_hanging(tried, monkeypatch):
    monkeypatch.setattr("launcher.execute.following.unwritable_by", lambda folder: "No space left on device")
    tried.run(ranks("if step == 4: time.sleep(4)"), 0, limits=Limits(step=1.0, first_steps=1.0, leave=0.2))
    (said,) = [line for line in tried.said if "not a hang" in line]
    assert "nothing can be written (No space left on device)" in said


@pytest.mark.slow
def test_a_rank_that_could_not_say_that_it_ended_does_not_end_the_others(tried, monkeypatch):
    """Rank 1 has nothing more to do; rank 0 writes the result."""
    monkeypatch.setattr("launcher.execute.following.unwritable_by", lambda folder: "No space left on device")
    each = """if step == 7:
    if rank == 1:
        (run / f"at-{try_number}-{step}-1").touch()
        os._exit(0)
    time.sleep(3)"""
    patient = Limits(launcher_ends=0.5, all_gone=1.0, leave=0.2)
    assert tried.run(ranks(each), 0, limits=patient)["steps"] == 8
    assert any("its launcher knows whether a rank is lost" in line for line in tried.said)


def test_a_second_run_in_the_same_directory_is_refused(tried, tmp_path):
    tried.run(ranks(), 0)
    bundle = bundle_of(tmp_path, ranks())
    holder = os.fork()
    if holder == 0:
        with locked(tried.run_dir):
            time.sleep(60)
        os._exit(0)
    try:
        lock = tried.run_dir / ".lock"
        while lock.read_text().split()[:1] != [str(holder)]:
            time.sleep(0.05)
        plan = (tried.run_dir / "plan.json").read_text()
        with pytest.raises(RecipeError, match=f"is in use by process {holder}") as caught:
            write_run_dir(bundle, tried.run_dir, resume=True)
        assert caught.value.problems[0].code == "run-dir-in-use"
        assert (tried.run_dir / "plan.json").read_text() == plan
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    write_run_dir(bundle, tried.run_dir, resume=True)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_full_disk_loses_neither_the_restart_nor_the_result(tried, monkeypatch):
    monkeypatch.setattr("launcher.execute.attempts.RESTARTS", "gone/restarts.jsonl")
    monkeypatch.setattr("launcher.execute.attempts.write_text", full)
    result = tried.run(ranks(KILLED.replace("TIMES", "1")), 1)
    assert tried.tries == ["start", "checkpoint-3"]
    assert [row["resumed_from"] for row in result["restarts"]] == [3]
    assert json.loads((tried.run_dir / "result.json").read_text()) == {"steps": 8}
    said = "\n".join(tried.said)
    assert "restarts.jsonl cannot be written" in said
    assert "result.json cannot be written (No space left on device)" in said


@pytest.mark.slow
def test_a_try_that_the_disk_does_not_let_begin_is_told_with_what_failed_before(tried, monkeypatch):
    """Without its own sizes of the logs, an earlier try's errors would be taken for those of the next."""
    record, times = start.record_bound, []

    def once(*given: object) -> None:
        times.append(1)
        record(*given) if len(times) == 1 else full()

    monkeypatch.setattr("launcher.execute.start.record_bound", once)
    with pytest.raises(RunFailed, match="No space left on device") as caught:
        tried.run(ranks(KILLED.replace("TIMES", "9")), 3)
    problem = caught.value.problems[0]
    assert (problem.code, caught.value.exit_code) == ("disk-full", 5)
    assert problem.message.count("was killed by SIGKILL, last step 4") == 1
    assert "--resume auto" in problem.hint
    assert tried.tries == ["start"]
    monkeypatch.setattr("launcher.execute.start.record_bound", full)
    with pytest.raises(MachineError, match="cannot write the run directory") as caught:
        tried.run(ranks(), 0)
    assert caught.value.exit_code == 4


def test_starts_of_the_same_second_get_a_directory_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proposed = default_run_dir("r.yaml", tmp_path)
    together = threading.Barrier(8)

    def claim(_: int) -> Path:
        together.wait()
        return claimed(proposed)

    with ThreadPoolExecutor(8) as pool:
        names = sorted(path.name for path in pool.map(claim, range(8)))
    assert names == sorted([proposed.name, *(f"{proposed.name}-{number}" for number in range(2, 9))])
    assert all((proposed.parent / name).is_dir() for name in names)


def test_a_run_whose_name_was_taken_meanwhile_takes_the_next(tmp_path, monkeypatch, root):
    """Another start makes its folder between this one's look and its first file."""
    monkeypatch.chdir(tmp_path)
    proposed = tmp_path / "runs" / "smoke" / "20260101T000000Z"
    monkeypatch.setattr("launcher.execute.start_point.default_run_dir", lambda *_: proposed)
    (proposed / "logs").mkdir(parents=True)
    assert main(["run", str(root / "recipes" / "smoke.yaml"), "--on", "cpu", "--tiny", "--dry-run"]) == 0
    assert (proposed.parent / f"{proposed.name}-2" / "plan.json").is_file()
    assert [path.name for path in proposed.iterdir()] == ["logs"]


def test_a_holder_with_the_same_number_elsewhere_is_not_taken_for_this_process(tried, tmp_path):
    """As in two containers, where every run may be process 7; the lock file of a dead one may say so, too."""
    tried.run(ranks(), 0)
    lock = tried.run_dir / ".lock"
    bundle = bundle_of(tmp_path, ranks(), trainer__max_steps=99)
    with lock.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        plan = (tried.run_dir / "plan.json").read_text()
        lock.write_text(f"{os.getpid()} another-host\n")
        with pytest.raises(RecipeError, match=f"is in use by process {os.getpid()} on another-host"):
            write_run_dir(bundle, tried.run_dir, resume=True)
        assert (tried.run_dir / "plan.json").read_text() == plan
    write_run_dir(bundle, tried.run_dir, resume=True)


def test_a_folder_of_somebody_else_gets_no_lock(tmp_path):
    bundle = bundle_of(tmp_path, "")
    with pytest.raises(RecipeError, match="is not empty"), written(bundle.files, tmp_path, resume=False):
        pass
    assert not (tmp_path / ".lock").exists()


HOLD = """
import sys
from pathlib import Path
from launcher.execute.run_dir import locked
with locked(Path(sys.argv[1])):
    pass
"""


def test_what_is_written_is_held(tmp_path):
    """From the first file on: a second start would give this run its own plan."""
    run_dir = tmp_path / "run"
    with written(bundle_of(tmp_path, "").files, run_dir, resume=False):
        argv = [sys.executable, "-c", HOLD, str(run_dir)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert f"in use by process {os.getpid()}" in done.stderr


def test_a_dry_run_does_not_hide_the_run_that_is_to_go_on(tmp_path):
    for name, log in (("1", "rank-0.log"), ("2", "prepare.log"), ("3", None)):
        folder = tmp_path / "runs" / "r" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "plan.json").touch()
        if log is not None:
            (folder / "logs" / log).touch()
    assert newest_run_dir("r.yaml", tmp_path).name == "2"
    shutil.rmtree(tmp_path / "runs" / "r" / "1")
    shutil.rmtree(tmp_path / "runs" / "r" / "2")
    assert newest_run_dir("r.yaml", tmp_path).name == "3"


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("launcher.execute.run_dir.fcntl.flock", refuse)
    with locked(tmp_path / "run"), locked(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text().split()[0] == str(os.getpid())
