"""Everything that is shipped works: each recipe validates and plans, profiles say their name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from every import every

from launcher.cli import main
from launcher.recipe.field_tables import TASK_FORMATS
from launcher.recipe.loading import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(
    path for path in (ROOT / "recipes").rglob("*.yaml") if "_base" not in path.parts
)  # bases are fragments for `extends`, not recipes
OF_ROWS = [path for path in RECIPES if path.parent.name != "own"]
"""Without those of hooks, which are planned and run by tests/process/test_own.py."""
BASES = sorted((ROOT / "recipes" / "_base").glob("*.yaml"))
PROFILES = sorted((ROOT / "ds_configs").glob("*.json"))
PROMISED = {
    "smoke",
    "starcoder_lora",
    "starcoder_int8_lora",
    "starcoder_fim_lora",
    "llama_7b_full_zero3",
    "opt_6_7b_int8_lora",
    "mt0_large_lora",
    "vit_l16",
    "bert_large",
    "bert_large_ner",
    "bert_large_sts",
    "qwen3_0_6b_topics",
    "bert_large_conll",
    "llama3_8b_full",
    "llama3_8b_qlora_24gb",
    "qwen3_8b_lora",
    "gemma3_1b_lora",
    "mistral_7b_lora",
    "mixtral_8x7b_lora",
    "qwen3_30b_a3b_qlora",
    "smollm2_135m_chat",
    "qwen3_8b_dpo",
    "qwen3_8b_reward",
    "qwen3_8b_kto",
    "qwen3_8b_grpo",
    "qwen2_5_0_5b_grpo_24gb",
    "bge_base_embedding_24gb",
    "modernbert_base_embedding_24gb",
    "modernbert_large_long_texts",
    "qwen3_embedding_0_6b",
    "minilm_reranker_24gb",
    "qwen3_0_6b_reranker",
    "pretrain_llama_200m",
    "qwen3_vl_8b_lora_24gb",
    "gemma3_4b_vision_lora",
    "smolvlm_lora",
    "question_answering",
    "masked_lm",
    "whisper",
    "wav2vec2",
    "segmentation",
}
SHOWN = {
    "extends", "early_stopping", "model.config", "model.add_tokens", "model.chat_template",
    "model.quantization", "adapter.type", "data.metrics", "data.overlong", "data.packing", "data.loss_on",
    "data.fim", "data.streaming", "data.eval.split", "data.eval[0].path", "data.train[0].columns",
    "data.train[0].name", "data.train[0].weight", "sharding.config", "trainer.beta",
    "trainer.predict_with_generate",
}  # fmt: skip
"""Keys that at least one shipped recipe uses."""
EDITOR = "# yaml-language-server: $schema="
# Sections of DeepSpeed's config that override what the recipe says about optimizer and schedule.
OVERRIDING = {"optimizer", "scheduler"}


def plan_json(capsys, *arguments: str) -> dict:
    code = main(["plan", *arguments, "--json"])
    out = capsys.readouterr().out
    assert code == 0, out
    return json.loads(out)


def used(path: Path) -> set[str]:
    """Dotted keys of the recipe itself and of what it extends."""
    keys = set(load_recipe(path).origins)
    return keys | {"extends"} if "\nextends: " in path.read_text(encoding="utf-8") else keys


def test_the_promised_recipes_are_shipped():
    assert {path.stem for path in RECIPES} >= PROMISED
    assert len(RECIPES) >= 20


def test_every_task_and_feature_is_in_a_shipped_recipe():
    assert {load_recipe(path).recipe.task for path in RECIPES} == set(TASK_FORMATS)
    assert SHOWN - set().union(*map(used, RECIPES)) == set()


def test_every_base_is_extended():
    text = "".join(path.read_text(encoding="utf-8") for path in RECIPES)
    assert BASES
    assert [path.name for path in BASES if f"\nextends: _base/{path.name}\n" not in text] == []


@every("path", [*RECIPES, *BASES], ids=lambda path: path.stem)
def test_recipe_names_its_schema_for_editors(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(EDITOR)
    assert (path.parent / first.removeprefix(EDITOR)).resolve() == ROOT / "recipes" / "recipe.schema.json"


def test_the_list_of_recipes_shows_titles(capsys):
    assert main(["recipes", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["recipes"]
    names = [path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in RECIPES]
    assert sorted(row["name"] for row in shown) == sorted(names)
    for row in shown:
        assert re.fullmatch(r"[A-Z].*[.:]", row["title"]), row
        assert "yaml-language-server" not in row["title"]


def test_the_table_names_exactly_the_shipped_recipes():
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[`([\w./-]+)`\]\(\.\./recipes/\1\.yaml\)", table, flags=re.MULTILINE)
    shipped = [path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in RECIPES]
    assert sorted(named) == sorted(shipped)


@every("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_header_says_how_to_launch(path):
    header = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"effilaunch run recipes/{path.relative_to(ROOT / 'recipes').as_posix()}" in header
    assert re.search(r"^# On: ", header, flags=re.MULTILINE)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_validates(path, capsys):
    code = main(["validate", str(path)])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("path", OF_ROWS, ids=lambda path: path.stem)
def test_recipe_plans_on_its_hardware_and_fits(path, capsys):
    on = ["--on", "cpu"] if path.stem == "smoke" else []
    plan = plan_json(capsys, str(path), *on)
    batch = plan["batch"]
    assert batch["micro"] * batch["accumulation"] * batch["data_parallel"] == batch["global"]
    assert plan["command"]
    if path.stem != "smoke":
        assert plan["memory"]["fits"] is True
        assert plan["memory"]["high"] <= plan["hardware"]["device_bytes"]


def test_starcoder_plans_differ_where_the_hardware_does(capsys):
    recipe = str(ROOT / "recipes" / "starcoder_lora.yaml")
    a100 = plan_json(capsys, recipe, "--on", "8xA100-80GB")
    v100 = plan_json(capsys, recipe, "--on", "8xV100-32GB")
    assert a100["ds_config"]["bf16"]["enabled"] is True
    assert v100["ds_config"].get("bf16", {}).get("enabled", False) is False
    assert v100["ds_config"]["fp16"]["enabled"] is True
    stages = [plan["ds_config"]["zero_optimization"]["stage"] for plan in (a100, v100)]
    assert stages[0] < stages[1]
    assert a100["batch"]["global"] == v100["batch"]["global"] == 64


@pytest.mark.parametrize("device", ["1xRTX4090-24GB", "1xRTX3090-24GB", "1xA10-24GB", "1xL4-24GB"])
def test_the_24gb_recipe_fits_the_cards_its_header_names(device, capsys):
    plan = plan_json(capsys, str(ROOT / "recipes" / "llama3_8b_qlora_24gb.yaml"), "--on", device)
    assert plan["memory"]["fits"] is True


def test_profiles_are_the_documented_six():
    assert [path.stem for path in PROFILES] == [
        "zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload",
    ]  # fmt: skip


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profile_says_what_its_name_says(path):
    config = json.loads(path.read_text(encoding="utf-8"))
    zero = config["zero_optimization"]
    assert f"zero{zero['stage']}" == path.stem.split("_")[0]
    kind = {"offload": "cpu", "nvme": "nvme"}.get(path.stem.partition("_")[2])
    assert zero.get("offload_optimizer", {}).get("device") == kind
    assert zero.get("offload_param", {}).get("device") == (kind if zero["stage"] == 3 else None)
    assert not OVERRIDING & config.keys()
    assert config["gradient_clipping"] == "auto"  # absent, DeepSpeed would clip at 1.0
