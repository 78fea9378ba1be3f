"""Logs in, diagnosis out: read, take the errors, match them, and name the recipe's lines."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, cast

from launcher.errors import Problem, RecipeError
from launcher.knowledge.diagnose import forms
from launcher.knowledge.diagnose.findings import Diagnosis, Error, Finding, Unknown
from launcher.knowledge.diagnose.matching import (
    Lines,
    candidates,
    is_asynchronous,
    is_cause,
    is_launchers,
    meant_field,
    proves_failure,
    recognise_error,
)
from launcher.knowledge.diagnose.reading import Learnt, clean, raw_lines
from launcher.knowledge.diagnose.run_dir import (
    LOST,
    earlier_bytes,
    is_run_dir,
    logs_of,
    rank_of,
    read_lost,
    recorded_errors,
)
from launcher.knowledge.diagnose.symptoms import Watch
from launcher.knowledge.diagnose.tracebacks import Errors
from launcher.knowledge.failures.catalogue import Failure


class Examination:
    """What is gathered while logs are read once, one after the other."""

    def __init__(self, registry: Sequence[Failure]) -> None:
        self.registry = registry
        self.errors = Errors()
        self.watch = Watch()
        self.lines = Lines(registry)
        self.ranks: set[int] = set()
        self.tasks: set[int] = set()
        self._order = 0

    def read(self, stream: IO[bytes], name: str, rank: int | None, *, skip: int = 0) -> None:
        """One log, to its end. skip: its first bytes, which an earlier run wrote."""
        learnt = Learnt()
        for number, raw, matters in raw_lines(stream, skip, forms.WORDS):
            self._order += 1
            learnt.count(raw, number)
            self.watch.last = raw[:400].strip() or self.watch.last
            self.lines.every(raw, number, name)
            if not matters and self.errors.idle:
                task_or_rank = forms.rank_in(raw)
                self._count(task_or_rank[0], None if task_or_rank[1] == learnt.filled else task_or_rank[1])
                continue
            for line in clean(raw, number, name, rank, learnt):
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
        """The cause first; a known failure wherever one of the errors that count is one."""
        errors = self.errors
        if not self.ranks:
            self.ranks |= self.tasks
            for error in errors.found.values():
                error.ranks |= set() if error.task is None else {error.task}
                error.first_rank = error.task
        left = candidates(
            errors.found.values(), steps=errors.steps, success=errors.success, tests=errors.tests
        )
        found = self._known(left)
        unknown: list[Unknown] = []
        failed = [error for error in left if proves_failure(error, success=bool(errors.success))]
        found = found or self.lines.shown(failed=bool(failed))
        if not found and not failed:
            symptoms = self.watch.divergence if errors.success else self.watch.findings
            found = symptoms(self.registry)
        if not found and (told := self.lines.explained(failed)) is not None:
            found = [Finding(told[0], told[1], *self._ranks(told[1]))]
        if not found and failed and all(map(_names_no_cause, failed)):
            found = self.lines.before_the_end()
        if not found and failed:
            shown = failed[0]
            if is_launchers(shown):  # it names no cause; a line that a process wrote before may
                shown = next((error for error in left if not is_launchers(error)), shown)
            unknown = [Unknown(shown.real(), *self._ranks(shown, shown.real()))]
        noticed = [] if found or unknown else self.lines.noticed()
        return Diagnosis(found, unknown, max(1, len(self.ranks)), noticed)

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
                    e
                    for e in left
                    if ((other := recognise_error(e, self.registry)) and other[0] is failure)
                    or (forms.KERNEL.search(error.message) and is_asynchronous(e))
                ]
                ranks = self._ranks(error, link, *alike)
                return [Finding(self.lines.closer(failure), link, *ranks, meant=meant_field(link.headline))]
            if decided is None and error.kind == "traceback" and error.type and is_cause(error):
                decided = error
        return []

    def _ranks(self, error: Error, *alike: Error) -> tuple[tuple[int, ...], int | None]:
        """All ranks of an error and of those that are the same failure, and its first rank."""
        ranks = set(error.ranks).union(*(other.ranks for other in alike))
        first = error.first_rank
        if not ranks and self.errors.root_rank is not None:  # its lines name none, the launcher's table does
            first = self.errors.root_rank
            ranks = {first}
            self.ranks |= ranks
        return tuple(sorted(ranks)), first


def _names_no_cause(error: Error) -> bool:
    """Whether it is a launcher's, or a traceback whose end is not in the log."""
    return is_launchers(error) or (error.kind == "traceback" and not error.type)


def _independent(unknown: Error, other: Error) -> bool:
    """Whether another rank's error may well be the earlier one: neither has a time, and both are causes."""
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
            return Diagnosis(examination.watch.divergence(registry), [], max(1, len(examination.ranks)))
        examination.errors.success.clear()  # of a run directory the marker alone tells
    verdict = examination.verdict()
    for folder in filter(is_run_dir, map(Path, paths)):
        verdict = _as_seen(verdict, folder)
        if not verdict.findings and not verdict.unknown:
            verdict = replace(verdict, unfinished=str(folder))
    return verdict


_KILLED = re.compile(r"(?:exitcode *: *|return code = )-9\b|SIGKILL|[Ss]ignal 9\b|code:? 137\b|\bKilled\b")
"""A process was killed: nothing says for what."""


def _as_seen(verdict: Diagnosis, folder: Path) -> Diagnosis:
    """The verdict with what the supervisor knew of a killed rank: logs look alike, whoever did it."""
    lost = read_lost(folder)
    if lost is None:
        return verdict
    if not verdict.findings and not verdict.unknown:  # no log has a line of it
        struck = "; the kernel's OOM killer was at work meanwhile" if lost.oom else ""
        error = Error("", lost.message + struck, file=str(folder / "logs" / LOST), line=1)
        return replace(
            verdict, unknown=[Unknown(error, lost.ranks, min(lost.ranks, default=None))], noticed=[]
        )
    if lost.oom is not False or not verdict.findings:
        return verdict
    first = verdict.findings[0]
    if first.failure.id != "sigkill-oom" or not _KILLED.search(first.error.headline):
        return verdict
    error = Error("", f"{lost.message}; the kernel's OOM killer did not do it", file=first.error.file)
    error.line = first.error.line
    return replace(verdict, findings=[], unknown=[Unknown(error, lost.ranks, lost.ranks[0])])


def _run_below(given: str) -> str:
    """The run directory that a folder holds, for one who names the folder above it; else what was given."""
    folder = Path(given)
    if given == "-" or not folder.is_dir() or is_run_dir(folder):
        return given
    runs = sorted(
        (plan.parent for pattern in ("*/plan.json", "*/*/plan.json") for plan in folder.glob(pattern)),
        key=lambda run: (run / "plan.json").stat().st_mtime,
    )
    if len(runs) > 1:
        raise RecipeError(
            Problem(
                "log-unreadable",
                f"cannot diagnose: the folder holds {len(runs)} run directories",
                given,
                hint=f"name one of them; the latest is {runs[-1]}",
            )
        )
    return str(runs[0]) if runs else given


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
            if not logs and not recorded_errors(path) and not (path / "metrics.jsonl").is_file():
                raise _unreadable(given, "the folder holds no logs")
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
