"""What was gathered before planning, as one frozen value. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher.machine.hardware import Hardware, Processor
from launcher.models.model import ModelSpec

if TYPE_CHECKING:
    from launcher.models.measured_runs import Calibration
    from launcher.models.memory_trace import Trace
    from launcher.rows.prepared_images import PreparedImages


@dataclass(frozen=True, slots=True)
class Pace:
    """What earlier starts of the same run took, seconds; None where none is known."""

    step: float | None = None
    """The slowest rank's median."""
    save: float | None = None
    """The slowest of the checkpoints that are there."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was gathered before planning."""

    hardware: Hardware
    model: ModelSpec
    versions: Mapping[str, str]
    """Installed versions by distribution name."""
    profile: Mapping[str, object] | None = None
    """Content of the recipe's `sharding.config`."""
    cpu_cores: int = 1
    processor: Processor | None = None
    """One of those cores, where the plan is for this machine."""
    python: str = "python"
    """The interpreter that will start the workers."""
    allocator: Mapping[str, str] = field(default_factory=dict)
    """Options of torch's allocator in the shell: variable -> value."""
    hooks: tuple[str, ...] = ()
    """Names of the hooks in the recipe's `python` file."""
    hooks_digest: str | None = None
    """SHA-256 of that file and the modules next to it that it imports."""
    own_states: float | None = None
    """Bytes that the optimizer of that file keeps of each trained value, as traced; None: not known."""
    warnings: tuple[str, ...] = field(default=())
    tiny: bool = False
    """Rehearsal: two narrow layers, generated rows, four steps."""
    host_bytes: int | None = None
    """Host memory, where the plan is for this machine."""
    trace: Trace | None = None
    """What a trace of the real model found."""
    calibration: Calibration | None = None
    """What earlier runs measured on such a device."""
    images: PreparedImages | None = None
    """Statistics of the images in this recipe's prepared rows."""
    pace: Pace = Pace()
    """Of a run that is resumed."""
