"""The output of running ranks in a terminal and in a file: small ranks with the real statuses."""

from __future__ import annotations

import contextlib

import pytest
from supervised import bundle_of, ranks
from terminal import terminal

from launcher.errors import RunFailed
from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import execute
from launcher.execute.supervise import Limits
from launcher.report.run_display import Screen, Showing

# The first rank loads for a while, and says how much of it.
LOADS = """
from launcher.train.status import Bar
for done in range(1, 9):
    if rank == 0:
        status().show(Bar("Loading weights", done, 8, ""))
    time.sleep(0.2)
if rank == 0:
    status().show(None)
"""


def run(folder, script, showing):
    bundle = bundle_of(folder, script)
    run_dir = folder / "run"
    write_run_dir(bundle, run_dir, resume=False)
    return execute(
        bundle, run_dir, gpus=(), master_port=29517, resume=None, echo=showing.say,
        limits=Limits(leave=0.2), look=showing.looking(run_dir)(bundle.plan),
    )  # fmt: skip


def test_a_terminal_shows_one_status_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal(110) as shown, contextlib.closing(Screen(shown.stream)) as screen:
        run(tmp_path, ranks("time.sleep(0.2)", early=LOADS), Showing(screen.line, screen))
        screen.line("done")
        screen.close()
        assert shown.end() == "ranks are started\ndone\n", "nothing is left of the line"
    bottom = [state.rpartition("\n")[2] for state in shown.states]
    assert any(line.startswith("Loading weights [") and "of 8" in line for line in bottom), bottom
    training = [line for line in bottom if line.startswith("step ")]
    assert any("/8 · loss 0." in line and "left · host 6.00 GiB of " in line for line in training), bottom
    assert all(state.startswith("ranks are started\n") for state in shown.states[1:])


def test_a_file_gets_a_line_for_each_row(tmp_path):
    said = []
    run(tmp_path, ranks("time.sleep(0.1)"), Showing(said.append))
    assert said[0] == "ranks are started"
    assert [line.partition(",")[0] for line in said[1:]] == [
        f"step {step}/8: loss {1 / step:.4g}" for step in range(1, 9)
    ]


def test_an_error_is_raised_after_the_status_line_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal(110) as shown:
        fails = "\nif step == 5 and rank == 1:\n    fail('broken')\ntime.sleep(0.2)"
        with pytest.raises(RunFailed), contextlib.closing(Screen(shown.stream)) as screen:
            run(tmp_path, ranks(fails), Showing(screen.line, screen))
        shown.stream.write("error: broken\n")
        last = shown.end()
    assert last.endswith("\nerror: broken\n")
    assert "step " not in last


def test_a_display_error_does_not_end_the_run(tmp_path):
    said = []

    def look(statuses):
        raise ValueError("a slip")

    bundle = bundle_of(tmp_path, ranks())
    write_run_dir(bundle, tmp_path / "run", resume=False)
    result = execute(
        bundle, tmp_path / "run", gpus=(), master_port=29517, resume=None, echo=said.append, look=look,
        limits=Limits(leave=0.2),
    )  # fmt: skip
    assert result == {"steps": 8}
    told = [line for line in said if "ValueError: a slip" in line]
    assert len(told) == 2, "once of the process that prepared the data, once of the ranks"
