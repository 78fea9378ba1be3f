"""What the supervisor writes and prints on a disk without room, and to a pipe that nobody reads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from launcher.cli import main
from launcher.execute import signals
from launcher.execute.log_file import LogFile, unwritable_by
from launcher.execute.signals import Stops, stopping_signals


def test_a_log_without_room_goes_on_where_there_is_room_again(tmp_path, monkeypatch):
    said, write = [], os.write
    with LogFile(tmp_path / "log", said.append) as log:
        log.line("first")
        room = [3]  # bytes, then none

        def full(descriptor, data):
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, room[0] = write(descriptor, data[: room[0]]), 0
            return written

        monkeypatch.setattr("launcher.execute.log_file.os.write", full)
        log.line("second")
        log.line("third")
        monkeypatch.undo()
        log.line("fourth")
        log.line("fifth")
    assert said == [
        f"{tmp_path / 'log'} cannot be written (No space left on device): the run goes on without it"
    ]
    missing = "==== 2 lines are missing: the disk took none ===="
    assert (tmp_path / "log").read_text() == f"first\nsec\n{missing}\nfourth\nfifth\n"


def test_a_log_that_cannot_be_opened_is_left_out(tmp_path):
    said = []
    with LogFile(tmp_path / "gone" / "log", said.append) as log:
        log.line("first")
    assert len(said) == 1


def test_a_folder_is_tried_without_leaving_anything(tmp_path):
    assert unwritable_by(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert unwritable_by(tmp_path / "gone") == "No such file or directory"


ENDS = """
import sys
from launcher.errors import Interrupted, Problem
from launcher.report.outcome import Outcome, echo, emit, emit_error, note
sys.stdin.readline()  # the reader is gone by then
for step in range(3):
    echo(f"step {step}")
    note("a word")
kind = sys.argv[1]
if kind == "stopped":
    sys.exit(emit_error("run", Interrupted(Problem("interrupted", "SIGTERM")), as_json=len(sys.argv) > 2))
data = {} if kind == "data" else {"run_dir": "x"}
sys.exit(emit("run", Outcome(data, "x" * 100_000), as_json=len(sys.argv) > 2))
"""


def ended(to: int, *words: str) -> tuple[int, bytes]:
    """Exit code of a process whose output goes to a descriptor, which is closed here before it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, *words], stdin=subprocess.PIPE, stdout=to, stderr=to
    )
    os.close(to)
    process.communicate(b"go\n", timeout=60)
    return process.returncode


@pytest.mark.parametrize(("kind", "code"), [("done", 0), ("data", 0), ("stopped", 130)])
@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_has_left_changes_no_exit_code(kind, code, as_json):
    reader, writer = os.pipe()
    os.close(reader)
    assert ended(writer, kind, *as_json) == code


@pytest.mark.parametrize(("kind", "code"), [("done", 0), ("data", 4), ("stopped", 130)])
def test_a_full_disk_under_the_output_hides_no_result(kind, code):
    assert ended(os.open("/dev/full", os.O_WRONLY), kind) == code


def test_a_command_that_is_piped_into_head_keeps_its_code(tmp_path):
    (tmp_path / "r.yaml").write_text("nonsense: 1\n")
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "launcher.cli", "validate", str(tmp_path / "r.yaml")]
    done = subprocess.run(argv, stdout=writer, stderr=writer, check=False, timeout=60)
    os.close(writer)
    assert done.returncode == main(["validate", str(tmp_path / "r.yaml")]) == 2


@pytest.mark.parametrize(
    ("first", "then", "pause_s", "at_once"),
    [
        (signal.SIGINT, signal.SIGINT, 0.0, False),
        (signal.SIGINT, signal.SIGINT, 0.3, True),
        (signal.SIGTERM, signal.SIGTERM, 0.0, False),
        (signal.SIGTERM, signal.SIGTERM, 0.3, True),
        (signal.SIGUSR1, signal.SIGTERM, 0.3, False),
        (signal.SIGHUP, signal.SIGTERM, 0.3, False),
        (signal.SIGHUP, signal.SIGHUP, 0.3, False),
        (signal.SIGHUP, signal.SIGINT, 0.3, True),
    ],
)
def test_what_comes_behind_the_first_signal(monkeypatch, first, then, pause_s, at_once):
    """Wrappers repeat a signal at once, a scheduler follows its warning up: neither is impatient."""
    clock = [0.0]
    monkeypatch.setattr(signals, "ECHO_S", 0.2)
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    with Stops() as stops:
        os.kill(os.getpid(), first)
        clock[0] += pause_s
        os.kill(os.getpid(), then)
    assert (stops.first, stops.at_once) == (first, at_once)


def test_a_hangup_that_nohup_ignores_is_left_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stopping_signals()
        with Stops() as stops:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert stops.first is None
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in stopping_signals()
