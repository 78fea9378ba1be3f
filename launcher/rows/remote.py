"""Data files at URLs that fsspec reads: copied into the cache, again when the store has another version.

The rows come from the copies, so the key of the prepared data has the hash of what was read. Where the store
cannot be reached, the copies of the last time are used, with a message: a node without a network trains on
what `prepare` fetched.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.object_store import Store, StoreError, lacks_package
from launcher.files.safe_files import read_json, write_json
from launcher.machine.probe import cache_root
from launcher.machine.software import require_modules
from launcher.rows.files import holds_rows, is_data_file, known_suffixes
from launcher.rows.splits import TRAIN, choose, split_lines

_VERSION = ("ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified")
"""Keys of an object's facts that change with its content; the size does, too."""
_urls: dict[str, str] = {}
"""Copy in the cache -> URL, of what this process has asked for."""


def name_of(file: Path) -> str:
    """The name of a data file for messages and rows: the URL of a copy, else its path."""
    return _urls.get(str(file), str(file))


@functools.cache
def remote_files(url: str, split: str = TRAIN) -> Sequence[Path]:
    """Copies of the data files of a split of a URL: of a file, a folder or a pattern; sorted by URL.

    The store is asked once per process, so that all epochs of a stream read the same version.

    RecipeError where there are none; MachineError where the store cannot be read and there is no copy.
    """
    if absent := lacks_package(url):
        require_modules([absent])
    note = cache_root() / "remote" / f"{_digest(f'{split} {url}')}.json"
    try:
        found = {
            object_url: _copy(store, name, object_url) for store, name, object_url in _objects(url, split)
        }
    except StoreError as error:
        before = _noted(note) if error.kind == "unreachable" else {}
        if not before:
            raise _unreadable(url, error) from error
        print(f"{url} cannot be reached ({error.reason}): using the copy that was read last", flush=True)
        found = before
    else:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {name: str(path) for name, path in found.items()})
    _urls.update({str(path): name for name, path in found.items()})
    return [found[name] for name in sorted(found)]


def _noted(note: Path) -> dict[str, Path]:
    """The copies of the last time, if all are still there."""
    try:
        found = {str(name): Path(path) for name, path in read_json(note).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
    return found if all(path.is_file() for path in found.values()) else {}


def _objects(url: str, split: str) -> list[tuple[Store, str, str]]:
    """(store, path in it, URL) of every data file of a split that a URL names."""
    is_pattern = glob.has_magic(url) and urlsplit(url).scheme not in ("http", "https")
    if is_pattern:
        parts = url.split("/")
        first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
        store = Store("/".join(parts[:first]))
        names = _data_files(store.glob("/".join(parts[first:])), url, "the pattern matches no data file")
    else:
        store = Store(url)
        if is_data_file(Path(urlsplit(url).path)):
            return [(store, "", url)]
        names = _data_files(list(store.sizes()), url, "there is no data file below it")
    chosen = choose(sorted(names), split, url, is_pattern=is_pattern)
    print("; ".join(split_lines(url, chosen, offer=False)), flush=True)
    return [(store, name, f"{store.url}/{name}") for name in chosen.names]


def _data_files(names: list[str], url: str, why: str) -> list[str]:
    hidden = (".", "_")
    data = [
        name for name in names
        if not any(part.startswith(hidden) for part in name.split("/")) and holds_rows(Path(name))
    ]  # fmt: skip
    if not data:
        hint = f"known kinds are {known_suffixes()}"
        raise RecipeError(Problem("data-missing", why, file=url, hint=hint))
    return data


def _copy(store: Store, name: str, url: str) -> Path:
    """The copy of one object, which is fetched if the cache lacks this version of it."""
    info = store.info(name)
    version = {key: str(info[key]) for key in _VERSION if info.get(key)}
    size = info.get("size")
    key = _digest(json.dumps([url, size, version], sort_keys=True))
    target = cache_root() / "remote" / key / PurePosixPath(urlsplit(url).path).name
    if version and target.is_file() and target.stat().st_size == size:
        return target
    aside = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        store.download(name, aside)
        if size is not None and aside.stat().st_size != size:
            raise StoreError("damaged", f"{aside.stat().st_size} of {size} bytes arrived")
        aside.replace(target)
    except OSError as error:
        message = f"cannot write the copy of {url}: {error.strerror or error}"
        hint = "set EFFILAUNCH_CACHE to a folder with space that you may write to"
        problem = Problem("cache-unwritable", message, file=str(target.parent), hint=hint)
        raise MachineError(problem) from error
    finally:
        aside.unlink(missing_ok=True)
    return target


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _unreadable(url: str, error: StoreError) -> RecipeError | MachineError:
    if error.kind == "absent":
        hint = "check the bucket and the path"
        return RecipeError(Problem("data-missing", f"no such object: {error.reason}", file=url, hint=hint))
    hint = "check the network and the credentials of this process (for S3: AWS_ACCESS_KEY_ID, AWS_PROFILE, …)"
    return MachineError(Problem(f"data-{error.kind}", f"cannot be read: {error.reason}", file=url, hint=hint))
