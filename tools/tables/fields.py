"""Tables of the fields of TrainingArguments, LoraConfig and their kin, and the editor's schema."""

from __future__ import annotations

import json
from typing import Any

from launcher.recipe.field_tables import TABLES, installed_package, read_table
from launcher.recipe.json_schema import recipe_json_schema


def generate(name: str) -> dict[str, Any]:
    """The table of TABLES as the installed package has it. Raises ModuleNotFoundError when that is absent."""
    found = installed_package(TABLES[name])
    if found is None:
        raise ModuleNotFoundError(TABLES[name])
    version, folder = found
    return read_table(name, folder, version)


def schema_text() -> str:
    """The text of the editor's schema, as `effilaunch schema` prints it."""
    return json.dumps(recipe_json_schema(), indent=2) + "\n"
