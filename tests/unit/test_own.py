"""Recipes of `task: own`: which keys it reads, which hooks it needs, and what its datasets must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.inputs.planning_facts import gather
from launcher.recipe.hook_file import read_hooks
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.tasks import task_named

HOOKS = """
def make_model(config):
    return None


def make_datasets():
    return [1], None


def data_collator(processing):
    return dict
"""


def load(folder: Path, text: str, hooks: str = HOOKS) -> LoadedRecipe:
    (folder / "hooks.py").write_text(hooks)
    (folder / "r.yaml").write_text(text)
    return load_recipe(folder / "r.yaml")


def problems(folder: Path, text: str) -> set[tuple[str, str | None]]:
    with pytest.raises(RecipeError) as caught:
        load(folder, text)
    return {(problem.code, problem.path) for problem in caught.value.problems}


def test_neither_a_model_nor_rows_are_needed(tmp_path):
    recipe = load(tmp_path, "task: own\npython: hooks.py\n").recipe
    assert (recipe.data.train, recipe.data.eval, recipe.model.name_or_path) == ([], None, None)


def test_other_tasks_need_both_as_before(tmp_path):
    assert problems(tmp_path, "python: hooks.py\n") == {("missing-key", "model"), ("missing-key", "data")}
    empty = "model: {name_or_path: m}\ndata: {train: []}\n"
    assert problems(tmp_path, empty) == {("wrong-value", "data.train")}


def test_what_hooks_make_is_refused_in_the_recipe(tmp_path):
    text = """
task: own
model: {name_or_path: m, quantization: nf4, tokenizer: t}
adapter: {r: 8}
data: {train: [{path: rows.jsonl, format: text}], packing: true}
"""
    assert problems(tmp_path, text) == {
        ("conflict", "model.quantization"), ("conflict", "model.tokenizer"), ("conflict", "adapter"),
        ("conflict", "data"), ("missing-key", "python"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["make_model", "make_datasets", "data_collator"])
def test_a_hook_that_is_needed_is_missed_by_its_name(tmp_path, name):
    (tmp_path / "hooks.py").write_text(HOOKS.replace(f"def {name}(", "def _other("))
    with pytest.raises(RecipeError) as caught:
        read_hooks(tmp_path / "hooks.py", task_named("own"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("hook-missing", "python")
    assert name in problem.message


def test_the_page_moves_a_script_in_so_many_lines(tmp_path):
    """Those of the code; the recipe of the page is read, and its hooks are those that the task needs."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "own-trainer.md").read_text()
    hooks = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in hooks.splitlines() if line.strip()]) <= 40
    recipe = load(tmp_path, "task: own" + page.split("```\ntask: own")[1].split("```")[0], hooks).recipe
    found = read_hooks(tmp_path / "hooks.py", task_named(recipe.task))
    assert set(found.names) == {"make_model", "make_datasets", "data_collator", "processing"}


def test_it_is_not_planned_without_torch_nor_made_tiny(tmp_path):
    loaded = load(tmp_path, "task: own\npython: hooks.py\n")
    for asked, code in (({"allow_torch": False}, "not-in-closed-form"), ({"tiny": True}, "usage")):
        with pytest.raises(RecipeError) as caught:
            gather(loaded, "cpu", **asked)
        assert [problem.code for problem in caught.value.problems] == [code]


def test_validate_needs_no_torch_and_prepare_is_refused(tmp_path, capsys):
    load(tmp_path, "task: own\npython: hooks.py\nhardware: {device: A100-80GB}\n")
    assert main(["validate", str(tmp_path / "r.yaml")]) == 0
    assert main(["prepare", str(tmp_path / "r.yaml")]) == 2
    assert "make_datasets" in capsys.readouterr().err
