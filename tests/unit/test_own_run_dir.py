"""Whether a run directory is still the one that the run began in."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from launcher.train.checkpoint.disk import OwnRunDir


@pytest.fixture(params=[b"{}", None], ids=["environment.json", "no environment.json"])
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    if request.param is not None:
        (folder / "environment.json").write_bytes(request.param)
    return folder


def test_the_folder_of_the_beginning(run_dir: Path) -> None:
    OwnRunDir(run_dir).check()


@pytest.mark.parametrize("beside", [False, True])
def test_a_folder_that_is_gone(run_dir: Path, beside: bool) -> None:
    own = OwnRunDir(run_dir)
    run_dir.rename(run_dir.with_name("moved"))
    if beside:
        run_dir.write_text("a file of the same name")
    with pytest.raises(FileNotFoundError) as caught:
        own.check()
    assert caught.value.filename == str(run_dir)


def test_another_run_in_its_place(run_dir: Path) -> None:
    own = OwnRunDir(run_dir)
    (run_dir / "environment.json").write_bytes(b'{"port": 2}')
    with pytest.raises(FileNotFoundError):
        own.check()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_a_disk_that_does_not_answer_ends_nothing(
    run_dir: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(_path: Path) -> bytes:
        raise OSError(number, "no answer")

    own = OwnRunDir(run_dir)
    monkeypatch.setattr(Path, "read_bytes", unanswered)
    own.check()


def test_what_never_was_there_is_not_missed(tmp_path: Path) -> None:
    OwnRunDir(tmp_path / "absent").check()
