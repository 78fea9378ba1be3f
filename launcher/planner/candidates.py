"""The configurations that a recipe allows, each estimated once, when it is asked for. Pure.

A variant fills in what changes more than sizes: engine, quantisation, offload. The engine is open where the
recipe leaves it out or has `auto`, the others where it has `auto`. Within a variant, ZeRO stage,
checkpointing and micro-batch differ at a fixed global batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.engines import ENGINES, engine_named, engine_of
from launcher.engines.deepspeed_config import profile_value
from launcher.machine.hardware import Hardware
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.memory.job import MemoryJob
from launcher.memory.tensor_parallel import divisors
from launcher.models.capabilities import is_varlen
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import AppliedFix, Batch, StepTime
from launcher.planner.decide import copies_of, engine_is_open, may_be_any_engine, processes_of
from launcher.planner.job import base_job, with_prepared
from launcher.planner.own_code import widened
from launcher.planner.rollouts import check_vllm, whole_groups
from launcher.planner.speed import predict_step
from launcher.recipe.loading import Origin
from launcher.recipe.optimizer_needs import needs_of
from launcher.recipe.schema import Recipe

QUANTIZATIONS = ("none", "int8", "nf4")
OFFLOADS = ("none", "cpu")
_ENGINE = "sharding.engine"
UPSTREAM_MICRO_BATCH = 8
"""TrainingArguments' own per_device_train_batch_size: the global batch where the recipe names none."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to fill in what the recipe leaves open: (dotted key, value) in a fixed order."""

    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        return dict(self.chosen)

    def changed(self, dotted: str, value: str) -> Variant:
        """The same with another value for a key that it has."""
        return Variant(tuple((key, value if key == dotted else old) for key, old in self.chosen))

    def filled_in(self, recipe: Recipe) -> Recipe:
        """The recipe with what the variant chose."""
        update: dict[str, dict[str, str]] = {"model": {}, "sharding": {}}
        for dotted, value in self.chosen:
            section, _, key = dotted.partition(".")
            update[section][key] = value
        return recipe.model_copy(
            update={
                "model": recipe.model.model_copy(update=update["model"]),
                "sharding": recipe.sharding.model_copy(update=update["sharding"]),
            }
        )

    def origins_without(self, origins: Mapping[str, Origin]) -> dict[str, Origin]:
        """Where the recipe sets its values, without those that it left open."""
        return {key: origin for key, origin in origins.items() if key not in self.values}


def variants(recipe: Recipe, hardware: Hardware, profile: Mapping[str, object] | None) -> list[Variant]:
    """All of them, cheapest first; one without a choice where the recipe leaves nothing open."""
    choices = _open_values(recipe, hardware, profile)
    if engine_is_open(recipe, hardware):
        choices[_ENGINE] = [engine.name for engine in ENGINES if engine.is_automatic]
    return _combined(choices, recipe)


def last_variants(recipe: Recipe, hardware: Hardware, profile: Mapping[str, object] | None) -> list[Variant]:
    """Those of the engines that are tried where nothing else fits; one process only with offload."""
    if not may_be_any_engine(recipe):
        return []
    choices = _open_values(recipe, hardware, profile)
    choices[_ENGINE] = [engine.name for engine in ENGINES if not engine.is_automatic]
    several = processes_of(recipe, hardware) > 1
    offload = "sharding.offload_param"
    return [v for v in _combined(choices, recipe) if several or v.values.get(offload) == "cpu"]


def _open_values(
    recipe: Recipe, hardware: Hardware, profile: Mapping[str, object] | None
) -> dict[str, Sequence[str]]:
    """Values of what is `auto` besides the engine."""
    choices: dict[str, Sequence[str]] = {}
    if recipe.model.quantization == "auto":
        # Only an adapter can be trained over quantised weights.
        choices["model.quantization"] = QUANTIZATIONS if recipe.adapter else ("none",)
    if recipe.model.kbit_norms == "auto":
        choices["model.kbit_norms"] = ("float32", "bfloat16")
    for name in ("offload_optimizer", "offload_param", "offload_activations"):
        if getattr(recipe.sharding, name) == "auto":
            choices[f"sharding.{name}"] = _offloads(name, hardware, profile)
    return choices


