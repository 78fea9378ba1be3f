"""Prepared data on disk: folders of the cache, named by their inputs and checked when they are opened.

A folder is written under a temporary name, hashed and renamed. It is complete where its files are those of
its manifest. A damaged one is written again, with a message; one that may not be read or written is a
MachineError.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.checkpoint import FileFacts, damage, file_facts
from launcher.files.rank_status import process_started
from launcher.files.safe_files import parse_json, read_json
from launcher.machine.probe import boot_id
from launcher.train.checkpoint.disk import clean, hash_and_sync, publish, sync_file, sync_folder
from launcher.train.job import Job
from launcher.train.progress import LEAST_S, Progress

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
STALE_S = 24 * 3600.0
"""Seconds without a write after which what another machine was building is a leftover."""
ABSENT = "it is not there"

_ASIDE = re.compile(r"\.[0-9a-f]{32}-(?:([0-9a-f]{8})-(\d+)-(\d+)|[^-]+)")
VERSION = 4
"""Part of every key: raised when the same settings would give other samples."""
RECORD = "data.json"


def cached(target: Path, title: str, build: Callable[[Path], None], *, rehash: bool) -> None:
    """Make sure that the folder `target` is whole; where it is not, `build` writes the files into a new one.

    title: what the folder holds, such as "prepared data". rehash: as `defect`. Safe when several processes
    ask at once: each writes aside, and the first one that is done counts. MachineError where the cache may
    not be read or written; raises what `build` raises otherwise.
    """
    wrong = defect(target, title, rehash=rehash)
    if wrong is None:
        return
    if wrong != ABSENT:
        print(f"cannot use the {title} in the cache ({target}: {wrong}): writing it again", file=sys.stderr)
    try:
        _build(target, title, build, rehash=rehash)
    except OSError as error:
        message = f"cannot write the {title}: {error}"
        hint = "set EFFILAUNCH_CACHE to a folder with space that you may write to"
        raise MachineError(Problem("cache-unwritable", message, file=str(target), hint=hint)) from error


def defect(folder: Path, title: str, *, rehash: bool) -> str | None:
    """What keeps a folder of the cache from being whole, in a sentence; ABSENT for none, None for nothing.

    rehash: read every byte; without it, only the files that were touched since they were hashed (another
    inode, size or time). MachineError where the folder belongs to somebody who does not let this user read.
    """
    try:
        return _defect(folder, title, rehash=rehash)
    except PermissionError as error:
        message = f"{_user()} may not read the {title}: {error.strerror}: {error.filename}"
        hint = "let the owner of the cache run `chmod -R g+rX` on it and keep a umask such as 027, or set "
        hint += "EFFILAUNCH_CACHE to a folder of your own"
        raise MachineError(Problem("cache-unreadable", message, file=str(folder), hint=hint)) from error
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _defect(folder: Path, title: str, *, rehash: bool) -> str | None:
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["schema_version"] != SCHEMA_VERSION:
            raise ValueError("another version wrote it")
        files, states = file_facts(manifest["files"]), dict(manifest["states"])
    except FileNotFoundError:
        unsealed = f"it has no {MANIFEST}: an earlier version wrote it, or it is damaged"
        return unsealed if os.path.lexists(folder) else ABSENT
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"its {MANIFEST} is damaged"
    for name in files:
        if os.path.lexists(folder / name) and not os.access(folder / name, os.R_OK):  # that is no damage
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / name))
    if wrong := damage(folder, files):
        return wrong
    touched = {name: facts for name, facts in files.items() if states.get(name) != _state(folder / name)}
    read = files if rehash else touched
    size = sum(facts.bytes for facts in read.values())
    with Progress(f"Checking the {title}", size, "B", least_s=LEAST_S) as progress:
        wrong = damage(folder, read, hashes=True, count=progress.add)
    if touched and wrong is None:  # such as a copied cache: the next one need not read it again
        with contextlib.suppress(OSError):
            _write_manifest(folder, files)
    return wrong


def _build(target: Path, title: str, build: Callable[[Path], None], *, rehash: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    aside = target.parent / _own_name(target.name)
    aside.mkdir()  # with the modes that the umask asks for: others may share the cache
    try:
        build(aside)
        files = [path for path in aside.rglob("*") if path.is_file()]
        for path in files:  # safetensors and temporary files have 0600 whatever the umask
            path.chmod(aside.stat().st_mode & 0o666)
        seal(aside, [path.relative_to(aside).as_posix() for path in files])
        if defect(target, title, rehash=rehash) is not None:  # else somebody else was first
            try:
                publish(aside, target)
            except OSError:
                if defect(target, title, rehash=rehash) is not None:
                    raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def seal(folder: Path, names: Sequence[str]) -> None:
    """Put files below a folder on the disk, and their manifest after them."""
    _write_manifest(folder, hash_and_sync(folder, names))
    for place in {folder, *((folder / name).parent for name in names)}:
        sync_folder(place)


def _write_manifest(folder: Path, files: dict[str, FileFacts]) -> None:
    found = {
        "schema_version": SCHEMA_VERSION,
        "files": {name: asdict(facts) for name, facts in sorted(files.items())},
        "states": {name: _state(folder / name) for name in sorted(files)},
    }
    part = folder / _own_name(MANIFEST)
    try:
        part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        sync_file(part)
        part.replace(folder / MANIFEST)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _state(path: Path) -> list[int]:
    """What changes when somebody writes to a file, whatever time they give it afterwards."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this machine were building, and what nobody wrote to for a day."""
    clean(folder)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = _ASIDE.fullmatch(path.name)
            if found and (_is_orphan(*found.groups()) or time.time() - _last_write(path) > STALE_S):
                shutil.rmtree(path, ignore_errors=True)


