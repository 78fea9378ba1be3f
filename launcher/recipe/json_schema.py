"""The JSON Schema of a recipe, for editors: `trainer:` and `adapter:` list the fields of the tables."""

from __future__ import annotations

from typing import Any

from launcher.recipe.field_tables import (
    TASK_TABLES,
    TRAINER_OWNED,
    adapter_fields,
    task_fields,
    trainer_fields,
)  # fmt: skip
from launcher.recipe.problems import field_descriptions, known_sections
from launcher.recipe.schema import Recipe
from launcher.tasks import TASKS

_TYPES: dict[str, dict[str, Any]] = {
    "none": {"type": "null"},
    "bool": {"type": "boolean"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "list": {"type": "array"},
    "list[str]": {"type": "array", "items": {"type": "string"}},
    "list[int]": {"type": "array", "items": {"type": "integer"}},
    "list[float]": {"type": "array", "items": {"type": "number"}},
    "dict": {"type": "object"},
    "any": {},
}
_REFERENCE = {"type": "string", "pattern": r"\$\{ENV:"}
TODO = (
    "What must be set before the recipe can be planned, one line each. Written by `import`; `plan` and `run` "
    "refuse a recipe that has such lines."
)
"""Like `extends`, read before the recipe is validated."""


def recipe_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe file, as one JSON-ready dict."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "effilaunch recipe"
    base = "A recipe file, or the name of a shipped recipe, that this one is based on."
    extends = {"type": "string", "description": base}
    todo = {"type": "array", "items": {"type": "string"}, "description": TODO}
    models = {model.__name__: model for model in known_sections().values()}
    for name, definition in {"Recipe": schema, **schema["$defs"]}.items():
        for field, text in field_descriptions(models[name]).items():
            definition["properties"][field] = {"description": text, **definition["properties"][field]}
    schema["properties"] = {"extends": extends, "todo": todo, **schema["properties"]}
    required = schema.pop("required", [])
    by_hooks = [task.name for task in TASKS if task.made_by_hooks]
    made = {"properties": {"task": {"enum": by_hooks}}, "required": ["task", "python"]}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}, made]
    trainer = {
        name: _field(entry)
        for name, entry in _every_trainer_field().items()
        if name not in TRAINER_OWNED and "renamed_to" not in entry
    }
    section = schema["properties"]["trainer"]
    section |= {"properties": trainer, "additionalProperties": False}
    adapter = schema["$defs"]["AdapterSection"]
    adapter["properties"] |= {name: _field(entry) for name, entry in adapter_fields().items()}
    adapter["additionalProperties"] = False
    # sections may be incomplete: `extends` completes them
    for name, definition in schema["$defs"].items():
        if name not in ("DataSource", "EvalSplit", "Quantization"):
            definition.pop("required", None)
    return schema


def _every_trainer_field() -> dict[str, Any]:
    """Fields of all tasks; the description says which belong to one."""
    fields = dict(trainer_fields())
    for task in TASK_TABLES:
        note = {"description": f"Only for task {task}."}
        fields |= {name: entry | note for name, entry in task_fields(task).items()}
    return fields


def _field(entry: dict[str, Any]) -> dict[str, Any]:
    options = []
    for kind in entry["types"]:
        option = dict(_TYPES.get(kind, {"not": {}}))
        if "choices" in entry and kind == "str" and not any("[" in choice for choice in entry["choices"]):
            option["enum"] = entry["choices"]
        options.append(option)
    if not any(option.get("type") == "string" and "enum" not in option for option in options):
        options.append(_REFERENCE)
    note = {"description": entry["description"]} if "description" in entry else {}
    return {"anyOf": options, "default": entry["default"], **note}
