"""Configs of tools that no reader is for are refused by the tool's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.importing.importers import read_text

OUMI = {
    "model": {"model_name": "a/b"},
    "data": {"train": {"datasets": [{"dataset_name": "c/d"}]}},
    "training": {"trainer_type": "TRL_SFT", "learning_rate": 1e-4},
}
NEOX = {"pipe-parallel-size": 1, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
CONFIGS = [
    (OUMI, "Oumi"),
    ({"model": {"_component_": "torchtune.models.llama3.llama3_8b"}, "optimizer": {"lr": 1}}, "torchtune"),
    ({"model": "a/b", "dataset": ["c/d"], "tuner_type": "lora", "learning_rate": 1e-4}, "ms-swift"),
    ({"model_id_or_path": "a/b", "dataset": ["c"], "sft_type": "lora", "learning_rate": 1}, "ms-swift"),
    ({"trainer": {"devices": 8}, "exp_manager": {}, "model": {"data": {}}}, "NeMo"),
    ({"model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM"}, "optimizer": {}}, "NeMo"),
    ({"checkpoint_dir": "x", "data": {"class_path": "litgpt.data.Alpaca"}, "train": {}}, "LitGPT"),
    ({"model_name": "x", "out_dir": "y", "data": "TinyLlama", "train": {}, "eval": {}}, "LitGPT"),
    ({"base": "a/b", "task": "sft", "data": {"train": "x"}, "training": {"lr": 1e-4}}, "Soup"),
    ({"model": {"name": "x"}, "data": {}, "tuning": {"n_trials": 2}}, "Oumi"),
    (NEOX, "GPT-NeoX"),
    ({"actor_rollout_ref": {"model": {}}, "data": {}, "trainer": {}}, "verl"),
    ({"trainer": {"accelerator": "gpu"}, "model": {"name_or_path": "x"}}, "Lightning"),
    ({"model": "a/b", "model_class": "llm", "train_dataset": "x", "learning_rate": 1}, "LLaMA-Factory v1"),
    ({"max_duration": "1ep", "train_loader": {}, "model": {}}, "LLM Foundry"),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}, "config.json"),
]


@pytest.mark.parametrize(("config", "tool"), CONFIGS)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_config_of_another_tool_is_refused_by_its_name(config: object, tool: str, as_json: bool) -> None:
    text = json.dumps(config) if as_json else yaml.safe_dump(config)
    with pytest.raises(RecipeError) as caught:
        read_text(text, "c.json" if as_json else "c.yaml")
    (problem,) = caught.value.problems
    assert problem.code == "import-unknown"
    assert f"a config of {'transformers' if tool == 'config.json' else tool}" in problem.message
    assert "docs/migrate/" in (problem.hint or "")


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        ({"model": {"name_or_path": "a/b"}, "data": {"train": []}}, True),
        ({"model": {"config": {"model_type": "llama"}}, "data": {"train": []}, "trainer": {}}, True),
        (OUMI, False),
        ({"model": "a/b", "data": "c.jsonl"}, False),
    ],
)
def test_only_a_recipe_is_called_one(config: object, ours: bool) -> None:
    with pytest.raises(RecipeError) as caught:
        read_text(yaml.safe_dump(config), "c.yaml")
    assert ("effilaunch itself" in caught.value.problems[0].message) == ours


def test_deepspeed_reads_json_alone() -> None:
    with pytest.raises(RecipeError) as caught:
        read_text("zero_optimization: {stage: 2}\n", "c.yaml")
    assert caught.value.problems[0].code == "import-unknown"


@pytest.mark.parametrize("text", ["", " \n\n", "# rl: kto\n"])
@pytest.mark.parametrize("file", ["c.yaml", "c.json", "run.sh"])
def test_an_empty_file_is_told_as_such(text: str, file: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_text(text, file)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.message) == ("import-unknown", file, "is empty")


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "importing_cases").glob("*.y*ml")))
def test_what_a_reader_is_for_is_read(file: Path) -> None:
    assert read_text(file.read_text(), file.name).taken
