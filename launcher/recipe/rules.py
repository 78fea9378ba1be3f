"""Rules between the keys of a recipe: what excludes, needs or owns what; unsupported keys; secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.object_store import UNFIT, protocol_of
from launcher.files.secrets import is_written_secret, looks_secret, names_secret
from launcher.machine.hardware import device_facts
from launcher.models.positions import wrong_rope
from launcher.recipe.data_paths import is_file, is_hub_id, is_url
from launcher.recipe.env import reference_names, split_references
from launcher.recipe.field_tables import METRICS, TASK_FORMATS, TRAINER_OWNED
from launcher.recipe.fields import ADAPTER_KEYS
from launcher.recipe.keys import joins_rows
from launcher.recipe.optimizer_needs import needs_of
from launcher.recipe.reward_rules import check_rewards
from launcher.recipe.schema import unread_keys
from launcher.recipe.slurm_rules import check_slurm
from launcher.recipe.suggestions import close_key, describe
from launcher.recipe.yaml_reader import join
from launcher.tasks import DEFAULT_TASK, FORMATS, TASKS, task_named
from launcher.tasks.sequence_classification import MULTI, REGRESSION
from launcher.tasks.task import Task

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
_RL = "`task: grpo` trains on rewards with trl's GRPOTrainer; RLOOTrainer is in trl alone"
_PAIRS = "use trl.experimental; `task: dpo` trains on the same pairs with trl's DPOTrainer"
_UNSUPPORTED_TASKS = {
    **dict.fromkeys(("ppo", "rloo", "online-dpo"), _RL),
    **dict.fromkeys(("orpo", "cpo", "simpo"), _PAIRS),
}  # fmt: skip
"""Task of other tools -> what trains it."""
_HUB_ONLY = ("name", "revision")
_FILES_ONLY = ("quoting", "header", "sample_by")
_FEW_TASKS = 4
"""So many readers of a key are named where another task refuses it."""
_ADD_EVAL = "add e.g. `eval: {split: 0.02}` under `data:`"
_KEEP_ONE = "keep one of the two"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"""(?<![\w$-])([A-Za-z_]\w*)\+?=((?:"[^"]*"|'[^']*'|[^\s;&|()'"])*)""", re.ASCII)
"""NAME=value in a shell line."""
_SHELL = "set it in the shell that starts the run"
_ENGINE = "`sharding` decides it"
_SIZE = "`hardware.num_nodes` and `hardware.devices_per_node` decide it"
_OWNED_VARIABLES = (
    (r"(LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|NODE_RANK", _SIZE),
    (r"MASTER_(ADDR|PORT)", "it is found automatically; `launch.hostfile` or Slurm names the nodes"),
    (r"CUDA_VISIBLE_DEVICES", f"{_SHELL}; `hardware.devices_per_node` sets how many devices are used"),
    (r"CUDA_DEVICE_ORDER", "the run sets PCI_BUS_ID: devices have nvidia-smi's numbers"),
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
    if re.fullmatch(r"launch\.\w+\.setup", parent) and (is_secret or _sets_secret(plain)):
        message = "sets a secret, which would be written into the job's files"
        hint = "remove it: Slurm's jobs inherit the shell that submits, `secrets` of the section name others"
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
    given = _Given(data, trainer)
    problems = [problem for rule in _RULES for problem in rule(given)]
    problems += [*check_slurm(data), *given.task.check_trainer(trainer), *_check_paths(given, folder)]
    if data.get("task", DEFAULT_TASK) in list(TASK_FORMATS):  # else it is unknown which rows are needed
        problems += [problem for rule in _TASK_RULES for problem in rule(given)]
    return problems


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


class _Given:
    """The parts of a recipe that the rules read; a section of a wrong type counts as empty."""

    def __init__(self, data: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
        self.data, self.trainer, self.task = data, trainer, task_of(data)
        self.model, self.adapter = _section(data, "model"), _section(data, "adapter")
        self.rows = {} if self.task.made_by_hooks else _section(data, "data")
        self.sources = [
            (place, source if isinstance(source, Mapping) else {})
            for place, source in data_sources({"data": self.rows})
        ]
        self.formats = [
            (place, source["format"])
            for place, source in self.sources
            if isinstance(source.get("format"), str) and source["format"] in FORMATS
        ]
        """(dotted path of the source, format) where a known format is given."""

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on; of hooks nobody knows before they run."""
        return self.task.made_by_hooks or self.rows.get("eval") is not None

    def has(self, dotted: str) -> bool:
        """Whether `section.key` has a value other than an empty list and false."""
        section, _, key = dotted.partition(".")
        return _section(self.data, section).get(key) not in (None, [], False)


