"""Writes what the installed DeepSpeed's config knows: `python -m launcher.train.ds_vocabulary [FILE]`.

Found by running the real readers: DeepSpeedConfig on a dict that notes every key it is asked for, and on a
section with a key that no model has. What is read elsewhere is written down here by hand (OUTSIDE, TYPES).
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

    from launcher.train.ds_blocks import filled_autos, optimizers, schedulers

    logger.setLevel(logging.CRITICAL)
    removed, removed_zero = config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS
    keys = {key: section_row((key,), value) for key, value in asked(()).items() if key not in removed}
    stages = {**config.get_pipeline_config({}), "use_reentrant": True}
    keys["pipeline"] = {
        "types": ["dict"], "strict": False, "keys": {key: {"types": ["any"]} for key in stages},
    }  # fmt: skip
    for key, row in OUTSIDE.items():
        keys.setdefault(key, row)
    keys.setdefault("bfloat16", keys["bf16"])
    return {
        "version": deepspeed.__version__,
        "keys": dict(sorted(keys.items())),
        "removed": {**removed, **{f"zero_optimization.{key}": text for key, text in removed_zero.items()}},
        "optimizers": optimizers(),
        "schedulers": schedulers(),
        "auto": filled_autos(),
    }


def text(table: Mapping[str, Any]) -> str:
    """The table as its file has it."""
    return json.dumps(table, indent=1) + "\n"


def main() -> None:
    """Write the table to the file that is named, else to stdout."""
    # Only names are read; no device is needed, nor wanted.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = text(vocabulary())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(found, encoding="utf-8")
    else:
        sys.stdout.write(found)


if __name__ == "__main__":
    main()
