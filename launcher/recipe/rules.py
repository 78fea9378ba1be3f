"""Rules between keys: who owns a setting, which keys exclude each other, what only other launchers have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.facts.redaction import is_written_secret, looks_secret, names_secret
from launcher.recipe.data_paths import is_hub_id, is_url
from launcher.recipe.env import reference_names, split_references
from launcher.recipe.field_tables import METRICS, TASK_FORMATS, TRAINER_OWNED
from launcher.recipe.fields import ADAPTER_KEYS
from launcher.recipe.optimizer_needs import needs_of
from launcher.recipe.slurm_rules import check_slurm
from launcher.recipe.suggestions import close_key, describe
from launcher.recipe.yaml_reader import join
from launcher.tasks import DEFAULT_TASK, FORMATS, TASKS, task_named
from launcher.tasks.task import OPTIONAL_DATA_KEYS, Task

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


_HUB_ONLY = ("name", "split", "revision")
# keys that mean nothing where no text becomes tokens
_TOKEN_KEYS = (
    "data.max_length", "data.overlong", "data.max_truncated", "data.max_dropped",
    "model.tokenizer", "model.chat_template", "model.add_tokens", "model.vocab_multiple",
    "data.pad_to_multiple_of",
)  # fmt: skip
_OWN_METRIC = "`python:` names a file with a compute_metrics of yours"


def task_of(data: Mapping[str, Any]) -> Task:
    """The task of a recipe; the default one where it is absent or wrong."""
    task = data.get("task", DEFAULT_TASK)
    return task_named(task if isinstance(task, str) and task in TASK_FORMATS else DEFAULT_TASK)


def data_sources(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, source) of every entry of `data.train` and `data.eval`."""
    for name in ("train", "eval"):
        entries = _data_rules_section(data, "data").get(name)
        for index, source in enumerate(entries if isinstance(entries, list) else []):
            yield f"data.{name}[{index}]", source


def check_data(
    data: Mapping[str, Any], trainer: Mapping[str, Any], folder: Callable[[str], Path]
) -> list[Problem]:
    """Problems between `task`, `data`, `model` and what `trainer` (references resolved) says of them.

    `folder(path)`: where the relative paths of that value start.
    """
    if data.get("task", DEFAULT_TASK) not in list(TASK_FORMATS):
        return _check_paths(data, folder)  # what the rows must be is not known
    return [
        *_check_paths(data, folder),
        *_check_formats(data),
        *_check_columns(data),
        *_check_weights(data),
        *_check_optional(data),
        *_data_rules_check_model(data),
        *_check_loss(data),
        *_check_samples(data),
        *_check_metrics(data),
        *_check_streaming(data, trainer),
    ]


