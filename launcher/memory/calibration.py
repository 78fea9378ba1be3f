"""What earlier runs on a device change in an estimate: its context, and the range around it. Pure.

Two quantities are calibrated. The CUDA context is a property of the device, its driver and the libraries, so
a measured one replaces the published figure. The rest of the peak is computed, and what is
calibrated there is the error of the computation: the ratio of measured to predicted bytes of similar
runs moves the range. The components stay what was computed, and what is recorded of a run is its
uncalibrated prediction: a miss stays visible, and no correction is corrected again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.machine.hardware import Hardware
from launcher.memory.job import MemoryJob
from launcher.memory.published import overlap_comm_upper_bound
from launcher.models.measured_runs import Calibration, JobKind, MeasuredRun
from launcher.models.model import ModelSpec

CPU_RANGE = (0.99, 1.02)
"""The range around an estimate without local runs, as shares of it: `covering_range` of the rows of
benchmarks/records/memory_cpu.json on which formulas may be tuned."""
CUDA_RANGE = (0.95, 1.2)
"""The same of published rows, of the half on which formulas may be tuned (benchmarks/memory_published.py):
other devices and versions. It holds all rows measured on one H100 with the present libraries."""
COVERAGE = 0.9
"""Share of those rows that a range holds at least."""
PRIOR_RUNS = 3
"""Similar runs that count as much as the committed records."""
LEAST_SIMILAR = 1 / 8
"""Weight below which a run is ignored for a job: three differences, or an eighth of the size."""


@dataclass(frozen=True, slots=True)
class Range:
    """The range of the peak of training, in bytes."""

    low: int
    expected: int
    """The likely peak; the estimate itself without similar runs."""
    high: int


def covering_range(ratios: Sequence[float], share: float = COVERAGE) -> tuple[float, float]:
    """Shares of an estimate between which at least `share` of measured/predicted lie; 1 is between them.

    As many are left out on either side; the ends are rounded outwards to hundredths.
    """
    ordered = sorted(ratios)
    left_out = int((1 - share) * len(ordered) / 2 + 1e-9)  # 1 - 0.9 is a little less than 0.1
    inner = ordered[left_out : len(ordered) - left_out]
    low, high = math.floor(100 * inner[0]) / 100, math.ceil(100 * inner[-1]) / 100
    return min(low, 1.0), max(high, 1.0)


def prior_range(job: MemoryJob, hardware: Hardware, tensors: int) -> tuple[float, float]:
    """The range around an estimate of `tensors` bytes before any run like it, as shares of them.

    Where communication overlaps, DeepSpeed's documented rule for its buckets is the upper end.
    """
    low, high = CPU_RANGE if hardware.is_cpu else CUDA_RANGE
    if job.overlap_comm:
        high = max(high, 1 + overlap_comm_upper_bound(job.reduce_bucket_size) / tensors)
    return low, high


def job_kind(spec: ModelSpec, job: MemoryJob) -> JobKind:
    """What is compared between a job and an earlier run."""
    moved = [
        n for n, to in (("optimizer", job.offload_optimizer), ("param", job.offload_param)) if to != "none"
    ]
    return JobKind(
        model_type=spec.model_type,
        task=spec.task,
        engine=job.engine.name + _sharing(job),
        zero_stage=job.zero_stage,
        precision=job.precision,
        quantization=job.quantization,
        adapter=job.adapter,
        checkpointing=job.checkpointing,
        attention=job.attention,
        optim=job.optim,
        offload="+".join(moved) or "none",
    )


def _sharing(job: MemoryJob) -> str:
    """A suffix for ranks that share a copy: such runs count less for others."""
    tensor, sequence = job.tensor_parallel > 1, job.sequence_parallel > 1
    return ("+tensor" if tensor else "") + ("+sequence" if sequence else "")


def device_context(
    job: MemoryJob, hardware: Hardware, calibration: Calibration | None, published: int
) -> tuple[int, str | None]:
    """Bytes of the CUDA context of one process, and a note where runs on this device have measured it.

    The smallest that was measured: other programs on the device can only add to it. Several processes hold
    NCCL's buffers as well, so they are not mixed with single ones. What the device's size counts beyond
    what CUDA shows is part of it. `published`: the figure without such runs.
    """
    if hardware.is_cpu:
        return 0, None
    several = job.data_parallel * job.tensor_parallel * job.sequence_parallel > 1
    found = [
        run.context + max(0, (hardware.device_bytes or 0) - run.device_bytes)
        for run in (() if calibration is None else calibration.runs)
        if (run.processes > 1) == several and run.device_bytes is not None
    ]
    if not found:
        return published, None
    return min(found), f"context of {min(found) / 2**20:.0f} MiB from {_runs(len(found))}"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def similar_runs(
    kind: JobKind, size: int, method: str, calibration: Calibration
) -> list[tuple[MeasuredRun, float]]:
    """Runs that count for a job, with their weights in (0, 1].

    `size`: bytes of the job's estimate without context; `method`: how it was made. A run counts when its
    estimate was made in the same way and it went beyond one step, before which no state of the optimizer
    is held. Each difference in kind halves its weight, and so does half or twice the size.
    """
    found = []
    for run in calibration.runs:
        if run.predicted_by != method or run.steps < 2:
            continue
        near = min(size, run.predicted_tensors) / max(size, run.predicted_tensors)
        weight = near * 0.5 ** kind.differences(run.kind)
        if weight >= LEAST_SIMILAR:
            found.append((run, weight))
    return found


def calibrated_ratios(
    found: Sequence[tuple[float, float]], prior: tuple[float, float]
) -> tuple[float, float, float]:
    """(low, expected, high) as shares of an estimate, from (measured/predicted, weight) of similar runs.

    In logarithms: the mean of the runs is shrunk towards the estimate as if PRIOR_RUNS runs had met it. The
    range holds this mean and every run, and beyond them the part of the prior range that is left. An error
    that was seen once may come again on either side of the mean, by the same part: one run that missed the
    estimate by 10 % leaves more doubt than none, until others agree with it.
    """
    weight = sum(w for _, w in found)
    low, high = prior
    if not weight:
        return low, 1.0, high
    share = weight / (weight + PRIOR_RUNS)
    logs = [math.log(ratio) for ratio, _ in found]
    centre = share * sum(w * x for (_, w), x in zip(found, logs, strict=True)) / weight
    again = (1 - share) * max(abs(x) for x in logs)
    below = min(centre - again, *logs) + (1 - share) * math.log(low)
    above = max(centre + again, *logs) + (1 - share) * math.log(high)
    return math.exp(below), math.exp(centre), math.exp(above)


def memory_range(
    tensors: int,
    context: int,
    kind: JobKind,
    method: str,
    calibration: Calibration | None,
    prior: tuple[float, float],
) -> tuple[Range, str | None]:
    """The range around an estimate of `tensors` bytes besides a context, and a note where runs decide it.

    `prior`: the range without similar runs, as shares of `tensors`.
    """
    found = [] if calibration is None else similar_runs(kind, tensors, method, calibration)
    ratios = calibrated_ratios([(run.ratio, weight) for run, weight in found], prior)
    span = Range(*(context + round(tensors * ratio) for ratio in ratios))
    if not found:
        return span, None
    seen = sorted(run.ratio for run, _ in found)
    ends = dict.fromkeys((f"{seen[0]:.2f}", f"{seen[-1]:.2f}"))
    return span, f"range from {_runs(len(found))} like it, which took {' to '.join(ends)} of their estimates"


def calibration_note(
    hardware: Hardware, calibration: Calibration | None, notes: Sequence[str | None]
) -> str | None:
    """`memory.calibration`: what earlier runs have changed; None where they have not."""
    known = [note for note in notes if note is not None]
    if calibration is None or not known:
        return None
    return f"{'; '.join(known)}, on {hardware.device} ({calibration.source})"
