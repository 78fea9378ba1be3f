"""The keys of the installed DeepSpeed's config, for `lint`.

Found by running the real readers: DeepSpeedConfig on a dict that notes every key it is asked for, and on a
section with a key that no model has. What is read elsewhere is written down here by hand (OUTSIDE, TYPES).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import enum
import inspect
import logging
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.knowledge.lint import keys as shipped

PROBE = "__probe__"
MISSING = object()
DEEPEST = 4
Row = dict[str, Any]

# Read elsewhere than in DeepSpeedConfig (deepspeed/__init__.py, zero/config.py, accelerate).
OUTSIDE: dict[str, Row] = {
    "sequence_parallel_size": {"types": ["int"]},
    "data_parallel_size": {"types": ["int"]},
    "allgather_size": {"types": ["int"]},
    "msamp": {"types": ["any"]},
}
# Sections that DeepSpeed copies whole.
OPAQUE: dict[str, Row] = {
    "optimizer": {
        "type": {"types": ["str"]},
        "params": {"types": ["dict"]},
        "legacy_fusion": {"types": ["bool"]},
    },
    "scheduler": {"type": {"types": ["str"]}, "params": {"types": ["dict"]}},
}
_COUNT: Row = {"types": ["int", "null"], "above": 0}
_COMM: Row = {"types": ["str", "null"], "choices": ["fp16", "bf16", "fp32"], "any_case": True}
_TEXT: Row = {"types": ["str", "null"]}
# Keys whose default does not say what they take.
TYPES: dict[str, Row] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "steps_per_print": {"types": ["int", "null"]},
    "communication_data_type": _COMM,
    "seq_parallel_communication_data_type": _COMM,
    "gradient_allreduce_op": {"types": ["str"], "choices": ["mean", "sum"]},
    "log_level": _TEXT,
    "gradient_clipping": {"types": ["float"]},
    "vocabulary_size": {"types": ["any"]},
    "datastates_ckpt": {"types": ["any"]},
    "activation_checkpointing.number_checkpoints": {"types": ["int", "null"]},
    "data_types.grad_accum_dtype": _TEXT,
    "data_types.param_dtype": _TEXT,
    "data_types.buffer_dtype": _TEXT,
    "data_types.keep_in_fp32_modules": {"types": ["str", "list"]},
    "torch_autocast.dtype": {"types": ["str"]},
    "torch_autocast.lower_precision_safe_modules": {"types": ["list"]},
    "flops_profiler.output_file": _TEXT,
    "checkpoint.tag_validation": {"types": ["str"], "choices": ["Warn", "Ignore", "Fail"], "any_case": True},
    "checkpoint.writer.type": {"types": ["str"], "choices": ["mock", "python", "fast"], "any_case": True},
    "checkpoint.writer.data_parallel": {
        "types": ["str", "null"], "choices": ["replica", "socket", "machine"], "any_case": True,
    },
}  # fmt: skip
# Sections whose deeper keys are named only in the constants of the data pipeline.
OPEN_BELOW = {
    "data_efficiency.data_routing.random_ltd": "RANDOM_LTD_",
    "data_efficiency.data_sampling.curriculum_learning": "CURRICULUM_LEARNING_",
    "data_efficiency.data_sampling.dynamic_batching": "DYNAMIC_BATCHING_",
}
_BOUNDS = {"gt": "above", "ge": "at_least", "lt": "below", "le": "at_most"}
_PLAIN = {"Path": "str", "dtype": "any", "object": "any", "tuple": "any", "Any": "any", "NoneType": "null"}
# Taken out of `optimizer.params` by the engine before Adam is built.
_POPPED = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
_NOT_SET = ("self", "params", "model_params", "optimizer", "args", "kwargs")


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


class Recorder(dict[str, Any]):
    """A dict that notes each key asked of it, and the default that was given."""

    def __init__(self, data: Mapping[str, Any] | None = None, log: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        self.log: dict[str, Any] = {} if log is None else log

    def note(self, key: Any, default: Any = MISSING) -> None:
        if isinstance(key, str) and self.log.get(key, MISSING) is MISSING:
            self.log[key] = default

    def __getitem__(self, key: str) -> Any:
        self.note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.note(key, default)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.note(key, *default)
        return super().pop(key, *default)

    def __contains__(self, key: object) -> bool:
        self.note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return _Keys(self)

    def __copy__(self) -> Recorder:
        return Recorder(dict(self), self.log)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder({key: copy.deepcopy(value, memo) for key, value in self.items()}, self.log)


class _Keys(list[str]):
    """`in d.keys()` is a question, too."""

    def __init__(self, owner: Recorder) -> None:
        super().__init__(dict.keys(owner))
        self.owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self.owner


def _parse(path: tuple[str, ...], section: Recorder) -> None:
    """Run DeepSpeed's reader on a config that has this section at `path`."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Recorder({"train_batch_size": 1})
    node = config
    for key in path[:-1]:
        inner = Recorder({"enabled": True})
        dict.__setitem__(node, key, inner)
        node = inner
    if path:
        dict.__setitem__(node, path[-1], section)
    else:
        config.log = section.log
    DeepSpeedConfig(config)


