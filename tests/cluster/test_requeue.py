"""Jobs that are stopped: preempted, near their time limit, cancelled."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
from cluster.conftest import losses
from cluster.slurm import REQUEUE_HOLD_S
from patience import patience, wait_until

from launcher.cli import main
from launcher.schedulers.slurm_allocation import expand_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
STEPS = 30


def wait_for_step(run_dir, step: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and max(losses(run_dir), default=0) >= step, 240, f"step {step}")


def submitted(run_dir) -> str:
    return json.loads((run_dir / "submit.json").read_text())["jobs"]["run"]


def hardware(nodes: int, partition: str = "low") -> str:
    return (
        f"hardware: {{num_nodes: {nodes}, devices_per_node: 1, device: cpu}}\n"
        f"launch: {{slurm: {{partition: {partition}, time: 30, prepare: false}}}}\n"
    )


def test_preempted_on_two_nodes_it_goes_on_with_the_same_losses(cluster, recipe, tmp_path, monkeypatch):
    """A checkpoint in the grace time, the requeue, the resume; beside a plain srun that nobody stops."""
    path = recipe(hardware(2), steps=STEPS)
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    cluster.run("srun", "-N2", "effilaunch", "run", str(path), "--output-dir", str(undisturbed), timeout=240)
    monkeypatch.setenv("STEP_S", "1")
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--detach"]) == 0
    number = submitted(run_dir)
    wait_for_step(run_dir, 2)
    cluster.run("sbatch", "--partition=high", "-N1", "-c2", "-t10", "-o/dev/null", "--wrap=sleep 1")
    cluster.wait_state(number, "PENDING")
    stopped = json.loads((run_dir / "stopped.json").read_text())
    assert stopped["signal"] == "SIGTERM"
    assert 2 <= stopped["step"] < STEPS
    assert main(["submit", str(run_dir), "--follow"]) == 0
    assert cluster.job(number)["Restarts"] == "1"
    log = (run_dir / "logs" / f"slurm-{number}.out").read_text()
    assert "requeued: the job was preempted" in log
    assert f"resumes from {run_dir}/checkpoints/checkpoint-{stopped['step']}" in log
    assert losses(run_dir) == losses(undisturbed)
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))


@pytest.mark.slow(share=3)
def test_the_warning_before_the_limit_saves_and_requeues_once_more_and_cancel_ends_it(
    cluster, recipe, tmp_path, monkeypatch
):
    """SIGUSR1 to the step, as --signal sends it; sent here by scancel, which saves minutes of waiting."""
    monkeypatch.setenv("STEP_S", "1")
    run_dir = tmp_path / "run"
    assert (
        main(["submit", str(recipe(hardware(1), steps=200)), "--output-dir", str(run_dir), "--detach"]) == 0
    )
    number = submitted(run_dir)
    wait_for_step(run_dir, 2)
    cluster.run("scancel", "--signal=USR1", number)
    cluster.wait_state(number, "PENDING")
    row = json.loads((run_dir / "requeues.jsonl").read_text())
    assert row["checkpoint"] >= 2
    assert "the time limit is near" in row["why"]
    cluster.wait_state(number, "RUNNING")
    wait_for_step(run_dir, row["checkpoint"] + 1)
    assert main(["submit", str(run_dir), "--cancel"]) == 0
    ended = cluster.wait_state(number, "CANCELLED")
    assert ended["Restarts"] == "1"
    time.sleep(REQUEUE_HOLD_S + 2)  # a requeued job would run by then
    assert cluster.job(number)["JobState"] == "CANCELLED"
    assert main(["submit", str(run_dir), "--follow"]) == 130


@pytest.mark.slow(share=3)
def test_a_requeue_of_one_task_of_a_sweep_leaves_the_others_alone(cluster, recipe, tmp_path, monkeypatch):
    """Of the task whose job has the number of the array: for Slurm that number alone means all tasks."""
    monkeypatch.setenv("STEP_S", "1")
    folder = tmp_path / "sweep"
    path = recipe(hardware(1), steps=200)
    assert main(["submit", str(path), "--sweep", "seed=1,2", "--output-dir", str(folder), "--detach"]) == 0
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    for run in runs:
        wait_for_step(Path(run["run_dir"]), 2)
    array = runs[0]["job"].partition("_")[0]
    (asked,) = [run["job"] for run in runs if cluster.job(run["job"])["JobId"] == array]
    (other,) = [run["job"] for run in runs if run["job"] != asked]
    cluster.run("scancel", "--signal=USR1", asked)
    cluster.wait_state(asked, "PENDING")
    assert [cluster.job(number)["Restarts"] for number in (asked, other)] == ["1", "0"]
    assert cluster.job(other)["JobState"] == "RUNNING"
    cluster.run("scancel", array)


@pytest.mark.slow(share=3)
def test_a_lost_node_is_excluded_and_the_job_requeued(cluster, recipe, tmp_path, monkeypatch):
    """As in a power cut, which Slurm itself notices only later (SlurmdTimeout)."""
    monkeypatch.setenv("STEP_S", "1")
    run_dir = tmp_path / "run"
    path = recipe(hardware(2, partition="wide"), steps=200)
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--detach"]) == 0
    number = submitted(run_dir)
    wait_for_step(run_dir, 5)
    job = cluster.job(number)
    (lost,) = {*expand_hosts(job["NodeList"])} - {job["BatchHost"]}
    log = run_dir / "logs" / f"slurm-{number}.out"
    cluster.lose(lost, number)
    try:
        wait_until(lambda: "was lost: no word for 20 s" in log.read_text(), 120, log.read_text)
        assert f"the node {socket.gethostname()} (node 1) was lost" in log.read_text()
        wait_until(lambda: f"excluded: {lost}" in log.read_text(), 180, log.read_text)
        # What Slurm does after SlurmdTimeout; until then it waits for an answer of the node. Not before the
        # script of the first start has ended, which is a matter of milliseconds.
        time.sleep(3)
        cluster.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
        # It waits for a moment only, where the third node is free.
        wait_until(lambda: cluster.job(number)["Restarts"] == "1", 120, "the requeue")
        assert cluster.job(number)["ExcNodeList"] == lost
        row = json.loads((run_dir / "requeues.jsonl").read_text())
        assert row["lost"] == [lost]
        done = max(losses(run_dir))
        cluster.wait_state(number, "RUNNING")
        wait_for_step(run_dir, done + 1)
        assert lost not in expand_hosts(cluster.job(number)["NodeList"])
        assert f"resumes from {run_dir}/checkpoints/checkpoint-{row['checkpoint']}" in log.read_text()
        assert main(["submit", str(run_dir), "--requeue"]) == 2  # it has not ended
        assert main(["submit", str(run_dir), "--cancel"]) == 0
        assert main(["submit", str(run_dir), "--follow"]) == 130
    finally:
        cluster.run("scancel", number, check=False)
        cluster.bring_back(lost)
    assert main(["submit", str(run_dir), "--requeue"]) == 0
    again = submitted(run_dir)
    assert again != number
    wait_for_step(run_dir, max(losses(run_dir)) + 1)
    assert main(["submit", str(run_dir), "--cancel"]) == 0


@pytest.mark.slow(share=3)
def test_a_node_that_slurm_takes_down_costs_a_requeue(cluster, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("STEP_S", "1")
    run_dir = tmp_path / "run"
    path = recipe(hardware(2), steps=200)
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--detach"]) == 0
    number = submitted(run_dir)
    wait_for_step(run_dir, 5)
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        cluster.wait_state(number, "PENDING")
        done = max(losses(run_dir))
    finally:  # ReturnToService may have been quicker, and RESUME is then refused
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
    wait_for_step(run_dir, done + 1)
    assert cluster.job(number)["Restarts"] == "1"
    assert (
        f"resumes from {run_dir}/checkpoints/checkpoint-"
        in (run_dir / "logs" / f"slurm-{number}.out").read_text()
    )
    cluster.run("scancel", number)


@pytest.mark.slow(share=3)
def test_ctrl_c_while_following_leaves_the_job_alone(cluster, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("STEP_S", "1")
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        ["effilaunch", "submit", str(recipe(hardware(1), steps=200)), "--output-dir", str(run_dir)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while "runs on" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(2)
        _, said = process.communicate(timeout=patience(120))
    assert process.returncode == 130
    assert "it continues" in said
    assert f"effilaunch submit {run_dir} --follow" in said
    number = submitted(run_dir)
    assert cluster.job(number)["JobState"] == "RUNNING"
    cluster.run("scancel", number)


@pytest.mark.slow(share=3)
def test_an_elastic_run_continues_in_its_job_without_a_lost_node(cluster, recipe, tmp_path, monkeypatch):
    """Also when Slurm, too, gives up on the node. The next start takes what there is."""
    monkeypatch.setenv("STEP_S", "1")
    run_dir = tmp_path / "run"
    more = (
        "hardware: {num_nodes: 2, devices_per_node: 1, device: cpu}\nglobal_batch_size: 4\n"
        "launch: {min_nodes: 1, slurm: {partition: wide, nodelist: 'n[2-3]', time: 30, prepare: false}}\n"
    )
    path = recipe(more, steps=200)
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--detach"]) == 0
    number = submitted(run_dir)
    wait_for_step(run_dir, 5)
    job = cluster.job(number)
    (lost,) = {*expand_hosts(job["NodeList"])} - {job["BatchHost"]}
    cluster.lose(lost, number)
    try:
        restarts = run_dir / "restarts.jsonl"
        wait_until(restarts.is_file, 240, "the restart")
        row = json.loads(restarts.read_text())
        assert (row["num_nodes"], row["resumed_from"]) == (1, row["resumed_from"] // 4 * 4)
        cluster.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
        wait_for_step(run_dir, row["step"] + 3)
        now = cluster.job(number)
        assert (now["JobState"], now["Restarts"]) == ("RUNNING", "0")
        plan = json.loads((run_dir / "plan.json").read_text())
        assert plan["batch"] == {"micro": 1, "accumulation": 4, "data_parallel": 1, "global": 4}
        assert main(["submit", str(run_dir), "--cancel"]) == 0
        assert main(["submit", str(run_dir), "--follow"]) == 130
    finally:
        cluster.run("scancel", number, check=False)
        cluster.bring_back(lost)
