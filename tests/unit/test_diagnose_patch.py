"""The changed recipe: its text changes at the keys' positions and nowhere else."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.knowledge.diagnose.patch import changed_text, edits, write_fixed
from launcher.recipe.yaml_reader import parse_yaml

RECIPE = """# a recipe
task: causal-lm          # the task
model:
  name_or_path: some/model
  dtype: auto   # the checkpoint's

trainer:  # Trainer
  max_steps: 5
  activation_checkpointing_kwargs:
    use_reentrant: true
    # kept apart

  # at the end
  learning_rate: 1e-4
adapter: {type: lora, r: 8}  # small
data:
  train: [{path: a.jsonl}]
"""


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"model.dtype": "float32"}, "dtype: auto   #", "dtype: float32   #"),
        ({"model.dtype": None}, "  dtype: auto   # the checkpoint's\n", ""),
        ({"trainer.max_steps": 7}, "max_steps: 5", "max_steps: 7"),
        ({"adapter.r": 4}, "r: 8}", "r: 4}"),
        ({"adapter.r": None}, ", r: 8}", "}"),
        ({"adapter.type": None}, "type: lora, ", ""),
        ({"adapter": None}, "adapter: {type: lora, r: 8}  # small\n", ""),
        ({"adapter.target_modules": "all-linear"}, "r: 8}", "r: 8, target_modules: all-linear}"),
        ({"trainer.optim": "adamw_torch"}, "1e-4\n", "1e-4\n  optim: adamw_torch\n"),
        ({"precision": "bf16"}, "a.jsonl}]\n", "a.jsonl}]\nprecision: bf16\n"),
        ({"sharding.zero_stage": 2}, "a.jsonl}]\n", "a.jsonl}]\nsharding:\n  zero_stage: 2\n"),
        (
            {"trainer.activation_checkpointing_kwargs": {"use_reentrant": False}},
            "kwargs:\n    use_reentrant: true\n",
            "kwargs: {use_reentrant: false}\n",
        ),
        (
            {"trainer.activation_checkpointing_kwargs.use_reentrant": False},
            "use_reentrant: true",
            "use_reentrant: false",
        ),
        ({"trainer.report_to": None}, "", ""),
    ],
)
def test_one_change(changes, old, new):
    text = changed_text(RECIPE, changes)
    assert text == RECIPE.replace(old, new) if old else text == RECIPE
    assert old in RECIPE
    document = parse_yaml(text, "changed")
    assert not document.problems
    (path, value), *_ = changes.items()
    data = document.data
    for name in path.split("."):
        data = (data or {}).get(name)
    assert data == value


def test_several_changes_and_a_text_without_a_last_newline():
    text = changed_text("a: 1\nb: {c: 2}", {"a": 5, "b.c": "x: y", "d.e": [1, "no"]})
    assert parse_yaml(text, "").data == {"a": 5, "b": {"c": "x: y"}, "d": {"e": [1, "no"]}}


@pytest.mark.parametrize(
    "value", ["1e-4", "true", "null", "", "a # b", "12", "it's", 'say "x"', "ü", 1e-05, None]
)
def test_a_value_is_read_back_as_it_was(value):
    text = changed_text("key: {old: 1}\n", {"key": {"inner": value}})
    assert parse_yaml(text, "").data == {"key": {"inner": value}}


def test_edits_name_the_lines():
    changes = {"model.dtype": "float32", "trainer.optim": "adamw_torch", "trainer.max_steps": 5}
    first, second = edits("r.yaml", RECIPE, changes)
    assert (first.line, first.old, first.new) == (5, "auto", "float32")
    assert (second.line, second.old, second.new) == (0, None, "adamw_torch")


SMALL = """task: causal-lm
model: {config: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1,
  intermediate_size: 8, vocab_size: 16}}
data: {train: [{path: rows.jsonl}], max_length: 8}
trainer: {max_steps: 2}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_the_fixed_recipe_is_new_and_valid(recipe):
    target = write_fixed(recipe, recipe.parent, {"trainer.max_steps": 3})
    assert target.name == "small.mended.yaml"
    assert target.read_text() == SMALL.replace("max_steps: 2", "max_steps: 3")
    assert recipe.read_text() == SMALL
    target.write_text("mine")
    with pytest.raises(RecipeError, match=r"small\.mended\.yaml"):
        write_fixed(recipe, recipe.parent, {"trainer.max_steps": 4})
    assert target.read_text() == "mine"


def test_what_the_loader_refuses_is_not_left_behind(recipe):
    with pytest.raises(RecipeError, match=r"trainer\.max_steps"):
        write_fixed(recipe, recipe.parent, {"trainer.max_steps": "many"})
    assert [p.name for p in recipe.parent.iterdir()] == ["small.yaml"]
