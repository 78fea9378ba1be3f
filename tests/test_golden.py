"""The plan of every shipped recipe, on its own hardware, is the one that is written down.

A changed plan for an unchanged recipe shows here as a diff. Values that most plans share are in
tests/golden/common.json (golden_plans.py). When the change is meant:
EFFILAUNCH_UPDATE_GOLDEN=1 .venv/bin/pytest tests/test_golden.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from golden_plans import GOLDEN, difference, files_of, update, whole_plans

from launcher.cli import main

ROOT = Path(__file__).resolve().parents[1]
OWN = GOLDEN / "recipes"
"""Recipes for plans that no shipped one has."""
RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *OWN.glob("*.yaml")])
UPDATE = "EFFILAUNCH_UPDATE_GOLDEN"
HOW = f"{UPDATE}=1 .venv/bin/pytest tests/test_golden.py"
MIB = 2**20


def reduced(plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan decides, without reasons, line numbers and what differs between machines."""
    memory = plan["memory"]
    threads = "OMP_NUM_THREADS"
    settings = {name: setting["value"] for name, setting in plan["settings"].items()}
    kept = {
        "batch": plan["batch"],
        "schedule": plan["schedule"],
        "model": {key: plan["model"][key] for key in ("name", "params", "trainable")},
        "settings": {k: "<threads>" if k.endswith(threads) else v for k, v in settings.items()},
        "fixes": [{"id": fix["id"], "changed": fix["changed"]} for fix in plan["fixes"]],
        "warnings": plan["warnings"],
        "ds_config": plan["ds_config"],
        "command": plan["command"],
        "env": {k: "<threads>" if k == threads else v for k, v in plan["env"].items()},
        "memory_mib": {
            "total": round(memory["total"] / MIB),
            **{name: round(size / MIB) for name, size in memory["components"].items()},
        },
    }
    return placeless(kept)


def placeless(value: Any) -> Any:
    """The value with this checkout as <root> and this interpreter as <python>."""
    if isinstance(value, dict):
        return {key: placeless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [placeless(item) for item in value]
    if isinstance(value, str):
        return value.replace(sys.executable, "<python>").replace(str(ROOT), "<root>")
    return value


def planned(recipe: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    on = ["--on", "cpu"] if recipe.stem == "smoke" else []
    code = main(["plan", str(recipe), *on, "--json"])
    out = capsys.readouterr().out
    assert code == 0, out
    return reduced(json.loads(out))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_plan_is_the_golden_one(recipe, capsys, monkeypatch):
    monkeypatch.setattr(
        "launcher.inputs.planning_facts.probe_processor", lambda: None
    )  # each machine has its own
    plan = planned(recipe, capsys)
    if os.environ.get(UPDATE):
        update({recipe.stem: plan})
        return
    file = GOLDEN / "plans" / f"{recipe.stem}.json"
    assert file.is_file(), f"no {file.relative_to(ROOT)}; write it with {HOW}"
    shown = difference(recipe.stem, plan)
    if shown:
        pytest.fail(f"the plan of {recipe.stem} changed:\n{shown}\nif that is meant: {HOW}", pytrace=False)


def test_every_golden_plan_has_its_recipe():
    wanted = {f"{recipe.stem}.json" for recipe in RECIPES}
    extra = sorted(file.stem for file in (GOLDEN / "plans").iterdir() if file.name not in wanted)
    if os.environ.get(UPDATE):
        update({}, removed=extra)
        return
    assert extra == [], f"golden plans of recipes that are no longer shipped; remove them with {HOW}"


def test_golden_files_are_as_an_update_writes_them():
    """A common value is written once, and is the most frequent one."""
    if os.environ.get(UPDATE):
        return
    wanted = files_of(whole_plans())
    assert [file.name for file, text in wanted.items() if file.read_text(encoding="utf-8") != text] == []


def test_nothing_of_this_machine_is_in_a_golden_plan():
    for file in [GOLDEN / "common.json", *(GOLDEN / "plans").glob("*.json")]:
        text = file.read_text(encoding="utf-8")
        assert str(ROOT) not in text, file
        assert sys.executable not in text, file
