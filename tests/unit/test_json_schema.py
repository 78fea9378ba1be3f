"""The editor's schema: generated, complete, and true of every shipped recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from every import every

from launcher.files.shipped import recipes_dir, shipped_names
from launcher.recipe.field_tables import TABLES, TASK_FORMATS, installed_package, shipped_table
from launcher.recipe.json_schema import recipe_json_schema
from launcher.recipe.yaml_reader import parse_yaml
from launcher.tasks import FORMATS
from tools.tables.fields import schema_text

RECIPES = sorted(recipes_dir().rglob("*.yaml"))
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
ANNOTATIONS = {"title", "description", "default", "$schema", "$defs"}
SMALL = {"model": {"name_or_path": "m"}, "data": {"train": [{"path": "a"}]}}


def is_of(kind: str, value: Any) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[kind])


def complaints(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> list[str]:
    """What a validator says of `value`: the keywords of JSON Schema that the generated one uses."""
    found: list[str] = []
    for keyword, rule in schema.items():
        if keyword in ANNOTATIONS or keyword == "properties":
            continue
        if keyword == "$ref":
            found += complaints(value, root["$defs"][rule.rpartition("/")[2]], root, at)
        elif keyword == "anyOf":
            branches = [complaints(value, branch, root, at) for branch in rule]
            found += [] if [] in branches else min(branches, key=len)
        elif keyword == "not":
            found += [] if complaints(value, rule, root, at) else [f"{at}: not"]
        elif keyword == "items":
            for index, item in enumerate(value if isinstance(value, list) else []):
                found += complaints(item, rule, root, f"{at}[{index}]")
        elif keyword == "additionalProperties":
            for key, item in value.items() if isinstance(value, dict) else ():
                inner = schema.get("properties", {}).get(key, rule)
                found += [f"{at}.{key}: unknown"] if inner is False else (
                    complaints(item, inner, root, f"{at}.{key}") if inner is not True else []
                )  # fmt: skip
        else:
            found += [] if holds(keyword, rule, value) else [f"{at}: {keyword}"]
    return found


def holds(keyword: str, rule: Any, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    checks = {
        "type": lambda: is_of(rule, value),
        "enum": lambda: value in rule,
        "const": lambda: value == rule,
        "required": lambda: not isinstance(value, dict) or all(key in value for key in rule),
        "minimum": lambda: not number or value >= rule,
        "maximum": lambda: not number or value <= rule,
        "exclusiveMinimum": lambda: not number or value > rule,
        "exclusiveMaximum": lambda: not number or value < rule,
        "minItems": lambda: not isinstance(value, list) or len(value) >= rule,
        "minLength": lambda: not isinstance(value, str) or len(value) >= rule,
        "pattern": lambda: not isinstance(value, str) or re.search(rule, value) is not None,
    }
    return checks[keyword]()  # a keyword that is not here is a KeyError: the check above must learn it


@pytest.fixture(scope="module")
def schema():
    return recipe_json_schema()


def test_the_shipped_schema_is_the_generated_one():
    for name, package in TABLES.items():
        found = installed_package(package)
        if found and found[0] != json.loads(shipped_table(name).read_text(encoding="utf-8"))["version"]:
            pytest.skip(f"the tested version of {package} is not installed")
    text = (recipes_dir() / "recipe.schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "run: make tables"


def test_it_is_what_the_command_prints(capsys):
    from launcher.cli import main

    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def test_it_is_not_taken_for_a_recipe():
    assert not [name for name in shipped_names() if "schema" in name]


def test_every_field_is_explained(schema):
    sections = {"": schema, **schema["$defs"]}
    for name, section in sections.items():
        for key, field in section["properties"].items():
            from_a_table = name == "AdapterSection" and key not in ("type", "path")
            assert from_a_table or field.get("description"), f"{name}.{key}"


def test_it_knows_tasks_formats_and_the_fields_of_every_task(schema):
    assert schema["properties"]["task"]["enum"] == list(TASK_FORMATS)
    assert schema["$defs"]["DataSource"]["properties"]["format"]["enum"] == ["auto", *FORMATS]
    trainer = schema["properties"]["trainer"]["properties"]
    assert {"learning_rate", "beta", "loss_type", "predict_with_generate"} <= set(trainer)
    assert not {"output_dir", "max_length", "pad_token", "sync_ref_model", "sortish_sampler"} & set(trainer)
    assert {"early_stopping", "python", "extends"} <= set(schema["properties"])


@every("path", RECIPES, ids=lambda path: path.stem)
def test_it_accepts_the_shipped_recipe(path, schema):
    data = parse_yaml(path.read_text(encoding="utf-8"), str(path)).data
    if Path(path).parent.name == "_base":  # a fragment: what it lacks comes from the recipe that extends it
        data = {"extends": "x", **data}
    assert complaints(data, schema, schema) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"task": "dpo", "trainer": {"beta": 0.1, "loss_type": "ipo"}}, None),
        ({"trainer": {"max_steps": "${ENV:STEPS}"}}, None),
        ({"data": {"train": [{"path": "a", "weight": 2}], "fim": {"rate": 0.5}}}, None),
        ({"data": {"train": [{"path": "a"}], "eval": {"split": 0.1}}}, None),
        ({"adapter": {"r": 8, "use_dora": True}}, None),
        ({"seed": -1}, ".seed: minimum"),
        ({"task": "sft"}, ".task: enum"),
        ({"trainer": {"lr": 1}}, ".trainer.lr: unknown"),
        ({"trainer": {"max_steps": "many"}}, ".trainer.max_steps: "),
        ({"data": {"train": [{"path": "a", "weight": 0}]}}, ".data.train[0].weight: exclusiveMinimum"),
        ({"data": {"train": [{"format": "text"}]}}, ".data.train[0]: required"),
        ({"adapter": {"rank": 8}}, ".adapter"),
        ({"early_stopping": {"patience": 0}}, ".early_stopping.patience: minimum"),
        ({"modle": {}}, ".modle: unknown"),
    ],
)
def test_it_accepts_and_refuses(change, complaint, schema):
    found = complaints(SMALL | change, schema, schema)
    if complaint is None:
        assert found == []
    else:
        assert any(text.startswith(complaint) for text in found), found
