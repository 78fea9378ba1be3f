"""`submit --to skypilot`, with a command `sky` that runs the tasks on this machine: no cloud was at hand."""

from __future__ import annotations

import json
import os
import sys

import pytest
from grounds import make_base

from launcher.cli import main
from launcher.schedulers import skypilot

SKY = """\
#!{python}
import json, os, re, subprocess, sys
from pathlib import Path
import yaml

home = Path(__file__).parent
queue = home / "queue.json"
rows = json.loads(queue.read_text()) if queue.is_file() else []
group, command, *words = sys.argv[1:]
assert group == "jobs"
with (home / "asked").open("a") as asked:
    asked.write(" ".join([command, *words]) + "\\n")
if (home / "broken").is_file():
    sys.exit("sky.exceptions.ApiServerConnectionError: no server; " + os.environ["HF_TOKEN"])
if command == "launch":
    task = yaml.safe_load(Path(words[-1]).read_text())
    name = words[words.index("--name") + 1]
    if (home / "infeasible").is_file():
        sys.exit("sky.exceptions.ResourcesUnavailableError: Catalog does not contain any instances")
    assert set(task.get("secrets", [])) == set(words[i + 1] for i, w in enumerate(words) if w == "--secret")
    (target, source), = [(t, s) for t, s in task["file_mounts"].items() if isinstance(s, str)]
    Path(target).parent.mkdir(exist_ok=True)
    Path(target).write_text(Path(source).read_text())
    env = {{**os.environ, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}}
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True)
    text = (done.stdout + done.stderr).splitlines()
    number = len(rows) + 1
    rows.append({{"job_id": number, "job_name": name, "recovery_count": 0, "infra": None,
                 "status": "FAILED" if done.returncode else "SUCCEEDED", "failure_reason": None}})
    (home / f"{{number}}.log").write_text(
        "noise of SkyPilot\\n" + "".join(f"({{name}}, pid=12) {{line}}\\n" for line in text))
elif command == "queue":
    print(json.dumps(rows))
elif command == "logs":  # by its name only a job that has not ended is found, as by SkyPilot 0.14
    if "--name" in words:
        sys.exit("No running managed job found with name " + words[words.index("--name") + 1])
    print((home / (words[-1] + ".log")).read_text(), end="")
elif command == "cancel":
    for row in rows:
        if row["job_name"] == words[-1]:
            row["status"] = "CANCELLED"
queue.write_text(json.dumps(rows))
"""
RECIPE = """\
model: {{name_or_path: {folder}/model}}
data: {{train: [{{path: {folder}/rows.jsonl}}], max_length: 32}}
precision: fp32
sharding: {{engine: ddp}}
trainer: {{max_steps: 4, logging_steps: 1, per_device_train_batch_size: 1, report_to: none}}
hardware: {{num_nodes: 1, devices_per_node: 1, device: cpu}}
launch: {{skypilot: {{mounts: {{{folder}: volume}}, runs: {folder}/runs, secrets: [HF_TOKEN]}}}}
"""


@pytest.fixture(scope="session")
def volume(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("volume"))


@pytest.fixture
def sky(tmp_path, monkeypatch):
    """The folder of the command; its queue and logs are there."""
    folder = tmp_path / "sky"
    folder.mkdir()
    (folder / "sky").write_text(SKY.format(python=sys.executable))
    (folder / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "value-of-a-secret")
    monkeypatch.setattr(skypilot, "_RECIPE", str(tmp_path / "node" / "submitted.yaml"))
    return folder


@pytest.fixture
def recipe(volume, tmp_path):
    path = tmp_path / "tune.yaml"
    path.write_text(RECIPE.format(folder=volume))
    return path


def submit(*words) -> int:
    return main(["submit", *map(str, words)])


TO = ("--to", "skypilot", "--output-dir")


