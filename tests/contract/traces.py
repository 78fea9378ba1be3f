"""Requests to the tracer, and the peaks of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plans import _BASE

LORA_16 = {
    "adapter.type": "lora",
    "adapter.r": 16,
    "adapter.lora_alpha": 32,
    "adapter.lora_dropout": 0.0,
    "adapter.target_modules": "all-linear",
}
_MEMORY: dict[str, Any] = {
    "precision": "bf16-true", "dtype": "bfloat16", "engine": "ddp", "quantization": "none",
    "attention": "sdpa", "checkpointing": False, "accumulation": 1, "optim": "adamw_torch_fused",
    "document_mask": False, "sequence_length": 2048, "one_row": False, "padded": False, "chunked": False,
}  # fmt: skip


def request(
    config: Mapping[str, Any],
    memory: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    batches: Sequence[int] = (1, 2),
    on_cpu: bool = False,
    labels: int | None = None,
) -> dict[str, Any]:
    """What the tracing process reads; an A100 unless on a CPU."""
    values = {**_BASE, "trainer.max_grad_norm": 1.0, **(settings or {})}
    return {
        "ask": "trace",
        "plan": {"settings": {name: {"value": value} for name, value in values.items()}},
        "memory": {**_MEMORY, **(memory or {})},
        "config": dict(config),
        "labels": labels,
        "on_cpu": on_cpu,
        "capability": None if on_cpu else [8, 0],
        "batches": list(batches),
    }


def peak(answer: Mapping[str, Any], batch: int) -> float:
    """Bytes of the fullest moment, with weights and optimizer states."""
    resident = answer["states"]["weights"] + answer["states"]["optimizer"]
    kinds = ("gradients", "activations", "logits", "temporary")
    return resident + max(
        sum(moment[kind][0] + moment[kind][1] * batch for kind in kinds) for moment in answer["moments"]
    )
