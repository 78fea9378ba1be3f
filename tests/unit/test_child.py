"""Questions to a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from patience import patience

from launcher.machine.child import converse

CHILD = """
import sys, time
from launcher.machine.child import answer

def slow(request):
    print("begun", flush=True)
    time.sleep(60)

sys.exit(answer(slow))
"""


def test_ctrl_c_ends_it_without_a_traceback():
    """A terminal sends it to both processes; the parent tells the user."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        child.stdin.write("{}\n")
        child.stdin.flush()
        assert child.stderr.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(patience(60)) == 130
        assert (child.stdout.read(), child.stderr.read()) == ("", "")
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()


PARENT = """
import os, sys
from launcher.machine.child import converse
converse([sys.executable, "-c", sys.argv[1]], {}, os.environ)
"""
BUSY = """
import os, sys
from launcher.machine.child import read_request

read_request()
print(os.getpid(), file=sys.stderr, flush=True)
while True:
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number):
    """The end of the standard error that both hold is seen when the last of them has ended."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, BUSY], stderr=subprocess.PIPE, text=True)
    child = None
    try:
        child = int(parent.stderr.readline())
        parent.send_signal(number)
        assert parent.wait(patience(60)) == -number
        parent.communicate(timeout=patience(60))
        child = None
    finally:
        parent.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)


def test_what_waits_for_a_child_is_told_and_gives_up(tmp_path):
    told = []
    with pytest.raises(subprocess.TimeoutExpired):
        converse([sys.executable, "-c", "import time; time.sleep(600)"], {}, os.environ, limit_s=1.5,
                 waiting=told.append)  # fmt: skip
    assert told


def test_a_child_that_reads_no_request_ends_with_its_own_status():
    large = {"text": "x" * 2**20}
    done = converse([sys.executable, "-c", "raise SystemExit(7)"], large, os.environ)
    assert done.returncode == 7
