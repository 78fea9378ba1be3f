"""TrainingArguments that follow from other decisions, their checks, and the workers' environment. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.engines import engine_of
from launcher.files.safe_files import parse_json
from launcher.machine.hardware import Hardware
from launcher.machine.requirements import holds
from launcher.memory.allocator import EXACT_PINNED, EXACT_PINNED_FROM, VARIABLES, expandable_in
from launcher.plan.draft import Draft, Refusal
from launcher.plan.inputs import Facts
from launcher.planner.decide import shares
from launcher.planner.rollouts import rollout_of
from launcher.recipe.nested_fields import rising_rate
from launcher.recipe.optimizer_needs import needs_of
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named

_CODE, _CONFIG = "accelerator-config", "trainer.accelerator_config"
EVALUATIONS = 10
"""Evaluations of a run where the recipe does not set their interval."""
MOST_STEPS_BETWEEN = 500
"""Steps between two evaluations at most, where the number of all steps is known."""


def decide_trainer(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """What the recipe leaves out of `trainer:`, upstream's defaults included."""
    precision = draft.precision
    owned: Mapping[str, tuple[object, str]] = {
        "bf16": (precision == "bf16", f"precision {precision}"),
        "fp16": (precision == "fp16", f"precision {precision}"),
        "seed": (recipe.seed, "recipe seed"),
        "use_cpu": (hardware.is_cpu, f"device {hardware.device}"),
    }
    for name, (value, reason) in owned.items():
        draft.put(f"trainer.{name}", value, reason)
    defaults: dict[str, tuple[object, str]] = {
        "optim": ("adamw_torch_fused", "upstream's default, set explicitly"),
        "learning_rate": _learning_rate(recipe),
        "max_grad_norm": (1.0, "upstream's default; DeepSpeed's own default has changed over time"),
        "logging_steps": (10, "a loss line every ten steps"),
        "logging_first_step": (True, "the first loss shows whether the data is right"),
        "save_total_limit": (2, "a full disk ends a run; the last two checkpoints are kept"),
        "report_to": ("none", "no tracker asked for"),
        "disable_tqdm": (True, "the logs hold lines, not bars"),
        "dataloader_pin_memory": (not hardware.is_cpu, f"device {hardware.device}"),
        "logging_nan_inf_filter": (True, "upstream's default, set explicitly"),
        "include_num_input_tokens_seen": ("non_padding", "speeds are reported in tokens, without padding"),
        **_evaluation(draft, recipe),
    }
    steps = recipe.trainer.get("max_steps")
    if not isinstance(steps, int) or steps < 0:  # upstream's -1: as many as the epochs have
        defaults["num_train_epochs"] = (3.0, "upstream's default, set explicitly")
    task = task_named(recipe.task)
    defaults |= task.trainer_defaults
    if task.generates:
        defaults |= _generation(draft, recipe)
    for name, (value, reason) in defaults.items():
        if f"trainer.{name}" not in draft.names:
            draft.put(f"trainer.{name}", value, reason)
    if refusal := rising_rate(recipe.trainer, draft.trainer.learning_rate):
        raise draft.refuse(*refusal)
    end, warmup = draft.trainer.max_steps or 0, draft.trainer.warmup_steps or 0
    if 0 < end < warmup:
        draft.warn(f"trainer.warmup_steps: {warmup:g}: the run ends after {end}, below its learning rate")


def _learning_rate(recipe: Recipe) -> tuple[float, str]:
    if own := task_named(recipe.task).default_rate(adapter=recipe.adapter is not None):
        return own
    if recipe.adapter:
        return 2e-4, "usual for adapters"
    if recipe.model.config is not None:
        return 3e-4, "usual for training from scratch"
    return 2e-5, "usual for full fine-tunes"


