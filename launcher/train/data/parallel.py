"""An ordered map over processes that holds only a few items at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from launcher.errors import MachineError, Problem

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 3
"""Items in flight per process: enough to keep it busy, few enough to keep memory flat."""

_function: Callable[[Any], Any] | None = None


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Iterator[Result]:
    """`map(function, items)` over forked processes, in order. What `function` raises is raised here.

    Unlike `Pool.imap` it does not read `items` to their end before the results are taken.
    """
    global _function
    if processes <= 1:
        yield from map(function, items)
        return
    _function = function  # inherited by fork: a tokenizer is loaded once, and never pickled
    threads = os.environ.get("TOKENIZERS_PARALLELISM", "true")
    # Each process works on one batch; threads inside the tokenizer would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    waiting: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(_call, item))
                if len(waiting) >= AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            hint = "lower data.num_proc: each process needs memory of its own"
            raise MachineError(
                Problem("process-killed", "a process that prepares data was killed", hint=hint)
            ) from error
        finally:
            os.environ["TOKENIZERS_PARALLELISM"] = threads
            pool.shutdown(wait=True, cancel_futures=True)
            _function = None


def _call(item: Any) -> Any:
    assert _function is not None, "set before the processes are forked"
    return _function(item)
