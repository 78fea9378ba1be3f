"""Completions: batches of whole groups, who generates them, and whether vLLM has room. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from launcher.machine.hardware import Hardware
from launcher.memory.job import MemoryJob, Rollout
from launcher.memory.rollouts import cache_bytes, vllm_room
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft
from launcher.plan.plan import Batch

VLLM_SHARE = 0.3
"""trl's default of vllm_gpu_memory_utilization (GRPOConfig, 1.16)."""


def whole_groups(draft: Draft, batches: Sequence[Batch]) -> list[Batch]:
    """The batches of which a generation is whole groups, as trl demands; RecipeError where none is.

    A generation is `steps_per_generation` micro-batches of all ranks, by default those of one step.
    """
    if not draft.task.rolls_out:
        return list(batches)
    group, steps = _number(draft, "num_generations"), draft.trainer.others.get("steps_per_generation")
    fitting = [batch for batch in batches if _generation(batch, steps) % group == 0]
    if fitting:
        return fitting
    size = _generation(batches[0], steps)
    step = batches[0].data_parallel * (batches[0].micro * steps if isinstance(steps, int) else 1)
    near = math.lcm(group, step) * max(1, round(size / math.lcm(group, step)))
    path = "global_batch_size" if steps is None else "trainer.steps_per_generation"
    message = f"a generation has {size} completions, no multiple of generation.num_generations ({group})"
    common = math.gcd(size, group)
    hint = f"use e.g. {near} completions" + (f", or num_generations: {common}" if common > 1 else "")
    raise draft.refuse("groups-not-whole", path, message, hint)


def _generation(batch: Batch, steps: object) -> int:
    """Completions of one generation."""
    micro_batches = steps if isinstance(steps, int) else batch.accumulation
    return batch.micro * batch.data_parallel * micro_batches


def decide_eval_groups(draft: Draft, copies: int) -> None:
    """Completions of a prompt in evaluations: as many as its batch has whole groups of.

    RecipeError where the recipe's own number does not divide it.
    """
    if not draft.task.rolls_out or draft.data.eval is None:
        return
    batch = int(draft.trainer.per_device_eval_batch_size or 1) * copies
    name, group = "trainer.num_generations_eval", _number(draft, "num_generations")
    asked = draft.at(name)
    if asked is None:
        size = max(n for n in range(1, min(group, batch) + 1) if batch % n == 0)
        draft.put(name, size, f"the largest up to {group} that divides the {batch} completions of a batch")
    elif isinstance(asked, int) and batch % asked:
        message = f"is {asked}, which does not divide the {batch} completions of an evaluation batch"
        hint = "set trainer.per_device_eval_batch_size to a multiple of it, or remove it"
        raise draft.refuse("groups-not-whole", name, message, hint)


def rollout_of(draft: Draft) -> Rollout | None:
    """How completions are generated; None where the model writes no samples."""
    if not draft.task.rolls_out:
        return None

    def field(name: str, default: Any) -> Any:
        found = draft.trainer.others.get(name)
        return default if found is None else found

    colocated = bool(field("use_vllm", False)) and field("vllm_mode", "") == "colocate"
    return Rollout(
        completion_length=_number(draft, "max_completion_length"),
        steps_per_generation=field("steps_per_generation", None),
        iterations=int(field("num_iterations", 1)),
        vllm_share=float(field("vllm_gpu_memory_utilization", VLLM_SHARE)) if colocated else 0.0,
        vllm_sleeps=bool(field("vllm_enable_sleep_mode", False)),
        vllm_tensor_parallel=int(field("vllm_tensor_parallel_size", 1)),
        elsewhere=bool(field("use_vllm", False)) and not colocated,
    )


def check_vllm(draft: Draft, spec: ModelSpec, job: MemoryJob, hardware: Hardware) -> None:
    """RecipeError where vLLM could not start: its share has no room, or its ranks do not divide."""
    rollout = job.rollout
    if rollout is None or not rollout.vllm_share:
        return
    ranks, parallel = hardware.num_devices, rollout.vllm_tensor_parallel
    if ranks % parallel:
        message = f"is {parallel}, which does not divide the {ranks} devices"
        name = "trainer.vllm_tensor_parallel_size"
        raise draft.refuse("vllm-ranks", name, message, "use a divisor of the number of devices")
    if hardware.is_cpu:
        message = "is vllm-colocate, which needs GPUs"
        raise draft.refuse("vllm-on-cpu", "generation.backend", message, "use transformers on a CPU")
    if hardware.device_bytes is None:
        return
    room, one = vllm_room(spec, job, hardware), cache_bytes(spec, job.sequence_length, 2)
    if room < one:
        held = rollout.vllm_share * hardware.device_bytes
        needed = (held - room + one) / hardware.device_bytes
        message = (
            f"gives vLLM {held / 2**30:.1f} GiB of each device, and it needs "
            f"{(held - room + one) / 2**30:.1f} GiB for its copy of the weights and one sequence"
        )
        hint = f"set at least {math.ceil(100 * needed + 2) / 100}, or a larger vllm_tensor_parallel_size"
        raise draft.refuse("vllm-too-small", "trainer.vllm_gpu_memory_utilization", message, hint)


def _number(draft: Draft, field: str) -> int:
    value = draft.trainer.others.get(field)
    assert isinstance(value, int), "recorded from `generation:`"
    return value
