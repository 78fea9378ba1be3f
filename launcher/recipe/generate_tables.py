"""Writes all tables and the editor's schema anew: `python -m launcher.recipe.generate_tables`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.facts.shipped import recipes_dir
from launcher.recipe.field_tables import TABLES, field_table, installed_package, read_table, shipped_table
from launcher.recipe.json_schema import recipe_json_schema

SCHEMA = "recipe.schema.json"
DS_TABLE = Path(__file__).parents[1] / "knowledge" / "lint" / "tables" / "deepspeed.json"
# DeepSpeed has to be imported to be asked, which only launcher.train may.
DS_WRITER = "launcher.train.ds_vocabulary"


def generate(name: str) -> dict[str, Any]:
    """The table of TABLES as the installed package has it. Raises ModuleNotFoundError when that is absent."""
    found = installed_package(TABLES[name])
    if found is None:
        raise ModuleNotFoundError(TABLES[name])
    version, folder = found
    return read_table(name, folder, version)


def table_text(table: dict[str, Any]) -> str:
    """The text of a table file: one field a line, so that differences between versions read well."""
    rows = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table["fields"].items()]
    return (
        f'{{\n  "version": {json.dumps(table["version"])},\n  "fields": {{\n'
        + ",\n".join(rows)
        + "\n  }\n}\n"
    )


def schema_text() -> str:
    """The text of the editor's schema, as `effilaunch schema` prints it."""
    return json.dumps(recipe_json_schema(), indent=2) + "\n"


def main() -> None:
    """Write every table beside its reader, and the editor's schema beside the shipped recipes."""
    for name in TABLES:
        file = shipped_table(name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(table_text(generate(name)), encoding="utf-8")
    # the schema lists the fields of the tables that were just written
    field_table.cache_clear()
    (recipes_dir() / SCHEMA).write_text(schema_text(), encoding="utf-8")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-m", DS_WRITER, str(DS_TABLE)], check=True, env=env)


if __name__ == "__main__":
    main()
