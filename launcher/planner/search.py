"""All configurations that a recipe allows, the fastest that fits first. Pure.

The plan is the first of them: nothing else chooses. Each choice is explained by the best configuration with
another value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.engines import ENGINES, engine_of
from launcher.engines.ddp import DDP
from launcher.errors import Problem, RecipeError
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import AppliedFix
from launcher.planner import decide
from launcher.planner.arguments import (
    check_accelerator_config,
    check_in_backward,
    check_offload_activations,
    decide_runtime,
    decide_trainer,
)
from launcher.planner.candidates import Bench, Candidate, Variant, last_variants, variants
from launcher.planner.fixes import apply_fixes, check_disabled
from launcher.planner.fixes.fix import Situation
from launcher.planner.kbit_norms import KEY as KBIT_NORMS
from launcher.planner.kbit_norms import decide_kbit_norms
from launcher.planner.own_code import check_hooks
from launcher.planner.parallel import decide_parallel
from launcher.planner.record import record_recipe
from launcher.planner.rollouts import decide_eval_groups
from launcher.planner.throughput import decide_throughput
from launcher.recipe.loading import LoadedRecipe

MICRO = "trainer.per_device_train_batch_size"
ACCUMULATION = "trainer.gradient_accumulation_steps"
NO_DIFFERENCE = 0.005
"""Share of the time below which two predictions are the same."""
SAME_MEMORY = 2**30 // 20
"""Bytes below which two estimates are the same: what a tenth of a GiB rounds to nothing."""
_LABELS = {
    "sharding.offload_optimizer": "optimizer on the CPU",
    "sharding.offload_param": "parameters on the CPU",
    "sharding.offload_activations": "activations on the CPU",
    KBIT_NORMS: "bfloat16 norms",
}
_PLAIN = {"sharding.engine": ENGINES[0].name, KBIT_NORMS: "float32"}
"""What an open setting is compared with; `none` of the others."""


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


_Open = tuple[dict[Variant, Bench], list[LeftOut]]


def _open(loaded: LoadedRecipe, facts: Facts) -> _Open:
    """The variants of a recipe, each drafted, and those that are impossible."""
    recipe = loaded.recipe
    if problems := check_disabled(Draft(loaded.origins), recipe.fixes.disable):
        raise RecipeError(problems)
    return _drafted(variants(recipe, facts.hardware, facts.profile), loaded, facts)


def _open_last(loaded: LoadedRecipe, facts: Facts) -> _Open:
    """Those that are tried where none of the others fits."""
    return _drafted(last_variants(loaded.recipe, facts.hardware, facts.profile), loaded, facts)


def _drafted(found: Sequence[Variant], loaded: LoadedRecipe, facts: Facts) -> _Open:
    recipe = loaded.recipe
    benches: dict[Variant, Bench] = {}
    left_out: list[LeftOut] = []
    for variant in found:
        try:
            draft, applied = make_draft(loaded, facts, variant)
            benches[variant] = Bench(variant, draft, applied, recipe, facts)
        except RecipeError as error:
            left_out.append(LeftOut(variant.values, error))
    return benches, left_out


def search(loaded: LoadedRecipe, facts: Facts) -> Search:
    """Compare everything that the recipe allows; RecipeError where nothing of it can run."""
    benches, left_out = _open(loaded, facts)
    found, implied = _compared(benches, left_out, loaded, facts)
    if not found:
        raise left_out[0].error
    if not any(candidate.fits for candidate in found):
        more, more_left_out = _open_last(loaded, facts)
        last, more_implied = _compared(more, more_left_out, loaded, facts)
        if any(candidate.fits for candidate in last):
            benches, left_out = {**benches, **more}, left_out + more_left_out
            found, implied = found + last, implied + more_implied
    return Search(
        ranked=tuple(_ranked([c for c in found if c.fits])),
        misses=tuple(sorted((c for c in found if not c.fits), key=lambda c: (c.shortfall, c.rank_key))),
        left_out=tuple(_by_reason(left_out)),
        benches=benches,
        estimated=sum(len(bench.seen) for bench in benches.values()),
        implied=implied,
    )


def _compared(
    benches: Mapping[Variant, Bench], left_out: list[LeftOut], loaded: LoadedRecipe, facts: Facts
) -> tuple[list[Candidate], int]:
    """The best of each strategy, and how many more that implies; `left_out` gets what is refused."""
    found: list[Candidate] = []
    implied = 0
    for bench in benches.values():
        for strategy in bench.strategies():
            best = bench.best(strategy)
            try:
                _check(bench, best, loaded, facts)
            except RecipeError as error:
                left_out.append(LeftOut(_values(bench, strategy), error))
                continue
            found.append(best)
            implied += len([b for b in bench.batches if (*strategy, b.micro) not in bench.seen])
    return found, implied


def _ranked(fitting: list[Candidate]) -> list[Candidate]:
    """The fastest first; before it DDP, where it takes as long and shards nothing."""
    ranked = sorted(fitting, key=lambda c: c.rank_key)
    plain = next((c for c in ranked if "sharding.engine" in c.variant.values and c.job.engine is DDP), None)
    if plain is None or plain.safe != ranked[0].safe:
        return ranked
    if plain.seconds_per_sample > ranked[0].seconds_per_sample * (1 + NO_DIFFERENCE):
        return ranked
    return [plain, *(c for c in ranked if c is not plain)]


def could_fit(loaded: LoadedRecipe, facts: Facts) -> bool:
    """Whether any strategy fits: a search without its cost.

    Asked are those that recompute, where the recipe lets them: they need no more than the others.
    """
    return any(
        bench.could_fit(strategy)
        for opened in (_open, _open_last)
        for bench in opened(loaded, facts)[0].values()
        for strategy in bench.strategies()
        if strategy[1] or (strategy[0], True) not in bench.strategies()
    )


def make_draft(loaded: LoadedRecipe, facts: Facts, variant: Variant) -> tuple[Draft, list[AppliedFix]]:
    """Everything that does not depend on sizes, for one variant, with the early fixes."""
    recipe = variant.filled_in(loaded.recipe)
    draft = Draft(variant.origins_without(loaded.origins))
    record_recipe(draft, recipe, facts)
    decide.decide_precision(draft, recipe, facts.hardware)
    decide.decide_engine(draft, recipe, facts.hardware)
    decide.decide_launcher(draft, recipe, facts.hardware)
    decide.decide_weights(draft, recipe, facts.hardware)
    decide_kbit_norms(draft, recipe, facts.model)
    decide_throughput(draft, recipe, facts)
    decide_trainer(draft, recipe, facts.hardware)
    decide_runtime(draft, recipe, facts)
    check_hooks(draft, recipe, facts)
    processes = decide.processes_of(recipe, facts.hardware)
    check_in_backward(draft, processes)
    check_offload_activations(draft)
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
    if loaded.recipe.launch.min_nodes is not None:
        _check_elastic(trial, facts.hardware.num_devices)


def _check_elastic(trial: Draft, ranks: int) -> None:
    """RecipeError where other ranks cannot read the checkpoints."""
    reading = engine_of(trial).reads(trial, trial, ranks, 2 * ranks)
    if reading.refused:
        message = f"other ranks than those that wrote a checkpoint cannot read it: {reading.reason}"
        hint = "use sharding.engine: ddp or fsdp, or ZeRO from stage 1 with an optimizer of Adam's kind"
        raise RecipeError(Problem("elastic-nodes", message, path="launch.min_nodes", hint=hint))


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
            f"{batch.global_size} samples a step / {batch.data_parallel} ranks / micro-batch {batch.micro}"
            + ("; adds no negatives" if draft.task.compares_texts and draft.task.compares(draft) else ""),
        ),
        "trainer.per_device_eval_batch_size": (chosen.job.eval_batch or batch.micro, _why_evaluated(chosen)),
        again: (chosen.job.checkpointing, why.get(again, "")),
    }
    for dotted, (value, reason) in sizes.items():
        if draft.at(dotted) is None:
            draft.put(dotted, value, reason, source="search")
    if draft.model.loss == "chunked" and not chosen.job.chunked:
        tokens = batch.micro * chosen.job.sequence_length
        reason = f"the logits of {tokens:,} tokens take less memory than what computing them in chunks adds"
        draft.put("model.loss", "full", reason, source="search")
    decide_eval_groups(draft, batch.data_parallel)
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


def record_loss(draft: Draft, spec: ModelSpec) -> None:
    """What the loss of a step and of an evaluation is a mean of."""
    over = draft.task.loss_over(draft)
    if draft.task.made_by_hooks:
        why = "a model returns the mean of its micro-batch, which counts by its rows in a step and in an "
        why += "evaluation; one whose forward takes num_items_in_batch, its share of the step's labels"
    elif over == "micro-batch":
        why = "its rows are compared with each other: their number decides what is learned; the loss of an "
        why += "evaluation is the mean of its batches, so per_device_eval_batch_size and the ranks change it"
    else:
        why = "each weighs the same, whatever the micro-batch, the ranks and the batch of evaluations"
        if over == "rows and KL term":
            why += "; the KL term is one of each micro-batch, and of all rows of an evaluation"
        if draft.task.writes and spec.router_loss:
            over += " and routers"
            why += "; the auxiliary loss of the routers is one of each micro-batch"
    draft.put("runtime.loss_over", over, why)


def _why_evaluated(chosen: Candidate) -> str:
    if chosen.job.eval_batch == 0:
        return "nothing is evaluated"
    if chosen.job.eval_batch == chosen.batch.micro:
        return "the micro-batch of training is known to fit"
    return "the micro-batch of training, halved until an evaluation fits"


def reasons(found: Search) -> dict[str, str]:
    """Dotted setting -> why the first of the search has its value, against the best with another one."""
    chosen = found.first
    if not chosen.fits:
        return dict.fromkeys((*chosen.choices, MICRO), "nothing fits: this misses by least")
    why = {}
    for dotted, value in chosen.choices.items():
        others = [_against(chosen, best, dotted) for best in _others(found, dotted, value)]
        why[dotted] = "; ".join(others) or "nothing else can run here"
    why[MICRO] = _larger(found, chosen)
    return why


def _others(found: Search, dotted: str, value: object) -> Iterator[Candidate]:
    """The best candidate with each other value of a setting."""
    seen = {value, None}
    for candidate in (*found.ranked, *found.misses):
        other = candidate.choices.get(dotted)
        if other not in seen:
            seen.add(other)
            yield candidate


def _against(chosen: Candidate, other: Candidate, dotted: str) -> str:
    value = other.choices[dotted]
    if dotted == "sharding.zero_stage":
        label = f"stage {value}"
    elif dotted == "trainer.activation_checkpointing":
        label = "with it" if value else "without it"
    else:
        label = str(value)
    if not other.fits:
        return f"{label} {_needs(other)}"
    if chosen.safe and not other.safe:
        return f"{label} {_may_need(other)}"
    slower = other.seconds_per_sample / chosen.seconds_per_sample - 1
    if slower < NO_DIFFERENCE:
        return f"{label} is no faster"
    if not chosen.time.figures_known:
        return f"{label} is slower"
    return f"{label} about {slower:.0%} slower".replace("%", " %")


def _needs(candidate: Candidate) -> str:
    memory, host = candidate.memory, candidate.host_bytes
    if memory.fits is False or host is None:
        return f"needs {_gib(memory.needed + memory.margin)}"
    return f"needs {_gib(memory.host_bytes)} of the host's {_gib(host)}"


def _may_need(candidate: Candidate) -> str:
    return f"may need {_gib(candidate.memory.high)}"


def _larger(found: Search, chosen: Candidate) -> str:
    bench = found.of(chosen)
    place = bench.batches.index(chosen.batch)
    if place == 0:
        return "the largest at this global batch"
    larger = bench.candidate(chosen.strategy, bench.batches[place - 1])
    if chosen.safe and larger.fits and not larger.safe:
        return f"largest that surely fits at this global batch: {larger.batch.micro} {_may_need(larger)}"
    if larger.fits:
        return f"{larger.batch.micro} would be slower: attention between all samples of a flattened batch"
    return f"largest that fits at this global batch: {larger.batch.micro} {_needs(larger)}"


def trade(found: Search, candidate: Candidate) -> str:
    """What each thing that a configuration does saves and costs, against the same without it."""
    trades = [_traded(label, candidate, other) for label, other in _without(found, candidate)]
    return "; ".join(trades) or "nothing is traded"


def _without(found: Search, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """(What it does, the same configuration without it), as far as the recipe allows the other."""
    bench, (stage, again) = found.of(candidate), candidate.strategy
    if again and (stage, False) in bench.strategies():
        yield "checkpointing", bench.candidate((stage, False), candidate.batch)
    if stage > min(bench.stages):
        yield f"ZeRO-{stage}", bench.candidate((min(bench.stages), again), candidate.batch)
    for dotted, value in candidate.variant.values.items():
        plain = _PLAIN.get(dotted, "none")
        twin = found.benches.get(candidate.variant.changed(dotted, plain))
        if value == plain or twin is None:
            continue
        same = min(twin.stages, key=lambda other: abs(other - stage))
        label = _LABELS.get(dotted, value)
        yield label, twin.candidate((same, again), candidate.batch)


def _traded(label: str, candidate: Candidate, other: Candidate) -> str:
    saved = other.memory.needed - candidate.memory.needed
    memory = f"saves {_gib(saved)}" if saved >= 0 else f"takes {_gib(-saved)} more"
    if abs(saved) < SAME_MEMORY:
        memory = "takes as much"
    host = candidate.memory.host_bytes - other.memory.host_bytes
    if label in _LABELS.values() and host > 0:
        memory += f", takes {_gib(host)} of the host"
    slower = candidate.seconds_per_sample / other.seconds_per_sample - 1
    if abs(slower) < NO_DIFFERENCE:
        return f"{label}: {memory}, costs no time"
    verb = "costs" if slower > 0 else "saves"
    if not candidate.time.figures_known:
        return f"{label}: {memory}, {verb} time"
    return f"{label}: {memory}, {verb} about {abs(slower):.0%} time".replace("%", " %")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def search_rows(found: Search, steps: int | None) -> list[dict[str, object]]:
    """The `search` array of `plan --search --json`: what fits by rank, then what does not, nearest first.

    `steps`: length of the run, where it is known.
    """
    fastest = found.first.seconds_per_sample
    rows: list[dict[str, object]] = []
    for rank, candidate in enumerate((*found.ranked, *found.misses), start=1):
        batch = candidate.batch
        rows.append(
            {
                "rank": rank if candidate.fits else None,
                "settings": {**candidate.choices, MICRO: batch.micro, ACCUMULATION: batch.accumulation},
                "batch": batch.to_json(),
                "memory": candidate.memory.to_json(),
                "time": candidate.time.to_json(steps),
                "relative_speed": round(fastest / candidate.seconds_per_sample, 3),
                "fits": candidate.fits,
                "fits_surely": candidate.safe,
                "trade": trade(found, candidate),
            }
        )
    return rows
