"""Measure the rows of a grid: a process for each row, several at a time where there is room, and the options
that the commands share. Where a figure is measured again, it is compared with the record."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO

SAME_SHARE = 0.005
"""How far a second measurement with other versions may be from the record."""
TOLD = 3000
"""Characters of a failed process's output that are shown."""
_FORKS = threading.Lock()
"""filelock, which the hub's client imports, lets no two threads fork at once."""

Answer = dict[str, Any]


def in_process(work: Callable[..., Any], timeout_s: float, *arguments: Any, quiet: bool = False) -> Answer:
    """What `work` returns in a forked process; {"error": …} when it fails or takes too long."""
    return in_processes([partial(work, *arguments)], timeout_s, quiet=quiet)[0]


def in_processes(
    works: Sequence[Callable[[], Any]], timeout_s: float, *, quiet: bool = False
) -> list[Answer]:
    """The same of several that wait for each other: when one fails, the others are ended.

    quiet: the output of processes that fail is not shown.
    """
    ends = time.monotonic() + timeout_s
    with tempfile.TemporaryFile() as log:
        started = [_start(work, log) for work in works]
        waiting = {answers: number for number, (_, answers) in enumerate(started)}
        found: list[Answer] = [{"error": f"stopped after {timeout_s:.0f} s"} for _ in works]
        failed = False
        while waiting and not failed:
            ready = wait(list(waiting), max(0.0, ends - time.monotonic()))
            if not ready:
                break
            for answers in ready:
                number = waiting.pop(answers)  # type: ignore[call-overload]
                found[number] = _received(*started[number])
                failed = failed or "error" in found[number]
        for process, answers in started:
            process.kill()
            process.join()
            answers.close()
        if not quiet and any("error" in one for one in found):
            log.seek(0)
            print(log.read().decode(errors="replace")[-TOLD:], file=sys.stderr)
    return found


def error_of(answers: Sequence[Answer]) -> str | None:
    """Why one of several processes failed: not those that were ended because of it."""
    errors = [one["error"] for one in answers if "error" in one]
    return min(errors, key=lambda error: error.startswith("stopped after"), default=None)


def _start(work: Callable[[], Any], log: BinaryIO) -> tuple[Any, Connection]:
    fork = multiprocessing.get_context("fork")
    with _FORKS:
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=_answer, args=(there, work, log))
        process.start()
        there.close()  # else a process that is forked later would keep it open
    return process, here


def _received(process: Any, answers: Connection) -> Answer:
    try:
        answer: Answer = answers.recv()
        return answer
    except EOFError:
        process.join()
        return {"error": f"the process ended with code {process.exitcode}"}


def _answer(answers: Connection, work: Callable[[], Any], log: BinaryIO) -> None:
    _FORKS.release()  # it was held when this process was forked
    warnings.simplefilter("ignore")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        answers.send(work())
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        answers.send({"error": f"{type(error).__name__}: {lines[0][:200]}"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # process groups would wait for each other


class Room:
    """What measurements at the same time share: a device's memory, or a machine's processors."""

    def __init__(self, size: float) -> None:
        self.size = self.left = size
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, wanted: float) -> Iterator[None]:
        """Wait for `wanted`, at most all of it, and hold it."""
        wanted = min(wanted, self.size)
        with self.changed:
            self.changed.wait_for(lambda: wanted <= self.left)
            self.left -= wanted
        try:
            yield
        finally:
            with self.changed:
                self.left += wanted
                self.changed.notify_all()


def entries_of(
    rows: Sequence[Any], measure: Callable[[Any], Answer], line_of: Callable[[Answer], str], jobs: int = 1
) -> list[Answer]:
    """What `measure` says of each row, in the order of the rows; a line of each is printed as it comes."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(measure, row) for row in rows]
        try:
            for future in as_completed(futures):
                print(line_of(future.result()), flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def differs(found: float, recorded: float, same_versions: bool) -> bool:
    """Whether a second figure is another one: by a byte with the same versions, by SAME_SHARE with others."""
    return abs(found - recorded) > (0 if same_versions else SAME_SHARE * recorded)


def compare_again(entry: Answer, figure: str, recorded: float, same_versions: bool) -> None:
    """An entry whose figure is another one than the record's has an error."""
    if differs(entry[figure], recorded, same_versions):
        entry["error"] = f"recorded: {recorded:,}"


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "repeat": {"action": "store_true", "help": "compare with the record, write nothing"},
    "check": {"action": "store_true", "help": "exit 1 when a target is missed"},
    "rehearse": {"action": "store_true", "help": "on a CPU, with narrow models; no record"},
    "cpu": {"action": "store_true", "help": "on CPU processes, with narrow models; no record"},
    "jobs": {"type": int, "default": 1, "help": "rows at the same time (1)"},
    "rounds": {"type": int, "default": 2, "help": "over all rows (2)"},
    "budget": {"type": float, "default": 500.0, "metavar": "S", "help": "seconds in all (500)"},
    "room": {"type": float, "metavar": "GB", "help": "of the device, for several jobs (all)"},
    "out": {"type": Path, "metavar": "FILE", "help": "the record's file"},
    "record": {"type": Path, "metavar": "FILE", "help": "the record's file"},
    "json": {"type": Path, "metavar": "RECORD", "help": "write the table"},
}


def parser_of(doc: str | None, *names: str, rows: Sequence[Any] = (), **defaults: Any) -> Any:
    """A parser of the named options; `rows`: those of which --only names some. defaults: of options."""
    parser = argparse.ArgumentParser(description=str(doc).splitlines()[0], allow_abbrev=False)
    known = {row.name for row in rows}

    def row_name(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"not in the grid: {name}")
        return name

    if rows:
        parser.add_argument("--only", nargs="+", metavar="NAME", type=row_name, help="these rows")
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    parser.set_defaults(**defaults)
    return parser