Problems = Iterator[Problem]


def _conflict(path: str, message: str, hint: str) -> Problem:
    return Problem("conflict", message, path=path, hint=hint)


def _check_device(given: _Given) -> Problems:
    device = _section(given.data, "hardware").get("device")
    if isinstance(device, str):
        try:
            device_facts(device, "hardware.device")
        except RecipeError as error:
            yield from error.problems


def _check_owned(given: _Given) -> Problems:
    for name in given.trainer:
        if name in TRAINER_OWNED:
            hint = TRAINER_OWNED[name]
            yield Problem("owned-key", "not allowed under `trainer:`", path=f"trainer.{name}", hint=hint)


def _check_exclusive(given: _Given) -> Problems:
    trainer, steps = given.trainer, given.trainer.get("max_steps")
    if given.data.get("global_batch_size") is not None and "gradient_accumulation_steps" in trainer:
        message = "excludes `global_batch_size`, which decides the accumulation"
        yield _conflict("trainer.gradient_accumulation_steps", message, _KEEP_ONE)
    if isinstance(steps, int) and steps > 0 and "num_train_epochs" in trainer:
        hint = f"{_KEEP_ONE}; null removes the value of an extended recipe"
        yield _conflict("trainer.num_train_epochs", "excludes `trainer.max_steps`", hint)
    if trainer.get("torch_compile") is True and given.model.get("compile_blocks") is True:
        message = "excludes `trainer.torch_compile`, which compiles the whole model"
        yield _conflict("model.compile_blocks", message, _KEEP_ONE)
    if steps == 0 and not isinstance(steps, bool):
        yield Problem("wrong-value", "is 0, expected at least 1", path="trainer.max_steps")


def _check_model(given: _Given) -> Problems:
    if not isinstance(given.data.get("model"), Mapping):
        return
    if given.task.made_by_hooks and not given.model:
        return
    is_named, is_configured = (given.model.get(key) is not None for key in ("name_or_path", "config"))
    if not (is_named or is_configured):
        message = "`name_or_path` (pretrained weights) or `config` (random weights) is required"
        yield Problem("missing-key", message, path="model", hint="e.g. name_or_path: bigcode/starcoder")
    elif is_named and is_configured:
        message = "excludes `model.name_or_path`: weights are either pretrained or random"
        yield _conflict("model.config", message, _KEEP_ONE)


def _check_rope(given: _Given) -> Problems:
    asked = given.model.get("rope_parameters")
    if not isinstance(asked, Mapping):
        return
    yield from wrong_rope(asked)
    if given.model.get("config") is not None:
        message = "excludes `model.config`, which has `rope_parameters` of its own"
        yield _conflict("model.rope_parameters", message, "write it there")


def _check_kbit_norms(given: _Given) -> Problems:
    if given.model.get("kbit_norms") is not None and given.model.get("quantization") in (None, "none"):
        message = "needs a quantised base: elsewhere `model.dtype` is the dtype of all weights"
        yield _conflict("model.kbit_norms", message, "remove it, or set `model.quantization: nf4` or `int8`")


def _check_adapter(given: _Given) -> Problems:
    """A continued adapter has its own settings; some initialisations need more than a name in peft."""
    adapter = given.adapter
    others = [f"`{key}`" for key in adapter if key not in ADAPTER_KEYS]
    if adapter.get("path") is not None and others:
        message = f"excludes {', '.join(others)}: the adapter in the folder has its own settings"
        hint = "remove `path` to start a new adapter, or the other keys to continue this one"
        yield _conflict("adapter.path", message, hint)
        return
    init, path = adapter.get("init_lora_weights"), "adapter.init_lora_weights"
    if init in ("corda", "eva"):
        effect = "peft would stop" if init == "corda" else "peft would ignore it"
        message = f"is {init}, which needs a pass over the data before training: not supported, and {effect}"
        yield Problem("unsupported", message, path=path, hint="use pissa or olora")
    if str(init).startswith("pissa_niter"):
        message = f"is {init}, which subtracts a random part from the base: loaded again, it is another part"
        yield Problem("unsupported", message, path=path, hint="use pissa, the exact part")
    config = _section(adapter, "loftq_config")
    missing = [key for key in ("loftq_bits", "loftq_iter") if key not in config]
    if init == "loftq" and missing:
        message = f"is loftq, which needs `loftq_config` with {' and '.join(missing)}"
        yield _conflict(path, message, "add `loftq_config: {loftq_bits: 4, loftq_iter: 1}` under `adapter:`")


