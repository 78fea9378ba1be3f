"""Rules between keys: who owns a setting, which keys exclude each other, what only other launchers have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.errors import Problem
from launcher.recipe.data_rules import task_of
from launcher.recipe.field_tables import TRAINER_OWNED
from launcher.recipe.fields import ADAPTER_KEYS
from launcher.recipe.optimizers import needs_of
from launcher.recipe.slurm_rules import check_slurm

_LAYERS = (
    "no engine here cuts a model by its layers: use sharding.tp_size, sharding.zero_stage: 3 or engine fsdp"
)
_ELSEWHERE = (
    (r"pp_size|pp|pipeline\w*", _LAYERS),
    (r"ep_size|expert_parallel\w*", "experts are not shared out here: use zero_stage: 3"),
)
"""Keys of `sharding` that other launchers have, as patterns, and what to use instead."""
_LOFTQ = ("loftq_bits", "loftq_iter")
_RL = "trl trains it: GRPOTrainer and RLOOTrainer generate while they train, which a recipe cannot say"
_VISION = "axolotl and LLaMA-Factory train models that read images and text"
# task -> who trains it, for tasks that are not planned here
_REFUSED_TASKS = {
    **dict.fromkeys(("grpo", "rl", "rlhf", "ppo", "rloo", "reinforce", "online-dpo"), _RL),
    "kto": "trl trains it with KTOTrainer; `task: dpo` is for pairs of a chosen and a rejected answer",
    **dict.fromkeys(
        ("orpo", "cpo", "simpo"),
        "trl trains it under trl.experimental; `task: dpo` is for the same pairs, with trl's DPOTrainer",
    ),
    **dict.fromkeys(
        ("vlm", "vision-language", "image-text-to-text", "image-to-text", "visual-question-answering",
         "multimodal"),
        _VISION,
    ),
}  # fmt: skip


def take_todo(data: dict[str, Any]) -> list[Problem]:
    """A problem for each line of `todo`, which `import` writes and which is taken out of `data`."""
    lines = data.pop("todo", None)
    if lines is None:
        return []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return [
            Problem("wrong-type", "expected a list of texts: what must be set before it runs", path="todo")
        ]
    hint = "set it, and delete this line of `todo`"
    return [
        Problem("recipe-todo", f"must be set in the recipe: {line}", path=f"todo[{at}]", hint=hint)
        for at, line in enumerate(lines)
    ]


def take_unsupported(data: dict[str, Any]) -> list[Problem]:
    """Problems of what no recipe can have here; takes it out of `data`."""
    problems = []
    if (refusal := _refused_task(data.get("task"))) is not None:
        del data["task"]
        problems.append(refusal)
    sharding = data.get("sharding")
    if not isinstance(sharding, dict):
        return problems
    for key in list(sharding):
        hint = next((hint for pattern, hint in _ELSEWHERE if re.fullmatch(pattern, str(key))), None)
        if hint is not None:
            del sharding[key]
            problems.append(
                Problem("unsupported", "nothing here does that", path=f"sharding.{key}", hint=hint)
            )
    return problems


def _refused_task(task: Any) -> Problem | None:
    plain = task.lower().replace("_", "-") if isinstance(task, str) else ""
    if plain not in _REFUSED_TASKS:
        return None
    return Problem("unsupported", f"{task} is not a task here", path="task", hint=_REFUSED_TASKS[plain])


def check_rules(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """Problems between keys. `trainer`: with references resolved."""
    return [
        *_check_owned(trainer),
        *check_slurm(data),
        *_check_exclusive(data, trainer),
        *_check_model(data),
        *_check_adapter(data),
        *_check_adapter_init(data),
        *_check_evaluation(data, trainer),
        *_check_early_stopping(data, trainer),
        *_check_hub(trainer),
        *_check_optimizer(trainer),
        *_check_best_metric(data, trainer),
        *task_of(data).check_trainer(trainer),
    ]


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _check_owned(trainer: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem("owned-key", "not allowed under `trainer:`", path=f"trainer.{name}", hint=TRAINER_OWNED[name])
        for name in trainer
        if name in TRAINER_OWNED
    ]


def _check_exclusive(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    problems = []
    if data.get("global_batch_size") is not None and "gradient_accumulation_steps" in trainer:
        message = "excludes `global_batch_size`, which decides the accumulation"
        path = "trainer.gradient_accumulation_steps"
        problems.append(Problem("conflict", message, path=path, hint="keep one of the two"))
    steps = trainer.get("max_steps")
    if isinstance(steps, int) and steps > 0 and "num_train_epochs" in trainer:
        message = "excludes `trainer.max_steps`"
        hint = "keep one of the two; null takes away what a parent gave"
        problems.append(Problem("conflict", message, path="trainer.num_train_epochs", hint=hint))
    if trainer.get("torch_compile") is True and _section(data, "model").get("compile_blocks") is True:
        message = "excludes `trainer.torch_compile`, which compiles the whole model"
        problems.append(Problem("conflict", message, path="model.compile_blocks", hint="keep one of the two"))
    if steps == 0 and not isinstance(steps, bool):
        problems.append(Problem("wrong-value", "is 0, expected at least 1", path="trainer.max_steps"))
    return problems


def _check_model(data: Mapping[str, Any]) -> list[Problem]:
    if not isinstance(data.get("model"), Mapping):
        return []
    model = data["model"]
    name, config = model.get("name_or_path"), model.get("config")
    problems = []
    if name is None and config is None:
        message = "`name_or_path` (weights) or `config` (random weights) is required"
        hint = "e.g. name_or_path: bigcode/starcoder"
        problems.append(Problem("missing-key", message, path="model", hint=hint))
    if name is not None and config is not None:
        message = "excludes `model.name_or_path`: a model has weights or starts at random"
        problems.append(Problem("conflict", message, path="model.config", hint="keep one of the two"))
    return problems


def _check_adapter(data: Mapping[str, Any]) -> list[Problem]:
    adapter = _section(data, "adapter")
    others = [f"`{key}`" for key in adapter if key not in ADAPTER_KEYS]
    if adapter.get("path") is None or not others:
        return []
    message = f"excludes {', '.join(others)}: the adapter in the folder has its own settings"
    hint = "remove `path` to start a new adapter, or the others to continue this one"
    return [Problem("conflict", message, path="adapter.path", hint=hint)]


def _check_adapter_init(data: Mapping[str, Any]) -> list[Problem]:
    """Beginnings of an adapter for which peft wants more than a name."""
    adapter = _section(data, "adapter")
    init, path = adapter.get("init_lora_weights"), "adapter.init_lora_weights"
    if init in ("corda", "eva"):
        left = "peft then stops" if init == "corda" else "peft then begins as if nothing were asked for"
        message = f"is {init}, which reads data before the run, and nothing here does: {left}"
        return [
            Problem("unsupported", message, path=path, hint="write `init_lora_weights: pissa` or `olora`")
        ]
    config = adapter.get("loftq_config")
    given = config if isinstance(config, Mapping) else {}
    missing = [key for key in _LOFTQ if key not in given]
    if init != "loftq" or not missing:
        return []
    message = f"is loftq, which needs `loftq_config` with {' and '.join(missing)}"
    hint = "write `loftq_config: {loftq_bits: 4, loftq_iter: 1}` beside it"
    return [Problem("conflict", message, path=path, hint=hint)]


def _check_evaluation(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """What the Trainer would find out only after the model is loaded."""
    has_rows = _section(data, "data").get("eval") is not None
    stops = data.get("early_stopping") is not None
    # what the plan fills in where the recipe is silent
    by_rows = "steps" if _section(data, "data").get("streaming") is True else "epoch"
    strategy = trainer.get("eval_strategy", by_rows if has_rows else "no")
    save = trainer.get("save_strategy", strategy if stops else "steps")
    problems = []
    add_rows = "add e.g. `eval: {split: 0.02}` under `data:`"
    if strategy in ("steps", "epoch") and not has_rows:
        path = "trainer.eval_strategy"
        problems.append(
            Problem("conflict", f"is {strategy}, which needs `data.eval`", path=path, hint=add_rows)
        )
    if stops and "no" in (strategy, save):
        return problems  # told by the rule of early stopping
    if trainer.get("load_best_model_at_end") is not True and not stops:
        return problems
    path = "early_stopping" if stops else "trainer.load_best_model_at_end"
    if not has_rows:
        problems.append(Problem("conflict", "needs `data.eval`", path=path, hint=add_rows))
    if save != "best" and strategy != save:
        message = f"needs equal strategies, but `eval_strategy` is {strategy} and `save_strategy` is {save}"
        hint = f"write `eval_strategy: {save}`" if save != "no" else "write `save_strategy: steps`"
        problems.append(Problem("conflict", message, path=path, hint=hint))
    elif strategy == save == "steps":
        problems += _check_step_multiple(trainer, path)
    return problems


def _check_step_multiple(trainer: Mapping[str, Any], path: str) -> list[Problem]:
    """Upstream's rule for two given numbers; the plan derives the one that is not given from the other."""
    every, save = (trainer.get(name) for name in ("eval_steps", "save_steps"))
    if not (isinstance(save, (int, float)) and isinstance(every, (int, float))) or min(every, save) <= 0:
        return []
    shares = {every < 1, save < 1}  # of all steps
    if len(shares) == 1 and round(save / every) >= 1 and abs(save / every - round(save / every)) < 1e-6:
        return []
    message = f"needs `save_steps` ({save}) to be a multiple of `eval_steps` ({every})"
    return [Problem("conflict", message, path=path, hint=f"write `save_steps: {every}`")]


