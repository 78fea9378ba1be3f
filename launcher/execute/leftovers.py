"""Remove what killed runs leave on a machine: build locks, shared-memory buffers, swap files of an offload.

Build locks: see launcher/machine/storage.py. Shared memory: DeepSpeed creates a buffer of 66 MiB per rank
of a CPU run in /dev/shm and never removes it (`shm_initialize` in csrc/cpu/comm/shm.cpp; nobody calls
`shared_close`, 0.19.8); a rank that starts early would read the flags of a killed run with the same port.
Swap files: DeepSpeed writes `optimizer/rankN/*.tensor.swp` and `<dtype>params/rankN/*.tensor.swp` into
`zero_stage_3` of nvme_path, the same names in every run, and does not remove those of the optimizer: two
runs in one folder would read each other's weights, and each run leaves up to 18 bytes per parameter. A lock
file shows which run uses the folder, and that its files may be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.machine.storage import stale_locks


def remove_stale_locks(environ: Mapping[str, str]) -> list[Path]:
    """Remove the locks of dead builds in the folder that torch will use; returns them."""
    removed = []
    for lock in stale_locks(environ):
        with contextlib.suppress(OSError):  # somebody else may remove it first
            lock.unlink()
            removed.append(lock)
    return removed


SHARED_MEMORY = Path("/dev/shm")


def remove_shared_buffers(master_port: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove this user's buffers of the run with this port. No rank of it may be alive."""
    for path in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{master_port}_*"):
        with contextlib.suppress(OSError):  # somebody else may remove it first
            path.unlink()


LOCK = ".effilaunch-nvme.lock"
_KEY = "sharding.nvme_path"
_FILES = ("zero_stage_3/optimizer/rank*/*.tensor.swp", "zero_stage_3/*params/rank*/*.tensor.swp")


def swap_files(folder: Path) -> dict[Path, int]:
    """DeepSpeed's files under an nvme_path -> bytes."""
    found = {}
    for pattern in _FILES:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # its run removes it just now
                found[path] = path.stat().st_size
    return found


@contextlib.contextmanager
def reserved_folder(folder: Path) -> Iterator[int]:
    """Reserve the folder, which is created if missing; yield the bytes of a killed run that were removed.

    The files of this run are removed at the end. MachineError (4) if another run has the folder, or for files
    that effilaunch did not write.
    """
    descriptor = _locked(folder)
    try:
        freed = _removed(folder)
        try:
            yield freed
        finally:
            _removed(folder)
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """The descriptor of the lock. The lock file stays: a lock on a removed file would exclude nobody."""
    lock = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = 0 if lock.exists() else sum(swap_files(folder).values())
        if foreign:
            message = f"has {foreign / 2**20:,.1f} MiB of DeepSpeed's files that no run of effilaunch wrote"
            hint = f"name another folder, or remove {folder / 'zero_stage_3'} if nothing uses it"
            raise MachineError(Problem("nvme-foreign", f"{folder} {message}", path=_KEY, hint=hint))
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message, hint = f"{folder} cannot be written to: {error.strerror}", "name a folder on a local disk"
        raise MachineError(Problem("nvme-unwritable", message, path=_KEY, hint=hint)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 100, 0).decode("utf-8", errors="replace").strip()
        os.close(descriptor)
        message = f"another run{f' (process {holder})' if holder else ''} keeps its states in {folder}"
        hint = "wait for it, or name another folder"
        raise MachineError(Problem("nvme-in-use", message, path=_KEY, hint=hint)) from None
    with contextlib.suppress(OSError):  # a full disk: the others' error does not name this process
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _removed(folder: Path) -> int:
    """Remove the files, and their folders if empty; the bytes that were freed."""
    freed = 0
    for path, size in swap_files(folder).items():
        with contextlib.suppress(OSError):
            path.unlink()
            freed += size
    root = folder / "zero_stage_3"
    for inner in [*root.glob("*/rank*"), *root.glob("*"), root]:
        with contextlib.suppress(OSError):  # not empty, or not there
            inner.rmdir()
    return freed