def _check_some_rows(given: _Given) -> Problems:
    if given.rows.get("train") == [] and not given.task.made_by_hooks:
        yield Problem("wrong-value", "is an empty list, expected at least 1 entry", path="data.train")


def _check_evaluation(given: _Given) -> Problems:
    """What the Trainer would refuse only after loading the model."""
    trainer, has_rows = given.trainer, given.evaluates
    stops = given.data.get("early_stopping") is not None
    # the plan's defaults
    by_rows = "steps" if given.rows.get("streaming") is True else "epoch"
    strategy = trainer.get("eval_strategy", by_rows if has_rows else "no")
    save = trainer.get("save_strategy", strategy if stops else "steps")
    if strategy in ("steps", "epoch") and not has_rows:
        message = f"is {strategy}, which needs `data.eval`"
        yield _conflict("trainer.eval_strategy", message, _ADD_EVAL)
    if stops and "no" in (strategy, save):
        return  # reported by _check_early_stopping
    if trainer.get("load_best_model_at_end") is not True and not stops:
        return
    path = "early_stopping" if stops else "trainer.load_best_model_at_end"
    if not has_rows:
        yield _conflict(path, "needs `data.eval`", _ADD_EVAL)
    if save != "best" and strategy != save:
        message = f"needs equal strategies, but `eval_strategy` is {strategy} and `save_strategy` is {save}"
        hint = f"set `eval_strategy: {save}`" if save != "no" else "set `save_strategy: steps`"
        yield _conflict(path, message, hint)
    elif strategy == save == "steps":
        yield from _check_step_multiple(trainer, path)


def _check_step_multiple(trainer: Mapping[str, Any], path: str) -> Problems:
    """The Trainer's rule where both are set; the plan derives one from the other."""
    every, save = (trainer.get(name) for name in ("eval_steps", "save_steps"))
    if not (isinstance(save, (int, float)) and isinstance(every, (int, float))) or min(every, save) <= 0:
        return
    are_both_shares = (every < 1) == (save < 1)  # of all steps
    times = round(save / every)
    if not are_both_shares or times < 1 or abs(save / every - times) >= 1e-6:
        message = f"needs `save_steps` ({save}) to be a multiple of `eval_steps` ({every})"
        yield _conflict(path, message, f"set `save_steps: {every}`")


def _check_best_metric(given: _Given) -> Problems:
    """The Trainer would refuse an unmeasured metric only at the first evaluation."""
    name = given.trainer.get("metric_for_best_model")
    if not isinstance(name, str) or given.data.get("python") is not None or not given.rows:
        return
    measured, plain = given.rows.get("metrics") or [], name.removeprefix("eval_")
    if not isinstance(measured, list):  # an error of its own
        return
    if plain not in measured and not given.task.reports(plain):
        known = ["loss", *given.task.own_metrics, *map(str, measured)]
        message = f"is {name}, but the measured metrics are {', '.join(known)}"
        hint = f"add {plain} to data.metrics, or " if plain in given.task.metrics else ""
        hint += "use one of these"
        yield _conflict("trainer.metric_for_best_model", message, hint)


def _check_early_stopping(given: _Given) -> Problems:
    """Early stopping compares evaluations and keeps the best checkpoint."""
    if given.data.get("early_stopping") is None:
        return
    if not given.evaluates:
        yield _conflict("early_stopping", "needs `data.eval`", _ADD_EVAL)
    if given.trainer.get("load_best_model_at_end") is False:
        message = "is false, but `early_stopping` keeps the best checkpoint"
        yield _conflict("trainer.load_best_model_at_end", message, "remove one of the two")
    for name, need in (("eval_strategy", "evaluations"), ("save_strategy", "checkpoints")):
        if given.trainer.get(name) == "no":
            message = f"is no, but `early_stopping` needs {need}"
            yield _conflict(f"trainer.{name}", message, "set epoch or steps")


