"""The plan of every shipped recipe, on its own hardware, is the one that is written down.

A changed plan for an unchanged recipe shows here as a diff. When the change is meant:
EFFILAUNCH_UPDATE_GOLDEN=1 .venv/bin/pytest tests/test_golden.py
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "plans"
OWN = ROOT / "tests" / "golden" / "recipes"
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


def planned(recipe: Path, capsys: pytest.CaptureFixture[str]) -> str:
    on = ["--on", "cpu"] if recipe.stem == "smoke" else []
    code = main(["plan", str(recipe), *on, "--json"])
    out = capsys.readouterr().out
    assert code == 0, out
    return json.dumps(reduced(json.loads(out)), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_plan_is_the_golden_one(recipe, capsys, monkeypatch):
    monkeypatch.setattr(
        "launcher.inputs.planning_facts.probe_processor", lambda: None
    )  # each machine has its own
    text = planned(recipe, capsys)
    file = GOLDEN / f"{recipe.stem}.json"
    if os.environ.get(UPDATE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    assert file.is_file(), f"no {file.relative_to(ROOT)}; write it with {HOW}"
    golden = file.read_text(encoding="utf-8")
    diff = difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "planned now", lineterm="")
    shown = "\n".join(diff)
    if shown:
        pytest.fail(f"the plan of {recipe.stem} changed:\n{shown}\nif that is meant: {HOW}", pytrace=False)


def test_every_golden_plan_has_its_recipe():
    wanted = {f"{recipe.stem}.json" for recipe in RECIPES}
    extra = sorted(file for file in GOLDEN.iterdir() if file.name not in wanted)
    if os.environ.get(UPDATE):
        for file in extra:
            file.unlink()
        return
    assert extra == [], "golden plans of recipes that are no longer shipped; delete them"


def test_nothing_of_this_machine_is_in_a_golden_plan():
    for file in GOLDEN.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert str(ROOT) not in text, file
        assert sys.executable not in text, file
