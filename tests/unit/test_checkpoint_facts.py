"""Which checkpoints are whole: manifests, sizes and hashes; damaged ones of every kind are named."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest
from checkpoints import CONTENT, checkpoint

from launcher.files import checkpoint as facts
from launcher.files.checkpoint import (
    MANIFEST,
    FileFacts,
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
)


def test_a_whole_checkpoint_has_no_defect_and_tells_what_it_holds(tmp_path):
    made = checkpoint(tmp_path, 7, world_size=4, data="abc", seconds=2)
    assert defect(made, hashes=True) is None
    read = read_manifest(made)
    assert (read.step, read.world_size, read.data, read.seconds) == (7, 4, "abc", 2.0)
    assert read.bytes == sum(len(data) for data in CONTENT.values())
    assert read.files["trainer_state.json"] == FileFacts(
        2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )
    assert read.versions == {"torch": "2.13.0"}


def test_a_file_that_was_cut_off_is_named_with_both_sizes(tmp_path):
    made = checkpoint(tmp_path, 7)
    os.truncate(made / "model.safetensors", 999)
    assert defect(made, hashes=False) == "model.safetensors has 999 bytes, 1000 were written"


def test_a_flipped_byte_is_found_by_the_hash_alone(tmp_path):
    made = checkpoint(tmp_path, 7)
    data = bytearray((made / "global_step/optim.pt").read_bytes())
    data[3] ^= 1
    (made / "global_step/optim.pt").write_bytes(data)
    assert defect(made, hashes=False) is None
    assert re.search("global_step/optim.pt .*SHA-256", defect(made, hashes=True))


@pytest.mark.parametrize("instead", ["nothing", "a folder", "a link to nowhere"])
def test_a_missing_file_is_named(tmp_path, instead):
    made = checkpoint(tmp_path, 7)
    (made / "model.safetensors").unlink()
    if instead == "a folder":
        (made / "model.safetensors").mkdir()
    elif instead == "a link to nowhere":
        (made / "model.safetensors").symlink_to(tmp_path / "gone")
    assert defect(made, hashes=True) == "model.safetensors is missing"


def test_a_folder_that_this_user_may_not_look_into_is_passed_over(tmp_path, monkeypatch):
    """Such as one that another user's run has left: pathlib's `exists` raises there."""
    made = checkpoint(tmp_path, 7)

    def refuses(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("stat", "lstat", "read_bytes"):
        monkeypatch.setattr(type(made), name, refuses)
    assert defect(made, hashes=False) == "its manifest.json cannot be read"


def test_a_file_that_cannot_be_read_is_a_defect_and_no_crash(tmp_path, monkeypatch):
    made = checkpoint(tmp_path, 7)
    real, broken = facts._sha256, OSError(5, "Input/output error")
    monkeypatch.setattr(
        facts, "_sha256", lambda path, *more: broken if path.suffix == ".pt" else real(path, *more)
    )
    assert defect(made, hashes=True) == ("global_step/optim.pt cannot be read: [Errno 5] Input/output error")


def test_a_file_more_is_no_defect(tmp_path):
    """A converter writes its own beside those that it reads."""
    made = checkpoint(tmp_path, 7)
    (made / "latest_universal").write_text("global_step7_universal")
    assert defect(made, hashes=True) is None


def test_random_states_that_were_put_aside_leave_a_checkpoint_whole(tmp_path):
    """A run that goes on without them, and dies before its next save, goes on from here again."""
    made = checkpoint(tmp_path, 7, {**CONTENT, "rng_state_1.pth": b"random"})
    (made / "rng_state_1.pth").rename(made / "rng_state_1.unreadable")
    assert defect(made, hashes=True) is None
    (made / "rng_state_1.unreadable").write_bytes(b"Random")
    assert re.search("rng_state_1.pth .*SHA-256", defect(made, hashes=True))
    (made / "rng_state_1.unreadable").unlink()
    assert defect(made, hashes=False) == "rng_state_1.pth is missing"


def test_a_checkpoint_under_another_number_is_not_whole(tmp_path):
    made = checkpoint(tmp_path, 7)
    moved = made.rename(tmp_path / "checkpoint-70")
    assert defect(moved, hashes=False) == "its manifest.json is of step 7"
    assert defect(moved.rename(tmp_path / "kept-by-hand"), hashes=True) is None, (
        "any other name is the user's"
    )


GOOD = {"schema_version": 1, "step": 1, "world_size": 1, "bytes": 0, "seconds": 1.0, "data": None,
        "versions": {}, "files": {"a": {"bytes": 1, "sha256": "0" * 64}}}  # fmt: skip
ABSURD = [
    "",
    "{",
    "null",
    "[]",
    "7",
    "[" * 100_000,
    '{"schema_version": 1}',
    "\x00",
    '{"step": ' + "9" * 5000 + "}",
    *(
        json.dumps({**GOOD, **change})
        for change in (
            {"schema_version": 2},
            {"step": "1"},
            {"step": -1},
            {"step": True},
            {"step": 1.5},
            {"world_size": None},
            {"bytes": "many"},
            {"seconds": "soon"},
            {"seconds": 10**400},
            {"data": 3},
            {"versions": 3},
            {"files": {}},
            {"files": None},
            {"files": ["a"]},
            {"files": {"a": None}},
            {"files": {"a": {"bytes": 1}}},
            {"files": {"a": {"bytes": -1, "sha256": "0" * 64}}},
            {"files": {"a": {"bytes": 1, "sha256": "0" * 63}}},
            {"files": {"a": {"bytes": 1, "sha256": 0}}},
            {"files": {"/etc/hostname": {"bytes": 1, "sha256": "0" * 64}}},
            {"files": {"../a": {"bytes": 1, "sha256": "0" * 64}}},
            {"files": {"b/../../a": {"bytes": 1, "sha256": "0" * 64}}},
            {"files": {"": {"bytes": 1, "sha256": "0" * 64}}},
        )
    ),
]


@pytest.mark.parametrize("text", ABSURD, ids=range(len(ABSURD)))
def test_a_manifest_that_is_none_is_told_apart_from_one_that_is_not_there(tmp_path, text):
    made = checkpoint(tmp_path, 1)
    assert defect(made, hashes=False) is None
    (made / MANIFEST).write_text(text)
    assert read_manifest(made) is None
    assert defect(made, hashes=True) == "its manifest.json cannot be read"
    (made / MANIFEST).unlink()
    assert "no manifest.json" in defect(made, hashes=True)


def test_the_manifest_that_the_absurd_ones_are_made_of_is_read(tmp_path):
    """Else they might all be refused for one and the same reason."""
    (tmp_path / MANIFEST).write_text(json.dumps(GOOD))
    assert read_manifest(tmp_path).step == 1


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 300])
def test_a_name_that_no_file_can_have_is_a_missing_file(tmp_path, name):
    made = checkpoint(tmp_path, 1, files={name: {"bytes": 1, "sha256": "0" * 64}})
    assert defect(made, hashes=True) == f"{name} is missing"


def test_not_utf8_is_not_a_manifest(tmp_path):
    made = checkpoint(tmp_path, 1)
    (made / MANIFEST).write_bytes(b"\xff\xfe{}")
    assert defect(made, hashes=True) == "its manifest.json cannot be read"


def test_complete_and_incomplete_ones_are_told_apart(tmp_path):
    for step in (100, 20, 3):
        checkpoint(tmp_path, step)
    cut = checkpoint(tmp_path, 40)
    (cut / MANIFEST).unlink()
    saving = checkpoint(tmp_path / ".saving", 120)
    checkpoint(tmp_path / ".removed", 1)
    for name in ("checkpoint-", "checkpoint-x", "checkpoint-007", "checkpoint-٣", "best", "checkpoint--1"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    assert list(complete_checkpoints(tmp_path)) == [3, 20, 100]
    assert complete_checkpoints(tmp_path)[20] == tmp_path / "checkpoint-20"
    incomplete = incomplete_checkpoints(tmp_path)
    assert incomplete.keys() == {cut, saving}
    assert "no manifest.json" in incomplete[cut]
    assert ".saving" in incomplete[saving]


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert complete_checkpoints(tmp_path / "none") == {}
    assert incomplete_checkpoints(tmp_path / "none") == {}
