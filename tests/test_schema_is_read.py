"""No key of the recipe is ignored: each changes the plan's files, or is a setting that the worker reads."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from factories import facts, recipe
from pydantic import BaseModel

from launcher.errors import DoesNotFit
from launcher.plan.planner import make_plan
from launcher.recipe.schema import Recipe
from launcher.render.bundle import render

ROOT = Path(__file__).resolve().parents[1]
BASE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], eval: {split: 0.5}, max_length: 512}
trainer: {max_steps: 10}
"""
# A value that differs from the default, for each leaf of the schema.
CHANGED: dict[str, str] = {
    "task": "sequence-classification",
    "model.name_or_path": "other/model",
    "model.config": "huggyllama/llama-7b",
    "model.revision": "v2",
    "model.gguf_file": "a.gguf",
    "model.tokenizer": "other/tokenizer",
    "model.quantization": "nf4",
    "model.quantization.type": "nf4",
    "model.quantization.double_quant": "false",
    "model.quantization.compute_dtype": "float16",
    "model.dtype": "float32",
    "model.attn_implementation": "eager",
    "model.device_map": "auto",
    "model.chat_template": "'{{ messages }}'",
    "model.add_tokens": "[<a>]",
    "model.cache_dir": "/tmp/cache",
    "model.trust_remote_code": "true",
    "adapter.type": "lora",
    "adapter.path": "/tmp/adapter",
    "data.train": "[{path: other.jsonl}]",
    "data.eval": "[{path: other.jsonl}]",
    "data.eval.split": "0.25",
    "data.metrics": "[perplexity]",
    "data.max_length": "1024",
    "data.overlong": "drop",
    "data.packing": "true",
    "data.padding_free": "true",
    "data.loss_on": "all",
    "data.fim": "{rate: 0.5}",
    "data.fim.rate": "0.25",
    "data.fim.spm_rate": "0.25",
    "data.streaming": "true",
    "data.max_truncated": "0.5",
    "data.num_proc": "2",
    "precision": "fp32",
    "sharding.engine": "ddp",
    "sharding.zero_stage": "3",
    "sharding.offload_optimizer": "cpu",
    "sharding.offload_param": "cpu",
    "sharding.config": "zero2",
    "global_batch_size": "128",
    "trainer": "{max_steps: 10, weight_decay: 0.1}",
    "hardware.num_nodes": "2",
    "hardware.devices_per_node": "2",
    "hardware.device": "A100-40GB",
    "launch.launcher": "accelerate",
    "launch.env": "{NCCL_DEBUG: INFO}",
    "fixes.disable": "[use-cache-off]",
    "early_stopping.patience": "2",
    "early_stopping.threshold": "0.5",
    "python": "hooks.py",
    "seed": "7",
}
SOURCE_FIELDS = ("path", "format", "columns", "weight", "split", "name", "revision")


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of all fields of a section and of the sections inside it."""
    found = []
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        inner = [kind for kind in kinds(field.annotation) if isinstance(kind, type)]
        sections = [kind for kind in inner if issubclass(kind, BaseModel) and kind.__name__ != "DataSource"]
        if not sections or len(kinds(field.annotation)) - len(sections) > 1:
            found.append(dotted)
        for section in sections:
            found += leaves(section, dotted + ".")
    return found


def kinds(annotation: Any) -> list[Any]:
    """The parts of a union, and what a list or an annotation holds."""
    arguments = get_args(annotation)
    if not arguments or isinstance(arguments[0], str):
        return [annotation]
    return [kind for argument in arguments if argument is not type(None) for kind in kinds(argument)]


def worker_words() -> set[str]:
    """Every text constant of the worker's code."""
    words = set()
    for path in (ROOT / "launcher/train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    return words


def test_the_table_has_every_leaf_of_the_schema():
    short_forms = {"model.quantization", "data.eval", "data.fim"}  # a name, a list, a whole section
    assert set(leaves(Recipe)) == set(CHANGED) - short_forms


def test_the_worker_reads_every_field_of_a_source():
    from launcher.recipe.schema import DataSource

    assert set(DataSource.model_fields) == set(SOURCE_FIELDS)
    assert set(SOURCE_FIELDS) <= worker_words()


def planned(folder: Path, text: str, **facts_changes: Any) -> dict[str, Any]:
    loaded = recipe(folder, text)
    on = "8xA100-80GB"
    if loaded.recipe.hardware is not None:
        section = loaded.recipe.hardware
        on = f"{section.num_nodes}x{section.devices_per_node}x{section.device}"
    if loaded.recipe.model.device_map:
        on = "A100-80GB"
    if loaded.recipe.sharding.config:
        facts_changes["profile"] = {"zero_optimization": {"stage": 2}}
    try:
        plan = make_plan(loaded, facts(on, **facts_changes))
    except DoesNotFit as error:
        plan = error.nearest_miss
    found: dict[str, Any] = json.loads(render(plan).files["plan.json"])
    return found


# What a leaf needs beside it to make sense.
CONTEXT: dict[str, dict[str, str]] = {
    "task": {"adapter": "null"},
    "model.quantization.double_quant": {"model.quantization.type": "nf4"},
    "model.quantization.compute_dtype": {"model.quantization.type": "nf4"},
    "adapter.path": {"adapter": "{}"},
    "data.fim": {"data.train": "[{path: a.txt, format: text}]"},
    "data.fim.rate": {"data.train": "[{path: a.txt, format: text}]"},
    "data.fim.spm_rate": {"data.fim.rate": "0.5", "data.train": "[{path: a.txt, format: text}]"},
    "data.streaming": {"data.eval": "null"},
    "sharding.offload_param": {"sharding.zero_stage": "3"},
    "early_stopping.threshold": {"early_stopping.patience": "2"},
    "hardware.num_nodes": {"hardware.device": "A100-80GB"},
    "hardware.devices_per_node": {"hardware.device": "A100-80GB"},
    "launch.launcher": {"sharding.engine": "deepspeed"},
}


def with_values(changes: dict[str, str]) -> str:
    import yaml

    data = yaml.safe_load(BASE)
    for dotted, text in changes.items():
        keys = dotted.split(".")
        holder = data
        for key in keys[:-1]:
            if not isinstance(holder.get(key), dict):
                holder[key] = {}
            holder = holder[key]
        value = yaml.safe_load(text)
        if value is None:
            holder.pop(keys[-1], None)
        else:
            holder[keys[-1]] = value
    return yaml.safe_dump(data)


@pytest.mark.parametrize("leaf", sorted(CHANGED))
def test_every_leaf_changes_a_file_or_is_read_by_the_worker(leaf, tmp_path):
    (tmp_path / "hooks.py").write_text("def format_row(row):\n    return row\n")
    context = CONTEXT.get(leaf, {})
    hooks = {"hooks": ("format_row",)} if leaf == "python" else {}
    before = planned(tmp_path, with_values(context))
    instead = {"model.name_or_path": "null"} if leaf == "model.config" else {}
    after = planned(tmp_path, with_values({**context, leaf: CHANGED[leaf], **instead}), **hooks)
    if leaf == "adapter.type":
        assert after["settings"]["adapter.type"]["value"] == "lora"
        return
    # what the value decides beyond being repeated as a setting
    decided = {key for key in before if key not in ("settings", "recipe", "warnings")}
    if any(before[key] != after[key] for key in decided):
        return
    changed = {
        key
        for key in before["settings"].keys() | after["settings"].keys()
        if before["settings"].get(key, {}).get("value") != after["settings"].get(key, {}).get("value")
    }
    assert changed, f"{leaf} changes nothing in the plan"
    words = worker_words()
    read = {key for key in changed if key in words or key.split(".")[0] in ("trainer", "adapter")}
    assert read, f"{leaf} changes the settings {sorted(changed)}, which nothing reads"