def _evaluation(draft: Draft, recipe: Recipe) -> dict[str, tuple[object, str]]:
    """When to evaluate, what to keep of it, and which checkpoint to end with."""
    if recipe.data.eval is None:
        return {"eval_strategy": ("no", "data.eval is absent")}
    default = ("epoch", "data.eval is given")
    if recipe.data.streaming:
        default = ("steps", "a stream is one epoch without end")
    found: dict[str, tuple[object, str]] = {"eval_strategy": default}
    metrics = recipe.data.metrics
    if [name for name in metrics if name != "perplexity"] or _own_metrics(draft):
        found["prediction_loss_only"] = (False, "the metrics read predictions")
    else:
        found["prediction_loss_only"] = (True, "no metric reads predictions: logits are not kept")
    strategy = recipe.trainer.get("eval_strategy", default[0])
    if strategy == "steps":
        found["eval_steps"] = _eval_steps(recipe)
    if recipe.early_stopping is not None:
        found["load_best_model_at_end"] = (True, "early stopping ends with the best checkpoint")
        found["metric_for_best_model"] = ("eval_loss", "always reported")
        found["save_strategy"] = (strategy, "the best checkpoint is one that was evaluated")
    keeps_best = recipe.early_stopping is not None or recipe.trainer.get("load_best_model_at_end")
    best = str(recipe.trainer.get("metric_for_best_model", "eval_loss"))
    error = best.endswith(draft.task.smaller_is_better)
    if recipe.early_stopping is not None or (keeps_best and error):  # upstream: the largest but of a loss
        smaller = error or best.endswith("loss")
        found["greater_is_better"] = (not smaller, "losses, perplexities and errors are better when smaller")
    if strategy == "steps" and keeps_best:
        steps = recipe.trainer.get("eval_steps", found["eval_steps"][0])
        found["save_steps"] = (steps, "each evaluation has its checkpoint")
    return found


