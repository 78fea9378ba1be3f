"""Stale build locks against torch's own FileBaton: a dead builder's lock goes, a living one's stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.execute.leftovers import remove_stale_locks

pytest.importorskip("torch")

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(3600)
"""


def test_only_the_lock_of_a_dead_build_is_removed(tmp_path):
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    lock = folder / "lock"
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    builder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    with builder:
        assert builder.stdout.readline() == "held\n"
        assert remove_stale_locks(environ) == []
        assert lock.exists()
        builder.kill()
    assert remove_stale_locks(environ) == [lock]
    assert not lock.exists()


def test_no_folder_no_locks(tmp_path):
    assert remove_stale_locks({"HOME": str(tmp_path)}) == []


def test_a_process_that_ends_while_it_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    real = Path.iterdir

    def gone(path):
        if path.name == "fd" and path.parent.name != str(os.getpid()):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(Path, "iterdir", gone)
    assert remove_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [folder / "lock"]
