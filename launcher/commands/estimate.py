"""`estimate`: memory by component over strategies and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import DoesNotFit, Problem, RecipeError
from launcher.files.shipped import shipped_names
from launcher.inputs.model_spec import find_spec
from launcher.inputs.planning_facts import find_calibration, gather, usable_cores
from launcher.machine import probe
from launcher.machine.hardware import Hardware, parse_hardware, with_host_memory
from launcher.machine.software import installed_versions
from launcher.memory.estimate import MemoryEstimate, estimate_memory, max_micro_batch
from launcher.memory.job import MemoryJob
from launcher.memory.published import hf_page_bytes, zero_paper_bytes
from launcher.memory.tensor_parallel import check_ranks
from launcher.models.measured_runs import Calibration
from launcher.models.model import FAMILY_TASKS, ModelSpec, architectures_of
from launcher.models.model_config import find_model_config
from launcher.plan.draft import EXPLICIT
from launcher.plan.inputs import Facts
from launcher.planner.parallel import trains_in_parts
from launcher.planner.planner import make_plan
from launcher.planner.search import search
from launcher.planner.strategies import (
    could_move,
    model_recipe,
    model_strategies,
    on_hardware,
    open_jobs,
    worth_a_row,
)
from launcher.recipe.loading import LoadedRecipe, load_recipe, with_changes
from launcher.report.outcome import Outcome
from launcher.report.plan_text import estimate_text
from launcher.tasks import DEFAULT_TASK, task_named


def estimate_command(
    target: str, *, on: Sequence[str], overrides: Sequence[str], tensor_parallel: int
) -> Outcome:
    """Estimate a recipe for all values that it leaves open, or a model for the usual strategies."""
    machines = [_with_memory(parse_hardware(text, "--on")) for text in on]
    if _is_recipe(target):
        spec, found = _of_recipe(load_recipe(target, overrides), machines, tensor_parallel)
    else:
        if overrides:
            message = f"--set needs a recipe, and {target!r} is a model"
            raise RecipeError(Problem("set-without-recipe", message, hint="name a recipe"))
        spec, found = _of_model(target, machines or [probe.probe_hardware()], tensor_parallel)
    left_out = [one for one in found if isinstance(one, CannotRun)]
    rows = [one for one in found if isinstance(one, StrategyRow)]
    for hardware in dict.fromkeys(one.hardware for one in found):
        if not any(row.hardware == hardware for row in rows):
            raise RecipeError(_nothing_runs(hardware, left_out, tensor_parallel))
    job = rows[0].job
    model = {
        "name": spec.name,
        "params": spec.params,
        "trainable": job.trainable_params,
        "sequence_length": job.sequence_length,
        "micro_batch": job.micro_batch,
        "published": {
            "zero_paper": int(zero_paper_bytes(spec.params, 1, 0)),
            "hf_page": hf_page_bytes(spec.params),
        },
    }
    shown, refused = [row.to_json() for row in rows], [asdict(one) for one in left_out]
    text = estimate_text(model, shown, refused)
    return Outcome({"model": model, "rows": shown, "left_out": refused}, text)


def _nothing_runs(hardware: str, left_out: Sequence[CannotRun], tensor_parallel: int) -> Problem:
    """The problem of hardware on which no strategy runs."""
    if tensor_parallel > 1:
        message = f"no strategy supports --tensor-parallel {tensor_parallel} on {hardware}"
        hint = "full fine-tuning in bf16 or fp32 with ZeRO-1 or 2 can: docs/parallelism.md"
        return Problem("bad-tensor-parallel", message, path="--tensor-parallel", hint=hint)
    reason = next(one.reason for one in left_out if one.hardware == hardware)
    return Problem("no-strategy", f"no strategy runs on {hardware}: {reason}")


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy on one machine."""

    hardware: str
    strategy: str
    job: MemoryJob
    memory: MemoryEstimate
    largest: int | None
    """Micro-batch; None where the memory of the device is unknown."""

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "strategy": self.strategy,
            "memory": self.memory.to_json(),
            "max_micro_batch": self.largest,
        }


@dataclass(frozen=True, slots=True)
class CannotRun:
    """A strategy that cannot run there."""

    hardware: str
    strategy: str
    reason: str


