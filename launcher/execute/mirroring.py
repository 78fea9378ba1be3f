"""What a run has to do with its object store: before the model is loaded, meanwhile, and at its end.

`mirrored` checks that the store can be written and is this run's, and chooses the newest checkpoint of disk
and store. `Mirroring.fetch` downloads it, `Mirroring.begin` starts the process that uploads
(`mirror_upload`), `Mirroring.end` waits for it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.following import Look
from launcher.execute.mirror import (
    CHECKPOINTS,
    FILES,
    LINKED,
    RECORD,
    RECORDS,
    Claim,
    Mirror,
    Stored,
    new_claim,
    step_of,
)
from launcher.execute.mirror_upload import (
    ERRORS,
    LINES,
    PATTERNS,
    Ending,
    UploadOrder,
    UploadRecord,
    read_progress,
)
from launcher.execute.resume import Chosen
from launcher.execute.run_dir import MARKER, STOPPED, free_name, scratch_run_dir, unwritable
from launcher.execute.signals import Stops
from launcher.execute.start_point import Beginning, beginning
from launcher.files.checkpoint import MANIFEST, SUPERSEDED, complete_checkpoints, damage
from launcher.files.object_store import Store, StoreError, lacks_package
from launcher.files.safe_files import read_json, write_json
from launcher.machine.software import require_modules
from launcher.machine.storage import read_folder
from launcher.plan.plan import Plan

KEY = "runtime.mirror"
NAME = "{name}"
"""In the URL: the name of the run directory."""
STALL_S = 300.0
"""The end of a run waits for its upload as long as bytes move; so long without any ends the wait."""
LEAST_UPLOAD_S = 10.0
_ATTEMPTS, _PAUSE_S = 3, 2.0
"""Of each operation before the run starts."""
_PATIENCE_S = 1.0
"""An upload that ends sooner is not announced."""
_RESTARTS = 3
"""Of the uploading process, if somebody kills it."""
_MODULE = "launcher.execute.mirror_upload"
_SAID_S = 30.0
"""Between two lines about a download."""
_HINTS = {
    "denied": "check the credentials of this process (for S3: AWS_ACCESS_KEY_ID, AWS_PROFILE, …) and its "
    "rights: it lists, reads, writes and removes objects there",
    "absent": f"check {KEY}; the bucket must exist, it is not created",
    "full": "raise the quota or remove objects",
    "damaged": f"restore that object, or name another {KEY}",
    "unreachable": "check the network and the address (for S3: AWS_ENDPOINT_URL), or remove runtime.mirror",
}


def mirror_url(url: str | None, run_dir: Path) -> str | None:
    """The URL of a run's mirror. url: as the recipe has it; None without one."""
    return None if url is None else url.replace(NAME, run_dir.name).rstrip("/")


def store_error(error: StoreError, url: str, what: str) -> MachineError:
    """The error of a store that cannot be used. what: what was attempted, as a noun phrase."""
    message = f"{what} failed: {error.reason}"
    return MachineError(Problem(f"mirror-{error.kind}", message, url, path=KEY, hint=_HINTS[error.kind]))


