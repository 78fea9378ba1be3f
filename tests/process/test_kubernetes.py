"""`submit --to kubernetes` against an API server that checks paths and bodies and runs the containers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket

import pytest
from grounds import SLOW_STEPS, make_base
from kubernetes_stub import Cluster
from patience import wait_until

from launcher.cli import main
from launcher.schedulers.kubernetes import QUEUE

RECIPE = """\
model: {{name_or_path: {folder}/model}}
data: {{train: [{{path: {folder}/rows.jsonl}}], max_length: 32}}
python: {folder}/hooks.py
precision: fp32
sharding: {{engine: ddp}}
trainer: {{max_steps: {steps}, save_steps: 4, logging_steps: 1, per_device_train_batch_size: 1,
          report_to: none}}
hardware: {{num_nodes: {nodes}, devices_per_node: 1, device: cpu}}
launch:
  kubernetes: {{kind: {kind}, image: i, runs: {folder}/runs,
               volumes: [{{claim: data, path: {folder}}}]{more}}}
"""


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The volume: what pods and this machine see under the same path."""
    folder = make_base(tmp_path_factory.mktemp("volume"))
    (folder / "hooks.py").write_text(SLOW_STEPS)
    return folder


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = Cluster(tmp_path / "kubelet")
    (tmp_path / "kubeconfig").write_text(made.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield made
    made.close()


@pytest.fixture
def recipe(data, tmp_path):
    def write(kind: str = "trainjob", nodes: int = 1, steps: int = 4, more: str = ""):
        path = tmp_path / "tune.yaml"
        path.write_text(RECIPE.format(folder=data, kind=kind, nodes=nodes, steps=steps, more=more))
        return path

    return write


def submit(*words) -> int:
    return main(["submit", *map(str, words)])


TO = ("--to", "kubernetes", "--output-dir")


@pytest.mark.slow(share=2)
def test_a_train_job_on_two_nodes_prepares_runs_and_is_followed(cluster, recipe, data, tmp_path, capfd):
    """The nodes find their rank and the first of them in Kubeflow's variables."""
    run_dir = tmp_path / "run"
    assert submit(recipe(nodes=2), *TO, run_dir, "--json") == 0
    shown = capfd.readouterr()
    told = json.loads(shown.out)
    assert (told["result"]["steps"], told["to"]) == (4, "kubernetes")
    (number,) = [run["job"] for run in told["runs"]]
    namespace, kind, name = number.split("/")
    assert (namespace, kind) == ("default", "TrainJob")
    done = json.loads((data / "runs" / name / "result.json").read_text())
    assert done["steps"] == 4
    assert json.loads((data / "runs" / name / "plan.json").read_text())["batch"]["data_parallel"] == 2
    created = [path.rpartition("/")[2] for method, path in cluster.requests if method == "POST"]
    assert created[-3:] == ["configmaps", "trainingruntimes", "trainjobs"]
    assert "value-of-a-secret" not in shown.err + "".join(
        file.read_text() for file in run_dir.rglob("*") if file.is_file()
    )
    assert submit(run_dir, "--follow", "--json") == 0  # all of it again, from the log
    assert json.loads(capfd.readouterr().out)["result"]["steps"] == 4
    assert submit(run_dir, "--requeue") == 2


@pytest.mark.slow
def test_cancel_saves_and_requeue_resumes(cluster, recipe, data, tmp_path, monkeypatch, capfd):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("STEP_S", "0.5")
    more = ", prepare: false"
    assert submit(recipe(nodes=2, steps=8, more=more), *TO, run_dir, "--detach") == 0
    (name,) = {key[2] for key in cluster.objects}
    remote = data / "runs" / name
    metrics = remote / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(metrics.read_text()) >= 200, 100, "the first steps")
    assert submit(run_dir, "--requeue") == 2  # it runs
    assert submit(run_dir, "--cancel") == 0
    wait_until((remote / "stopped.json").is_file, 100, "the run stops")
    assert submit(run_dir, "--follow") == 130
    monkeypatch.setenv("STEP_S", "0")
    stopped = json.loads((remote / "stopped.json").read_text())
    assert stopped["signal"] == "SIGTERM"
    capfd.readouterr()
    assert submit(run_dir, "--requeue") == 0
    assert submit(run_dir, "--follow", "--json") == 0
    shown = capfd.readouterr()
    assert f"checkpoint-{stopped['step']}" in shown.err
    assert json.loads((remote / "result.json").read_text())["steps"] == 8


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize(
    ("exits", "code", "restarts"),
    [("2", 2, 0), ("4", 4, 0), ("5", 5, 1), ("130 130 130 2", 2, 3), ("5 130 5", 5, 2)],
)
def test_exit_statuses_decide_what_is_started_again(
    kind, exits, code, restarts, cluster, recipe, tmp_path, monkeypatch
):
    """Stops do not count towards `restarts: 1`; errors that would repeat end the job at once."""
    (tmp_path / "exits").write_text(exits.replace(" ", "\n") + "\n")
    (tmp_path / "bin").mkdir()
    script = f"c=$(head -1 {tmp_path}/exits); sed -i 1d {tmp_path}/exits; echo error: told; exit $c"
    (tmp_path / "bin/effilaunch").write_text(f"#!/bin/bash\ntest -s {tmp_path}/exits || exit 5\n{script}\n")
    (tmp_path / "bin/effilaunch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    path = recipe(kind, more=", prepare: false, restarts: 1")
    assert submit(path, *TO, tmp_path / "run") == code
    assert list(cluster.restarts.values()) == ([restarts] if restarts else [])


def test_an_image_without_effilaunch_is_named(cluster, recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = recipe("job", more=", prepare: false, restarts: 0")
    assert submit(path, *TO, tmp_path / "run") == 5
    assert "install effilaunch in the image" in capfd.readouterr().err


def test_a_sweep_is_a_job_for_each_value(cluster, recipe, tmp_path, capfd):
    cluster.runs_pods = False
    folder = tmp_path / "sweep"
    assert submit(recipe("job"), "--sweep", "seed=1,2", *TO, folder, "--detach") == 0
    jobs = {name for _, kind, name in cluster.objects if kind == "Job"}
    assert len(jobs) == 2
    told = capfd.readouterr().out
    assert "  device memory  " in told
    assert "decisions" not in told, "the whole plan is printed by --dry-run"
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert {run["job"].rpartition("/")[2] for run in runs} == jobs
    assert submit(runs[0]["run_dir"], "--cancel") == 0
    (left,) = {name for _, kind, name in cluster.objects if kind == "Job"}
    assert runs[1]["job"].endswith(left)
    assert submit(runs[0]["run_dir"], "--requeue") == 0
    assert jobs == {name for _, kind, name in cluster.objects if kind == "Job"}


def pod(name: str, **status) -> dict:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {}},
            "spec": {"containers": [{"name": "node"}]}, "status": {"phase": "Pending", **status}}  # fmt: skip


