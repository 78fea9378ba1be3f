"""The configurations of one variant: ZeRO stage, checkpointing and micro-batch at a fixed global batch.

Each is estimated once, when it is asked for. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from launcher.facts.capabilities import is_varlen
from launcher.memory.estimate import MemoryEstimate, estimate_memory
from launcher.memory.job import MemoryJob
from launcher.memory.tensor_parallel import divisors
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import Batch, StepTime
from launcher.planner.decide import refuse
from launcher.planner.job import base_job
from launcher.planner.nvme import with_buffers
from launcher.planner.optimizers import one_micro_batch
from launcher.planner.parallel import copies_of
from launcher.planner.speed import predict_step
from launcher.planner.variants import Variant
from launcher.recipe.schema import Recipe

UPSTREAM_MICRO_BATCH = 8
"""TrainingArguments' own per_device_train_batch_size: the global batch where the recipe names none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration with its memory and its predicted time."""

    variant: Variant
    batch: Batch
    job: MemoryJob
    memory: MemoryEstimate
    time: StepTime
    fits: bool
    """On the device, and in the host's memory where that is known and something is offloaded to it."""
    host_bytes: int | None
    """Host memory that offloading may use; None where it is not known."""

    @property
    def zero_stage(self) -> int | None:
        return self.job.zero_stage if self.job.engine == "deepspeed" else None

    @property
    def strategy(self) -> tuple[int, bool]:
        return self.job.zero_stage, self.job.checkpointing

    @property
    def choices(self) -> dict[str, object]:
        """Dotted setting -> value of what distinguishes strategies."""
        job = self.job
        return {
            "model.quantization": job.quantization,
            "sharding.engine": job.engine,
            "sharding.zero_stage": self.zero_stage,
            "sharding.offload_optimizer": job.offload_optimizer,
            "sharding.offload_param": job.offload_param,
            "trainer.activation_checkpointing": job.checkpointing,
        }

    @property
    def safe(self) -> bool:
        """It fits, and so does the upper end of the range around its estimate."""
        memory = self.memory
        return self.fits and (memory.device_bytes is None or memory.high <= memory.device_bytes)

    @property
    def seconds_per_sample(self) -> float:
        """Of the whole job: a recipe without a global batch may have batches of several sizes."""
        return self.time.likely / self.batch.global_size

    @property
    def rank_key(self) -> tuple[object, ...]:
        """What surely fits before what may not, then the fastest; of equals what does least."""
        job = self.job
        offloads = (job.offload_param != "none", job.offload_optimizer != "none")
        does = (job.quantization != "none", *offloads, job.zero_stage, job.checkpointing)
        return (not self.safe, self.seconds_per_sample, *does, job.engine != "deepspeed", -self.batch.micro)

    @property
    def shortfall(self) -> int:
        """Bytes by which it misses device or host."""
        memory = self.memory
        device = memory.needed + memory.margin - (memory.device_bytes or memory.needed + memory.margin)
        host = 0 if self.host_bytes is None else memory.host_bytes - self.host_bytes
        return max(device, host, 0)


class Bench:
    """Estimates the configurations of one variant's draft."""

    def __init__(self, variant: Variant, draft: Draft, recipe: Recipe, facts: Facts) -> None:
        """RecipeError where the global batch cannot be divided."""
        self.variant, self.draft, self._facts = variant, draft, facts
        copies = copies_of(recipe, facts.hardware)
        self._job = with_buffers(base_job(draft, facts.model, facts.hardware, copies), draft)
        self.batches = one_micro_batch(draft, _batches(draft, recipe, copies))
        self.seen: dict[tuple[int, bool, int], Candidate] = {}
        self._kept: int | None = None

    def stages(self) -> tuple[int, ...]:
        asked = self.draft.sharding.zero_stage  # the recipe's, or the base profile's
        job = self._job
        if job.engine != "deepspeed":
            return (0,)
        if asked is not None:
            return (asked,)
        if job.tensor_parallel > 1:
            # At stage 0 DeepSpeed's optimizer for bf16 clips by a wrong norm (plan/parallel.py).
            return (1, 2) if job.precision == "bf16" else (0, 1, 2)
        needs_three = job.offload_param != "none" or job.offload_optimizer == "nvme"
        lowest = 3 if needs_three else 1 if job.offload_optimizer != "none" else 0
        return tuple(range(lowest, 4))

    @property
    def larger_is_faster(self) -> bool:
        """Whether no smaller micro-batch can be faster. Only a kernel that computes attention between all
        samples of a flattened batch pays for each further one."""
        return not self._job.one_row or is_varlen(self._job.attention)

    def strategies(self) -> list[tuple[int, bool]]:
        """(ZeRO stage, checkpointing), what costs least first."""
        pinned = self.draft.trainer.activation_checkpointing
        recomputes = (False, True) if pinned is None else (bool(pinned),)
        return [(stage, again) for stage in self.stages() for again in recomputes]

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
            job, memory = self._with_evaluation(self._sized(strategy, batch))
            if self._fits(job, memory):
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
        job, memory = self._with_evaluation(self._sized(strategy, batch))
        tf32 = bool(self.draft.trainer.tf32)
        time = predict_step(
            facts.model, job, facts.hardware,
            kept=self._kept_bytes(), tf32=tf32, processor=facts.processor, cores=facts.cpu_cores,
        )  # fmt: skip
        fits, host = self._fits(job, memory), self._host_bytes(job)
        return Candidate(self.variant, batch, job, memory, time, fits, host)

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

    def _host_bytes(self, job: MemoryJob) -> int | None:
        """Host memory that offloading may use, None where nothing is offloaded or it is not known."""
        # What is offloaded to a disk passes through page-locked buffers.
        offloads = {job.offload_optimizer, job.offload_param} != {"none"}
        return self._facts.host_bytes if offloads else None

    def _fits(self, job: MemoryJob, memory: MemoryEstimate) -> bool:
        host = self._host_bytes(job)
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
            if settled or asked or size <= 1:
                return sized, memory
            size //= 2

    def _memory(self, job: MemoryJob) -> MemoryEstimate:
        facts = self._facts
        return estimate_memory(
            facts.model, job, facts.hardware, trace=facts.trace, calibration=facts.calibration
        )

    def _kept_bytes(self) -> int:
        if self._kept is None:
            self._kept = kept_by_sample(self._job, self._memory)
        return self._kept


def kept_by_sample(job: MemoryJob, memory: Callable[[MemoryJob], MemoryEstimate]) -> int:
    """Bytes of activations and logits of one sample, all layers together, where nothing is recomputed."""
    alone = replace(job, micro_batch=1, checkpointing=False, spread=1)
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
            raise refuse(
                draft,
                "batch-not-divisible",
                "global_batch_size",
                f"{recipe.global_batch_size} samples do not divide among {copies} data-parallel ranks",
                f"use {' or '.join(map(str, near))}",
            )
    if pinned is not None:
        if per_rank % pinned:
            raise refuse(
                draft,
                "batch-not-divisible",
                "trainer.per_device_train_batch_size",
                f"micro-batch {pinned} does not divide the {per_rank} samples of each rank",
                f"use a divisor of {per_rank}, or change global_batch_size",
            )
        return [Batch(pinned, per_rank // pinned, copies)]
    return [Batch(m, per_rank // m, copies) for m in reversed(divisors(per_rank))]
