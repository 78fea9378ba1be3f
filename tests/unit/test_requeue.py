"""What a stopped job asks of Slurm: which number, and how often where Slurm is silent."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from launcher.schedulers import slurm_commands, slurm_requeue
from launcher.schedulers.slurm_commands import SlurmResult

# As `squeue --Format` of 22.05 writes them.
ARRAY = (
    "21_0|RUNNING|None|0|n1|0|2026-01-01T10:00:00|N/A|low|  |\n"
    "21_1|RUNNING|None|0|n[1-2]|0|2026-01-01T10:00:00|2026-01-01T11:00:00|low|n9|\n"
)


@pytest.fixture
def slurm(monkeypatch):
    """Answers from a list, the last one again and again; what was asked."""
    asked: list[tuple[str, ...]] = []
    answers = {
        "squeue": [SlurmResult(0, ARRAY, "")],
        "requeue": [SlurmResult(0, "", "")],
        "update": [SlurmResult(0, "", "")],
    }

    def ask(*words, **_):
        asked.append(words)
        given = answers[words[1] if words[0] == "scontrol" else words[0]]
        return given.pop(0) if len(given) > 1 else given[0]

    monkeypatch.setattr(slurm_commands, "ask", ask)
    monkeypatch.setattr(slurm_requeue, "ask", ask)
    monkeypatch.setattr(slurm_requeue.signal, "signal", lambda *_: None)
    monkeypatch.setattr(slurm_commands.shutil, "which", lambda name: None)
    for name, value in (("JOB_ID", "21"), ("ARRAY_JOB_ID", "21"), ("ARRAY_TASK_ID", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    return asked, answers


LOST = (
    "srun: error: Task launch for StepId=5.2 failed on node n2: Communication connection failure\n"
    "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted\n"
)


@pytest.mark.parametrize(
    ("nodes", "change"),
    [
        ("n1|mixed\nn2|mixed\nn3|idle", "ExcNodeList=n2,n9"),
        ("n1|mixed\nn2|mixed\nn3|drained", ""),  # too few without the lost one
        ("n1|mixed\nn2|mixed\nn9|idle", ""),  # the job excluded n9 before
    ],
)
def test_a_lost_node_is_excluded_where_there_are_others(nodes, change, slurm, tmp_path):
    asked, answers = slurm
    answers |= {"srun": [SlurmResult(1, "", LOST)], "sinfo": [SlurmResult(0, f"{nodes}\n", "")]}
    slurm_requeue.main([str(tmp_path), "--lost", "2"])
    update = [("scontrol", "update", "JobId=21_1", change)] if change else []
    assert [words for words in asked if words[0] == "scontrol"] == [
        ("scontrol", "requeue", "21_1"), *update,
    ]  # fmt: skip
    assert json.loads((tmp_path / "requeues.jsonl").read_text())["lost"] == ["n2"]
    asked.clear()  # lost once more, and nothing was saved in between
    slurm_requeue.main([str(tmp_path), "--lost", "2"])
    assert [words[0] for words in asked] == ["srun", "squeue"]


@pytest.mark.parametrize(
    ("code", "host", "excluded"),
    [
        ("gpu-ecc", "n2.cluster", "n2,n9"),
        ("gpu-faulty", "n1", "n1,n9"),
        ("gpu-ecc", "elsewhere", ""),
        ("nccl-error", "n2", ""),
    ],
)
def test_the_node_of_a_faulty_gpu_is_excluded(code, host, excluded, slurm, tmp_path, monkeypatch):
    asked, answers = slurm
    answers |= {
        "srun": [SlurmResult(0, "", "")],
        "sinfo": [SlurmResult(0, "n1|mixed\nn2|mixed\nn3|idle\n", "")],
    }
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    logs = tmp_path / "logs"
    logs.mkdir()
    problem = {"code": code, "message": "x", "file": str(logs / "rank-3.log")}
    (logs / "ended.json").write_text(json.dumps({"interrupted": False, "problems": [problem]}))
    status = {"rank": 3, "host": host, "pid": 1, "started": 1, "phase": "train", "step": 1, "since": 0.0}
    (logs / "status-rank-3.json").write_text(json.dumps({**status, "median": None, "code": None}))
    slurm_requeue.main([str(tmp_path), "--lost", "1"])
    told = [words[-1] for words in asked if words[0] == "scontrol"]
    assert told == (["21_1", f"ExcNodeList={excluded}"] if excluded else [])


def test_a_run_that_failed_on_sound_nodes_is_not_requeued(slurm, tmp_path):
    asked, answers = slurm
    answers["srun"] = [SlurmResult(0, "", "")]
    slurm_requeue.main([str(tmp_path), "--lost", "2"])
    assert [words[0] for words in asked] == ["srun", "squeue"]


def test_one_task_of_an_array_requeues_itself_alone(slurm, tmp_path, capsys):
    asked, _ = slurm
    slurm_requeue.main([str(tmp_path)])
    assert [words for words in asked if words[0] == "scontrol"] == [("scontrol", "requeue", "21_1")]
    assert json.loads((tmp_path / "requeues.jsonl").read_text())["job"] == "21_1"
    assert "requeued: the job was preempted" in capsys.readouterr().out


SILENT = SlurmResult(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
GONE = SlurmResult(1, "", "slurm_load_jobs error: Invalid job id specified")


def clock(monkeypatch) -> list[float]:
    """A clock that only sleeping moves."""
    slept = [0.0]
    # Not in the module `time`: threads that other tests left would move it, too.
    own = SimpleNamespace(
        sleep=lambda seconds: slept.append(slept[-1] + seconds), monotonic=lambda: slept[-1], time=time.time
    )
    monkeypatch.setattr(slurm_requeue, "time", own)
    return slept


def test_a_silent_controller_is_asked_again(slurm, tmp_path, capsys, monkeypatch):
    asked, answers = slurm
    clock(monkeypatch)
    answers["squeue"][:0] = [SILENT, SlurmResult(124, "", "squeue gave no answer within 20 s")]
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
    answers["squeue"] = [SILENT]
    slurm_requeue.main([str(tmp_path)])
    assert 50 <= slept[-1] <= slurm_requeue.PATIENCE_S
    assert "not requeued: Slurm gives no answer about job 21_1: " in capsys.readouterr().out
    asked.clear()
    answers["squeue"] = [GONE]
    slurm_requeue.main([str(tmp_path)])
    assert len(asked) == 1
    assert "Slurm does not know this job" in capsys.readouterr().out


def test_a_job_that_is_cancelled_between_two_tries_is_left_alone(slurm, tmp_path, capsys, monkeypatch):
    asked, answers = slurm
    clock(monkeypatch)
    answers["requeue"] = [SILENT]
    answers["squeue"].append(SlurmResult(0, ARRAY.replace("RUNNING", "CANCELLED"), ""))
    slurm_requeue.main([str(tmp_path)])
    assert [words[1] for words in asked].count("requeue") == 1
    assert "not requeued: the job is CANCELLED" in capsys.readouterr().out


def test_a_job_that_is_no_task_of_an_array_has_its_plain_number():
    assert slurm_requeue.own_number({"SLURM_JOB_ID": "7"}) == "7"
    assert slurm_requeue.own_number({}) == ""
