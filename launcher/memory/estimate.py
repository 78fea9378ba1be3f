"""Peak memory of a training job on one device, in closed form: no model is built.

The moments of a training step are compared (phases.py), beside saving and evaluating. The components
reported are those of the moment of training that rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.facts.calibration import Calibration
from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.facts.trace import Trace
from launcher.memory.activations import eval_bytes
from launcher.memory.engine import host_bytes, save_peak
from launcher.memory.job import Components, MemoryJob
from launcher.memory.phases import flow_dtypes, training_phases
from launcher.memory.states import overlap_comm_upper_bound

__all__ = ["Components", "MemoryEstimate", "MemoryJob", "estimate_memory", "max_micro_batch"]

MARGIN = 0.05
"""Share of the device left free: the caching allocator's fragmentation."""
LOW, HIGH = 0.95, 1.16
"""Range around the estimate: estimates of this kind fell short of published peaks by up to 16 %."""
MAX_MICRO_BATCH = 1 << 16


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; `host_bytes` on one node."""

    device_bytes: int | None
    fits: bool | None
    """`needed` and `margin` together are at most `device_bytes`; None where that is unknown."""
    margin: int
    low: int
    high: int
    components: Components
    total: int
    """Peak of training: the sum of `components`."""
    save_peak: int
    eval_peak: int
    host_bytes: int
    phase: str
    """backward | recompute | gradients | step: the moment of training that rules."""
    phases: Mapping[str, Components]
    """Every moment that was compared."""
    method: str
    """closed-form | trace"""
    calibration: str | None
    """What earlier runs on such a device have changed in these figures, None without such runs."""
    trainable_params: int

    @property
    def needed(self) -> int:
        """The most that the device holds at any moment of a run, saving and evaluating included."""
        return max(self.total, self.save_peak, self.eval_peak)

    def to_json(self) -> dict[str, Any]:
        """The `memory` object of `plan --json`."""
        fields: dict[str, Any] = asdict(self)
        del fields["trainable_params"]
        return fields


def estimate_memory(
    spec: ModelSpec,
    job: MemoryJob,
    hardware: Hardware,
    *,
    trace: Trace | None = None,
    calibration: Calibration | None = None,
) -> MemoryEstimate:
    """Peak bytes of `job` on one device of `hardware`.

    `trace`: activations of the real model, used in place of the closed form where they cover the job.
    `calibration`: what earlier runs measured.
    """
    phases = {name: _share(parts, job.spread) for name, parts in training_phases(spec, job, hardware).items()}
    phase, components = max(phases.items(), key=lambda item: item[1].total)
    total = components.total
    device = hardware.device_bytes
    margin = int(MARGIN * device) if device is not None else 0
    step = phases["step"]
    resident = step.total - step.temporary
    evaluation = eval_bytes(
        spec,
        flow_dtypes(job, hardware),
        batch=job.eval_batch * job.sequences_per_sample,
        sequence=job.sequence_length,
        attention=job.attention,
    )
    high = int(HIGH * total)
    if job.engine == "deepspeed" and job.overlap_comm:
        high = max(high, total + overlap_comm_upper_bound(job.reduce_bucket_size))
    return MemoryEstimate(
        device_bytes=device,
        fits=None if device is None else total + margin <= device,
        margin=margin,
        low=int(LOW * total),
        high=high,
        components=components,
        total=total,
        save_peak=save_peak(spec, job, resident),
        eval_peak=resident - step.gradients + evaluation,
        host_bytes=host_bytes(spec, job, hardware, total),
        phase=phase,
        phases=phases,
        method="closed-form",
        calibration=None,
        trainable_params=job.trainable_params,
    )


def max_micro_batch(
    spec: ModelSpec,
    job: MemoryJob,
    hardware: Hardware,
    *,
    trace: Trace | None = None,
    calibration: Calibration | None = None,
) -> int:
    """Largest micro-batch that fits, 0 when none does; bounded by 65536 where memory is unknown."""

    def fits(size: int) -> bool:
        sized = replace(job, micro_batch=size)
        return estimate_memory(spec, sized, hardware, trace=trace, calibration=calibration).fits is not False

    if not fits(1):
        return 0
    low = 1
    while low < MAX_MICRO_BATCH and fits(2 * low):
        low *= 2
    if low >= MAX_MICRO_BATCH:
        return MAX_MICRO_BATCH
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _share(parts: Components, devices: int) -> Components:
    """What one of the devices holds that share the layers; the head with its logits sits on one of them."""
    divided = ("weights", "gradients", "optimizer", "activations")
    return replace(parts, **{name: -(-getattr(parts, name) // devices) for name in divided})
