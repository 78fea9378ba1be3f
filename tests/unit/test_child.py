"""Questions to a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

from patience import patience

CHILD = """
import sys, time
from launcher.facts.child import answer

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
        child.stdin.write("{}")
        child.stdin.close()
        assert child.stderr.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(patience(60)) == 130
        assert (child.stdout.read(), child.stderr.read()) == ("", "")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
