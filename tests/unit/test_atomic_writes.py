"""Files that are whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.files.safe_files import write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with path.open() as held:
        write_json(path, {"steps": 3})
        assert held.read() == "old"  # who had it open reads the old one to its end
    assert json.loads(path.read_text()) == {"steps": 3}
    assert names(tmp_path) == ["result.json"]


@pytest.mark.parametrize("moment", ["write_text", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_else(moment, tmp_path, monkeypatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    whole = Path.write_text

    def full(self: Path, *given: object, **named: object) -> int:
        if moment == "write_text":
            whole(self, "half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, moment, full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["plan.json"]


def test_a_number_that_json_has_not_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nan"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert names(tmp_path) == []
