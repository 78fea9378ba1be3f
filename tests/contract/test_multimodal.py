"""Models for text and images whose text model has no class are refused by each command, in one message."""

from __future__ import annotations

import json

import pytest

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.models.text_part import image_text_types, text_part

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

ON = ("--on", "1xA100-80GB")
COMMANDS = {
    "plan": ("plan", "RECIPE", *ON),
    "trace": ("plan", "RECIPE", "--trace", *ON),
    "validate": ("validate", "RECIPE"),
    "run": ("run", "RECIPE", "--dry-run", *ON),
    "estimate": ("estimate", "RECIPE", *ON),
    "estimate-model": ("estimate", "MODEL", *ON),
    "init": ("init", "--model", "MODEL", "--data", "ROWS", "--goal", "text", *ON),
}


def test_the_types_are_those_of_the_installed_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    assert set(NAMES) == set(image_text_types())


def refused() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    for kind in image_text_types():
        try:
            text_part(kind, CONFIG_MAPPING[kind]().to_dict() | {"model_type": kind}, "causal-lm")
        except RecipeError:
            found.append(kind)
    return found


def test_those_with_a_class_for_their_text_model_are_not_refused():
    named = {
        "gemma3",
        "gemma4",
        "llama4",
        "qwen3_5",
        "qwen3_5_moe",
        "mistral3",
        "llava",
        "idefics3",
        "smolvlm",
    }
    assert not named & set(refused())
    assert {"qwen3_vl", "qwen2_5_vl", "mllama", "aya_vision"} <= set(refused())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for each type, with the configuration that its class has by default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    root = tmp_path_factory.mktemp("models")
    rows = root / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    for kind in refused():
        (root / kind).mkdir()
        config = CONFIG_MAPPING[kind]().to_dict() | {"model_type": kind}
        (root / kind / "config.json").write_text(json.dumps(config, default=str))
        (root / f"{kind}.yaml").write_text(
            f"model: {{name_or_path: {root / kind}, tokenizer: t}}\nadapter: {{type: lora}}\n"
            f"data: {{train: [{{path: {rows}}}], max_length: 64}}\ntrainer: {{max_steps: 2}}\n"
        )
    return root


@pytest.mark.parametrize("command", COMMANDS)
def test_every_type_is_refused_once_and_clearly(models, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for kind in refused():
        place = {
            "RECIPE": f"{models / kind}.yaml",
            "MODEL": str(models / kind),
            "ROWS": str(models / "rows.jsonl"),
        }
        status = main([*(place.get(word, word) for word in COMMANDS[command]), "--json"])
        codes = [error["code"] for error in json.loads(capsys.readouterr().out).get("errors", ())]
        if (status, codes) != (2, ["multimodal-model"]):
            wrong[kind] = (status, codes)
    assert not wrong


def test_a_wrapper_without_a_known_text_model_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "not_yet_known_vl", "text_config": {"model_type": "x", "hidden_size": 64}})
    )
    assert main(["estimate", str(tmp_path), *ON, "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "multimodal-model"


def test_the_text_model_of_an_unlisted_wrapper_is_planned(capsys, tmp_path):
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio", "text_config": text}))
    assert main(["estimate", str(tmp_path), *ON, "--json"]) == 0
