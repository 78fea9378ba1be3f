"""Tiny models of every task, for the tests of models: plans, batches, a few steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plans import TINY_LLAMA, write_run

from launcher.train.job import Job, read_job
from launcher.train.model.models import load_model
from launcher.train.model.processing import load_processing

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 512,
}
TINY_T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 512,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
}
TINY_VIT: dict[str, Any] = {
    "model_type": "vit",
    **{name: value for name, value in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")},
    "image_size": 32,
    "patch_size": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "causal-lm": TINY_LLAMA,
    "dpo": TINY_LLAMA,
    "reward": TINY_LLAMA,
    "kto": TINY_LLAMA,
    "grpo": TINY_LLAMA,
    "seq2seq-lm": TINY_T5,
    "sequence-classification": {"model_type": "bert", **SIZES},
    "token-classification": {"model_type": "bert", **SIZES},
    "image-classification": TINY_VIT,
    "embedding": {"model_type": "bert", **SIZES},
    "reranker": {"model_type": "bert", **SIZES},
}
LORA = {"type": "lora", "r": 4, "target_modules": "all-linear"}
LABELS = ("cat", "dog", "owl")


def job_for(folder: Path, task: str, **changes: Any) -> Job:
    """A plan for one task; changes are dotted settings with __ for the dots."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    given = {"task": task, "model.config": CONFIGS[task], **dotted}
    if given.get("model.name_or_path"):
        given |= {"tiny": False, "model.config": None}
    return read_job(write_run(folder, given))


def load(job: Job, labels: Any = LABELS) -> tuple[Any, Any]:
    processing = load_processing(job)
    return processing, load_model(job, processing, labels if "classification" in job.task.name else None)


def batch_for(task: str, processing: Any) -> dict[str, Any]:
    import torch

    if task == "image-classification":
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    rows = processing(["one red bird", "two"], padding=True, return_tensors="pt", return_token_type_ids=False)
    if task == "embedding":
        return dict(rows)
    labels = torch.tensor([0, 2]) if task == "sequence-classification" else rows["input_ids"]
    if task in ("reward", "reranker"):
        labels = torch.tensor([0.5, -0.5])  # of which transformers makes a squared error
    if task == "token-classification":
        labels = labels % len(LABELS)
    return {**rows, "labels": labels}


def train_steps(model: Any, batch: dict[str, Any], steps: int = 8) -> list[float]:
    import torch

    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        output = model(**batch)
        # A model without a head has no loss: something that its last layer can lower.
        loss = output.loss if "labels" in batch else output[0][..., 0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
