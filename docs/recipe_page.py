"""The reference of a recipe, made from the schema and the tables of upstream's fields."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launcher.recipe.field_tables import (
    ADAPTER_OWNED,
    TASK_OWNED,
    TASK_TABLES,
    TRAINER_OWNED,
    shipped_table,
)
from launcher.recipe.json_schema import TODO
from launcher.recipe.problems import field_descriptions
from launcher.recipe.schema import Recipe

NOTE = "<!-- Written by `python docs/make.py`; a test compares them. -->"

MORE = {
    "task": "tasks.md",
    "model.config": "tasks.md#from-scratch",
    "model.attn_implementation": "data.md#length",
    "model.device_map": "tasks.md#several-devices-one-process",
    "model.add_tokens": "tasks.md#added-tokens",
    "data": "data.md",
    "data.metrics": "tasks.md#metrics",
    "data.padding_free": "data.md#length",
    "python": "own-code.md",
    "sharding": "parallelism.md",
    "launch.hostfile": "hosts.md",
    "launch.slurm": "cluster.md",
    "launch.kubernetes": "kubernetes.md",
    "launch.skypilot": "skypilot.md",
    "launch.ray": "ray.md",
    "launch.max_restarts": "faults.md",
    "on_oom": "out-of-memory.md",
    "fixes": "fixes.md",
}
"""Key of a recipe -> the page that says more of it, from docs/."""


def recipe_page() -> str:
    """Every key of the schema, section by section; then the fields of upstream's classes."""
    parts = [
        "# Recipe reference",
        NOTE,
        "Every key of a recipe, by section; [recipe.md](../recipe.md) has examples, and how recipes inherit. "
        "`[]` stands for each entry of a list; *absent* for a key that has no value unless the recipe gives "
        "one. Relative paths start from the folder of the file that names them.",
    ]
    for section, model in sections().items():
        heading = f"## `{section}`" if section else "## Top level"
        rows = [EXTENDS, ("`todo`", "list of texts", "*absent*", TODO)] if not section else []
        descriptions = field_descriptions(model)
        for name, field in sorted(model.model_fields.items(), key=lambda item: not item[1].is_required()):
            key = f"{section}.{name}" if section else name
            rows.append((f"`{key}`", _type(field), _default(field), descriptions[name] + _more(key)))
        parts += [heading, table(("key", "value", "default", "meaning"), rows)]
    return "\n\n".join([*parts, *_upstream()]) + "\n"


EXTENDS = (
    "`extends`", "text", "*absent*",
    "A recipe file, or the name of a shipped one, that this recipe changes: mappings merge, everything else "
    "replaces.",
)  # fmt: skip


def sections(model: type[BaseModel] = Recipe, name: str = "") -> dict[str, type[BaseModel]]:
    """Dotted name of each section -> its type, in the schema's order; a source of rows once."""
    found = {name: model}
    for key, field in model.model_fields.items():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel) and part not in found.values():
                listed = "[]" if part.__name__ == "DataSource" else ""
                found |= sections(part, f"{name}.{key}{listed}".lstrip("."))
    return found


def _parts(annotation: Any) -> list[Any]:
    """What a type is made of, at any depth."""
    return [annotation, *(part for inner in typing.get_args(annotation) for part in _parts(inner))]


NAMES = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", dict: "mapping"}


def _type(field: FieldInfo) -> str:
    """What a key's value may be, in words."""
    return ", ".join(dict.fromkeys([*_words(field.annotation), *_limits(field.metadata)]))


LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _words(annotation: Any) -> list[str]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return [f"`{json.dumps(choice) if choice is False else choice}`" for choice in inner]
    if origin in (typing.Union, types.UnionType):
        return [word for part in inner if part is not type(None) for word in _words(part)]
    if origin is typing.Annotated:
        return [", ".join([*_words(inner[0]), *_limits(inner[1:])])]
    if origin is list:
        return [f"list of {' or '.join(_words(inner[0]))}"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["mapping"]
    return [NAMES[origin or annotation]]


def _limits(notes: Iterable[Any]) -> list[str]:
    """`≥ 1, ≤ 9` of the notes of an annotated number."""
    metadata = [m for note in notes for m in getattr(note, "metadata", [note])]
    return [
        f"{sign} {getattr(m, word):,}" for m in metadata for word, sign in LIMITS.items()
        if getattr(m, word, None) is not None
    ]  # fmt: skip


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "its defaults"
    return "*absent*" if value is None else shown_value(value)


def shown_value(value: Any) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _more(key: str) -> str:
    page = MORE.get(key)
    return f" More: [{page.split('#')[0]}](../{page})" if page else ""


def _upstream() -> list[str]:
    """The fields of upstream's argument classes, of the tested versions."""
    parts = [
        "## Fields of `trainer`",
        "The fields of transformers' `TrainingArguments`. The defaults are upstream's; a plan sets some of "
        "them otherwise, and `effilaunch plan RECIPE --explain trainer` says which and why.",
        table(HEAD, _fields("training_arguments", TRAINER_OWNED)),
    ]
    for task, own in TASK_TABLES.items():
        general = shipped("training_arguments") | TASK_OWNED[task]
        parts += [f"With task `{task}` also:", table(HEAD, _fields(own.name, general))]
    parts += ["Refused, since they have another place:"]
    owned = [TRAINER_OWNED, *TASK_OWNED.values()]
    rows = list(dict.fromkeys((f"`trainer.{name}`", text) for part in owned for name, text in part.items()))
    parts += [table(("field", "instead"), rows)]
    head = (
        "Further keys of `adapter` are the fields of peft's `LoraConfig`. A plan sets some of them where the "
        "recipe is silent: `effilaunch plan RECIPE --explain adapter`."
    )
    return [*parts, "## Fields of `adapter`", head, table(HEAD, _fields("lora_config", ADAPTER_OWNED))]


HEAD = ("field", "value", "upstream's default")


def shipped(name: str) -> dict[str, Any]:
    """The table of a package's fields, of the tested version."""
    fields: dict[str, Any] = json.loads(shipped_table(name).read_text(encoding="utf-8"))["fields"]
    return fields


def _fields(name: str, without: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for field, entry in shipped(name).items():
        if field not in without and "renamed_to" not in entry:
            choices = [f"`{choice}`" for choice in entry.get("choices", ())]
            kinds = [kind for kind in entry["types"] if kind != "none" and not (choices and kind == "str")]
            said = ", ".join([*(UPSTREAM.get(kind, kind) for kind in kinds), *choices])
            default = "*absent*" if entry["default"] is None else shown_value(entry["default"])
            rows.append((f"`{field}`", said or "*absent* only", default))
    return rows


UPSTREAM = {
    "str": "text", "int": "whole number", "float": "number", "bool": "`true` or `false`", "dict": "mapping",
    "list": "list", "list[str]": "list of text", "list[int]": "list of whole number",
    "list[float]": "list of number", "any": "anything",
}  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a cell is one line, without a bar that would end it."""
    shown = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *shown])
