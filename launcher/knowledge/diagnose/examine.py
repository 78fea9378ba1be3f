"""Diagnose logs and run directories: read them, collect errors, and find the cause."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, cast

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.findings import Diagnosis, Error, Finding, Unknown
from launcher.knowledge.diagnose.matching import (
    WAITING,
    Lines,
    candidates,
    is_asynchronous,
    is_cause,
    is_launchers,
    meant_field,
    outlived,
    proves_failure,
    recognise_error,
)
from launcher.knowledge.diagnose.reading import Prefixes, clean, raw_lines
from launcher.knowledge.diagnose.run_dir import (
    LOST,
    earlier_bytes,
    is_run_dir,
    logs_of,
    rank_of,
    read_lost,
    recorded_errors,
)
from launcher.knowledge.diagnose.symptoms import TrainingWatch
from launcher.knowledge.diagnose.tracebacks import Errors
from launcher.knowledge.diagnose.versions import version_fix
from launcher.knowledge.failures.catalogue import Failure


class Examination:
    """What is collected while logs are read once, one after the other."""

    def __init__(self, registry: Sequence[Failure]) -> None:
        self.registry = registry
        self.errors = Errors()
        self.watch = TrainingWatch()
        self.lines = Lines(registry)
        self.ranks: set[int] = set()
        self.tasks: set[int] = set()
        self._order = 0

    def read(self, stream: IO[bytes], name: str, rank: int | None, *, skip: int = 0) -> None:
        """Read one log. skip: its first bytes, which an earlier run wrote."""
        prefixes = Prefixes()
        for number, raw, matters in raw_lines(stream, skip, forms.WORDS):
            self._order += 1
            prefixes.count(raw, number)
            self.watch.last = raw[:400].strip() or self.watch.last
            self.lines.every(raw, number, name)
            if not matters and self.errors.idle:
                line_rank, task = forms.rank_in(raw)
                self._count(line_rank, None if task == prefixes.filled else task)
                continue
            for line in clean(raw, number, name, rank, prefixes):
                line.order = self._order
                self._count(line.rank, line.task)
                self.watch.feed(line)
                self.errors.feed(line)
                self.lines.some(raw, line.text, number, name)
        self.errors.close()
        if rank is not None:
            self.ranks.add(rank)

    def _count(self, rank: int | None, task: int | None) -> None:
        if rank is not None:
            self.ranks.add(rank)
        elif task is not None:
            self.tasks.add(task)

    def verdict(self) -> Diagnosis:
        """The diagnosis of all logs so far: a known failure if one of the possible causes is one."""
        errors = self.errors
        if not self.ranks:
            self.ranks |= self.tasks
            for error in errors.found.values():
                error.ranks |= set() if error.task is None else {error.task}
                error.first_rank = error.task
        left = candidates(
            errors.found.values(),
            steps=errors.steps,
            begun=errors.begun,
            success=errors.success,
            tests=errors.tests,
        )
        left = sorted(left, key=lambda error: self._is_outlived(error, left))
        found = self._known(left)
        failed = [error for error in left if proves_failure(error, success=bool(errors.success))]
        found = found or self.lines.shown(failed=bool(failed))
        if not found and not failed:
            symptoms = self.watch.divergence if errors.success else self.watch.findings
            found = symptoms(self.registry)
        if not found and (explained := self.lines.explained(failed)) is not None:
            found = [Finding(*explained, *self._ranks(explained[1]))]
        are_without_cause = all(
            is_launchers(error) or (error.kind == "traceback" and not error.type) for error in failed
        )
        if not found and failed and are_without_cause:  # of launchers, or cut off
            found = self.lines.before_the_end()
        unknown: list[Unknown] = []
        if not found and failed:
            # A launcher's error has no cause; one of a process before it may.
            own = [error for error in left if not is_launchers(error)]
            shown = own[0] if is_launchers(failed[0]) and own else failed[0]
            real = shown.real()
            unknown = [Unknown(real, *self._ranks(shown, real), other_end=shown.other_end(real))]
        ranks = max(1, len(self.ranks))
        if found or unknown:
            return Diagnosis(found, unknown, ranks, [])
        succeeded = bool(errors.success) or errors.part_succeeded or errors.tests.passed()
        last_lines = () if succeeded else self.lines.last()
        return Diagnosis([], [], ranks, self.lines.noticed(), succeeded=succeeded, last_lines=last_lines)

    def _is_outlived(self, error: Error, left: Sequence[Error]) -> bool:
        """Whether a later error ended the process; a known one gives way only to another known one."""
        later = [other for other in left if outlived(error, other)]
        return bool(later) and (
            recognise_error(error, self.registry) is None
            or any(recognise_error(other, self.registry) for other in later)
        )

    def _known(self, left: Sequence[Error]) -> list[Finding]:
        """The first error that is a known failure, unless an unknown cause comes before it."""
        decided: Error | None = None
        for error in left:
            if decided is not None and not _independent(decided, error):
                continue
            if (match := recognise_error(error, self.registry)) is not None:
                failure, link = match
                same = [
                    e
                    for e in left
                    if ((other := recognise_error(e, self.registry)) and other[0] is failure)
                    or (forms.KERNEL.search(error.message) and is_asynchronous(e))
                ]
                ranks = self._ranks(error, link, *same)
                return [
                    Finding(
                        self.lines.closer(failure),
                        link,
                        *ranks,
                        meant=meant_field(link.headline),
                        other_end=error.other_end(link),
                        advice=self._advice(failure, link),
                        missing=self._missing(left) if failure.id in WAITING else (),
                    )
                ]
            if decided is None and error.kind == "traceback" and error.type and is_cause(error):
                decided = error
        return []

    def _advice(self, failure: Failure, error: Error) -> str:
        is_clash = failure.id == "version-clash"
        return (is_clash and version_fix(error, self.lines.versions)) or ""

    def _missing(self, errors: Sequence[Error]) -> tuple[int, ...]:
        """The ranks without an error; also those below the highest that no log names."""
        failed = set().union(*(error.ranks for error in errors))
        below = range(max(failed)) if len(failed) > 1 else ()
        return tuple(sorted((self.ranks | set(below)) - failed)) if failed else ()

    def _ranks(self, error: Error, *same: Error) -> tuple[tuple[int, ...], int | None]:
        """All ranks of an error and of those that are the same failure, and its first rank."""
        ranks = set(error.ranks).union(*(other.ranks for other in same))
        first = error.first_rank
        if not ranks and self.errors.root_rank is not None:  # only the launcher's table has one
            first = self.errors.root_rank
            ranks = {first}
            self.ranks |= ranks
        return tuple(sorted(ranks)), first


def _independent(unknown: Error, other: Error) -> bool:
    """Whether another rank's error may be the earlier one: they have no times, and both are causes."""
    timed = unknown.time is not None and other.time is not None
    apart = unknown.ranks and other.ranks and not unknown.ranks & other.ranks
    return bool(apart) and not timed and is_cause(other) and other.kind == "traceback"


