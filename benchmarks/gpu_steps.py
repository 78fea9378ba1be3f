"""A row of the speed table as a model, a batch and timed steps. Needs torch and transformers."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from gpu_speed_rows import FLATTENED, SpeedRow, attention_flops, step_flops
from gpu_training import build_model, make_step, timed_steps
from grids import Row
from torch.nn import functional

CALLS = 10
MATMUL = 8192


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
    kinds = {"matmul": _matmul, "attention": _attention, "head": _head}
    train = functools.partial(_train, model)
    found: dict[str, Any] = kinds.get(row.kind, train)(row, config, where)
    if where.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _train(model_name: str, row: SpeedRow, config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
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
        "tokens_per_second": row.accumulation * row.tokens / step_s,
        "step_s": step_s,
        "first_step_s": seconds[0],
        "build_s": built,
        "trained": trained,
        "flops": step_flops(config, row, trained),
        "flops_square": step_flops(config, row, trained, square=True),
    }


def batch_of(row: SpeedRow, vocab: int, where: torch.device) -> dict[str, Any]:
    """Random samples of the row's lengths: one flattened row with its bounds, or padded on the right."""
    parts = [torch.randint(4, vocab, (length,), device=where) for length in row.documents]
    if row.attention not in FLATTENED:
        ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-100)
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}
    ids = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(length, device=where) for length in row.documents])[None]
    bounds = bounds_of(row, where)
    longest = max(row.documents)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def bounds_of(row: SpeedRow, where: torch.device) -> torch.Tensor:
    """Where each document begins, and the end of the last: int32 [1 + documents]."""
    ends = torch.tensor(row.documents).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(device=where, dtype=torch.int32)


def _matmul(row: SpeedRow, config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """The rate of a large product of random bfloat16 matrices."""
    size = MATMUL if where.type == "cuda" else 64
    left, right = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    return _rate(lambda: left @ right, where, 2.0 * size**3)


def _attention(row: SpeedRow, config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """One layer's attention over the documents: padded rows, or one flattened row."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    flattened = row.attention in FLATTENED
    shape = (1, row.tokens) if flattened else (len(row.documents), max(row.documents))
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True, training=True)

    def states(count: int) -> torch.Tensor:
        return torch.randn(
            shape[0], count, shape[1], width, device=where, dtype=torch.bfloat16
        ).requires_grad_()

    query, key, value = states(heads), states(groups), states(groups)
    grad = torch.randn(shape[0], shape[1], heads, width, device=where, dtype=torch.bfloat16)

    def call() -> None:
        if flattened:
            from launcher.train.model.attention import attend

            longest, bounds = max(row.documents), bounds_of(row, where)
            mixed, _ = attend(module, query, key, value, None, cu_seq_lens_q=bounds, max_length_q=longest)
        else:
            mixed, _ = sdpa_attention_forward(module, query, key, value, None)
        mixed.backward(grad)

    layers = config["num_hidden_layers"]
    return _rate(call, where, attention_flops(config, row.documents) / layers)


def _head(row: SpeedRow, config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """The loss of one batch's hidden states, with the gradients of both of its matrices."""
    width, vocab = config["hidden_size"], config["vocab_size"]
    hidden = torch.randn(row.tokens, width, device=where, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, width, device=where, dtype=torch.bfloat16) * 0.02).requires_grad_()
    targets = torch.randint(vocab, (row.tokens,), device=where)

    def call() -> None:
        hidden.grad = weight.grad = None
        if row.loss == "chunked":
            from launcher.train.model import loss as head_loss

            if row.chunk is not None:
                head_loss.chunk_rows = lambda _: row.chunk
            loss = head_loss.SummedLoss.apply(hidden, weight, None, targets) / row.tokens
        else:
            loss = functional.cross_entropy((hidden @ weight.T).float(), targets)
        loss.backward()

    return _rate(call, where, 6.0 * row.tokens * width * vocab)


def _rate(call: Callable[[], Any], where: torch.device, flops: float) -> dict[str, Any]:
    seconds = statistics.median(timed_steps(call, where, CALLS)[2:])
    return {"step_s": seconds, "flops": flops}
