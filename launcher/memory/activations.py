"""Bytes that autograd keeps for a transformer's backward pass, per token and layer. Pure arithmetic.

Counted from what transformers' modules save: every product keeps its input (unless its weight is
frozen), RMSNorm upcasts to float32, attention keeps queries, keys, values, output and log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.architectures import Layout, Linear
from launcher.facts.model import ModelSpec

LOSS_BYTES = 12
"""Per logit when the backward pass starts: log-softmax (kept) and two gradients, in float32."""
TILE_TOKENS, TILE_WORDS = 4096, 32768
"""trl 1.16's tiles of logits; each is allocated at its full width, whatever the vocabulary."""
CPU_TILE_COPIES = 7
"""Live float32 copies of a tile in trl's formula without Triton."""


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

    @property
    def mask(self) -> int:
        """Of one value's dropout mask: a bool on CUDA, on a CPU the factor itself."""
        return self.compute if self.on_cpu else 1


def linear_inputs(linears: list[Linear], d: Dtypes, have: bool) -> int:
    """Bytes per token kept as inputs of products that read one activation.

    `have`: this activation is kept already by what made it.
    """
    width = linears[0].in_features
    copies = len(linears)
    source = d.compute if linears[0].reads in ("attn", "attn_cross", "act") else d.residual
    if d.autocast:
        # Adapters are cast up to float32 and down again, so each keeps a copy of its own.
        if d.adapter is not None or source != d.compute:
            return copies * d.compute * width
    elif d.adapter is not None and d.adapter != source:
        return copies * d.adapter * width
    return 0 if have else source * width


def _norm_bytes(spec: ModelSpec, layout: Layout, d: Dtypes) -> float:
    if not layout.rms_norm:
        return layout.norms * (d.residual * spec.hidden_size + 8)
    weight_input = d.residual if d.adapter is None else 0
    # T5 scales the 16-bit input itself, beside the copy that was squared.
    source = d.residual if layout.position_bias and d.residual != 4 else 0
    kept = layout.norms * ((4 + weight_input + source) * spec.hidden_size + 4)
    if layout.qk_norm:
        heads = spec.num_heads + spec.num_kv_heads
        kept += heads * ((4 + weight_input) * spec.head_dim + 4)
    return kept


def _kernel_bytes(spec: ModelSpec, layout: Layout, d: Dtypes, sequence: int, masked: bool) -> int:
    """What a fused attention keeps about its scores: their log-sum-exp, and a mask of numbers."""
    maps = spec.num_heads if layout.position_bias else int(masked)
    return 4 * spec.num_heads + d.compute * maps * sequence


def _map_bytes(spec: ModelSpec, layout: Layout, d: Dtypes, sequence: int, upcast: bool) -> int:
    """What an attention of single operations keeps: softmax, dropout, and what the product reads."""
    scores = spec.num_heads * sequence
    softmax = 4 if upcast or d.autocast or layout.float_softmax else d.compute
    width = 4 if upcast else d.compute
    if layout.attention_dropout:
        return scores * (softmax + (width if d.on_cpu else 1) + width)
    return scores * (softmax + (width if width != softmax else 0))


def _attention_bytes(
    spec: ModelSpec, layout: Layout, d: Dtypes, attention: str, sequence: int, masked: bool
) -> float:
    query = spec.num_heads * spec.head_dim
    # Only the flash kernel takes grouped keys next to a padding mask; elsewhere they are repeated.
    grouped = attention == "flash_attention_2"
    keys = spec.num_kv_heads * spec.head_dim if grouped else query
    kept: float = d.compute * 2 * (query + keys)
    eager = attention == "eager"
    if layout.fused_qkv and not layout.positions and not eager:
        # Rotated copies, while the values' view keeps the whole projection.
        kept += d.compute * (query + spec.num_kv_heads * spec.head_dim)
    # torch's CPU kernel takes neither dropout nor a mask that learns; its fallback computes in float32.
    fallback = not eager and d.on_cpu and (layout.attention_dropout > 0 or layout.position_bias)
    if fallback:
        kept += (4 - d.compute) * (query + 2 * keys)
    if eager or fallback:
        kept += _map_bytes(spec, layout, d, sequence, upcast=fallback)
    else:
        kept += _kernel_bytes(spec, layout, d, sequence, masked and attention == "sdpa")
    return 2 * kept if layout.crossed else kept


def _mlp_bytes(spec: ModelSpec, layout: Layout, d: Dtypes) -> float:
    inner = layout.active_inner
    # gelu_new is written as six Python operations, of which four keep something.
    kept = d.compute * inner * (4 if layout.activation == "gelu_new" else 1)
    if layout.inner_dropout:
        kept += d.mask * inner
    if layout.gated:
        kept += 2 * d.compute * inner
        if layout.experts:
            # The product before the down projection, and each expert's copy of its input.
            copies = inner * spec.hidden_size // max(spec.intermediate_size, 1)
            kept += d.compute * (inner + copies)
    return kept


