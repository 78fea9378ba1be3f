"""What a stopped job asks of Slurm: which number, and how often where Slurm is silent."""

from __future__ import annotations

import json

import pytest

from launcher.schedulers import slurm_queue, slurm_requeue
from launcher.schedulers.slurm_queue import Answer

ARRAY = (
    "JobId=22 ArrayJobId=21 ArrayTaskId=0 JobName=r JobState=RUNNING Restarts=0 ExitCode=0:0 "
    "StartTime=2026-01-01T10:00:00 PreemptTime=None\n"
    "JobId=21 ArrayJobId=21 ArrayTaskId=1 JobName=r JobState=RUNNING Restarts=0 ExitCode=0:0 "
    "StartTime=2026-01-01T10:00:00 PreemptTime=2026-01-01T11:00:00"
)


@pytest.fixture
def slurm(monkeypatch):
    """Answers from a list, the last one again and again; what was asked."""
    asked: list[tuple[str, ...]] = []
    answers = {"show": [Answer(0, ARRAY, "")], "requeue": [Answer(0, "", "")]}

    def ask(*words, **_):
        asked.append(words)
        given = answers["requeue" if words[1] == "requeue" else "show"]
        return given.pop(0) if len(given) > 1 else given[0]

    monkeypatch.setattr(slurm_queue, "ask", ask)
    monkeypatch.setattr(slurm_requeue, "ask", ask)
    monkeypatch.setattr(slurm_queue.shutil, "which", lambda name: None)
    for name, value in (("JOB_ID", "21"), ("ARRAY_JOB_ID", "21"), ("ARRAY_TASK_ID", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    return asked, answers


def test_one_task_of_an_array_requeues_itself_alone(slurm, tmp_path, capsys):
    asked, _ = slurm
    slurm_requeue.main([str(tmp_path)])
    assert [words for words in asked if words[1] == "requeue"] == [("scontrol", "requeue", "21_1")]
    assert json.loads((tmp_path / "requeues.jsonl").read_text())["job"] == "21_1"
    assert "requeued: the job was preempted" in capsys.readouterr().out


SILENT = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
GONE = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")


def clock(monkeypatch) -> list[float]:
    """A clock that only sleeping moves."""
    slept = [0.0]
    monkeypatch.setattr(slurm_requeue.time, "sleep", lambda seconds: slept.append(slept[-1] + seconds))
    monkeypatch.setattr(slurm_requeue.time, "monotonic", lambda: slept[-1])
    return slept


def test_a_silent_controller_is_asked_again(slurm, tmp_path, capsys, monkeypatch):
    asked, answers = slurm
    clock(monkeypatch)
    answers["show"][:0] = [SILENT, Answer(124, "", "scontrol gave no answer within 20 s")]
    answers["requeue"][:0] = [SILENT]
    slurm_requeue.main([str(tmp_path)])
    assert [words[1] for words in asked].count("requeue") == 2
    assert len((tmp_path / "requeues.jsonl").read_text().splitlines()) == 1
    assert capsys.readouterr().out == "effilaunch: requeued: the job was preempted\n"


def test_it_ends_after_a_minute_of_silence_and_at_once_for_a_job_that_is_gone(
    slurm, tmp_path, capsys, monkeypatch
):
    asked, answers = slurm
    slept = clock(monkeypatch)
    answers["show"] = [SILENT]
    slurm_requeue.main([str(tmp_path)])
    assert 50 <= slept[-1] <= slurm_requeue.PATIENCE_S
    assert "not requeued: Slurm gives no answer about job 21: " in capsys.readouterr().out
    asked.clear()
    answers["show"] = [GONE]
    slurm_requeue.main([str(tmp_path)])
    assert len(asked) == 1
    assert "Slurm does not know this job" in capsys.readouterr().out


def test_a_job_that_is_cancelled_between_two_tries_is_left_alone(slurm, tmp_path, capsys, monkeypatch):
    asked, answers = slurm
    clock(monkeypatch)
    answers["requeue"] = [SILENT]
    answers["show"].append(Answer(0, ARRAY.replace("RUNNING", "CANCELLED"), ""))
    slurm_requeue.main([str(tmp_path)])
    assert [words[1] for words in asked].count("requeue") == 1
    assert "not requeued: the job is CANCELLED" in capsys.readouterr().out


def test_a_job_that_is_no_task_of_an_array_has_its_plain_number():
    assert slurm_requeue.own_number({"SLURM_JOB_ID": "7"}) == "7"
    assert slurm_requeue.own_number({}) == ""
