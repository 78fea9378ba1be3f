"""The save of a rehearsal: every rank writes its share of a checkpoint where the run would, and reads what
another machine wrote. What a disk refuses is noted, and never keeps the other ranks waiting."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.facts.rehearsal_course import SHARE, Course
from launcher.planner.rehearsal import TOKEN
from launcher.train.together import of_all

CHUNK = 8 * 2**20
WRITE_S = 60.0
"""A rank stops writing then: it has shown how fast it is."""
SEEN_S = 15.0
"""So long a file of another machine may take to be seen: NFS keeps what it knows of a folder for a while."""
READ = 64 * 2**20
"""Bytes of another machine's file that are read and compared."""
ROOM = 4
"""All shares together take at most this part of what is free."""


def save(course: Course, folder: Path, ranks: Sequence[dict[str, Any]], me: int) -> list[dict[str, Any]]:
    """Write, look, read, remove; what every rank found, by rank. All ranks must call it.

    ranks: what all told of themselves at the roll.
    """
    mine = folder / SHARE.format(me)
    told: dict[str, Any] = {"rank": me, "full_bytes": course.share(me), "error": None}
    try:
        size = min(of_all(_bytes(course, me, folder, len(ranks))))  # of the fullest disk
        of_all(None)  # all write at the same time, as in a checkpoint
        told |= _write(mine, max(TOKEN, min(size, course.share(me))))
        written = of_all(told)
        told |= _look(folder, written, ranks, me)
        of_all(None)  # nobody removes what another one still reads
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    return of_all(told)


def _bytes(course: Course, me: int, folder: Path, ranks: int) -> int:
    """The most that this rank would write of its share."""
    try:
        free = os.statvfs(folder)
    except OSError:
        return TOKEN
    return max(TOKEN, min(course.cap_bytes, free.f_bavail * free.f_frsize // (ROOM * ranks)))


def _write(path: Path, size: int) -> dict[str, Any]:
    """Write and bring to the disk; bytes, seconds, digest of the file's beginning."""
    piece = os.urandom(min(CHUNK, size))  # what a disk cannot compress
    digest, done = hashlib.sha256(), 0
    begun = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            while done < size and time.perf_counter() - begun < WRITE_S:
                part = piece[: size - done]
                part = part[: file.write(part)]
                digest.update(part[: max(0, READ - done)])
                done += len(part)
            os.fsync(file.fileno())
    except OSError as error:
        return {"error": f"{error.strerror or error} ({path})", "bytes": done, "seconds": None, "sha256": ""}
    seconds = time.perf_counter() - begun
    return {"bytes": done, "seconds": seconds, "sha256": digest.hexdigest(), "hash_s": _hash_seconds(piece)}


def _hash_seconds(piece: bytes) -> float:
    """Seconds a byte of what seals a checkpoint."""
    begun = time.perf_counter()
    hashlib.sha256(piece).digest()
    return (time.perf_counter() - begun) / max(1, len(piece))


def _look(
    folder: Path, written: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]], me: int
) -> dict[str, Any]:
    """Which files of other machines this rank does not see, and what it read of one of them."""
    others = [told["rank"] for told in written if told["error"] is None and told["rank"] != me]
    elsewhere = [number for number in others if _place(ranks[number]) != _place(ranks[me])]
    firsts = list({_place(ranks[number]): number for number in reversed(elsewhere)}.values())
    seen_after, unseen = _await(folder, sorted(firsts))
    candidates = [number for number in (elsewhere or others) if number not in unseen]
    behind = [number for number in candidates if number > me]
    chosen = (behind or candidates or [None])[0]  # the next one, so that not all read the same file
    read = None if chosen is None else _read(folder, written[chosen])
    return {"unseen": sorted(unseen), "seen_after_s": seen_after, "read": read}


def _place(facts: dict[str, Any]) -> tuple[int, str]:
    return facts["node"], facts["host"]


def _await(folder: Path, ranks: Sequence[int]) -> tuple[float, set[int]]:
    """(seconds until the last was seen, ranks whose file was not)."""
    begun, unseen, after = time.monotonic(), set(ranks), 0.0
    while unseen and time.monotonic() - begun < SEEN_S:
        try:
            # A listing asks a file server anew, where a single name may be cached.
            names = {path.name for path in folder.iterdir()}
        except OSError:
            names = set()
        found = {number for number in unseen if SHARE.format(number) in names}
        if found:
            unseen, after = unseen - found, time.monotonic() - begun
        if unseen:
            time.sleep(0.2)
    return after, unseen


def _read(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Another rank's file: whole, right, and how fast."""
    path, digest, done = folder / SHARE.format(told["rank"]), hashlib.sha256(), 0
    begun, spent = time.perf_counter(), 0.0
    try:
        with path.open("rb", buffering=0) as file:
            while done < READ and (part := file.read(CHUNK)):
                spent += time.perf_counter() - begun
                digest.update(part[: READ - done])
                done += len(part)
                begun = time.perf_counter()
            whole = os.fstat(file.fileno()).st_size == told["bytes"]
    except OSError as error:
        return {"rank": told["rank"], "right": False, "bytes_per_s": None, "error": error.strerror}
    right = whole and digest.hexdigest() == told["sha256"]
    return {"rank": told["rank"], "right": right, "bytes_per_s": done / max(spent, 1e-9), "error": None}
