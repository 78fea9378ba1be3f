"""Recipes: YAML without traps, layers, references, and every problem at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.recipe.env import resolve_env
from launcher.recipe.json_schema import recipe_json_schema
from launcher.recipe.loading import LoadedRecipe, Origin, load_recipe
from launcher.recipe.yaml_reader import parse_yaml

GOOD = "model: {name_or_path: gpt2}\ndata: {train: [{path: a.jsonl}]}\n"


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def load(folder: Path, text: str, *overrides: str) -> LoadedRecipe:
    return load_recipe(write(folder, text), overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2e5", 2e5),
        ("2.0e-4", 2e-4),
        ("-.inf", float("-inf")),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("24:00:00", "24:00:00"),
        ("2024-01-01", "2024-01-01"),
        ("0123456", "0123456"),
        ("1_000", 1000),
        ("0x10", 16),
        ("~", None),
        ("'8'", "8"),
    ],
)
def test_scalars_have_no_yaml_1_1_traps(text: str, value: object) -> None:
    parsed = parse_yaml(f"a: {text}", "f").data["a"]
    assert (parsed, type(parsed)) == (value, type(value))


def test_lines_of_nested_keys() -> None:
    lines = parse_yaml("data:\n  train:\n    - path: a\n      format: text\n", "f").lines
    assert lines == {
        "data": 1,
        "data.train": 2,
        "data.train[0]": 3,
        "data.train[0].path": 3,
        "data.train[0].format": 4,
    }


def test_anchors_merge_and_endless_aliases() -> None:
    document = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "f")
    assert (document.data["b"], document.problems) == ({"x": 1, "y": 3}, [])
    assert [p.code for p in parse_yaml("a: &a [*a]", "f").problems] == ["yaml-alias"]


def test_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    text = GOOD + "seed: 1\nprecision: bf16\nseed: 2\n"
    assert problems(tmp_path, text) == ["r.yaml:5: seed: given twice, first in line 3 (keep one of the two)"]


def test_syntax_error_has_its_line(tmp_path: Path) -> None:
    (only,) = problems(tmp_path, GOOD + "trainer: [1\nseed: 2\n")
    assert only.startswith("r.yaml:4: not valid YAML:")


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = """\
model: {nam_or_path: gpt2, dtype: fp32, lora_alpha: 3}
adapter: {r: 0, lora_r: 8}
data:
  train: [{path: a.jsonl, format: chatt, weight: 0}]
  eval: {splt: 0.02}
  max_length: "2048"
  packing: yes
task: ppo
trainer:
  learning_rate: "1e-4"
  lr: 1e-4
  evaluation_strategy: no
  bf16: true
