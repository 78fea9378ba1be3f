"""A row of the speed table on one GPU: its floating-point operations, and its steps.

Operations of a step, counted as is usual for MFU: a multiplication and an addition are two, N are the
parameters that multiply (all but the table of embeddings, which is looked up), T the tokens.

    full fine-tune   6 N T + A        2 N forward, 2 N for the activations' gradients, 2 N for the weights'
    LoRA             4 N T + 6 n T + A    its n parameters are learnt, the N others hand gradients on
    attention        A = 3 · 4 · layers · heads · width · Σ length² / 2

What is recomputed does not count. The half is causality's: a token sees those before it. Published figures
often count the whole square (`square=True`), which is 7 % more in all for 8B at 4096 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_training import build_model, make_step, timed_steps
from grids import Row, rows_of

CALLS = 10
MATMUL = 8192
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
    """train: optimizer steps · matmul: one product."""
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


def grid_row(row: SpeedRow, model: str) -> Row:
    """The row as benchmarks/gpu_memory.py builds and predicts it."""
    flattened = row.attention in FLATTENED
    return Row(
        row.name, model,
        micro_batch=1 if flattened else len(row.documents),
        length=row.tokens if flattened else max(row.documents),
        precision="bf16" if row.method == "lora" else "bf16-true",
        adapter="all-linear" if row.method == "lora" else None,
        attention=row.attention,
        accumulation=row.accumulation,
    )  # fmt: skip


def measure(row: SpeedRow, model: str, config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """What the row's kind of measurement finds: seconds, operations, peak bytes."""
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        torch.compiler.set_stance("force_eager")  # a rehearsal: a C++ compiler would take minutes
    found = _matmul(where) if row.kind == "matmul" else _train(row, model, config, where)
    if where.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _train(row: SpeedRow, model_name: str, config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    if row.attention == "varlen":
        from launcher.train.model.attention import register_varlen

        register_varlen()
    if row.loss == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    given = grid_row(row, model_name)
    started = time.perf_counter()
    model = build_model(given, config, "causal-lm", where)
    if not row.cast:
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    if row.loss == "chunked":
        from launcher.train.model.loss import chunk_loss

        chunk_loss(model)
    if row.compiled:
        from launcher.train.model.models import repeated_layers

        for layer in repeated_layers(model):
            layer.compile(dynamic=row.dynamic)
    step = make_step(given, model, batch_of(row, config["vocab_size"], where))
    built = time.perf_counter() - started
    seconds = timed_steps(step, where)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    step_s = statistics.median(seconds[1:])
    return {
        "tokens_per_second": row.accumulation * row.tokens / step_s, "step_s": step_s,
        "first_step_s": seconds[0], "build_s": built, "trained": trained,
        "flops": step_flops(config, row, trained),
        "flops_square": step_flops(config, row, trained, square=True),
    }  # fmt: skip


def batch_of(row: SpeedRow, vocab: int, where: torch.device) -> dict[str, Any]:
    """Random samples of the row's lengths: one flattened row with its bounds, or padded on the right."""
    parts = [torch.randint(4, vocab, (length,), device=where) for length in row.documents]
    if row.attention not in FLATTENED:
        ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-100)
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}
    ids = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(length, device=where) for length in row.documents])[None]
    ends = torch.tensor((0, *row.documents)).cumsum(0)
    bounds, longest = ends.to(device=where, dtype=torch.int32), max(row.documents)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def _matmul(where: torch.device) -> dict[str, Any]:
    """The rate of a large product of random bfloat16 matrices."""
    size = MATMUL if where.type == "cuda" else 64
    left, right = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    seconds = timed_steps(lambda: left @ right, where, CALLS)
    return {"step_s": statistics.median(seconds[2:]), "flops": 2.0 * size**3}