def _of_model(
    name: str, machines: Sequence[Hardware], tensor_parallel: int
) -> tuple[ModelSpec, list[StrategyRow | CannotRun]]:
    """What `plan` finds for a recipe of this model with each of the usual strategies."""
    config, origin = find_model_config(name)
    task = _task_of(config)
    spec, _ = find_spec(name, config, origin, task, ask=False)
    recipe, versions = model_recipe(spec, task_named(task)), installed_versions()
    shared = {"sharding.tp_size": tensor_parallel} if tensor_parallel > 1 else {}
    found: list[StrategyRow | CannotRun] = []
    for hardware in machines:
        check_ranks(spec, tensor_parallel, hardware)
        calibration = find_calibration(hardware)
        facts = Facts(hardware, spec, versions, cpu_cores=usable_cores(), calibration=calibration)
        for strategy, changes in model_strategies(spec, hardware):
            try:
                asked = with_changes(recipe, {**changes, **shared}, "estimate")
                plans = search(asked, facts)
            except RecipeError as error:
                found.append(CannotRun(hardware.label, strategy, error.problems[0].message))
                continue
            job, bench = plans.first.job, plans.of(plans.first)
            if worth_a_row(job):
                found.append(_row(spec, strategy, job, hardware, calibration, may_chunk=bench.may_chunk))
    return spec, found


def _of_recipe(
    loaded: LoadedRecipe, machines: Sequence[Hardware], tensor_parallel: int
) -> tuple[ModelSpec, list[StrategyRow | CannotRun]]:
    """The job of the recipe over what it leaves open."""
    spec, jobs, machines = _recipe_jobs(loaded, machines)
    found: list[StrategyRow | CannotRun] = []
    for hardware in machines:
        check_ranks(spec, tensor_parallel, hardware)
        calibration = find_calibration(hardware)
        there = [(name, job) for name, job in jobs if could_move(job, hardware)]
        sized = {name: on_hardware(job, hardware, tensor_parallel) for name, job in there}
        usable = {name: job for name, job in sized.items() if trains_in_parts(job)}
        for name in (name for name in sized if name not in usable):
            reason = f"not with {sized[name].tensor_parallel} tensor-parallel ranks"
            found.append(CannotRun(hardware.label, name, reason))
        # A recipe may have nothing simpler than a stage that shards nothing on one device.
        worth = {name: job for name, job in usable.items() if worth_a_row(job)} or usable
        found += [_row(spec, name, job, hardware, calibration) for name, job in worth.items()]
    return spec, found


def _row(
    spec: ModelSpec,
    name: str,
    job: MemoryJob,
    hardware: Hardware,
    calibration: Calibration,
    *,
    may_chunk: bool = False,
) -> StrategyRow:
    """may_chunk: whether a larger batch may have its loss computed in chunks."""
    ways = [job, replace(job, chunked=True)] if may_chunk else [job]
    batches = [max_micro_batch(spec, way, hardware, calibration=calibration) for way in ways]
    largest = max((batch for batch in batches if batch is not None), default=None)
    if job.sequence_parallel > 1 and largest is not None:
        largest = min(1, largest)  # ranks that share the tokens of a sample train one sample at a time
    memory = estimate_memory(spec, job, hardware, calibration=calibration)
    return StrategyRow(hardware.label, name, job, memory, largest)


def _is_recipe(target: str) -> bool:
    """Whether it names a recipe file or a shipped recipe."""
    return target.endswith((".yaml", ".yml")) or (target in shipped_names() and not Path(target).is_dir())


def _task_of(config: Mapping[str, Any]) -> str:
    """The task of the published head if the family supports it, else the first task of the family."""
    tasks = FAMILY_TASKS.get(str(config.get("model_type")), (DEFAULT_TASK,))
    for architecture in architectures_of(config):
        for task in tasks:
            if architecture.endswith(task_named(task).architecture_suffix):
                return task
    return tasks[0]


def _with_memory(hardware: Hardware) -> Hardware:
    return with_host_memory(hardware, probe.host_memory_bytes())


def _recipe_jobs(
    loaded: LoadedRecipe, machines: Sequence[Hardware]
) -> tuple[ModelSpec, list[tuple[str, MemoryJob]], Sequence[Hardware]]:
    """The job of the recipe, planned for the first hardware, and its variants for values left open."""
    on = machines[0].label if machines else None
    loaded, facts = gather(loaded, on, allow_torch=False)
    try:
        plan = make_plan(loaded, facts)
    except DoesNotFit as error:
        plan = error.nearest_miss
    fixed = {dotted for dotted, known in plan.provenance.items() if known.source in EXPLICIT}
    return facts.model, open_jobs(plan.job, fixed), machines or [facts.hardware]
