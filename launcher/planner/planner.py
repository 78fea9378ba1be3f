"""`make_plan`: facts and recipe in, plan out. Pure: no environment, process, network, clock or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.engines.deepspeed_config import idle_keys
from launcher.errors import WOULD_FIT, DoesNotFit, Problem
from launcher.machine.hardware import Hardware, is_capacity_only
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.models.model_types import why_not_chunked
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import AppliedFix, Plan, Schedule
from launcher.planner.candidates import Candidate
from launcher.planner.fixes import apply_fixes
from launcher.planner.search import Search, reasons, record_loss, record_size, search, situation_of
from launcher.planner.stopping import settle_stop
from launcher.planner.throughput import settle_compile
from launcher.recipe.loading import LoadedRecipe

if TYPE_CHECKING:
    from launcher.planner.alternatives import Alternative

MUCH_LOGITS = 0.5
"""Share of the peak from which there is a warning about logits."""
NOT_COMPILED = (
    "layers are counted as if they were not compiled: compiled ones keep less for the backward pass (14 to "
    "53 % less on a CPU), so the estimate is too high"
)
"""Of plans with `model.compile_blocks`; docs/memory.md has the measurements."""


def make_plan(loaded: LoadedRecipe, facts: Facts) -> Plan:
    """Decide everything; RecipeError (2) for what cannot run, DoesNotFit (3) for what does not fit.

    DoesNotFit carries the plan of the nearest miss, and what would fit.
    """
    return plan_first(loaded, facts, search(loaded, facts))


def plan_first(loaded: LoadedRecipe, facts: Facts, found: Search) -> Plan:
    """The plan of what the search ranks first; DoesNotFit as `make_plan`."""
    chosen = found.first
    draft = found.of(chosen).draft.copy()
    record_size(draft, chosen, reasons(found))
    record_loss(draft, facts.model)
    settle_stop(draft, loaded.recipe, chosen, facts)
    settle_compile(draft, loaded.recipe, chosen, facts)
    late = apply_fixes(situation_of(draft, facts), loaded.recipe.fixes.disable, early=False)
    plan = _assemble(loaded, facts, draft, chosen, [*found.of(chosen).fixes, *late])
    if not chosen.fits:
        from launcher.planner.alternatives import would_fit  # it searches again: only a miss pays for it

        others = would_fit(loaded, facts)
        raise DoesNotFit(miss(chosen, facts, others), plan, others)
    return plan


def _assemble(
    loaded: LoadedRecipe, facts: Facts, draft: Draft, chosen: Candidate, fixes: list[AppliedFix]
) -> Plan:
    batch = chosen.batch
    steps = draft.trainer.max_steps
    steps = steps if isinstance(steps, int) and steps > 0 else None
    tokens = facts.model.tokens_per_sample or draft.data.max_length
    schedule = Schedule(
        steps=steps,
        epochs=None if steps else draft.trainer.num_train_epochs,
        warmup_steps=_warmup(draft.trainer.warmup_steps, steps),
        tokens_per_step=batch.global_size * chosen.job.sequences_per_sample * tokens,
    )
    return Plan(
        recipe_file=str(loaded.path),
        recipe_text=loaded.text,
        kept=loaded.kept,
        hardware=facts.hardware,
        spec=facts.model,
        batch=batch,
        schedule=schedule,
        settings=draft.settings,
        provenance=draft.provenance,
        fixes=tuple(fixes),
        memory=_with_note(chosen.memory, draft),
        time=chosen.time,
        pace=facts.pace,
        job=chosen.job,
        interpreter=facts.python,
        versions=dict(facts.versions),
        warnings=(
            *facts.warnings,
            *draft.warnings,
            *_device_warnings(facts.hardware),
            *_logits_warnings(chosen, facts, draft),
            *_mean_warnings(chosen, draft),
            *_profile_warnings(chosen, draft),
        ),
        images=facts.images,
    )


def _with_note(memory: MemoryEstimate, draft: Draft) -> MemoryEstimate:
    """The estimate with what is not counted of compiled layers, if there are any."""
    return replace(memory, notes=(*memory.notes, NOT_COMPILED)) if draft.model.compile_blocks else memory


def _device_warnings(hardware: Hardware) -> tuple[str, ...]:
    """A device whose capacity alone is known: nothing says whether the parts of the plan exist on it."""
    if not is_capacity_only(hardware):
        return ()
    return (
        f"{hardware.device}: only its capacity is known; whether this plan runs on ROCm was not checked "
        "(NCCL and the kernels of bitsandbytes are CUDA's)",
    )


def _logits_warnings(chosen: Candidate, facts: Facts, draft: Draft) -> tuple[str, ...]:
    """Logits that are the largest part of a device's memory, and what makes them smaller."""
    memory, length = chosen.memory, draft.data.max_length
    logits = memory.components.logits
    if facts.hardware.is_cpu or logits < MUCH_LOGITS * memory.total:
        return ()
    fixes = ["a smaller micro-batch"] if chosen.batch.micro > 1 else []
    fixes.append("a smaller data.max_length")
    shared = chosen.job.tensor_parallel * chosen.job.sequence_parallel > 1
    if draft.task.causal_loss and not shared:
        fixes.insert(0, "trainer.use_liger_kernel: true, whose loss keeps none")
    if draft.explicit("model.loss") and not why_not_chunked(facts.model.config):
        fixes.insert(0, "model.loss: chunked")
    return (
        f"logits take {logits / 2**30:.1f} GiB of the {memory.total / 2**30:.1f} GiB at the peak: a score "
        f"for each of {facts.model.vocab_size:,} words at {chosen.batch.micro} x {length} "
        f"positions; less with {', or '.join(fixes)}",
    )


