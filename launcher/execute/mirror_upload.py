"""The process that copies a run's complete checkpoints into its object store: `… mirror_upload RUN_DIR`.

A process of its own, at low priority: no step waits for it, and what the ranks and their launcher do does not
end it. Its standard input is the run's: the first line is the order, `newest` and `all` ask it to end after
the newest checkpoint or after everything, the end of the file to end at once, since the run is gone. What it
did is in RUN_DIR/mirror.json, and lines for the user are in logs/mirror.txt.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher.execute.mirror import FILES as FILES_FOLDER
from launcher.execute.mirror import (
    LINKED,
    RECORD,
    RECORDS,
    RESULT,
    Claim,
    Mirror,
    Stored,
    TakenOver,
    step_of,
    stored_name,
)
from launcher.files.checkpoint import MANIFEST, FileFacts, parse_manifest, sha256_of, surplus
from launcher.files.object_store import Store, StoreError
from launcher.files.redaction import hider, secret_values
from launcher.files.safe_files import LARGEST_RECORD, parse_json, read_json, write_json

Ending = Literal["", "newest", "all"]
"""What is uploaded before it ends; empty: it goes on."""
LINES = "mirror.txt"
"""In logs/: lines for the user."""
POLL_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, LAST_PAUSE_S = 5.0, 300.0, 5.0
"""After a failed upload; the last one is the longest while the run waits."""
_STATUS_S = 0.5
_NICE = 10
ERRORS = "mirror.err"
"""In logs/: the traceback of the process, if it ended with one."""
PATTERNS = ("recipe.yaml", "plan.json", "plan-*.json", "metrics*.jsonl", "restarts.jsonl")
"""Files of the run directory that a run on an empty disk needs, or continues."""
_MARKER = "COMPLETED"


class _Vanished(Exception):
    """The checkpoint was removed by retention before its upload began."""


@dataclass(frozen=True, slots=True)
class UploadOrder:
    """What the run asks for."""

    url: str
    shown: str
    """The URL with the recipe's references to the environment, for files."""
    claim: Claim
    limit: int | None
    """trainer.save_total_limit."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_line(cls, line: str) -> UploadOrder:
        found = parse_json(line)
        claim = found["claim"]
        whole = Claim(**{**claim, "superseded": tuple(claim["superseded"])})
        return cls(found["url"], found["shown"], whole, found["limit"])


@dataclass(slots=True)
class UploadRecord:
    """RUN_DIR/mirror.json."""

    url: str
    id: str
    start: str = ""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Complete in the store: step, name, bytes, seconds of the upload (None for an earlier start's)."""
    result: bool = False
    """Whether the trained weights are there."""
    uploading: dict[str, Any] | None = None
    """what, bytes (written and read back), done."""
    problem: dict[str, Any] | None = None
    """what, kind, reason of the last failure; None since the last success."""
    skipped: list[str] = field(default_factory=list)
    """Checkpoints that were removed here before they could be uploaded."""