def diagnose(paths: Sequence[str], registry: Sequence[Failure]) -> Diagnosis:
    """Read run directories and logs (`-`: standard input). RecipeError (2) for what cannot be read."""
    paths = [_run_below(path) for path in paths]
    examination = Examination(registry)
    for folder in filter(is_run_dir, map(Path, paths)):
        for recorded in recorded_errors(folder):
            examination.ranks |= recorded.ranks
            examination.errors.add(recorded)
    for log in _logs(paths):
        try:
            with log.open() as stream:
                examination.read(stream, log.name, log.rank, skip=log.skip)
        except OSError as error:
            raise _unreadable(log.name, error.strerror or str(error)) from error
    for folder in filter(is_run_dir, map(Path, paths)):
        examination.watch.read_run(folder)
        if (folder / "COMPLETED").is_file():
            found = examination.watch.divergence(registry)
            return Diagnosis(found, [], max(1, len(examination.ranks)), succeeded=not found)
        # Only the marker proves the success of a run directory.
        examination.errors.success.clear()
        examination.errors.part_succeeded = False
    verdict = examination.verdict()
    for folder in filter(is_run_dir, map(Path, paths)):
        verdict = _as_seen(verdict, folder)
        if not verdict.findings and not verdict.unknown:
            verdict = replace(verdict, unfinished=str(folder))
    return verdict