@pytest.mark.slow(share=2)
def test_a_task_is_launched_and_followed_to_its_result(sky, recipe, volume, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert submit(recipe, *TO, run_dir, "--json") == 0
    shown = capfd.readouterr()
    told = json.loads(shown.out)
    assert told["result"]["steps"] == 4
    (number,) = [run["job"] for run in told["runs"]]
    assert json.loads((volume / "runs" / number / "result.json").read_text())["steps"] == 4
    assert "noise of SkyPilot" not in shown.err
    assert "value-of-a-secret" not in "".join(f.read_text() for f in run_dir.rglob("*") if f.is_file())
    assert submit(run_dir, "--requeue") == 2
    assert submit(run_dir, "--cancel") == 0
    assert (sky / "asked").read_text().splitlines()[-2] == f"cancel --yes --name {number}"


@pytest.mark.parametrize(("exits", "status"), [(2, 2), (4, 4), (130, 130), (5, 5)])
def test_the_exit_status_is_that_of_the_run_and_requeue_starts_it_again(
    exits, status, sky, recipe, tmp_path, monkeypatch, capfd
):
    (sky / "effilaunch").write_text(f"#!/bin/bash\necho error: told\nexit {exits}\n")
    (sky / "effilaunch").chmod(0o755)
    assert submit(recipe, *TO, tmp_path / "run") == status
    shown = capfd.readouterr()
    assert "told" in shown.out + shown.err
    assert submit(tmp_path / "run", "--requeue") == 0
    assert len(json.loads((sky / "queue.json").read_text())) == 2


def test_the_log_goes_on_after_a_recovery_and_a_server_that_does_not_answer(sky, tmp_path, monkeypatch):
    """The log is that of the newest cluster alone."""
    monkeypatch.setattr(skypilot, "_LOG_S", 0.0)
    queue, file = skypilot.SkyPilot(), tmp_path / "job.log"
    row = {"job_id": 7, "job_name": "tune", "status": "RUNNING", "infra": "aws", "recovery_count": 0}
    (sky / "queue.json").write_text(json.dumps([row]))
    assert queue.jobs(["tune"])["tune"].phase == "running"
    said = []
    for lines in (["a"], ["a", "b"], [], ["a", "b", "c"], ["d"], ["d", "e"]):
        (sky / "7.log").write_text("".join(f"(tune, pid=1) {line}\n" for line in lines))
        said.append(queue.log("tune", file).split())
    assert said == [["a"], ["b"], [], ["c"], ["d"], ["e"]]
    assert file.read_text().split() == ["a", "b", "c", "d", "e"]


def test_a_sweep_is_a_job_for_each_value(sky, recipe, tmp_path):
    (sky / "effilaunch").write_text("#!/bin/bash\nexit 5\n")
    (sky / "effilaunch").chmod(0o755)
    folder = tmp_path / "sweep"
    assert submit(recipe, "--sweep", "seed=1,2", *TO, folder) == 5
    names = [row["job_name"] for row in json.loads((sky / "queue.json").read_text())]
    assert len(set(names)) == 2
    assert submit(folder / "1-seed=2", "--requeue") == 0
    assert [row["job_name"] for row in json.loads((sky / "queue.json").read_text())] == [*names, names[1]]


def test_a_task_that_skypilot_rejects_or_cannot_ask_for(sky, recipe, tmp_path, capsys):
    (sky / "infeasible").touch()
    assert submit(recipe, *TO, tmp_path / "run", "--json") == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "skypilot-refused"
    assert "Catalog does not contain any instances" in error["message"]
    (sky / "infeasible").unlink()
    (sky / "effilaunch").write_text("#!/bin/bash\nexit 5\n")
    (sky / "effilaunch").chmod(0o755)
    assert submit(recipe, *TO, tmp_path / "again", "--detach") == 0
    (sky / "broken").touch()
    capsys.readouterr()
    assert submit(tmp_path / "again", "--cancel", "--json") == 4
    shown = capsys.readouterr()
    (error,) = json.loads(shown.out)["errors"]
    assert error["code"] == "skypilot-no-answer"
    assert "value-of-a-secret" not in shown.out + shown.err


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        ("data.train=[{path: /my/rows.jsonl}]", "skypilot-path", "data.train[0].path"),
        ("launch.skypilot.secrets=[MISSING]", "skypilot-secret", "launch.skypilot.secrets[0]"),
        ("launch.skypilot.setup=['if true']", "wrong-value", "launch.skypilot.setup[0]"),
        (
            "hardware={device: 24GB, devices_per_node: 1}",
            "skypilot-accelerator",
            "launch.skypilot.accelerator",
        ),
    ],
)
def test_what_is_refused_before_anything_is_launched(change, code, path, sky, recipe, tmp_path, capsys):
    assert submit(recipe, *TO, tmp_path / "run", "--set", change, "--json") == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert (code, path) in [(error["code"], error["path"]) for error in errors]
    assert not (sky / "asked").exists()
    assert not (tmp_path / "run").exists()


def test_several_nodes_need_a_folder_that_they_share(sky, recipe, tmp_path, capsys):
    wrong = ["--set", "launch.skypilot.runs=/tmp/runs", "--set", "hardware.num_nodes=2"]
    assert submit(recipe, *TO, tmp_path / "run", *wrong, "--json") == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [error["path"] for error in errors] == ["launch.skypilot.runs"]


def test_without_the_command_only_a_dry_run_works(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HF_TOKEN", "value-of-a-secret")
    assert submit(recipe, *TO, tmp_path / "run", "--json") == 4
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "skypilot-missing"
    assert submit(recipe, *TO, tmp_path / "run", "--dry-run", "--json") == 0
    assert "task.yaml" in json.loads(capsys.readouterr().out)["files"]
