"""Trackers of `report_to`, the real libraries: what they hold of a run, and that none of them ends one."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from launcher.train import stopping
from launcher.train.job import Job, read_job
from launcher.train.tracking import Tracker, finish_wandb, identify, memory_bytes

sys.path.insert(0, str(Path(__file__).parent))
from plans import trained, write_run

REFERENCE = "${ENV:A_PASSWORD:none}"
SHORT = {"trainer.max_steps": 2, "launch.env.A_PASSWORD": REFERENCE}
KEY = "0123456789abcdef0123456789abcdef01234567"
BLOCK = 32768


@pytest.fixture
def wandb(monkeypatch):
    """As a process finds it that has not used it yet, with no account."""
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("A_PASSWORD", "swordfish-and-chips")
    wandb.teardown()
    yield wandb
    end(wandb)


def end(wandb) -> None:
    """As a process does."""
    finish_wandb(0)
    wandb.teardown()


@pytest.fixture
def database():
    """Where trackio writes: the folder is settled when the first test of this process imports it."""
    trackio = pytest.importorskip("trackio")
    return Path(trackio.TRACKIO_DIR) / "huggingface.db"


def offline_runs(run: Path) -> list[Path]:
    return sorted((run / "tracking" / "wandb").glob("offline-run-*"))


def records(path: Path):
    """The records of a .wandb file: a log of LevelDB's format behind a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def logged(run: Path) -> tuple[dict, dict, list[dict]]:
    """Configuration, summary and history in the record of one run."""
    config, summary, history = {}, {}, []
    [path] = run.glob("*.wandb")
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "config":
            config |= values(record.config.update)
        elif kind == "summary":
            summary |= values(record.summary.update)
        elif kind == "history":
            history.append(values(record.history.item))
    return config, summary, history


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def check_described(found: dict) -> None:
    rate = found["settings"]["trainer"]["learning_rate"]
    assert rate == {"value": 1e-2, "source": "default", "by": "test"}
    assert found["settings"]["launch"]["env"]["A_PASSWORD"]["value"] == REFERENCE
    assert found["fixes"] == {}
    assert found["memory"] == {"total": 12345}


def measured_in(run: Path) -> int:
    return json.loads((run / "result.json").read_text())["memory"]["measured"]


