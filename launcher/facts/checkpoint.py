"""What a checkpoint holds and whether it is whole, by the manifest that was written behind everything else.

A checkpoint is written in RUN_DIR/checkpoints/.saving/ and renamed to RUN_DIR/checkpoints/checkpoint-N when
its manifest is on the disk: a folder without one was never finished. `launcher.train.saving` writes both.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.facts.safe_files import parse_json

MANIFEST = "manifest.json"
SAVING = ".saving"
"""Below checkpoints/: where a checkpoint lies while it is written."""
UNREADABLE = ".unreadable"
"""Suffix of random states that were put aside (launcher/train/resuming.py); the checkpoint stays whole."""
SCHEMA_VERSION = 1
SUPERSEDED = "superseded-"
"""How names of checkpoints begin that were put aside when a run went back (execute/run_dir.py)."""
ORIGIN = "origin.json"
"""In RUN_DIR, of a run that goes on from another run's checkpoint: where that lies."""
FINISHED_BEFORE = "COMPLETED.earlier"
"""In RUN_DIR, of a finished run that is made longer: its marker, until a newer result takes the place."""

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_READERS = 4
_PIECE = 1 << 20
"""Bytes that are read of a file at once."""
"""Files that are hashed at one time; more do not make a disk faster."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file of a checkpoint."""

    bytes: int
    sha256: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint held when it was finished."""

    step: int
    world_size: int
    """Processes that wrote it."""
    files: Mapping[str, FileFacts]
    """Path below the checkpoint, with slashes -> the file; everything but the manifest itself."""
    bytes: int
    """Of all files."""
    seconds: float
    """From the beginning of the save to its manifest."""
    data: str | None
    """`key` of the prepared data (RUN_DIR/data.json); None for data that is streamed."""
    versions: Mapping[str, str]
    """Package -> version that wrote it."""
    elapsed: float | None = None
    """Seconds that the run took up to here, over all its starts; None where an older version wrote it."""


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none, or none that can be understood."""
    try:
        found = parse_json((folder / MANIFEST).read_text("utf-8"))
        return _manifest(found)
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _manifest(found: Any) -> Manifest:
    """Raises ValueError, TypeError or KeyError for what is not a manifest of this schema."""
    if not isinstance(found, dict) or found["schema_version"] != SCHEMA_VERSION:
        raise ValueError("not a manifest")
    files = file_facts(found["files"])
    data, versions = found["data"], dict(found["versions"])
    if not (data is None or isinstance(data, str)):
        raise ValueError("not a manifest")
    return Manifest(
        step=_count(found["step"]),
        world_size=_count(found["world_size"]),
        files=files,
        bytes=_count(found["bytes"]),
        seconds=float(found["seconds"]),
        data=data,
        versions={str(name): str(version) for name, version in versions.items()},
        elapsed=_elapsed(found.get("elapsed")),
    )


def file_facts(found: Any) -> dict[str, FileFacts]:
    """The entry `files` of a manifest. ValueError, TypeError or KeyError where it is none, or empty."""
    files = {_inside(name): _file(facts) for name, facts in dict(found).items()}
    if not files:
        raise ValueError("not a manifest")
    return files


