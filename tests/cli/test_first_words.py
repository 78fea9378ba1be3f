"""What a new user types first: words, options and files of other tools, YAML that is indented wrongly."""

from __future__ import annotations

import json

import pytest

from launcher.cli import main
from launcher.parsing import COMMANDS, OTHER_WORDS

RECIPE = "model: {name_or_path: huggyllama/llama-7b}\ndata: {train: [{path: x.jsonl, format: text}]}\n"


def problems(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)["errors"]


def hint(capsys, *words):
    code, found = problems(capsys, *words)
    assert (code, [one["code"] for one in found]) == (2, ["usage"])
    return found[0]["hint"]


@pytest.mark.parametrize(
    ("word", "command"),
    [(word, name) for name, words in OTHER_WORDS.items() for word in words]
    + [("plna", "plan"), ("estmate", "estimate"), ("Train", "run"), ("fine_tune", "run")],
)
def test_a_word_of_another_tool_names_our_command(capsys, word, command):
    assert f"`effilaunch {command}`" in hint(capsys, word, "x.yaml")
    assert command in [one.name for one in COMMANDS]
    assert word not in [one.name for one in COMMANDS]


def test_a_word_without_a_command_points_at_the_help(capsys):
    assert "effilaunch --help" in hint(capsys, "xyzzy")


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--learning_rate", "1e-4"], "--set trainer.learning_rate=1e-4"),
        (["--learning-rate=1e-4"], "--set trainer.learning_rate=1e-4"),
        (["--trainer.max_steps", "3"], "--set trainer.max_steps=3"),
        (
            ["--lr", "1e-4", "--epochs", "3"],
            "--set trainer.learning_rate=1e-4 --set trainer.num_train_epochs=3",
        ),
        (["--load_in_4bit", "True"], "--set model.quantization=nf4"),
        (["--bf16"], "--set precision=bf16"),
        (["--lora_r", "8"], "--set adapter.r=8"),
        (["--model_name_or_path", "a b"], "--set 'model.name_or_path=a b'"),
        (["--max_steps"], "--set trainer.max_steps=VALUE"),
    ],
)
def test_a_setting_as_an_option_is_shown_as_set(capsys, options, settings):
    assert f"`{settings}`" in hint(capsys, "run", "smoke", *options)


def test_what_is_no_setting_or_has_no_set_points_at_the_help(capsys):
    assert "run --help" in hint(capsys, "run", "smoke", "--frobnicate")
    assert "merge --help" in hint(capsys, "merge", "smoke", "--learning_rate=1")


OTHERS = {
    "axolotl recipe": "base_model: a/b\nadapter: qlora\ndatasets:\n  - {path: x, type: alpaca}\n",
    "LLaMA-Factory recipe": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: identity\n",
    "TRL recipe": "model_name_or_path: a/b\ndataset_name: x\nlearning_rate: 1.0e-4\n",
    "DeepSpeed config": '{"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}',
}


@pytest.mark.parametrize("command", ["plan", "run", "validate", "prepare"])
@pytest.mark.parametrize("tool", OTHERS)
def test_a_file_of_another_tool_is_for_import(capsys, tmp_path, tool, command):
    path = tmp_path / "their file.yaml"
    path.write_text(OTHERS[tool])
    code, found = problems(capsys, command, str(path))
    assert (code, [(one["code"], one["file"]) for one in found]) == (2, [("other-tool", str(path))])
    assert tool in found[0]["message"]
    assert f"effilaunch import '{path}'" in found[0]["hint"]


def test_a_recipe_without_a_model_is_still_ours(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("precision: bf16\ntrainer: {max_steps: 3}\n")
    _, found = problems(capsys, "plan", str(path))
    assert {one["code"] for one in found} == {"missing-key"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("model:\n  name_or_path: a/b\n precision: bf16\n", 3, ("by 1", "line 1 by 0")),
        ("model:\n  config:\n    x: 1\n   y: 1\n", 4, ("by 3", "line 2 by 2")),
        ("model:\n  name_or_path: a/b\n   dtype: bfloat16\n", 3, ("like line 2", "by 2 spaces")),
        ("model:\n\tname_or_path: a/b\n", 2, ("tabs",)),
        ("model: {name_or_path: a/b}\nnotes: a: b\n", 2, ("quotes",)),
    ],
)
def test_wrong_indentation_is_named(capsys, tmp_path, text, line, words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    code, found = problems(capsys, "plan", str(path))
    assert (code, found[0]["code"], found[0]["line"]) == (2, "yaml-syntax", line)
    assert all(word in found[0]["hint"] for word in words), found[0]["hint"]


def test_an_unknown_device_has_its_place(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE + "hardware:\n  num_nodes: 1\n  device: H1000\n")
    _, found = problems(capsys, "plan", str(path))
    assert [(one["code"], one["line"], one["path"]) for one in found] == [
        ("unknown-device", 5, "hardware.device")
    ]
    for command in ("plan", "estimate"):
        _, found = problems(capsys, command, "smoke", "--on", "1xH1000")
        assert [(one["code"], one["path"]) for one in found] == [("unknown-device", "--on")]


def test_a_setting_without_a_value_is_shown_as_a_recipe_writes_it(capsys):
    assert main(["plan", "llama_7b_full_zero3"]) == 0
    assert "model.device_map = null" in capsys.readouterr().out
    assert main(["plan", "llama_7b_full_zero3", "--explain", "model.device_map"]) == 0
    assert capsys.readouterr().out.startswith("model.device_map = null\n")