def asked(path: tuple[str, ...]) -> dict[str, Any]:
    """Key -> default of what is asked of the section at `path`, whether or not the reading survives."""
    log: dict[str, Any] = {}
    fills: tuple[dict[str, Any], ...] = ({}, {"enabled": True}) if path else ({},)
    for filled in fills:
        with contextlib.suppress(Exception):
            _parse(path, Recorder(filled, log))
    return {key: default for key, default in log.items() if key != PROBE}


def refusing_model(path: tuple[str, ...]) -> Any:
    """The model that reads the section at `path` and refuses unknown keys; None when nothing does."""
    from deepspeed.runtime import config_utils

    seen: list[type] = []
    original = config_utils.DeepSpeedConfigModel.__init__

    def spy(self: Any, strict: bool = False, **data: Any) -> None:
        if PROBE in data:
            seen.append(type(self))
        original(self, strict=strict, **data)

    config_utils.DeepSpeedConfigModel.__init__ = spy
    try:
        with contextlib.suppress(Exception):
            _parse(path, Recorder({PROBE: 1}))
    finally:
        config_utils.DeepSpeedConfigModel.__init__ = original
    return seen[0] if seen else None


def _leaves(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type."""
    if typing.get_origin(annotation) is typing.Union or isinstance(annotation, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _leaves(part)
    else:
        yield annotation


def annotated(annotation: Any) -> Row:
    """`types` and `choices` of a model's field, and the model behind it."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    row: Row = {"types": []}
    for leaf in _leaves(annotation):
        origin = typing.get_origin(leaf)
        if origin is typing.Literal or (inspect.isclass(leaf) and issubclass(leaf, enum.Enum)):
            options = typing.get_args(leaf) if origin is typing.Literal else [m.value for m in leaf]
            row["choices"] = sorted(map(plain, options), key=str)
            row["types"].append(type(row["choices"][0]).__name__)
        elif inspect.isclass(leaf) and issubclass(leaf, DeepSpeedConfigModel):
            row |= {"types": [*row["types"], "dict"], "strict": True, "keys": model_rows(leaf)}
        else:
            name = getattr(origin or leaf, "__name__", str(leaf))
            row["types"].append(_PLAIN.get(name, name))
    return row


def model_rows(model: Any) -> dict[str, Row]:
    """Key -> row of a model: its alias where it has one, with the field's own name beside it."""
    rows: dict[str, Row] = {}
    for name, field in model.model_fields.items():
        row = annotated(field.annotation)
        for bound in field.metadata:
            row |= {_BOUNDS[k]: plain(getattr(bound, k)) for k in _BOUNDS if hasattr(bound, k)}
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            row["deprecated"] = extra.get("new_param", "")
        if field.alias and field.alias != name:
            row["other_name"] = name
        rows[field.alias or name] = row
    return rows


def section_row(path: tuple[str, ...], default: Any) -> Row:
    """The row of a key that DeepSpeedConfig asks for, with all below it."""
    dotted = ".".join(path)
    if dotted in TYPES:
        return dict(TYPES[dotted])
    if dotted in OPAQUE:
        return {"types": ["dict"], "strict": False, "keys": OPAQUE[dotted]}
    model = refusing_model(path)
    if model is not None:
        return {"types": ["dict"], "strict": True, "keys": model_rows(model)}
    reads = asked(path) if len(path) < DEEPEST else {}
    if reads:
        keys = {key: section_row((*path, key), value) for key, value in sorted(reads.items())}
        row: Row = {"types": ["dict"], "strict": False, "keys": keys}
        if dotted in OPEN_BELOW:
            row["open_below"] = _constants(OPEN_BELOW[dotted])
        return row
    kind = type(default).__name__ if default is not MISSING else "any"
    kind = "any" if kind not in ("bool", "int", "float", "str", "list", "dict") or default == "auto" else kind
    return {"types": [kind]}


def _constants(prefix: str) -> list[str]:
    from deepspeed.runtime.data_pipeline import constants

    named = vars(constants).items()
    return sorted(
        {v for k, v in named if k.startswith(prefix) and isinstance(v, str) and not k.endswith("_DEFAULT")}
    )


def vocabulary() -> dict[str, Any]:
    """The whole table. Raises ImportError without DeepSpeed."""
    import deepspeed
    from deepspeed.runtime import config
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)
    removed, removed_zero = config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS
    keys = {key: section_row((key,), value) for key, value in asked(()).items() if key not in removed}
    stages = {key: {"types": ["any"]} for key in [*config.get_pipeline_config({}), "use_reentrant"]}
    keys["pipeline"] = {"types": ["dict"], "strict": False, "keys": stages}
    keys = {"bfloat16": keys["bf16"], **OUTSIDE, **keys}
    return {
        "version": deepspeed.__version__,
        "keys": dict(sorted(keys.items())),
        "removed": {**removed, **{f"zero_optimization.{key}": text for key, text in removed_zero.items()}},
        "optimizers": optimizers(),
        # Rows of parameters are written there, and a test asks the classes about them.
        **{name: shipped.vocabulary()[name] for name in ("optimizer_params", "scheduler_params")},
        "schedulers": schedulers(),
        "auto": filled_autos(),
    }


