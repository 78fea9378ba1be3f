"""Peak memory of a training job on one device, in closed form: no model is built.

The moments of a training step are compared (phases.py), and saving and evaluating. The components
reported are those of the moment of training that rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from launcher.machine.hardware import Hardware
from launcher.memory.activations import make_block
from launcher.memory.calibration import (
    calibration_note,
    device_context,
    job_kind,
    memory_range,
    prior_range,
)
from launcher.memory.host import HostMemory, host_memory
from launcher.memory.images import image_note, with_images
from launcher.memory.job import Components, MemoryJob
from launcher.memory.loss import evaluation_bytes
from launcher.memory.nccl import nccl_bytes
from launcher.memory.phases import CUDA_CONTEXT, buffers, fragmented, training_phases
from launcher.memory.rollouts import rollout_notes, with_rollouts
from launcher.memory.states import optimizer_of
from launcher.memory.tensor_parallel import on_rank
from launcher.models.model import ModelSpec
from launcher.tasks import task_named

if TYPE_CHECKING:
    from launcher.models.measured_runs import Calibration
    from launcher.models.memory_trace import Trace

MARGIN = 0.05
"""Share of the device left free for what no component counts: workspaces of libraries, other
processes; in closed form the caching allocator's fragmentation, too.

A trace replays that fragmentation, which is then part of `temporary`: something that the device does hold.
The margin is not reduced by it.
"""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; `host_bytes` on one node."""

    device_bytes: int | None
    fits: bool | None
    """`needed` and `margin` together are at most `device_bytes`; None where that is unknown.

    Neither `low` nor `high` decides: `needed` is the likely peak, and the margin is what a peak may
    lie above it. Similar runs that took more than their estimates raise `needed`; none lowers it.
    """
    margin: int
    low: int
    expected: int
    """The likely peak of training; `total` without similar runs on such a device."""
    high: int
    components: Components
    total: int
    """Peak of training: the sum of `components`."""
    save_peak: int
    eval_peak: int
    """Of one batch; see `eval_kept`."""
    eval_kept: int
    """What each evaluation batch leaves on the device where metrics read predictions."""
    load_peak: int
    host_bytes: int
    """Peak of `host`."""
    host: HostMemory
    phase: str
    """forward | backward | recompute | gradients | step | generate: the moment of training that rules."""
    phases: Mapping[str, Components]
    """Every moment that was compared."""
    method: str
    """closed-form | trace"""
    calibration: str | None
    """What earlier runs on such a device have changed in these figures, None without such runs."""
    notes: tuple[str, ...]
    """What the figures assume or leave out."""
    trainable_params: int

    @property
    def needed(self) -> int:
        """The most that the device holds at any moment of a run, saving and evaluating included."""
        return max(self.total, self.expected, self.save_peak, self.eval_peak, self.load_peak)

    @property
    def moment(self) -> str:
        """training | saving | evaluating | loading: which of them needs the most."""
        peaks = {
            "training": max(self.total, self.expected),
            "evaluating": self.eval_peak,
            "saving": self.save_peak,
            "loading": self.load_peak,
        }
        return max(peaks, key=lambda name: peaks[name])

    def to_json(self) -> dict[str, Any]:
        """The `memory` object of `plan --json`."""
        fields: dict[str, Any] = asdict(self)
        del fields["trainable_params"]
        return {**fields, "needed": self.needed, "moment": self.moment}


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
    traced, (part, own) = _traced(trace, spec, job, hardware), on_rank(spec, job)
    found = _all_phases(traced or training_phases(part, own, hardware), part, own, hardware)
    context, nccl, context_word = _outside(job, hardware, calibration)
    outside = context + nccl
    exact = bool(job.expandable or traced or hardware.is_cpu)
    phases = {name: _reserved(parts, job, context, nccl, exact) for name, parts in found.items()}
    phase, components = max(phases.items(), key=lambda item: item[1].total)
    total, device = components.total, hardware.device_bytes
    margin = int(MARGIN * (device or 0))
    peaks = _other_peaks(part, own, hardware, outside, job.sequence_length)
    peaks |= _traced_evaluation(trace, spec, job, hardware)
    method, prior = "trace" if traced else "closed-form", prior_range(job, hardware, total - outside)
    span, range_word = memory_range(total - outside, outside, job_kind(spec, job), method, calibration, prior)
    needed = max(total, span.expected, *peaks.values())
    host = host_memory(spec, job, hardware, needed)
    return MemoryEstimate(
        device_bytes=device,
        fits=None if device is None or spec.uncounted else needed + margin <= device,
        margin=margin,
        low=span.low,
        expected=span.expected,
        high=max(span.high, device or 0) if spec.uncounted else span.high,
        components=components,
        total=total,
        save_peak=peaks["saving"],
        eval_peak=peaks["evaluating"],
        eval_kept=kept_predictions(spec, job),
        load_peak=peaks["loading"],
        host_bytes=host.peak,
        host=host,
        phase=phase,
        phases=phases,
        method=method,
        calibration=calibration_note(hardware, calibration, (context_word, range_word)),
        notes=_all_notes(spec, job, hardware),
        trainable_params=job.trainable_params,
    )


