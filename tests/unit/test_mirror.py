"""Checkpoints in an object store: moto's S3 server, with checkpoints as a finished save leaves them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from checkpoints import CONTENT, checkpoint
from patience import patience, wait_until

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from store import BUCKET, SECRET, Server, s3_server

from launcher.errors import MachineError, RecipeError
from launcher.execute import mirror_upload, mirroring
from launcher.execute.mirror import Mirror, TakenOver, new_claim
from launcher.execute.mirror_upload import Uploader, UploadOrder, read_progress
from launcher.execute.mirroring import mirrored, missing
from launcher.execute.resume import Chosen
from launcher.execute.start_point import Beginning
from launcher.files.object_store import Store, StoreError
from launcher.recipe.env import Kept

URL = f"s3://{BUCKET}/runs/tune"
PREFIX = "runs/tune/checkpoints/"


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch) -> Server:
    running.clear()
    for name, value in running.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mirror_upload, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(mirror_upload, "LAST_PAUSE_S", 0.05)
    monkeypatch.setattr(mirror_upload, "POLL_S", 0.05)
    monkeypatch.setattr(mirroring, "_PAUSE_S", 0.05)
    return running


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return new_run_dir(tmp_path / "run")


def new_run_dir(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "plan.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return folder


def saved(run_dir: Path, step: int, best: int | None = None, **content: bytes) -> Path:
    """A complete checkpoint of the run; best: the best step so far."""
    state = json.dumps({"best_global_step": best}).encode()
    given = {name.replace("_", "."): data for name, data in content.items()}
    own = {"plan.json": b"{}", "trainer_state.json": state, "model.safetensors": b"%d" % step * 99}
    return checkpoint(run_dir / "checkpoints", step, {**CONTENT, **own, **given})


def uploader(run_dir: Path, limit: int | None = None, claim=None) -> Uploader:
    mirror = Mirror(Store(URL))
    claim = claim or new_claim("tune", mirror.claim())
    mirror.write_claim(claim)
    return Uploader(run_dir, mirror, UploadOrder(URL, URL, claim, limit))


def uploaded(run_dir: Path, limit: int | None = None, ending: str = "all", claim=None) -> Uploader:
    """One start of the process: it ends after everything."""
    found = uploader(run_dir, limit, claim)
    found.ending.put(ending)
    found.work()
    return found


def planned() -> Any:
    """What a mirror reads of a plan whose recipe has a variable in its URL."""
    kept = {"runtime.mirror": Kept(URL, "s3://${ENV:PLACE}/runs/tune")}
    trainer = SimpleNamespace(save_total_limit=None)
    return SimpleNamespace(recipe_file="tune.yaml", trainer=trainer, kept=kept)


def steps(server: Server) -> list[int]:
    """Steps of the checkpoints whose manifest is in the store."""
    names = [name.removeprefix(PREFIX) for name in server.keys(PREFIX)]
    return sorted(int(name.split("-")[1]) for name in names if name.endswith("/manifest.json"))


def begins(run_dir: Path, takes_newest: bool = True) -> Beginning:
    return Beginning(run_dir, Chosen(None) if takes_newest else None, takes_newest=takes_newest)


def fetched(run_dir: Path) -> Beginning:
    """What `--resume auto` downloads into a run directory."""
    said: list[str] = []
    with mirrored(begins(run_dir), URL, list, said.append) as (chosen, found):
        assert found is not None
        return found.fetch(chosen)


def test_every_file_of_a_checkpoint_is_in_the_store_and_the_manifest_came_last(server, run_dir):
    folder = saved(run_dir, 4)
    uploaded(run_dir)
    found = server.keys(PREFIX)
    (name,) = {key.removeprefix(PREFIX).split("/")[0] for key in found}
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"):
        assert found[f"{PREFIX}{name}/files/{path.relative_to(folder).as_posix()}"] == path.read_bytes()
    written = [path for method, path in server.requests if method == "PUT" and PREFIX in path]
    assert written[-1].endswith(f"{name}/manifest.json")
    progress = read_progress(run_dir)
    assert [row["step"] for row in progress["checkpoints"]] == [4]
    assert (progress["uploading"], progress["problem"]) == (None, None)
    assert not (run_dir / ".mirroring").exists()


def test_every_byte_is_read_back(server, run_dir):
    saved(run_dir, 2)
    uploaded(run_dir)
    files = {path for method, path in server.requests if method == "PUT" and "/files/" in path}
    read = {path for method, path in server.requests if method == "GET" and "/files/" in path}
    assert files
    assert files <= read


@pytest.mark.parametrize("kind", ["here", "there"])
def test_a_checkpoint_whose_bytes_differ_is_never_complete(server, run_dir, kind):
    folder = saved(run_dir, 2)
    if kind == "here":
        (folder / "model.safetensors").write_bytes(b"x" * (folder / "model.safetensors").stat().st_size)
    else:
        whole = Store.sha256
        damaged = mock.patch.object(Store, "sha256", lambda *a, **k: whole(*a, **k)[::-1])
        damaged.start()
    found = uploader(run_dir)
    thread = threading.Thread(target=found.work, daemon=True)
    thread.start()
    wait_until(lambda: (read_progress(run_dir).get("problem") or {}).get("kind") == "damaged")
    assert steps(server) == []
    if kind == "there":
        damaged.stop()
        found.ending.put("all")
        thread.join(patience(60))
        assert steps(server) == [2], "the next attempt is whole"
    else:
        saved(run_dir, 4)
        found.ending.put("newest")
        thread.join(patience(60))
        assert steps(server) == [4]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [((500, "InternalError"), "unreachable"), ((503, "SlowDown"), "unreachable"), ("cut", "unreachable"),
     ((403, "AccessDenied"), "denied"), ((403, "InvalidAccessKeyId"), "denied"),
     ((403, "SignatureDoesNotMatch"), "denied"), ((404, "NoSuchBucket"), "absent"),
     ((507, "QuotaExceeded"), "full")],
)  # fmt: skip
def test_a_store_that_fails_is_tried_again_and_named_without_secrets(server, run_dir, fault, kind):
    saved(run_dir, 2)
    found = uploader(run_dir)
    server.fault = lambda method, path: fault if method == "PUT" and "/files/" in path else None
    thread = threading.Thread(target=found.work, daemon=True)
    thread.start()
    wait_until(lambda: (read_progress(run_dir).get("problem") or {}).get("kind") == kind, 60)
    assert steps(server) == []
    server.fault = lambda method, path: None
    wait_until(lambda: steps(server) == [2], 60)
    found.ending.put("all")
    thread.join(patience(60))
    lines = (run_dir / "logs" / "mirror.txt").read_text()
    assert "WARNING: checkpoint-2 is not in" in lines
    assert "can be written again" in lines
    assert SECRET not in lines + (run_dir / "mirror.json").read_text()
    assert read_progress(run_dir)["problem"] is None


def test_an_end_does_not_wait_for_credentials_that_are_refused(server, run_dir):
    saved(run_dir, 2)
    found = uploader(run_dir)
    server.fault = lambda method, path: (403, "AccessDenied") if method == "PUT" else None
    found.ending.put("all")
    found.work()  # one that tries again meets the test's timeout
    assert "checkpoint-2 is not in" in missing(run_dir, read_progress(run_dir), with_result=False)


def test_an_upload_that_was_cut_off_is_not_resumed_from_and_is_finished_later(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    saved(run_dir, 4)
    found = uploader(run_dir)
    server.fault = lambda method, path: "cut" if "optim" in path else None
    threading.Thread(target=found.work, daemon=True).start()
    wait_until(lambda: any("checkpoint-4" in key for key in server.keys(PREFIX)))
    wait_until(lambda: read_progress(run_dir)["problem"])
    assert steps(server) == [2]
    found.ending.put("all")
    server.fault = lambda method, path: None
    chosen = fetched(new_run_dir(tmp_path / "empty"))
    assert chosen.chosen is not None
    assert chosen.chosen.step in (2, 4)
    wait_until(lambda: steps(server) == [2, 4])


def test_a_partial_upload_is_skipped_on_an_empty_disk(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    partial = {f"{PREFIX}checkpoint-4-0123456789ab/files/model.safetensors": b"half"}
    for name, content in partial.items():
        server.put(name, content)
    found = fetched(new_run_dir(tmp_path / "empty"))
    assert found.chosen is not None
    assert found.chosen.step == 2
    assert (
        tmp_path / "empty" / "checkpoints" / "checkpoint-2" / "model.safetensors"
    ).read_bytes() == b"2" * 99
    saved(run_dir, 6)
    uploaded(run_dir)
    assert not server.keys(f"{PREFIX}checkpoint-4"), "the next upload of the run removes what one left"


@pytest.mark.parametrize("change", ["manifest", "size"])
def test_a_checkpoint_that_was_changed_in_the_store_is_skipped(server, run_dir, tmp_path, change):
    for step in (2, 4):
        saved(run_dir, step)
        uploaded(run_dir)
    (newest,) = {name.removeprefix(PREFIX).split("/")[0] for name in server.keys(f"{PREFIX}checkpoint-4")}
    if change == "manifest":
        text = server.keys(f"{PREFIX}{newest}/manifest.json").popitem()[1]
        server.put(f"{PREFIX}{newest}/manifest.json", text.replace(b'"seconds": 0.1', b'"seconds": 0.2'))
    else:
        server.put(f"{PREFIX}{newest}/files/model.safetensors", b"short")
    found = fetched(new_run_dir(tmp_path / "empty"))
    assert found.chosen is not None
    assert found.chosen.step == 2


def test_a_file_that_was_changed_in_the_store_is_an_error_and_nothing_is_resumed(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    (name,) = [name for name in server.keys(PREFIX) if name.endswith("files/model.safetensors")]
    server.put(name, b"3" * 99)
    empty = new_run_dir(tmp_path / "empty")
    with pytest.raises(MachineError) as error:
        fetched(empty)
    assert error.value.problems[0].code == "mirror-damaged"
    assert not list((empty / "checkpoints").glob("checkpoint-*"))


def test_a_store_without_its_run_or_with_a_damaged_list_of_records_starts_no_run(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    empty, store = new_run_dir(tmp_path / "empty"), Store(URL)
    (listed,) = [name for name in server.keys(PREFIX) if name.endswith("records.json")]
    for name, left in ((listed, b"{"), (listed, None), ("runs/tune/run.json", None)):
        server.put(name, left) if left is not None else store.remove(name.removeprefix("runs/tune/"))
        with pytest.raises(MachineError) as error:
            fetched(empty)
        assert (error.value.problems[0].code, error.value.exit_code) == ("mirror-damaged", 4)
    with pytest.raises(MachineError), mirrored(begins(empty, takes_newest=False), URL, list, print):
        pass
    assert not list((empty / "checkpoints").glob("checkpoint-*"))


def test_retention_of_the_run_holds_in_the_store(server, run_dir):
    for step in (2, 4, 6, 8):
        saved(run_dir, step, best=4)
        uploaded(run_dir, limit=2)
    assert steps(server) == [4, 8], "the newest, and the best one"


def test_without_a_limit_everything_stays(server, run_dir):
    for step in (2, 4, 6):
        saved(run_dir, step)
    uploaded(run_dir)
    assert steps(server) == [2, 4, 6]


def test_the_newest_is_uploaded_first_and_alone_where_a_stop_leaves_no_time(server, run_dir):
    for step in (2, 4, 6):
        saved(run_dir, step)
    uploaded(run_dir, ending="newest")
    assert steps(server) == [6]


def test_an_older_one_that_retention_would_remove_is_not_uploaded(server, run_dir):
    for step in (2, 4, 6):
        saved(run_dir, step)
    uploaded(run_dir, limit=1)
    assert steps(server) == [6]
    assert not any("checkpoint-2" in path for method, path in server.requests if method == "PUT")


def test_retention_on_the_disk_does_not_tear_an_upload(server, run_dir):
    import shutil

    folder = saved(run_dir, 2)
    put = Mirror.put

    def late(self, *args, **kwargs):
        if folder.exists():
            shutil.rmtree(folder)
        return put(self, *args, **kwargs)

    with mock.patch.object(Mirror, "put", late):
        uploaded(run_dir)
    assert steps(server) == [2]


def test_a_step_that_is_trained_again_replaces_nothing_and_counts_instead(server, run_dir, tmp_path):
    first = saved(run_dir, 2), saved(run_dir, 4)
    uploaded(run_dir)
    before = server.keys(PREFIX)
    for folder in first:
        folder.rename(folder.with_name(f"superseded-{folder.name[-1]}"))
    saved(run_dir, 2, model_safetensors=b"again" * 20)
    uploaded(run_dir)
    assert {name: before[name] for name in before} == {name: server.keys()[name] for name in before}
    assert len(json.loads(server.keys("runs/tune/run.json")["runs/tune/run.json"])["superseded"]) == 2
    found = fetched(new_run_dir(tmp_path / "empty"))
    assert found.chosen is not None
    assert found.chosen.checkpoint is not None
    assert (found.chosen.checkpoint / "model.safetensors").read_bytes() == b"again" * 20


def test_the_same_checkpoint_is_uploaded_once(server, run_dir):
    saved(run_dir, 2)
    uploaded(run_dir)
    server.requests.clear()
    uploaded(run_dir)
    assert not [path for method, path in server.requests if method in ("PUT", "POST") and "/files/" in path]


def test_another_run_is_refused_and_touches_nothing(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    before = server.keys()
    other = new_run_dir(tmp_path / "other")
    for start in (begins(other, takes_newest=False), replace(begins(other), takes_newest=False)):
        with pytest.raises(RecipeError) as error, mirrored(start, URL, list, print):
            pass
        assert (error.value.problems[0].code, error.value.problems[0].path) == (
            "mirror-of-another-run", "runtime.mirror")  # fmt: skip
    saved(other, 9)
    with pytest.raises(RecipeError), mirrored(begins(other), URL, list, print):  # it has steps of its own
        pass
    assert server.keys() == before


def test_a_start_that_was_replaced_uploads_and_removes_nothing_more(server, run_dir, tmp_path):
    saved(run_dir, 2)
    first = uploaded(run_dir, limit=1)
    other = new_run_dir(tmp_path / "other")
    saved(other, 2)
    uploaded(other, limit=1)  # the same run, started on another node
    saved(run_dir, 4)
    before = server.keys()
    first.ending.put("all")
    first.work()
    assert server.keys() == before
    assert read_progress(run_dir)["problem"]["kind"] == "taken-over"
    with pytest.raises(TakenOver):
        first.mirror.remove(next(iter(first.mirror.names())), first.order.claim)
    assert server.keys() == before


def test_an_empty_disk_gets_the_checkpoint_and_the_records_of_its_run(server, run_dir, tmp_path):
    saved(run_dir, 2)
    (run_dir / "plan-1.json").write_text('{"old": true}')
    uploaded(run_dir)
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    found = fetched(empty)
    assert found.chosen is not None
    assert found.chosen.checkpoint == empty / "checkpoints" / "checkpoint-2"
    assert found.chosen.verified_bytes > 0
    assert (empty / "metrics.jsonl").read_text() == (run_dir / "metrics.jsonl").read_text()
    assert json.loads((empty / "plan-1.json").read_text()) == {"old": True}
    assert found.step == 2


def test_the_newer_of_disk_and_store_is_taken(server, run_dir):
    saved(run_dir, 2)
    found = uploaded(run_dir)
    assert read_progress(run_dir)["id"] == found.order.claim.id
    newer = saved(run_dir, 6)
    with mirrored(begins(run_dir), URL, list, print) as (chosen, _):
        assert chosen.step == 6
    shutil.rmtree(newer)
    shutil.rmtree(run_dir / "checkpoints" / "checkpoint-2")
    with mirrored(begins(run_dir), URL, list, print) as (chosen, _):
        assert chosen.step == 2


def test_a_run_without_output_dir_continues_the_directory_of_its_url(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    other = new_run_dir(tmp_path / "later")
    saved(other, 8)  # the newest of the recipe, of a run without this mirror
    start = replace(begins(other), proposed=tmp_path / "new")
    with mirrored(start, URL, lambda: [run_dir, other], print) as (chosen, _):
        assert (chosen.run_dir, chosen.step) == (run_dir, 2)
    with mirrored(start, URL, lambda: [other], print) as (chosen, _):
        assert (chosen.run_dir, chosen.step, chosen.is_proposed) == (tmp_path / "new", 2, True)


@pytest.mark.parametrize(
    ("url", "env", "code"),
    [
        (f"s3://{BUCKET}-absent/x", {}, "mirror-absent"),
        (URL, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "mirror-denied"),
        (URL, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "mirror-unreachable"),
    ],
)
def test_a_store_that_cannot_be_written_ends_the_start(server, run_dir, monkeypatch, url, env, code):
    for name, value in env.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(MachineError) as error, mirrored(begins(run_dir), url, list, print):
        pass
    assert (error.value.problems[0].code, error.value.problems[0].path) == (code, "runtime.mirror")
    assert SECRET not in str(error.value)


def test_a_missing_package_is_one_error_before_the_store_is_asked(run_dir, monkeypatch):
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "s3fs" else there(name, *a)
    )
    with pytest.raises(MachineError) as error, mirrored(begins(run_dir), URL, list, print):
        pass
    assert error.value.problems[0].code == "package-missing"
    assert "effilaunch[s3]" in str(error.value)


def test_a_folder_is_a_store_too(run_dir, tmp_path):
    url = f"file://{tmp_path}/store"
    mirror = Mirror(Store(url))
    mirror.store.check_writable()
    claim = new_claim("tune", None)
    mirror.write_claim(claim)
    for step in (2, 4):
        saved(run_dir, step)
        found = Uploader(run_dir, mirror, UploadOrder(url, url, claim, 1))
        found.ending.put("all")
        found.work()
    assert [stored.step for stored in mirror.complete()] == [4]
    assert [row["step"] for row in read_progress(run_dir)["checkpoints"]] == [4]


def test_errors_of_a_store_hold_no_secret(server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-value-1234567890")
    server.fault = lambda method, path: (403, "another-secret-value-1234567890")
    with pytest.raises(StoreError) as error:
        Store(URL).write("x", b"")
    assert "another-secret-value" not in str(error.value) + error.value.reason
    assert os.environ["AWS_SECRET_ACCESS_KEY"]


def test_a_killed_process_is_started_again_and_the_end_waits_for_it(server, run_dir):
    plan = planned()
    said: list[str] = []
    start = Beginning(run_dir)
    with mirrored(start, URL, list, said.append) as (chosen, found):
        assert found is not None
        found.begin(chosen, plan)
        process = found._process
        assert process is not None
        process.kill()
        process.wait()
        found.poll()
        saved(run_dir, 2)
        found.end("newest")
    assert steps(server) == [2]
    assert read_progress(run_dir)["url"] == "s3://${ENV:PLACE}/runs/tune", (
        "no file holds the variable's value"
    )
    assert missing(run_dir, read_progress(run_dir), with_result=False) == ""
    assert "the result is not in" in missing(run_dir, read_progress(run_dir), with_result=True)
    assert any("starting it again" in line for line in said)


def test_a_wait_without_progress_ends_and_says_how_far_it_came(server, run_dir, monkeypatch):
    monkeypatch.setattr(mirroring, "STALL_S", 1.0)
    plan = planned()
    server.fault = lambda method, path: 3600.0 if method == "PUT" and "/files/model" in path else None
    saved(run_dir, 2)
    with mirrored(Beginning(run_dir), URL, list, print) as (chosen, found):
        assert found is not None
        found.begin(chosen, plan)
        wait_until(lambda: read_progress(run_dir)["uploading"], 60)
        found.end("all")
    assert " of " in missing(run_dir, read_progress(run_dir), with_result=False)
    assert steps(server) == []


def test_a_url_without_a_checkpoint_is_given_back(server, run_dir, tmp_path):
    plan = planned()
    with mirrored(Beginning(run_dir), URL, list, print) as (chosen, found):
        assert found is not None
        found.begin(chosen, plan)
        found.close()
        found.release()
    assert server.keys() == {}


def test_records_that_are_none_of_a_run_are_not_restored(server, run_dir, tmp_path):
    saved(run_dir, 2)
    uploaded(run_dir)
    (name,) = {name.removeprefix(PREFIX).split("/")[0] for name in server.keys(PREFIX)}
    script = b"rm -rf /\n"
    listed = {"command.sh": {"bytes": len(script), "sha256": hashlib.sha256(script).hexdigest()}}
    server.put(f"{PREFIX}{name}/records/command.sh", script)
    server.put(f"{PREFIX}{name}/records.json", json.dumps(listed).encode())
    empty = new_run_dir(tmp_path / "empty")
    fetched(empty)
    assert not (empty / "command.sh").exists()
