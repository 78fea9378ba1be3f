"""Peaks that others measured on GPUs, as jobs of the estimate: pure data.

ViT-L/16: the logs of rasbt/pytorch-memory-optim, torch.cuda.max_memory_reserved in GB, on one GPU with
224x224 pictures of ten classes. BERT-large: Hugging Face's perf_train_gpu_one page, MiB by NVML on a V100
with 16 GB, sequences of 512 tokens, which counts the CUDA context (1343 MiB there). The FSDP rows of the
former are left out: batch and precision behind them are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memory_rows import make

from launcher.facts.hardware import MIB, parse_hardware
from launcher.facts.model import read_model_spec
from launcher.facts.probe import shipped_model_config
from launcher.plan.plan import Plan

GB = 10**9


@dataclass(frozen=True, slots=True)
class Published:
    """One published peak."""

    name: str
    model: str
    """Name of a shipped model fact."""
    device: str
    measured_bytes: int
    context: int
    """Bytes of the CUDA context that the figure holds; allocator statistics know of none."""
    task: str
    labels: int
    length: int
    precision: str
    attention: str
    trainer: Mapping[str, Any]

    def plan(self) -> Plan:
        """The plan of an equivalent recipe."""
        published = shipped_model_config(self.model)
        assert published is not None, self.model
        config = {**published, "num_labels": self.labels}
        kind = "image" if self.task == "image-classification" else "classification"
        length = {} if kind == "image" else {"max_length": self.length}
        recipe = {
            "task": self.task,
            "model": {"config": config, "attn_implementation": self.attention},
            "data": {"train": [{"path": "random", "format": kind}], **length},
            "precision": self.precision,
            "trainer": dict(self.trainer),
            # None of these runs asked torch's allocator for expandable segments, as our plans do.
            "launch": {"env": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}},
        }
        spec = read_model_spec(self.model, config, "shipped facts", self.task)
        found = make(recipe, spec, parse_hardware(f"1x{self.device}"))
        # Both loops kept gradients through the next forward: the former calls zero_grad just before
        # backward, and torch before 2.0 set them to zero, where it frees them now.
        return replace(found, job=replace(found.job, accumulation=None))


def _trainer(micro: int, optim: str, accumulation: int = 1, checkpointing: bool = False) -> dict[str, Any]:
    return {
        "max_steps": 10,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "activation_checkpointing": checkpointing,
        "optim": optim,
    }


def _vit() -> list[Published]:
    # torch.optim.Adam updates all tensors at once on a GPU, as adamw_torch does.
    rows: dict[str, tuple[str, dict[str, Any], float]] = {
        "ViT-L/16 fp32": ("fp32", _trainer(64, "adamw_torch"), 26.84),
        "ViT-L/16 mixed": ("fp16", _trainer(64, "adamw_torch"), 18.21),
        "ViT-L/16 bf16-true": ("bf16-true", _trainer(64, "adamw_torch"), 13.82),
        "ViT-L/16 batch 16": ("bf16-true", _trainer(16, "adamw_torch"), 5.69),
        "ViT-L/16 4x accumulation 4": ("bf16-true", _trainer(4, "adamw_torch", 4), 3.91),
        "ViT-L/16 SGD": ("bf16-true", _trainer(4, "sgd", 4), 2.02),
    }
    return [
        Published(name, "google/vit-large-patch16-224", "A100-80GB", int(gb * GB), 0,
                  "image-classification", 10, 197, precision, "sdpa", trainer)
        for name, (precision, trainer, gb) in rows.items()
    ]  # fmt: skip


def _bert() -> list[Published]:
    fused = "adamw_torch_fused"  # the page's optimizer goes from one tensor to the next
    rows: dict[str, tuple[str, dict[str, Any], int]] = {
        "BERT-large 1x accumulation 4": ("fp32", _trainer(1, fused, 4), 8681),
        "BERT-large + checkpointing": ("fp32", _trainer(1, fused, 4, True), 6775),
        "BERT-large + fp16": ("fp16", _trainer(1, fused, 4, True), 7275),
        "BERT-large + Adafactor": ("fp16", _trainer(1, "adafactor", 4, True), 4847),
        "BERT-large + 8-bit Adam": ("fp16", _trainer(1, "adamw_bnb_8bit", 4, True), 5363),
        "BERT-large batch 4 fp32": ("fp32", _trainer(4, fused), 14949),
        "BERT-large batch 4 fp16": ("fp16", _trainer(4, fused), 13939),
        "BERT-large batch 4 Adafactor": ("fp32", _trainer(4, "adafactor"), 12295),
        "BERT-large batch 4 8-bit Adam": ("fp32", _trainer(4, "adamw_bnb_8bit"), 13085),
    }
    return [
        Published(name, "google-bert/bert-large-uncased", "V100-16GB", mib * MIB, 1343 * MIB,
                  "sequence-classification", 2, 512, precision, "eager", trainer)
        for name, (precision, trainer, mib) in rows.items()
    ]  # fmt: skip


def published_rows() -> list[Published]:
    return [*_vit(), *_bert()]
