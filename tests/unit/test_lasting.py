"""What the supervisor writes and prints on a disk without room, and to a pipe that nobody reads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from patience import patience

from launcher.cli import main
from launcher.errors import Interrupted, Problem
from launcher.execute import signals
from launcher.execute.output import LogFile, unwritable_by
from launcher.execute.signals import Stops, ended_by_signals, stopping_signals
from launcher.files.checkpoint import sha256_of


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

        monkeypatch.setattr("launcher.execute.output.os.write", full)
        log.line("second")
        log.line("third")
        monkeypatch.undo()
        log.line("fourth")
        log.line("fifth")
    assert said == [
        f"{tmp_path / 'log'} cannot be written (No space left on device): the run continues without it"
    ]
    missing = "==== 2 lines are missing: the disk was full ===="
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
import threading
import time
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
    process.communicate(b"go\n", timeout=patience(120))
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
    done = subprocess.run(argv, stdout=writer, stderr=writer, check=False, timeout=patience(120))
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


def told_of(command) -> str:
    """What is told of a command that a signal ends."""
    with pytest.raises(Interrupted) as told, ended_by_signals():
        command()
    return told.value.problems[0].message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_command_is_ended_by_a_signal_wherever_it_is(number):
    def waits() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        time.sleep(3600)

    assert told_of(waits) == f"{number.name}: stopped while no rank was running"


def test_an_echo_of_the_signal_does_not_cut_the_cleaning_up_short():
    cleaned = []

    def cleans() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    assert "SIGUSR1" in told_of(cleans)
    assert cleaned == [True]


def test_a_stop_that_ranks_were_told_of_keeps_its_words():
    """The scheduler's SIGTERM behind its warning comes when the ranks have saved."""

    def saves() -> None:
        with Stops():
            os.kill(os.getpid(), signal.SIGUSR1)
        try:
            raise Interrupted(Problem("interrupted", "SIGUSR1: stopped with checkpoint-3"))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    assert told_of(saves) == "SIGUSR1: stopped with checkpoint-3"


def test_a_signal_ends_the_hashing_of_a_long_file(tmp_path):
    def hashes() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        sha256_of(tmp_path, ["weights.bin"])

    with (tmp_path / "weights.bin").open("wb") as stream:
        stream.truncate(2 << 40)  # a hole: more hashing than the test's timeout allows
    told_of(hashes)


def test_run_leaves_with_130_when_it_is_stopped_before_anything_runs(tmp_path):
    """The head waits for its members, and never had handlers of its own for that."""
    script = (
        "import os, signal, sys, time\n"
        "from launcher import cli\n"
        "from launcher.commands import run\n"
        "def planning(*args, **kwargs):\n"
        "    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    time.sleep(30)\n"
        "run.load_recipe = planning\n"
        "sys.exit(cli.main(['run', 'r.yaml']))\n"
    )
    for number in (signal.SIGTERM, signal.SIGUSR1):
        ended = subprocess.run(
            [sys.executable, "-c", script, str(int(number))], cwd=tmp_path, capture_output=True, text=True,
            timeout=patience(120), check=False,
        )  # fmt: skip
        assert ended.returncode == 130, ended.stderr
        assert f"{number.name}: stopped while no rank was running" in ended.stderr
