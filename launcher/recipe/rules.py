"""Rules between the keys of a recipe: what excludes, needs or owns what; unsupported keys; secrets."""

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

SECRET_CODE = "secret-in-recipe"

_UNSUPPORTED_SHARDING = (
    (
        r"pp_size|pp|pipeline\w*",
        "pipeline parallelism is not supported",
        "use sharding.tp_size, sharding.zero_stage: 3 or sharding.engine: fsdp",
    ),
    (
        r"ep_size|expert_parallel\w*",
        "expert parallelism is not supported",
        "use sharding.zero_stage: 3",
    ),
)
"""Keys of `sharding` that other launchers have, as patterns; message; hint."""
_RL = "use trl's GRPOTrainer or RLOOTrainer: training that generates its own samples is not supported here"
_PAIRS = "use trl.experimental; `task: dpo` trains on the same pairs with trl's DPOTrainer"
_VISION = "use axolotl or LLaMA-Factory, which train models that read images and text"
_UNSUPPORTED_TASKS = {
    **dict.fromkeys(("grpo", "rl", "rlhf", "ppo", "rloo", "reinforce", "online-dpo"), _RL),
    "kto": "use trl's KTOTrainer; `task: dpo` needs pairs of a chosen and a rejected answer",
    **dict.fromkeys(("orpo", "cpo", "simpo"), _PAIRS),
    **dict.fromkeys(
        ("vlm", "vision-language", "image-text-to-text", "image-to-text", "visual-question-answering",
         "multimodal"),
        _VISION,
    ),
}  # fmt: skip
"""Task of other tools -> what trains it."""
_HUB_ONLY = ("name", "split", "revision")
_TOKEN_KEYS = (
    "data.max_length", "data.overlong", "data.max_truncated", "data.max_dropped",
    "model.tokenizer", "model.chat_template", "model.add_tokens", "model.vocab_multiple",
    "data.pad_to_multiple_of",
)  # fmt: skip
"""Keys without meaning for a task that has no tokens."""
_ADD_EVAL = "add e.g. `eval: {split: 0.02}` under `data:`"
_KEEP_ONE = "keep one of the two"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"""(?<![\w$-])([A-Za-z_]\w*)\+?=((?:"[^"]*"|'[^']*'|[^\s;&|()'"])*)""", re.ASCII)
"""NAME=value in a shell line."""
_SHELL = "set it in the shell that starts the run"
_ENGINE = "`sharding` decides it"
_OWNED_VARIABLES = (
    (
        r"(LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|NODE_RANK",
        "set `hardware.num_nodes` and `hardware.devices_per_node`",
    ),
    (
        r"MASTER_(ADDR|PORT)",
        "the rendezvous address is found automatically; `launch.hostfile` or Slurm names the nodes",
    ),
    (r"CUDA_VISIBLE_DEVICES", f"{_SHELL}; `hardware.devices_per_node` sets how many devices are used"),
    (r"EFFILAUNCH_\w+", _SHELL),
    (r"ACCELERATE_(USE_CPU|TORCH_DEVICE)", "`hardware.device: cpu` or `--on cpu` decides it"),
    (r"ACCELERATE_(USE_\w+|DEEPSPEED_\w+|CONFIG_DS_FIELDS|ALLOW_CP_STANDALONE)|FSDP_\w+", _ENGINE),
    (r"PARALLELISM_CONFIG_\w+", "`sharding.tp_size`, `sp_size` and `cp_size` decide it"),
    (r"ACCELERATE_(MIXED_PRECISION|DOWNCAST_BF16|FP8_\w+)", "`precision` decides it"),
    (r"ACCELERATE_DYNAMO_\w+", "set `trainer.torch_compile` and the keys that begin with it"),
    (r"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "`global_batch_size` decides it"),
    (r"ACCELERATE_GRADIENT_CLIPPING", "set `trainer.max_grad_norm`"),
)
"""Environment variables that the run sets, or that would override the plan, as patterns; hint."""


def task_of(data: Mapping[str, Any]) -> Task:
    """The task of a recipe; the default task where the key is absent or wrong."""
    task = data.get("task", DEFAULT_TASK)
    return task_named(task if isinstance(task, str) and task in TASK_FORMATS else DEFAULT_TASK)


def data_sources(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, source) of every entry of `data.train` and `data.eval`."""
    for name in ("train", "eval"):
        entries = _section(data, "data").get(name)
        for index, source in enumerate(entries if isinstance(entries, list) else []):
            yield f"data.{name}[{index}]", source


def take_todo(data: dict[str, Any]) -> list[Problem]:
    """Remove `todo`, which `import` writes, from `data`: a problem for each of its lines."""
    lines = data.pop("todo", None)
    if lines is None:
        return []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return [Problem("wrong-type", f"is {describe(lines)}, expected a list of strings", path="todo")]
    hint = "set it, then delete this line of `todo`"
    return [
        Problem("recipe-todo", f"must be set in the recipe: {line}", path=f"todo[{at}]", hint=hint)
        for at, line in enumerate(lines)
    ]


def take_unsupported(data: dict[str, Any]) -> list[Problem]:
    """Remove tasks and sharding keys of other launchers from `data`: a problem for each."""
    problems = []
    task = data.get("task")
    plain = task.lower().replace("_", "-") if isinstance(task, str) else ""
    if plain in _UNSUPPORTED_TASKS:
        del data["task"]
        message = f"task {task} is not supported"
        problems.append(Problem("unsupported", message, path="task", hint=_UNSUPPORTED_TASKS[plain]))
    sharding = data.get("sharding")
    if not isinstance(sharding, dict):
        return problems
    for key in list(sharding):
        for pattern, message, hint in _UNSUPPORTED_SHARDING:
            if re.fullmatch(pattern, str(key)):
                del sharding[key]
                problems.append(Problem("unsupported", message, path=f"sharding.{key}", hint=hint))
    return problems


def take_secrets(data: dict[str, Any]) -> list[Problem]:
    """Replace secrets in `data`, so that no other message shows them: a problem for each.

    A recipe is copied into every run directory. Also refused: references to secrets outside `launch.env`.
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


def _secret(parent: str, key: str, text: str, path: str) -> Problem | None:
    """The problem of one string; `parent` and `key` make its path."""
    in_environment = parent == "launch.env"
    if not in_environment and any(names_secret(name) for name in reference_names(text)):
        message = "refers to a secret, which would be written into the run directory"
        hint = "remove the reference: every process inherits the environment variable"
        return Problem(SECRET_CODE, message, path=path, hint=hint)
    plain = "".join(part for part in split_references(text) if isinstance(part, str))
    is_secret = is_written_secret(key, plain) if in_environment else looks_secret(plain)
    if parent == "launch.slurm.setup" and (is_secret or _sets_secret(plain)):
        message = "sets a secret, which would be written into the job scripts"
        hint = "remove it, and set the variable in the shell that submits: jobs inherit its environment"
        return Problem(SECRET_CODE, message, path=path, hint=hint)
    if not is_secret:
        return None
    message = "looks like a secret, which would be copied into every run directory"
    name = key if in_environment else "NAME"
    hint = f"set it in the environment, and write ${{ENV:{name}}} under launch.env or remove it"
    return Problem(SECRET_CODE, message, path=path, hint=hint)


def _sets_secret(line: str) -> bool:
    """Whether a shell line assigns a literal secret to a variable; `NAME=$OTHER` does not."""
    for name, quoted in _ASSIGNED.findall(line):
        value = quoted.replace('"', "").replace("'", "")
        if "$" not in value and "`" not in value and is_written_secret(name, value):
            return True
    return False


def check_environment(data: Mapping[str, Any]) -> list[Problem]:
    """Problems of names under `launch.env`: no variable name, or a variable that the run owns."""
    problems = []
    env = _section(_section(data, "launch"), "env")
    for name in env:
        path = join("launch.env", name)
        if not _VARIABLE.fullmatch(str(name)):
            message = "is not a variable name, expected letters, digits and _, not beginning with a digit"
            problems.append(Problem("wrong-value", message, path=path))
        owner = next((hint for pattern, hint in _OWNED_VARIABLES if re.fullmatch(pattern, str(name))), None)
        if owner is not None:
            message = "not allowed under `launch.env`: the run sets it"
            problems.append(Problem("owned-key", message, path=path, hint=owner))
    return problems


def check_rules(
    data: Mapping[str, Any], trainer: Mapping[str, Any], folder: Callable[[str], Path]
) -> list[Problem]:
    """Problems between keys. `trainer`: with references resolved.

    `folder(path)`: the folder that relative paths in that value start from.
    """
    problems = [
        *_check_owned(trainer),
        *check_slurm(data),
        *_check_exclusive(data, trainer),
        *_check_model(data),
        *_check_adapter(data),
        *_check_evaluation(data, trainer),
        *_check_early_stopping(data, trainer),
        *_check_hub(trainer),
        *_check_optimizer(trainer),
        *_check_best_metric(data, trainer),
        *task_of(data).check_trainer(trainer),
        *_check_paths(data, folder),
    ]
    if data.get("task", DEFAULT_TASK) not in list(TASK_FORMATS):
        return problems  # which rows are needed is unknown
    return [
        *problems,
        *_check_formats(data),
        *_check_columns(data),
        *_check_weights(data),
        *_check_optional(data),
        *_check_task_model(data),
        *_check_added_tokens(data),
        *_check_loss(data),
        *_check_samples(data),
        *_check_metrics(data, trainer),
        *_check_streaming(data, trainer),
    ]


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _given(data: Mapping[str, Any], dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    return _section(data, section).get(key) not in (None, [], False)


def _conflict(path: str, message: str, hint: str) -> Problem:
    return Problem("conflict", message, path=path, hint=hint)


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
        problems.append(_conflict("trainer.gradient_accumulation_steps", message, _KEEP_ONE))
    steps = trainer.get("max_steps")
    if isinstance(steps, int) and steps > 0 and "num_train_epochs" in trainer:
        hint = f"{_KEEP_ONE}; null removes the value of an extended recipe"
        problems.append(_conflict("trainer.num_train_epochs", "excludes `trainer.max_steps`", hint))
    if trainer.get("torch_compile") is True and _section(data, "model").get("compile_blocks") is True:
        message = "excludes `trainer.torch_compile`, which compiles the whole model"
        problems.append(_conflict("model.compile_blocks", message, _KEEP_ONE))
    if steps == 0 and not isinstance(steps, bool):
        problems.append(Problem("wrong-value", "is 0, expected at least 1", path="trainer.max_steps"))
    return problems


def _check_model(data: Mapping[str, Any]) -> list[Problem]:
    if not isinstance(data.get("model"), Mapping):
        return []
    model = data["model"]
    name, config = model.get("name_or_path"), model.get("config")
    if name is None and config is None:
        message = "`name_or_path` (pretrained weights) or `config` (random weights) is required"
        hint = "e.g. name_or_path: bigcode/starcoder"
        return [Problem("missing-key", message, path="model", hint=hint)]
    if name is not None and config is not None:
        message = "excludes `model.name_or_path`: weights are either pretrained or random"
        return [_conflict("model.config", message, _KEEP_ONE)]
    return []


def _check_adapter(data: Mapping[str, Any]) -> list[Problem]:
    """A continued adapter has its own settings; some initialisations need more than a name in peft."""
    adapter = _section(data, "adapter")
    others = [f"`{key}`" for key in adapter if key not in ADAPTER_KEYS]
    if adapter.get("path") is not None and others:
        message = f"excludes {', '.join(others)}: the adapter in the folder has its own settings"
        hint = "remove `path` to start a new adapter, or the other keys to continue this one"
        return [_conflict("adapter.path", message, hint)]
    init, path = adapter.get("init_lora_weights"), "adapter.init_lora_weights"
    if init in ("corda", "eva"):
        effect = "peft would stop" if init == "corda" else "peft would ignore it"
        message = f"is {init}, which needs a pass over the data before training: not supported, and {effect}"
        return [Problem("unsupported", message, path=path, hint="use pissa or olora")]
    config = _section(adapter, "loftq_config")
    missing = [key for key in ("loftq_bits", "loftq_iter") if key not in config]
    if init != "loftq" or not missing:
        return []
    message = f"is loftq, which needs `loftq_config` with {' and '.join(missing)}"
    return [_conflict(path, message, "add `loftq_config: {loftq_bits: 4, loftq_iter: 1}` under `adapter:`")]


def _check_evaluation(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """What the Trainer would refuse only after loading the model."""
    has_rows = _section(data, "data").get("eval") is not None
    stops = data.get("early_stopping") is not None
    # the plan's defaults
    by_rows = "steps" if _section(data, "data").get("streaming") is True else "epoch"
    strategy = trainer.get("eval_strategy", by_rows if has_rows else "no")
    save = trainer.get("save_strategy", strategy if stops else "steps")
    problems = []
    if strategy in ("steps", "epoch") and not has_rows:
        message = f"is {strategy}, which needs `data.eval`"
        problems.append(_conflict("trainer.eval_strategy", message, _ADD_EVAL))
    if stops and "no" in (strategy, save):
        return problems  # reported by _check_early_stopping
    if trainer.get("load_best_model_at_end") is not True and not stops:
        return problems
    path = "early_stopping" if stops else "trainer.load_best_model_at_end"
    if not has_rows:
        problems.append(_conflict(path, "needs `data.eval`", _ADD_EVAL))
    if save != "best" and strategy != save:
        message = f"needs equal strategies, but `eval_strategy` is {strategy} and `save_strategy` is {save}"
        hint = f"set `eval_strategy: {save}`" if save != "no" else "set `save_strategy: steps`"
        problems.append(_conflict(path, message, hint))
    elif strategy == save == "steps":
        problems += _check_step_multiple(trainer, path)
    return problems


def _check_step_multiple(trainer: Mapping[str, Any], path: str) -> list[Problem]:
    """The Trainer's rule where both are set; the plan derives one from the other."""
    every, save = (trainer.get(name) for name in ("eval_steps", "save_steps"))
    if not (isinstance(save, (int, float)) and isinstance(every, (int, float))) or min(every, save) <= 0:
        return []
    shares = {every < 1, save < 1}  # of all steps
    if len(shares) == 1 and round(save / every) >= 1 and abs(save / every - round(save / every)) < 1e-6:
        return []
    message = f"needs `save_steps` ({save}) to be a multiple of `eval_steps` ({every})"
    return [_conflict(path, message, f"set `save_steps: {every}`")]


def _check_best_metric(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """The Trainer would refuse an unmeasured metric only at the first evaluation."""
    name = trainer.get("metric_for_best_model")
    if not isinstance(name, str) or data.get("python") is not None or _section(data, "data") == {}:
        return []
    measured = _section(data, "data").get("metrics") or []
    plain = name.removeprefix("eval_")
    if plain == "loss" or plain in measured or task_of(data).own_metrics:
        return []
    known = ", ".join(["loss", *map(str, measured)])
    hint = f"add {plain} to data.metrics, or use one of these"
    return [
        _conflict("trainer.metric_for_best_model", f"is {name}, but the measured metrics are {known}", hint)
    ]


def _check_early_stopping(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """Early stopping compares evaluations and keeps the best checkpoint."""
    if data.get("early_stopping") is None:
        return []
    problems = []
    if _section(data, "data").get("eval") is None:
        problems.append(_conflict("early_stopping", "needs `data.eval`", _ADD_EVAL))
    if trainer.get("load_best_model_at_end") is False:
        message = "is false, but `early_stopping` keeps the best checkpoint"
        problems.append(_conflict("trainer.load_best_model_at_end", message, "remove one of the two"))
    for name, need in (("eval_strategy", "evaluations"), ("save_strategy", "checkpoints")):
        if trainer.get(name) == "no":
            message = f"is no, but `early_stopping` needs {need}"
            problems.append(_conflict(f"trainer.{name}", message, "set epoch or steps"))
    return problems


def _check_hub(trainer: Mapping[str, Any]) -> list[Problem]:
    if trainer.get("push_to_hub") is not True or trainer.get("hub_model_id"):
        return []
    message = "needs `hub_model_id`: the Trainer would name the repository `checkpoints`, after its folder"
    return [_conflict("trainer.push_to_hub", message, "set `hub_model_id: you/name`")]


def _check_optimizer(trainer: Mapping[str, Any]) -> list[Problem]:
    """What transformers would refuse only after loading the model."""
    optim, path = trainer.get("optim"), "trainer.optim"
    needs = needs_of(optim)
    problems = []
    if needs.device:
        message = f"is {optim}, which needs {needs.device}; supported are NVIDIA GPUs and CPUs"
        problems.append(Problem("unsupported", message, path=path, hint="set `optim: adamw_torch_fused`"))
    if needs.targets and not trainer.get("optim_target_modules"):
        message = f"is {optim}, which needs `optim_target_modules`: the layers that it projects"
        hint = "add `optim_target_modules: all-linear` under `trainer:`"
        problems.append(_conflict(path, message, hint))
    return problems


def _check_paths(data: Mapping[str, Any], folder: Callable[[str], Path]) -> list[Problem]:
    problems = []
    for place, source in data_sources(data):
        path = source.get("path") if isinstance(source, Mapping) else None
        if not isinstance(path, str):
            continue
        if is_url(path):
            hint = _hub_hint(path) or "use a file, a folder, a glob, package:NAME/inner/path or a hub id"
            problems.append(Problem("unsupported", "URLs are not supported", path=f"{place}.path", hint=hint))
        elif not path:
            problems.append(Problem("wrong-value", "is empty", path=f"{place}.path", hint="name a file"))
        elif not is_hub_id(path, folder(f"{place}.path")):
            message = f"is only for a hub dataset, but `path` is {describe(path)}"
            problems += [
                _conflict(f"{place}.{key}", message, "remove it, or set `path: organisation/name`")
                for key in _HUB_ONLY
                if source.get(key) is not None
            ]
    return problems


def _hub_hint(url: str) -> str | None:
    """How to write `url` if it names a hub dataset, else None."""
    for prefix in ("https://huggingface.co/datasets/", "hf://datasets/", "hf://", "hf:", "hub:"):
        if url.startswith(prefix):
            parts = url.removeprefix(prefix).strip("/").split("/")
            return f"write `path: {parts[0]}/{parts[1]}`" if len(parts) >= 2 else None
    return None


def _check_formats(data: Mapping[str, Any]) -> list[Problem]:
    task = task_of(data)
    problems = []
    for place, form in _formats(data):
        if form not in task.formats:
            readers = [name for name, formats in TASK_FORMATS.items() if form in formats]
            message = f"is {form}, but task {task.name} reads {' or '.join(task.formats)}"
            problems.append(
                _conflict(f"{place}.format", message, f"{form} rows are for `task: {readers[0]}`")
            )
    return problems


def _formats(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted path of the source, format) where a known format is given."""
    for place, source in data_sources(data):
        form = source.get("format") if isinstance(source, Mapping) else None
        if isinstance(form, str) and form in FORMATS:
            yield place, form


def _check_weights(data: Mapping[str, Any]) -> list[Problem]:
    hint = "remove it: evaluation reads each row once"
    return [
        _conflict(f"{place}.weight", "is only for training rows", hint)
        for place, source in data_sources(data)
        if place.startswith("data.eval") and isinstance(source, Mapping) and source.get("weight", 1) != 1
    ]


def _check_columns(data: Mapping[str, Any]) -> list[Problem]:
    """A rename to a field that the format does not have would have no effect."""
    explicit = dict(_formats(data))
    problems = []
    for place, source in data_sources(data):
        columns = source.get("columns") if isinstance(source, Mapping) else None
        forms = [explicit[place]] if place in explicit else task_of(data).formats
        fields = list(dict.fromkeys(f for form in forms for f in FORMATS[form].fields))
        for key, column in columns.items() if isinstance(columns, Mapping) else ():
            if key in fields or column is None:  # null drops the column of that name
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
        if key not in task.data_keys and _given(data, f"data.{key}"):
            readers = " and ".join(other.name for other in TASKS if key in other.data_keys)
            hint = f"remove it: with task {task.name}, {why}"
            problems.append(_conflict(f"data.{key}", f"is only for task {readers}", hint))
    return problems


def _check_task_model(data: Mapping[str, Any]) -> list[Problem]:
    task = task_of(data)
    problems = []
    if not task.gguf and _given(data, "model.gguf_file"):
        message = f"is only for causal language models, not for task {task.name}"
        problems.append(_conflict("model.gguf_file", message, "use a checkpoint in safetensors"))
    if not task.reads_tokens:
        message = f"has no effect with task {task.name}: images are not tokenised"
        problems += [_conflict(path, message, "remove it") for path in _TOKEN_KEYS if _given(data, path)]
    elif task.own_padding and _given(data, "data.pad_to_multiple_of"):
        message = f"has no effect with task {task.name}: {task.own_padding}"
        problems.append(_conflict("data.pad_to_multiple_of", message, "remove it"))
    return problems


def _check_added_tokens(data: Mapping[str, Any]) -> list[Problem]:
    tokens = _section(data, "model").get("add_tokens")
    tokens = tokens if isinstance(tokens, list) else []
    return [
        Problem("wrong-value", f"{describe(token)} is given twice", path=f"model.add_tokens[{index}]")
        for index, token in enumerate(tokens)
        if isinstance(token, str) and token in tokens[:index]
    ]


def _check_loss(data: Mapping[str, Any]) -> list[Problem]:
    wanted = _section(data, "data").get("loss_on")
    if not isinstance(wanted, str):
        return []
    for place, form in _formats(data):
        allowed = task_of(data).learns.get(form, ())
        if allowed and wanted not in allowed:
            message = f"is {wanted}, but {form} rows (`{place}`) allow only {' or '.join(allowed)}"
            return [_conflict("data.loss_on", message, "remove it: each format has its own default")]
    return []


def _check_samples(data: Mapping[str, Any]) -> list[Problem]:
    """What packing, fill-in-the-middle and `overlong` need of the rows."""
    rows = _section(data, "data")
    problems = []
    other = next(((place, form) for place, form in _formats(data) if form != "text"), None)
    if rows.get("packing") is True and rows.get("padding_free") is True:
        message = "excludes `data.packing`, which leaves no padding"
        problems.append(_conflict("data.padding_free", message, _KEEP_ONE))
    refused = task_of(data).overlong
    overlong = str(rows.get("overlong"))
    if overlong in refused:
        rest = " or ".join(value for value in ("truncate", "drop") if value not in refused)
        message = f"is {overlong}, {refused[overlong]}"
        problems.append(_conflict("data.overlong", message, f"set {rest}, or remove it"))
    elif overlong == "split" and other:
        message = f"is split, which needs text rows, but `{other[0]}` has {other[1]} rows"
        problems.append(_conflict("data.overlong", message, "set truncate or drop"))
    if rows.get("fim") is not None and other and "fim" in task_of(data).data_keys:
        message = f"needs text rows, but `{other[0]}` has {other[1]} rows"
        problems.append(_conflict("data.fim", message, "set `format: text`, or remove fim"))
    return problems


def _check_metrics(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    rows = _section(data, "data")
    metrics = rows.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        return []
    task, problems = task_of(data), []
    known = task.metrics
    if rows.get("eval") is None:
        problems.append(_conflict("data.metrics", "needs `data.eval`, the rows to measure on", _ADD_EVAL))
    if trainer.get("prediction_loss_only") is True and metrics != ["perplexity"]:
        message = "is true: of data.metrics, only perplexity could be measured"
        problems.append(_conflict("trainer.prediction_loss_only", message, "remove it"))
    for index, name in enumerate(metrics):
        if not isinstance(name, str) or name in known:
            continue
        near = close_key(name, known)
        owner = next((other for other, names in METRICS.items() if name in names), None)
        hint = "define compute_metrics in the file that `python:` names"
        hint = f"it is a metric of task {owner}" if owner else hint
        hint = f"did you mean {near}?" if near else hint
        expected = f"one of {', '.join(known)}" if known else f"none: task {task.name} has its own metrics"
        message = f"is {describe(name)}, expected {expected}"
        problems.append(Problem("wrong-choice", message, path=f"data.metrics[{index}]", hint=hint))
    return problems


def _check_streaming(data: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    rows = _section(data, "data")
    if rows.get("streaming") is not True or "streaming" not in task_of(data).data_keys:
        return []
    problems = []
    steps = trainer.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        message = "needs `trainer.max_steps`: the length of a stream is unknown"
        hint = "set e.g. `trainer: {max_steps: 1000}`"
        if "num_train_epochs" in trainer:
            hint = "set `max_steps:` in place of `num_train_epochs:`"
        problems.append(_conflict("data.streaming", message, hint))
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if trainer.get(name) == "epoch":
            message = "is epoch, but a stream is one epoch without end"
            problems.append(_conflict(f"trainer.{name}", message, "set steps, or remove it"))
    if isinstance(rows.get("eval"), Mapping):
        message = "cannot be split from streamed rows"
        problems.append(_conflict("data.eval", message, "give a list of sources as in `data.train`"))
    return problems
