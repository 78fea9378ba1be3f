"""What a rank says of itself, and whether it is still there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from patience import patience, wait_until

from launcher.files.rank_status import (
    RankStatus,
    is_alive,
    process_started,
    read_stage,
    read_statuses,
    stage_file,
    status_file,
)
from launcher.train import status as writer
from launcher.train.status import Bar, Status


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def said(run_dir, rank=0) -> RankStatus:
    return read_statuses(run_dir)[rank]


def told(status, run_dir) -> RankStatus:
    """What the file has once the thread has written what this process knows."""
    status.flush(patience(60))
    return said(run_dir)


def test_every_phase_is_written_at_once(run_dir):
    began = time.time()
    status = Status(run_dir, 3)
    first = said(run_dir, 3)
    assert (first.rank, first.pid, first.host) == (3, os.getpid(), socket.gethostname())
    assert first.started == process_started(os.getpid())
    assert (first.phase, first.step, first.median, first.code) == ("start", 0, None, None)
    assert began - 1 <= first.since <= time.time() + 1, "rounded"
    for phase in ("load", "train"):
        status.enter(phase, step=7)
        assert (said(run_dir, 3).phase, said(run_dir, 3).step) == (phase, 7)
    with status.within("save"):
        assert said(run_dir, 3).phase == "save"
    assert said(run_dir, 3).phase == "train"
    status.end(143)
    assert (said(run_dir, 3).phase, said(run_dir, 3).code) == ("ended", 143)
    assert list((run_dir / "logs").iterdir()) == [status_file(run_dir, 3)], "nothing half-written stays"


def test_a_phase_that_fails_gives_the_outer_one_back(run_dir):
    status = Status(run_dir, 0)
    status.enter("train")
    with pytest.raises(ValueError, match="on purpose"), status.within("evaluate"):
        raise ValueError("on purpose")
    assert said(run_dir).phase == "train"


def test_steps_are_written_twice_a_second_at_most_and_their_median_is_told(run_dir, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    status = Status(run_dir, 0)
    status.enter("train", step=10)
    written = []
    for step in range(11, 17):
        now[0] += 0.2
        status.step_ended(step)
        written.append(told(status, run_dir).step)
    assert written == [10, 10, 13, 13, 13, 16]
    assert told(status, run_dir).median == pytest.approx(0.2)


def test_the_median_is_of_the_last_fifty_and_waits_for_three(run_dir, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    status = Status(run_dir, 0)
    for step, seconds in enumerate([9.0] * 60 + [1.0] * 50, 1):
        now[0] += seconds
        status.step_ended(step)
        if step in (2, 3):
            assert told(status, run_dir).median == (None if step == 2 else 9.0)
    assert told(status, run_dir).median == 1.0


def test_time_in_an_evaluation_counts_for_no_step(run_dir, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    status = Status(run_dir, 0)
    status.enter("train")
    for step in (1, 2, 3):
        now[0] += 1.0
        status.step_ended(step)
        with status.within("evaluate"):
            now[0] += 50.0
    assert said(run_dir).median == 1.0


def test_a_status_that_cannot_be_written_ends_nothing(run_dir):
    status = Status(run_dir, 0)
    (run_dir / "logs").rename(run_dir / "elsewhere")
    status.enter("train")
    status.end(0)
    assert not (run_dir / "logs").exists()


def test_what_is_no_status_is_left_out(run_dir):
    Status(run_dir, 1)
    good = asdict(said(run_dir, 1))
    for number, text in enumerate(["", "[]", "{", json.dumps({"rank": 2}), "null"], 2):
        status_file(run_dir, number).write_text(text)
    assert read_statuses(run_dir) == {1: RankStatus(**good)}
    assert read_statuses(run_dir / "nowhere") == {}


def test_a_process_lives_by_its_start_and_its_host(run_dir):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        started = process_started(child.pid)
        assert started is not None
        status = replace(_of_this(run_dir), pid=child.pid, started=started)
        assert is_alive(status)
        assert not is_alive(replace(status, started=started + 1)), "another process with its number"
        assert not is_alive(replace(status, host="elsewhere"))
        child.kill()
        wait_until(lambda: process_started(child.pid) is None, 60, "the end of the child")
        assert not is_alive(status), "it has ended, though nobody has asked for its code"
    finally:
        child.kill()
        child.wait()
    assert process_started(child.pid) is None


def _of_this(run_dir) -> RankStatus:
    Status(run_dir, 0)
    return said(run_dir)


def test_a_programs_name_may_hold_brackets_and_spaces(tmp_path):
    script = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) R 1 (b'); print(open('/proc/self/stat').read())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"{script}; sys.stdout.flush(); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert "(a) R 1 (b)" in line
        assert process_started(child.pid) == int(line.rpartition(") ")[2].split()[19])
    finally:
        child.communicate("", timeout=patience(60))


def test_how_far_a_long_step_is_is_written_twice_a_second_at_most(run_dir, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    status = Status(run_dir, 0)
    status.enter("load")
    written = []
    for done in range(1, 6):
        now[0] += 0.2
        status.show(Bar("Loading weights", done, 5))
        written.append(told(status, run_dir).done)
    assert written == [0, 0, 3, 3, 3]
    assert (said(run_dir).title, said(run_dir).total) == ("Loading weights", 5)
    status.show(None)
    last = told(status, run_dir)
    assert (last.title, last.done, last.total) == ("", 0, None), "at once"


def test_the_end_of_training_and_the_memory_are_told(run_dir):
    status = Status(run_dir, 0)
    assert (said(run_dir).steps, said(run_dir).memory) == (None, None)
    status.begin_training(4, 10, lambda: 77)
    found = said(run_dir)
    assert (found.phase, found.step, found.begun, found.steps, found.memory) == ("train", 4, 4, 10, 77)


def test_a_status_of_an_older_worker_is_one(run_dir):
    Status(run_dir, 0)
    values = json.loads(status_file(run_dir, 0).read_text())
    for name in ("steps", "begun", "memory", "title", "done", "total", "unit"):
        del values[name]
    status_file(run_dir, 0).write_text(json.dumps(values))
    assert (said(run_dir).steps, said(run_dir).title) == (None, "")


def test_a_process_that_is_no_rank_speaks_until_it_ends(run_dir):
    status = Status(run_dir, 0, "prepare")
    status.show(None)
    assert read_statuses(run_dir) == {}
    found = read_stage(run_dir, "prepare")
    assert found is not None
    assert found.phase == "start"
    values = json.loads(stage_file(run_dir, "prepare").read_text())
    stage_file(run_dir, "prepare").write_text(json.dumps({**values, "started": 1}))
    assert read_stage(run_dir, "prepare") is None, "what an ended one said"
    assert read_stage(run_dir, "convert") is None


def test_a_batch_that_ends_moves_the_bar_and_the_clock_at_once(run_dir):
    status = Status(run_dir, 0)
    status.enter("evaluate")
    before = read_statuses(run_dir)[0]
    status._written = 0.0
    time.sleep(0.01)
    status.moved(Bar("Evaluating", 1, 3, "batches"))
    after = told(status, run_dir)
    assert after.since > before.since, "else a long batch would look like a hang"
    assert (after.title, after.done, after.total) == ("Evaluating", 1, 3)


STEPS = """
import os, sys, threading
from pathlib import Path
from launcher.train.status import Status, start_status, status, status_of_stage