def _combined(choices: Mapping[str, Sequence[str]], recipe: Recipe) -> list[Variant]:
    made = (
        Variant(tuple(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    )
    return [variant for variant in made if _makes_sense(variant, recipe)]


def _offloads(name: str, hardware: Hardware, profile: Mapping[str, object] | None) -> tuple[str, ...]:
    """The base profile's own value, if any; a CPU has no other memory to offload to."""
    given = profile_value(profile or {}, f"zero_optimization.{name}.device")
    if given not in (None, "auto"):
        return (str(given),)
    return ("none",) if hardware.is_cpu else OFFLOADS


def _makes_sense(variant: Variant, recipe: Recipe) -> bool:
    """Whether its engine can offload this, and its base is quantised, where norms are narrowed."""
    values = variant.values
    if values.get("model.kbit_norms") == "bfloat16" and values.get("model.quantization") == "none":
        return False
    sharding = recipe.sharding
    engine = values.get(_ENGINE, sharding.engine)
    optimizer, param = "sharding.offload_optimizer", "sharding.offload_param"
    if engine == "auto" or not {optimizer, param} & values.keys():
        return True
    moved = (values.get(optimizer, sharding.offload_optimizer), values.get(param, sharding.offload_param))
    return engine_named(str(engine)).can_offload(*map(str, moved))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration with its memory and its predicted time."""

    variant: Variant
    batch: Batch
    job: MemoryJob
    memory: MemoryEstimate
    time: StepTime
    fits: bool
    """On the device, and in the host's memory where that is known."""
    host_bytes: int | None
    """The host's memory; None where it is not known."""

    @property
    def zero_stage(self) -> int | None:
        return self.job.zero_stage if self.job.engine.has_stages else None

    @property
    def strategy(self) -> tuple[int, bool]:
        return self.job.zero_stage, self.job.checkpointing

    @property
    def choices(self) -> dict[str, object]:
        """Dotted setting -> value of what distinguishes strategies."""
        job = self.job
        return {
            "model.quantization": job.quantization,
            **({} if job.quantization == "none" else {"model.kbit_norms": job.kbit_norms}),
            "sharding.engine": job.engine.name,
            "sharding.zero_stage": self.zero_stage,
            "sharding.offload_optimizer": job.offload_optimizer,
            "sharding.offload_param": job.offload_param,
            "sharding.offload_activations": job.offload_activations,
            "trainer.activation_checkpointing": job.checkpointing,
        }

    @property
    def safe(self) -> bool:
        """It fits, and so does the upper end of the range around its estimate."""
        memory = self.memory
        return self.fits and (memory.device_bytes is None or memory.high <= memory.device_bytes)

    @property
    def seconds_per_sample(self) -> float:
        """Of the complete job: a recipe without a global batch may have batches of several sizes."""
        return self.time.likely / self.batch.global_size

    @property
    def rank_key(self) -> tuple[object, ...]:
        """What surely fits before what may not, then the fastest; of equals what changes least."""
        job = self.job
        moved = (job.offload_param, job.offload_optimizer, job.offload_activations)
        offloads = tuple(place != "none" for place in moved)
        quantised = (job.quantization != "none", job.kbit_norms != "float32")
        does = (*quantised, *offloads, job.zero_stage, job.checkpointing)
        place = ENGINES.index(engine_of(job))
        return (not self.safe, self.seconds_per_sample, *does, place, -self.batch.micro)

    @property
    def shortfall(self) -> int:
        """Bytes by which it misses device or host."""
        memory = self.memory
        device = memory.needed + memory.margin - (memory.device_bytes or memory.needed + memory.margin)
        host = 0 if self.host_bytes is None else memory.host_bytes - self.host_bytes
        return max(device, host, 0)


class Bench:
    """Estimates the configurations of one variant's draft."""

    def __init__(
        self, variant: Variant, draft: Draft, fixes: Sequence[AppliedFix], recipe: Recipe, facts: Facts
    ) -> None:
        """fixes: those in the draft. RecipeError where the global batch cannot be divided."""
        self.variant, self.draft, self.fixes, self._facts = variant, draft, fixes, facts
        copies = copies_of(recipe, facts.hardware)
        job = base_job(draft, facts.model, facts.hardware, copies, facts.versions)
        self._job = with_prepared(replace(job, own_states=facts.own_states), facts.images, draft)
        _check_width(draft, facts.model)
        check_vllm(draft, facts.model, self._job, facts.hardware)
        self.stages = self._stages()
        self._least, why = draft.task.least_batch_of(draft)
        batches = _large_enough(draft, _batches(draft, recipe, copies), self._least, why)
        self.batches = _compared_batches(draft, whole_groups(draft, _one_micro_batch(draft, batches)))
        self.seen: dict[tuple[int, bool, int], Candidate] = {}
        self._kept: int | None = None

    def _stages(self) -> tuple[int, ...]:
        """The ZeRO stages to try. RecipeError for a cached loss with one that shards gradients."""
        asked, engine = self.draft.sharding.zero_stage, engine_of(self._job)  # the recipe's, or the profile's
        found = engine.stages_to_try(self._job) if asked is None else (asked,)
        if _ENGINE in self.variant.values and engine.has_stages:
            found = tuple(stage for stage in found if stage)  # where nothing is sharded, that is DDP
        if not (engine.has_stages and self._job.mini_batch):
            return found
        whole = tuple(stage for stage in found if stage < 2)
        if not whole:
            message = "a cached loss runs several backward passes for a micro-batch, but ZeRO-2 and 3 reduce "
            message += "a gradient once (DeepSpeed 0.19: Gradient computed twice for this partition)"
            hint = "use zero_stage 1, sharding.engine ddp or fsdp, or a loss that is not cached"
            raise self.draft.refuse("cached-loss-sharded", "sharding.zero_stage", message, hint)
        return whole

    @property
    def larger_is_faster(self) -> bool:
        """Whether no smaller micro-batch can be faster. Only a kernel that computes attention between all
        samples of a flattened batch pays for each further one."""
        return not self._job.one_row or is_varlen(self._job.attention)

    def strategies(self) -> list[tuple[int, bool]]:
        """(ZeRO stage, checkpointing), cheapest first."""
        pinned = self.draft.trainer.activation_checkpointing
        recomputes = (False, True) if pinned is None else (bool(pinned),)
        if self.draft.sharding.offload_activations != "none":
            recomputes = (True,)  # what it moves is what checkpoints keep
        return [(stage, again) for stage in self.stages for again in recomputes]

    def best(self, strategy: tuple[int, bool]) -> Candidate:
        """The fastest micro-batch that fits with all of its range, else with its estimate, else the one that
        misses by least."""
        tried: list[Candidate] = []
        for batch in self.batches:
            candidate = self.candidate(strategy, batch)
            if candidate.safe and self.larger_is_faster:
                return candidate
            tried.insert(0, candidate)
        fitting = [candidate for candidate in tried if candidate.fits]
        if fitting:
            return min(fitting, key=lambda c: c.rank_key)
        return min(tried, key=lambda c: c.shortfall)

    def could_fit(self, strategy: tuple[int, bool]) -> bool:
        """Whether the smallest micro-batch fits, or the one without accumulation, which keeps no
        gradients between steps."""
        for batch in {self.batches[-1], self.batches[0]}:
            if self._fits(self._lighter(strategy, batch)[1]):
                return True
        return False

    def candidate(self, strategy: tuple[int, bool], batch: Batch) -> Candidate:
        """The configuration, estimated when it is asked for the first time."""
        key = (*strategy, batch.micro)
        if key not in self.seen:
            self.seen[key] = self._estimate(strategy, batch)
        return self.seen[key]

    def _estimate(self, strategy: tuple[int, bool], batch: Batch) -> Candidate:
        facts = self._facts
        job, memory = self._lighter(strategy, batch)
        tf32 = bool(self.draft.trainer.tf32)
        time = predict_step(
            facts.model, job, facts.hardware,
            kept=self._kept_bytes(), tf32=tf32, processor=facts.processor, cores=facts.cpu_cores,
        )  # fmt: skip
        return Candidate(self.variant, batch, job, memory, time, self._fits(memory), facts.host_bytes)

    @property
    def may_chunk(self) -> bool:
        """Whether the loss may be computed in chunks, and need not."""
        return self._job.chunked and not self.draft.explicit("model.loss")

    def _lighter(self, strategy: tuple[int, bool], batch: Batch) -> tuple[MemoryJob, MemoryEstimate]:
        """With the loss in chunks or of all logits, whichever needs less, unless the recipe says which."""
        job, memory = self._with_evaluation(self._sized(strategy, batch))
        tokens = job.micro_batch * job.sequence_length
        if not self.may_chunk or tokens > 2 * self._facts.model.hidden_size:
            return job, memory
        full, other = self._with_evaluation(replace(self._sized(strategy, batch), chunked=False))
        return (full, other) if other.needed < memory.needed else (job, memory)

    def _sized(self, strategy: tuple[int, bool], batch: Batch) -> MemoryJob:
        stage, checkpointing = strategy
        return replace(
            self._job,
            zero_stage=stage,
            checkpointing=checkpointing,
            overlap_comm=stage == 3 and not self._facts.hardware.is_cpu,
            micro_batch=batch.micro,
            accumulation=batch.accumulation,
        )

    def _fits(self, memory: MemoryEstimate) -> bool:
        host = self._facts.host_bytes
        return memory.fits is not False and (host is None or memory.host_bytes <= host)

    def _with_evaluation(self, job: MemoryJob) -> tuple[MemoryJob, MemoryEstimate]:
        """With the recipe's batch of evaluation, else the largest up to the micro-batch that fits."""
        asked = self.draft.trainer.per_device_eval_batch_size
        evaluates = self.draft.data.eval is not None
        size = (asked or job.micro_batch) if evaluates else 0
        while True:
            sized = replace(job, eval_batch=size)
            memory = self._memory(sized)
            settled = memory.fits is not False or memory.moment != "evaluating"
            # Where rows are compared with each other, no device may choose how many.
            if settled or asked or size <= self._least or self.draft.task.compares(self.draft):
                return sized, memory
            size = max(size // 2, self._least)

    def _memory(self, job: MemoryJob) -> MemoryEstimate:
        facts = self._facts
        found = estimate_memory(
            facts.model, job, facts.hardware, trace=facts.trace, calibration=facts.calibration
        )
        return widened(found, self.draft, facts)

    def _kept_bytes(self) -> int:
        if self._kept is None:
            self._kept = kept_by_sample(self._job, self._memory)
        return self._kept


def kept_by_sample(job: MemoryJob, memory: Callable[[MemoryJob], MemoryEstimate]) -> int:
    """Bytes of activations and logits of one sample, all layers together, where nothing is recomputed."""
    alone = replace(job, micro_batch=1, mini_batch=0, checkpointing=False, spread=1)
    return max(moment.activations + moment.logits for moment in memory(alone).phases.values())


def _batches(draft: Draft, recipe: Recipe, copies: int) -> list[Batch]:
    """The batches to try, largest micro-batch first, all with the same global size."""
    pinned: int | None = draft.trainer.per_device_train_batch_size
    if recipe.sharding.sp_size > 1 or recipe.sharding.cp_size > 1:
        pinned = 1  # ranks share each sample's tokens
    accumulation: int | None = draft.trainer.gradient_accumulation_steps
    if recipe.global_batch_size is None:
        if accumulation is not None:
            if pinned is not None:
                return [Batch(pinned, accumulation, copies)]
            return [Batch(m, accumulation, copies) for m in (8, 4, 2, 1)]
        per_rank = pinned or UPSTREAM_MICRO_BATCH
    else:
        per_rank, rest = divmod(recipe.global_batch_size, copies)
        if rest:
            near = [size * copies for size in (per_rank, per_rank + 1) if size]
            message = f"{recipe.global_batch_size} samples do not divide among {copies} data-parallel ranks"
            hint = f"use {' or '.join(map(str, near))}"
            raise draft.refuse("batch-not-divisible", "global_batch_size", message, hint)
    if pinned is not None:
        if per_rank % pinned:
            message = f"micro-batch {pinned} does not divide the {per_rank} samples of each rank"
            hint = f"use a divisor of {per_rank}, or change global_batch_size"
            raise draft.refuse("batch-not-divisible", "trainer.per_device_train_batch_size", message, hint)
        return [Batch(pinned, per_rank // pinned, copies)]
    return [Batch(m, per_rank // m, copies) for m in reversed(divisors(per_rank))]


def _large_enough(draft: Draft, batches: Sequence[Batch], least: int, why: str) -> list[Batch]:
    """The batches that the loss takes. RecipeError where none is."""
    enough = [batch for batch in batches if batch.micro >= least]
    if not enough:
        largest = batches[0]
        message = f"leaves micro-batches of {largest.micro} to {largest.data_parallel} data-parallel ranks, "
        message += f"but {why}"
        hint = f"use at least {least * largest.data_parallel}, or fewer devices"
        raise draft.refuse("batch-too-small", "global_batch_size", message, hint)
    return enough


def _one_micro_batch(draft: Draft, batches: Sequence[Batch]) -> list[Batch]:
    """The batches that the optimizer takes: one that updates in the backward pass keeps no gradients for the
    next micro-batch.

    RecipeError where all of them accumulate.
    """
    optim, in_backward = draft.trainer.optim, draft.sharding.optim_in_backward
    if not (needs_of(optim).layerwise or in_backward):
        return list(batches)
    single = [batch for batch in batches if batch.accumulation == 1]
    if not single:
        code, path, way = "optimizer-conflict", "trainer.optim", f"use {optim.removesuffix('_layerwise')}"
        if in_backward:
            code, path, way = "optim-in-backward", "sharding.optim_in_backward", "drop it"
        count = batches[0].accumulation
        message = f"weights are updated after each micro-batch, but a step has {count} of them"
        raise draft.refuse(code, path, message, f"{way}, or a micro-batch as large as the global batch")
    return single


def _check_width(draft: Draft, spec: ModelSpec) -> None:
    """RecipeError where more dimensions of embeddings are trained than the model has."""
    largest = max(draft.embedding.matryoshka_dims, default=0) if draft.task.head == "none" else 0
    if largest > spec.hidden_size:
        message = f"has {largest}, but embeddings of the model have {spec.hidden_size} dimensions"
        hint = f"use at most {spec.hidden_size}"
        raise draft.refuse("matryoshka-width", "embedding.matryoshka_dims", message, hint)


def _compared_batches(draft: Draft, batches: Sequence[Batch]) -> list[Batch]:
    """The largest micro-batch alone where its samples are compared with each other: a smaller one with more
    accumulation has fewer negatives, and learns something else."""
    return list(batches[:1]) if draft.task.compares(draft) else list(batches)