def _elapsed(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < math.inf else None


def _inside(name: str) -> str:
    """A relative path that stays below the checkpoint."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"{name} leads out of the checkpoint")
    return name


def _file(facts: Any) -> FileFacts:
    sha256 = facts["sha256"]
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError("not a SHA-256")
    return FileFacts(_count(facts["bytes"]), sha256)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("not a count")
    return value


def defect(folder: Path, *, hashes: bool) -> str | None:
    """What keeps a checkpoint from being whole, in one sentence; None where nothing does.

    hashes: read every byte and compare, too. Files that the manifest does not name are no defect: converters
    write beside those that they read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        if _is_there(folder / MANIFEST):
            return f"its {MANIFEST} cannot be read"
        return f"it has no {MANIFEST}: the save was not finished"
    number = _NAME.fullmatch(folder.name)
    if number is not None and int(number[1]) != manifest.step:
        return f"its {MANIFEST} is of step {manifest.step}"
    return damage(folder, manifest.files, hashes=hashes)


def damage(
    folder: Path,
    files: Mapping[str, FileFacts],
    *,
    hashes: bool = False,
    count: Callable[[int], None] = lambda size: None,
) -> str | None:
    """The first file below a folder that is not what was written, in a sentence; hashes as `defect`.

    count: is told the bytes that are read, by any thread.
    """
    for name, expected in files.items():
        size = _size(folder / _now(folder, name))
        if size is None:
            return f"{name} is missing"
        if size != expected.bytes:
            return f"{name} has {size} bytes, {expected.bytes} were written"
    return _changed(folder, files, count) if hashes else None


def _changed(folder: Path, files: Mapping[str, FileFacts], count: Callable[[int], None]) -> str | None:
    """The first file whose content is not what was written."""
    lies = {name: _now(folder, name) for name in files}
    found = sha256_of(folder, lies.values(), count)
    for name, expected in files.items():
        sha256 = found[lies[name]]
        if isinstance(sha256, OSError):
            return f"{name} cannot be read: {sha256}"
        if sha256 != expected.sha256:
            return f"{name} is not what was written: its SHA-256 differs"
    return None


def _now(folder: Path, name: str) -> str:
    """What a file is called by now: a worker renames random states that its torch will not read."""
    if not name.startswith("rng_state") or _size(folder / name) is not None:
        return name
    return str(PurePosixPath(name).with_suffix(UNREADABLE))


def sha256_of(
    folder: Path, names: Iterable[str], count: Callable[[int], None] = lambda size: None
) -> dict[str, str | OSError]:
    """Name -> SHA-256 of the files below `folder`, or why it could not be read; several files at a time.

    count: is told the bytes of each piece, by any thread.
    """
    wanted = sorted(set(names), key=lambda name: -(_size(folder / name) or 0))  # the longest begins first
    workers = max(1, min(_READERS, os.cpu_count() or 1, len(wanted)))
    given_up = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda name: _sha256(folder / name, given_up, count), wanted)
        try:
            return dict(zip(wanted, found, strict=True))
        except (
            BaseException
        ):  # such as a signal: the pool waits for its threads, however long their files are
            given_up.set()
            raise


def _size(path: Path) -> int | None:
    """Bytes of a file; None where there is none that could be read."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_there(path: Path) -> bool:
    """Whether there is such a file, be it one that this user may not look at."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def _sha256(path: Path, given_up: threading.Event, count: Callable[[int], None]) -> str | OSError:
    """given_up: set when nobody waits for the answer any more."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    try:
        with path.open("rb", buffering=0) as stream:
            while not given_up.is_set() and (size := stream.readinto(buffer)):
                digest.update(buffer[:size])
                count(size)
        return digest.hexdigest()
    except OSError as error:
        return error


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint below `folder` (RUN_DIR/checkpoints), in order, those alone that are whole.

    Sizes are compared, hashes are not.
    """
    found = {step: path for step, path in _numbered(folder) if defect(path, hashes=False) is None}
    return dict(sorted(found.items()))


def incomplete_checkpoints(folder: Path) -> dict[Path, str]:
    """Checkpoint below `folder` -> what keeps it from being whole; also what a save left half-written."""
    found = {path: defect(path, hashes=False) for _, path in sorted(_numbered(folder))}
    cut_off = f"it was not yet moved out of {SAVING}: the save was not finished"
    unfinished = {path: cut_off for _, path in sorted(_numbered(folder / SAVING))}
    return {path: text for path, text in {**found, **unfinished}.items() if text is not None}


def read_origin(run_dir: Path) -> Path | None:
    """The checkpoint of another run that this one began with; None where it began at the first step."""
    try:
        return Path(parse_json((run_dir / ORIGIN).read_text("utf-8"))["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Folders named checkpoint-N, with N."""
    found = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for path in entries:
        number = _NAME.fullmatch(path.name)
        if number and path.is_dir():
            found.append((int(number[1]), path))
    return found
