"""A recipe written for people is read back as it was."""

from __future__ import annotations

from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.files.shipped import recipes_dir
from launcher.recipe.yaml_reader import parse_yaml
from launcher.recipe.yaml_writer import WIDTH, flow, recipe_text

RECIPES = sorted(recipes_dir().glob("*.yaml"))


@every("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_come_back(path):
    data = parse_yaml(path.read_text("utf-8"), path.name).data
    text = recipe_text(data)
    assert parse_yaml(text, path.name).data == data
    assert max(map(len, text.splitlines())) <= WIDTH


def test_it_is_laid_out_like_a_shipped_one():
    data = {
        "model": {"name_or_path": "Qwen/Qwen3-8B", "chat_template": "{{ a }}\n  b"},
        "adapter": {"type": "lora", "r": 16},
        "data": {"train": [{"path": "rows.jsonl", "columns": {"completion": "no"}}], "max_length": 512},
        "precision": "auto",
        "global_batch_size": 32,
        "trainer": {"learning_rate": 2e-4, "save_strategy": "no"},
    }
    notes = {"data.max_length": "the longest row", "data.train[0].path": "relative", "trainer": "word " * 30}
    long = ("word " * 21).strip()
    assert recipe_text(data, notes, ["LoRA of a model", ""]) == (
        "# LoRA of a model\n#\n\n"
        "model:\n  name_or_path: Qwen/Qwen3-8B\n  chat_template: |-\n    {{ a }}\n      b\n\n"
        "adapter: {type: lora, r: 16}\n\n"
        "data:\n  train:\n"
        '    - path: rows.jsonl               # relative\n      columns: {completion: "no"}\n'
        "  max_length: 512                    # the longest row\n\n"
        "precision: auto\nglobal_batch_size: 32\n\n"
        f"# {long}\n# word word word word word word word word word\n"
        'trainer:\n  learning_rate: 2.0e-4\n  save_strategy: "no"\n'
    )


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["", " a", "a ", "null", "1e-4", "0x1", "a: b", "- a", "a #b", "{{ x }}", "&a", "*a", "!t", "%", "|", "'"]
)  # fmt: skip
NAMES = TEXTS.filter(lambda name: name.strip() and name.isprintable())
VALUES = st.recursive(
    TEXTS | st.integers(-(2**40), 2**40) | st.floats(-1e18, 1e18) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_value_comes_back(value):
    assert parse_yaml(f"key: {flow(value)}\n", "").data == {"key": value}


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3))
def test_any_section_comes_back_as_a_block(section):
    data = {"trainer": section, "data": {"train": [section, section]}}
    assert parse_yaml(recipe_text(data, {"trainer": "why"}), "").data == data


def test_small_numbers_keep_their_digits():
    text = recipe_text({"trainer": {"learning_rate": 3e-4, "weight_decay": 7e-5, "adam_epsilon": 1.5e-8}})
    assert [line.split()[-1] for line in text.splitlines()[1:]] == ["3.0e-4", "7.0e-5", "1.5e-8"]