_KILLED = re.compile(r"(?:exitcode *: *|return code = )-9\b|SIGKILL|[Ss]ignal 9\b|code:? 137\b|\bKilled\b")
"""A process was killed, for an unknown reason."""


def _as_seen(verdict: Diagnosis, folder: Path) -> Diagnosis:
    """The verdict with what the supervisor knows of a killed rank: the logs do not show who killed it."""
    lost = read_lost(folder)
    if lost is None:
        return verdict
    if not verdict.findings and not verdict.unknown:  # no log has a line of it
        killer = "; meanwhile the kernel's OOM killer killed a process" if lost.oom else ""
        error = Error("", lost.message + killer, file=str(folder / "logs" / LOST), line=1)
        unknown = Unknown(error, lost.ranks, min(lost.ranks, default=None))
        return replace(verdict, unknown=[unknown], noticed=[], last_lines=())
    if lost.oom is not False or not verdict.findings:
        return verdict
    first = verdict.findings[0]
    if first.failure.id != "sigkill-oom" or not _KILLED.search(first.error.headline):
        return verdict
    error = Error("", f"{lost.message}; the kernel's OOM killer did not do it", file=first.error.file)
    error.line = first.error.line
    return replace(verdict, findings=[], unknown=[Unknown(error, lost.ranks, lost.ranks[0])])


def _run_below(given: str) -> str:
    """The only run directory in a folder; a path without one is returned unchanged."""
    folder = Path(given)
    if given == "-" or not folder.is_dir() or is_run_dir(folder):
        return given
    runs = sorted(
        (plan.parent for pattern in ("*/plan.json", "*/*/plan.json") for plan in folder.glob(pattern)),
        key=lambda run: (run / "plan.json").stat().st_mtime,
    )
    if len(runs) > 1:
        message = f"cannot diagnose: the folder contains {len(runs)} run directories"
        hint = f"name one of them; the latest is {runs[-1]}"
        raise RecipeError(Problem("log-unreadable", message, given, hint=hint))
    return str(runs[0]) if runs else given


@dataclass(frozen=True, slots=True)
class _Log:
    name: str
    rank: int | None
    """From the name of the file."""
    open: Callable[[], ContextManager[IO[bytes]]]
    skip: int = 0
    """Bytes of earlier runs."""


def _logs(paths: Sequence[str]) -> Iterator[_Log]:
    for given in paths:
        path = Path(given)
        if given == "-":
            yield _Log("-", None, lambda: nullcontext(sys.stdin.buffer))  # not ours to close
        elif path.is_dir():
            logs = logs_of(path)
            if not logs and not recorded_errors(path) and not (path / "metrics.jsonl").is_file():
                raise _unreadable(given, "the folder contains no logs")
            earlier = earlier_bytes(path)
            for log in logs:
                yield _Log(str(log), rank_of(log), partial(open_log, log), earlier.get(log.name, 0))
        elif not path.exists():
            raise _unreadable(given, "no such file or folder")
        elif path.is_char_device() or path.is_block_device():
            raise _unreadable(given, "it is a device, and may have no end")
        else:
            yield _Log(given, rank_of(path), partial(open_log, path))


def open_log(path: Path) -> ContextManager[IO[bytes]]:
    """A log's bytes; a compressed one's (`.gz`) are unpacked, and a notebook's brought into lines."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path))
    if path.suffix == ".ipynb":
        with suppress(ValueError, RecursionError):  # it is cut off
            # As Jupyter writes it, so that the numbers of lines are those of its files.
            text = json.dumps(parse_json(path.read_bytes()), indent=1, ensure_ascii=False)
            return io.BytesIO(text.encode("utf-8", "replace"))
    return path.open("rb")


def _unreadable(name: str, why: str) -> RecipeError:
    hint = "name a run directory or a log"
    return RecipeError(Problem("log-unreadable", f"cannot diagnose: {why}", name, hint=hint))
