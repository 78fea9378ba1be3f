"""The rows of the speed table on one GPU (grids/gpu_throughput.yaml), and their floating-point operations.

Operations of a step, counted as is usual for MFU: a multiplication and an addition are two, N are the
parameters that multiply (all but the table of embeddings, which is looked up), T the tokens.

    full fine-tune   6 N T + A        2 N forward, 2 N for the activations' gradients, 2 N for the weights'
    LoRA             4 N T + 6 n T + A    its n parameters are learnt, the N others hand gradients on
    attention        A = 3 · 4 · layers · heads · width · Σ length² / 2

What is recomputed does not count. The half is causality's: a token sees those before it. Published figures
often count the whole square (`square=True`), which is 7 % more in all for 8B at 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grids import rows_of

BIG = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-1B")
"""Shipped model facts, the largest that fits is taken."""
DATASHEET = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second."""
FLATTENED = ("varlen", "flash_attention_2")


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One measurement, in a process of its own."""

    name: str
    kind: str = "train"
    """train: optimizer steps · matmul, attention, head: one operation, forward and backward."""
    models: tuple[str, ...] = BIG
    method: str = "full"
    """full: weights and states in bfloat16 (bf16-true) · lora: frozen bfloat16, adapters under autocast."""
    attention: str = "sdpa"
    loss: str = "full"
    compiled: bool = False
    dynamic: bool | None = True
    """Of compiled blocks; True as runs on texts have it, whose lengths change from batch to batch."""
    documents: tuple[int, ...] = (4096,)
    """Tokens of each sample of a micro-batch."""
    accumulation: int = 2
    cast: bool = True
    """peft's cast_input_dtype_enabled."""
    chunk: int | None = None
    """Rows of logits in a chunk; None: as the loss chooses."""
    tight: bool = False
    """Tried although the prediction says that it does not fit: compiled blocks keep less."""
    needs: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.documents)


ROWS: tuple[SpeedRow, ...] = rows_of("gpu_throughput", kind=SpeedRow)


def matrix_params(config: Mapping[str, Any]) -> int:
    """Parameters of a Llama-shaped model that are multiplied with each token."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * config["intermediate_size"]
    return int(layers * layer + hidden * config["vocab_size"])


def attention_flops(config: Mapping[str, Any], documents: Sequence[int], *, square: bool = False) -> float:
    """Operations of all layers' attention, forward and backward."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    pairs = sum(length**2 for length in documents) * (1.0 if square else 0.5)
    return 12.0 * config["num_hidden_layers"] * config["num_attention_heads"] * width * pairs


def step_flops(
    config: Mapping[str, Any], row: SpeedRow, trained: int, *, full: bool | None = None, square: bool = False
) -> float:
    """Operations of one optimizer step. trained: parameters of the adapter. full: count it as a full run."""
    params, tokens = matrix_params(config), row.tokens
    whole = row.method == "full" if full is None else full
    products = 6.0 * params * tokens if whole else (4.0 * params + 6.0 * trained) * tokens
    return row.accumulation * (products + attention_flops(config, row.documents, square=square))


def datasheet_rate(device: str) -> float | None:
    return next((rate for name, rate in DATASHEET.items() if name in device), None)
