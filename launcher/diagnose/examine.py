"""Logs in, diagnosis out: read, take the errors, match them, and name the recipe's lines."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from launcher.diagnose import forms
from launcher.diagnose.findings import Diagnosis, Error, Finding, Unknown
from launcher.diagnose.matching import (
    BY_A_LINE,
    NEEDS_A_FAILURE,
    TOLD_BEFORE,
    candidates,
    proves_failure,
    recognise_error,
    weight,
)
from launcher.diagnose.reading import Learnt, clean, raw_lines
from launcher.diagnose.run_dir import earlier_bytes, is_run_dir, logs_of, rank_of, recorded_errors
from launcher.diagnose.symptoms import Watch
from launcher.diagnose.tracebacks import Errors
from launcher.errors import Problem, RecipeError
from launcher.failures.failure import Failure


class Examination:
    """What is gathered while logs are read once, one after the other."""

    def __init__(self, registry: Sequence[Failure]) -> None:
        self.registry = registry
        self.errors = Errors()
        self.watch = Watch()
        self.by_line: list[tuple[Failure, Error]] = []
        self.ranks: set[int] = set()
        self.tasks: set[int] = set()
        self._order = 0
        told = {*BY_A_LINE, *TOLD_BEFORE.values()}
        shown = [failure for failure in registry if failure.id in told]
        self._plain = [(re.compile(p.encode()), failure) for failure in shown for p in failure.patterns]

    def read(self, stream: IO[bytes], name: str, rank: int | None, *, skip: int = 0) -> None:
        """One log, to its end. skip: its first bytes, which an earlier run wrote."""
        learnt = Learnt()
        for number, raw, matters in raw_lines(stream, skip, forms.WORDS):
            self._order += 1
            self.watch.last = raw[:400].strip() or self.watch.last
            if not matters and self.errors.idle:
                self._count(*forms.rank_in(raw))
                continue
            plain = [failure for pattern, failure in self._plain if pattern.search(raw)]
            for line in clean(raw, number, name, rank, learnt):
                line.order = self._order
                self._count(line.rank, line.task)
                self.watch.feed(line)
                self.errors.feed(line)
                self.by_line += [
                    (f, Error("", line.text, kind="line", file=name, line=number)) for f in plain[:1]
                ]
        self.errors.close()
        if rank is not None:
            self.ranks.add(rank)

    def _count(self, rank: int | None, task: int | None) -> None:
        if rank is not None:
            self.ranks.add(rank)
        elif task is not None:
            self.tasks.add(task)

    def verdict(self) -> Diagnosis:
        """The cause first; a known failure wherever one of the errors that count is one."""
        errors = self.errors
        if not self.ranks:
            self.ranks |= self.tasks
            for error in errors.found.values():
                error.ranks |= set() if error.task is None else {error.task}
                error.first_rank = error.task
        left = candidates(errors.found.values(), steps=errors.steps, success=errors.success)
        found = self._known(left)
        unknown: list[Unknown] = []
        failed = [error for error in left if proves_failure(error, success=bool(errors.success))]
        if not found:
            found = self._shown_by_lines(failed=bool(failed))
        if not found and not failed and not errors.success:
            found = self.watch.findings(self.registry)
        elif not found:
            found = self.watch.divergence(self.registry) if not failed else []
        if not found and failed:
            first = failed[0].real()
            unknown = [Unknown(first, *self._ranks(failed[0], first))]
        return Diagnosis(found, unknown, max(1, len(self.ranks)))

    def _known(self, left: Sequence[Error]) -> list[Finding]:
        """The first error that is a known failure, unless an unknown one stands before it."""
        decided: Error | None = None
        for error in left:
            if decided is not None and not _independent(decided, error):
                continue
            match = recognise_error(error, self.registry)
            if match is not None:
                failure, link = match
                alike = [
                    e for e in left if (other := recognise_error(e, self.registry)) and other[0] is failure
                ]
                return [Finding(self._told(failure), link, *self._ranks(error, link, *alike))]
            if decided is None and error.kind == "traceback" and error.type and weight(error) == 0:
                decided = error
        return []

    def _told(self, failure: Failure) -> Failure:
        """The failure, or the one that it is by a line of the same logs."""
        closer = TOLD_BEFORE.get(failure.id)
        return next((told for told, _ in self.by_line if told.id == closer), failure)

    def _ranks(self, error: Error, *alike: Error) -> tuple[tuple[int, ...], int | None]:
        """All ranks of an error and of those that are the same failure, and its first rank."""
        ranks = set(error.ranks).union(*(other.ranks for other in alike))
        first = error.first_rank
        if not ranks and self.errors.root_rank is not None:  # its lines name none, the launcher's table does
            first = self.errors.root_rank
            ranks = {first}
            self.ranks |= ranks
        return tuple(sorted(ranks)), first

    def _shown_by_lines(self, *, failed: bool) -> list[Finding]:
        """The failures that a line tells of that is no error."""
        for failure, error in self.by_line:
            if failure.id in BY_A_LINE and (failed or failure.id not in NEEDS_A_FAILURE):
                return [Finding(failure, error, (), None)]
        return []


def _independent(unknown: Error, other: Error) -> bool:
    """Whether another rank's error may well be the earlier one: neither has a time, and both are causes."""
    timed = unknown.time is not None and other.time is not None
    apart = unknown.ranks and other.ranks and not unknown.ranks & other.ranks
    return bool(apart) and not timed and weight(other) == 0 and other.kind == "traceback"


def diagnose(paths: Sequence[str], registry: Sequence[Failure]) -> Diagnosis:
    """Read run directories and logs (`-`: standard input). RecipeError (2) for what cannot be read."""
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
            return Diagnosis(examination.watch.divergence(registry), [], max(1, len(examination.ranks)))
        examination.errors.success.clear()  # of a run directory the marker alone tells
    return examination.verdict()


@dataclass(frozen=True, slots=True)
class _Log:
    name: str
    rank: int | None
    """Where the name of the file tells it."""
    open: Callable[[], ContextManager[IO[bytes]]]
    skip: int = 0
    """Bytes of earlier runs."""


def _logs(paths: Sequence[str]) -> Iterator[_Log]:
    for given in paths:
        path = Path(given)
        if given == "-":
            yield _Log("-", None, _standard_input)
        elif path.is_dir():
            logs = logs_of(path)
            if not logs and not is_run_dir(path):
                raise _unreadable(given, "the folder holds no logs")
            earlier = earlier_bytes(path)
            for log in logs:
                yield _Log(str(log), rank_of(log), partial(open_log, log), earlier.get(log.name, 0))
        elif not path.exists():
            raise _unreadable(given, "no such file or folder")
        else:
            yield _Log(given, rank_of(path), partial(open_log, path))


def open_log(path: Path) -> ContextManager[IO[bytes]]:
    """A log's bytes; a compressed one's (`.gz`) are unpacked on the way."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path))
    return path.open("rb")


def _standard_input() -> ContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer)  # not ours to close


def _unreadable(name: str, why: str) -> RecipeError:
    return RecipeError(
        Problem("log-unreadable", f"cannot diagnose: {why}", name, hint="name a run directory or a log")
    )
