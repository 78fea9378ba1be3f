"""`estimate`: memory by component over strategies and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import DoesNotFit, Problem, RecipeError
from launcher.facts import probe
from launcher.facts.hardware import Hardware, parse_hardware, with_host_memory
from launcher.facts.measured_runs import Calibration
from launcher.facts.model import FAMILY_TASKS, ModelSpec, architectures_of
from launcher.facts.model_config import find_model_config
from launcher.inputs.model_spec import find_spec
from launcher.inputs.planning_facts import find_calibration, find_hardware, gather
from launcher.memory.estimate import estimate_memory, max_micro_batch
from launcher.memory.job import MemoryJob
from launcher.memory.published import hf_page_bytes, zero_paper_bytes
from launcher.memory.tensor_parallel import check_ranks
from launcher.plan.draft import EXPLICIT
from launcher.planner.parallel import trains_in_parts
from launcher.planner.planner import make_plan
from launcher.planner.strategies import model_jobs, on_hardware, open_jobs, worth_a_row
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.recipe.merged_yaml import shipped_names
from launcher.report.outcome import Outcome
from launcher.report.plan_text import estimate_text
from launcher.tasks import DEFAULT_TASK, task_named


def estimate_command(
    target: str, *, on: Sequence[str], overrides: Sequence[str], tensor_parallel: int
) -> Outcome:
    """Estimate a recipe for all values that it leaves open, or a model for the usual strategies."""
    if _is_recipe(target):
        loaded = load_recipe(target, overrides)
        spec, jobs, machines = _recipe_jobs(loaded, on)
    else:
        if overrides:
            message = f"--set needs a recipe, and {target!r} is a model"
            raise RecipeError(Problem("set-without-recipe", message, hint="name a recipe"))
        config, origin = find_model_config(target)
        spec, _ = find_spec(target, config, origin, _task_of(config), ask=False)
        machines = [_with_memory(parse_hardware(text)) for text in on] or [probe.probe_hardware()]
        jobs = model_jobs(spec)
    rows = []
    for hardware in machines:
        check_ranks(spec, tensor_parallel, hardware)
        calibration = find_calibration(hardware)
        for name, job in jobs:
            sized = on_hardware(job, hardware, tensor_parallel)
            if (len(jobs) == 1 or worth_a_row(sized)) and trains_in_parts(sized):
                rows.append(_row(spec, name, sized, hardware, calibration))
        if not any(row["hardware"] == hardware.label for row in rows):
            message = f"no strategy supports --tensor-parallel {tensor_parallel} on {hardware.label}"
            hint = "full fine-tuning in bf16 or fp32 with ZeRO-1 or 2 can: docs/parallelism.md"
            raise RecipeError(Problem("bad-tensor-parallel", message, path="--tensor-parallel", hint=hint))
    model = {
        "name": spec.name,
        "params": spec.params,
        "trainable": jobs[0][1].trainable_params,
        "sequence_length": jobs[0][1].sequence_length,
        "micro_batch": jobs[0][1].micro_batch,
        "published": {
            "zero_paper": int(zero_paper_bytes(spec.params, 1, 0)),
            "hf_page": hf_page_bytes(spec.params),
        },
    }
    return Outcome({"model": model, "rows": rows}, estimate_text(model, rows))


def _row(
    spec: ModelSpec, name: str, job: MemoryJob, hardware: Hardware, calibration: Calibration
) -> dict[str, Any]:
    largest = max_micro_batch(spec, job, hardware, calibration=calibration)
    if job.sequence_parallel > 1 and largest is not None:
        largest = min(1, largest)  # ranks that share the tokens of a sample train one sample at a time
    return {
        "hardware": hardware.label,
        "strategy": name,
        "memory": estimate_memory(spec, job, hardware, calibration=calibration).to_json(),
        "max_micro_batch": largest,
    }


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
    loaded: LoadedRecipe, on: Sequence[str]
) -> tuple[ModelSpec, list[tuple[str, MemoryJob]], list[Hardware]]:
    """The job of the recipe, planned for the first hardware, and its variants for values left open."""
    machines = [_with_memory(parse_hardware(text)) for text in on]
    machines = machines or [find_hardware(loaded.recipe, None)]
    loaded, facts = gather(loaded, machines[0].label, allow_torch=False)
    try:
        plan = make_plan(loaded, facts)
    except DoesNotFit as error:
        plan = error.nearest_miss
    fixed = {dotted for dotted, known in plan.provenance.items() if known.source in EXPLICIT}
    return facts.model, open_jobs(plan.job, fixed), machines
