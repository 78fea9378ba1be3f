"""Rules between keys: who owns a setting, which keys exclude each other, what is not supported yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.recipe.yaml_marks import join

# trainer key -> who decides it instead
OWNED = {
    "output_dir": "`run --output-dir` decides it",
    "deepspeed": "`sharding` decides it",
    "fsdp": "`sharding` decides it",
    "fsdp_config": "`sharding` decides it",
    "resume_from_checkpoint": "`run --resume` decides it",
    "local_rank": "the launcher sets it",
    "seed": "write `seed` at the top of the recipe",
    "use_cpu": "`hardware.device: cpu` or `--on cpu` decides it",
    "do_train": "the launcher always trains",
    "do_eval": "`data.eval` decides it",
    "do_predict": "prediction is not part of a run",
    "bf16": "`precision` decides it",
    "fp16": "`precision` decides it",
    "hub_token": "set HF_TOKEN in the environment; no secret belongs into a recipe",
}

_LATER = "not supported by this version yet"
_TASKS = ("seq2seq-lm", "sequence-classification", "image-classification", "dpo")
# dotted pattern -> values that are planned but not read yet (None: every value)
_UNSUPPORTED: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    (r"task", _TASKS, "this version trains causal-lm"),
    (r"data\.packing", None, "remove it: rows are padded, not packed"),
    (r"data\.metrics", None, "remove it: the evaluation loss is reported"),
    (r"data\.eval\.metrics", None, "remove it: the evaluation loss is reported"),
    (r"data\.(train|eval)\[\d+\]\.weight", None, "remove it: sources are concatenated"),
    (r"on_oom", None, "remove it: a run that is out of memory fails"),
    (r"python", None, "remove it"),
    (r"launch\.slurm", None, "remove it"),
    (r"launch\.max_restarts", None, "remove it: a run is resumed with `run --resume auto`"),
    (r"sharding\.engine", ("fsdp",), "this version has deepspeed and ddp"),
    (r"sharding\.offload_(optimizer|param)", ("nvme",), "this version has none and cpu"),
    (r"model\.add_tokens", None, "remove it"),
)


def take_unsupported(data: dict[str, Any]) -> list[Problem]:
    """Problems of keys that the design has and this version lacks; takes those keys out of `data`."""
    problems: list[Problem] = []

    def visit(value: Any, path: str) -> None:
        keys: Any = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            child, item = join(path, key), value[key]
            for pattern, values, hint in _UNSUPPORTED:
                if re.fullmatch(pattern, child) and (values is None or item in values):
                    message = _LATER if values is None else f"{item} is {_LATER}"
                    problems.append(Problem("unsupported", message, path=child, hint=hint))
                    del value[key]
                    break
            else:
                if isinstance(item, (dict, list)):
                    visit(item, child)

    visit(data, "")
    return problems


def check_rules(
    data: Mapping[str, Any], trainer: Mapping[str, Any], folder: Callable[[str], Path]
) -> list[Problem]:
    """Problems between keys.

    `trainer`: with references resolved; `folder(path)`: where relative paths start.
    """
    return [
        *_check_owned(trainer),
        *_check_exclusive(data, trainer),
        *_check_model(data),
        *_check_adapter(data),
        *_check_evaluation(data, trainer),
        *_check_data_paths(data, folder),
    ]


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _check_owned(trainer: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem("owned-key", "not allowed under `trainer:`", path=f"trainer.{name}", hint=OWNED[name])
        for name in trainer
        if name in OWNED
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
    others = [f"`{key}`" for key in adapter if key not in ("path", "type")]
    if adapter.get("path") is None or not others:
        return []
    message = f"excludes {', '.join(others)}: the adapter in the folder has its own settings"
    hint = "remove `path` to start a new adapter, or the others to continue this one"
    return [Problem("conflict", message, path="adapter.path", hint=hint)]


def _check_evaluation(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """What the Trainer would find out only after the model is loaded."""
    has_rows = _section(data, "data").get("eval") is not None
    strategy, save = trainer.get("eval_strategy", "no"), trainer.get("save_strategy", "steps")
    problems = []
    add_rows = "add e.g. `eval: {split: 0.02}` under `data:`"
    if strategy in ("steps", "epoch") and not has_rows:
        path = "trainer.eval_strategy"
        problems.append(
            Problem("conflict", f"is {strategy}, which needs `data.eval`", path=path, hint=add_rows)
        )
    if trainer.get("load_best_model_at_end") is not True:
        return problems
    path = "trainer.load_best_model_at_end"
    if not has_rows:
        problems.append(Problem("conflict", "needs `data.eval`", path=path, hint=add_rows))
    if save != "best" and strategy != save:
        message = f"needs equal strategies, but `eval_strategy` is {strategy} and `save_strategy` is {save}"
        hint = f"write `eval_strategy: {save}`" if save != "no" else "write `save_strategy: steps`"
        problems.append(Problem("conflict", message, path=path, hint=hint))
    elif strategy == save == "steps":
        problems += _check_step_multiple(trainer)
    return problems


def _check_step_multiple(trainer: Mapping[str, Any]) -> list[Problem]:
    save = trainer.get("save_steps", 500)
    every = trainer.get("eval_steps", trainer.get("logging_steps", 500))
    if not (isinstance(save, int) and isinstance(every, int)) or every <= 0 or save % every == 0:
        return []
    message = f"needs `save_steps` ({save}) to be a multiple of `eval_steps` ({every})"
    return [
        Problem(
            "conflict",
            message,
            path="trainer.load_best_model_at_end",
            hint=f"write `save_steps: {every}`",
        )
    ]


def _check_data_paths(data: Mapping[str, Any], folder: Callable[[str], Path]) -> list[Problem]:
    problems = []
    for name in ("train", "eval"):
        sources = _section(data, "data").get(name)
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            text = source.get("path") if isinstance(source, Mapping) else None
            path = f"data.{name}[{index}].path"
            if isinstance(text, str) and (kind := _unread_data(text, folder(path))):
                hint = "write a file, a folder or package:NAME/inner/path"
                problems.append(Problem("unsupported", f"{kind} {_LATER}", path=path, hint=hint))
    return problems


def _unread_data(text: str, base: Path) -> str | None:
    """What a data path is when this version cannot read it, else None."""
    if text.startswith("package:"):
        return None
    if re.match(r"(hf|hub|https?|s3|gs)://?|hub:", text):
        return "data from the hub or a URL is"
    if any(char in text for char in "*?"):
        return "a file pattern is"
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w-]+", text) and not (base / text.partition("/")[0]).exists():
        return f"`{text}` is neither a file nor a folder here, and a data set of the hub is"
    return None
