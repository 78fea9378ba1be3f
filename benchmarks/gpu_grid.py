"""The configurations of the sweep on one GPU: pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One training job on one GPU, of a published model at its own size with random weights."""

    name: str
    model: str
    """Name of a shipped model fact."""
    micro_batch: int = 4
    length: int = 1024
    """Tokens per row; an image's patches decide theirs."""
    precision: str = "bf16"
    """fp32 | bf16 (autocast) | fp16 (autocast, scaled) | bf16-true"""
    adapter: str | None = None
    """all-linear, or a comma-separated list of modules; rank 16."""
    quantization: str = "none"
    optim: str = "adamw_torch_fused"
    checkpointing: bool = False
    attention: str = "sdpa"
    accumulation: int = 1
    packing: bool = False
    engine: str = "ddp"
    zero_stage: int = 0
    offload_optimizer: str = "none"
    needs: tuple[str, ...] = ()
    """Packages without which the row is skipped."""


_SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_QWEN = "Qwen/Qwen3-0.6B"
_LLAMA = "meta-llama/Llama-3.2-1B"
_VIT = "google/vit-large-patch16-224"
_BERT = "google-bert/bert-large-uncased"
_CKPT: dict[str, Any] = {"checkpointing": True}
_LORA: dict[str, Any] = {"adapter": "all-linear", "needs": ("peft",)}
_TRUE: dict[str, Any] = {"precision": "bf16-true"}
_NF4: dict[str, Any] = {
    "quantization": "nf4",
    "adapter": "all-linear",
    "needs": ("peft", "bitsandbytes", "accelerate"),
}
_ZERO2: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 2, "needs": ("deepspeed",)}

ROWS: tuple[GpuRow, ...] = (
    # The published ladder of ViT-L/16.
    GpuRow("vit-large-fp32", _VIT, 64, precision="fp32", optim="adamw_torch"),
    GpuRow("vit-large-fp16", _VIT, 64, precision="fp16", optim="adamw_torch"),
    GpuRow("vit-large-bf16true", _VIT, 64, optim="adamw_torch", **_TRUE),
    GpuRow("vit-large-bf16true-b16", _VIT, 16, optim="adamw_torch", **_TRUE),
    GpuRow("vit-large-bf16true-b4x4", _VIT, 4, optim="adamw_torch", accumulation=4, **_TRUE),
    GpuRow("vit-large-bf16true-b4x4-sgd", _VIT, 4, optim="sgd", accumulation=4, **_TRUE),
    # BERT-large, as published.
    GpuRow("bert-large-fp32", _BERT, 4, 512, precision="fp32", attention="eager"),
    GpuRow("bert-large-fp16-ckpt", _BERT, 1, 512, precision="fp16", attention="eager", accumulation=4,
           **_CKPT),
    GpuRow("bert-large-adafactor", _BERT, 4, 512, precision="fp32", attention="eager", optim="adafactor"),
    # Decoders in full.
    GpuRow("smollm2-fp32", _SMALL, 8, precision="fp32"),
    GpuRow("smollm2-bf16", _SMALL, 8),
    GpuRow("smollm2-bf16-b32", _SMALL, 32),
    GpuRow("smollm2-bf16true", _SMALL, 8, **_TRUE),
    GpuRow("smollm2-bf16-eager", _SMALL, 8, attention="eager"),
    GpuRow("smollm2-bf16-packing", _SMALL, 8, packing=True),
    GpuRow("smollm2-bf16-accumulation2", _SMALL, 8, accumulation=2),
    GpuRow("qwen3-bf16", _QWEN, 4),
    GpuRow("qwen3-bf16-ckpt", _QWEN, 8, **_CKPT),
    GpuRow("qwen3-bf16true-s4096", _QWEN, 1, 4096, **_TRUE),
    GpuRow("qwen3-bf16-sgd", _QWEN, 4, optim="sgd"),
    GpuRow("qwen3-bf16-8bit", _QWEN, 4, optim="adamw_bnb_8bit", needs=("bitsandbytes",)),
    GpuRow("llama-1b-bf16", _LLAMA, 4),
    GpuRow("llama-1b-bf16true", _LLAMA, 4, 2048, **_TRUE),
    GpuRow("llama-1b-bf16true-ckpt", _LLAMA, 4, 2048, **_TRUE, **_CKPT),
    GpuRow("llama-1b-bf16true-eager", _LLAMA, 2, 1024, attention="eager", **_TRUE),
    GpuRow("llama-1b-bf16true-flash", _LLAMA, 4, 2048, attention="flash_attention_2", needs=("flash_attn",),
           **_TRUE),
    GpuRow("llama-1b-bf16true-foreach", _LLAMA, 4, 1024, optim="adamw_torch", **_TRUE),
    GpuRow("pythia-1b-bf16true", "EleutherAI/pythia-1b", 4, **_TRUE),
    GpuRow("gemma3-1b-bf16true", "google/gemma-3-1b-pt", 4, **_TRUE),
    GpuRow("opt-125m-bf16", "facebook/opt-125m", 8),
    GpuRow("gpt2-bf16", "openai-community/gpt2", 8),
    GpuRow("starcoderbase-1b-bf16true", "bigcode/starcoderbase-1b", 2, 2048, **_TRUE),
    GpuRow("qwen2.5-0.5b-bf16", "Qwen/Qwen2.5-0.5B", 4),
    GpuRow("t5-large-bf16", "google-t5/t5-large", 4, 512),
    # Adapters, quantisation, engines.
    GpuRow("llama-1b-lora-bf16true", _LLAMA, 4, 2048, **_TRUE, **_LORA),
    GpuRow("llama-1b-lora-bf16-ckpt", _LLAMA, 8, 2048, **_LORA, **_CKPT),
    GpuRow("llama-1b-lora-attention", _LLAMA, 4, 2048, adapter="q_proj,v_proj", needs=("peft",)),
    GpuRow("llama-7b-lora-bf16true-ckpt", "huggyllama/llama-7b", 2, 2048, **_TRUE, **_LORA, **_CKPT),
    GpuRow("llama-1b-nf4-lora", _LLAMA, 4, 2048, **_NF4),
    GpuRow("llama-1b-nf4-lora-ckpt", _LLAMA, 8, 2048, **_NF4, **_CKPT),
    GpuRow("qwen3-zero2", _QWEN, 4, **_ZERO2),
    GpuRow("qwen3-zero2-offload", _QWEN, 4, offload_optimizer="cpu", **_ZERO2),
)  # fmt: skip
