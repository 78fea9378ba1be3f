"""Execution with real processes: true outcomes, no orphans, resume only of the same run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from factories import plan
from machines import gpus

from launcher.errors import Interrupted, MachineError, RecipeError, RunFailed
from launcher.execute import start as starting
from launcher.execute.attempts import may_pass
from launcher.execute.endings import push_failure
from launcher.execute.following import follow
from launcher.execute.leftovers import SHARED_MEMORY
from launcher.execute.resume import Chosen
from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import execute
from launcher.execute.start_point import Beginning, finished_result
from launcher.render.bundle import render

PREPARED = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'data.json').write_text('{}')"


def started(tmp_path, script, prepare=PREPARED, **overrides):
    """Execute a bundle whose two commands are small Python scripts."""
    bundle = replace(
        render(plan(tmp_path, "1xA100-80GB", **overrides)),
        prepare=(sys.executable, "-c", prepare, "{run_dir}"),
        command=(sys.executable, "-c", script, "{run_dir}"),
    )
    run_dir = tmp_path / "run"
    write_run_dir(bundle, run_dir, resume=False)
    lines: list[str] = []
    result = execute(bundle, run_dir, gpus=gpus(count=1), master_port=29511, resume=None, echo=lines.append)
    return result, lines


DONE = """
import json, os, pathlib, sys
d = pathlib.Path(sys.argv[1])
print("hello from", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
(d / "result.json").write_text(json.dumps({"steps": 3}))
(d / "COMPLETED").write_text("")
"""


def test_a_completed_run_returns_its_result(tmp_path):
    result, lines = started(tmp_path, DONE)
    assert result == {"steps": 3}
    assert lines == ["hello from 0"]
    log = tmp_path / "run" / "logs" / "launcher.log"
    assert log.read_text() == "hello from 0\n"
    bound = json.loads((tmp_path / "run" / "environment.json").read_text())["bound"]
    assert (bound["devices"], bound["master_port"]) == ("0", "29511")


SAY_PORT = "print('port {master_port}', flush=True)" + DONE


def test_a_port_that_was_taken_meanwhile_is_chosen_anew(tmp_path):
    """While data was prepared, and at an address that other machines reach."""
    with socket.create_server(("127.0.0.2", 29511)):
        _, lines = started(tmp_path, SAY_PORT)
    bound = json.loads((tmp_path / "run" / "environment.json").read_text())["bound"]
    assert bound["master_port"] not in ("29511", "0")
    assert lines[0] == f"port {bound['master_port']}"
    assert bound["devices"] == "0"
    assert "log_bytes" in bound


FIND_BUFFER = """
import pathlib, sys
buffer = pathlib.Path(BUFFER)
print("found" if buffer.exists() else "absent", flush=True)
buffer.touch()
sys.exit(1)
"""


def test_deepspeeds_buffers_of_a_killed_run_are_gone_before_the_next_and_after_it(tmp_path):
    buffer = SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29511_0"
    buffer.touch()
    with pytest.raises(RunFailed):
        started(tmp_path, FIND_BUFFER.replace("BUFFER", repr(str(buffer))))
    assert (tmp_path / "run" / "logs" / "launcher.log").read_text() == "absent\n"
    assert not buffer.exists()


UNREADABLE = """
import json, pathlib, sys
problem = {"code": "x", "message": "no rows", "file": "a.jsonl", "line": 3, "path": None, "hint": "mend it"}
(pathlib.Path(sys.argv[1]) / "logs" / "error-prepare.json").write_text(json.dumps(
    {"rank": "prepare", "time": 1.0, "type": "RecipeError", "message": "no rows", "exit_code": CODE,
     "problems": [problem]}))
sys.exit(CODE)
"""


@pytest.mark.parametrize(("code", "kind"), [(2, RecipeError), (4, MachineError), (5, RunFailed)])
def test_data_that_cannot_be_prepared_starts_no_rank(tmp_path, code, kind):
    with pytest.raises(kind, match=r"a\.jsonl:3: no rows"):
        started(tmp_path, DONE, prepare=UNREADABLE.replace("CODE", str(code)))
    assert not (tmp_path / "run" / "COMPLETED").exists()
    assert not (tmp_path / "run" / "logs" / "launcher.log").exists()


def test_a_preparation_that_leaves_nothing_is_a_failure(tmp_path):
    with pytest.raises(RunFailed, match="although its launcher reported success") as caught:
        started(tmp_path, DONE, prepare="import sys; sys.exit(0)")
    assert caught.value.problems[0].file.endswith("prepare.log")


@pytest.mark.parametrize(
    ("ends", "how"), [("sys.exit(143)", "exit code 143"), ("os.abort()", r"signal 6 \(SIGABRT\)")]
)
def test_a_preparation_that_dies_is_not_restarted_without_it(tmp_path, monkeypatch, ends, how):
    given = []

    def noted(start, *rest):
        given.append(start)
        return follow(start, *rest)

    monkeypatch.setattr(starting, "follow", noted)
    with pytest.raises(RunFailed, match=f"{how} while it prepared the data") as caught:
        started(tmp_path, DONE, prepare=f"import os, sys; {ends}")
    assert caught.value.problems[0].code == "prepare-failed"
    assert not may_pass(caught.value)
    assert given[0].orphaned_s == starting.PREPARE_STOP_S, "it unwinds, too, when this process is killed"


@pytest.mark.parametrize(
    ("oom", "code"), [("read", "prepare-failed"), (None, "prepare-failed"), (True, "sigkill-oom")]
)
def test_a_killed_preparation_is_told_by_the_kernels_counters(tmp_path, monkeypatch, oom, code):
    """Read: those of this machine, whose OOM killer did nothing here."""
    if oom != "read":
        monkeypatch.setattr(starting, "has_killed", lambda *_: oom)
    with pytest.raises(RunFailed, match=r"signal 9 \(SIGKILL\) while it prepared the data") as caught:
        started(tmp_path, DONE, prepare="import os; os.kill(os.getpid(), 9)")
    (problem,) = caught.value.problems
    assert problem.code == code
    assert ("no counter" in problem.message) == (oom is None)


def test_exit_0_without_the_marker_is_a_failure(tmp_path):
    with pytest.raises(RunFailed, match="although its launcher reported success"):
        started(tmp_path, "print('all good')")


def test_death_by_signal_is_named(tmp_path):
    with pytest.raises(RunFailed, match="by signal 9") as caught:
        started(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert caught.value.problems[0].code == "run-failed", "nothing says that memory ran out"


FAILED = """
import json, pathlib, sys
logs = pathlib.Path(sys.argv[1]) / "logs"
for rank, when, what in ((0, 2.0, "consequence"), (1, 1.0, "the cause")):
    (logs / f"error-rank-{rank}.json").write_text(json.dumps(
        {"rank": rank, "time": when, "type": "ValueError", "message": what}))
sys.exit(1)
"""


def test_the_first_failing_rank_is_reported(tmp_path):
    with pytest.raises(RunFailed, match="rank 1 failed first: ValueError: the cause"):
        started(tmp_path, FAILED)


BAD_DATA = """
import json, pathlib, sys
problem = {"code": "data-empty", "message": "no rows", "file": "x.jsonl",
           "line": None, "path": None, "hint": None}
(pathlib.Path(sys.argv[1]) / "logs" / "error-rank-0.json").write_text(json.dumps(
    {"rank": 0, "time": 1.0, "type": "RecipeError", "message": "no rows",
     "exit_code": 2, "problems": [problem]}))
sys.exit(2)
"""


def test_a_workers_recipe_error_keeps_its_exit_code(tmp_path):
    with pytest.raises(RecipeError, match=r"x\.jsonl: no rows") as caught:
        started(tmp_path, BAD_DATA)
    assert caught.value.exit_code == 2


def test_a_result_that_was_not_pushed_is_a_failure_of_a_finished_run(tmp_path):
    unpushed = BAD_DATA.replace("data-empty", "push-failed").replace('"exit_code": 2', '"exit_code": 5')
    with pytest.raises(RunFailed) as caught:
        started(tmp_path, DONE + unpushed)
    assert (caught.value.problems[0].code, caught.value.exit_code) == ("push-failed", 5)
    assert (tmp_path / "run" / "COMPLETED").is_file()
    said: list[str] = []
    begins = Beginning(tmp_path / "run", Chosen(None), takes_newest=True)
    bundle = render(plan(tmp_path, "1xA100-80GB"))
    assert finished_result(begins, bundle, said.append) == {"steps": 3}
    assert len(said) == 2, "what is left to do"
    for error in (tmp_path / "run" / "logs").glob("error-*.json"):
        error.unlink()
    assert push_failure(tmp_path / "run") is None
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / ".pushing" / "checkpoint-2").mkdir(parents=True)  # killed meanwhile
    assert shlex.quote(str(tmp_path / "run" / "model")) in push_failure(tmp_path / "run").problems[0].hint
    (tmp_path / "run" / ".pushing" / "adapter-weights").mkdir()
    assert "adapter-weights" in push_failure(tmp_path / "run").problems[0].hint


ORPHANS = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
(pathlib.Path(sys.argv[1]) / "child").write_text(str(child.pid))
"""


def alive(pid: int) -> bool:
    """False for a process that is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_no_orphan_survives_a_failed_run(tmp_path):
    script = ORPHANS.replace(
        'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])',
        'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], '
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
    )
    with pytest.raises(RunFailed):
        started(tmp_path, script)
    assert not alive(int((tmp_path / "run" / "child").read_text()))


STUBBORN = """
import pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
(pathlib.Path(sys.argv[1]) / "child").write_text(str(child.pid))
print("up", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_whole_group(tmp_path, number, monkeypatch):
    monkeypatch.setattr(starting, "LEAST_STOP_S", 3600.0)  # a run that waits for it meets the test's timeout

    def strike():
        target = tmp_path / "run" / "child"
        while not (target.exists() and target.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(Interrupted, match="--resume auto"):
        started(tmp_path, STUBBORN)
    assert not alive(int((tmp_path / "run" / "child").read_text()))


def test_a_run_is_written_over_only_where_it_is_continued(tmp_path):
    first = render(plan(tmp_path, "1xA100-80GB"))
    run_dir = tmp_path / "run"
    write_run_dir(first, run_dir, resume=False)
    longer = render(plan(tmp_path, "1xA100-80GB", trainer__max_steps=20))
    with pytest.raises(RecipeError, match="is not empty"):
        write_run_dir(longer, run_dir, resume=False)
    write_run_dir(longer, run_dir, resume=True)
    assert json.loads((run_dir / "plan.json").read_text())["schedule"]["steps"] == 20


def test_a_folder_of_somebody_else_is_no_run_to_continue(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "mine.txt").write_text("precious")
    bundle = render(plan(tmp_path, "1xA100-80GB"))
    with pytest.raises(RecipeError, match="is not empty"):
        write_run_dir(bundle, run_dir, resume=True)
    assert [path.name for path in run_dir.iterdir()] == ["mine.txt"]
    (run_dir / "mine.txt").unlink()
    (run_dir / "logs").mkdir()  # as a start that was killed at once leaves it
    write_run_dir(bundle, run_dir, resume=True)
    assert (run_dir / "plan.json").is_file()


def test_progress_bars_leave_their_last_state(tmp_path):
    script = DONE + r'print("1%\r50%\r100%", flush=True)' + "\n"
    _, lines = started(tmp_path, script)
    assert lines == ["hello from 0", "100%"]
