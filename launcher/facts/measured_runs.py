"""What earlier runs measured beside what was predicted: a fact, gathered before planning. Pure.

The calibration file holds one JSON object a line, one line a finished run. It tells sizes, versions and the
kind of a job; no name of a model, a file, a data set or a machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_type_hints

from launcher.facts.hardware import Hardware
from launcher.facts.safe_files import parse_json

SCHEMA_VERSION = 1
KEPT = 64
"""Newest runs of a device that a plan looks at."""
_MOST_BYTES = 2**60
"""More than any device holds: sizes beyond it are no measurement."""


class Kind(NamedTuple):
    """What of a job and its model decides by how much an estimate errs."""

    model_type: str
    task: str
    engine: str
    zero_stage: int
    precision: str
    quantization: str
    adapter: bool
    checkpointing: bool
    attention: str
    optim: str
    offload: str
    """none, or what is offloaded: optimizer, param, or both joined by +."""

    def differences(self, other: Kind) -> int:
        """In how many respects two jobs differ."""
        return sum(mine != theirs for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run. Bytes of the device that held most."""

    device: str
    method: str
    """How the peak was measured: cuda-reserved+context | cpu-tensor-storages."""
    torch: str
    transformers: str
    kind: Kind
    processes: int
    params: int
    steps: int
    """Steps while it was measured: 0 where a checkpoint was at its end already."""
    predicted_by: str
    """closed-form | trace"""
    predicted: int
    """Peak of training as computed for the longest batch that came, without any calibration."""
    components: Mapping[str, int]
    """The parts of `predicted`."""
    measured: int
    allocated: int | None
    """CUDA: what tensors held at the peak."""
    context: int
    """What the device had lost beside the allocator's bytes; 0 on CPU."""
    device_bytes: int | None
    """What CUDA shows of the device."""

    @property
    def predicted_tensors(self) -> int:
        """The prediction without the context, which is not a matter of proportion."""
        return self.predicted - self.components.get("context", 0)

    @property
    def ratio(self) -> float:
        """Measured by predicted, both without the context."""
        return (self.measured - self.context) / self.predicted_tensors

    def to_line(self) -> str:
        """The run as a line of the calibration file."""
        fields = {**asdict(self), "kind": self.kind._asdict()}
        return json.dumps({"schema_version": SCHEMA_VERSION, **fields}) + "\n"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Earlier runs on one device, measured in one way, the oldest first."""

    runs: tuple[Run, ...]
    source: str
    """The file that they were read from."""
    skipped: int = 0
    """Lines that are no runs."""


def measuring_method(hardware: Hardware) -> str:
    """The method by which a run on such hardware is measured."""
    return "cpu-tensor-storages" if hardware.is_cpu else "cuda-reserved+context"


def read_calibration(text: str, hardware: Hardware, source: str) -> Calibration:
    """The newest runs on such a device in a calibration file's text; other lines are counted."""
    method = measuring_method(hardware)
    found: list[Run] = []
    skipped = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        run = read_run(line)
        if run is None:
            skipped += 1
        elif (run.device, run.method) == (hardware.device, method):
            found.append(run)
    return Calibration(tuple(found[-KEPT:]), source, skipped)


def read_run(line: str) -> Run | None:
    """The run of one line; None for a broken line, and for one of another version."""
    if not line.startswith("{"):  # a foreign file of many lines costs no time
        return None
    try:
        fields = parse_json(line)
        if fields.pop("schema_version") != SCHEMA_VERSION:
            return None
        kind = Kind(**fields.pop("kind"))
        run = Run(kind=kind, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    sound = _typed(kind) and _typed(run) and all(type(v) is int for v in run.components.values())
    return run if sound and _possible(run) else None


_HINTS: dict[type, dict[str, Any]] = {cls: get_type_hints(cls) for cls in (Kind, Run)}


def _possible(run: Run) -> bool:
    """Whether a device can have measured this: no size is negative or beyond what it shows."""
    held = _MOST_BYTES if run.device_bytes is None else run.device_bytes
    sizes = (run.params, run.steps, run.predicted, run.context, run.allocated or 0, *run.components.values())
    return (
        all(0 <= size <= _MOST_BYTES for size in sizes)
        and run.processes >= 1
        and 0 <= run.context < run.measured <= held <= _MOST_BYTES
        and run.predicted_tensors > 0
    )


def _typed(value: Kind | Run) -> bool:
    """Whether every plain field has the type that it is declared with (True is no number here)."""
    for name, hint in _HINTS[type(value)].items():
        found = getattr(value, name)
        if name == "components":
            if type(found) is not dict:
                return False
        elif hint == (int | None):
            if found is not None and type(found) is not int:
                return False
        elif type(found) is not hint:
            return False
    return True
