"""Prelude of a rank that counts its moments, and kills itself at one of them.

A moment is an event of the Trainer's callbacks (between micro-batches, around the optimizer's step, after
each batch of an evaluation, …) or a file that is opened, made, moved or removed in the run's checkpoints.
It is named by the steps that have ended, its phase, and its number among those.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from transformers.trainer_callback import CallbackHandler

AT, WRITTEN = "TEST_KILL_AT", "TEST_MOMENTS"
"""Variables: the moment to kill at, as JSON; the file that gets all moments at the end of training."""
PHASES = {
    "on_step_begin": "step",
    "on_substep_end": "step",
    "on_pre_optimizer_step": "step",
    "on_optimizer_step": "step",
    "on_prediction_step": "evaluation",
    "on_evaluate": "evaluation",
    "on_save": "save",
}
_FILES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

_step = 0
_seen: Counter[tuple[int, str]] = Counter()
_moments: list[tuple[int, str, int]] = []
_at = json.loads(os.environ.get(AT, "null"))


def moment(phase: str) -> None:
    key = (_step, phase)
    _moments.append((*key, _seen[key]))
    _seen[key] += 1
    if [*_moments[-1]] == _at:
        os.kill(os.getpid(), signal.SIGKILL)


_call_event = CallbackHandler.call_event


def call_event(self: Any, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
    global _step
    _step = state.global_step
    if event in PHASES:
        moment(PHASES[event])
    found = _call_event(self, event, args, state, control, **more)
    if event == "on_train_end" and WRITTEN in os.environ:
        Path(os.environ[WRITTEN]).write_text(json.dumps(_moments))
    return found


def audit(event: str, given: tuple[Any, ...]) -> None:
    if event in _FILES and "/checkpoints/" in str(given[0]) and _step:
        moment("save")


CallbackHandler.call_event = call_event  # type: ignore[method-assign]
sys.addaudithook(audit)