def _eval_steps(recipe: Recipe) -> tuple[int | float, str]:
    """Steps between two evaluations; below 1 a share of all steps, whose number is not known yet."""
    if "save_steps" in recipe.trainer:
        return recipe.trainer["save_steps"], "each checkpoint is evaluated"
    steps = recipe.trainer.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        return 1 / EVALUATIONS, f"{EVALUATIONS} evaluations in the run"
    every = min(MOST_STEPS_BETWEEN, max(1, steps // EVALUATIONS))
    return every, f"{EVALUATIONS} evaluations in the run, or one every {MOST_STEPS_BETWEEN} steps"


def _own_metrics(draft: Draft) -> bool:
    return "compute_metrics" in (draft.python.hooks or [])


def _generation(draft: Draft, recipe: Recipe) -> dict[str, tuple[object, str]]:
    """Whether evaluations generate text, and its maximal length."""
    written = [name for name in recipe.data.metrics if name in task_named(recipe.task).generated_metrics]
    reads = recipe.data.eval is not None and (bool(written) or _own_metrics(draft))
    reason = f"{', '.join(written) or 'compute_metrics'}: read from generated text"
    found: dict[str, tuple[object, str]] = {
        "predict_with_generate": (reads, reason if reads else "no metric reads generated text")
    }
    if recipe.trainer.get("predict_with_generate", reads):
        found["generation_max_length"] = (recipe.data.max_length, "data.max_length bounds completions too")
    return found


_KEEPS = "glibc keeps what a step frees for the next one, which otherwise pays a page fault for each 4 KiB"
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": (str(32 << 20), _KEEPS),
    "MALLOC_TRIM_THRESHOLD_": (str(2**31 - 1), _KEEPS),
}
"""Both: one alone keeps the other from growing. 32 MiB is the most that glibc takes (mallopt(3))."""


def decide_runtime(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """Environment variables of the workers, each with its reason. RecipeError as `_decide_allocator`."""
    hardware, env = facts.hardware, recipe.launch.env
    values = {
        "TOKENIZERS_PARALLELISM": (
            "false",
            "forked dataloader workers and tokenizer threads deadlock",
        ),
        "PYTHONUNBUFFERED": ("1", "the last lines before a crash must reach the log"),
    }
    moved = {draft.sharding.offload_optimizer, draft.sharding.offload_param}
    offloads = bool(moved & {"cpu", "nvme"})
    if hardware.is_cpu or offloads:
        threads = max(1, facts.cpu_cores // hardware.devices_per_node)
        values["OMP_NUM_THREADS"] = (str(threads), "launchers default to 1, which starves CPU work")
    if hardware.is_cpu:
        values |= {**engine_of(draft).cpu_env, **MALLOC}
    for name, (value, reason) in values.items():
        draft.put(f"launch.env.{name}", value, reason)
    for name, text in env.items():
        draft.put_recipe(f"launch.env.{name}", text, "")
    if not hardware.is_cpu:
        offloads = offloads or draft.sharding.offload_activations != "none"
        _decide_allocator(draft, env, facts, offloads=offloads)


def _decide_allocator(draft: Draft, env: Mapping[str, str], facts: Facts, *, offloads: bool) -> None:
    """Options of torch's allocator: the recipe's, else the shell's, else the plan's.

    RecipeError for expandable segments beside vLLM's sleep mode, whose memory pool refuses them.
    """
    wins, usual = VARIABLES
    rollout = rollout_of(draft)
    sleeps = rollout is not None and rollout.vllm_share > 0 and rollout.vllm_sleeps
    if wins in env:
        name = wins
    elif usual in env and wins in facts.allocator:
        name = wins
        draft.put(f"launch.env.{name}", env[usual], f"torch would take the shell's {wins}, not {usual}")
    elif usual in env:
        name = usual
    elif given := [name for name in VARIABLES if name in facts.allocator]:
        name = given[0]
        draft.put(
            f"launch.env.{name}", facts.allocator[name], "set in the shell", source="hardware", by="shell"
        )
    else:
        name = usual
        options = [] if sleeps else ["expandable_segments:True"]
        reason = "" if sleeps else "less fragmentation"
        if offloads and holds(EXACT_PINNED_FROM, facts.versions):
            options.append(EXACT_PINNED)
            reason += f"{'; ' if reason else ''}page-locked buffers take their own size, not a power of two"
        if options:
            draft.put(f"launch.env.{name}", ",".join(options), reason)
    if sleeps and expandable_in(draft.launch.env):
        message = "vLLM's sleep mode and expandable segments exclude each other: its memory pool refuses them"
        hint = f"remove expandable_segments from {name}, or set vllm_enable_sleep_mode: false"
        raise draft.refuse("vllm-sleep-mode", "trainer.vllm_enable_sleep_mode", message, hint)


def check_in_backward(draft: Draft, processes: int) -> None:
    """RecipeError where weights cannot be updated in the backward pass."""
    for conflict in _in_backward_conflicts(draft, processes) if draft.sharding.optim_in_backward else ():
        raise draft.refuse("optim-in-backward", *conflict)
    optim = draft.trainer.optim
    if needs_of(optim).layerwise and processes > 1:
        message = f"{optim} updates each layer within the backward pass, so {processes} processes diverge"
        hint = f"use {optim.removesuffix('_layerwise')} with sharding.engine: ddp, or one device"
        raise draft.refuse("optimizer-conflict", "trainer.optim", message, hint)


def _in_backward_conflicts(draft: Draft, processes: int) -> Iterator[tuple[str, str, str]]:
    """(key, message, hint) of each thing that needs the gradients of several weights at once."""
    key, trainer = "sharding.optim_in_backward", draft.trainer
    without = "or drop sharding.optim_in_backward"
    if processes > 1:
        message = f"the gradients of {processes} processes are reduced before any weight is updated"
        yield key, message, f"use one device, {without}"
    if not engine_of(draft).updates_in_backward:
        message = f"engine {draft.sharding.engine} updates the weights itself, after the backward pass"
        yield key, message, f"use sharding.engine: ddp, {without}"
    if draft.adapter.type is not None:
        yield key, "the gradients of an adapter are small: this saves nothing", "drop it"
    if trainer.max_grad_norm != 0:
        message = f"clipping to {trainer.max_grad_norm} needs the norm of all gradients at once"
        yield "trainer.max_grad_norm", message, f"set trainer.max_grad_norm: 0, {without}"
    if draft.precision == "fp16":
        message = "the loss scale of fp16 is known when all gradients are there"
        yield "precision", message, f"use bf16, bf16-true or fp32, {without}"
    needs = needs_of(trainer.optim)
    if needs.whole or needs.layerwise:
        message = f"{trainer.optim} does not update each weight by itself"
        yield "trainer.optim", message, f"use an AdamW such as paged_adamw_8bit, {without}"
    if draft.task.mini_batch(draft) is not None:
        yield key, "a cached loss runs several backward passes a step", "use a loss that is not cached"


def check_offload_activations(draft: Draft) -> None:
    """RecipeError where the inputs of layers cannot be moved to host memory, or nothing keeps them."""
    for conflict in _activation_conflicts(draft):
        raise draft.refuse("offload-activations", *conflict)


def _activation_conflicts(draft: Draft) -> Iterator[tuple[str, str, str]]:
    """(key, message, hint) of each thing that offloaded activations exclude."""
    key, trainer, sharding = "sharding.offload_activations", draft.trainer, draft.sharding
    options, drop = "trainer.activation_checkpointing_kwargs", f"drop it, or {key}"
    if (trainer.activation_checkpointing_kwargs or {}).get("offload"):
        yield options, "no plan counts what `offload` moves", f"drop it, and write {key}: cpu"
    if sharding.offload_activations == "none":
        return
    if trainer.activation_checkpointing is False:
        message = f"{key} moves what activation checkpointing keeps: without, there is nothing to move"
        yield "trainer.activation_checkpointing", message, f"set it to true, or drop {key}"
    if draft.model.device_map:
        yield "model.device_map", "activations of several devices are not moved by one process", drop
    for name in ("tp_size", "cp_size"):
        if getattr(sharding, name) > 1:
            yield f"sharding.{name}", f"{key} was not tried with ranks that share each layer", drop
    for name in ("trainer.torch_compile", "model.compile_blocks"):
        if draft.at(name):
            yield name, f"{key}: the copies would break each compiled layer's graph", drop


def check_accelerator_config(draft: Draft, recipe: Recipe, processes: int) -> None:
    """RecipeError where `trainer.accelerator_config` changes the batch or the number of batches of a rank."""
    if processes > 1:
        for conflict in _batch_conflicts(draft, recipe):
            raise draft.refuse(*conflict)


def _batch_conflicts(draft: Draft, recipe: Recipe) -> Iterator[Refusal]:
    given = _read(draft.trainer.accelerator_config)

    if given is None:
        message = "a file whose batches the plan cannot see: split_batches and even_batches change them"
        yield _CODE, _CONFIG, message, "write its content into the recipe, as a mapping"
        return
    if given.get("split_batches"):
        message = "split_batches: true divides each micro-batch among the processes: not the plan's batch"
        yield _CODE, _CONFIG, message, "drop it, and set trainer.per_device_train_batch_size"
    if given.get("even_batches") is False:
        message = (
            "even_batches: false gives some ranks fewer batches than others, and these wait for them forever"
        )
        yield _CODE, _CONFIG, message, "drop it: true is the default"
    if given.get("dispatch_batches") and shares(recipe):
        message = "dispatch_batches: true ignores that ranks share a copy, and gives them different rows"
        yield _CODE, _CONFIG, message, "drop it: each rank reads its own rows"


def _read(given: object) -> Mapping[str, object] | None:
    """The mapping, also of JSON text as TrainingArguments takes it; None for the name of a file."""
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except ValueError:
            return None
    return given if isinstance(given, Mapping) else None if given else {}
