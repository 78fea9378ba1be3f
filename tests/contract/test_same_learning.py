"""What makes a run faster does not change what it learns: 50 steps beside a Trainer written by hand.

Two layers of Llama, rows of mixed lengths in random order, two micro-batches a step, and an epoch that ends
with a step of one. The plain side is transformers' Trainer with its own collator, attention and loss; ours
is a worker on a plan. Losses are compared step by step, and the trained weights at the end.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import cases

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import LLAMA
from grounds import tokenizer_of_1024_words, write_rows
from plans import prepared

from launcher.train.model import loss as head_loss

STEPS = 50
ALIKE = 1e-5
"""Relative, for losses of float32; what was seen is below 2e-6."""
HALF_ALIKE = 5e-4
"""Products are rounded to 16 bits before the mean is taken instead of after it; 6e-5 was seen."""
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}
CHUNKED = {"model.loss": "chunked"}
BLOCKS = {"model.compile_blocks": True}
FLAT = {"data.padding_free": True}
VARLEN = {**FLAT, "model.attn_implementation": "varlen"}
ALIGNED = {"data.pad_to_multiple_of": 8}
WORKERS = {
    "trainer.dataloader_num_workers": 2,
    "trainer.dataloader_prefetch_factor": 2,
    "trainer.dataloader_persistent_workers": True,
}
NO_CAST = {"adapter.cast_input_dtype_enabled": False}
SETTINGS = {
    "none": {},
    "chunked": CHUNKED,
    "blocks": BLOCKS,
    "padding-free": FLAT,
    "aligned": ALIGNED,
    "workers": WORKERS,
    "varlen": VARLEN,
    "varlen-aligned": VARLEN | ALIGNED,
    "all": VARLEN | CHUNKED | BLOCKS | ALIGNED | WORKERS,
}


@pytest.fixture(autouse=True)
def as_on_a_large_vocabulary(monkeypatch):
    """Several chunks for 1024 words; and layers that are traced as ever, but run without the C++ compiler."""
    monkeypatch.setattr(head_loss, "chunk_rows", lambda _: 16)
    compile_ = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    """model/ with its tokenizer, and rows.jsonl: 50 prompts with answers, 3 to 60 words together."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("ground")
    torch.manual_seed(0)
    sizes = {**LLAMA, "max_position_embeddings": 256, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "model")
    tokenizer_of_1024_words().save_pretrained(folder / "model")
    rows = []
    for i in range(50):
        asked = " ".join(f"w{(7 * i + j) % 1000}" for j in range(1 + (5 * i) % 23))
        said = " ".join(f"w{(3 * i + j) % 1000}" for j in range(1 + (11 * i) % 37))
        rows.append({"prompt": asked, "completion": " " + said})
    write_rows(folder / "rows.jsonl", rows)
    return folder


def settings(ground: Path, **more: Any) -> dict[str, Any]:
    """A plan's settings, without anything that is there for speed."""
    return {
        "tiny": False,
        "model.config": None,
        "model.name_or_path": str(ground / "model"),
        "data.train": [{"path": str(ground / "rows.jsonl"), "format": "prompt-completion", "columns": {}}],
        "data.loss_on": "completion",
        "trainer.max_steps": STEPS,
        "trainer.per_device_train_batch_size": 2,
        "trainer.gradient_accumulation_steps": 2,
        "trainer.learning_rate": 1e-3,
        "trainer.lr_scheduler_type": "linear",
        **more,
    }


def ours(ground: Path, folder: Path, **more: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """(Losses, trained weights, prepared samples) of a worker on a plan."""
    from safetensors.torch import load_file

    from launcher.train.data.build import build_data
    from launcher.train.job import read_job
    from launcher.train.model.processing import load_processing
    from launcher.train.worker import train

    job = read_job(prepared(folder, settings(ground, **more)))
    samples = build_data(job, load_processing(job)).samples
    train(job)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights: dict[str, torch.Tensor] = {}
    for file in (*folder.glob("model/*.safetensors"), *folder.glob("adapter/*.safetensors")):
        weights |= load_file(file)
    return [row["loss"] for row in rows if "loss" in row], weights, samples


def by_hand(
    ground: Path,
    folder: Path,
    samples: Any,
    *,
    lora: bool = False,
    bf16: bool = False,
    dtype: str = "float32",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(Losses, trained weights) of a plain Trainer on the same samples."""
    import transformers

    transformers.set_seed(42)
    model = transformers.AutoModelForCausalLM.from_pretrained(ground / "model", dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ground / "model")
    if lora:
        from peft import LoraConfig, get_peft_model

        transformers.set_seed(42)
        fields = {name: value for name, value in LORA.items() if name != "type"}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-3, lr_scheduler_type="linear", seed=42, logging_steps=1, use_cpu=True, bf16=bf16,
            save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        ),
        train_dataset=samples,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(folder)
    from safetensors.torch import load_file

    (file,) = folder.glob("*model.safetensors")
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], load_file(file)


@pytest.fixture(scope="module")
def plain(ground, tmp_path_factory):
    """What a plain Trainer learns, in float32."""
    folder = tmp_path_factory.mktemp("plain")
    _, _, samples = ours(ground, folder / "ours", **{"trainer.max_steps": 1})
    return by_hand(ground, folder / "by-hand", samples)


@pytest.mark.parametrize("asked", cases(SETTINGS, "none", "all", named=True))
def test_what_is_there_for_speed_learns_what_a_plain_trainer_learns(ground, plain, tmp_path, asked):
    losses, weights, samples = ours(ground, tmp_path, **asked)
    assert len({len(row["input_ids"]) for row in samples}) > 20, "rows of mixed lengths"
    expected, trained = plain
    assert len(expected) == len(losses) == STEPS
    assert expected[-1] < expected[0] - 1, "there was something to learn"
    assert losses == pytest.approx(expected, rel=ALIKE)
    assert weights.keys() == trained.keys() != set()
    for name, tensor in trained.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


HALF = {"adapter": LORA, "trainer.bf16": True, "precision": "bf16", "model.dtype": "bfloat16"}


@pytest.fixture(scope="module")
def half(ground, tmp_path_factory):
    """What a plain Trainer learns with LoRA on bfloat16 weights under autocast."""
    folder = tmp_path_factory.mktemp("half")
    _, _, samples = ours(ground, folder / "ours", **HALF, **{"trainer.max_steps": 1})
    return by_hand(ground, folder / "by-hand", samples, lora=True, bf16=True, dtype="bfloat16")


def test_an_adapter_without_casts_of_its_inputs_learns_bit_by_bit_the_same(ground, half, tmp_path):
    losses, weights, _ = ours(ground, tmp_path, **HALF, **NO_CAST)
    assert losses == half[0]
    assert weights.keys() == half[1].keys() != set()
    for name, tensor in half[1].items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], tensor), name


ROUNDED = {"chunked": NO_CAST | CHUNKED, "all": NO_CAST | SETTINGS["all"]}


@pytest.mark.parametrize("asked", cases(ROUNDED, "chunked", named=True))
def test_an_adapter_in_16_bits_learns_the_same_but_for_their_rounding(ground, half, tmp_path, asked):
    losses, weights, _ = ours(ground, tmp_path, **HALF, **asked)
    assert losses == pytest.approx(half[0], rel=HALF_ALIKE)
    assert weights.keys() == half[1].keys() != set()