def _check_hub(given: _Given) -> Problems:
    if given.trainer.get("push_to_hub") is True and not given.trainer.get("hub_model_id"):
        message = (
            "needs `hub_model_id`: the Trainer would name the repository `checkpoints`, after its folder"
        )
        yield _conflict("trainer.push_to_hub", message, "set `hub_model_id: you/name`")


def _check_mirror(given: _Given) -> Problems:
    """The URL of the mirror, as far as it can be judged without a network."""
    url, path = _section(given.data, "runtime").get("mirror"), "runtime.mirror"
    if not isinstance(url, str):
        return
    if looks_secret(url):
        yield _secret_url(path)
    elif protocol_of(url) is None or "::" in url:
        message = f"is {describe(url)}, expected the URL of a folder in an object store"
        yield Problem(
            "wrong-value", message, path=path, hint="e.g. s3://bucket/runs/tune or file:///mnt/runs"
        )
    elif protocol_of(url) in UNFIT:
        message = f"is {describe(url)}: checkpoints cannot be kept there"
        yield Problem("unsupported", message, path=path, hint="name a folder of s3://, gs:// or file://")
    elif url.count("{") != url.count("{name}") or url.count("}") != url.count("{name}"):
        message = "has braces, expected only {name}, the name of the run directory"
        yield Problem("wrong-value", message, path=path, hint="remove them")


def _secret_url(path: str) -> Problem:
    """The problem of a URL with a password, which may come from a variable."""
    message = "holds a password or a token, which would be written into the run directory"
    hint = "remove it from the URL; set the store's own variables, such as AWS_SECRET_ACCESS_KEY"
    return Problem(SECRET_CODE, message, path=path, hint=hint)


def _check_optimizer(given: _Given) -> Problems:
    """What transformers would refuse only after loading the model."""
    optim, path = given.trainer.get("optim"), "trainer.optim"
    needs = needs_of(optim)
    if needs.device:
        message = f"is {optim}, which needs {needs.device}; supported are NVIDIA GPUs and CPUs"
        yield Problem("unsupported", message, path=path, hint="set `optim: adamw_torch_fused`")
    if needs.targets and not given.trainer.get("optim_target_modules"):
        message = f"is {optim}, which needs `optim_target_modules`: the layers that it projects"
        yield _conflict(path, message, "add `optim_target_modules: all-linear` under `trainer:`")


def _check_paths(given: _Given, folder: Callable[[str], Path]) -> Problems:
    for place, source in given.sources:
        path, where = source.get("path"), f"{place}.path"
        if not isinstance(path, str):
            continue
        if is_url(path) and (problem := _unread_url(path, where)):
            yield problem
            continue
        if not path:
            yield Problem("wrong-value", "is empty", path=where, hint="name a file")
            continue
        on_hub = is_hub_id(path, folder(where))
        for key in _FILES_ONLY if on_hub else _HUB_ONLY:
            if source.get(key) is not None:
                kind = "files" if on_hub else "a hub dataset"
                message = f"is only for {kind}, but `path` is {describe(path)}"
                yield _conflict(f"{place}.{key}", message, "remove it, or change `path`")
        if source.get("split") is not None and is_file(path):
            message = f"is for a folder, a pattern or a hub dataset, but `path` is {describe(path)}"
            yield _conflict(f"{place}.split", message, "remove it")


def _unread_url(url: str, where: str) -> Problem | None:
    """The problem of a URL that is no file or folder which fsspec reads."""
    if looks_secret(url):
        return _secret_url(where)
    if (hint := _hub_hint(url)) or protocol_of(url) in (None, "hf"):
        hint = (
            hint
            or "use a file, a folder, a glob, s3://bucket/rows.jsonl, package:NAME/inner/path or a hub id"
        )
        return Problem("unsupported", "URLs of this kind are not supported", path=where, hint=hint)
    return None


def _hub_hint(url: str) -> str | None:
    """How to write `url` if it names a hub dataset, else None."""
    for prefix in ("https://huggingface.co/datasets/", "hf://datasets/", "hf://", "hf:", "hub:"):
        if url.startswith(prefix):
            parts = url.removeprefix(prefix).strip("/").split("/")
            return f"write `path: {parts[0]}/{parts[1]}`" if len(parts) >= 2 else None
    return None


