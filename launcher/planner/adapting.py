"""The next plan of a run that ran out of memory under `on_oom: adapt`: one saving after the other. Pure.

First the micro-batch is halved and accumulation doubled until one sample is left, then activations are
recomputed, then what that keeps moves to the host, then ZeRO shards more, then states and weights move to the
host. Nothing else that the failed plan had chosen changes, the global batch least of all: an estimate that
was too low would choose the same again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from launcher.engines import engine_of
from launcher.engines.deepspeed import saves_more
from launcher.engines.deepspeed_config import FROM_PROFILE
from launcher.errors import RecipeError
from launcher.machine.hardware import Hardware
from launcher.memory.tensor_parallel import divisors
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.planner import plan_first
from launcher.planner.search import search
from launcher.recipe.loading import LoadedRecipe, with_changes

Moment = Literal["loading", "generating", "training", "evaluating"]
Changes = dict[str, object]
"""Dotted recipe key -> value; None takes the key away."""

BY = "on_oom: adapt"
"""What sets the changed values, as `plan --explain` shows it."""

_DEVICE_FAILURES = {
    "cuda-oom", "oom-fragmentation", "gpu-in-use", "logits-oom", "eval-oom", "whole-model-oom",
}  # fmt: skip
_HOST_FAILURE = "sigkill-oom"

_NO_BATCH_YET = {
    # launcher/train/worker.py, transformers' from_pretrained and Trainer: before the first batch
    "load_model", "from_pretrained", "attach_adapter", "make_trainer", "_prepare_for_training",
    # torch and DeepSpeed: the optimizer's states, made at its first step, when no activation is left
    "_init_group", "initialize_optimizer_states",
}  # fmt: skip
"""Functions within which no batch uses memory."""
_GENERATES = "_generate_and_score_completions"
"""Of trl: completions of all micro-batches of a generation at once, however small those are."""

MICRO = "trainer.per_device_train_batch_size"
_EVAL = "trainer.per_device_eval_batch_size"
_ACCUMULATION = "trainer.gradient_accumulation_steps"
GENERATION = "trainer.steps_per_generation"
_AGAIN = "trainer.activation_checkpointing"
_ENGINE, _STAGE = "sharding.engine", "sharding.zero_stage"
_ACTIVATIONS = "sharding.offload_activations"
_OPTIMIZER, _PARAM = "sharding.offload_optimizer", "sharding.offload_param"


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The next attempt of a run that ran out of memory."""

    loaded: LoadedRecipe
    """The recipe with all changes so far."""
    plan: Plan
    changes: Mapping[str, object]
    """All changes so far; the next call takes them as `before`."""
    changed: Mapping[str, tuple[object, object]]
    """Dotted setting -> (value that ran out of memory, value now), what follows from others included."""
    reason: str
    """One sentence."""
    unreadable: str
    """Why the failed attempt's checkpoints cannot be resumed, half a sentence; empty where they can."""

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the failed attempt's checkpoints can be resumed."""
        return not self.unreadable


def is_out_of_memory(failure: str, hardware: Hardware) -> bool:
    """Whether adapting can fix a known failure; a CPU trains in the host's memory."""
    return failure in _DEVICE_FAILURES or (failure == _HOST_FAILURE and hardware.is_cpu)


def moment_of(failure: str, calls: Collection[str]) -> Moment:
    """When memory ran out. failure: its id; calls: the names of the functions of its traceback."""
    if failure == "eval-oom":
        return "evaluating"
    if _GENERATES in calls:
        return "generating"
    return "training" if _NO_BATCH_YET.isdisjoint(calls) else "loading"


def ways_out(plan: Plan) -> list[str]:
    """What a run of this plan tries, in this order, when it runs out of memory while it trains.

    For people: what a fix refuses, or what would not need less, is found when it is tried.
    """
    sizes, job = [plan.batch.micro], plan.job
    compares = plan.task.compares(plan)
    while not compares and (smaller := _half(plan, sizes[-1])) is not None:
        sizes.append(smaller)
    ways = [f"micro-batch {', '.join(map(str, sizes[1:]))}"] if len(sizes) > 1 else []
    if not job.checkpointing:
        ways.append("activation checkpointing")
    if _may_move(plan):
        ways.append("activations in host memory")
    engines = [change for change, _ in _saves_more(plan)]
    stages = [f"ZeRO-{change[_STAGE]}" for change in engines if not {_OPTIMIZER, _PARAM} & change.keys()]
    ways += [", ".join(stages)] if stages else []
    return ways + (["offload"] if len(stages) < len(engines) else [])


def adapt(
    loaded: LoadedRecipe,
    facts: Facts,
    failed: Plan,
    *,
    before: Mapping[str, object],
    moment: Moment = "training",
) -> Adaptation | None:
    """The next plan after `failed`, None when nothing is left to try.

    loaded, facts: those of the first attempt. before: `changes` of the adaptation that made `failed`, {} for
    the first. moment: when memory ran out; a batch does not matter while weights are loaded, and a smaller
    one generates as many completions.
    What a fix refuses, or the planner expects not to fit, is skipped.
    """
    facts = replace(facts, hardware=failed.hardware)  # of an elastic run, fewer nodes than at first
    for change, reason in _savings(failed, moment):
        changes = {**before, **kept_choices(loaded, failed), **change}
        asked = with_changes(loaded, changes, BY)
        try:
            found = search(asked, facts)
            if not found.first.fits:
                continue
            plan = replace(plan_first(asked, facts, found), elastic=failed.elastic)
        except RecipeError:
            continue
        if {_STAGE, _ACTIVATIONS} & change.keys() and plan.memory.needed >= failed.memory.needed:
            continue
        changed = {
            key: (failed.at(key), plan.at(key))
            for key in sorted({*failed.names, *plan.names})
            if failed.at(key) != plan.at(key)
        }
        reason += _in_place_of(loaded, change)
        return Adaptation(asked, plan, changes, changed, reason, _unreadable(failed, plan))
    return None


