"""On one machine rank 0 prepares the data itself: who is told to, and what follows when that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import facts, recipe
from patience import patience
from supervised import bundle_of

from launcher.errors import RecipeError, RunFailed
from launcher.execute import attempts
from launcher.execute.attempts import run_attempts
from launcher.execute.run_dir import write_run_dir
from launcher.execute.supervise import Limits
from launcher.files.rank_status import PREPARED, PREPARES
from launcher.render.bundle import render
from launcher.render.command import WORKER
from launcher.train import prepare
from launcher.train.job import Job

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, os, pathlib, sys
sys.path.insert(0, ROOT)
from launcher.train.status import start_status
run = pathlib.Path(sys.argv[1])
tries = run / "tries"
before = tries.read_text().split() if tries.exists() else []
tries.write_text(" ".join([*before, os.environ["EFFILAUNCH_PREPARE"] or "0"]))
status = start_status(run, 0)
status.enter("prepare")
EACH
(run / "result.json").write_text("{}")
(run / "COMPLETED").touch()
status.end(0)
"""
KILL = "os.kill(os.getpid(), 9)"
MARK = "(run / 'logs' / 'prepared').touch(); "
REFUSE = """
problem = {"code": "x", "message": "no rows", "file": "a.jsonl", "line": 3, "path": None, "hint": "mend it"}
(run / "logs" / "error-prepare.json").write_text(json.dumps(
    {"rank": "prepare", "time": 1.0, "type": "RecipeError", "message": "no rows", "exit_code": 2,
     "problems": [problem]}))
status.end(2)
sys.exit(2)
"""
UNFORESEEN = """
(run / "logs" / "error-prepare.json").write_text(json.dumps(
    {"rank": "prepare", "time": 1.0, "type": "ValueError", "message": "odd", "exit_code": 1, "problems": []}))
status.end(1)
sys.exit(1)
"""


@pytest.fixture
def tried(tmp_path):
    """Runs a recipe with one restart whose only rank is a script; how often it was told to prepare."""

    def run(each: str, **given: object) -> list[str]:
        script = RANK.replace("ROOT", repr(str(ROOT))).replace("EACH", each)
        given = {"launch__max_restarts": 1, **given}
        bundle = bundle_of(tmp_path, script, **given)
        bundle = replace(
            bundle, prepare=render(bundle.plan).prepare, command=(*bundle.command, WORKER)
        )  # the rank prepares, as workers do
        write_run_dir(bundle, tmp_path / "run", resume=False)
        run_attempts(
            recipe(tmp_path, **given), facts("2xcpu"), bundle, tmp_path / "run", gpus=(), resume=None,
            say=lambda line: None, limits=Limits(leave=0.2), first_pause_s=0.1,
        )  # fmt: skip
        return (tmp_path / "run" / "tries").read_text().split()

    return run


def test_the_ranks_prepare_and_no_process_before_them(tried, tmp_path, monkeypatch):
    monkeypatch.setenv(PREPARES, "of the user's shell")
    assert tried("pass") == ["1"]
    assert not (tmp_path / "run" / "logs" / "prepare.log").exists()


@pytest.mark.parametrize(("mark", "told"), [(MARK, ["1", "0"]), ("", ["1", "1"])], ids=["done", "not done"])
def test_a_restart_prepares_only_what_the_try_before_it_has_not(tried, mark, told):
    # The phase is behind the preparation, so that the loss may pass.
    assert tried(f"status.enter('load')\nif not before: {mark}{KILL}") == told


def test_a_try_begins_with_its_data_unprepared(tried, tmp_path):
    """What an earlier command has prepared may have been of other rows."""
    logs = tmp_path / "run" / "logs"
    assert tried(f"assert not (run / 'logs' / {PREPARED!r}).exists()\n{MARK}") == ["1"]
    assert (logs / PREPARED).is_file()


