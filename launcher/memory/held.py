"""What the engine gathers and reduces at each moment of a step, beside the states. Pure arithmetic.

As read in DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, partitioned_param_coordinator.py),
torch 2.13 (distributed/fsdp/_fully_shard) and accelerate 1.15 (utils/fsdp_utils.py). On CUDA the copies run
on streams of their own, and a buffer is free again when its stream is through; the figures are those
of the moments at which the code lets go of it. On a CPU gloo makes copies of what it scatters, NCCL makes
none; they are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.model import ModelSpec
from launcher.memory.job import WIDTHS, MemoryJob
from launcher.memory.states import MIXED, adapter_width, engine_width

ZERO3_LIVE_VALUES = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: every module fetches ahead until so many are there."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device at the moments of a step; nothing of it is left when the optimizer runs."""

    forward: int = 0
    """At the loss."""
    head: int = 0
    """In the backward pass of the loss."""
    layers: int = 0
    """In the backward pass of a layer."""
    bottom: int = 0
    """In that of the first layer."""
    embedding: int = 0
    unsharded: float = 0.0
    """Width in bytes of a trained value's gradient while its layer runs; 0 where it is sharded at once."""


def engine_held(spec: ModelSpec, job: MemoryJob) -> Held:
    """What comes and goes with the moments; `engine_buffers` stay for the whole run."""
    if job.engine == "fsdp":
        return _fsdp(spec, job)
    if job.engine != "deepspeed" or not job.zero_stage:
        return Held()
    width, bucket = engine_width(job.precision), job.reduce_bucket_size
    # What is reduced is flattened into a copy.
    copy = width * min(bucket, job.trainable_params + job.whole_copies)
    if job.zero_stage == 3:
        # A frozen embedding has no backward pass to wait for; a tied head has.
        unused = spec.embedding_params if job.adapter and not spec.head.tied else 0
        every = width * min(ZERO3_LIVE_VALUES, spec.params - unused)
        if job.adapter:
            every += adapter_width(job.precision, 3) * job.trainable_params + width * job.whole_copies
        # Backward each module lets go of its weights, as nothing uses them again in this pass.
        lowest = width * min(ZERO3_LIVE_VALUES, spec.embedding_params + layer_values(spec))
        return Held(every, every, every + copy, lowest + copy, lowest + copy)
    # The first gradient brings the buckets, the end of the pass takes them. Stage 1 reduces in the last
    # pass of a step alone, so before that they have come in an earlier one.
    buckets = (2 if job.overlap_comm else 1) * width * bucket
    waiting = buckets if job.zero_stage == 1 and job.accumulation != 1 else 0
    filled = buckets + copy
    return Held(waiting, waiting, filled, filled, filled)


def _fsdp(spec: ModelSpec, job: MemoryJob) -> Held:
    """Units: each layer, the last norm with the head, and the embedding, which a tied head takes in.

    A gathered unit is copied out of the buffer that it came in; forward that buffer lives until the next
    unit is there, backward it is fetched while the unit before runs. Gradients are whole until their unit has
    run, then copied into a buffer, which is let go when the next unit's is filled. A unit whose input asks
    for no gradient (the embedding, with a tied head) is reduced at the very end.

    Rows of added tokens are put into a copy of the gathered table when it is used (TrainableTokensLayer of
    peft, get_merged_weights): the head keeps its copy for the backward pass, each table has a whole gradient.
    """
    width = 2 if job.precision in MIXED else WIDTHS[job.dtype]
    head = width * spec.head.in_features * spec.head.out_features
    embedding = width * spec.embedding_params
    whole = width * layer_values(spec)
    # Quantised layers are whole on each device already.
    layer = whole if job.quantization == "none" else 0
    share = min(1.0, job.trainable_params / spec.loaded_params)
    trained = 0.0 if job.adapter else 1.0
    reduced, of_head = share * whole, trained * head
    local = width if job.accumulation == 1 or job.reduces_each else 0.0
    table = width * job.extra_frozen // WIDTHS[job.dtype] // (1 if spec.head.tied else 2)
    if spec.head.tied:
        kept = head + of_head
        return Held(
            forward=int(head + layer + table),
            head=head + 2 * table,
            layers=int(kept + 2 * layer + reduced),
            bottom=int(kept + layer + reduced),
            embedding=int(kept + reduced + table),
            unsharded=local,
        )
    return Held(
        forward=2 * head + table,
        head=head + 2 * table,
        layers=int(2 * layer + max(reduced, of_head)),
        bottom=int(layer + embedding + reduced),
        embedding=int(embedding * (1 + trained) + max(reduced, trained * embedding) + table),
        unsharded=local,
    )


def layer_values(spec: ModelSpec) -> int:
    """Parameters of the widest layer."""
    return max(
        sum(linear.params // linear.count for linear in stack.linears if linear.count == stack.layers)
        + stack.layer_extra
        for stack in spec.layout.stacks
    )
