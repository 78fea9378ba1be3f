"""Everything that is shipped works: each recipe validates and plans, profiles say their name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.cli import main

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(
    path for path in (ROOT / "recipes").rglob("*.yaml") if "_base" not in path.parts
)  # bases are fragments for `extends`, not recipes
PROFILES = sorted((ROOT / "ds_configs").glob("*.json"))
PROMISED = {
    "smoke",
    "starcoder_lora",
    "starcoder_int8_lora",
    "llama_7b_full_zero3",
    "llama3_8b_qlora_24gb",
}
# Sections of DeepSpeed's config that override what the recipe says about optimizer and schedule.
OVERRIDING = {"optimizer", "scheduler"}


def plan_json(capsys, *arguments: str) -> dict:
    code = main(["plan", *arguments, "--json"])
    out = capsys.readouterr().out
    assert code == 0, out
    return json.loads(out)


def test_the_promised_recipes_are_shipped():
    assert {path.stem for path in RECIPES} >= PROMISED


def test_the_readme_table_names_exactly_the_shipped_recipes():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("## Shipped recipes", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"^\| \[`([\w./-]+)`\]\(recipes/\1\.yaml\)", table, flags=re.MULTILINE)
    shipped = [path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in RECIPES]
    assert sorted(named) == sorted(shipped)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_header_says_how_to_launch(path):
    header = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"effilaunch run recipes/{path.relative_to(ROOT / 'recipes').as_posix()}" in header
    assert re.search(r"^# On: ", header, flags=re.MULTILINE)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_validates(path, capsys):
    code = main(["validate", str(path)])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_plans_on_its_hardware_and_fits(path, capsys):
    on = ["--on", "cpu"] if path.stem == "smoke" else []
    plan = plan_json(capsys, str(path), *on)
    batch = plan["batch"]
    assert batch["micro"] * batch["accumulation"] * batch["data_parallel"] == batch["global"]
    assert plan["command"]
    if path.stem != "smoke":
        assert plan["memory"]["fits"] is True
        assert plan["memory"]["total"] <= plan["hardware"]["device_bytes"]


def test_starcoder_plans_differ_where_the_hardware_does(capsys):
    recipe = str(ROOT / "recipes" / "starcoder_lora.yaml")
    a100 = plan_json(capsys, recipe, "--on", "8xA100-80GB")
    v100 = plan_json(capsys, recipe, "--on", "8xV100-32GB")
    assert a100["ds_config"]["bf16"]["enabled"] is True
    assert v100["ds_config"].get("bf16", {}).get("enabled", False) is False
    assert v100["ds_config"]["fp16"]["enabled"] is True
    stages = [plan["ds_config"]["zero_optimization"]["stage"] for plan in (a100, v100)]
    assert stages[0] < stages[1]
    assert a100["batch"]["global"] == v100["batch"]["global"] == 64


@pytest.mark.parametrize("device", ["1xRTX4090-24GB", "1xRTX3090-24GB", "1xA10-24GB", "1xL4-24GB"])
def test_the_24gb_recipe_fits_the_cards_its_header_names(device, capsys):
    plan = plan_json(capsys, str(ROOT / "recipes" / "llama3_8b_qlora_24gb.yaml"), "--on", device)
    assert plan["memory"]["fits"] is True


def test_profiles_are_the_documented_six():
    assert [path.stem for path in PROFILES] == [
        "zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload",
    ]  # fmt: skip


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profile_says_what_its_name_says(path):
    config = json.loads(path.read_text(encoding="utf-8"))
    zero = config["zero_optimization"]
    assert f"zero{zero['stage']}" == path.stem.split("_")[0]
    kind = {"offload": "cpu", "nvme": "nvme"}.get(path.stem.partition("_")[2])
    assert zero.get("offload_optimizer", {}).get("device") == kind
    assert zero.get("offload_param", {}).get("device") == (kind if zero["stage"] == 3 else None)
    assert not OVERRIDING & config.keys()
    assert config["gradient_clipping"] == "auto"  # absent, DeepSpeed would clip at 1.0