def layer_bytes(
    spec: ModelSpec,
    d: Dtypes,
    *,
    attention: str,
    sequence: int,
    rank: int = 0,
    adapter_dropout: bool = False,
    masked: bool = False,
    layout: Layout | None = None,
) -> float:
    """Bytes per token that one layer keeps without activation checkpointing.

    `masked`: attention gets a mask of positions. `layout`: the stack of the layer, by default the first.
    """
    layout = layout or spec.layout
    groups: dict[str, list[Linear]] = {}
    for linear in layout.linears:
        if "{}" in linear.path:
            groups.setdefault(linear.reads, []).append(linear)
    kept = _norm_bytes(spec, layout, d) + _attention_bytes(spec, layout, d, attention, sequence, masked)
    kept += _mlp_bytes(spec, layout, d)
    adapted = [linear for group in groups.values() for linear in group]
    width = d.adapter if d.adapter is not None and not d.autocast else d.compute
    if d.adapter is not None:
        kept += len(adapted) * rank * width
    if d.adapter is not None and adapter_dropout:
        # Each adapter keeps what its dropout let through, and the mask; the frozen product keeps nothing.
        kept += sum(x.in_features for x in adapted) * (width + (width if d.on_cpu else 1))
    else:
        relu = layout.activation == "relu" and not layout.inner_dropout
        for reads, linears in groups.items():
            # Attention's output is kept by its kernel, a ReLU's by itself, the encoder's once for all layers.
            have = reads in ("attn", "attn_cross", "encoder") or (reads == "act" and relu)
            kept += linear_inputs(linears, d, have)
    if layout.dropout:
        kept += (3 if layout.crossed else 2) * spec.hidden_size * d.mask
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
    masked: bool = False,
) -> Activations:
    """Kept activations of `micro_batch` samples of `sequence` tokens."""
    tokens = micro_batch * sequence
    start, layers = 0.0, []
    for layout in spec.layout.stacks:
        layer = layer_bytes(
            spec,
            d,
            attention=attention,
            sequence=sequence,
            rank=rank,
            adapter_dropout=adapter_dropout,
            masked=masked,
            layout=layout,
        )
        layers.append(int(tokens * layer))
        per_layer = d.residual * spec.hidden_size if checkpointing else layer
        # The last norm with what reads it, and the dropout of the embeddings.
        around = (4 + d.residual + d.compute + (d.mask if layout.dropout else 0)) * spec.hidden_size
        start += tokens * (layout.layers * per_layer + around)
        if layout.position_bias:
            # Biases and the numbers of their distances, the same for all samples and layers.
            start += sequence**2 * (4 * spec.num_heads + 8)
    # The pass goes backwards, from the last stack to the first.
    return Activations(int(start), int(start) + layers[-1] if checkpointing else int(start), layers[0])


def working_bytes(spec: ModelSpec, d: Dtypes, tokens: int) -> int:
    """Gradients that flow through one layer: of the feed-forward block and of the residual."""
    return tokens * d.compute * (spec.layout.active_inner + spec.hidden_size)


def logits_bytes(spec: ModelSpec, d: Dtypes, micro_batch: int, sequence: int) -> int:
    """Bytes of the loss at its peak, as the backward pass starts."""
    tokens = micro_batch * sequence
    if spec.task == "dpo":
        # trl computes log-probabilities tile by tile: one tile of logits, the float32 copies that the
        # formula without Triton makes of it, and float32 gradients of what it read and of the head.
        tile = min(tokens, TILE_TOKENS)
        copies = 4 * CPU_TILE_COPIES * min(spec.vocab_size, TILE_WORDS) if d.on_cpu else 0
        head = 4 * spec.head.in_features * spec.head.out_features if d.adapter is None else 0
        return tile * (d.compute * TILE_WORDS + copies) + 4 * tokens * spec.hidden_size + head
    rows = tokens if spec.head.per_token else micro_batch
    return LOSS_BYTES * rows * spec.head.out_features


def eval_bytes(spec: ModelSpec, d: Dtypes, *, batch: int, sequence: int, attention: str) -> int:
    """Bytes of an evaluation step: nothing is kept, so the widest layer step or the loss rules."""
    tokens = batch * sequence
    logits = (d.compute + 8 if d.compute != 4 else 8) * spec.head.out_features
    if not spec.head.per_token:
        logits = -(-logits // sequence)
    widest = d.compute * (3 * spec.layout.active_inner + 2 * spec.hidden_size)
    if attention == "eager":
        widest = max(widest, spec.num_heads * sequence * (4 + d.compute))
    return tokens * (d.residual * spec.hidden_size + max(logits, widest))
