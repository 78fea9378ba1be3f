"""The tasks as planning and training know them: two modules each, and names that nobody else compares."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from launcher.recipe.field_tables import TABLES, task_fields
from launcher.tasks import DEFAULT_TASK, FORMATS, TASKS, task_named, tasks_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = frozenset(task.name for task in TASKS) - {"own"}  # a word of other dictionaries too
OWN = (ROOT / "launcher" / "tasks", ROOT / "launcher" / "train" / "tasks")


def literals(path: Path) -> list[int]:
    """Lines of a module whose strings are names of tasks."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in NAMES]


def test_only_the_tasks_know_their_names() -> None:
    named = {}
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        shown = path.relative_to(ROOT).as_posix()
        if not any(own in path.parents for own in OWN):
            named[shown] = literals(path)
    assert len(named) > 100
    assert {path: lines for path, lines in named.items() if lines} == {}
    assert any(literals(path) for own in OWN for path in own.glob("*.py")), "the search finds what is there"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_is_complete(task) -> None:
    assert task_named(task.name) is task
    assert set(task.formats) <= set(FORMATS)
    assert set(task.learns) <= set(task.formats)
    assert set(task.generated_metrics) <= set(task.metrics)
    assert {form for forms in task.goals.values() for form in forms} <= set(task.formats)
    assert task.argument_table is None or task.argument_table.name in TABLES
    assert not (task.owned_arguments and task.argument_table is None)
    assert set(task.loss_arguments) <= set(task_fields(task.name))
    assert all(task.name in tasks_of(kind) for kind in task.architectures)
    assert task.model_class.startswith("AutoModel")
    name = task.name.replace("-", "_")
    for module in (f"launcher.tasks.{name}", f"launcher.train.tasks.{name}"):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_both_halves_are_there(task) -> None:
    pytest.importorskip("torch")
    for package in task.packages:
        pytest.importorskip(package)
    from launcher.train.tasks import train_task
    from launcher.train.tasks.task import TrainTask

    half = train_task(task.name)
    assert isinstance(half, TrainTask)
    assert type(half).encoder is not TrainTask.encoder
    assert type(half).shown is not TrainTask.shown


def test_names_and_aliases_are_of_one_task_each() -> None:
    words = [word for task in TASKS for word in (task.name, *task.aliases)]
    assert len(words) == len(set(words))
    assert task_named(DEFAULT_TASK) is TASKS[0]
