"""Measured and predicted memory of finished runs, which calibrate later estimates.

The calibration file has one JSON object per line and run: sizes, versions and kind of job, but no names of
models, files, datasets or hosts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_type_hints

from launcher.files.safe_files import parse_json
from launcher.machine.hardware import Hardware

SCHEMA_VERSION = 1
KEPT = 64
"""Newest runs of a device that a plan uses."""
_MOST_BYTES = 2**60
"""Upper limit of plausible sizes."""


class JobKind(NamedTuple):
    """The properties of a job and its model that the error of an estimate depends on."""

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
    """none | optimizer | param | optimizer+param"""

    def differences(self, other: JobKind) -> int:
        """The number of properties that differ."""
        return sum(mine != theirs for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One finished run; bytes of the device with the highest peak."""

    device: str
    method: str
    """How the peak was measured: cuda-reserved+context | cpu-tensor-storages."""
    torch: str
    transformers: str
    kind: JobKind
    processes: int
    params: int
    steps: int
    """Steps that were measured; 0 where a run resumed at its end."""
    predicted_by: str
    """closed-form | trace"""
    predicted: int
    """Predicted peak for the longest batch that occurred, uncalibrated."""
    components: Mapping[str, int]
    """The parts of `predicted`."""
    measured: int
    allocated: int | None
    """CUDA: what tensors held at the peak."""
    context: int
    """Bytes outside the allocator (CUDA context); 0 on CPU."""
    device_bytes: int | None
    """Total memory as CUDA reports it."""

    @property
    def predicted_tensors(self) -> int:
        """The prediction without the context, which does not scale."""
        return self.predicted - sum(self.components.get(name, 0) for name in ("context", "nccl"))

    @property
    def ratio(self) -> float:
        """Measured / predicted, both without the context."""
        return (self.measured - self.context) / self.predicted_tensors

    def to_line(self) -> str:
        """The run as a line of the calibration file."""
        fields = {**asdict(self), "kind": self.kind._asdict()}
        return json.dumps({"schema_version": SCHEMA_VERSION, **fields}) + "\n"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Earlier runs on one device with one measuring method, the oldest first."""

    runs: tuple[MeasuredRun, ...]
    source: str
    """The file that they were read from."""
    skipped: int = 0
    """Invalid lines."""


def measuring_method(hardware: Hardware) -> str:
    """The method by which a run on such hardware is measured."""
    return "cpu-tensor-storages" if hardware.is_cpu else "cuda-reserved+context"


def read_calibration(text: str, hardware: Hardware, source: str) -> Calibration:
    """The newest runs on such a device in the text of a calibration file; counts invalid lines."""
    method = measuring_method(hardware)
    found: list[MeasuredRun] = []
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


def read_run(line: str) -> MeasuredRun | None:
    """The run of one line; None for an invalid line or another version."""
    if not line.startswith("{"):  # fast on long files of another kind
        return None
    try:
        fields = parse_json(line)
        if fields.pop("schema_version") != SCHEMA_VERSION:
            return None
        kind = JobKind(**fields.pop("kind"))
        run = MeasuredRun(kind=kind, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    sound = _typed(kind) and _typed(run) and all(type(v) is int for v in run.components.values())
    return run if sound and _possible(run) else None


_HINTS: dict[type, dict[str, Any]] = {cls: get_type_hints(cls) for cls in (JobKind, MeasuredRun)}


def _possible(run: MeasuredRun) -> bool:
    """Whether all sizes are plausible: not negative, not beyond the device's memory."""
    held = _MOST_BYTES if run.device_bytes is None else run.device_bytes
    sizes = (run.params, run.steps, run.predicted, run.context, run.allocated or 0, *run.components.values())
    return (
        all(0 <= size <= _MOST_BYTES for size in sizes)
        and run.processes >= 1
        and 0 <= run.context < run.measured <= held <= _MOST_BYTES
        and run.predicted_tensors > 0
    )


def _typed(value: JobKind | MeasuredRun) -> bool:
    """Whether every field has its declared type (a bool is no int)."""
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