def _check_best_metric(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """A metric that nothing measures is found out at the first evaluation otherwise."""
    name = trainer.get("metric_for_best_model")
    if not isinstance(name, str) or data.get("python") is not None or _section(data, "data") == {}:
        return []
    measured = _section(data, "data").get("metrics") or []
    plain = name.removeprefix("eval_")
    if plain == "loss" or plain in measured or task_of(data).own_metrics:
        return []
    known = ", ".join(["loss", *map(str, measured)])
    path = "trainer.metric_for_best_model"
    hint = f"add {plain} to data.metrics, or use one of them"
    return [Problem("conflict", f"is {name}, but what is measured is {known}", path=path, hint=hint)]


def _check_early_stopping(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """Early stopping compares evaluations and keeps the best checkpoint, so it needs both."""
    if data.get("early_stopping") is None:
        return []
    problems = []
    if _section(data, "data").get("eval") is None:
        hint = "add e.g. `eval: {split: 0.02}` under `data:`"
        problems.append(Problem("conflict", "needs `data.eval`", path="early_stopping", hint=hint))
    if trainer.get("load_best_model_at_end") is False:
        message = "is false, but `early_stopping` ends with the best checkpoint"
        path = "trainer.load_best_model_at_end"
        problems.append(Problem("conflict", message, path=path, hint="remove one of the two"))
    for name, need in (("eval_strategy", "evaluations"), ("save_strategy", "checkpoints")):
        if trainer.get(name) == "no":
            message = f"is no, but `early_stopping` needs {need}"
            problems.append(Problem("conflict", message, path=f"trainer.{name}", hint="write epoch or steps"))
    return problems


def _check_hub(trainer: Mapping[str, Any]) -> list[Problem]:
    """Without a name the Trainer makes a repository that is called as its folder is: checkpoints."""
    if trainer.get("push_to_hub") is not True or trainer.get("hub_model_id"):
        return []
    message = "needs `hub_model_id`: the repository would be called `checkpoints`"
    return [Problem("conflict", message, path="trainer.push_to_hub", hint="write `hub_model_id: you/name`")]


def _check_optimizer(trainer: Mapping[str, Any]) -> list[Problem]:
    """What transformers would find out only when the model is loaded, and the optimizer made."""
    optim, path = trainer.get("optim"), "trainer.optim"
    needs = needs_of(optim)
    problems = []
    if needs.device:
        message = f"is {optim}, which {needs.device} alone have; runs are on NVIDIA GPUs and CPUs"
        problems.append(Problem("unsupported", message, path=path, hint="write `optim: adamw_torch_fused`"))
    if needs.targets and not trainer.get("optim_target_modules"):
        message = f"is {optim}, which needs `optim_target_modules`: the layers that it treats so"
        hint = "add `optim_target_modules: all-linear` under `trainer:`"
        problems.append(Problem("conflict", message, path=path, hint=hint))
    return problems