def parameters(cls: Any) -> dict[str, Any]:
    """Name -> default of what a class is built with, in JSON's values; a required one has no default."""
    found: dict[str, Any] = {}
    for base in (cls, *cls.__mro__[1:2]):
        given = inspect.signature(base.__init__).parameters.values()
        for parameter in given:
            if parameter.name not in _NOT_SET and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                found.setdefault(parameter.name, parameter.default is parameter.empty)
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in given):
            break
    return found


def _names(*classes: Any, more: tuple[str, ...] = ()) -> list[str]:
    return sorted({name for cls in classes for name in parameters(cls)} | set(more))


def optimizers() -> dict[str, Any]:
    """Type -> the parameters on the device (`device`) and with offload (`offload`); `any_case` by name."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    # The engine passes adamw_mode to the CPU's Adam itself.
    offload = [name for name in _names(DeepSpeedCPUAdam, more=_POPPED) if name != "adamw_mode"]
    adam = {
        "device": _names(FusedAdam, more=_POPPED),
        "offload": offload,
        "torch": _names(torch.optim.AdamW, more=(*_POPPED, "foreach")),
    }
    table: dict[str, Any] = {
        "adam": adam,
        "adamw": adam,
        "adagrad": {"device": _names(torch.optim.Adagrad), "offload": _names(DeepSpeedCPUAdagrad)},
        "lamb": {"device": _names(FusedLamb), "offload": _names(FusedLamb)},
        "lion": {"device": _names(FusedLion), "offload": _names(DeepSpeedCPULion)},
        "muon": {"device": sorted({*halves, *_POPPED, "muon_lr", "adam_lr", "per_head_muon", "foreach"})},
        **{name: {} for name in ("muadam", "muadamw", "musgd")},
    }
    unknown = set(table) ^ set(DEEPSPEED_OPTIMIZERS)
    if unknown:
        raise RuntimeError(f"DeepSpeed's own optimizers changed: {sorted(unknown)}")
    for row in table.values():
        row["any_case"] = True
    for name in dir(torch.optim):
        cls = getattr(torch.optim, name)
        real = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
        if real and name.lower() not in table:
            table[name] = {"device": _names(cls), "any_case": False}
    return table


def schedulers() -> dict[str, Any]:
    """Type -> its parameters, True for each that has no default."""
    import torch
    from deepspeed.runtime import lr_schedules

    module = torch.optim.lr_scheduler
    classes = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    for name in dir(module):
        cls = getattr(module, name)
        if inspect.isclass(cls) and issubclass(cls, module.LRScheduler) and not name.startswith("_"):
            classes.setdefault(name, cls)
    classes.pop("LRScheduler", None)
    return {name: parameters(cls) for name, cls in classes.items()}


def _first_words(source: str, calls: set[str]) -> list[str]:
    """First argument of each call of these methods, where it is written out."""
    tree = ast.parse(textwrap.dedent(source))
    return [
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) in calls
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]


def filled_autos() -> list[str]:
    """Dotted keys whose "auto" the Trainer or accelerate's plugin fills under the Trainer."""
    from accelerate.utils.dataclasses import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    fills = {"fill_match", "fill_only"}
    found = set(_first_words(inspect.getsource(HfTrainerDeepSpeedConfig), fills))
    found |= set(_first_words(inspect.getsource(DeepSpeedPlugin.set_mixed_precision), fills))
    tree = ast.parse(textwrap.dedent(inspect.getsource(DeepSpeedPlugin.__post_init__)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if getattr(node.targets[0], "id", "") == "plugin_to_config_mapping":
            found |= {str(word.value) for word in node.value.values if isinstance(word, ast.Constant)}
    # accelerate overwrites it, whatever it says.
    return sorted(found | {"steps_per_print"})