_RULES = (
    _check_device, _check_owned, _check_exclusive, _check_model, _check_rope, _check_kbit_norms,
    _check_adapter, _check_some_rows, _check_evaluation, _check_early_stopping, _check_hub, _check_mirror,
    _check_optimizer, _check_best_metric,
)  # fmt: skip


def _check_formats(given: _Given) -> Problems:
    for place, form in given.formats:
        if form not in given.task.formats:
            reader = next(name for name, formats in TASK_FORMATS.items() if form in formats)
            message = f"is {form}, but task {given.task.name} reads {' or '.join(given.task.formats)}"
            yield _conflict(f"{place}.format", message, f"{form} rows are for `task: {reader}`")


def _check_weights(given: _Given) -> Problems:
    for place, source in given.sources:
        if place.startswith("data.eval") and source.get("weight", 1) != 1:
            hint = "remove it: evaluation reads each row once"
            yield _conflict(f"{place}.weight", "is only for training rows", hint)


def _check_columns(given: _Given) -> Problems:
    """A rename to a field that the format does not have would have no effect."""
    explicit = dict(given.formats)
    for place, source in given.sources:
        forms = [explicit[place]] if place in explicit else given.task.formats
        fields = list(dict.fromkeys(f for form in forms for f in FORMATS[form].fields))
        for key, column in _section(source, "columns").items():
            if key in fields or column is None:  # null drops the column of that name
                continue
            near = close_key(str(key), fields)
            hint = f"did you mean `{near}`?" if near else "write `field of the format: column of the file`"
            message = f"unknown field, expected one of {', '.join(fields)}"
            yield Problem("unknown-key", message, path=f"{place}.columns.{key}", hint=hint)


def _check_read(given: _Given) -> Problems:
    """Keys that the task does not read."""
    if given.task.made_by_hooks:  # of whole sections
        return
    for path, key in unread_keys(given.task):
        if given.has(path):
            readers = [task.name for task in TASKS if key.is_read_by(task)]
            only = f": only for task {', '.join(readers)}" if len(readers) <= _FEW_TASKS else ""
            yield _conflict(
                path, f"has no effect with task {given.task.name}: {key.unread}", f"remove it{only}"
            )


def _check_padding(given: _Given) -> Problems:
    task, path = given.task, "data.pad_to_multiple_of"
    if not task.pads_as_asked and task.own_padding and given.has(path):
        yield _conflict(path, f"has no effect with task {task.name}: {task.own_padding}", "remove it")
    if given.has(path) and given.has("trainer.pad_to_multiple_of"):
        yield _conflict("trainer.pad_to_multiple_of", f"is `{path}`", "remove one of them")


def _check_own_section(given: _Given) -> Problems:
    """The section of the recipe that only its task reads."""
    for other in TASKS:
        if (
            other.section
            and other.section != given.task.section
            and given.data.get(other.section) is not None
        ):
            message = f"is only for task {other.name}"
            yield _conflict(other.section, message, f"remove it, or write `task: {other.name}`")
    yield from given.task.check_section(_section(given.data, given.task.section or ""), given.data)


def _check_added_tokens(given: _Given) -> Problems:
    tokens = given.model.get("add_tokens")
    tokens = tokens if isinstance(tokens, list) else []
    for index, token in enumerate(tokens):
        if isinstance(token, str) and token in tokens[:index]:
            message = f"{describe(token)} is given twice"
            yield Problem("wrong-value", message, path=f"model.add_tokens[{index}]")


def _check_loss(given: _Given) -> Problems:
    wanted = given.rows.get("loss_on")
    for place, form in given.formats if isinstance(wanted, str) else ():
        allowed = given.task.learns.get(form)
        if allowed == ():
            message = f"is {wanted}, but {form} rows (`{place}`) have labels of their own"
            yield _conflict("data.loss_on", message, "remove it")
            return
        if allowed and wanted not in allowed:
            message = f"is {wanted}, but {form} rows (`{place}`) allow only {' or '.join(allowed)}"
            yield _conflict("data.loss_on", message, "remove it: each format has its own default")
            return


