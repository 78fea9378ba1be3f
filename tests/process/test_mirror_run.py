"""`runtime.mirror` in whole runs: an empty disk, a stop, a kill during an upload, a failing or slow store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")
pytest.importorskip("moto")
pytest.importorskip("s3fs")

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from engine_runs import make_ground
from launched import effilaunch, losses
from patience import Deadline, patience, wait_until
from safetensors.torch import load_file
from store import BUCKET, SECRET, Server, s3_server

from launcher.rows.remote import remote_files

URL = f"s3://{BUCKET}/runs/tune"
PREFIX = "runs/tune/checkpoints/"
STEPS = 8


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running) -> Server:
    running.clear()
    return running


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    return make_ground(tmp_path_factory.mktemp("ground"))


def recipe(ground: Path, name: str = "tune.yaml", **changes: Any) -> str:
    trainer = {
        "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "report_to": "none", "save_total_limit": 2,
        **changes.pop("trainer", {}),
    }  # fmt: skip
    data = {
        "model": {"name_or_path": "./model", "tokenizer": "./tokenizer"},
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 32},
        "precision": "fp32",
        "global_batch_size": 4,
        "hardware": {"num_nodes": 1, "devices_per_node": 1, "device": "cpu"},
        "runtime": {"mirror": URL},
        **changes,
        "trainer": trainer,
    }
    (ground / name).write_text(yaml.safe_dump(data))
    return str(ground / name)


def steps(server: Server) -> list[int]:
    names = [name.removeprefix(PREFIX) for name in server.keys(PREFIX)]
    return sorted(int(name.split("-")[1]) for name in names if name.endswith("/manifest.json"))


def started(
    path: str, out: Path, server: Server, *words: str, ended: Callable[[], bool]
) -> subprocess.Popen[str]:
    """A run in a process of its own, when `ended` holds."""
    command = [sys.executable, "-m", "launcher", "run", path, "--output-dir", str(out), *words]
    run = subprocess.Popen(
        command, env={**os.environ, **server.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = Deadline(120)
    while not ended():
        if run.poll() is not None or deadline.passed():
            run.kill()
            raise AssertionError(run.communicate()[0])
        time.sleep(0.05)
    return run


@pytest.mark.slow(share=2)
def test_on_an_empty_disk_the_run_continues_and_ends_as_the_undisturbed_one(server, ground, tmp_path, warm):
    whole = recipe(ground, "whole.yaml", runtime={})
    effilaunch("run", whole, "--output-dir", tmp_path / "whole")
    path = recipe(ground)
    first = effilaunch(
        "run", path, "--set", "trainer.max_steps=4", "--set", "trainer.lr_scheduler_type=constant",
        "--output-dir", tmp_path / "lost", **server.env,
    )  # fmt: skip
    assert [row["step"] for row in first["result"]["mirror"]["checkpoints"]] == [2, 4]
    assert first["result"]["mirror"]["result"] is True
    shutil.rmtree(tmp_path / "lost")
    constant = ("--set", "trainer.lr_scheduler_type=constant")
    effilaunch("run", whole, *constant, "--output-dir", tmp_path / "straight")
    found = effilaunch(
        "run", path, *constant, "--resume", "auto", "--output-dir", tmp_path / "new", **server.env
    )
    assert f"{URL}/checkpoints/checkpoint-4" in found["said"]
    assert found["result"]["resumed_at"] == 4
    assert losses(tmp_path / "new") == losses(tmp_path / "straight"), (
        "the rows of the first part are there too"
    )
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("new", "straight"))
    assert all(one[name].equal(other[name]) for name in one)
    assert steps(server) == [6, 8]
    result = [name for name in server.keys("runs/tune/result/")]
    assert "runs/tune/result/manifest.json" in result
    assert "runs/tune/result/model/model.safetensors" in result


@pytest.mark.slow
def test_a_stop_leaves_its_checkpoint_in_the_store(server, ground, tmp_path, warm):
    path = recipe(ground, trainer={"max_steps": 100_000, "save_steps": 100_000})
    out = tmp_path / "out"
    run = started(path, out, server, ended=lambda: (out / "metrics.jsonl").is_file())
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=patience(120))
    assert run.returncode == 130, said
    assert len(found := steps(server)) == 1, said
    assert f"checkpoint-{found[0]} is in {URL}" in said


@pytest.mark.slow
def test_what_a_stop_had_no_time_for_is_said_and_not_resumed(server, ground, tmp_path, warm):
    path = recipe(ground, trainer={"max_steps": 100_000, "save_steps": 100_000})
    out = tmp_path / "out"
    server.fault = lambda method, path: (
        3600.0 if method in ("PUT", "POST") and "/files/model" in path else None
    )
    run = started(path, out, server, ended=lambda: (out / "metrics.jsonl").is_file())
    run.send_signal(signal.SIGTERM)
    wait_until(lambda: any("/files/" in name for name in server.keys(PREFIX)), 90, "a part of the upload")
    time.sleep(1.5)
    run.send_signal(signal.SIGTERM)  # the scheduler's last word
    said, _ = run.communicate(timeout=patience(120))
    assert run.returncode == 130, said
    assert f"is not in {URL}" in said
    assert "there is no checkpoint" in said
    assert steps(server) == []
    server.fault = lambda method, path: None
    again = effilaunch(
        "run", path, "--set", "trainer.max_steps=2", "--resume", "auto", "--output-dir", tmp_path / "empty",
        **server.env,
    )  # fmt: skip
    assert again["result"]["resumed_at"] == 0


@pytest.mark.slow
def test_a_run_that_is_killed_during_an_upload_resumes_from_the_one_before(server, ground, tmp_path, warm):
    path, out = (
        recipe(ground, trainer={"max_steps": 100_000, "save_steps": 5, "save_total_limit": 3}),
        tmp_path / "out",
    )

    def slow_later(method: str, name: str) -> Any:
        is_later = steps(server) and method in ("PUT", "POST") and "/files/model" in name
        return 3600.0 if is_later else None

    def folders() -> set[str]:
        return {name.removeprefix(PREFIX).split("/")[0] for name in server.keys(PREFIX)}

    server.fault = slow_later
    run = started(path, out, server, ended=lambda: len(steps(server)) == 1 and len(folders()) == 2)
    run.kill()
    run.communicate(timeout=patience(120))
    server.fault = lambda method, path: None
    (whole,) = steps(server)
    found = effilaunch(
        "run", path, "--set", f"trainer.max_steps={whole + 3}", "--resume", "auto",
        "--output-dir", tmp_path / "new", **server.env,
    )  # fmt: skip
    assert found["result"]["resumed_at"] == whole
    assert "its upload was interrupted" in found["said"]
    assert steps(server) == [whole, whole + 3]
    assert len(folders()) == 2


@pytest.mark.slow
def test_a_slow_store_delays_no_step_and_the_end_waits_for_it(server, ground, tmp_path, warm):
    server.fault = lambda method, path: 0.7 if method in ("PUT", "POST") and "/files/" in path else None
    found = effilaunch("run", recipe(ground), "--output-dir", tmp_path / "out", **server.env)
    assert found["result"]["train_seconds"] < 8, "an upload of a checkpoint takes longer than a second"
    assert f"to be in {URL}" in found["said"], "the wait is said"
    assert steps(server)[-1] == STEPS
    assert found["result"]["mirror"]["missing"] is None


def test_a_full_store_ends_a_finished_run_as_failed_and_the_next_start_copies_the_rest(
    server, ground, tmp_path, warm
):
    path, out = recipe(ground), tmp_path / "out"
    server.fault = lambda method, path: (
        (507, "QuotaExceeded") if method == "PUT" and "/files/" in path else None
    )
    words = ("run", path, "--output-dir", out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.execute.mirroring.STALL_S", 5.0)
        failed = effilaunch(*words, expect=5, **server.env)
    assert failed["errors"][0]["code"] == "mirror-incomplete"
    assert "QuotaExceeded" in failed["errors"][0]["message"]
    assert (out / "COMPLETED").is_file()
    assert json.loads((out / "result.json").read_text())["mirror"]["missing"]
    server.fault = lambda method, path: None
    again = effilaunch(*words, "--resume", "auto", **server.env)
    assert again["result"]["mirror"]["missing"] is None
    assert steps(server)[-1] == STEPS
    assert server.keys("runs/tune/result/manifest.json")


@pytest.mark.parametrize(
    ("env", "url", "code"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, URL, "mirror-denied"),
        ({}, "s3://no-such-bucket-here/x", "mirror-absent"),
    ],
)
def test_a_store_that_cannot_be_written_ends_run_and_doctor_before_anything_is_loaded(
    server, ground, tmp_path, warm, env, url, code
):
    path = recipe(ground, runtime={"mirror": url})
    given = {name: value for name, value in {**server.env, **env}.items() if value}
    with pytest.MonkeyPatch.context() as patch:
        for name in env:
            patch.delenv(name, raising=False)
        failed = effilaunch("run", path, "--output-dir", tmp_path / "out", expect=4, **given)
        found = effilaunch("doctor", path, expect=4, **given)
        effilaunch("plan", path, **given)
    assert failed["errors"][0]["code"] == code
    assert not (tmp_path / "out").exists()
    (check,) = [check for check in found["checks"] if check["id"] == "mirror"]
    assert check["status"] == "fail"
    assert SECRET not in json.dumps([failed, found])
    ready = effilaunch("doctor", recipe(ground), expect=4, **server.env)  # this machine has no GPU
    assert [check["status"] for check in ready["checks"] if check["id"] == "mirror"] == ["ok"]


def test_planning_and_rehearsals_ask_no_store(server, ground, tmp_path, warm):
    path = recipe(ground)
    for words in (
        ("validate", path), ("plan", path), ("run", path, "--dry-run", "--output-dir", tmp_path / "dry"),
        ("run", path, "--tiny", "--output-dir", tmp_path / "tiny"),
    ):  # fmt: skip
        effilaunch(*words, **server.env)
    assert server.requests == []


def test_rows_in_a_store_are_read_and_their_content_is_in_the_key(
    server, ground, tmp_path, warm, monkeypatch
):
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    rows = (ground / "rows.jsonl").read_bytes()
    server.put("data/rows.jsonl", rows)
    path = recipe(
        ground, data={"train": [{"path": f"s3://{BUCKET}/data/rows.jsonl"}], "max_length": 32}, runtime={}
    )
    local = recipe(ground, "local.yaml", runtime={})

    def key(recipe: str) -> str:
        remote_files.cache_clear()
        return str(effilaunch("prepare", recipe)["data"]["key"])

    before = key(path)
    assert before == key(local)
    server.requests.clear()
    assert key(path) == before
    assert not [path for method, path in server.requests if method == "GET" and path.endswith("rows.jsonl")]
    server.put("data/rows.jsonl", rows + rows.splitlines(keepends=True)[0].replace(b"w1", b"w2"))
    changed = key(path)
    assert changed != before
    server.fault = lambda method, path: "cut"
    assert key(path) == changed, "without the store, what was read last"
    server.fault = lambda method, path: None
    server.put("data/rows.jsonl", rows + b"{not json}\n")
    remote_files.cache_clear()
    error = effilaunch("prepare", path, expect=2)["errors"][0]
    assert (error["file"], error["line"]) == (f"s3://{BUCKET}/data/rows.jsonl", 49)
