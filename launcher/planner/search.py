"""All configurations that a recipe allows, the fastest that fits first. Pure.

The plan is what stands first here: there is no other way to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.engines import engine_of
from launcher.errors import RecipeError
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import AppliedFix
from launcher.planner import decide
from launcher.planner.arguments import (
    check_accelerator_config,
    check_layerwise,
    decide_runtime,
    decide_trainer,
)
from launcher.planner.candidates import Bench, Candidate, Variant, variants
from launcher.planner.fixes import apply_fixes, check_disabled
from launcher.planner.fixes.fix import Situation
from launcher.planner.parallel import decide_parallel
from launcher.planner.record import record_recipe
from launcher.planner.throughput import decide_throughput
from launcher.recipe.loading import LoadedRecipe


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Configurations that cannot run for one reason, however much memory there is."""

    values: Mapping[str, object]
    """Dotted setting -> value that all of them have."""
    error: RecipeError

    @property
    def what(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items()) or "the recipe as it stands"

    @property
    def reason(self) -> str:
        return self.error.problems[0].message


@dataclass(frozen=True, slots=True)
class Search:
    """What was compared. Each strategy stands with its fastest micro-batch that fits: in general the
    largest, since a smaller one is never faster at the same global batch."""

    ranked: tuple[Candidate, ...]
    """What fits, fastest first; at the end what fits by its estimate, not by the upper end of its range."""
    misses: tuple[Candidate, ...]
    """What does not, nearest first."""
    left_out: tuple[LeftOut, ...]
    benches: Mapping[Variant, Bench]
    early: Mapping[Variant, tuple[AppliedFix, ...]]
    estimated: int
    """Configurations whose memory and time were computed."""
    implied: int
    """Configurations that only have a smaller micro-batch than one that fits and is otherwise equal."""

    @property
    def first(self) -> Candidate:
        """What is planned: the fastest that fits, surely if there is such, else the nearest miss."""
        return self.ranked[0] if self.ranked else self.misses[0]

    def of(self, candidate: Candidate) -> Bench:
        return self.benches[candidate.variant]


@dataclass(frozen=True, slots=True)
class _Opened:
    """The variants of a recipe, each drafted, and those that cannot be."""

    benches: dict[Variant, Bench]
    early: dict[Variant, tuple[AppliedFix, ...]]
    left_out: list[LeftOut]


def _open(loaded: LoadedRecipe, facts: Facts) -> _Opened:
    recipe = loaded.recipe
    if problems := check_disabled(Draft(loaded.origins), recipe.fixes.disable):
        raise RecipeError(problems)
    opened = _Opened({}, {}, [])
    for variant in variants(recipe, facts.hardware, facts.profile):
        try:
            draft, applied = make_draft(loaded, facts, variant)
            opened.benches[variant] = Bench(variant, draft, recipe, facts)
            opened.early[variant] = tuple(applied)
        except RecipeError as error:
            opened.left_out.append(LeftOut(variant.values, error))
    return opened


def search(loaded: LoadedRecipe, facts: Facts) -> Search:
    """Compare everything that the recipe allows; RecipeError where nothing of it can run."""
    opened = _open(loaded, facts)
    left_out = opened.left_out
    found: list[Candidate] = []
    implied = 0
    for bench in opened.benches.values():
        for strategy in bench.strategies():
            best = bench.best(strategy)
            try:
                _check(bench, best, loaded, facts)
            except RecipeError as error:
                left_out.append(LeftOut(_values(bench, strategy), error))
                continue
            found.append(best)
            implied += len([b for b in bench.batches if (*strategy, b.micro) not in bench.seen])
    if not found:
        raise left_out[0].error
    return Search(
        ranked=tuple(sorted((c for c in found if c.fits), key=lambda c: c.rank_key)),
        misses=tuple(sorted((c for c in found if not c.fits), key=lambda c: (c.shortfall, c.rank_key))),
        left_out=tuple(_by_reason(left_out)),
        benches=opened.benches,
        early=opened.early,
        estimated=sum(len(bench.seen) for bench in opened.benches.values()),
        implied=implied,
    )


def could_fit(loaded: LoadedRecipe, facts: Facts) -> bool:
    """Whether any strategy fits: a search without its cost.

    Asked are those that recompute, where the recipe lets them: they need no more than the others.
    """
    benches = _open(loaded, facts).benches.values()
    return any(
        bench.could_fit(strategy)
        for bench in benches
        for strategy in bench.strategies()
        if strategy[1] or (strategy[0], True) not in bench.strategies()
    )


