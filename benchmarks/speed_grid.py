"""The grid of small training jobs whose steps are timed and predicted: pure data.

Rows are those of the memory grid in other sizes: what is ranked has to differ in what it computes. The
first look at the half `held-out` came before any figure was set beside it; PROCESSOR_SHARE was set after it.
FRESH was written down and measured after that, with the model as it stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memory_grid import Row


def _llama(hidden: int, inner: int, *, layers: int, heads: int, words: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": words, "max_position_embeddings": 2048,
    }  # fmt: skip


SMALL: dict[str, Any] = {"vocab_size": 8000}
WIDE = _llama(768, 2048, layers=4, heads=12, words=8000)
DEEP = _llama(384, 1024, layers=16, heads=6, words=8000)
WORDY: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 64000}
LONG: dict[str, Any] = {"max_position_embeddings": 2048, "vocab_size": 4000}

_LORA: dict[str, Any] = {"adapter": "all-linear"}
_CKPT: dict[str, Any] = {"checkpointing": True}

ROWS: tuple[Row, ...] = (
    Row("small-b1-s64", "llama", 1, 64, config=SMALL),
    Row("small-b8-s64", "llama", 8, 64, config=SMALL),
    Row("small-b8-s256", "llama", 8, 256, config=SMALL),
    Row("small-b2-s128-accumulation4", "llama", 2, 128, accumulation=4, config=SMALL),
    Row("small-b8-s128", "llama", 8, 128, config=SMALL),
    Row("small-b4-s256-sgd", "llama", 4, 256, optim="sgd", config=SMALL),
    Row("small-b4-s256-bf16", "llama", 4, 256, precision="bf16", config=SMALL),
    Row("small-b4-s256-bf16true", "llama", 4, 256, precision="bf16-true", config=SMALL),
    Row("small-lora-b4-s256", "llama", 4, 256, config=SMALL, **_LORA),
    Row("small-lora-b4-s256-bf16", "llama", 4, 256, precision="bf16", config=SMALL, **_LORA),
    Row("small-nf4-lora-b4-s256", "llama", 4, 256, quantization="nf4", config=SMALL, **_LORA),
    Row("wide-b1-s128", "llama", 1, 128, config=WIDE),
    Row("wide-b4-s256", "llama", 4, 256, config=WIDE),
    Row("wide-b4-s256-ckpt", "llama", 4, 256, config=WIDE, **_CKPT),
    Row("wide-b1-s1024", "llama", 1, 1024, config=WIDE),
    Row("wide-b4-s256-bf16", "llama", 4, 256, precision="bf16", config=WIDE),
    Row("wide-b4-s256-bf16-ckpt", "llama", 4, 256, precision="bf16", config=WIDE, **_CKPT),
    Row("wide-lora-b4-s256", "llama", 4, 256, config=WIDE, **_LORA),
    Row("wide-lora-b4-s256-ckpt", "llama", 4, 256, config=WIDE, **_LORA, **_CKPT),
    Row("wide-lora-b1-s128", "llama", 1, 128, config=WIDE, **_LORA),
    Row("deep-b1-s128", "llama", 1, 128, config=DEEP),
    Row("deep-b4-s128", "llama", 4, 128, config=DEEP),
    Row("deep-b4-s256-ckpt", "llama", 4, 256, config=DEEP, **_CKPT),
    Row("deep-lora-b4-s128", "llama", 4, 128, config=DEEP, **_LORA),
    Row("deep-b4-s128-bf16", "llama", 4, 128, precision="bf16", config=DEEP),
    Row("wordy-b2-s256", "llama", 2, 256, config=WORDY),
    Row("wordy-b8-s128", "llama", 8, 128, config=WORDY),
    Row("wordy-lora-b4-s256", "llama", 4, 256, config=WORDY, **_LORA),
    Row("long-b1-s2048", "llama", 1, 2048, config=LONG),
    Row("long-b1-s2048-eager", "llama", 1, 2048, attention="eager", config=LONG),
    Row("long-b2-s1024-bf16", "llama", 2, 1024, precision="bf16", config=LONG),
    Row("gpt2-b4-s256", "gpt2", 4, 256),
    Row("gpt-neox-b2-s128", "gpt-neox", 2, 128),
    Row("mixtral-b2-s256", "mixtral", 2, 256),
    Row("bert-b8-s128", "bert", 8, 128),
    Row("vit-b4", "vit", 4),
    Row("t5-b4-s128", "t5", 4, 128),
)

MIDDLE = _llama(512, 1408, layers=8, heads=8, words=16000)
TALL = _llama(256, 768, layers=24, heads=4, words=4000)
FRESH: tuple[Row, ...] = (
    Row("middle-b1-s64", "llama", 1, 64, config=MIDDLE),
    Row("middle-b1-s512", "llama", 1, 512, config=MIDDLE),
    Row("middle-b4-s128", "llama", 4, 128, config=MIDDLE),
    Row("middle-b8-s128-ckpt", "llama", 8, 128, config=MIDDLE, **_CKPT),
    Row("middle-b2-s256-sgd", "llama", 2, 256, optim="sgd", config=MIDDLE),
    Row("middle-b2-s64-accumulation3", "llama", 2, 64, accumulation=3, config=MIDDLE),
    Row("middle-b4-s256-bf16", "llama", 4, 256, precision="bf16", config=MIDDLE),
    Row("middle-b2-s256-bf16true", "llama", 2, 256, precision="bf16-true", config=MIDDLE),
    Row("middle-lora-b4-s256", "llama", 4, 256, config=MIDDLE, **_LORA),
    Row("middle-lora-b2-s128-bf16", "llama", 2, 128, precision="bf16", config=MIDDLE, **_LORA),
    Row("middle-nf4-lora-b2-s256", "llama", 2, 256, quantization="nf4", config=MIDDLE, **_LORA),
    Row("tall-b4-s64", "llama", 4, 64, config=TALL),
    Row("tall-b2-s512-ckpt", "llama", 2, 512, config=TALL, **_CKPT),
    Row("tall-lora-b8-s128", "llama", 8, 128, config=TALL, **_LORA),
    Row("tall-b4-s128-bf16", "llama", 4, 128, precision="bf16", config=TALL),
    Row("gpt2-b2-s128", "gpt2", 2, 128),
    Row("gpt-neox-b8-s256", "gpt-neox", 8, 256),
    Row("mixtral-b4-s128", "mixtral", 4, 128),
    Row("bert-b2-s64", "bert", 2, 64),
    Row("vit-b16", "vit", 16),
    Row("t5-b8-s64", "t5", 8, 64),
)
"""Rows of other shapes, which no figure of the model was set beside."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A job whose micro-batch is the planner's to choose, at one global batch."""

    name: str
    row: Row
    samples: int

    def rows(self) -> Iterable[Row]:
        """Every way to compute it: the divisors of its samples, with and without recomputation."""
        micro = self.samples
        while micro:
            if self.samples % micro == 0:
                for again in (False, True):
                    suffix = "-ckpt" if again else ""
                    yield Row(
                        f"{self.name}-b{micro}{suffix}", self.row.model, micro, self.row.length,
                        precision=self.row.precision, adapter=self.row.adapter, checkpointing=again,
                        accumulation=self.samples // micro, config=self.row.config,
                    )  # fmt: skip
            micro //= 2


CHOICES: tuple[Choice, ...] = (
    Choice("choice-small", Row("", "llama", length=128, config=SMALL), 8),
    Choice("choice-wide-lora", Row("", "llama", length=128, config=WIDE, **_LORA), 4),
    Choice("choice-deep-bf16", Row("", "llama", length=64, precision="bf16", config=DEEP), 8),
)
