"""`doctor --rehearse` through the real launchers over two CPU ranks, and over one process."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from patience import patience, wait_until
from rehearsals import MARK, Rehearsal, rows
from supervised import marked

from launcher.cli import main
from launcher.lab.rehearsal.verdicts import TITLES

pytest.importorskip("torch")
pytest.importorskip("deepspeed")


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param("{engine: ddp}", id="accelerate"),
        pytest.param("{zero_stage: 2}", id="deepspeed", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(tmp_path, forks, sharding):
    run = Rehearsal(tmp_path, sharding, python=forks.python)
    answer = run.ended(0)
    found = rows(answer)
    assert set(found) == set(TITLES)
    assert not [name for name, row in found.items() if row["status"] == "fail"]
    launcher = "deepspeed" if "zero" in sharding else "accelerate"
    assert found["rehearsal-start"]["found"].startswith(f"2 ranks by {launcher}")
    told = answer["rehearsal"]
    assert told["completed"]
    assert [facts["rank"] for facts in told["ranks"]] == [0, 1]
    # Of the 2 s. By the longest: on a busy machine a few messages take most of the time.
    assert sum(row["max_s"] * row["count"] for row in told["all_reduce"]) > 0.5
    assert all(0 < row["min_s"] <= row["median_s"] <= row["max_s"] for row in told["all_reduce"])
    assert all(row["right"] and row["bus_bytes_per_s"] > 0 for row in told["all_reduce"])
    assert told["all_reduce"][0]["bytes"] == 4096
    assert told["all_reduce"][-1]["bytes"] > 60_000, "how much more fits into 2 s is the machine's business"
    assert {(link["from"], link["to"]) for link in told["links"]} == {(0, 1), (1, 0)}
    assert [row["read"]["rank"] for row in told["save"]] == [1, 0], "each reads what the other one wrote"
    assert all(row["read"]["right"] for row in told["save"])
    share = told["limits"]["first_bytes"]
    assert told["save"][0]["bytes"] == share
    # What stays: logs and the result, nothing large, and no process.
    assert list((run.out / "checkpoints").iterdir()) == []
    assert {"result.json", "rehearsal.json", "command.sh", "plan.json"} <= {p.name for p in run.out.iterdir()}
    assert "launcher.train.rehearsal.run" in (run.out / "command.sh").read_text()
    assert marked(MARK, run.mark) == {}


def test_a_rank_that_never_comes_is_named(tmp_path):
    run = Rehearsal(tmp_path, meet_s=4)  # a fork would have joined before it is stopped
    pid = wait_until(lambda: run.status(1).get("pid"))
    os.kill(pid, signal.SIGSTOP)
    answer = run.ended(4)
    row = rows(answer)["rehearsal-start"]
    assert row["status"] == "fail"
    assert row["message"].startswith("1 of 2 ranks did not come within 4 s: rank 1 on ")
    assert f"{os.uname().nodename} (pid {pid})" in row["message"]
    assert answer["errors"][0]["code"] == "rehearsal-rank-missing"
    assert not answer["ready"]
    assert "after 4 s" in answer["said"]
    assert marked(MARK, run.mark) == {}


def test_a_rank_that_joins_late_takes_no_time_of_the_next_part(monkeypatch):
    """As where one of two nodes compiles an operator of DeepSpeed."""
    import torch.distributed as dist

    from launcher.train import own_device
    from launcher.train.rehearsal import run

    monkeypatch.setattr(run, "set_timeouts", lambda job: None)
    args = SimpleNamespace(device="cpu")
    monkeypatch.setattr(own_device, "arguments_on_planned_device", lambda job: args)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, parts = dist.HashStore(), []
    watchdog = SimpleNamespace(begin=lambda part, limit_s: parts.append(part))
    planned = SimpleNamespace(join_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(run._join, None, planned, watchdog, store)
        wait_until(lambda: store.check(["joined/0"]))
        time.sleep(0.3)
        assert not joined.done()
        assert len(parts) == 1
        store.set("joined/1", "1")
        assert joined.result(timeout=patience(60)) == "cpu"


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_named(tmp_path, forks):
    run = Rehearsal(tmp_path, seconds=60, python=forks.python)
    wait_until(lambda: run.status(1).get("phase") == "train" and run.status(1))
    pid = run.status(1)["pid"]
    os.kill(pid, signal.SIGSTOP)
    row = rows(run.ended(4))["rehearsal-start"]
    assert f"rank 1 on {os.uname().nodename} (" in row["message"]
    assert "has sent no heartbeat for 15 s during all-reduce" in row["message"]
    assert marked(MARK, run.mark) == {}


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing_large(tmp_path, forks):
    run = Rehearsal(tmp_path, seconds=60, python=forks.python)
    wait_until(lambda: run.status(1).get("phase") == "train")
    (run.out / "checkpoints" / "rehearsal-rank-1.bin").write_bytes(b"as if it had been saving")
    os.kill(run.status(1)["pid"], signal.SIGKILL)
    row = rows(run.ended(4))["rehearsal-start"]
    assert "was killed by SIGKILL" in row["message"]
    assert f"rank 1 ran on {os.uname().nodename}" in row["message"]
    assert "--resume" not in row["hint"]
    assert list((run.out / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_it(tmp_path, forks):
    run = Rehearsal(tmp_path, seconds=60, python=forks.python)
    wait_until(lambda: run.status(0).get("phase") == "train")
    run.process.send_signal(signal.SIGINT)
    (error,) = run.ended(130)["errors"]
    assert error["message"] == "SIGINT: the rehearsal was stopped"
    assert list((run.out / "checkpoints").iterdir()) == []
    assert marked(MARK, run.mark) == {}


@pytest.mark.slow
def test_one_process_says_so_and_measures_its_save(tmp_path, forks):
    found = rows(Rehearsal(tmp_path, on="cpu", python=forks.python).ended(0))
    assert found["rehearsal-all-reduce"]["status"] == "skip"
    assert "one process" in found["rehearsal-all-reduce"]["message"]
    assert found["rehearsal-save"]["status"] == "ok"
    assert "rehearsal-links" not in found


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--rehearse"], "--rehearse"),
        (["smoke", "--seconds", "3"], "--seconds"),
        (["smoke", "--output-dir", "x"], "--output-dir"),
        (["smoke", "--node-rank", "1"], "--node-rank"),
        (["--set", "seed=1"], "--set"),
        (["smoke", "--rehearse", "--bundle"], "--bundle"),
        (["smoke", "--rehearse", "--seconds", "0"], "--seconds"),
        (["smoke", "--rehearse", "--node-rank", "1"], "--master-addr"),
    ],
)
def test_options_that_exclude_each_other(words, option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no CUDA device")
def test_gpus(tmp_path):
    import torch

    count = min(2, torch.cuda.device_count())
    memory = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
    answer = Rehearsal(tmp_path, on=f"{count}x{memory}GB", seconds=5).ended(0)
    told = answer["rehearsal"]
    assert all(row["device"].startswith("cuda") and row["flops"] > 1e12 for row in told["devices"])
    if count > 1:
        assert rows(answer)["rehearsal-ranks"]["found"].endswith("nccl")
        assert all(row["right"] for row in told["all_reduce"])