renamed = []
def note(event, found):
    if event == "os.rename":
        renamed.append(threading.current_thread().name)
sys.addaudithook(note)
run_dir = Path(sys.argv[1])
start_status(run_dir, 0).begin_training(0, 100, lambda: 1)
for step in range(1, 101):
    status()._written = 0.0  # as after half a second
    status().step_ended(step)
with status_of_stage(run_dir, "convert"):
    status().enter("load")
status().end(3)
child = os.fork()
if not child:  # as a dataloader's worker, which has no thread
    status().enter("train")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(*sorted(set(renamed)), 1 < len(renamed) <= 106)
"""


def test_a_thread_writes_and_a_fork_of_a_rank_does_not(run_dir):
    words = [sys.executable, "-c", STEPS, str(run_dir)]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root},
                          timeout=patience(120), check=False)  # fmt: skip
    assert (done.stdout, done.stderr) == ("status True\n", "")
    assert (said(run_dir).phase, said(run_dir).step, said(run_dir).code) == ("ended", 100, 3)
    assert list((run_dir / "logs").iterdir()) == [status_file(run_dir, 0)]


def test_a_slow_disk_holds_no_step_up(run_dir, monkeypatch):
    status = Status(run_dir, 0)
    is_free = threading.Event()
    monkeypatch.setattr(writer, "write_text", lambda file, text: is_free.wait(patience(60)) and text)
    monkeypatch.setattr(writer, "PHASE_S", 0.01)
    status.enter("train")
    for step in range(1, 4):
        status.step_ended(step)
    assert said(run_dir).phase == "start"
    monkeypatch.undo()
    is_free.set()
    status.moved()
    status._write()
    assert (told(status, run_dir).phase, said(run_dir).step) == ("train", 3)
