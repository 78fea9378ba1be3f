"""`make_plan`: facts and recipe in, plan out. Pure: no environment, process, network, clock or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import DoesNotFit, Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.facts.model import ModelSpec
from launcher.plan import decide
from launcher.plan.arguments import decide_runtime, decide_trainer
from launcher.plan.draft import Draft
from launcher.plan.fixes import apply_fixes, check_disabled
from launcher.plan.fixes.fix import Situation
from launcher.plan.plan import AppliedFix, Plan, Schedule
from launcher.plan.profile import record_profile
from launcher.plan.record import record_recipe
from launcher.plan.sizing import Size, choose_size
from launcher.recipe.loading import LoadedRecipe


@dataclass(frozen=True, slots=True)
class Facts:
    """What was gathered before planning."""

    hardware: Hardware
    model: ModelSpec
    versions: Mapping[str, str]
    """Installed versions by distribution name."""
    profile: Mapping[str, Any] | None = None
    """Content of the recipe's `sharding.config`."""
    cpu_cores: int = 1
    python: str = "python"
    """The interpreter that will start the workers."""
    hooks: tuple[str, ...] = ()
    """Names of the functions in the recipe's `python` file."""
    warnings: tuple[str, ...] = field(default=())
    tiny: bool = False
    """Rehearsal: two narrow layers, generated rows, four steps."""


def make_plan(loaded: LoadedRecipe, facts: Facts) -> Plan:
    """Decide everything; RecipeError (2) for what cannot run, DoesNotFit (3) for what does not fit.

    DoesNotFit carries the plan of the nearest miss.
    """
    recipe = loaded.recipe
    problems = check_disabled(recipe.fixes.disable)
    if problems:
        raise RecipeError(problems)
    draft = Draft(loaded.origins)
    record_recipe(draft, recipe, facts.model.config, facts.hooks)
    decide.decide_precision(draft, recipe, facts.hardware)
    decide.decide_engine(draft, recipe, facts.hardware)
    decide.decide_launcher(draft, recipe, facts.hardware)
    decide.decide_weights(draft, recipe, facts.hardware)
    decide_trainer(draft, recipe, facts.hardware)
    decide_runtime(draft, facts.cpu_cores, facts.hardware, recipe.launch.env)
    record_profile(draft, facts.profile)
    draft.put("tiny", facts.tiny, "asked for by --tiny" if facts.tiny else "not asked for")
    situation = Situation(draft, facts.model, facts.hardware, facts.versions)
    early = apply_fixes(situation, recipe.fixes.disable, early=True)
    miss: DoesNotFit | None = None
    try:
        size = choose_size(draft, recipe, facts.model, facts.hardware)
    except DoesNotFit as error:
        miss, size = error, error.nearest_miss
    _record_size(draft, size)
    late = apply_fixes(situation, recipe.fixes.disable, early=False)
    plan = _assemble(loaded, facts, draft, size, [*early, *late])
    if miss is not None:
        raise DoesNotFit(miss.problems, plan)
    return plan


def _record_size(draft: Draft, size: Size) -> None:
    batch = size.batch
    memory = f"estimate {size.memory.total / 2**30:.2f} GiB on each device"
    if size.zero_stage is None:
        draft.put("sharding.zero_stage", None, "engine ddp does not shard")
    elif not draft.explicit("sharding.zero_stage"):
        draft.put(
            "sharding.zero_stage",
            size.zero_stage,
            f"lowest stage that fits: {memory}",
            source="search",
        )
    chosen: dict[str, tuple[Any, str]] = {
        "trainer.per_device_train_batch_size": (
            batch.micro,
            f"largest micro-batch that fits at this global batch: {memory}",
        ),
        "trainer.gradient_accumulation_steps": (
            batch.accumulation,
            f"{batch.global_size} samples a step / {batch.data_parallel} ranks / micro-batch {batch.micro}",
        ),
        "trainer.per_device_eval_batch_size": (
            batch.micro,
            "the micro-batch of training is known to fit",
        ),
        "trainer.activation_checkpointing": (
            size.checkpointing,
            "without it nothing fits" if size.checkpointing else "fits without recomputation",
        ),
    }
    for dotted, (value, reason) in chosen.items():
        if draft.get(dotted) is None:
            draft.put(dotted, value, reason, source="search")
    buckets = {
        "deepspeed.reduce_bucket_size": size.job.reduce_bucket_size,
        "deepspeed.allgather_bucket_size": size.job.allgather_bucket_size,
        "deepspeed.overlap_comm": size.job.overlap_comm,
    }
    if size.zero_stage is not None:
        for dotted, bucket in buckets.items():
            draft.put(dotted, bucket, "as counted by the memory estimate")
    draft.put_recipe("global_batch_size", batch.global_size, "micro x accumulation x ranks")
    draft.put("model.enable_input_require_grads", False, "only adapters with checkpointing need it")
    draft.put("model.prepare_for_kbit", False, "only a quantised base needs it")
    draft.put("model.pad_token", "keep", "the tokenizer's own")
    draft.put("runtime.autocast", None, "the Trainer's own autocast suffices")
    draft.put("runtime.training_arguments_first", False, "the order matters under ZeRO-3 only")


def _assemble(loaded: LoadedRecipe, facts: Facts, draft: Draft, size: Size, fixes: list[AppliedFix]) -> Plan:
    batch = size.batch
    steps = draft.get("trainer.max_steps")
    steps = steps if isinstance(steps, int) and steps > 0 else None
    schedule = Schedule(
        steps=steps,
        epochs=None if steps else draft.get("trainer.num_train_epochs"),
        warmup_steps=_warmup(draft.get("trainer.warmup_steps", 0), steps),
        tokens_per_step=batch.global_size * (facts.model.tokens_per_sample or draft.get("data.max_length")),
    )
    return Plan(
        recipe_file=str(loaded.path),
        recipe_text=loaded.text,
        hardware=facts.hardware,
        model=facts.model,
        batch=batch,
        schedule=schedule,
        settings=dict(draft.settings),
        fixes=tuple(fixes),
        memory=size.memory,
        job=size.job,
        python=facts.python,
        versions=dict(facts.versions),
        warnings=(*facts.warnings, *draft.warnings),
    )


def _warmup(value: float, steps: int | None) -> int | None:
    """transformers reads a warmup_steps below 1 as a share of all steps."""
    if value >= 1 or value == 0:
        return int(value)
    return None if steps is None else -(-int(value * steps * 1_000_000) // 1_000_000)


def missing_data(loaded: LoadedRecipe, exists: Mapping[str, bool]) -> list[Problem]:
    """A problem for each data path of the recipe that `exists` says is absent."""
    rows = loaded.recipe.data
    named = [(f"data.train[{i}].path", s.path) for i, s in enumerate(rows.train)]
    if isinstance(rows.eval, list):
        named += [(f"data.eval[{i}].path", s.path) for i, s in enumerate(rows.eval)]
    draft = Draft(loaded.origins)
    problems = []
    for dotted, path in named:
        if not exists[path]:
            file, line = draft.place(dotted)
            problems.append(
                Problem(
                    "data-missing",
                    f"no such file or folder: {path}",
                    file,
                    line,
                    dotted,
                    "relative paths are relative to the recipe",
                )
            )
    return problems