def _tried(attempt: Callable[[], Any], url: str, what: str) -> Any:
    """What `attempt` returns; it is repeated where that may help. MachineError where it fails."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return attempt()
        except StoreError as error:
            if error.lasts or not left:
                raise store_error(error, url, what) from error
            time.sleep(_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def open_mirror(url: str) -> Mirror:
    """The store of a URL. MachineError where its package is missing."""
    if absent := lacks_package(url):
        require_modules([absent])
    mirror: Mirror = _tried(lambda: Mirror(Store(url)), url, "opening the store")
    return mirror


@dataclass(slots=True)
class Mirroring:
    """The mirror of one start of a run."""

    mirror: Mirror
    say: Callable[[str], None]
    claim: Claim | None
    """Who owned the URL before this start."""
    chosen: Stored | None = None
    """The checkpoint that is downloaded; None where the disk has what the run starts from."""
    records: Path | None = None
    """Folder with the records of a run that is not on this disk."""
    run_dir: Path = Path()
    _order: UploadOrder | None = None
    _process: subprocess.Popen[bytes] | None = None
    _read: int = 0
    """Characters of the lines that were shown."""
    _starts: int = 0
    _ending: Ending = ""

    @property
    def url(self) -> str:
        return self.mirror.store.url

    # --- before the model is loaded

    def choose(self, begins: Beginning, staged: Path) -> Beginning:
        """The beginning with the newest checkpoint of the store, where it is newer than that of the disk.

        Only its manifest and plan are read, into `staged`. Raises RecipeError if the URL is another run's.
        """
        self._check_own(begins)
        if self.claim is None or begins.chosen is None or not begins.takes_newest:
            return begins
        superseded = self.claim.superseded
        found = _tried(lambda: next(self.mirror.complete(superseded), None), self.url, "reading the store")
        for name, whole in _tried(self.mirror.names, self.url, "reading the store").items():
            if not whole and found is not None and (step_of(name) or 0) > found.step:
                self.say(f"{name} in {self.url} is skipped: its upload was interrupted")
        if found is None or found.step <= begins.chosen.step:
            return begins
        self.chosen, self.records = found, staged
        folder = staged / CHECKPOINTS / f"checkpoint-{found.step}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(found.text)
        plan = {name: facts for name, facts in found.manifest.files.items() if name == "plan.json"}
        self._get(f"{found.folder}/{FILES}", plan, folder)
        known = _tried(lambda: self.mirror.records(found), self.url, "reading the store")
        self._get(f"{found.folder}/{RECORDS}", known, staged)
        stored = f"{self.url}/{found.folder}"
        return replace(
            begins, records=staged,
            chosen=Chosen(folder, found.step, skipped=begins.chosen.skipped, stored=stored),
        )  # fmt: skip

    def _check_own(self, begins: Beginning) -> None:
        """RecipeError where the URL belongs to another run than the one in the run directory."""
        own = read_progress(begins.run_dir).get("id")
        if self.claim is None or self.claim.id == own:
            return
        is_empty = own is None and not complete_checkpoints(begins.run_dir / "checkpoints")
        if begins.takes_newest and is_empty:
            return
        hint = f"name another {KEY}: it is the place of one run"
        if is_empty and begins.chosen is None:
            hint = f"--resume auto continues that run; for a new one {hint}"
        message = f"it belongs to another run: {self.claim.run}"
        raise RecipeError(Problem("mirror-of-another-run", message, self.url, path=KEY, hint=hint))

    def _get(
        self, folder: str, facts: Mapping[str, Any], target: Path, count: Any = lambda size: None
    ) -> None:
        _tried(lambda: self.mirror.get(folder, facts, target, count), self.url, "the download")
        if wrong := damage(target, facts, hashes=True):
            error = StoreError("damaged", f"{folder}: {wrong}")
            raise store_error(error, self.url, "the download")

    def fetch(self, begins: Beginning) -> Beginning:
        """Download the chosen checkpoint into the written run directory; the beginning with its place."""
        self.run_dir = begins.run_dir
        found, checkpoints = self.chosen, begins.run_dir / CHECKPOINTS
        if found is None:
            return begins
        free = read_folder(checkpoints).free
        if free < found.manifest.bytes:
            message = (
                f"{found.name} takes {_mib(found.manifest.bytes)}, {_mib(free)} are free in {checkpoints}"
            )
            raise MachineError(Problem("disk-full", message, self.url, hint="free some space"))
        began, final = time.monotonic(), checkpoints / f"checkpoint-{found.step}"
        aside = checkpoints / ".saving" / final.name
        shutil.rmtree(aside, ignore_errors=True)
        self.say(f"downloading {self.url}/{found.folder} ({_mib(found.manifest.bytes)})")
        try:
            aside.mkdir(parents=True)
            self._get(f"{found.folder}/{FILES}", found.manifest.files, aside, self._counting(found))
            (aside / MANIFEST).write_bytes(found.text)
            if final.exists():  # damaged, or of an earlier continuation
                final.rename(free_name(final.with_name(f"{SUPERSEDED}{found.step}")))
            aside.rename(final)
            self._restore_records()
        except OSError as error:
            raise unwritable(begins.run_dir, error) from error
        seconds = time.monotonic() - began
        self.say(f"downloaded and verified by hash in {seconds:.1f} s")
        return replace(begins, chosen=Chosen(final, found.step, found.manifest.bytes))

    def _counting(self, found: Stored) -> Callable[[int], None]:
        done, said = 0, time.monotonic()

        def count(size: int) -> None:
            nonlocal done, said
            done += size
            if time.monotonic() - said > _SAID_S:
                said = time.monotonic()
                self.say(f"downloading: {_mib(done)} of {_mib(found.manifest.bytes)}")

        return count

    def _restore_records(self) -> None:
        """The records of the run as they were when the checkpoint was uploaded; this start's plan stays."""
        assert self.records is not None, "set with the checkpoint"
        for path in (path for pattern in PATTERNS for path in self.records.glob(pattern)):
            if path.name != "plan.json":
                shutil.copyfile(path, self.run_dir / path.name)

    # --- meanwhile

    def begin(self, begins: Beginning, plan: Plan) -> None:
        """Make the URL this start's, and start the process that uploads."""
        self.run_dir = begins.run_dir
        known = {} if self.claim is None else _tried(self.mirror.names, self.url, "reading the store")
        later = tuple(name for name, whole in known.items() if whole and (step_of(name) or 0) > begins.step)
        name = f"{Path(plan.recipe_file).stem} in {begins.run_dir}"
        claim = new_claim(name, self.claim, later if begins.chosen is not None else ())
        _tried(lambda: self.mirror.write_claim(claim), self.url, "writing run.json")
        kept = plan.kept.get(KEY)
        shown = self.url if kept is None else kept.text
        self._order = UploadOrder(self.url, shown, claim, plan.trainer.save_total_limit)
        with contextlib.suppress(OSError):
            (self.run_dir / "logs" / LINES).unlink(missing_ok=True)
        write_json(
            self.run_dir / RECORD, {"schema_version": 1, **asdict(UploadRecord(shown, claim.id, claim.start))}
        )
        self.say(f"complete checkpoints are copied to {self.url}")
        self._start()

    def _start(self) -> None:
        assert self._order is not None, "the claim is written"
        self._starts += 1
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self.run_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._send(self._order.to_line())
        if self._ending:
            self._send(f"{self._ending}\n".encode())

    def _send(self, line: bytes) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()

    def poll(self) -> None:
        """Show what the process has to say, and start it again if somebody killed it."""
        with contextlib.suppress(OSError):
            text = (self.run_dir / "logs" / LINES).read_text("utf-8", errors="replace")
            for line in text[self._read :].splitlines():
                self.say(line)
            self._read = len(text)
        process = self._process
        if process is not None and process.poll() not in (None, 0) and self._starts <= _RESTARTS:
            why = f"ended with {process.returncode} (see logs/{ERRORS})"
            self.say(f"the process that copies checkpoints {why}: starting it again")
            self._let_go(process)
            self._start()

    def looking(self, looking: Callable[[Plan], Look]) -> Callable[[Plan], Look]:
        """`looking` that also polls."""

        def begin(plan: Plan) -> Look:
            look = looking(plan)

            def both(statuses: Mapping[int, Any]) -> None:
                self.poll()
                look(statuses)

            return both

        return begin

    # --- the end

    def end(self, ending: Ending, limit_s: float | None = None) -> Mapping[str, Any]:
        """Wait until everything, or the newest checkpoint, is in the store; what is there then.

        limit_s: None waits as long as bytes move. A signal ends the wait.
        """
        self._ending = ending
        self._send(f"{ending}\n".encode())
        began = moved = time.monotonic()
        furthest, announced = dict[str, float](), False
        with Stops() as stops:
            while self._process is not None and self._process.poll() is None and stops.first is None:
                now, found = time.monotonic(), read_progress(self.run_dir)
                if _goes_further(found, furthest):
                    moved = now
                if now - moved > STALL_S or (limit_s is not None and now - began > limit_s):
                    break
                if not announced and now - began > _PATIENCE_S:
                    announced = True
                    most = f"at most {limit_s:.0f} s" if limit_s is not None else "Ctrl-C ends the wait"
                    what = (found.get("uploading") or {}).get("what", "the last upload")
                    self.say(f"waiting for {what} to be in {self.url} ({most})")
                self.poll()
                time.sleep(0.1)
        self.close()
        return read_progress(self.run_dir)

    def close(self) -> None:
        """End the process; what it has not completed is never resumed."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        self._let_go(process)
        shutil.rmtree(self.run_dir / LINKED, ignore_errors=True)
        self.poll()

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def release(self) -> None:
        """Give the URL back if this start made it its own and nothing is there."""
        if self.claim is None and self._order is not None:
            with contextlib.suppress(StoreError):
                if not self.mirror.names():
                    self.mirror.check_owner(self._order.claim)
                    self.mirror.store.remove("run.json")


@contextlib.contextmanager
def mirrored(
    place: Beginning, url: str | None, own_dirs: Callable[[], Sequence[Path]], say: Callable[[str], None]
) -> Iterator[tuple[Beginning, Mirroring | None]]:
    """The beginning of a run at this place, chosen as `beginning` and `Mirroring.choose` do.

    url: None for a run without a mirror. own_dirs: existing run directories of the recipe, of which a run
    without --output-dir continues the one that the URL belongs to.
    """
    if url is None:
        with beginning(place, say) as begins:
            yield begins, None
        return
    mirror = open_mirror(url)
    _tried(mirror.store.check_writable, url, "writing a first object")
    mirroring = Mirroring(mirror, say, _tried(mirror.earlier_claim, url, "reading run.json"))
    place = _own_place(place, mirroring.claim, own_dirs)
    with scratch_run_dir("mirror") as staged, beginning(place, say) as begins:
        yield mirroring.choose(begins, staged), mirroring


def _own_place(place: Beginning, claim: Claim | None, own_dirs: Callable[[], Sequence[Path]]) -> Beginning:
    """The newest run directory that belongs to the URL, else a new one; place: with a default name."""
    if claim is None or not place.takes_newest or place.proposed is None:
        return place
    own = [path for path in own_dirs() if read_progress(path).get("id") == claim.id]
    return replace(place, run_dir=own[-1] if own else place.proposed, is_proposed=not own)


def run_mirrored(
    mirroring: Mirroring | None,
    begins: Beginning,
    plan: Plan,
    start: Callable[[], tuple[Plan, dict[str, Any]]],
) -> tuple[Plan, dict[str, Any]]:
    """Start a run whose directory is written, and upload until it has ended; its plan and result.json.

    mirroring: None for a run without a store. Raises what `start` raises, with what is not in the store;
    RunFailed if the newest checkpoint or the result of a finished run is not there.
    """
    if mirroring is None:
        return start()
    mirroring.begin(begins, plan)
    run_dir = begins.run_dir
    try:
        finished, result = start()
        found = mirroring.end("all")
    except Interrupted as error:
        found = mirroring.end("newest", _time_left(plan, run_dir))
        raise _interrupted(error, run_dir, found) from error
    except EffilaunchError:
        finished_run = (run_dir / MARKER).is_file()  # and could not be pushed to the hub
        limit_s = None if finished_run else float(plan.runtime.stop_limit_s)
        found = mirroring.end("all" if finished_run else "newest", limit_s)
        if lacks := missing(run_dir, found, with_result=finished_run):
            mirroring.say(f"WARNING: {lacks}")
        mirroring.release()
        raise
    finally:
        mirroring.close()
    lacks = missing(run_dir, found, with_result=True)
    result = {**result, "mirror": {**found, "missing": lacks or None}}
    with contextlib.suppress(OSError):  # the command still returns it
        write_json(run_dir / "result.json", result)
    if lacks:
        hint = f"the result is in {run_dir}; `effilaunch run RECIPE --resume auto` copies what is missing"
        raise RunFailed(
            Problem("mirror-incomplete", f"the run has finished, but {lacks}", path=KEY, hint=hint)
        )
    return finished, result


def _time_left(plan: Plan, run_dir: Path) -> float:
    """Seconds that a stop may still take, by the plan, after its save."""
    spent = 0.0
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        spent = float(read_json(run_dir / STOPPED).get("seconds") or 0.0)
    return max(LEAST_UPLOAD_S, float(plan.runtime.stop_limit_s) - spent)


def _interrupted(error: Interrupted, run_dir: Path, found: Mapping[str, Any]) -> Interrupted:
    """The error, with whether the checkpoint of the stop is in the store."""
    problem = error.problems[0]
    lacks = missing(run_dir, found, with_result=False)
    there = max((row["step"] for row in found.get("checkpoints", ())), default=None)
    text = lacks or ("" if there is None else f"checkpoint-{there} is in {found['url']}")
    return Interrupted(replace(problem, message="; ".join(filter(None, (problem.message, text)))))


def _goes_further(found: Mapping[str, Any], furthest: dict[str, float]) -> bool:
    """Whether more was copied than ever before: another attempt that begins anew is no progress."""
    now = {"complete": float(len(found.get("checkpoints", ())) + bool(found.get("result")))}
    if uploading := found.get("uploading"):
        now[uploading["what"]] = float(uploading["done"])
    further = any(amount > furthest.get(what, -1.0) for what, amount in now.items())
    furthest.update({what: max(amount, furthest.get(what, 0.0)) for what, amount in now.items()})
    return further


def missing(run_dir: Path, found: Mapping[str, Any], *, with_result: bool) -> str:
    """What of a run is not in its store, as a clause; empty where nothing is."""
    complete = complete_checkpoints(run_dir / CHECKPOINTS)
    newest = max(complete, default=None)
    there = {row["step"] for row in found.get("checkpoints", ())}
    lacks = [f"checkpoint-{newest}"] if newest is not None and newest not in there else []
    lacks += ["the result"] if with_result and not found.get("result") else []
    if not lacks:
        return ""
    uploading, problem = found.get("uploading"), found.get("problem")
    why = ""
    if problem:
        why = f": {problem['reason']}"
    elif uploading:
        why = f": {_mib(uploading['done'])} of {_mib(uploading['bytes'])} were copied and read back"
    last = f"; the newest there is checkpoint-{max(there)}" if there else "; there is no checkpoint"
    return f"{' and '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} not in {found.get('url')}{why}{last}"


def _mib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