def test_a_pod_that_can_never_start_ends_the_following(cluster, recipe, tmp_path, capfd):
    cluster.runs_pods = False
    run_dir = tmp_path / "run"
    assert submit(recipe("job"), *TO, run_dir, "--detach") == 0
    (name,) = {name for _, kind, name in cluster.objects if kind == "Job"}
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    status = {
        "name": "node",
        "image": "i",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": waiting,
    }
    cluster.pending[name] = pod(f"{name}-0", containerStatuses=[status])
    capfd.readouterr()
    assert submit(run_dir, "--follow", "--json") == 4
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    assert error["code"] == "kubernetes-stuck"
    assert "no such image" in error["message"]


REFUSED = [
    (["launch.kubernetes.image=null"], 2, "kubernetes-key", "launch.kubernetes.image"),
    (["launch.kubernetes.runs=null"], 2, "kubernetes-key", "launch.kubernetes.runs"),
    (["launch.kubernetes.runs=/elsewhere"], 2, "kubernetes-path", "launch.kubernetes.runs"),
    (["data.train=[{path: /my/rows.jsonl}]"], 2, "kubernetes-path", "data.train[0].path"),
    (["launch.kubernetes.setup=['if true']"], 2, "wrong-value", "launch.kubernetes.setup[0]"),
    (["launch.hostfile=hosts"], 2, "kubernetes-path", "launch.hostfile"),
    (["launch.kubernetes.namespace=nope"], 2, "kubernetes-namespace", "launch.kubernetes.namespace"),
    (["launch.kubernetes.namespace=closed"], 2, "kubernetes-permission", "launch.kubernetes.namespace"),
    (["launch.kubernetes.tolerations=[{bogus: x}]"], 2, "kubernetes-refused", "launch.kubernetes"),
    (["launch.kubernetes.context=nope"], 4, "kubernetes-config", None),
]


@pytest.mark.parametrize(("changes", "status", "code", "path"), REFUSED, ids=[row[0][0] for row in REFUSED])
def test_what_is_refused_before_anything_is_created(
    changes, status, code, path, cluster, recipe, tmp_path, capsys
):
    changed = [word for change in changes for word in ("--set", change)]
    assert submit(recipe(), *TO, tmp_path / "run", *changed, "--json") == status
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert (code, path) in [(error["code"], error["path"]) for error in errors]
    assert cluster.objects == {}
    assert not (tmp_path / "run").exists()