def _data_rules_section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _given(data: Mapping[str, Any], dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    return _data_rules_section(data, section).get(key) not in (None, [], False)


def _conflict(path: str, message: str, hint: str) -> Problem:
    return Problem("conflict", message, path=path, hint=hint)


def _check_paths(data: Mapping[str, Any], folder: Callable[[str], Path]) -> list[Problem]:
    problems = []
    for place, source in data_sources(data):
        path = source.get("path") if isinstance(source, Mapping) else None
        if not isinstance(path, str):
            continue
        if is_url(path):
            hint = _hub_hint(path) or "write a file, a folder, a glob, package:NAME/inner/path or a hub id"
            problems.append(Problem("unsupported", "a URL is not read", path=f"{place}.path", hint=hint))
        elif not path:
            problems.append(Problem("wrong-value", "is empty", path=f"{place}.path", hint="name a file"))
        elif not is_hub_id(path, folder(f"{place}.path")):
            problems += [
                _conflict(
                    f"{place}.{key}",
                    "is only for a data set of the hub, and the path here is none",
                    "remove it, or write `path: organisation/name`",
                )
                for key in _HUB_ONLY
                if source.get(key) is not None
            ]
    return problems


def _hub_hint(url: str) -> str | None:
    """How to write `url` if it names a data set of the hub, else None."""
    for prefix in ("https://huggingface.co/datasets/", "hf://datasets/", "hf://", "hf:", "hub:"):
        if url.startswith(prefix):
            parts = url.removeprefix(prefix).strip("/").split("/")
            return f"write `path: {parts[0]}/{parts[1]}`" if len(parts) >= 2 else None
    return None


def _check_formats(data: Mapping[str, Any]) -> list[Problem]:
    task = task_of(data)
    problems = []
    for place, form in _formats(data):
        if form in task.formats:
            continue
        others = [name for name, formats in TASK_FORMATS.items() if form in formats]
        message = f"is {form}, but task {task.name} reads {' or '.join(task.formats)}"
        problems.append(_conflict(f"{place}.format", message, f"{form} rows are for `task: {others[0]}`"))
    return problems


def _formats(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted path of the source, format) where a known format is given."""
    for place, source in data_sources(data):
        form = source.get("format") if isinstance(source, Mapping) else None
        if isinstance(form, str) and form in FORMATS:
            yield place, form


def _check_weights(data: Mapping[str, Any]) -> list[Problem]:
    return [
        _conflict(f"{place}.weight", "is only for training rows", "remove it: evaluation sees each row once")
        for place, source in data_sources(data)
        if place.startswith("data.eval") and isinstance(source, Mapping) and source.get("weight", 1) != 1
    ]


def _check_columns(data: Mapping[str, Any]) -> list[Problem]:
    """A rename of a field that the format lacks would have no effect."""
    explicit = dict(_formats(data))
    problems = []
    for place, source in data_sources(data):
        columns = source.get("columns") if isinstance(source, Mapping) else None
        forms = [explicit[place]] if place in explicit else task_of(data).formats
        fields = list(dict.fromkeys(f for form in forms for f in FORMATS[form].fields))
        for key, column in columns.items() if isinstance(columns, Mapping) else ():
            if key in fields or column is None:  # which leaves the file's column of that name out
                continue
            near = close_key(str(key), fields)
            hint = f"did you mean `{near}`?" if near else "write `field of the format: column of the file`"
            message = f"unknown field, expected one of {', '.join(fields)}"
            problems.append(Problem("unknown-key", message, path=f"{place}.columns.{key}", hint=hint))
    return problems


def _check_optional(data: Mapping[str, Any]) -> list[Problem]:
    """Keys of `data:` that the task does not read."""
    task = task_of(data)
    problems = []
    for key, why in OPTIONAL_DATA_KEYS.items():
        if key in task.data_keys or not _given(data, f"data.{key}"):
            continue
        readers = " and ".join(other.name for other in TASKS if key in other.data_keys)
        hint = f"remove it: with task {task.name}, {why}"
        problems.append(_conflict(f"data.{key}", f"is only for task {readers}", hint))
    return problems


def _data_rules_check_model(data: Mapping[str, Any]) -> list[Problem]:
    task = task_of(data)
    problems = []
    if not task.gguf and _given(data, "model.gguf_file"):
        message = f"is only for causal language models, not for task {task.name}"
        problems.append(_conflict("model.gguf_file", message, "name a checkpoint in safetensors"))
    if not task.reads_tokens:
        problems += [
            _conflict(path, "means nothing for images, which are not made of tokens", "remove it")
            for path in _TOKEN_KEYS
            if _given(data, path)
        ]
    elif task.own_padding and _given(data, "data.pad_to_multiple_of"):
        message = f"has no effect with task {task.name}: {task.own_padding}"
        problems.append(_conflict("data.pad_to_multiple_of", message, "remove it"))
    tokens = _data_rules_section(data, "model").get("add_tokens")
    seen: set[str] = set()
    for index, token in enumerate(tokens if isinstance(tokens, list) else []):
        if isinstance(token, str) and token in seen:
            path = f"model.add_tokens[{index}]"
            problems.append(Problem("wrong-value", f"{describe(token)} is given twice", path=path))
        seen.add(str(token))
    return problems


def _check_loss(data: Mapping[str, Any]) -> list[Problem]:
    wanted = _data_rules_section(data, "data").get("loss_on")
    if not isinstance(wanted, str):
        return []
    for place, form in _formats(data):
        allowed = task_of(data).learns.get(form, ())
        if allowed and wanted not in allowed:
            message = f"is {wanted}, but the {form} rows of `{place}` can only learn {' or '.join(allowed)}"
            hint = "remove it: every format has its own default"
            return [_conflict("data.loss_on", message, hint)]
    return []


def _check_samples(data: Mapping[str, Any]) -> list[Problem]:
    """What packing, fill-in-the-middle and `overlong` need of the rows."""
    rows = _data_rules_section(data, "data")
    problems = []
    other = next(((place, form) for place, form in _formats(data) if form != "text"), None)
    if rows.get("packing") is True and rows.get("padding_free") is True:
        message = "excludes `data.packing`, which leaves nothing to pad"
        problems.append(_conflict("data.padding_free", message, "keep one of the two"))
    refused = task_of(data).overlong
    overlong = str(rows.get("overlong"))
    if overlong in refused:
        rest = " or ".join(value for value in ("truncate", "drop") if value not in refused)
        message = f"is {overlong}, {refused[overlong]}"
        problems.append(_conflict("data.overlong", message, f"write {rest}, or remove it"))
    elif rows.get("overlong") == "split" and other:
        message = f"is split, but only text rows can be split, and those of `{other[0]}` are {other[1]}"
        problems.append(_conflict("data.overlong", message, "write truncate or drop"))
    if rows.get("fim") is not None and other and "fim" in task_of(data).data_keys:
        message = f"needs text rows, but those of `{other[0]}` are {other[1]}"
        problems.append(_conflict("data.fim", message, "write `format: text`, or remove fim"))
    return problems


def _check_metrics(data: Mapping[str, Any]) -> list[Problem]:
    rows = _data_rules_section(data, "data")
    metrics = rows.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        return []
    task, problems = task_of(data), []
    known = task.metrics
    if rows.get("eval") is None:
        hint = "add e.g. `eval: {split: 0.02}` under `data:`"
        problems.append(_conflict("data.metrics", "needs `data.eval`, the rows to measure on", hint))
    if _data_rules_section(data, "trainer").get("prediction_loss_only") is True and metrics != ["perplexity"]:
        message = "is true, so that nothing of data.metrics but perplexity would be measured"
        problems.append(_conflict("trainer.prediction_loss_only", message, "drop it"))
    for index, name in enumerate(metrics):
        if not isinstance(name, str) or name in known:
            continue
        near = close_key(name, known)
        owner = next((other for other, names in METRICS.items() if name in names), None)
        hint = f"it is a metric of task {owner}" if owner else _OWN_METRIC
        hint = f"did you mean {near}?" if near else hint
        expected = f"one of {', '.join(known)}" if known else f"nothing: task {task.name} has its own"
        message = f"is {describe(name)}, expected {expected}"
        problems.append(Problem("wrong-choice", message, path=f"data.metrics[{index}]", hint=hint))
    return problems


def _check_streaming(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    rows = _data_rules_section(data, "data")
    if rows.get("streaming") is not True or "streaming" not in task_of(data).data_keys:
        return []
    problems = []
    steps = trainer.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        message = "needs `trainer.max_steps`: the end of a stream is not known before it comes"
        hint = "write `max_steps:` in place of `num_train_epochs:`" if "num_train_epochs" in trainer else (
            "write e.g. `trainer: {max_steps: 1000}`"
        )  # fmt: skip
        problems.append(_conflict("data.streaming", message, hint))
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if trainer.get(name) == "epoch":
            message = "is epoch, but a stream is one epoch without end"
            problems.append(_conflict(f"trainer.{name}", message, "write steps, or remove it"))
    if isinstance(rows.get("eval"), Mapping):
        message = "cannot be cut from rows that are streamed"
        problems.append(_conflict("data.eval", message, "give a list of sources as in `data.train`"))
    return problems


SECRET_CODE = "secret-in-recipe"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"""(?<![\w$-])([A-Za-z_]\w*)\+?=((?:"[^"]*"|'[^']*'|[^\s;&|()'"])*)""", re.ASCII)
"""NAME=value in a line of shell."""


_COUNTED = "`hardware.num_nodes` and `hardware.devices_per_node` say how many ranks there are"
_MET = "a run finds where its ranks meet; `launch.hostfile` or Slurm names the machines"
_SHELL = "set it in the shell that starts the run"
_ENGINE = "`sharding` decides it"
_PARTS = "`sharding.tp_size`, `sp_size` and `cp_size` decide it"
_OWNED = (
    (r"(LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|NODE_RANK", _COUNTED),
    (r"MASTER_(ADDR|PORT)", _MET),
    (r"CUDA_VISIBLE_DEVICES", f"{_SHELL}; `hardware.devices_per_node` says how many of them are used"),
    (r"EFFILAUNCH_\w+", _SHELL),
    (r"ACCELERATE_(USE_CPU|TORCH_DEVICE)", "`hardware.device: cpu` or `--on cpu` decides it"),
    (r"ACCELERATE_(USE_\w+|DEEPSPEED_\w+|CONFIG_DS_FIELDS|ALLOW_CP_STANDALONE)|FSDP_\w+", _ENGINE),
    (r"PARALLELISM_CONFIG_\w+", _PARTS),
    (r"ACCELERATE_(MIXED_PRECISION|DOWNCAST_BF16|FP8_\w+)", "`precision` decides it"),
    (r"ACCELERATE_DYNAMO_\w+", "write `trainer.torch_compile` and its like"),
    (r"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "`global_batch_size` decides it"),
    (r"ACCELERATE_GRADIENT_CLIPPING", "write `trainer.max_grad_norm`"),
)
"""Variables that the run sets itself, or that would change behind the plan what it has decided, as patterns,
and how the thing is said instead."""


def take_secrets(data: dict[str, Any]) -> list[Problem]:
    """Problems of secrets that are written out, or asked for where they would be written down.

    Takes them out of `data`, so that no other message shows them.
    """
    problems: list[Problem] = []

    def visit(value: Any, path: str) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            child, item = join(path, key), value[key]
            if isinstance(item, dict | list):
                visit(item, child)
            elif isinstance(item, str) and (problem := _secret(path, str(key), item, child)):
                problems.append(problem)
                value[key] = "hidden"

    visit(data, "")
    return problems


def check_environment(data: dict[str, Any]) -> list[Problem]:
    """Problems of names under `launch.env`: no variable's, which no shell could set, or the run's own."""
    launch = data.get("launch")
    env = launch.get("env") if isinstance(launch, dict) else None
    problems = []
    for name in env if isinstance(env, dict) else ():
        if not _NAME.fullmatch(str(name)):
            message = "is no name of a variable, expected letters, digits and _, not beginning with a digit"
            problems.append(Problem("wrong-value", message, path=join("launch.env", name)))
        owner = next((hint for pattern, hint in _OWNED if re.fullmatch(pattern, str(name))), None)
        if owner is not None:
            message = "not allowed under `launch.env`: the run sets it, or has decided it"
            problems.append(Problem("owned-key", message, path=join("launch.env", name), hint=owner))
    return problems


def _secret(parent: str, key: str, text: str, path: str) -> Problem | None:
    """The problem of one text; `parent` and `key` make its path."""
    in_environment = parent == "launch.env"
    in_shell = parent == "launch.slurm.setup"
    if not in_environment and any(names_secret(name) for name in reference_names(text)):
        message = "asks for a secret, which would be written into the run directory"
        hint = "the environment reaches every process by itself; a variable's name is no value of the recipe"
        return Problem(SECRET_CODE, message, path=path, hint=hint)
    plain = "".join(part for part in split_references(text) if isinstance(part, str))
    is_secret = is_written_secret(key, plain) if in_environment else looks_secret(plain)
    if in_shell and (is_secret or _sets_secret(plain)):
        message = "sets a secret, and the line is written into the job scripts"
        hint = (
            "the jobs get the environment of the shell that submits them: set it there, and leave it out here"
        )
        return Problem(SECRET_CODE, message, path=path, hint=hint)
    if not is_secret:
        return None
    message = "is a secret, and a recipe is copied into every run directory"
    name = key if in_environment else "NAME"
    hint = f"set it in the environment and write ${{ENV:{name}}} under launch.env, or leave it out there"
    return Problem(SECRET_CODE, message, path=path, hint=hint)


def _sets_secret(line: str) -> bool:
    """Whether a line of shell sets a variable to a secret; one that is read from elsewhere ($…) is none."""
    for name, quoted in _ASSIGNED.findall(line):
        value = quoted.replace('"', "").replace("'", "")
        if "$" not in value and "`" not in value and is_written_secret(name, value):
            return True
    return False
