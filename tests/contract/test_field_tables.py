"""The shipped field tables are those of the installed libraries."""

from __future__ import annotations

import dataclasses
import json

import pytest

from launcher.recipe.fields import installed_package, shipped_table
from launcher.recipe.generate_tables import generate, table_text


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_regenerating_gives_the_shipped_table(package: str) -> None:
    text = shipped_table(package).read_text(encoding="utf-8")
    found = installed_package(package)
    if found is None or found[0] != json.loads(text)["version"]:
        pytest.skip(f"the tested version of {package} is not installed")
    assert table_text(generate(package)) == text


def test_names_and_defaults_equal_the_real_training_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    table = generate("transformers")["fields"]
    real = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    assert list(table) == list(real)
    for name, field in real.items():
        if field.default is not dataclasses.MISSING:
            assert table[name]["default"] == field.default, name


def test_names_equal_the_real_lora_config() -> None:
    peft = pytest.importorskip("peft")
    real = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.init]
    assert set(generate("peft")["fields"]) == set(real)