def test_a_claim_and_a_kind_that_the_cluster_lacks(cluster, recipe, tmp_path, capsys):
    cluster.claims.clear()
    del cluster.kinds["trainer.kubeflow.org/v1alpha1", "trainjobs"]
    assert submit(recipe(), *TO, tmp_path / "run", "--json") == 2
    errors = {error["code"]: error["path"] for error in json.loads(capsys.readouterr().out)["errors"]}
    assert errors == {"kubernetes-claim": "launch.kubernetes.volumes[0].claim",
                      "kubernetes-kind": "launch.kubernetes.kind"}  # fmt: skip


@pytest.mark.parametrize("by_override", [True, False])
def test_a_job_set_is_refused_and_the_kind_of_the_hint_is_accepted(
    by_override, cluster, recipe, tmp_path, capsys
):
    path = recipe("job" if by_override else "jobset")
    changed = ["--set", "launch.kubernetes.kind=jobset"] if by_override else []
    assert submit(path, *TO, tmp_path / "run", *changed, "--json") == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["code"], error["path"]) == ("wrong-choice", "launch.kubernetes.kind")
    assert (error["file"], error["line"]) == (("--set", None) if by_override else (str(path), 10))
    assert "trainjob, job" in error["message"]
    assert main(["validate", str(path), *changed]) == 2
    assert cluster.objects == {}
    key, value = re.search(r"`(\w+): (\w+)`", error["hint"]).groups()
    assert main(["validate", str(path), "--set", f"launch.kubernetes.{key}={value}"]) == 0
    cluster.runs_pods = False
    path = recipe(value)
    assert submit(path, *TO, tmp_path / "run", "--detach") == 0
    assert [kind for _, kind, _ in cluster.objects] == ["ConfigMap", "Job"]


def test_a_job_set_of_an_older_version_is_followed_cancelled_and_started_again(cluster, tmp_path):
    ended = {"conditions": [{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}]}
    cluster.objects["default", "JobSet", "tune"] = {"kind": "JobSet", "metadata": {}, "status": ended}
    cluster.objects["default", "ConfigMap", "tune"] = {"kind": "ConfigMap", "metadata": {}}
    (job,) = QUEUE.jobs(["default/JobSet/tune"]).values()
    assert (job.phase, job.code) == ("done", 0)
    QUEUE.cancel(["default/JobSet/tune"])
    wait_until(lambda: ("default", "JobSet", "tune") not in cluster.objects, 20, "the JobSet is deleted")
    body = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "tune"}}
    (tmp_path / "job.yaml").write_text(json.dumps({**body, "spec": {"replicatedJobs": []}}))
    assert QUEUE.requeue(tmp_path, "default/JobSet/tune") == "default/JobSet/tune"
    assert ("default", "JobSet", "tune") in cluster.objects


def test_a_silent_cluster_and_a_missing_package(cluster, recipe, tmp_path, capsys, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "kubeconfig").write_text(cluster.kubeconfig(free.getsockname()[1]))
    assert submit(recipe(), *TO, tmp_path / "run", "--json") == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "kubernetes-no-answer"
    assert submit(recipe(), *TO, tmp_path / "run", "--dry-run", "--json") == 0
    shown = capsys.readouterr()
    assert "job.yaml" in json.loads(shown.out)["files"]
    assert "were not checked" in shown.err
    found = importlib.util.find_spec
    missing = lambda name, *more: None if name == "kubernetes" else found(name, *more)  # noqa: E731
    monkeypatch.setattr("launcher.schedulers.kubernetes.find_spec", missing)
    assert submit(recipe(), *TO, tmp_path / "run", "--json") == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "kubernetes-missing"
    assert submit(recipe(), *TO, tmp_path / "run", "--dry-run") == 0


def test_nothing_is_left_of_a_job_that_is_refused_at_last(cluster, recipe, tmp_path, monkeypatch):
    """The trial succeeds, and the creation of the job itself does not."""
    answer = cluster.answer

    def late(method, target, body):
        if method == "POST" and "/trainjobs?" in target and "dryRun" not in target:
            return 403, {"kind": "Status", "code": 403, "message": "exceeded quota: gpus"}
        return answer(method, target, body)

    monkeypatch.setattr(cluster, "answer", late)
    assert submit(recipe(), *TO, tmp_path / "run", "--detach") == 2
    assert cluster.objects == {}
