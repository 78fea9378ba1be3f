"""Converted GGUF files are found by content, hashed once for each state, and made again when damaged."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest

from launcher.train.model import weights


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def hashed(monkeypatch):
    """The files that were read to their end."""
    read, whole = [], weights._hashed

    def noted(source, size):
        read.append(str(source))
        return whole(source, size)

    monkeypatch.setattr(weights, "_hashed", noted)
    return read


def test_a_copy_under_another_name_is_the_same_model(file, tmp_path):
    other = tmp_path / "elsewhere" / "renamed.gguf"
    other.parent.mkdir()
    shutil.copyfile(file, other)
    assert weights._key(file) == weights._key(other) == hashlib.sha256(b"weights").hexdigest()[:32]


def test_a_file_is_hashed_once(file, hashed):
    assert weights._key(file) == weights._key(file)
    assert hashed == [str(file)]


def test_a_changed_file_is_another_model_though_its_size_and_time_stay(file):
    first, state = weights._key(file), file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert weights._key(file) != first


@pytest.mark.parametrize("spoilt", ["", "deadbeef", "\xff" * 64])
def test_a_spoilt_note_is_made_anew(file, hashed, tmp_path, spoilt):
    first = weights._key(file)
    (note,) = (tmp_path / "cache" / "gguf" / "digests").iterdir()
    note.write_bytes(spoilt.encode("latin-1"))
    assert weights._key(file) == first
    assert len(hashed) == 2
    assert weights._key(file) == first
    assert len(hashed) == 2


def test_a_cache_that_takes_no_note_costs_only_time(file, hashed, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    assert weights._key(file) == weights._key(file)
    assert len(hashed) == 2


def test_a_conversion_is_found_again(file, monkeypatch):
    made = []

    def convert(source, target):
        made.append(source)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(weights, "_convert", convert)
    first = weights.converted(str(file.parent), file.name, {})
    file.rename(file.with_name("renamed.gguf"))
    assert weights.converted(str(file.parent), "renamed.gguf", {}) == first
    assert len(made) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"cut", b"weighty"])
def test_a_damaged_conversion_is_made_again(file, monkeypatch, capsys, name, content):
    whole = {"config.json": b"{}     ", "model.safetensors": b"weights", "tokenizer.json": b"[]     "}

    def convert(source, target):
        for path, written in whole.items():
            (target / path).write_bytes(written)

    monkeypatch.setattr(weights, "_convert", convert)
    folder = weights.converted(str(file.parent), file.name, {})
    state = (folder / name).stat()
    (folder / name).write_bytes(content)
    os.utime(folder / name, ns=(state.st_atime_ns, state.st_mtime_ns))
    capsys.readouterr()
    assert weights.converted(str(file.parent), file.name, {}) == folder
    assert {path: (folder / path).read_bytes() for path in whole} == whole
    assert f"({folder}: {name} " in capsys.readouterr().err