batch_size: 8
learning_rate: 1e-4
model_name: x
zzz: 1
"""
    fields = "expected a TrainingArguments field of transformers"
    found = problems(tmp_path, text)
    for line in (
        "r.yaml:1: model: `name_or_path` (weights) or `config` (random weights) is required"
        " (e.g. name_or_path: bigcode/starcoder)",
        "r.yaml:1: model.nam_or_path: unknown key (did you mean `name_or_path`?)",
        'r.yaml:1: model.dtype: is "fp32" (text), expected one of auto, float32, bfloat16, float16'
        " (did you mean float32?)",
        "r.yaml:1: model.lora_alpha: unknown key (`lora_alpha` belongs under `adapter:`)",
        "r.yaml:2: adapter.r: is 0, expected at least 1",
        'r.yaml:4: data.train[0].format: is "chatt" (text), expected one of auto, text, instruction,'
        " prompt-completion, chat, classification, tokens, image, preference (did you mean chat?)",
        "r.yaml:4: data.train[0].weight: is 0, expected more than 0",
        "r.yaml:5: data.eval.splt: unknown key (did you mean `split`?)",
        'r.yaml:6: data.max_length: is "2048" (text), expected a whole number (write 2048 without quotes)',
        'r.yaml:7: data.packing: is "yes" (text), expected true or false (write true)',
        "r.yaml:8: task: ppo is not a task here (trl trains it: GRPOTrainer and RLOOTrainer generate while"
        " they train, which a recipe cannot say)",
        'r.yaml:10: trainer.learning_rate: is "1e-4" (text), expected a number (write 1e-4 without quotes)',
        f"r.yaml:11: trainer.lr: unknown key, {fields} 5.23.0 (did you mean `learning_rate`?)",
        "r.yaml:12: trainer.evaluation_strategy: removed in transformers 5.23.0 (write `eval_strategy`)",
        "r.yaml:13: trainer.bf16: not allowed under `trainer:` (`precision` decides it)",
        "r.yaml:14: batch_size: unknown key (did you mean `trainer.per_device_train_batch_size`?)",
        "r.yaml:15: learning_rate: unknown key (`learning_rate` belongs under `trainer:`)",
        "r.yaml:16: model_name: unknown key (write `model.name_or_path`)",
        "r.yaml:17: zzz: unknown key",
    ):
        assert line in found
    assert len(found) == 21


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (
            GOOD + "global_batch_size: 8\ntrainer: {gradient_accumulation_steps: 2}",
            "trainer.gradient_accumulation_steps",
        ),
        (GOOD + "trainer: {max_steps: 2, num_train_epochs: 1}", "trainer.num_train_epochs"),
        (GOOD + "adapter: {path: a, r: 8}", "adapter.path"),
        (GOOD + "trainer: {eval_strategy: steps}", "trainer.eval_strategy"),
        (GOOD.replace("gpt2", "gpt2, config: {model_type: llama}"), "model.config"),
        (GOOD.replace("a.jsonl", "'hf://a/b'"), "data.train[0].path"),
    ],
)
def test_keys_that_exclude_each_other(tmp_path: Path, text: str, path: str) -> None:
    (only,) = problems(tmp_path, text)
    assert f": {path}: " in only


def test_extends_merges_and_remembers_places(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "trainer: {max_steps: 5, weight_decay: 0.1}\n", "base/b.yaml")
    text = "extends: base/b.yaml\ntrainer:\n  max_steps: null\n  num_train_epochs: 2\n"
    loaded = load(tmp_path, text, "trainer.learning_rate=1e-4", "data.train[0].format=text")
    trainer = {"weight_decay": 0.1, "num_train_epochs": 2, "learning_rate": 1e-4}
    assert loaded.recipe.trainer == trainer
    assert loaded.text == text
    source = loaded.recipe.data.train[0]
    assert (source.path, source.format) == (str(tmp_path / "base/a.jsonl"), "text")
    origins = loaded.origins
    assert origins["trainer.weight_decay"] == Origin("parent", f"{tmp_path}/base/b.yaml:3")
    assert origins["trainer.num_train_epochs"] == Origin("recipe", f"{tmp_path}/r.yaml:4")
    assert origins["trainer.learning_rate"] == Origin("override", "--set")
    assert origins["data.train[0].format"].source == "override"


def test_extends_refuses_cycles_and_absent_files(tmp_path: Path) -> None:
    write(tmp_path, "extends: r.yaml\n" + GOOD, "b.yaml")
    assert problems(tmp_path, "extends: b.yaml\n") == [
        "b.yaml:1: extends: a recipe cannot extend itself: r.yaml -> b.yaml -> r.yaml"
    ]
    (only,) = problems(tmp_path, "extends: nowhere.yaml\n" + GOOD)
    assert "extends: no file nowhere.yaml and no shipped recipe `nowhere.yaml`" in only


def test_what_is_missing_altogether_is_missing_in_the_given_file(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\n", "b.yaml")
    assert problems(tmp_path, "extends: b.yaml\nmodel: {name_or_path: m}\n") == [
        "r.yaml: data: required, but not given: Training and evaluation rows"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: \x07\n", "r.yaml:2: not valid YAML: "),
        ("a: " + "[" * 70 + "]" * 70, "r.yaml:1: nested more than 64 levels deep"),
        ("- " * 70 + "a", "r.yaml:1: nested more than 64 levels deep"),
        (GOOD + "seed: " + "9" * 30, "r.yaml:3: seed: the number 9" + "9" * 29 + " is beyond 64 bits"),
        (GOOD + "seed: !!int abc", "r.yaml:3: seed: cannot read 'abc' with the tag `tag:yaml.org,2002:int`"),
        (GOOD + "fixes: !!set {a}", "r.yaml:3: fixes: cannot read a collection with the tag `tag:"),
        (GOOD + 'python: "a\\0b"', "r.yaml:3: python: holds a zero byte or half a character"),
        (GOOD + "'': 1", "r.yaml:3: a key must be text, and not empty"),
        (GOOD + "extends: " + "x" * 5000, "r.yaml:3: extends: no file "),
    ],
)  # fmt: skip
def test_text_that_no_recipe_holds(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text)[0].startswith(expected)


def test_paths_of_a_hooks_file_and_a_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation").mkdir()
    text = GOOD + "task: seq2seq-lm\npython: inner/../hooks.py\ntrainer: {generation_config: generation}\n"
    recipe = load(tmp_path, text).recipe
    assert recipe.python == str(tmp_path / "hooks.py")
    assert recipe.trainer["generation_config"] == str(tmp_path / "generation")
    text = text.replace("config: generation", "config: org/name")
    assert load(tmp_path, text).recipe.trainer["generation_config"] == "org/name"


def test_overrides_that_do_not_fit(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD, "seed", "data.train[3].path=x", "trainer.max_stepz=3")
    assert found == [
        "--set: seed: cannot read 'seed' (write --set key=value, e.g. --set trainer.max_steps=100)",
        "--set: data.train[3].path: `data.train` has 1 entries, so there is no [3]",
        "--set: trainer.max_stepz: unknown key, expected a TrainingArguments field of"
        " transformers 5.23.0 (did you mean `max_steps`?)",
    ]


def test_references_stay_in_trainer_and_resolve_elsewhere(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("RUN", "r7")
    environment.setenv("LENGTH", "512")
    text = GOOD.replace("data: {", "data: {max_length: '${ENV:LENGTH}', ")
    text += "trainer: {run_name: 'x-${ENV:RUN}', max_steps: '${ENV:STEPS_:7}'}\n"
    recipe = load(tmp_path, text + "launch: {env: {KEY: '${ENV:RUN}'}}\n").recipe
    assert recipe.trainer == {"run_name": "x-${ENV:RUN}", "max_steps": "${ENV:STEPS_:7}"}
    assert recipe.launch.env == {"KEY": "${ENV:RUN}"}
    assert recipe.data.max_length == 512
    assert problems(tmp_path, GOOD + "trainer: {run_name: '${ENV:NOT_SET_}'}") == [
        "r.yaml:3: trainer.run_name: the environment variable NOT_SET_ is not set"
        " (set it, or give a default: ${ENV:NOT_SET_:value})"
    ]


def test_a_wrong_value_from_the_environment_is_not_shown(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("STEPS", "hunter2")
    (only,) = problems(tmp_path, GOOD + "trainer: {max_steps: '${ENV:STEPS}'}")
    assert "${ENV:STEPS}" in only
    assert "hunter2" not in only


def test_resolve_env() -> None:
    assert resolve_env("a-${ENV:A}-${ENV:B:b:c}", {"A": "1"}) == "a-1-b:c"
    with pytest.raises(RecipeError, match="the environment variable A is not set"):
        resolve_env("${ENV:A}", {})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    text = "model: {name_or_path: local, tokenizer: org/name, chat_template: ./t.jinja}\n"
    recipe = load(tmp_path, text + "data: {train: [{path: package:p/x.jsonl}, {path: d/a.csv}]}").recipe
    assert recipe.model.name_or_path == str(tmp_path / "local")
    assert recipe.model.tokenizer == "org/name"
    assert recipe.model.chat_template == str(tmp_path / "t.jinja")
    assert [s.path for s in recipe.data.train] == ["package:p/x.jsonl", str(tmp_path / "d/a.csv")]


def test_absent_recipe() -> None:
    with pytest.raises(RecipeError, match="no such file and no shipped recipe of that name"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("kettle.yml", "did you mean `{}/kettle.yaml`?"),
        ("ketle.yaml", "did you mean `{}/kettle.yaml`?"),
        ("llama3_8b_ful.yaml", "did you mean `llama3_8b_full`?"),
        ("nowhere.yaml", "`effilaunch recipes` lists the shipped ones"),
    ],
)
def test_a_similar_recipe_is_named(tmp_path: Path, asked: str, hint: str) -> None:
    (tmp_path / "kettle.yaml").touch()
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / asked)
    assert caught.value.problems[0].hint == hint.format(tmp_path)


def test_empty_and_unreadable_recipes(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == [
        "r.yaml:1: the recipe is empty, expected a mapping with at least `model:` and `data:`"
    ]
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read: it is not UTF-8 text"):
        load_recipe(tmp_path / "r.yaml")


def test_schema_lists_the_fields_of_the_libraries() -> None:
    schema = recipe_json_schema()
    trainer = schema["properties"]["trainer"]["properties"]
    assert "learning_rate" in trainer
    assert "output_dir" not in trainer
    assert "use_dora" in schema["$defs"]["AdapterSection"]["properties"]


def test_loading_imports_no_heavy_library(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD + "adapter: {r: 8}\ntrainer: {max_steps: 2}\n")
    code = (
        "import sys; from launcher.recipe.loading import load_recipe; load_recipe(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (GOOD + "fixes: {disable: kbit-compile}\n", "write [kbit-compile]"),
        (GOOD.replace("[{path: a.jsonl}]", "a.jsonl"), "write [{path: a.jsonl}]"),
    ],
)
def test_a_word_where_a_list_is_meant(tmp_path: Path, text: str, hint: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert [problem.hint for problem in caught.value.problems] == [hint]
