"""`model.kbit_norms` over real bitsandbytes weights: dtypes, losses, resumed runs, results."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch
from memory_cases import FULL
from safetensors.torch import load_file
from transformers import Trainer

from launcher.train.job import read_job
from launcher.train.model.adapters import attach_adapter
from launcher.train.model.models import load_model
from launcher.train.model.processing import load_processing
from launcher.train.results.merge import merge
from launcher.train.tiny import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, TINY_LLAMA, trained, write_run

pytestmark = pytest.mark.usefixtures("warm")

KINDS: dict[str, dict[str, Any]] = {
    "int8": {"type": "int8"},
    "nf4": {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"},
    "fp4": {"type": "fp4", "double_quant": False, "compute_dtype": "bfloat16"},
}
HALF = {
    "precision": "bf16",
    "trainer.bf16": True,
    "model.dtype": "bfloat16",
    "model.device_map": "local",
    "model.prepare_for_kbit": True,
    "adapter": LORA,
}


def settings(kind: str, dtype: str, **more: Any) -> dict[str, Any]:
    return {**HALF, "model.quantization": KINDS[kind], "model.kbit_norms": dtype, **more}


def ready(folder: Path, changes: dict[str, Any]) -> Any:
    """The model as it is trained."""
    job = read_job(write_run(folder, changes))
    processing = load_processing(job)
    labels = ("a", "b") if job.task.classifies else None
    return attach_adapter(job, load_model(job, processing, labels), processing)


def dtypes(model: Any, *, trained: bool) -> dict[str, set[torch.dtype]]:
    """Kind of parameter -> its dtypes."""
    found: dict[str, set[torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is trained:
            layer = "layers" in name and "norm" not in name
            found.setdefault("matrices" if layer else "rest", set()).add(parameter.dtype)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_the_dtype_of_the_plan(tmp_path, kind, dtype):
    model = ready(tmp_path, settings(kind, dtype))
    packed = torch.int8 if kind == "int8" else torch.uint8
    assert dtypes(model, trained=False) == {"matrices": {packed}, "rest": {getattr(torch, dtype)}}
    assert dtypes(model, trained=True) == {"matrices": {torch.float32}}


@pytest.mark.parametrize(
    ("task", "rows", "dtype"),
    [("grpo", "prompt", "float32"), ("grpo", "prompt", "bfloat16"), ("dpo", "preference", "float32")],
)
def test_a_run_of_trl_trains_in_the_dtypes_that_are_counted(tmp_path, monkeypatch, task, rows, dtype):
    """trl's own scripts widen no norms and train adapters in bfloat16 over a quantised base."""
    seen = []

    def spy(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((dtypes(self.model, trained=False), dtypes(self.model, trained=True)))
        return step(self, model, *args, **kwargs)

    step = Trainer.training_step
    monkeypatch.setattr(Trainer, "training_step", spy)
    changes = {"task": task, "data.train": [{"path": "unused", "format": rows, "columns": {}}]}
    trained(tmp_path / "run", settings("nf4", dtype, **changes, **{"trainer.max_steps": 1}))
    job = replace(FULL, precision="bf16", quantization="nf4", kbit_norms=dtype, adapter=True)
    assert job.engine.trained_width(job) == torch.float32.itemsize
    assert job.engine.dtypes(job, on_cpu=True).residual == getattr(torch, dtype).itemsize
    rest = {"matrices": {torch.uint8}, "rest": {getattr(torch, dtype)}}
    assert seen[-1] == (rest, {"matrices": {torch.float32}})


def test_values_are_those_of_the_checkpoint(tmp_path):
    """16 bits to 32 and back loses nothing."""
    job = read_job(write_run(tmp_path, settings("nf4", "bfloat16")))
    base = load_model(job, tiny_tokenizer(512), None)
    before = {name: p.clone() for name, p in base.named_parameters() if p.dtype is torch.bfloat16}
    attach_adapter(job, base, tiny_tokenizer(512))
    after = {name.replace(".base_layer", ""): p for name, p in base.named_parameters()}
    assert len(before) == 7, "embedding, head, five norms"
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_weights_that_were_float32_before_stay_so(tmp_path, monkeypatch):
    """Those that a class keeps in float32 are none of peft's."""
    monkeypatch.setattr(
        "transformers.LlamaForCausalLM._keep_in_fp32_modules_strict", ["input_layernorm"], raising=False
    )
    model = ready(tmp_path, settings("nf4", "bfloat16"))
    kinds = {name: p.dtype for name, p in model.named_parameters() if "norm" in name}
    kept = {name for name, kind in kinds.items() if kind is torch.float32}
    assert kept == {name for name in kinds if "input_layernorm" in name} != set()


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_added_tokens_are_trained_in_float32_over_it(tmp_path, tied):
    changes = settings("nf4", "bfloat16", **{"model.add_tokens": ["<|a|>"]})
    changes["model.config"] = {**TINY_LLAMA, "tie_word_embeddings": tied}
    model = ready(tmp_path, changes)
    assert dtypes(model, trained=True) == {"matrices": {torch.float32}, "rest": {torch.float32}}
    assert dtypes(model, trained=False)["rest"] == {torch.bfloat16}
    ids = torch.arange(4, 44).view(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_classifiers_head_is_trained_in_float32(tmp_path, kind):
    changes = settings(kind, "bfloat16", task="sequence-classification")
    model = ready(tmp_path, changes)
    head = model.base_model.model.score
    assert head.modules_to_save["default"].weight.dtype is torch.float32
    assert head.original_module.weight.dtype is torch.bfloat16
    ids = torch.arange(4, 44).view(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
    assert head.modules_to_save["default"].weight.grad.abs().sum() > 0


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_it_learns_the_same_with_less_memory(tmp_path, kind):
    found = {}
    for dtype in ("float32", "bfloat16"):
        folder = trained(tmp_path / dtype, settings(kind, dtype, **{"trainer.max_steps": 12}))
        found[dtype] = losses(folder), json.loads((folder / "result.json").read_text())
    (wide, before), (narrow, after) = found["float32"], found["bfloat16"]
    assert wide != narrow, "they compute in different dtypes"
    assert narrow == pytest.approx(wide, abs=0.05)
    assert narrow[-1] < narrow[0] - 0.2
    assert after["memory_footprint"] < before["memory_footprint"]
    assert after["memory"]["measured"] < before["memory"]["measured"]


def test_a_resumed_run_and_its_result_have_the_same_dtypes(tmp_path, monkeypatch):
    seen = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        model = attach_adapter(*args, **kwargs)
        seen.append((dtypes(model, trained=False), dtypes(model, trained=True)))
        return model

    monkeypatch.setattr("launcher.train.model.adapters.attach_adapter", spy)
    saving = settings("nf4", "bfloat16", **{"trainer.save_strategy": "steps", "trainer.save_steps": 4})
    folder = trained(tmp_path / "run", saving)
    whole = losses(folder)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-8")
    for name in ("COMPLETED", "result.json"):
        (folder / name).unlink()
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    assert losses(trained(folder, saving)) == whole
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][0]["rest"] == {torch.bfloat16}
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    merge(folder, tmp_path / "merged", "bfloat16", lambda _: "card")
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
