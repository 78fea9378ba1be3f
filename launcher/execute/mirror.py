"""The checkpoints of one run in an object store (`runtime.mirror`): layout, claim, upload, removal.

    URL/run.json                                 which run owns the URL, and which start of it writes
    URL/checkpoints/checkpoint-N-HASH/manifest.json   written last: without it nothing of the folder counts
    URL/checkpoints/checkpoint-N-HASH/files/…    the checkpoint, as its manifest lists it
    URL/checkpoints/checkpoint-N-HASH/records/…  what resuming on an empty disk needs of the run directory
    URL/result/…                                 the trained weights and result.json; manifest.json is last

HASH is the beginning of the SHA-256 of the manifest. So no upload ever replaces an object of a complete
checkpoint, whichever start or run writes it, and an upload that is repeated finds what is there already.
Nothing below the URL is removed but by the start that run.json names.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.files.checkpoint import MANIFEST, FileFacts, Manifest, file_facts, parse_manifest
from launcher.files.object_store import Store, StoreError
from launcher.files.safe_files import parse_json

CLAIM = "run.json"
CHECKPOINTS, RESULT = "checkpoints", "result"
FILES, RECORDS, RECORDS_LIST = "files", "records", "records.json"
RECORD = "mirror.json"
"""File in RUN_DIR: the id of the run in the store, and what is there."""
LINKED = ".mirroring"
"""In RUN_DIR: hard links to the files that are being uploaded, which retention cannot remove."""
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})-([0-9a-f]{12})")
_AT_A_TIME = 4
"""Objects that are written or read at the same time."""

Count = Callable[[int], None]


class TakenOver(Exception):
    """Another start owns the URL now."""


@dataclass(frozen=True, slots=True)
class Claim:
    """run.json: who owns the URL."""

    id: str
    """Of the run; the same in all its starts."""
    start: str
    """Of the start that may write."""
    run: str
    """Which run it is, for messages."""
    superseded: tuple[str, ...] = ()
    """Checkpoints of a continuation that was given up: neither resumed, counted nor removed."""


def new_claim(name: str, before: Claim | None, superseded: tuple[str, ...] = ()) -> Claim:
    """The claim of a start. name: of the run, for messages. before: that of its last start, if any."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    first = Claim(uuid.uuid4().hex, "", f"{name}, started on {socket.gethostname()} at {now}")
    given = () if before is None else before.superseded
    superseded = tuple(dict.fromkeys((*given, *superseded)))
    return replace(before or first, start=uuid.uuid4().hex, superseded=superseded)


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete checkpoint in the store."""

    name: str
    step: int
    manifest: Manifest
    text: bytes
    """The manifest as it is written."""

    @property
    def folder(self) -> str:
        return f"{CHECKPOINTS}/{self.name}"


def stored_name(step: int, manifest: bytes) -> str:
    """The folder of a checkpoint in the store."""
    return f"checkpoint-{step}-{hashlib.sha256(manifest).hexdigest()[:12]}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for another name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


class Mirror:
    """What one URL holds of a run. Methods raise StoreError."""

    def __init__(self, store: Store) -> None:
        self.store = store

    # --- who owns it

    def claim(self) -> Claim | None:
        """Who owns the URL; None where nobody does."""
        text = self.store.read(CLAIM)
        if text is None:
            return None
        try:
            found = parse_json(text)
            superseded = tuple(map(str, found["superseded"]))
            return Claim(str(found["id"]), str(found["start"]), str(found["run"]), superseded)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError("damaged", f"{CLAIM} cannot be read: {error!r}") from error

    def earlier_claim(self) -> Claim | None:
        """Who owned the URL before this start. Without it nobody can say whose the checkpoints there are."""
        found = self.claim()
        if found is None and any(self.names().values()):
            raise StoreError("damaged", f"{CLAIM} is missing beside complete checkpoints")
        return found

    def write_claim(self, claim: Claim) -> None:
        self.store.write(CLAIM, json.dumps({"schema_version": 1, **asdict(claim)}, indent=2).encode())

    def check_owner(self, claim: Claim) -> None:
        """TakenOver unless the URL is still that of this start."""
        if (now := self.claim()) is None or (now.id, now.start) != (claim.id, claim.start):
            raise TakenOver("run.json is gone" if now is None else f"it belongs to {now.run}")

    # --- what is there

    def names(self) -> dict[str, bool]:
        """Folder of a checkpoint -> whether all of it is there, by names and sizes alone."""
        return {name: MANIFEST in sizes for name, sizes in self._listing().items()}

    def _listing(self) -> dict[str, dict[str, int]]:
        """Folder of a checkpoint -> path in it -> bytes."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.store.sizes(CHECKPOINTS).items():
            parts = path.split("/", 2)
            if len(parts) == 3 and _NAME.fullmatch(parts[1]):
                found.setdefault(parts[1], {})[parts[2]] = size
        return found

    def complete(self, without: tuple[str, ...] = ()) -> Iterator[Stored]:
        """The complete checkpoints, those of the latest step first."""
        listing = self._listing()
        there = [name for name, sizes in listing.items() if MANIFEST in sizes and name not in without]
        for name in sorted(there, key=lambda name: (-(step_of(name) or 0), name)):
            found = self._read(name, listing[name])
            if found is not None:
                yield found

    def _read(self, name: str, sizes: Mapping[str, int]) -> Stored | None:
        text = self.store.read(f"{CHECKPOINTS}/{name}/{MANIFEST}")
        manifest = None if text is None else parse_manifest(text)
        if text is None or manifest is None or stored_name(manifest.step, text) != name:
            return None
        whole = all(sizes.get(f"{FILES}/{path}") == facts.bytes for path, facts in manifest.files.items())
        return Stored(name, manifest.step, manifest, text) if whole else None

    def records(self, stored: Stored) -> dict[str, FileFacts]:
        """Name -> what is there of the run directory's records."""
        name = f"{stored.folder}/{RECORDS_LIST}"
        text = self.store.read(name)
        if text is None:
            if self.store.sizes(f"{stored.folder}/{RECORDS}"):
                raise StoreError("damaged", f"{name} is missing")
            return {}
        try:
            return file_facts(parse_json(text))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError("damaged", f"{name} cannot be read: {error!r}") from error

    # --- what changes it

    def put(
        self, folder: str, files: Path, facts: Mapping[str, FileFacts], count: Count = lambda size: None
    ) -> None:
        """Copy files into a folder of the store, and read each one back: StoreError where its hash differs.

        count: gets the bytes that were written or read; files that are there and whole are only read.
        """
        there = self.store.sizes(folder)

        def one(item: tuple[str, FileFacts]) -> None:
            name, expected = item
            key = f"{folder}/{name}"
            if there.get(key) == expected.bytes:
                count(expected.bytes)
                if self.store.sha256(key, expected.bytes, count) == expected.sha256:
                    return
                count(-2 * expected.bytes)
            self.store.upload(files / name, key)
            count(expected.bytes)
            if self.store.sha256(key, expected.bytes, count) != expected.sha256:
                raise StoreError("damaged", f"{name} has another SHA-256 in the store than was written here")

        _each(one, sorted(facts.items(), key=lambda item: -item[1].bytes))

    def finish(self, stored: Stored, records: Mapping[str, FileFacts]) -> None:
        """Make a checkpoint complete whose files are in the store."""
        listed = {name: asdict(facts) for name, facts in records.items()}
        if listed:
            self.store.write(f"{stored.folder}/{RECORDS_LIST}", json.dumps(listed).encode())
        self.store.write(f"{stored.folder}/{MANIFEST}", stored.text)

    def remove(self, name: str, claim: Claim) -> None:
        """Remove a checkpoint, its manifest first: half a folder must not look complete.

        TakenOver where the URL is no longer that of this start.
        """
        self.check_owner(claim)
        assert _NAME.fullmatch(name), "a checkpoint's folder"
        self.store.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
        self.store.remove_folder(f"{CHECKPOINTS}/{name}")

    def get(self, folder: str, facts: Mapping[str, FileFacts], target: Path, count: Count) -> None:
        """Copy files of a folder of the store to `target`; the caller compares their hashes."""

        def one(item: tuple[str, FileFacts]) -> None:
            name, expected = item
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.store.download(f"{folder}/{name}", target / name)
            count(expected.bytes)

        _each(one, sorted(facts.items(), key=lambda item: -item[1].bytes))


def _each(function: Callable[[Any], None], items: list[Any]) -> None:
    """Call a function with every item, several at a time; the first error is raised, and ends the others."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        waiting = [pool.submit(function, item) for item in items]
        try:
            for done in waiting:
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
