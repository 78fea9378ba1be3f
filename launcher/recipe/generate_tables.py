"""Writes the shipped field tables anew: `python -m launcher.recipe.generate_tables`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.recipe.fields import TABLES, installed_package
from launcher.recipe.source_tables import lora_config_table, training_arguments_table

_READERS = {"transformers": training_arguments_table, "peft": lora_config_table}


def generate(package: str) -> dict[str, Any]:
    """The table of an installed package. Raises ModuleNotFoundError when it is absent."""
    found = installed_package(package)
    if found is None:
        raise ModuleNotFoundError(package)
    version, folder = found
    return _READERS[package](folder, version)


def table_text(table: dict[str, Any]) -> str:
    """The text of a table file: one field a line, so that differences between versions read well."""
    rows = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table["fields"].items()]
    return (
        f'{{\n  "version": {json.dumps(table["version"])},\n  "fields": {{\n'
        + ",\n".join(rows)
        + "\n  }\n}\n"
    )


def main() -> None:
    """Write every table beside this module."""
    folder = Path(__file__).parent / "tables"
    folder.mkdir(exist_ok=True)
    for package, name in TABLES.items():
        (folder / name).write_text(table_text(generate(package)), encoding="utf-8")


if __name__ == "__main__":
    main()