@dataclass(slots=True)
class Uploader:
    """Uploads what appears in a run directory."""

    run_dir: Path
    mirror: Mirror
    order: UploadOrder
    ending: queue.Queue[Ending] = field(default_factory=queue.Queue)
    _ending: Ending = ""
    _pause: float = 0.0
    _there: dict[str, int] = field(default_factory=dict)
    """Complete checkpoint in the store -> step."""
    _found: dict[tuple[str, int], Stored] = field(default_factory=dict)
    """Checkpoint here, time of its manifest -> what it is in the store."""
    _knows_store: bool = False
    _gone: set[str] = field(default_factory=set)
    """Names of checkpoints that were removed here before their upload."""
    _written: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    progress: UploadRecord = field(init=False)

    def __post_init__(self) -> None:
        self.progress = UploadRecord(self.order.shown, self.order.claim.id, self.order.claim.start)

    def work(self) -> None:
        """Upload until the run asks to end, or another start owns the URL."""
        self._write()
        while True:
            self._wait(0.0)  # what the run asked for meanwhile
            try:
                busy = self._turn()
                self._pause = 0.0
            except TakenOver as error:
                self._fail("everything", "taken-over", str(error))
                return
            except (StoreError, OSError) as error:
                what = (self.progress.uploading or {}).get("what", "the next checkpoint")
                kind = error.kind if isinstance(error, StoreError) else "local"
                self._fail(what, kind, _reason(error))
                if self._ending and isinstance(error, StoreError) and error.lasts:
                    return
                self._pause = min(max(FIRST_PAUSE_S, 2 * self._pause), LONGEST_PAUSE_S)
                self._wait(min(self._pause, LAST_PAUSE_S) if self._ending else self._pause)
                continue
            if not busy and self._ending:
                return
            if not busy:
                self._wait(POLL_S)

    def _turn(self) -> bool:
        """Upload one thing; False where nothing is left."""
        if not self._knows_store:
            self._read_store()
        found = self._next()
        if found is not None:
            try:
                self._upload(found)
            except _Vanished:
                self._gone.add(found.name)
                self.progress.skipped.append(f"checkpoint-{found.step}")
                self._write()
            return True
        marker = self.run_dir / _MARKER
        if self._ending == "all" and not self.progress.result and marker.is_file():
            self._upload_result()
            return True
        return False

    def _read_store(self) -> None:
        whole = self.mirror.complete(self.order.claim.superseded)
        found = {stored.name: stored for stored in whole}
        self._there, self._knows_store = {name: stored.step for name, stored in found.items()}, True
        known = {row["name"] for row in self.progress.checkpoints}
        self.progress.checkpoints += [
            {"step": stored.step, "name": name, "bytes": stored.manifest.bytes, "seconds": None}
            for name, stored in found.items()
            if name not in known
        ]
        self._settle()

    # --- what is to be uploaded

    def _here(self) -> dict[str, Stored]:
        """Name in the store -> complete checkpoint of this run directory."""
        found = {}
        for path in (self.run_dir / "checkpoints").glob(f"checkpoint-*/{MANIFEST}"):
            with contextlib.suppress(OSError):
                key = str(path), path.stat().st_mtime_ns
                if key not in self._found:
                    text = path.read_bytes()
                    manifest = parse_manifest(text)
                    if manifest is None:
                        continue
                    name = stored_name(manifest.step, text)
                    self._found[key] = Stored(name, manifest.step, manifest, text)
                found[self._found[key].name] = self._found[key]
        return found

    def _next(self) -> Stored | None:
        """The newest checkpoint that is not in the store, then older ones that retention keeps."""
        here = self._here()
        if not here:
            return None
        newest = max(stored.step for stored in here.values())
        missing = [
            stored for name, stored in here.items() if name not in self._there | dict.fromkeys(self._gone, 0)
        ]
        for stored in sorted(missing, key=lambda stored: -stored.step):
            if stored.step == newest:
                return stored
            steps = [*self._there.values(), stored.step]
            if self._ending != "newest" and stored.step not in self._surplus(steps, newest):
                return stored
        return None

    def _surplus(self, steps: Sequence[int], newest: int) -> list[int]:
        folder = self.run_dir / "checkpoints" / f"checkpoint-{newest}"
        best = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            best = read_json(folder / "trainer_state.json", LARGEST_RECORD).get("best_global_step")
        return surplus(sorted(set(steps)), newest, self.order.limit, best)

    # --- uploads

    def _upload(self, stored: Stored) -> None:
        began = time.monotonic()
        folder = self.run_dir / "checkpoints" / f"checkpoint-{stored.step}"
        aside = self.run_dir / LINKED
        shutil.rmtree(aside, ignore_errors=True)
        try:
            files = _linked(folder, stored, aside / FILES_FOLDER)
            records = _copied(self.run_dir, aside / RECORDS)
            size = stored.manifest.bytes + sum(facts.bytes for facts in records.values())
            self.progress.uploading = {"what": f"checkpoint-{stored.step}", "bytes": 2 * size, "done": 0}
            self._write()
            self.mirror.check_owner(self.order.claim)
            self.mirror.put(f"{stored.folder}/{FILES_FOLDER}", files, stored.manifest.files, self._count)
            self.mirror.put(f"{stored.folder}/{RECORDS}", aside / RECORDS, records, self._count)
            self.mirror.check_owner(self.order.claim)
            self.mirror.finish(stored, records)
        except FileNotFoundError as error:
            if not (folder / MANIFEST).is_file():
                raise _Vanished from error
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._there[stored.name] = stored.step
        seconds = round(time.monotonic() - began, 3)
        self.progress.checkpoints.append(
            {"step": stored.step, "name": stored.name, "bytes": stored.manifest.bytes, "seconds": seconds}
        )
        self._settle()
        self._retire(stored)

    def _retire(self, stored: Stored) -> None:
        """Remove what retention does not keep, and what interrupted uploads left."""
        here = self._here()
        newest = max((one.step for one in here.values()), default=stored.step)
        claim = self.order.claim
        if (
            stored.step == newest
        ):  # others from here on were written before the run went back to an earlier one
            stale = tuple(
                name for name, step in self._there.items() if step >= newest and name != stored.name
            )
            if stale:
                self.mirror.check_owner(claim)
                claim = replace(claim, superseded=(*claim.superseded, *stale))
                self.mirror.write_claim(claim)
                self.order = replace(self.order, claim=claim)
                self._there = {name: step for name, step in self._there.items() if name not in stale}
        too_many = set(self._surplus(list(self._there.values()), newest))
        whole = self.mirror.names()
        for name, is_whole in whole.items():
            if name in claim.superseded:
                continue
            if not is_whole or (name in self._there and step_of(name) in too_many):
                self.mirror.remove(name, claim)
                self._there.pop(name, None)
        self._settle()

    def _upload_result(self) -> None:
        """The trained weights and result.json."""
        output = str(read_json(self.run_dir / "result.json", LARGEST_RECORD)["output"])
        names = [
            path.relative_to(self.run_dir).as_posix()
            for path in (self.run_dir / output).rglob("*")
            if path.is_file()
        ]
        facts = _facts(self.run_dir, [*names, "result.json"])
        size = sum(one.bytes for one in facts.values())
        self.progress.uploading = {"what": "the result", "bytes": 2 * size, "done": 0}
        self._write()
        self.mirror.check_owner(self.order.claim)
        self.mirror.store.remove(f"{RESULT}/{MANIFEST}")
        self.mirror.put(RESULT, self.run_dir, facts, self._count)
        listed = {"files": {name: asdict(one) for name, one in facts.items()}}
        self.mirror.store.write(f"{RESULT}/{MANIFEST}", json.dumps(listed).encode())
        self.progress.result = True
        self._settle()

    # --- what others see

    def _count(self, size: int) -> None:
        with self._lock:
            if self.progress.uploading is not None:
                self.progress.uploading["done"] += size
            if time.monotonic() - self._written >= _STATUS_S:
                self._write()

    def _settle(self) -> None:
        """Nothing is being uploaded, and nothing is wrong."""
        if self.progress.problem is not None:
            self._say(f"{self.order.shown} can be written again")
        self.progress.uploading = self.progress.problem = None
        rows = [row for row in self.progress.checkpoints if row["name"] in self._there]
        self.progress.checkpoints = sorted(rows, key=lambda row: int(row["step"]))
        self._write()

    def _fail(self, what: str, kind: str, reason: str) -> None:
        problem = {"what": what, "kind": kind, "reason": reason}
        if self.progress.problem != problem:
            more = "nothing more is uploaded" if kind == "taken-over" else "it is tried again"
            self._say(f"WARNING: {what} is not in {self.order.shown}: {reason}; the run continues, {more}")
        self.progress.problem, self.progress.uploading = problem, None
        self._write()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError), (self.run_dir / "logs" / LINES).open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def _write(self) -> None:
        self._written = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk: the run says so itself
            write_json(self.run_dir / RECORD, {"schema_version": 1, **asdict(self.progress)})

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._ending = self.ending.get(timeout=seconds)
            self._pause = 0.0


