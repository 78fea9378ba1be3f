"""Checks `trainer:` and `adapter:` by name, type and choice, without importing the libraries."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.recipe.env import has_reference, is_reference, resolve_env
from launcher.recipe.suggestions import (
    ADAPTER_ALIASES,
    TRAINER_ALIASES,
    TRAINER_REMOVED,
    choice_hint,
    close_key,
    describe,
)
from launcher.recipe.yaml_marks import parse_scalar

TABLES = {"transformers": "training_arguments.json", "peft": "lora_config.json"}

CHECKPOINTING_KWARGS = (
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
    "context_fn",
    "every_n_layers",
    "offload",
)
_PHRASES = {
    "none": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "list[str]": "a list of texts",
    "list[int]": "a list of whole numbers",
    "dict": "a mapping",
}
# (field, smallest value, whether that value itself is allowed)
_LIMITS: dict[str, tuple[float, bool]] = {
    "trainer.per_device_train_batch_size": (1, True),
    "trainer.per_device_eval_batch_size": (1, True),
    "trainer.gradient_accumulation_steps": (1, True),
    "trainer.num_train_epochs": (0, False),
    "trainer.learning_rate": (0, True),
    "trainer.warmup_steps": (0, True),
    "trainer.logging_steps": (0, False),
    "trainer.eval_steps": (0, False),
    "trainer.save_steps": (0, False),
    "trainer.dataloader_num_workers": (0, True),
    "adapter.r": (1, True),
    "adapter.lora_alpha": (1, True),
    "adapter.lora_dropout": (0, True),
}
# LoraConfig fields that the launcher decides itself.
_ADAPTER_OWNED = {
    "task_type": "`task` decides it",
    "peft_type": "`adapter.type` decides it",
    "base_model_name_or_path": "`model.name_or_path` decides it",
    "inference_mode": "training needs false",
    "auto_mapping": "peft fills it in",
    "peft_version": "peft fills it in",
}


def installed_package(name: str) -> tuple[str, Path] | None:
    """(version, folder) of an installed package, found without importing it; None when it is absent."""
    for entry in sys.path:
        folder = Path(entry or ".") / name
        if not (folder / "__init__.py").is_file():
            continue
        for item in os.listdir(folder.parent):  # noqa: PTH208 - a Path for each of many is slow
            if item.startswith(f"{name}-") and item.endswith(".dist-info"):
                return item.removeprefix(f"{name}-").removesuffix(".dist-info"), folder
    # an editable install has its metadata elsewhere
    from importlib import metadata, util

    spec = util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        return metadata.version(name), Path(next(iter(spec.submodule_search_locations)))
    except metadata.PackageNotFoundError:
        return None


@cache
def field_table(package: str) -> dict[str, Any]:
    """Table of `transformers` or `peft` (see `source_tables`): installed version, else tested one."""
    shipped: dict[str, Any] = json.loads(shipped_table(package).read_text(encoding="utf-8"))
    found = installed_package(package)
    if found is None or found[0] == shipped["version"]:
        return shipped
    from launcher.recipe import source_tables

    read = (
        source_tables.training_arguments_table
        if package == "transformers"
        else source_tables.lora_config_table
    )
    try:
        return read(found[1], found[0])
    except (OSError, SyntaxError, KeyError, ValueError):
        return shipped


def shipped_table(package: str) -> Path:
    """File of the table that was generated from the tested version."""
    return Path(__file__).parent / "tables" / TABLES[package]


def trainer_fields() -> dict[str, Any]:
    """TrainingArguments fields: name -> {types, default, choices?, renamed_to?}."""
    fields: dict[str, Any] = field_table("transformers")["fields"]
    return fields


def adapter_fields() -> dict[str, Any]:
    """LoraConfig fields that a recipe may give: name -> {types, default, choices?}."""
    fields: dict[str, Any] = field_table("peft")["fields"]
    return {name: entry for name, entry in fields.items() if name not in _ADAPTER_OWNED}


def resolve_trainer(trainer: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """`trainer` with its `${ENV:...}` resolved; a value that is one reference gets the type of its field.

    Raises RecipeError when a variable is missing.
    """
    fields = trainer_fields()
    return {
        name: _resolve(value, fields.get(name, {}).get("types", ()), environ)
        for name, value in trainer.items()
    }


def _resolve(value: Any, types: Iterable[str], environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        text = resolve_env(value, environ)
        parsed = parse_scalar(text) if is_reference(value) and set(types) - {"str", "none"} else text
        return parsed if parsed is not None else text
    if isinstance(value, Mapping):
        return {key: _resolve(item, ("any",), environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, (), environ) for item in value]
    return value


def check_trainer(trainer: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> list[Problem]:
    """Problems of single `trainer:` fields, without file and line; absent variables are left out."""
    fields = trainer_fields()
    problems = []
    for name, value in trainer.items():
        path = f"trainer.{name}"
        entry = fields.get(name)
        if entry is None:
            problems.append(_unknown_trainer(name, fields))
        elif "renamed_to" in entry:
            new = entry["renamed_to"]
            message = f"deprecated in transformers {field_table('transformers')['version']}"
            problems.append(Problem("renamed-key", message, path=path, hint=f"write `{new}`"))
        else:
            try:
                resolved = _resolve(value, entry["types"], environ or {})
            except RecipeError:
                continue
            problems += _check_value(path, resolved, entry, shown=value)
    problems += _check_checkpointing_kwargs(trainer.get("activation_checkpointing_kwargs"))
    return problems


def check_adapter(adapter: Mapping[str, Any]) -> list[Problem]:
    """Problems of single `adapter:` fields (not `type` and `path`), without file and line."""
    fields = adapter_fields()
    problems = []
    for name, value in adapter.items():
        path = f"adapter.{name}"
        if name in ("type", "path"):
            continue
        if name in _ADAPTER_OWNED:
            problems.append(Problem("owned-key", "not allowed here", path=path, hint=_ADAPTER_OWNED[name]))
        elif name not in fields:
            version = field_table("peft")["version"]
            near = ADAPTER_ALIASES.get(name) or close_key(name, [*fields, "type", "path"])
            hint = f"did you mean `{near}`?" if near else _belongs_to_trainer(name)
            problems.append(
                Problem(
                    "unknown-key",
                    f"unknown key, expected a LoraConfig field of peft {version}",
                    path=path,
                    hint=hint,
                )
            )
        else:
            problems += _check_value(path, value, fields[name], shown=value)
    if isinstance(adapter.get("lora_dropout"), (int, float)) and adapter["lora_dropout"] > 1:
        message = f"is {describe(adapter['lora_dropout'])}, expected a number from 0 to 1"
        problems.append(Problem("wrong-value", message, path="adapter.lora_dropout"))
    return problems


def _belongs_to_trainer(name: str) -> str | None:
    return f"`{name}` belongs under `trainer:`" if name in trainer_fields() else None


def _unknown_trainer(name: str, fields: Mapping[str, Any]) -> Problem:
    version = field_table("transformers")["version"]
    path = f"trainer.{name}"
    if name in TRAINER_REMOVED:
        return Problem(
            "renamed-key",
            f"removed in transformers {version}",
            path=path,
            hint=TRAINER_REMOVED[name],
        )
    message = f"unknown key, expected a TrainingArguments field of transformers {version}"
    usable = [key for key, entry in fields.items() if "renamed_to" not in entry]
    near = TRAINER_ALIASES.get(name) or close_key(name, usable)
    if near:
        return Problem("unknown-key", message, path=path, hint=f"did you mean `{near}`?")
    old = close_key(name, TRAINER_REMOVED)
    if old:
        return Problem("unknown-key", message, path=path, hint=TRAINER_REMOVED[old])
    hint = f"`{name}` belongs under `adapter:`" if name in adapter_fields() else None
    return Problem("unknown-key", message, path=path, hint=hint)


def _check_value(path: str, value: Any, entry: Mapping[str, Any], *, shown: Any) -> list[Problem]:
    types, choices = entry["types"], entry.get("choices", [])
    kinds = [kind for kind in types if not kind.startswith("object:")]
    if not any(_admits(kind, value) for kind in kinds):
        expected = _expected(kinds, choices)
        if not [kind for kind in kinds if kind != "none"]:
            objects = ", ".join(kind.removeprefix("object:") for kind in types if kind.startswith("object:"))
            expected = f"a Python object ({objects}), which a recipe cannot hold"
        hint = None if has_reference(shown) else _quote_hint(value, kinds)
        return [Problem("wrong-type", f"is {describe(shown)}, expected {expected}", path=path, hint=hint)]
    for item in value if isinstance(value, list) else [value]:
        if choices and isinstance(item, str) and not _is_choice(item, choices):
            hint = choice_hint(item, choices)
            text = describe(shown if isinstance(shown, str) else item)
            return [Problem("wrong-choice", f"is {text}, expected {_one_of(choices)}", path=path, hint=hint)]
    limit = _LIMITS.get(path)
    if (
        limit
        and isinstance(value, (int, float))
        and (value < limit[0] or (value == limit[0] and not limit[1]))
    ):
        word = "at least" if limit[1] else "more than"
        return [Problem("wrong-value", f"is {describe(shown)}, expected {word} {limit[0]:g}", path=path)]
    return []


def _admits(kind: str, value: Any) -> bool:
    if kind == "any":
        return True
    if kind == "none":
        return value is None
    if kind in ("int", "float"):
        return isinstance(value, (int, float) if kind == "float" else int) and not isinstance(value, bool)
    if kind.startswith("list"):
        inner = kind[5:-1]
        return isinstance(value, list) and (not inner or all(_admits(inner, item) for item in value))
    plain = {"bool": bool, "str": str, "dict": dict}
    return kind in plain and isinstance(value, plain[kind])


def _is_choice(item: str, choices: Iterable[str]) -> bool:
    # `pissa_niter_[number of iters]` stands for a whole number after the last underscore
    for choice in choices:
        prefix, bracket, _ = choice.partition("[")
        if item == choice or (bracket and item.startswith(prefix) and item[len(prefix) :].isdigit()):
            return True
    return False


def _expected(kinds: list[str], choices: list[str]) -> str:
    words = [_PHRASES.get(kind, kind) for kind in kinds if kind != "none"]
    if choices:
        words = [_one_of(choices) if word == "text" else word for word in words]
    return " or ".join(words)


def _one_of(choices: Iterable[str]) -> str:
    return "one of " + ", ".join(choices)


def _quote_hint(value: Any, kinds: list[str]) -> str | None:
    """How to write a value that has the right look and the wrong type."""
    if isinstance(value, str):
        parsed = parse_scalar(value)
        if (
            not isinstance(parsed, str)
            and parsed is not None
            and any(_admits(kind, parsed) for kind in kinds)
        ):
            return f"write {value} without quotes"
    elif isinstance(value, (int, float)) and "str" in kinds and not isinstance(value, bool):
        return "put it in quotes"
    elif isinstance(value, float) and "int" in kinds and value.is_integer():
        return f"write {int(value)}"
    return None


def _check_checkpointing_kwargs(value: Any) -> list[Problem]:
    if not isinstance(value, Mapping):
        return []
    problems = []
    for key in value:
        if key not in CHECKPOINTING_KWARGS:
            near = close_key(key, CHECKPOINTING_KWARGS)
            problems.append(
                Problem(
                    "unknown-key",
                    f"unknown key, expected {_one_of(CHECKPOINTING_KWARGS)}",
                    path=f"trainer.activation_checkpointing_kwargs.{key}",
                    hint=f"did you mean `{near}`?" if near else None,
                )
            )
    return problems
