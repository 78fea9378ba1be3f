"""The engines as planning and training know them: two modules each, and names that nobody else compares."""

from __future__ import annotations

import ast
import copy
import importlib.util
import pickle
from pathlib import Path
from typing import get_args

import pytest

from launcher.engines import ENGINES, engine_named
from launcher.plan.settings import EngineName
from launcher.planner.decide import SIZES
from launcher.recipe.schema import ShardingSection

ROOT = Path(__file__).resolve().parents[2]
NAMES = frozenset(engine.name for engine in ENGINES)
OWN = ("launcher/engines/", "launcher/train/engines/")
OTHER_MEANINGS = {
    "launcher/recipe/schema.py": "the values of `sharding.engine` and `launch.launcher`, as types",
    "launcher/plan/settings.py": "the same, and the names of two sections",
    "launcher/recipe/field_tables.py": "two fields of TrainingArguments",
    "launcher/recipe/suggestions.py": "a key of other tools",
    "launcher/importing/": "words of other tools",
    "launcher/planner/stopping.py": "the launcher of this name",
    "launcher/render/command.py": "the launcher of this name",
    "launcher/machine/software.py": "the package",
    "launcher/machine/machine_facts.py": "the package",
    "launcher/planner/resuming.py": "the package",
    "launcher/report/model_card.py": "the package",
    "launcher/machine/node_facts.py": "the package",
    "launcher/train/machine.py": "the package",
    "launcher/train/own_command.py": "the package",
    "launcher/execute/start_checks.py": "the package",
    "launcher/knowledge/doctor/build_checks.py": "the package",
    "launcher/knowledge/failures/catalogue.py": "a chapter of the known failures",
}


def literals(path: Path) -> list[int]:
    """Lines of a module whose strings are names of engines."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in NAMES]


def test_only_the_engines_know_their_names() -> None:
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "launcher").rglob("*.py"))}
    named = {shown: lines for shown, path in paths.items() if (lines := literals(path))}
    assert len(paths) > 100
    places = {
        shown: next((known for known in (*OWN, *OTHER_MEANINGS) if shown.startswith(known)), None)
        for shown in named
    }
    assert {shown: named[shown] for shown, place in places.items() if place is None} == {}
    assert set(places.values()) == {*OWN, *OTHER_MEANINGS}, "none of the lists names what is not there"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_an_engine_is_complete(engine) -> None:
    assert engine_named(engine.name) is engine
    assert {*engine.shares, *engine.lacks} == set(SIZES)
    assert not set(engine.shares) & set(engine.lacks)
    assert pickle.loads(pickle.dumps(engine)) is copy.deepcopy(engine) is engine
    for module in (f"launcher.engines.{engine.name}", f"launcher.train.engines.{engine.name}"):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_both_halves_are_there(engine) -> None:
    pytest.importorskip("torch")
    from launcher.train.engines.engine import TrainEngine

    half = importlib.import_module(f"launcher.train.engines.{engine.name}").TRAIN_ENGINE
    assert isinstance(half, TrainEngine)
    others = [one.name.upper() for one in ENGINES if one is not engine]
    assert not any(half.is_set_up(name) for name in others if name != "DDP")
    assert half.is_set_up("MULTI_GPU" if engine.name == "ddp" else engine.name.upper())


def test_a_recipe_can_name_each() -> None:
    values = get_args(ShardingSection.model_fields["engine"].annotation)
    assert set(values) == {"auto", *NAMES}
    assert set(get_args(EngineName)) == NAMES
