"""Run directories in TMPDIR: they stay only where an error sends its reader into their logs."""

from __future__ import annotations

import tempfile

import pytest

from launcher.errors import Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.run_dir import scratch_run_dir


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("raised", "left"),
    [(RecipeError, 0), (MachineError, 0), (Interrupted, 0), (RunFailed, 1), (ValueError, 1), (None, 0)],
)
def test_refusals_leave_no_folder(scratch, raised, left):
    def refused():
        with scratch_run_dir("prepare") as folder:
            (folder / "logs").mkdir()
            if raised is not None:
                raise raised(Problem("x", "x"))

    if raised is None:
        refused()
    else:
        with pytest.raises(raised):
            refused()
    assert len(list(scratch.iterdir())) == left


def test_a_folder_that_cannot_be_made_is_named(scratch, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / "absent"))
    with pytest.raises(MachineError) as caught, scratch_run_dir("prepare"):
        pass
    assert caught.value.problems[0].code == "tmp-unwritable"