def _linked(folder: Path, stored: Stored, target: Path) -> Path:
    """A folder with the checkpoint's files that retention cannot remove; itself where there are no links."""
    try:
        for name in stored.manifest.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / name, target / name)
        return target
    except OSError:
        return folder


def _copied(run_dir: Path, target: Path) -> dict[str, FileFacts]:
    """Copies of the run's records as they are now, with their hashes."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in PATTERNS:
        for path in run_dir.glob(pattern):
            with contextlib.suppress(OSError):
                shutil.copyfile(path, target / path.name)
    return _facts(target, [path.name for path in target.iterdir()])


def _facts(folder: Path, names: Sequence[str]) -> dict[str, FileFacts]:
    hashes = sha256_of(folder, names)
    wrong = next((value for value in hashes.values() if isinstance(value, OSError)), None)
    if wrong is not None:
        raise wrong
    return {name: FileFacts((folder / name).stat().st_size, str(value)) for name, value in hashes.items()}


def _reason(error: Exception) -> str:
    if isinstance(error, StoreError):
        return error.reason
    return hider(secret_values(os.environ))(str(error).splitlines()[0] if str(error) else repr(error))


def read_progress(run_dir: Path) -> Mapping[str, Any]:
    """RUN_DIR/mirror.json; {} for a run without a mirror."""
    try:
        found = read_json(run_dir / RECORD)
        return found if isinstance(found, dict) and isinstance(found["id"], str) else {}
    except (OSError, ValueError, KeyError):
        return {}


def _listen(uploader: Uploader) -> None:
    """The thread that reads what the run asks for."""
    for line in sys.stdin:
        if (asked := line.strip()) in ("newest", "all"):
            uploader.ending.put(asked)  # type: ignore[arg-type]  # one of the two
    os._exit(1)  # the run is gone: what was begun is not complete, and never resumed


def main(argv: Sequence[str] | None = None) -> int:
    """Upload for a run directory until its run asks to end."""
    (run_dir,) = argv or sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the run decides
    os.nice(_NICE)
    try:
        order = UploadOrder.of_line(sys.stdin.readline())
        uploader = Uploader(Path(run_dir), Mirror(Store(order.url)), order)
        threading.Thread(target=_listen, args=(uploader,), daemon=True).start()
        uploader.work()
    except Exception:  # a bug, or a store that cannot even be opened any more
        text = hider(secret_values(os.environ))(traceback.format_exc())
        with contextlib.suppress(OSError):
            (Path(run_dir) / "logs" / ERRORS).write_text(text, encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of the store's client may still wait for the network
