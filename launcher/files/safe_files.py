"""Read untrusted files (recipes, configurations, records of a run) safely; write files atomically.

Opening never blocks and reading is bounded: a FIFO, a device, /proc/kmsg or a huge sparse file is an error
within milliseconds, never a hang or a MemoryError. Errors are OSError, whose `strerror` is the reason, and
ValueError for content.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from launcher.errors import Problem, RecipeError

LARGEST_TEXT = 1_000_000
"""Largest recipe, hook file, chat template, hostfile or DeepSpeed profile, in bytes."""
LARGEST_CONFIG = 16 << 20
"""Largest JSON configuration; a config.json with an entry per expert has some MB."""
LARGEST_RECORD = 256 << 20
"""Largest record of a run; metrics.jsonl has about 300 bytes per line."""
LONGEST_LINE = 1 << 20
"""Longest line of a JSON Lines record, in bytes."""


_T = TypeVar("_T")


def with_descriptor(read: Callable[[], _T]) -> _T:
    """What this returns, as soon as the system has a descriptor for it.

    For what decides whether processes live: "cannot be opened now" is not "has ended".
    """
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        time.sleep(0.1)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # also: name too long, symlink loop, null byte
        return None


def expanded(path: str | Path) -> Path:
    """The path with `~` expanded; unchanged for an unknown user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises


def exists(path: Path) -> bool:
    """Whether the file or folder exists; False also for an invalid name."""
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """Whether it is a regular file; False also for an invalid name."""
    return (mode := _mode(path)) is not None and stat.S_ISREG(mode)


def is_dir(path: Path) -> bool:
    """Whether it is a folder; False also for an invalid name."""
    return (mode := _mode(path)) is not None and stat.S_ISDIR(mode)


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file; OSError for anything else."""
    # Without O_NONBLOCK, opening a FIFO or reading /proc/kmsg would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # open has refused a directory
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield stream


def read_bytes(path: str | Path, largest: int) -> bytes:
    """The content of a regular file of at most `largest` bytes; OSError for anything else."""
    with opened(path) as stream:
        if os.fstat(stream.fileno()).st_size > largest:
            raise _too_large(path, largest)
        parts, size = [], 0
        while part := stream.read(min(1 << 20, largest + 1 - size)):  # files of /proc have a size of 0
            parts.append(part)
            size += len(part)
            if size > largest:
                raise _too_large(path, largest)
    return b"".join(parts)


def _too_large(path: str | Path | None, largest: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {largest:,} bytes", path and str(path))


def bounded(text: str, largest: int) -> str:
    """The text of no file, refused as `read_text` refuses that of a file."""
    if len(text.encode("utf-8", errors="replace")) > largest:
        raise _too_large(None, largest)
    return text


def read_text(path: str | Path, largest: int) -> str:
    """The same as text; ValueError (UnicodeDecodeError) where it is not UTF-8."""
    return read_bytes(path, largest).decode("utf-8-sig")


def read_json(path: str | Path, largest: int = LARGEST_CONFIG) -> Any:
    """The same as a JSON value; ValueError where it is not JSON, or nested too deeply for the parser."""
    return parse_json(read_text(path, largest))


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON; ValueError for any error.

    `json.loads` raises RecursionError for deep nesting.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object that a run wrote; RecipeError (`record-unreadable`) where it is damaged."""
    try:
        found = read_json(path, LARGEST_RECORD)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if isinstance(found, dict):
            return found
        reason = "it is not a JSON object"
    hint = "the file was changed after the run wrote it: restore it, or start a new run"
    raise RecipeError(Problem("record-unreadable", f"cannot be read: {reason}", str(path), hint=hint))


def read_lines(path: str | Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line of a JSON Lines record with its line end, and its object; for files of any size.

    None for a line that is not a JSON object (a killed process or a full disk leaves partial lines) and for
    each part of a line that is too long. OSError where the file cannot be read.
    """
    with opened(path) as stream:
        begins = True
        while part := stream.readline(LONGEST_LINE):
            ends = part.endswith(b"\n")
            whole = ends or len(part) < LONGEST_LINE
            yield part if ends or not whole else part + b"\n", _object(part) if begins and whole else None
            begins = ends


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines record (`read_lines`); empty where it cannot be read.

    For reading only: do not write the result back.
    """
    try:
        if Path(path).stat().st_size > LARGEST_RECORD:
            return []
        return [row for _, row in read_lines(path) if row is not None]
    except (OSError, ValueError):
        return []


def is_after(row: dict[str, Any] | None, step: float) -> bool:
    """Whether a row of a record belongs to a later step; False where its step is not a number."""
    found = None if row is None else row.get("step")
    return isinstance(found, int | float) and not isinstance(found, bool) and found > step


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: next to the target, then rename. On OSError nothing is left."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON value. ValueError for NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