def _outside(
    job: MemoryJob, hardware: Hardware, calibration: Calibration | None
) -> tuple[int, int, str | None]:
    """Bytes of the CUDA context and of NCCL's buffers, which a measured context holds, and its note."""
    nccl = nccl_bytes(job, hardware)
    context, note = device_context(job, hardware, calibration, CUDA_CONTEXT)
    if note is None:
        return context, nccl, note
    return max(0, context - nccl), min(nccl, context), note


def _other_peaks(
    spec: ModelSpec, job: MemoryJob, hardware: Hardware, outside: int, length: int
) -> dict[str, int]:
    """Bytes on one device besides training steps: saving, evaluating and loading.

    `length`: tokens of a sample. Ranks that share its tokens in training evaluate complete samples.
    """
    engine = job.engine
    states = engine.states(spec, job)
    states = replace(
        states,
        weights=-(-states.weights // job.spread),
        gradients=-(-states.gradients // job.spread),
        optimizer=-(-states.optimizer // job.spread),
    )
    resident = states.total + buffers(spec, job, hardware) + outside
    dtypes = engine.dtypes(job, on_cpu=hardware.is_cpu)
    rows = job.eval_batch * job.sequences_per_sample // job.passes
    block = make_block(spec, dtypes, spec.layout.stacks[-1], rows, length, job.attention)
    evaluation = evaluation_bytes(block, spec.head, spec.task)
    freed = states.gradients if engine.frees_gradients(job) else 0
    return {
        "saving": engine.save_peak(spec, job, resident),
        "evaluating": resident - freed + evaluation,
        "loading": engine.load_peak(spec, job, states.weights) + spec.layout.mask_buffer + outside,
    }


def _all_phases(
    training: dict[str, Components], spec: ModelSpec, job: MemoryJob, hardware: Hardware
) -> dict[str, Components]:
    """The moments of training with images, and those of generating."""
    return with_rollouts(with_images(training, spec, job), spec, job, hardware)


def _all_notes(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> tuple[str, ...]:
    made = made_notes(spec)
    return (*memory_notes(job, hardware), *image_note(spec, job), *rollout_notes(spec, job, hardware), *made)


def made_notes(spec: ModelSpec) -> tuple[str, ...]:
    """What is not counted of a model that hooks make."""
    if not spec.uncounted:
        return ()
    return (
        f"not counted: activations, and what the loss needs, as a step of {spec.name} cannot be traced "
        f"({spec.uncounted}); whether it fits is not known",
    )


def _traced_evaluation(
    trace: Trace | None, spec: ModelSpec, job: MemoryJob, hardware: Hardware
) -> dict[str, int]:
    """Of what hooks make, an upper bound: the forward pass of a training batch of that size."""
    if spec.made is None or not job.eval_batch:
        return {}
    phases = _traced(trace, spec, replace(job, micro_batch=job.eval_batch), hardware)
    return {} if phases is None else {"evaluating": phases["forward"].total}


def memory_notes(job: MemoryJob, hardware: Hardware) -> tuple[str, ...]:
    """What the estimate of this job assumes or leaves out."""
    optimizer = optimizer_of(job.optim, job.optim_args)
    notes: list[str] = []
    if not optimizer.exact:
        notes.append(f"optimizer states of {job.optim} are counted as AdamW's, an upper bound")
    if optimizer.paged and not hardware.is_cpu:
        notes.append("paged optimizer states are counted in host memory, where CUDA moves them on demand")
    return (*notes, *job.engine.notes(job))


def kept_predictions(spec: ModelSpec, job: MemoryJob) -> int:
    """Bytes of one evaluation batch that metrics read, gathered from all ranks: token ids, class scores, or
    embeddings.

    Each sample brings its label, each token and each text its own; all are 64-bit numbers.
    """
    samples = job.eval_batch * job.data_parallel * job.sequence_parallel
    task = task_named(spec.task)
    if task.keeps_token_predictions:
        return 16 * samples * job.sequence_length
    if task.head == "none":
        return samples * job.sequences_per_sample * (4 * spec.hidden_size + 8)
    return samples * job.sequences_per_sample * (4 * spec.head.out_features + 8) if task.adds_head else 0


def max_micro_batch(
    spec: ModelSpec,
    job: MemoryJob,
    hardware: Hardware,
    *,
    trace: Trace | None = None,
    calibration: Calibration | None = None,
) -> int | None:
    """Largest micro-batch that fits, 0 when none does, None where the device's memory is not known."""
    if hardware.device_bytes is None:
        return None

    def fits(size: int) -> bool:
        sized = replace(job, micro_batch=size)
        return estimate_memory(spec, sized, hardware, trace=trace, calibration=calibration).fits is True

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _traced(
    trace: Trace | None, spec: ModelSpec, job: MemoryJob, hardware: Hardware
) -> dict[str, Components] | None:
    if trace is None:
        return None
    from launcher.memory.traced import traced_phases  # few plans have a trace

    return traced_phases(trace, spec, job, hardware)


def _reserved(parts: Components, job: MemoryJob, context: int, nccl: int, exact: bool) -> Components:
    """What a device holds of it, the overhead of a process included; `exact`: segments lose nothing."""
    parts = replace(_share(parts, job.spread), context=context, nccl=nccl)
    return parts if exact else fragmented(parts)


def _share(parts: Components, devices: int) -> Components:
    """What one of the devices holds that share the layers; the head with its logits sits on one of them."""
    if devices == 1:
        return parts
    divided = ("weights", "gradients", "optimizer", "activations")
    return replace(parts, **{name: -(-getattr(parts, name) // devices) for name in divided})