def test_a_rank_that_dies_preparing_is_not_restarted(tried, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.execute.endings.has_killed", lambda *_: False)
    with pytest.raises(RunFailed, match="phase prepare: it prepared the data") as caught:
        tried(KILL)
    assert caught.value.problems[0].code == "prepare-failed"
    assert (tmp_path / "run" / "tries").read_text() == "1"


def test_data_that_does_not_fit_the_memory_of_a_rank_is_no_matter_of_the_batch(tried, monkeypatch):
    monkeypatch.setattr("launcher.execute.endings.has_killed", lambda *_: True)
    monkeypatch.setattr(attempts, "adapt", lambda *_, **__: pytest.fail("nothing to adapt"))
    with pytest.raises(RunFailed) as caught:
        tried(KILL, on_oom="adapt")
    assert caught.value.problems[0].code == "sigkill-oom"


def test_what_rank_0_says_of_the_data_is_the_error_of_the_run(tried):
    with pytest.raises(RecipeError, match=r"a\.jsonl:3: no rows"):
        tried(REFUSE)


def test_an_unforeseen_error_of_the_preparation_is_told_as_one(tried):
    with pytest.raises(RunFailed, match="the data could not be prepared: ValueError: odd") as caught:
        tried(UNFORESEEN)
    assert caught.value.problems[0].code == "prepare-failed"


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv(PREPARES, "1")
    return Job(tmp_path, {"settings": {}})


def test_rank_0_prepares_with_all_cores_and_a_log_of_its_own(job, monkeypatch, capsys):
    def prepared(_):
        sys.stdout.write(f"164 rows {os.environ['TOKENIZERS_PARALLELISM']} {PREPARES in os.environ}\n")

    monkeypatch.setattr(prepare, "prepare_run", prepared)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    prepare.prepare_in_ranks(job)
    assert (job.run_dir / "logs" / "prepare.log").read_text() == "164 rows true False\n"
    assert capsys.readouterr().out == "164 rows true False\n"
    assert (job.run_dir / "logs" / PREPARED).is_file()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    prepare.prepare_in_ranks(Job(Path("/nowhere"), {}))  # once


def test_the_other_ranks_wait_for_rank_0(job, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(prepare, "prepare_run", lambda _: pytest.fail("rank 0 does"))
    mark = job.run_dir / "logs" / PREPARED
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            mark.touch()

    monkeypatch.setattr(prepare, "time", SimpleNamespace(sleep=sleep))
    prepare.prepare_in_ranks(job)
    assert len(slept) == 3


UNWOUND = """
import os, signal, sys, time
sys.path.insert(0, ROOT)
from launcher.train import stopping

stopping.POLL_S = 0.1
stopping.watch(os.environ)
with stopping.unwinding():
    try:
        ASK
        time.sleep(3600)
    except Exception:
        sys.exit("no matter for who handles errors")
    finally:
        print("half a file removed", flush=True)
"""


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM before the first step"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", "SIGUSR1 before the first step"),
        ("pass", "the supervising process is gone before the first step"),
    ],
    ids=["SIGTERM", "SIGUSR1", "orphaned"],
)
def test_a_stop_unwinds_the_preparation_in_a_rank(ask, said):
    """Or half-written samples would stay in the cache."""
    import socket

    gone = {} if ask != "pass" else {"EFFILAUNCH_SUPERVISOR": f"{socket.gethostname()}:{2**22 + 1}:1"}
    script = UNWOUND.replace("ROOT", repr(str(ROOT))).replace("ASK", ask)
    command, environ = [sys.executable, "-c", script], {**os.environ, **gone}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), env=environ)
    assert (done.returncode, done.stdout) == (143, "half a file removed\n"), done.stderr
    assert said in done.stderr


def test_behind_the_preparation_a_stop_ends_the_rank_at_once():
    script = (
        UNWOUND.replace("ROOT", repr(str(ROOT)))
        .replace("ASK", "raise KeyError")
        .replace('sys.exit("no matter for who handles errors")', "pass")
    )
    script += "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(3600)\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 143, json.dumps(done.stderr)