def make_draft(loaded: LoadedRecipe, facts: Facts, variant: Variant) -> tuple[Draft, list[AppliedFix]]:
    """Everything that does not depend on sizes, for one variant, with the early fixes."""
    recipe = variant.filled_in(loaded.recipe)
    draft = Draft(variant.origins_without(loaded.origins))
    record_recipe(draft, recipe, facts.model.config, facts.hooks)
    decide.decide_precision(draft, recipe, facts.hardware)
    decide.decide_engine(draft, recipe, facts.hardware)
    decide.decide_launcher(draft, recipe, facts.hardware)
    decide.decide_weights(draft, recipe, facts.hardware)
    decide_throughput(draft, recipe, facts)
    decide_trainer(draft, recipe, facts.hardware)
    decide_runtime(draft, facts.cpu_cores, facts.hardware, recipe.launch.env)
    processes = decide.processes_of(recipe, facts.hardware)
    check_layerwise(draft, processes)
    engine_of(draft).decide(draft, recipe, facts, processes)
    check_accelerator_config(draft, recipe, processes)
    decide_parallel(draft, recipe, facts.model, facts.hardware)
    draft.put("tiny", facts.tiny, "asked for by --tiny" if facts.tiny else "not asked for")
    early = apply_fixes(situation_of(draft, facts), recipe.fixes.disable, early=True)
    return draft, early


def situation_of(draft: Draft, facts: Facts) -> Situation:
    return Situation(draft, facts.model, facts.hardware, facts.versions)


def _check(bench: Bench, candidate: Candidate, loaded: LoadedRecipe, facts: Facts) -> None:
    """RecipeError where a late fix refuses the configuration."""
    trial = bench.draft.copy()
    record_size(trial, candidate)
    apply_fixes(situation_of(trial, facts), loaded.recipe.fixes.disable, early=False)


def _values(bench: Bench, strategy: tuple[int, bool]) -> dict[str, object]:
    stage, again = strategy
    sharded = {"sharding.zero_stage": stage} if engine_of(bench.draft).has_stages else {}
    return {**bench.variant.values, **sharded, "trainer.activation_checkpointing": again}


def _by_reason(left_out: list[LeftOut]) -> Iterator[LeftOut]:
    """One for each reason, with the values that all of its configurations share."""
    groups: dict[str, list[LeftOut]] = {}
    for entry in left_out:
        groups.setdefault(entry.reason, []).append(entry)
    for entries in groups.values():
        first = entries[0]
        shared = {
            key: value
            for key, value in first.values.items()
            if all(entry.values.get(key) == value for entry in entries)
        }
        yield LeftOut(shared, first.error)


def record_size(draft: Draft, chosen: Candidate, reasons: Mapping[str, str] | None = None) -> None:
    """Record what the search chose. `reasons`: dotted setting -> what it was compared with."""
    why = reasons or {}
    batch = chosen.batch
    if chosen.zero_stage is None:
        draft.put("sharding.zero_stage", None, f"engine {chosen.job.engine.name} has no stages")
    elif draft.sharding.zero_stage is None:
        reason = why.get("sharding.zero_stage", "")
        draft.put("sharding.zero_stage", chosen.zero_stage, reason, source="search")
    for dotted in chosen.variant.values:
        draft.explain(dotted, why.get(dotted, ""), source="search")
    micro, again = "trainer.per_device_train_batch_size", "trainer.activation_checkpointing"
    sizes: dict[str, tuple[object, str]] = {
        micro: (batch.micro, why.get(micro, "")),
        "trainer.gradient_accumulation_steps": (
            batch.accumulation,
            f"{batch.global_size} samples a step / {batch.data_parallel} ranks / micro-batch {batch.micro}",
        ),
        "trainer.per_device_eval_batch_size": (chosen.job.eval_batch or batch.micro, _why_evaluated(chosen)),
        again: (chosen.job.checkpointing, why.get(again, "")),
    }
    for dotted, (value, reason) in sizes.items():
        if draft.at(dotted) is None:
            draft.put(dotted, value, reason, source="search")
    buckets = {
        "deepspeed.reduce_bucket_size": chosen.job.reduce_bucket_size,
        "deepspeed.allgather_bucket_size": chosen.job.allgather_bucket_size,
        "deepspeed.overlap_comm": chosen.job.overlap_comm,
    }
    if chosen.zero_stage is not None:
        for dotted, bucket in buckets.items():
            draft.put(dotted, bucket, "as counted by the memory estimate")
    draft.put_recipe("global_batch_size", batch.global_size, "micro x accumulation x ranks")
    draft.put("model.enable_input_require_grads", False, "only adapters with checkpointing need it")
    draft.put("model.prepare_for_kbit", False, "only a quantised base needs it")
    draft.put("model.pad_token", "keep", "the tokenizer's own")
    draft.put("runtime.autocast", None, "the Trainer's own autocast suffices")
    draft.put("runtime.training_arguments_first", False, "the order matters under ZeRO-3 only")


def _why_evaluated(chosen: Candidate) -> str:
    if chosen.job.eval_batch == 0:
        return "nothing is evaluated"
    if chosen.job.eval_batch == chosen.batch.micro:
        return "the micro-batch of training is known to fit"
    return "the micro-batch of training, halved until an evaluation fits"
