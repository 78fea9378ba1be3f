"""Read a checkpoint's manifest, and check that the checkpoint is complete.

A checkpoint is written in RUN_DIR/checkpoints/.saving/, the manifest last, and then renamed to
RUN_DIR/checkpoints/checkpoint-N: a folder without a manifest is incomplete.
`launcher.train.checkpoint.saving` writes both.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.files.safe_files import parse_json
from launcher.tasks import task_named

MANIFEST = "manifest.json"
SAVING = ".saving"
"""Folder in checkpoints/ of a checkpoint that is being written."""
SPARE = 2**20
"""Bytes that a save leaves free for the logs of the run."""
_CONFIGURATIONS, _OF_A_TOKEN = 2 * 2**20, 128
UNREADABLE = ".unreadable"
"""Suffix of RNG states that launcher/train/checkpoint/resuming.py set aside; the checkpoint is complete."""
SCHEMA_VERSION = 1
SUPERSEDED = "superseded-"
"""Prefix of checkpoints that were set aside when a run resumed from an earlier step
(execute/run_dir.py)."""
ORIGIN = "origin.json"
"""File in RUN_DIR: the checkpoint of another run that this run resumed from."""
FINISHED_BEFORE = "COMPLETED.earlier"
"""File in RUN_DIR: the completion marker of a finished run that is extended, until it completes again."""

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_READERS = 4
"""Files hashed at the same time; more do not make a disk faster."""
_PIECE = 1 << 20
"""Bytes per read."""


def bytes_beside_tensors(vocab_size: int) -> int:
    """What a checkpoint or a result may take beside tensors: a tokenizer of 256,000 tokens has 32 MiB."""
    return _CONFIGURATIONS + _OF_A_TOKEN * vocab_size


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file of a checkpoint."""

    bytes: int
    sha256: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint when it was completed."""

    step: int
    world_size: int
    """Processes that wrote it."""
    files: Mapping[str, FileFacts]
    """Path below the checkpoint, with slashes -> the file; everything but the manifest itself."""
    bytes: int
    """Total of all files."""
    seconds: float
    """Duration of the save."""
    data: str | None
    """`key` of the prepared data (RUN_DIR/data.json); None for data that is streamed."""
    versions: Mapping[str, str]
    """Package -> version that wrote it."""
    elapsed: float | None = None
    """Training time so far, in seconds over all starts; None from older versions."""


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it is missing or invalid."""
    try:
        return parse_manifest((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def parse_manifest(text: bytes) -> Manifest | None:
    """The manifest that a file holds; None where it is invalid."""
    try:
        return _manifest(parse_json(text))
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _manifest(found: Any) -> Manifest:
    """Raises ValueError, TypeError or KeyError for what is not a manifest of this schema."""
    if not isinstance(found, dict) or found["schema_version"] != SCHEMA_VERSION:
        raise ValueError("not a manifest")
    files = file_facts(found["files"])
    data, versions = found["data"], dict(found["versions"])
    if not (data is None or isinstance(data, str)):
        raise ValueError("not a manifest")
    elapsed: Any = found.get("elapsed")
    is_number = isinstance(elapsed, int | float) and not isinstance(elapsed, bool)
    return Manifest(
        step=_count(found["step"]),
        world_size=_count(found["world_size"]),
        files=files,
        bytes=_count(found["bytes"]),
        seconds=float(found["seconds"]),
        data=data,
        versions={str(name): str(version) for name, version in versions.items()},
        elapsed=float(elapsed) if is_number and 0 <= elapsed < math.inf else None,
    )


def file_facts(found: Any) -> dict[str, FileFacts]:
    """The entry `files` of a manifest. ValueError, TypeError or KeyError where it is none, or empty."""
    files = {_inside(name): _file(facts) for name, facts in dict(found).items()}
    if not files:
        raise ValueError("not a manifest")
    return files


def _inside(name: str) -> str:
    """A relative path that stays below the checkpoint."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"{name} is outside the checkpoint")
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
    """Why a checkpoint is incomplete or damaged, one sentence; None if it is neither.

    hashes: also compare every byte. Files that are not in the manifest are ignored: converters add some.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        if _is_there(folder / MANIFEST):
            return f"its {MANIFEST} cannot be read"
        return f"it has no {MANIFEST}: the save was interrupted"
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
    """The first file that differs from what was written, one sentence; hashes: as in `defect`.

    count: called with the bytes of each read, from any thread.
    """
    for name, expected in files.items():
        size = _size(folder / _now(folder, name))
        if size is None:
            return f"{name} is missing"
        if size != expected.bytes:
            return f"{name} has {size} bytes, {expected.bytes} were written"
    return _changed(folder, files, count) if hashes else None


def _changed(folder: Path, files: Mapping[str, FileFacts], count: Callable[[int], None]) -> str | None:
    """The first file whose content differs from what was written."""
    lies = {name: _now(folder, name) for name in files}
    found = sha256_of(folder, lies.values(), count)
    for name, expected in files.items():
        sha256 = found[lies[name]]
        if isinstance(sha256, OSError):
            return f"{name} cannot be read: {sha256}"
        if sha256 != expected.sha256:
            return f"{name} was changed: its SHA-256 differs"
    return None


def _now(folder: Path, name: str) -> str:
    """The current name of a file: a worker renames RNG states that its torch cannot read."""
    if not name.startswith("rng_state") or _size(folder / name) is not None:
        return name
    return str(PurePosixPath(name).with_suffix(UNREADABLE))


def sha256_of(
    folder: Path, names: Iterable[str], count: Callable[[int], None] = lambda size: None
) -> dict[str, str | OSError]:
    """Name -> SHA-256 of the files below `folder`, or why it could not be read; several files at a time.

    count: called with the bytes of each read, from any thread.
    """
    wanted = sorted(set(names), key=lambda name: -(_size(folder / name) or 0))  # the longest first
    workers = max(1, min(_READERS, os.cpu_count() or 1, len(wanted)))
    given_up = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda name: _sha256(folder / name, given_up, count), wanted)
        try:
            return dict(zip(wanted, found, strict=True))
        except BaseException:  # such as a signal: the pool would wait for its threads
            given_up.set()
            raise


def _size(path: Path) -> int | None:
    """Bytes of a regular file; None where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_there(path: Path) -> bool:
    """Whether the file exists, even without permission to read it."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def _sha256(path: Path, given_up: threading.Event, count: Callable[[int], None]) -> str | OSError:
    """given_up: set when the result is no longer needed."""
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
    """Step -> complete checkpoint in `folder` (RUN_DIR/checkpoints), in order.

    Compares sizes, not hashes.
    """
    found = {step: path for step, path in _numbered(folder) if defect(path, hashes=False) is None}
    return dict(sorted(found.items()))


def incomplete_checkpoints(folder: Path) -> dict[Path, str]:
    """Checkpoint in `folder` -> why it is incomplete; also interrupted saves."""
    found = {path: defect(path, hashes=False) for _, path in sorted(_numbered(folder))}
    cut_off = f"it is still in {SAVING}: the save was interrupted"
    unfinished = {path: cut_off for _, path in sorted(_numbered(folder / SAVING))}
    return {path: text for path, text in {**found, **unfinished}.items() if text is not None}


def surplus(steps: Sequence[int], now: int, limit: int | None, best: int | None) -> list[int]:
    """Which checkpoints to remove when the one of step `now` is saved, the first to remove first. Pure.

    `limit` are kept, and always that of `now` and the best one. Those after `now` go first: the run went back
    to an earlier one, and trains these steps again.
    """
    if not limit or limit < 0:
        return []
    present = set(steps)
    kept = {now, best} & present
    order = sorted((n for n in present if n > now), reverse=True) + sorted(n for n in present if n <= now)
    too_many = len(present) - max(limit, len(kept))
    return [step for step in order if step not in kept][: max(0, too_many)]


def same_samples(folder: Path, other: Path) -> bool:
    """Whether two folders of prepared data have the same labels and sample files, byte for byte.

    A version of effilaunch that makes the key from other parts names the same samples differently. False
    where a folder is missing, and for images: their samples are paths, only the key covers what is in them.
    """
    try:
        old, new = (parse_json((each / "data.json").read_text("utf-8")) for each in (folder, other))
        alike = old["task"] == new["task"] and old["labels"] == new["labels"]
        if not alike or not task_named(new["task"]).reads_tokens:
            return False
        names = [sorted(path.name for path in each.glob("*.arrow")) for each in (folder, other)]
        return (
            bool(names[0])
            and names[0] == names[1]
            and all(filecmp.cmp(folder / name, other / name, shallow=False) for name in names[0])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_origin(run_dir: Path) -> Path | None:
    """The checkpoint of another run that this one resumed from, else None."""
    try:
        return Path(parse_json((run_dir / ORIGIN).read_text("utf-8"))["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Folders named checkpoint-N, with N."""
    try:
        entries = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError:
        return []
    return [(int(number[1]), path) for number, path in entries if number and path.is_dir()]
