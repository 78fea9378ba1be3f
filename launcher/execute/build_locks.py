"""Removes the locks that killed extension builds left (launcher/facts/build_locks.py says why)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from launcher.facts.build_locks import stale_locks


def remove_stale_locks(environ: Mapping[str, str]) -> list[Path]:
    """Remove the locks of dead builds in the folder that torch will use; returns them."""
    removed = []
    for lock in stale_locks(environ):
        with contextlib.suppress(OSError):  # somebody else may remove it first
            lock.unlink()
            removed.append(lock)
    return removed