def _check_samples(given: _Given) -> Problems:
    """What packing, fill-in-the-middle and `overlong` need of the rows."""
    rows, task = given.rows, given.task
    if rows.get("packing") is True and rows.get("padding_free") is True:
        message = "excludes `data.packing`, which leaves no padding"
        yield _conflict("data.padding_free", message, _KEEP_ONE)
    other = next((f"`{place}` has {form} rows" for place, form in given.formats if form != "text"), None)
    overlong = str(rows.get("overlong"))
    if overlong in task.overlong:
        rest = " or ".join(value for value in ("truncate", "drop") if value not in task.overlong)
        message = f"is {overlong}, {task.overlong[overlong]}"
        yield _conflict("data.overlong", message, f"set {rest}, or remove it")
    elif overlong == "split" and other:
        message = f"is split, which needs text rows, but {other}"
        yield _conflict("data.overlong", message, "set truncate or drop")
    if rows.get("fim") is not None and other and joins_rows(task):
        message = f"needs text rows, but {other}"
        yield _conflict("data.fim", message, "set `format: text`, or remove fim")


def _check_metrics(given: _Given) -> Problems:
    metrics, task = given.rows.get("metrics"), given.task
    if not isinstance(metrics, list) or not metrics:
        return
    if given.rows.get("eval") is None:
        yield _conflict("data.metrics", "needs `data.eval`, the rows to measure on", _ADD_EVAL)
    if given.trainer.get("prediction_loss_only") is True and metrics != ["perplexity"]:
        message = "is true: of data.metrics, only perplexity could be measured"
        yield _conflict("trainer.prediction_loss_only", message, "remove it")
    problem = str(given.rows.get("problem_type") or next(iter(task.problem_metrics), ""))
    known = task.problem_metrics.get(problem, task.metrics)
    expected = f"one of {', '.join(known)}" if known else f"none: task {task.name} has its own metrics"
    for index, name in enumerate(metrics):
        if not isinstance(name, str) or name in known:
            continue
        hint = "define compute_metrics in the file that `python:` names"
        if kind := next((kind for kind, names in task.problem_metrics.items() if name in names), None):
            hint = f"it is a metric of `data.problem_type: {kind}`"
        elif near := close_key(name, known):
            hint = f"did you mean {near}?"
        elif owner := next((other for other, names in METRICS.items() if name in names), None):
            hint = f"it is a metric of task {owner}"
        message = f"is {describe(name)}, expected {expected}"
        yield Problem("wrong-choice", message, path=f"data.metrics[{index}]", hint=hint)


def _check_problem_type(given: _Given) -> Problems:
    """Label smoothing spreads the loss over the other classes of a row."""
    problem = given.rows.get("problem_type")
    if problem in (REGRESSION, MULTI) and given.trainer.get("label_smoothing_factor") not in (None, 0):
        message = f"smooths the one class of a row, and `data.problem_type` is {problem}"
        yield _conflict("trainer.label_smoothing_factor", message, "remove it")


def _check_streaming(given: _Given) -> Problems:
    if given.rows.get("streaming") is not True or not joins_rows(given.task):
        return
    steps = given.trainer.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        message = "needs `trainer.max_steps`: the length of a stream is unknown"
        hint = "set e.g. `trainer: {max_steps: 1000}`"
        if "num_train_epochs" in given.trainer:
            hint = "set `max_steps:` in place of `num_train_epochs:`"
        yield _conflict("data.streaming", message, hint)
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if given.trainer.get(name) == "epoch":
            message = "is epoch, but a stream is one epoch without end"
            yield _conflict(f"trainer.{name}", message, "set steps, or remove it")
    if isinstance(given.rows.get("eval"), Mapping):
        message = "cannot be split from streamed rows"
        yield _conflict("data.eval", message, "give a list of sources as in `data.train`")


def _check_rollouts(given: _Given) -> Problems:
    yield from check_rewards(given.data, given.trainer, given.task, given.rows.get("max_length"))
    if given.task.rolls_out and given.rows.get("special_tokens_in_text") == "escape":
        message = (
            "is escape, but trl tokenises the prompts in the steps, where special tokens stay what they are"
        )
        yield _conflict("data.special_tokens_in_text", message, "set refuse or keep")


_TASK_RULES = (
    _check_formats, _check_columns, _check_weights, _check_read, _check_padding, _check_own_section,
    _check_added_tokens, _check_loss, _check_samples, _check_metrics, _check_problem_type, _check_streaming,
    _check_rollouts,
)  # fmt: skip
