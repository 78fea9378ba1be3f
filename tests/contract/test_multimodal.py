"""Models of more than text are refused by each command with one message, for every type of transformers."""

from __future__ import annotations

import json

import pytest

from launcher.cli import main
from launcher.facts.model import _image_text_types

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

    assert set(NAMES) == _image_text_types()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for each type, with the configuration that its class has by default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    root = tmp_path_factory.mktemp("models")
    rows = root / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    for kind in sorted(_image_text_types()):
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
    for kind in sorted(_image_text_types()):
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


@pytest.mark.parametrize("kind", ["qwen2_audio", "not_yet_known_vl"])
def test_other_wrappers_are_told_by_their_text_config(kind, capsys, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "text_config": {"model_type": "qwen2", "hidden_size": 64}})
    )
    assert main(["estimate", str(tmp_path), *ON, "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "multimodal-model"
    assert "qwen2" in error["message"]
