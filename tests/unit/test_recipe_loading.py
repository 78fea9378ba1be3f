"""Recipes: YAML without traps, layers, references, and every problem at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import Problem, RecipeError
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


def refused(folder: Path, text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    return caught.value.problems


def problems(folder: Path, text: str, *overrides: str) -> list[tuple[str, str | None, int | None]]:
    """(code, path, line) of each; the messages are in tests/golden/messages.txt."""
    return [(problem.code, problem.path, problem.line) for problem in refused(folder, text, *overrides)]


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
    (only,) = refused(tmp_path, text)
    assert (only.code, only.path, only.line) == ("duplicate-key", "seed", 5)
    assert "line 3" in only.message


def test_syntax_error_has_its_line(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD + "trainer: [1\nseed: 2\n") == [("yaml-syntax", None, 4)]


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
    assert problems(tmp_path, text) == [
        ("missing-key", "model", 1),
        ("wrong-choice", "model.dtype", 1),
        ("unknown-key", "model.nam_or_path", 1),
        ("unknown-key", "model.lora_alpha", 1),
        ("wrong-value", "adapter.r", 2),
        ("unknown-key", "adapter.lora_r", 2),
        ("wrong-choice", "data.train[0].format", 4),
        ("wrong-value", "data.train[0].weight", 4),
        ("missing-key", "data.eval.split", 5),
        ("unknown-key", "data.eval.splt", 5),
        ("wrong-type", "data.max_length", 6),
        ("wrong-type", "data.packing", 7),
        ("unsupported", "task", 8),
        ("wrong-type", "trainer.learning_rate", 10),
        ("unknown-key", "trainer.lr", 11),
        ("renamed-key", "trainer.evaluation_strategy", 12),
        ("owned-key", "trainer.bf16", 13),
        ("unknown-key", "batch_size", 14),
        ("unknown-key", "learning_rate", 15),
        ("unknown-key", "model_name", 16),
        ("unknown-key", "zzz", 17),
    ]


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
    assert [problem.path for problem in refused(tmp_path, text)] == [path]


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
    (only,) = refused(tmp_path, "extends: b.yaml\n")
    assert (only.code, only.file, only.line) == ("extends-cycle", f"{tmp_path}/b.yaml", 1)
    assert "r.yaml -> b.yaml -> r.yaml" in only.message
    assert problems(tmp_path, "extends: nowhere.yaml\n" + GOOD) == [("extends-missing", "extends", 1)]


def test_what_is_missing_altogether_is_missing_in_the_given_file(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\n", "b.yaml")
    (only,) = refused(tmp_path, "extends: b.yaml\nmodel: {name_or_path: m}\n")
    assert (only.code, only.path) == ("missing-key", "data")
    assert (only.file, only.line) == (f"{tmp_path}/r.yaml", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: \x07\n", ("yaml-syntax", None, 2)),
        ("a: " + "[" * 70 + "]" * 70, ("yaml-syntax", None, 1)),
        ("- " * 70 + "a", ("yaml-syntax", None, 1)),
        (GOOD + "seed: " + "9" * 30, ("yaml-number", "seed", 3)),
        (GOOD + "seed: !!int abc", ("yaml-tag", "seed", 3)),
        (GOOD + "fixes: !!set {a}", ("yaml-tag", "fixes", 3)),
        (GOOD + 'python: "a\\0b"', ("yaml-text", "python", 3)),
        (GOOD + "'': 1", ("yaml-key", None, 3)),
        (GOOD + "extends: " + "x" * 5000, ("extends-missing", "extends", 3)),
    ],
)
def test_text_that_no_recipe_contains(
    tmp_path: Path, text: str, expected: tuple[str, str | None, int]
) -> None:
    assert problems(tmp_path, text)[0] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + f"seed: {10**30}", ("yaml-number", "seed", 3)),
        (GOOD.replace("data: {", f"data: {{max_length: {10**30}, "), ("yaml-number", "data.max_length", 2)),
        (GOOD + "seed: !!int abc", ("yaml-tag", "seed", 3)),
    ],
)
def test_a_value_that_is_not_read_is_one_problem(
    tmp_path: Path, text: str, expected: tuple[str, str | None, int]
) -> None:
    assert problems(tmp_path, text) == [expected]


def test_a_value_that_is_not_read_hides_no_problem_of_another_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD + f"seed: {10**30}\n", "b.yaml")
    found = refused(tmp_path, "extends: b.yaml\nseed: x\n")
    assert [(p.code, Path(str(p.file)).name) for p in found] == [
        ("wrong-type", "r.yaml"),
        ("yaml-number", "b.yaml"),
    ]


def test_paths_of_a_hooks_file_and_a_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation").mkdir()
    text = GOOD + "task: seq2seq-lm\npython: inner/../hooks.py\ntrainer: {generation_config: generation}\n"
    recipe = load(tmp_path, text).recipe
    assert recipe.python == str(tmp_path / "hooks.py")
    assert recipe.trainer["generation_config"] == str(tmp_path / "generation")
    text = text.replace("config: generation", "config: org/name")
    assert load(tmp_path, text).recipe.trainer["generation_config"] == "org/name"


def test_overrides_that_do_not_fit(tmp_path: Path) -> None:
    found = refused(tmp_path, GOOD, "seed", "data.train[3].path=x", "trainer.max_stepz=3")
    assert [(problem.code, problem.path) for problem in found] == [
        ("override", "seed"),
        ("override", "data.train[3].path"),
        ("unknown-key", "trainer.max_stepz"),
    ]
    assert {problem.file for problem in found} == {"--set"}


def test_references_stay_in_texts_of_trainer_and_resolve_elsewhere(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("RUN", "r7")
    environment.setenv("LENGTH", "512")
    text = GOOD.replace("data: {", "data: {max_length: '${ENV:LENGTH}', ")
    text += "trainer: {run_name: 'x-${ENV:RUN}', max_steps: '${ENV:STEPS_:7}'}\n"
    recipe = load(tmp_path, text + "launch: {env: {KEY: '${ENV:RUN}'}}\n").recipe
    assert recipe.trainer == {"run_name": "x-${ENV:RUN}", "max_steps": 7}
    assert recipe.launch.env == {"KEY": "${ENV:RUN}"}
    assert recipe.data.max_length == 512
    (only,) = refused(tmp_path, GOOD + "trainer: {run_name: '${ENV:NOT_SET_}'}")
    assert (only.code, only.path, only.line) == ("env-missing", "trainer.run_name", 3)
    assert "NOT_SET_" in only.message


def test_a_wrong_value_from_the_environment_is_not_shown(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("STEPS", "hunter2")
    (only,) = refused(tmp_path, GOOD + "trainer: {max_steps: '${ENV:STEPS}'}")
    assert "${ENV:STEPS}" in only.message
    assert "hunter2" not in str(only)


def test_resolve_env() -> None:
    assert resolve_env("a-${ENV:A}-${ENV:B:b:c}", {"A": "1"}) == "a-1-b:c"
    with pytest.raises(RecipeError) as caught:
        resolve_env("${ENV:A}", {})
    assert [problem.code for problem in caught.value.problems] == ["env-missing"]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    text = "model: {name_or_path: local, tokenizer: org/name, chat_template: ./t.jinja}\n"
    recipe = load(tmp_path, text + "data: {train: [{path: package:p/x.jsonl}, {path: d/a.csv}]}").recipe
    assert recipe.model.name_or_path == str(tmp_path / "local")
    assert recipe.model.tokenizer == "org/name"
    assert recipe.model.chat_template == str(tmp_path / "t.jinja")
    assert [s.path for s in recipe.data.train] == ["package:p/x.jsonl", str(tmp_path / "d/a.csv")]


def test_absent_recipe() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("nowhere.yaml")
    assert [problem.code for problem in caught.value.problems] == ["recipe-missing"]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("kettle.yml", "`{}/kettle.yaml`"),
        ("ketle.yaml", "`{}/kettle.yaml`"),
        ("llama3_8b_ful.yaml", "`llama3_8b_full`"),
        ("nowhere.yaml", "`effilaunch recipes`"),
    ],
)
def test_a_similar_recipe_is_named(tmp_path: Path, asked: str, hint: str) -> None:
    (tmp_path / "kettle.yaml").touch()
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / asked)
    assert hint.format(tmp_path) in caught.value.problems[0].hint


def test_empty_and_unreadable_recipes(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == [("wrong-type", None, 1)]
    program = tmp_path / "train.py"
    for text in ("import transformers\n", "import transformers\nif True:\n    train({1: [2})\n"):
        program.write_text(text)
        with pytest.raises(RecipeError) as caught:
            load_recipe(program)
        assert [(p.code, p.file) for p in caught.value.problems] == [("wrong-type", str(program))]
        assert "Python" in caught.value.problems[0].message
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert [problem.code for problem in caught.value.problems] == ["unreadable"]


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
        (GOOD + "fixes: {disable: kbit-compile}\n", "[kbit-compile]"),
        (GOOD.replace("[{path: a.jsonl}]", "a.jsonl"), "[{path: a.jsonl}]"),
    ],
)
def test_a_word_where_a_list_is_meant(tmp_path: Path, text: str, hint: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    (only,) = caught.value.problems
    assert only.hint.endswith(hint)
