"""TrainingArguments that follow from other decisions, and the workers' environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.facts.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.recipe.schema import Recipe

GENERATED = ("exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL")
"""Metrics of text that the model writes, so that the evaluation must generate."""


def decide_trainer(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """What the recipe leaves out of `trainer:`; upstream's defaults are said explicitly."""
    precision = draft.get("precision")
    owned: Mapping[str, tuple[Any, str]] = {
        "bf16": (precision == "bf16", f"precision {precision}"),
        "fp16": (precision == "fp16", f"precision {precision}"),
        "seed": (recipe.seed, "recipe seed"),
        "use_cpu": (hardware.is_cpu, f"device {hardware.device}"),
    }
    for name, (value, reason) in owned.items():
        draft.put(f"trainer.{name}", value, reason)
    defaults: dict[str, tuple[Any, str]] = {
        "optim": ("adamw_torch_fused", "upstream's default, said explicitly"),
        "learning_rate": _learning_rate(recipe),
        "max_grad_norm": (1.0, "upstream's default; DeepSpeed's own default has changed over time"),
        "logging_steps": (10, "a loss line every ten steps"),
        "logging_first_step": (True, "the first loss shows whether the data is right"),
        "save_total_limit": (2, "a full disk ends a run; the last two checkpoints are kept"),
        "report_to": ("none", "no tracker asked for"),
        "disable_tqdm": (True, "the logs hold lines, not bars"),
        "dataloader_pin_memory": (not hardware.is_cpu, f"device {hardware.device}"),
        **_evaluation(draft, recipe),
    }
    if "max_steps" not in recipe.trainer:
        defaults["num_train_epochs"] = (3.0, "upstream's default, said explicitly")
    if recipe.task == "image-classification":
        # Pictures are read and resized as they are asked for, from columns that no model knows.
        defaults["remove_unused_columns"] = (False, "pictures are prepared as they are read")
    for name, (value, reason) in defaults.items():
        if f"trainer.{name}" not in draft.settings:
            draft.put(f"trainer.{name}", value, reason)


def _learning_rate(recipe: Recipe) -> tuple[float, str]:
    if recipe.task == "dpo":
        return (1e-5, "trl's default, ten times for adapters") if recipe.adapter else (1e-6, "trl's default")
    if recipe.adapter:
        return 2e-4, "usual for adapters"
    if recipe.model.config is not None:
        return 3e-4, "usual for training from scratch"
    return 2e-5, "usual for full fine-tunes"


def _evaluation(draft: Draft, recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """When to evaluate, what to keep of it, and which checkpoint to end with."""
    if recipe.data.eval is None:
        return {"eval_strategy": ("no", "data.eval is absent")}
    found: dict[str, tuple[Any, str]] = {"eval_strategy": ("epoch", "data.eval is given")}
    metrics = recipe.data.metrics
    own = "compute_metrics" in (draft.get("python.hooks") or [])
    if [name for name in metrics if name != "perplexity"] or own:
        found["prediction_loss_only"] = (False, "the metrics read predictions")
    else:
        found["prediction_loss_only"] = (True, "no metric reads predictions: logits are not kept")
    written = [name for name in metrics if name in GENERATED]
    if recipe.task == "seq2seq-lm" and (written or own):
        reason = f"{', '.join(written) or 'compute_metrics'}: read from generated text"
        found["predict_with_generate"] = (True, reason)
    if recipe.early_stopping is not None:
        strategy = recipe.trainer.get("eval_strategy", "epoch")
        found["load_best_model_at_end"] = (True, "early stopping ends with the best checkpoint")
        found["metric_for_best_model"] = ("eval_loss", "always reported")
        best = str(recipe.trainer.get("metric_for_best_model", "eval_loss"))
        smaller = best.endswith(("loss", "perplexity"))
        found["greater_is_better"] = (not smaller, "losses and perplexities are better when smaller")
        found["save_strategy"] = (strategy, "the best checkpoint is one that was evaluated")
        if strategy == "steps" and "eval_steps" in recipe.trainer:
            found["save_steps"] = (recipe.trainer["eval_steps"], "each evaluation has its checkpoint")
    return found


def decide_runtime(draft: Draft, cpu_cores: int, hardware: Hardware, env: Mapping[str, str]) -> None:
    """Environment variables of the workers, each with its reason."""
    values = {
        "TOKENIZERS_PARALLELISM": (
            "false",
            "forked dataloader workers and tokenizer threads deadlock",
        ),
        "PYTHONUNBUFFERED": ("1", "the last lines before a crash must reach the log"),
    }
    offloads = "cpu" in (draft.get("sharding.offload_optimizer"), draft.get("sharding.offload_param"))
    if hardware.is_cpu or offloads:
        threads = max(1, cpu_cores // hardware.devices_per_node)
        values["OMP_NUM_THREADS"] = (str(threads), "launchers default to 1, which starves CPU work")
    if hardware.is_cpu and draft.get("sharding.engine") == "ddp":
        # Under DeepSpeed the same variable would make accelerate choose DDP without a word.
        values["ACCELERATE_USE_CPU"] = (
            "true",
            "else accelerate starts independent processes on a CPU",
        )
    if not hardware.is_cpu:
        values["PYTORCH_ALLOC_CONF"] = ("expandable_segments:True", "less fragmentation")
    for name, (value, reason) in values.items():
        draft.put(f"launch.env.{name}", value, reason)
    for name, text in env.items():
        draft.put_recipe(f"launch.env.{name}", text, "")