def _mean_warnings(chosen: Candidate, draft: Draft) -> tuple[str, ...]:
    """Several micro-batches of a step whose loss the hooks' model returns as the mean of each."""
    several = chosen.batch.accumulation * chosen.batch.data_parallel > 1
    if not draft.task.made_by_hooks or not several or "compute_loss" in draft.python.hooks:
        return ()
    return (
        "the model of make_model returns the mean loss of a micro-batch, and those of a step count by "
        "their rows; a forward that takes num_items_in_batch, or the hook compute_loss, counts each label",
    )


def _profile_warnings(chosen: Candidate, draft: Draft) -> tuple[str, ...]:
    """What the base profile asks for and the chosen stage does not do."""
    idle = [] if chosen.zero_stage is None else idle_keys(draft.deepspeed.profile, chosen.zero_stage)
    if not idle:
        return ()
    verb = "does" if len(idle) == 1 else "do"
    return (
        f"{', '.join(idle)} of the base profile {verb} nothing at ZeRO-{chosen.zero_stage}: DeepSpeed reads "
        "that at stage 3 alone; set zero_stage: 3, or remove it from the profile",
    )


def _warmup(value: float, steps: int | None) -> int | None:
    """transformers reads a warmup_steps below 1 as a share of all steps."""
    if value >= 1 or value == 0:
        return int(value)
    return None if steps is None else -(-int(value * steps * 1_000_000) // 1_000_000)


def miss(nearest: Candidate, facts: Facts, others: Sequence[Alternative] = ()) -> Problem:
    """The problem of a configuration that does not fit. others: what would."""
    memory, hardware = nearest.memory, facts.hardware
    stage = "" if nearest.zero_stage is None else f" at ZeRO-{nearest.zero_stage}"
    needs, held = f"{memory.needed / 2**30:.2f} GiB", hardware.device_bytes or 0
    needs, where = f"{needs} and {memory.margin / 2**30:.2f} GiB to spare, of", "on each device"
    if memory.fits is not False:
        held, where = nearest.host_bytes or 0, "in the host's memory"
        needs = f"{memory.host_bytes / 2**30:.2f} GiB of"
    return Problem(
        "does-not-fit",
        f"nothing fits {hardware.label}: the nearest{stage} with micro-batch {nearest.batch.micro}"
        f"{' and activation checkpointing' if nearest.job.checkpointing else ''} needs "
        f"{needs} {held / 2**30:.2f} GiB {where}",
        hint=WOULD_FIT + "; ".join(other.text for other in others)
        if others
        else "nothing that was tried would make it fit",
    )


def missing_data(loaded: LoadedRecipe, exists: Mapping[str, bool]) -> list[Problem]:
    """A problem for each data path of the recipe that is absent according to `exists`."""
    rows = loaded.recipe.data
    named = [(f"data.train[{i}].path", s.path) for i, s in enumerate(rows.train)]
    if isinstance(rows.eval, list):
        named += [(f"data.eval[{i}].path", s.path) for i, s in enumerate(rows.eval)]
    draft = Draft(loaded.origins)
    hint = "relative paths are relative to the recipe"
    return [
        draft.problem("data-missing", dotted, f"no such file or folder: {path}", hint)
        for dotted, path in named
        if not exists[path]
    ]


def predict_as_run(plan: Plan, facts: Facts, tokens: int | None) -> MemoryEstimate:
    """What the planner predicts for batches as they were, where rows are shorter than data.max_length.

    tokens: of the largest micro-batch, padding included; None where it is not made of tokens.
    """
    job = plan.job
    if tokens is not None:
        job = replace(job, sequence_length=-(-tokens // (job.micro_batch * job.sequences_per_sample)))
    return estimate_memory(plan.spec, job, plan.hardware, trace=facts.trace, calibration=facts.calibration)