def test_wandb_offline_holds_the_plan_and_the_measured_memory_and_goes_on_under_its_id(
    tmp_path, wandb, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": ["wandb"]})
    assert wandb.run.settings.init_timeout == 30
    assert wandb.run.settings.finish_timeout == 60
    assert wandb.run.name == f"{tmp_path.name}-run"
    end(wandb)
    [found] = offline_runs(run)
    config, summary, history = logged(found)
    check_described(config["effilaunch"])
    assert config["learning_rate"] == 1e-2, "upstream's own"
    assert summary["effilaunch/memory/measured"] == measured_in(run)
    assert [row["train/loss"] for row in history if "train/loss" in row]
    name = identify(read_job(run), unique=False)["id"]
    assert found.name.endswith(f"-{name}")
    trained(run, {**SHORT, "trainer.report_to": "wandb"})
    end(wandb)
    _, second = offline_runs(run)
    assert second.name.endswith(f"-{name}")
    assert not [p for p in run.rglob("*") if p.is_file() and b"swordfish" in p.read_bytes()]


def test_tensorboard_holds_the_plan_and_the_measured_memory(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": "tensorboard", "trainer.run_name": "x"})
    found = accumulators.EventAccumulator(str(run / "tracking" / "tensorboard"))
    found.Reload()
    [settings] = found.Tensors("effilaunch/settings/text_summary")
    text = settings.tensor_proto.string_val[0].decode()
    assert "| trainer.learning_rate | 0.01 | default, test |" in text
    assert f'| launch.env.A_PASSWORD | "{REFERENCE}" |' in text
    [memory] = found.Tensors("effilaunch/memory/text_summary")
    assert b"| total | 12345 |" in memory.tensor_proto.string_val[0]
    [measured] = found.Scalars("effilaunch/memory/measured")
    assert measured.step == 2
    assert measured.value == pytest.approx(measured_in(run))
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]
    assert not list((run / "checkpoints").rglob("events.*"))


def test_trackio_holds_the_plan_and_the_measured_memory_and_goes_on_under_its_name(tmp_path, database):
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": ["trackio"]})
    name = identify(read_job(run), unique=True)["name"]
    with sqlite3.connect(database) as connection:
        [(config,)] = connection.execute("SELECT config FROM configs WHERE run_name = ?", [name]).fetchall()
    check_described(json.loads(config)["effilaunch"])
    trained(run, {**SHORT, "trainer.report_to": ["trackio"]})
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_id, metrics FROM metrics WHERE run_name = ?", [name]).fetchall()
    assert len({run_id for run_id, _ in rows}) == 1
    measured = [json.loads(row).get("effilaunch/memory/measured") for _, row in rows]
    assert sum(value is not None for value in measured) == 2
    assert measured[-1] == measured_in(run)


def test_a_push_to_the_hub_syncs_trackio_nowhere_unless_that_is_asked_for(tmp_path):
    pytest.importorskip("trackio")
    from transformers import TrainingArguments

    from launcher.train.tracking import attach_trackers

    for asked, found in ((None, False), ("me/space", "me/space")):
        work = read_job(write_run(tmp_path / str(asked), {}))
        args = TrainingArguments(str(tmp_path), trackio_static_space_id=asked, report_to="trackio")
        attach_trackers(work, SimpleNamespace(args=args, callback_handler=SimpleNamespace(callbacks=[])))
        assert args.trackio_static_space_id == found


@pytest.fixture
def server(request):
    """Address of a server that is not there, or of one that takes connections and never answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{found.getsockname()[1]}"
        if request.param == "silent":
            found.listen(50)
            yield address
            return
    yield address


@pytest.mark.slow
@pytest.mark.parametrize("server", ["closed", "silent"], indirect=True)
def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path, wandb, monkeypatch, server, capfd):
    for name, value in {"BASE_URL": server, "API_KEY": KEY, "INIT_TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": "wandb"})
    end(wandb)
    assert "WARNING: wandb could not start, and logs offline now: " in capfd.readouterr().out
    [found] = offline_runs(run)
    check_described(logged(found)[0]["effilaunch"])
    assert (run / "COMPLETED").is_file()


def test_without_a_login_wandb_that_must_be_online_logs_offline(tmp_path, wandb, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "online")
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": "wandb"})
    assert "No API key configured" in capfd.readouterr().out
    assert len(offline_runs(run)) == 1


def test_wandb_hears_how_the_process_ends(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for code in (0, 5):
        (tmp_path / str(code)).mkdir()
        wandb.init(dir=tmp_path / str(code))
        finish_wandb(code)
        end(wandb)  # whose word comes too late
        [path] = tmp_path.glob(f"{code}/wandb/offline-run-*/*.wandb")
        ends = [record.exit.exit_code for record in records(path) if record.HasField("exit")]
        assert ends == [code]


@pytest.mark.parametrize("event", ["on_train_begin", "on_log", "on_train_end"])
def test_a_tracker_that_fails_is_told_once_and_does_not_end_the_run(tmp_path, monkeypatch, capsys, event):
    pytest.importorskip("tensorboard")
    from transformers.integrations import TensorBoardCallback

    calls = []

    def fail(self, *_, **__):
        calls.append(event)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardCallback, event, fail)
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": "tensorboard"})
    assert (run / "COMPLETED").is_file()
    assert calls == [event]
    said = "WARNING: the run continues without tensorboard: OSError: [Errno 28] No space left on device"
    assert capsys.readouterr().out.count(said) == 1


def test_a_run_that_is_stopped_closes_its_trackers(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from transformers.integrations import TensorBoardCallback

    asked = stopping.Stop()
    monkeypatch.setattr(stopping, "stop", asked)
    monkeypatch.setattr("launcher.train.callbacks.stop", asked)
    heard = []
    monkeypatch.setattr(
        TensorBoardCallback, "on_step_end", lambda *_, **__: asked.ask(signal.SIGTERM), raising=False
    )
    monkeypatch.setattr(TensorBoardCallback, "on_train_end", lambda *_, **__: heard.append("closed"))
    run = trained(tmp_path / "run", {**SHORT, "trainer.report_to": "tensorboard"})
    assert heard == ["closed"]
    assert not (run / "COMPLETED").exists()


def test_every_event_of_the_trainer_reaches_the_tracker():
    from transformers import TrainerCallback

    events = [name for name in dir(TrainerCallback) if name.startswith("on_")]
    assert len(events) >= 15
    heard = []

    class Upstream(TrainerCallback):
        def __getattribute__(self, name):
            return (lambda *_, **__: heard.append(name)) if name in events else super().__getattribute__(name)

    tracker = Tracker(None, "any", Upstream(), "id")
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    for name in events:
        getattr(tracker, name)(None, state, None, model=None)
    tracker.end(0, {})
    assert sorted(heard) == sorted(events)
    assert heard[-1] == "on_train_end"


def test_the_name_is_the_recipes_and_the_folders(tmp_path):
    run = write_run(tmp_path / "runs" / "mine" / "20261123T100000Z", {})
    work = read_job(run)
    for recipe, name in (("/x/chat.yaml", "chat"), (str(run / "submitted.yaml"), "mine")):
        (run / "tracking" / "run.json").unlink(missing_ok=True)
        found = identify(Job(run, {**work.plan, "recipe": recipe}), unique=False)
        assert found["name"] == f"{name}-20261123T100000Z"
    unique = identify(Job(tmp_path, {"recipe": "/x/chat.yaml"}), unique=True)
    assert unique["name"] == f"chat-{tmp_path.name}-{unique['id']}"
    assert identify(Job(tmp_path, {}), unique=False) == unique


def test_a_verdict_is_no_number_of_bytes():
    memory = {"fits": True, "total": 7, "host": {"workers": 3}, "steps": 2, "phase": "forward"}
    assert memory_bytes(memory) == {"total": 7, "host/workers": 3}
