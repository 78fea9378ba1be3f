"""Memory of completions that the model writes itself: the KV cache, and vLLM's share of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launcher.machine.hardware import Hardware
from launcher.memory.activations import make_stacks
from launcher.memory.job import Components, MemoryJob
from launcher.memory.layers import record
from launcher.models.layers.attention import takes_grouped
from launcher.models.layers.layout import WIDTHS, Dtypes
from launcher.models.model import ModelSpec

SAMPLING_COPIES = 3
"""float32 copies of the last token's logits that `generate` makes: scores, tempered scores, shares
(transformers 5.23, generation/utils.py _sample)."""
GENERATE = "generate"
"""The phase."""


def cache_bytes(spec: ModelSpec, tokens: int, width: int) -> int:
    """Bytes of keys and values of so many tokens in all layers.

    Under autocast both are as wide as the stream: positions widen the keys, and transformers 5.23 keeps the
    values in the dtype of the keys (cache_utils.py, DynamicLayer.lazy_initialization).
    """
    return 2 * tokens * spec.num_kv_heads * spec.head_dim * spec.num_layers * width


def with_rollouts(
    phases: Mapping[str, Components], spec: ModelSpec, job: MemoryJob, hardware: Hardware
) -> dict[str, Components]:
    """The moments of a step, with vLLM's share beside them, and the moment of generating."""
    found, rollout = dict(phases), job.rollout
    if rollout is None:
        return found
    held = int(rollout.vllm_share * (hardware.device_bytes or 0))
    if held and not rollout.vllm_sleeps:
        found = {name: replace(parts, buffers=parts.buffers + held) for name, parts in found.items()}
    if rollout.itself or held:
        found[GENERATE] = _generating(phases["step"], spec, job, hardware, held)
    return found


def _generating(
    step: Components, spec: ModelSpec, job: MemoryJob, hardware: Hardware, held: int
) -> Components:
    """Weights and states as in the optimizer's step, without its temporary values and freed gradients."""
    rollout, engine = job.rollout, job.engine
    assert rollout is not None, "only such jobs generate"
    parts = replace(step, temporary=0, buffers=step.buffers + held)
    if engine.frees_gradients(job):
        parts = replace(parts, gradients=0)
    if engine.stage(job) == 3 and job.data_parallel > 1:
        # trl gathers all weights for the time of a generation (ds3_gather_for_generation)
        parts = replace(parts, buffers=parts.buffers + spec.params * WIDTHS[job.dtype])
    if held:
        return parts
    d = engine.dtypes(job, on_cpu=hardware.is_cpu)
    parts = replace(parts, temporary=_copied_weights(spec, job, d))
    whole = replace(job, micro_batch=rollout.rows(job), checkpointing=False)
    prompts = replace(whole, sequence_length=job.sequence_length - rollout.completion_length)
    moments = _read(parts, spec, prompts, d), _written(parts, spec, whole, d)
    return max(moments, key=lambda found: found.total)


def _read(parts: Components, spec: ModelSpec, job: MemoryJob, d: Dtypes) -> Components:
    """The prompts are read, and the last layer computes: their keys and values are there. job: of prompts."""
    tokens, stacks = job.micro_batch * job.sequence_length, make_stacks(spec, job, d)
    layer = max(record(one.block, counted=True, learns=False)[0].first_pass().total for one in stacks)
    # The model's function holds the embeddings, and the positions of each row in two tables.
    held = tokens * d.residual * (spec.hidden_size + 2 * spec.head_dim)
    return replace(
        parts, activations=cache_bytes(spec, tokens, d.residual), temporary=parts.temporary + layer + held
    )


def _written(parts: Components, spec: ModelSpec, job: MemoryJob, d: Dtypes) -> Components:
    """The last token is written: all keys and values are there, those of one layer twice."""
    cache = cache_bytes(spec, job.micro_batch * job.sequence_length, d.residual)
    keys = cache // (2 * spec.num_layers)
    groups = spec.num_heads // spec.num_kv_heads
    grouped = groups == 1 or takes_grouped(make_stacks(spec, job, d)[-1].block)
    return replace(
        parts,
        activations=cache,
        logits=job.micro_batch * spec.head.out_features * 4 * SAMPLING_COPIES,
        temporary=parts.temporary + (keys if grouped else 2 * groups * keys),
    )


def _copied_weights(spec: ModelSpec, job: MemoryJob, d: Dtypes) -> int:
    """Copies of trained matrices that autocast keeps until the model's function returns."""
    if not d.autocast or job.adapter:
        return 0
    return d.compute * (spec.linear_weights + spec.expert_weights)


def rollout_notes(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> tuple[str, ...]:
    """What the estimate says about generating, a line each."""
    rollout = job.rollout
    if rollout is None:
        return ()
    rows, tokens = rollout.rows(job), job.sequence_length
    of = f"{rows} completions of up to {rollout.completion_length} tokens after prompts of up to "
    of += f"{tokens - rollout.completion_length}"
    if rollout.elsewhere:
        return (f"a vLLM server generates {of} for each device: its memory is not part of this estimate",)
    width = WIDTHS[job.dtype]
    if rollout.itself:
        d = job.engine.dtypes(job, on_cpu=hardware.is_cpu)
        cache = cache_bytes(spec, rows * tokens, d.residual)
        return (f"generating {of}: their keys and values take {cache / 2**30:.2f} GiB",)
    held = rollout.vllm_share * (hardware.device_bytes or 0)
    room = vllm_room(spec, job, hardware)
    fit = int(room // cache_bytes(spec, tokens, min(width, 2)))
    sleeps = "while it generates" if rollout.vllm_sleeps else "during the whole run"
    return (
        f"vLLM holds {held / 2**30:.1f} GiB of each device {sleeps}: a copy of the weights, and room for "
        f"{fit} sequences of {tokens} tokens at a time; a generation has {rows} on each device",
    )


def vllm_room(spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> float:
    """Bytes that vLLM's share has for keys and values beside its copy of the weights."""
    assert job.rollout is not None, "only such jobs generate"
    held = job.rollout.vllm_share * (hardware.device_bytes or 0)
    return held - spec.params * min(WIDTHS[job.dtype], 2) / job.rollout.vllm_tensor_parallel