def _is_orphan(machine: str | None, pid: str | None, started: str | None) -> bool:
    """Whether the process that writes under this name was one of this machine, and has ended."""
    return machine == _machine() and process_started(int(pid or 0)) != int(started or 0)


def _last_write(folder: Path) -> float:
    times = [0.0]
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _own_name(name: str) -> str:
    """A hidden name that no other process writes under, and that identifies this one."""
    return f".{name}-{_machine()}-{os.getpid()}-{process_started(os.getpid()) or 0}"


def _machine() -> str:
    """Names the processes that this one can see: containers of one host may share name, boot and cache."""
    names: list[Any] = [socket.gethostname(), boot_id()]
    with contextlib.suppress(OSError):
        names.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - the target is no path
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return f"user {os.getuid()}"


def content_key(parts: Mapping[str, Any]) -> str:
    """A name for data made from `parts` (JSON values)."""
    text = json.dumps({"version": VERSION, **parts}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: Path) -> tuple[str, int]:
    """SHA-256 of a file, and the number of its line feeds, in one pass."""
    digest, lines = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            lines += chunk.count(b"\n")
    return digest.hexdigest(), lines


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over all that decides a tokenizer's output: its core, special tokens and chat template."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    parts = {
        "class": type(tokenizer).__name__,
        "core": core.to_str() if core is not None else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": str(tokenizer.chat_template),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def processing_digest(processing: Any) -> str:
    """SHA-256 over all that decides what a tokenizer, or a processor with one, makes of a row."""
    tokenizer = getattr(processing, "tokenizer", None)
    if tokenizer is None:
        return tokenizer_digest(processing)
    return content_key({"tokenizer": tokenizer_digest(tokenizer), "processor": processing.to_json_string()})


class SampleWriter:
    """Writes columns of samples to one Arrow stream file, a batch at a time, with flat memory.

    Lists are int32 token ids or labels, single numbers int64, scores float32, texts strings; images are a
    path or the bytes of a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = 0
        self._writer: Any = None

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append samples: what `arrow_columns` made, or the lists that it takes. All have the same length."""
        import pyarrow as pa

        count = len(next(iter(columns.values()), ()))
        if count == 0:
            return
        made = arrow_columns(columns)
        if self._writer is None:
            schema = pa.schema([(name, column.type) for name, column in made.items()])
            self._writer = pa.ipc.new_stream(str(self.path), schema)
        self._writer.write_batch(pa.record_batch(list(made.values()), names=list(made)))
        self.samples += count

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def arrow_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of at least one sample as Arrow arrays: a quarter of the lists' memory, and sent between
    processes without a copy. Arrow arrays stay as they are."""
    import pyarrow as pa

    return {
        name: values if isinstance(values, pa.Array) else pa.array(values, type=_arrow_type(name, values))
        for name, values in columns.items()
    }


def _arrow_type(name: str, values: Sequence[Any]) -> Any:
    import pyarrow as pa

    if name == "image_path":
        return pa.string()
    if name == "image_bytes":
        return pa.large_binary()
    if name == "image_paths":
        return pa.list_(pa.string())
    if name == "image_contents":
        return pa.list_(pa.large_binary())
    if isinstance(values[0], bool):
        return pa.bool_()
    if isinstance(values[0], str):
        return pa.string()
    if not isinstance(values[0], list):
        return pa.float32() if isinstance(values[0], float) else pa.int64()
    return pa.list_(pa.float32() if values[0] and isinstance(values[0][0], float) else pa.int32())


def open_samples(path: Path) -> Any:
    """The samples of a file as a memory-mapped `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_file(str(path))


def read_record(job: Job, *, rehash: bool = False) -> dict[str, Any]:
    """What `prepare` left in the run directory; RecipeError when it or its cache is gone or damaged.

    rehash: read the samples for that, which `prepare` does before each run.
    """
    path = job.run_dir / RECORD

    def refusal(message: str, file: Path | str) -> RecipeError:
        hint = f"prepare it again: python -m launcher.train.prepare {job.run_dir}"
        return RecipeError(Problem("data-not-prepared", message, file=str(file), hint=hint))

    try:
        record: Any = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise refusal(f"the data of this run is not prepared: {error}", path) from error
    folder = record.get("folder")
    wrong = None if folder is None else defect(Path(folder), "prepared data", rehash=rehash)
    if wrong is not None:
        raise refusal(f"the prepared data in the cache is gone or damaged: {wrong}", str(folder))
    return record
