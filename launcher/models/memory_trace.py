"""Memory of the real model, traced with fake tensors in a child process.

The child (launcher/train/trace/run.py) imports torch, so that planning does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import MachineError, Problem
from launcher.files.safe_files import parse_json

LIMIT_S = 300
"""Seconds until a trace is given up."""
_SHOWN_S = 20
"""Seconds between two lines of progress."""
CHILD = "launcher.train.trace.run"
_DOES = {
    "trace": "tracing a step of the real model",
    "model": "reading the sizes of the model from transformers",
    "adapter": "counting what the adapter trains with peft",
    "config": "reading the configuration's defaults from transformers",
    "optimizer": "one step of your optimizer, on tensors without values",
}


class Untraceable(Exception):
    """The model was found but could not be traced; the message is the reason."""


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """Bytes as a function of the micro-batch."""

    constant: float
    per_sample: float

    def at(self, micro_batch: int) -> int:
        return max(0, round(self.constant + self.per_sample * micro_batch))


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory of the whole model at one moment of a step, without weights and optimizer states."""

    phase: str
    """step | forward | backward | clip"""
    gradients: LinearBytes
    activations: LinearBytes
    logits: LinearBytes
    temporary: LinearBytes


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One training step under one set of choices, unsharded."""

    covers: Mapping[str, Any]
    """The choices (memory.traced.choices_of)."""
    moments: tuple[Moment, ...]
    """Those that may be the peak for some micro-batch."""
    gradients: int
    """Bytes of all gradients."""
    fragmentation: LinearBytes | None
    """Bytes that CUDA's caching allocator reserves beyond the peak of what is allocated; 0 on a CPU,
    None where the step was traced at other lengths than its own."""

    def keeping_gradients(self, covers: Mapping[str, Any]) -> TracedStep:
        """The same with all gradients at every moment, for these choices."""
        every = LinearBytes(self.gradients, 0.0)
        moments = tuple(replace(moment, gradients=every) for moment in self.moments)
        return replace(self, covers=dict(covers), moments=moments)


@dataclass(frozen=True, slots=True)
class Trace:
    """All traced steps of one model on one kind of device."""

    steps: tuple[TracedStep, ...] = ()
    versions: Mapping[str, str] | None = None
    """Of torch and transformers."""

    def step_for(self, choices: Mapping[str, Any]) -> TracedStep | None:
        """The step under these choices, if it was traced.

        A step that keeps an adapter's gradients for the next micro-batch is told by one that does not: all of
        them are there at each moment, and until it is added at most one more.
        """
        found = self._covering(choices)
        if found or not (choices.get("adapter") and choices.get("keeps_gradients")):
            return found
        found = self._covering({**choices, "keeps_gradients": False})
        return None if found is None else found.keeping_gradients(choices)

    def _covering(self, choices: Mapping[str, Any]) -> TracedStep | None:
        return next((step for step in self.steps if step.covers == choices), None)

    def with_step(self, step: TracedStep, versions: Mapping[str, str]) -> Trace:
        return replace(self, steps=(*self.steps, step), versions=dict(versions))


def read_step(
    answer: Mapping[str, Any], covers: Mapping[str, Any], fragmentation: LinearBytes | None
) -> TracedStep:
    """The child's answer as a step."""
    lines = ("gradients", "activations", "logits", "temporary")
    moments = tuple(
        Moment(entry["segment"].partition("/")[0], *(LinearBytes(*entry[name]) for name in lines))
        for entry in answer["moments"]
    )
    return TracedStep(dict(covers), moments, round(answer["states"]["gradients"]), fragmentation)


def ask_child(
    request: Mapping[str, Any],
    python: str,
    say: Callable[[str], None] = lambda line: None,
    child: str = CHILD,
) -> dict[str, Any]:
    """The child's answer. Untraceable where tracing fails; MachineError where the child fails.

    python: an interpreter with the training packages. say: shows a line of progress.
    """
    import subprocess  # not needed for plans without a trace

    from launcher.machine.child import converse

    # Models walk sets of names: which of their masks are alive in a moment would differ from plan to plan.
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    shown = 0.0

    def waiting(seconds: float) -> None:
        nonlocal shown
        if seconds - shown >= _SHOWN_S:
            shown = seconds
            say(f"{_DOES[request['ask']]}: {seconds:.0f} s, given up after {LIMIT_S} s; Ctrl-C ends it")

    try:
        done = converse(
            [python, "-m", child], request, environ, stderr=subprocess.PIPE, limit_s=LIMIT_S, waiting=waiting
        )
    except subprocess.TimeoutExpired:
        raise Untraceable(f"it took longer than {LIMIT_S} s") from None
    if done.returncode != 0:
        message = f"the tracing process exited with status {done.returncode}: {_last_line(done.stderr)}"
        hint = "check torch and transformers, or reinstall: pip install 'effilaunch[train]'"
        raise MachineError(Problem("trace-failed", message, hint=hint))
    try:
        # The answer is the last line: libraries may have printed others before it.
        answer: dict[str, Any] = parse_json(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        message = f"the tracing process printed no valid answer: {_last_line(done.stdout)[:200]}"
        raise MachineError(Problem("trace-failed", message)) from None
    if "error" in answer:
        raise Untraceable(answer["error"])
    return answer


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
