"""Inject faults, for `drill` and the tests: EFFILAUNCH_DRILL sets which, at which step and on which rank.

Without that variable nothing here has an effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import rank

VARIABLE = "EFFILAUNCH_DRILL"
SUPERVISOR = "EFFILAUNCH_SUPERVISOR"
MARKER = ".drilled"
"""In RUN_DIR/logs, written when a fault with `times` is injected."""

_RANKS = {"kill-rank": "one", "hang": "one", "terminate": "first", "disk-full": "first", "kill-all": "all",
          "kill-save": "all"}  # fmt: skip
"""Fault -> the ranks that it is injected on: the one that EFFILAUNCH_DRILL names, the first one, or all."""
_IN_A_SAVE = ("kill-save", "disk-full")
_KEYS = {"fault", "step", "rank", "times"}

FULL_AT_BYTES = 4096
"""Even a tiny adapter's weights are larger."""
_FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, injected in the save of step `step`, or after that step and before the next one."""

    kind: str
    step: int
    rank: int | None
    """The rank that gets it; None: every rank."""
    marker: Path | None
    """Written when it is injected, if that may happen only once."""

    def is_due(self, kinds: tuple[str, ...], step: int) -> bool:
        """Whether to inject it now on this rank; its marker is written then."""
        if self.kind not in kinds or self.step != step or self.rank not in (None, rank()):
            return False
        if self.marker is not None:
            self.marker.write_text(f"{self.kind} {step}\n", encoding="utf-8")
        return True


_armed: Fault | None = None


def arm(environ: Mapping[str, str], run_dir: Path) -> None:
    """Read the fault of the environment; before the first step, so that no rank sees a new marker."""
    global _armed
    _armed = None if VARIABLE not in environ else read_fault(environ[VARIABLE], run_dir)


def read_fault(text: str, run_dir: Path) -> Fault | None:
    """The fault that this JSON describes, None if it was injected before. RecipeError if it is invalid."""
    try:
        asked: Any = json.loads(text)
    except ValueError as error:
        raise _refused(text, str(error)) from error
    if not isinstance(asked, dict) or not {"fault", "step"} <= asked.keys() <= _KEYS:
        raise _refused(text, "expected an object with fault, step and, if needed, rank and times")
    kind, step, number, times = asked["fault"], asked["step"], asked.get("rank"), asked.get("times")
    if str(kind) not in _RANKS:
        raise _refused(text, f"fault must be one of {', '.join(_RANKS)}")
    if type(step) is not int or step < (1 if kind in _IN_A_SAVE else 0):
        raise _refused(text, "step must be the number of a step")
    ranks = _RANKS[kind]
    if ranks == "one" and (type(number) is not int or number < 0):
        raise _refused(text, f"{kind} needs a rank")
    if ranks != "one" and number not in ((None, 0) if ranks == "first" else (None,)):
        raise _refused(text, f"{kind} takes no rank")
    if times not in (None, 1) or isinstance(times, bool):
        raise _refused(text, "times must be 1 or absent")
    number = 0 if ranks == "first" else number
    marker = None if times is None else run_dir / "logs" / MARKER
    return None if marker is not None and marker.exists() else Fault(kind, step, number, marker)


def _refused(text: str, why: str) -> RecipeError:
    return RecipeError(Problem("bad-drill", f"{VARIABLE}={text!r} is invalid: {why}"))


def before_step(ended: int) -> None:
    """Called between two steps, after `ended` of them: injects all faults but those inside a save."""
    if _armed is None:
        return
    if _armed.is_due(("kill-rank", "kill-all"), ended):
        _die()
    if _armed.is_due(("terminate",), ended):
        os.kill(int(os.environ[SUPERVISOR].split(":")[-2]), signal.SIGTERM)
    if _armed.is_due(("hang",), ended):
        time.sleep(_FOREVER_S)


def inside_save(step: int) -> None:
    """Called when the weights of a checkpoint are written, but the rest and the rename are not."""
    if _armed is not None and _armed.is_due(("kill-save",), step):
        _die()


@contextlib.contextmanager
def saving(step: int) -> Iterator[None]:
    """Within this a checkpoint is written; for `disk-full` its files cannot grow beyond FULL_AT_BYTES.

    The error is EFBIG instead of ENOSPC: no test can fill a disk that others use.
    """
    if _armed is None or not _armed.is_due(("disk-full",), step):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
