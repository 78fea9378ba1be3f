"""What a worker's handlers and watches do, in small processes that load nothing heavy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from patience import patience

from launcher.execute import processes
from launcher.files.rank_status import RankStatus, process_started, read_statuses

BEGIN = """
import ctypes, os, pathlib, signal, sys, time
from launcher.train import stopping
from launcher.train.status import start_status
start_status(pathlib.Path(sys.argv[1]), 0)
stopping.POLL_S = 0.2
def wait_in_c():
    # A lock taken twice: the main thread never comes back, and no signal wakes it, as in a collective.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


class Small:
    """A process that runs a script, and what it says on the way."""

    def __init__(self, folder, script: str, **env: str) -> None:
        (folder / "logs").mkdir(exist_ok=True)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + script, str(folder)],
            env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def ended(self) -> tuple[int, str]:
        """(code, stderr)"""
        _, said = self.process.communicate(timeout=patience(60))
        return self.process.returncode, said


@pytest.fixture
def supervisor():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def named(process) -> str:
    return f"{socket.gethostname()}:{process.pid}:{process_started(process.pid)}"


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_before_the_first_step_a_rank_leaves_at_once_even_out_of_a_collective(kind, tmp_path):
    small = Small(tmp_path, "stopping.watch(os.environ); print('ready', flush=True); wait_in_c()")
    small.process.send_signal(kind)
    code, said = small.ended()
    assert code == 143
    assert f"{kind.name} before the first step" in said
    assert (read_statuses(tmp_path)[0].phase, read_statuses(tmp_path)[0].code) == ("ended", 143)


def test_in_training_signals_are_noted_and_the_first_one_counts(tmp_path):
    script = """
stopping.watch(os.environ)
stopping.stop.at_once = False
print("ready", flush=True)
while not stopping.stop.number:
    time.sleep(0.01)
first = stopping.stop.seconds
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.5)
sys.stderr.write(f"{stopping.cause(stopping.stop.number)} {stopping.stop.seconds - first >= 0.5}")
"""
    small = Small(tmp_path, script)
    small.process.send_signal(signal.SIGTERM)
    assert small.ended() == (0, "SIGTERM True")


def test_forked_children_outlive_the_signals_of_the_group_but_not_their_parents_terminate(tmp_path):
    script = """
stopping.watch(os.environ)
stopping.stop.at_once = False
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"x")
    time.sleep(3600)
    os._exit(0)
os.read(reader, 1)
print("ready", flush=True)
for number in (signal.SIGUSR1, signal.SIGINT):
    os.kill(child, number)
time.sleep(0.5)
alive = os.waitpid(child, os.WNOHANG) == (0, 0)
noted = stopping.stop.number  # a child's signal is not its parent's
os.kill(child, signal.SIGTERM)
sys.stderr.write(f"{alive} {noted} {os.WTERMSIG(os.waitpid(child, 0)[1])}")
"""
    assert Small(tmp_path, script).ended() == (0, f"True 0 {int(signal.SIGTERM)}")


def test_an_orphan_is_asked_to_stop_and_leaves_when_its_time_is_over(tmp_path, supervisor):
    script = """
stopping.ORPHAN_S = 1.5
stopping.watch(os.environ)
stopping.stop.at_once = False
print("ready", flush=True)
wait_in_c()
"""
    small = Small(tmp_path, script, EFFILAUNCH_SUPERVISOR=named(supervisor))
    time.sleep(0.6)
    assert small.process.poll() is None, "its supervisor lives"
    begun = time.monotonic()
    supervisor.kill()
    code, said = small.ended()
    assert (code, time.monotonic() - begun > 1.5) == (143, True)
    assert "leaving without a checkpoint" in said


def test_an_orphan_whose_steps_are_long_has_two_of_them_more(tmp_path, supervisor):
    script = """
from launcher.train.status import status
stopping.ORPHAN_S = 0.2
stopping.watch(os.environ)
stopping.stop.at_once = False
status()._median = 1.5
print("ready", flush=True)
wait_in_c()
"""
    small = Small(tmp_path, script, EFFILAUNCH_SUPERVISOR=named(supervisor))
    begun = time.monotonic()
    supervisor.kill()
    code, said = small.ended()
    assert (code, time.monotonic() - begun > 3.2) == (143, True)
    assert "since 3 s: leaving without a checkpoint" in said


def test_a_guard_leaves_ranks_two_steps_to_save(tmp_path, monkeypatch):
    own = RankStatus(
        0, socket.gethostname(), os.getpid(), process_started(os.getpid()), "train", 3, 0.0, 0.5, None
    )
    monkeypatch.setattr(processes, "processes_of", lambda token: {1})
    monkeypatch.setattr(processes, "read_statuses", lambda run_dir: {0: own})
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(processes, "time", clock)
    processes._leave_time("token", tmp_path, 0.0)
    assert 1.0 < sum(slept) <= 1.0 + processes._GUARD_POLL_S


def test_a_supervisor_that_is_not_of_this_machine_is_not_watched(tmp_path, supervisor):
    elsewhere = named(supervisor).replace(socket.gethostname(), "elsewhere")
    script = "stopping.watch(os.environ); print('ready', flush=True); time.sleep(1.0)"
    supervisor.kill()
    for named_so in (elsewhere, "", "nonsense", ":::"):
        assert Small(tmp_path, script, EFFILAUNCH_SUPERVISOR=named_so).ended()[0] == 0


def test_what_prepares_the_data_unwinds_when_its_supervisor_is_gone(tmp_path, supervisor):
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
stopping.end_with_supervisor(os.environ)
print("ready", flush=True)
try:
    time.sleep(3600)
finally:
    sys.stderr.write("unwound")
"""
    small = Small(tmp_path, script, EFFILAUNCH_SUPERVISOR=named(supervisor))
    supervisor.kill()
    code, said = small.ended()
    assert code == 143
    assert said.endswith("unwound")
