"""Bytes that autograd keeps for a decoder's backward pass, per token and layer. Pure arithmetic.

Counted from what transformers' modules save: every product keeps its input (unless its weight is
frozen), RMSNorm upcasts to float32, attention keeps queries, keys, values, output and log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.architectures import Linear
from launcher.facts.model import ModelSpec

LOSS_BYTES = 12
"""Per logit when the backward pass starts: log-softmax (kept) and two gradients, in float32."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Widths in bytes of what flows through a layer."""

    compute: int
    """Output of the matrix products."""
    residual: int
    """The stream between layers."""
    autocast: bool
    """torch.autocast: every product casts its own copy of a float32 input."""
    adapter: int | None = None
    """Weights of a LoRA adapter; None: the model itself is trained."""
    on_cpu: bool = False


def linear_inputs(linears: list[Linear], d: Dtypes, have: int) -> int:
    """Bytes per token kept as inputs of products that read one activation.

    `have`: width at which this activation is kept already by its producer (0: not kept).
    """
    if not linears:
        return 0
    width = linears[0].in_features
    copies = len(linears)
    source = d.compute if linears[0].reads in ("attn", "act") else d.residual
    if d.autocast:
        # Adapters are cast up to float32 and down again, so each keeps a copy of its own.
        if d.adapter is not None or source != d.compute:
            return copies * d.compute * width
    elif d.adapter is not None and d.adapter != source:
        return copies * d.adapter * width
    return 0 if have else source * width


def _norm_bytes(spec: ModelSpec, d: Dtypes) -> float:
    layout = spec.layout
    if not layout.rms_norm:
        return layout.norms * (d.residual * spec.hidden_size + 8)
    weight_input = d.residual if d.adapter is None else 0
    kept = layout.norms * ((4 + weight_input) * spec.hidden_size + 4)
    if layout.qk_norm:
        heads = spec.num_heads + spec.num_kv_heads
        kept += heads * ((4 + weight_input) * spec.head_dim + 4)
    return kept


def _attention_bytes(spec: ModelSpec, d: Dtypes, attention: str, sequence: int) -> float:
    query = spec.num_heads * spec.head_dim
    # Only the flash kernel takes grouped keys next to a padding mask; elsewhere they are repeated.
    grouped = attention == "flash_attention_2"
    keys = spec.num_kv_heads * spec.head_dim if grouped else query
    kept: float = d.compute * 2 * (query + keys)
    if spec.layout.fused_qkv and not spec.layout.positions:
        # Rotated copies, while the values' view keeps the whole projection.
        kept += d.compute * (query + spec.num_kv_heads * spec.head_dim)
    if attention == "eager":
        # Float32 softmax, and its copy in the compute dtype for the product with the values.
        kept += spec.num_heads * sequence * (4 + (d.compute if d.compute != 4 else 0))
    else:
        kept += 4 * spec.num_heads
    return kept


def _mlp_bytes(spec: ModelSpec, d: Dtypes) -> float:
    layout, inner = spec.layout, spec.layout.active_inner
    if layout.gated:
        kept = 3 * d.compute * inner
        if layout.experts:
            # The product before the down projection, and each expert's copy of its input.
            copies = inner * spec.hidden_size // max(spec.intermediate_size, 1)
            kept += d.compute * (inner + copies)
        return kept
    if layout.activation == "relu":
        return d.compute * inner
    # gelu_new is written as six Python operations that keep their inputs.
    return d.compute * inner * (5 if layout.activation == "gelu_new" else 1)


def layer_bytes(
    spec: ModelSpec,
    d: Dtypes,
    *,
    attention: str,
    sequence: int,
    rank: int = 0,
    adapter_dropout: bool = False,
) -> float:
    """Bytes per token that one decoder layer keeps without activation checkpointing."""
    groups: dict[str, list[Linear]] = {}
    for linear in spec.linears:
        if linear.count == spec.num_layers and "{}" in linear.path:
            groups.setdefault(linear.reads, []).append(linear)
    kept = _norm_bytes(spec, d) + _attention_bytes(spec, d, attention, sequence)
    kept += _mlp_bytes(spec, d)
    relu = spec.layout.activation == "relu"
    for reads, linears in groups.items():
        # Attention's output is kept by its kernel, a ReLU's by itself.
        have = d.compute if reads == "attn" or (reads == "act" and relu) else 0
        kept += linear_inputs(linears, d, have)
    if d.adapter is not None:
        width = d.compute if d.autocast else d.adapter
        adapted = [linear for group in groups.values() for linear in group]
        kept += len(adapted) * rank * width
        if adapter_dropout:
            mask = width if d.on_cpu else 1
            kept += sum(x.in_features for x in adapted) * (width + mask)
    if spec.layout.dropout:
        kept += 2 * spec.hidden_size * (d.compute if d.on_cpu else 1)
    return kept


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of kept activations at three moments of the backward pass, without the logits."""

    start: int
    """Nothing is freed yet; under checkpointing the inputs of all layers."""
    recompute: int
    """Under checkpointing: the inputs of all layers and one layer that was computed again."""
    last_layer: int
    """Only the first layer is left."""


def activation_bytes(
    spec: ModelSpec,
    d: Dtypes,
    *,
    micro_batch: int,
    sequence: int,
    attention: str,
    checkpointing: bool,
    rank: int = 0,
    adapter_dropout: bool = False,
) -> Activations:
    """Kept activations of `micro_batch` samples of `sequence` tokens."""
    tokens = micro_batch * sequence
    layer = layer_bytes(
        spec, d, attention=attention, sequence=sequence, rank=rank, adapter_dropout=adapter_dropout
    )
    per_layer = d.residual * spec.hidden_size if checkpointing else layer
    # The last norm with the head's input.
    last = (4 + d.residual + d.compute) * spec.hidden_size
    start = int(tokens * (spec.num_layers * per_layer + last))
    one = int(tokens * layer)
    return Activations(start, start + one if checkpointing else start, one)


def logits_bytes(spec: ModelSpec, micro_batch: int, sequence: int) -> int:
    """Bytes of the loss over the vocabulary at its peak, as the backward pass starts."""
    return LOSS_BYTES * micro_batch * sequence * spec.vocab_size


def eval_bytes(spec: ModelSpec, d: Dtypes, *, batch: int, sequence: int, attention: str) -> int:
    """Bytes of an evaluation step: nothing is kept, so the widest layer step or the loss rules."""
    tokens = batch * sequence
    logits = d.compute + 8 if d.compute != 4 else 8
    widest = d.compute * (3 * spec.layout.active_inner + 2 * spec.hidden_size)
    if attention == "eager":
        widest = max(widest, spec.num_heads * sequence * (4 + d.compute))
    return tokens * (d.residual * spec.hidden_size + max(logits * spec.vocab_size, widest))