def kept_choices(loaded: LoadedRecipe, failed: Plan) -> Changes:
    """The failed plan's own choices, so that only what is changed here differs."""
    job = failed.job
    kept: Changes = {
        "global_batch_size": failed.batch.global_size,
        _ACCUMULATION: None,  # follows from the global batch
        MICRO: failed.batch.micro,
        _AGAIN: job.checkpointing,
        _ENGINE: job.engine.name,
        _STAGE: failed.sharding.zero_stage,
        _OPTIMIZER: job.offload_optimizer,
        _PARAM: job.offload_param,
        _ACTIVATIONS: job.offload_activations,
    }
    if loaded.recipe.model.quantization == "auto":
        kept["model.quantization"] = job.quantization
    return {key: value for key, value in kept.items() if key not in _of_profile(failed)}


def _of_profile(plan: Plan) -> dict[str, object]:
    """Those of the settings that are changed here that the base profile sets, which it still does."""
    keys = (_STAGE, _OPTIMIZER, _PARAM)
    known = plan.provenance
    return {key: plan.at(key) for key in keys if key in known and known[key].reason == FROM_PROFILE}


def _savings(failed: Plan, moment: Moment) -> Iterator[tuple[Changes, str]]:
    """(changes, why) in the order in which they are tried."""
    job, batch = failed.job, failed.batch
    if moment == "evaluating":
        yield from _smaller_evaluation(failed)
    if moment == "training":
        cached, compares = failed.task.mini_batch(failed) or 0, failed.task.compares(failed)
        if min(cached, batch.micro) > 1:
            smaller = min(cached, batch.micro) // 2
            reason = f"mini-batches of {cached} ran out of memory: {smaller} at a time, the same negatives"
            yield {f"{failed.task.section}.mini_batch_size": smaller}, reason
        if not compares and (micro := _half(failed, batch.micro)) is not None:
            accumulation = batch.micro * batch.accumulation // micro
            change: Changes = {MICRO: micro}
            if job.eval_batch > micro:
                change[_EVAL] = micro
            steps = failed.at(GENERATION)
            if isinstance(steps, int):  # as many completions as before
                change[GENERATION] = steps * batch.micro // micro
            yield (
                change,
                f"micro-batch {batch.micro} ran out of memory: {micro} with accumulation {accumulation}, "
                f"the same {batch.global_size} samples a step",
            )
        if not job.checkpointing:
            yield (
                {_AGAIN: True},
                f"micro-batch {batch.micro} ran out of memory: activations are recomputed",
            )
        elif _may_move(failed):
            reason = f"micro-batch {batch.micro} ran out of memory: inputs of layers wait in host memory"
            yield {_ACTIVATIONS: "cpu"}, reason
    yield from _saves_more(failed)


def _may_move(plan: Plan) -> bool:
    """Whether inputs of layers, where they are kept, may wait in host memory."""
    return plan.job.offload_activations == "none" and not plan.hardware.is_cpu


def _half(plan: Plan, size: int) -> int | None:
    """The largest micro-batch of at most half of `size` that divides the samples of a rank, and that the
    loss takes; None where there is none."""
    smaller = range(_least_batch(plan), size // 2 + 1)
    sizes = divisors(plan.batch.micro * plan.batch.accumulation)
    return max((one for one in sizes if one in smaller), default=None)


def _least_batch(plan: Plan) -> int:
    return plan.task.least_batch_of(plan)[0]


def _smaller_evaluation(failed: Plan) -> Iterator[tuple[Changes, str]]:
    size = failed.job.eval_batch
    # Where samples are compared with each other, a smaller batch has another evaluation loss.
    if size > (least := _least_batch(failed)) and not failed.task.compares(failed):
        half = max(least, size // 2)
        yield {_EVAL: half}, f"an evaluation of {size} samples ran out of memory: {half} at a time"
    keeps_logits = failed.trainer.prediction_loss_only is False
    if keeps_logits and failed.trainer.eval_accumulation_steps != 1:
        yield (
            {"trainer.eval_accumulation_steps": 1},
            "an evaluation ran out of memory: predictions move to the host after each batch",
        )


def _saves_more(failed: Plan) -> Iterator[tuple[Changes, str]]:
    """What sharding and offload save, as far as the base profile leaves them open."""
    fixed = _of_profile(failed)
    for change, reason in saves_more(failed):
        if all(change.get(key, value) == value for key, value in fixed.items()):
            yield change, reason


def _in_place_of(loaded: LoadedRecipe, change: Changes) -> str:
    """Which lines of the recipe are replaced, which only `on_oom: adapt` allows."""
    draft = Draft(loaded.origins)
    origins = {dotted: draft.origin(dotted) for dotted in change}
    lines = [f"{dotted} of {origin.by}" for dotted, origin in origins.items() if origin is not None]
    return f" (in place of {', '.join(lines)})" if lines else ""


def _unreadable(failed: Plan, plan: Plan) -> str:
    """Why one plan's checkpoints cannot be resumed by the other; empty where they can. None is converted."""
    if failed.trainer.save_only_model:
        return "trainer.save_only_model leaves the training states out of them"
    if failed.job.engine is not plan.job.engine:
        return f"DeepSpeed cannot read those of {failed.job.engine.name}"
    ranks = failed.hardware.num_devices
    reading = engine_of(plan).reads(failed, plan, ranks, ranks)
    return reading.reason or reading.conversion
