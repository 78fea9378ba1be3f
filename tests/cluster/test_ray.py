"""`submit --to ray` on a Ray of two raylets: success, lost nodes, cancelling, requeueing, bad input."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest
from cluster.conftest import losses
from cluster.ray_cluster import RayCluster  # which does not import ray: that reads the token's variables
from patience import wait_until

from launcher.cli import main

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]  # of Ray: unclosed sockets


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    made = RayCluster(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environ.items():
            patch.setenv(name, value)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(autouse=True)
def on_the_cluster(ray):
    """Of conftest.py, which starts Slurm."""


@pytest.fixture
def submit(recipe, tmp_path):
    """Submits a recipe; the exit code and the run directory."""

    def run(nodes: int, *words: str, steps: int = 6, step_s: float = 0.0, run_dir: Path | None = None, **ray):
        restarts, least = ray.pop("max_restarts", 0), ray.pop("min_nodes", None)
        env = {"env_vars": {"STEP_S": str(step_s)}}
        options = {"prepare": False, "python": sys.executable, "runtime_env": env} | ray
        launch = json.dumps({"ray": options, "max_restarts": restarts, "min_nodes": least})
        hardware = f"hardware: {{num_nodes: {nodes}, devices_per_node: 1, device: cpu}}"
        path = recipe(f"{hardware}\nlaunch: {launch}\n", steps=steps)
        run_dir = run_dir or tmp_path / "run"
        return main(["submit", str(path), "--to", "ray", "--output-dir", str(run_dir), *words]), run_dir

    return run


def log_of(run_dir: Path) -> str:
    """The log of the newest job."""
    return Path(json.loads((run_dir / "submit.json").read_text())["runs"][0]["log"]).read_text()


def log_now(run_dir: Path) -> str:
    """The same while nobody follows the job."""
    from launcher.schedulers.ray import QUEUE

    run = json.loads((run_dir / "submit.json").read_text())["runs"][0]
    QUEUE.log(run["job"], Path(run["log"]))
    return log_of(run_dir)


def wait_for_step(run_dir: Path, step: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and max(losses(run_dir), default=0) >= step, 240, f"step {step}")


def node_of(run_dir: Path, rank: int) -> str:
    """Address of the node with this rank."""
    lines = [line for line in log_now(run_dir).splitlines() if line.startswith("nodes: ")]
    return lines[-1].split("(")[rank + 1].partition(")")[0]


def follow(run_dir: Path, capfd) -> tuple[int, dict]:
    """Follow to the end: the exit code, and what --json printed."""
    capfd.readouterr()
    code = main(["submit", str(run_dir), "--follow", "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_two_nodes_prepare_and_train_and_are_followed(submit, capfd):
    code, run_dir = submit(2, "--json", prepare=True)
    shown = capfd.readouterr()
    assert code == 0, shown.err
    assert json.loads(shown.out)["result"]["steps"] == 6
    lines = [line.strip() for line in shown.err.splitlines()]
    assert {"preparing the data", "1: the run has finished"} <= set(lines)
    assert any(line.startswith("step 6/6") for line in lines)
    assert node_of(run_dir, 0) != node_of(run_dir, 1)
    assert main(["submit", str(run_dir), "--requeue"]) == 2  # already-done


@pytest.mark.slow(share=3)
def test_a_cancelled_run_saves_and_is_requeued(submit, capfd):
    code, run_dir = submit(2, "--detach", step_s=1.0, steps=20)
    assert code == 0
    wait_for_step(run_dir, 2)
    assert main(["submit", str(run_dir), "--requeue"]) == 2  # still-queued
    assert main(["submit", str(run_dir), "--cancel"]) == 0
    code, told = follow(run_dir, capfd)
    assert (code, told["errors"][0]["code"]) == (130, "interrupted")
    assert json.loads((run_dir / "stopped.json").read_text())["signal"] == "SIGTERM"
    before = losses(run_dir)
    saved = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert f"checkpoint-{max(before)}" in saved
    assert main(["submit", str(run_dir), "--requeue"]) == 0
    code, told = follow(run_dir, capfd)
    assert (code, told["result"]["steps"]) == (0, 20)
    after = losses(run_dir)
    assert {step: after[step] for step in before} == before


@pytest.mark.slow(share=3)
def test_a_lost_node_without_room_ends_the_run_and_a_requeue_resumes_it(ray, submit, capfd):
    code, run_dir = submit(2, "--detach", step_s=1.0, steps=20, max_restarts=1)
    assert code == 0
    wait_for_step(run_dir, 5)
    lost = node_of(run_dir, 1)
    ray.lose(lost)
    code, told = follow(run_dir, capfd)
    assert code == 5
    assert lost in told["errors"][0]["message"]
    ray.add()
    assert main(["submit", str(run_dir), "--requeue"]) == 0
    code, told = follow(run_dir, capfd)
    assert (code, told["result"]["steps"]) == (0, 20)


@pytest.mark.slow(share=3)
def test_an_elastic_run_continues_without_a_lost_node_and_starts_on_fewer(ray, submit, tmp_path, capfd):
    code, run_dir = submit(2, "--detach", step_s=1.0, steps=20, min_nodes=1)
    assert code == 0
    wait_for_step(run_dir, 5)
    ray.lose(node_of(run_dir, 1))
    try:
        code, told = follow(run_dir, capfd)
        assert (code, told["result"]["steps"]) == (0, 20)
        (row,) = told["result"]["restarts"]
        assert row["num_nodes"] == 1
        assert row["resumed_from"] in range(4, row["step"] + 1, 4)
        code, run_dir = submit(2, "--json", min_nodes=1, run_dir=tmp_path / "fewer")
        plan = json.loads((run_dir / "plan.json").read_text())
        assert (code, plan["hardware"]["num_nodes"], plan["batch"]["global"]) == (0, 1, 2)
    finally:
        ray.add()


@pytest.mark.slow(share=3)
def test_a_lost_node_is_replaced(ray, submit, capfd):
    code, run_dir = submit(2, "--detach", step_s=1.0, steps=20, max_restarts=1, wait_seconds=3600)
    assert code == 0
    wait_for_step(run_dir, 5)
    ray.lose(node_of(run_dir, 0))
    adding = threading.Timer(10, ray.add)
    adding.start()
    try:
        code, told = follow(run_dir, capfd)
    finally:
        adding.join()
    assert (code, told["result"]["steps"]) == (0, 20)
    assert re.search(r"restart 1 of 1 from the checkpoint of step (4|8|12|16)\b", log_of(run_dir))


@pytest.mark.slow(share=3)
def test_a_sweep_is_one_job_for_each_configuration(submit, capfd):
    code, folder = submit(1, "--sweep", "seed=1,2", "--json")
    told = json.loads(capfd.readouterr().out)
    assert code == 0
    assert [row["state"] for row in told["table"]] == ["done", "done"]
    assert len({row["job"] for row in told["table"]}) == 2
    assert sorted(path.name for path in folder.glob("*/ray.json")) == ["ray.json", "ray.json"]


def test_a_job_that_waits_for_nodes_is_cancelled_and_another_version_refused(submit, capfd):
    code, run_dir = submit(3, "--detach", wait_seconds=3600)
    assert code == 0
    waits = "waiting for up to 3600 s"
    wait_until(lambda: waits in log_now(run_dir), 120, lambda: log_now(run_dir))
    assert main(["submit", str(run_dir), "--cancel"]) == 0
    assert follow(run_dir, capfd)[0] == 130
    # Requeued by another version than that of the cluster:
    path = run_dir / "ray.json"
    job = json.loads(path.read_text())
    job["driver"]["effilaunch"] = "0.0.1"
    path.write_text(json.dumps(job))
    assert main(["submit", str(run_dir), "--requeue"]) == 0
    code, told = follow(run_dir, capfd)
    assert code == 4
    assert "0.0.1" in told["errors"][0]["message"]


REFUSED = [
    ({"address": "http://127.0.0.1:9"}, 4, "ray-no-answer", None),
    ({"address": "127.0.0.1:9"}, 4, "ray-no-answer", None),
    ({"address": "rubbish"}, 4, "ray-no-answer", None),
    ({"resources": {"TPU": 1}}, 2, "ray-resources", "hardware"),
    ({"resources": {"GPU": 1}}, 2, "ray-resources", "launch.ray.resources.GPU"),
    ({"cpus_per_node": 3}, 2, "ray-resources", "hardware"),
    ({"runtime_env": {"pip": 3}}, 2, "ray-runtime-env", "launch.ray.runtime_env"),
    ({"runtime_env": {"pipp": []}}, 2, "ray-runtime-env", "launch.ray.runtime_env.pipp"),
]


@pytest.mark.parametrize(("asked", "status", "code", "key"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_what_ray_would_reject_is_refused_before_anything_is_written(submit, asked, status, code, key, capfd):
    exit_code, run_dir = submit(2, "--json", **asked)
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    assert (exit_code, error["code"], error["path"]) == (status, code, key)
    assert not run_dir.exists()


def test_a_wrong_token_is_refused(submit, monkeypatch, capfd):
    from ray._raylet import AuthenticationTokenLoader

    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        assert submit(1, "--json")[0] == 4
    finally:
        monkeypatch.undo()
        AuthenticationTokenLoader.instance().reset_cache()
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    assert error["code"] == "ray-permission"
    assert "0" * 64 not in error["message"]


def test_a_python_without_effilaunch_ends_the_job_with_one_error(submit, capfd):
    code, _ = submit(1, "--json", python="/usr/bin/python3")
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    assert code == 4
    assert "/usr/bin/python3" in error["message"]


@pytest.mark.slow(share=3)
def test_nodes_that_do_not_see_the_run_directory_are_named(ray, submit, capfd):
    code, run_dir = submit(2, "--json", run_dir=ray.hidden / "run")
    shown = capfd.readouterr()
    assert code == 4, shown.err
    errors = [error["message"] for error in json.loads(shown.out)["errors"]]
    assert len(errors) == 2
    assert all(str(run_dir) in error and "127.0.0." in error for error in errors)
