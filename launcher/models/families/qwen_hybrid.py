"""Qwen3-Next and Qwen3.5: gated attention in every fourth layer, the gated delta rule in the others.

As read in transformers 5.23 (models/qwen3_next, models/qwen3_5): the way of torch's operations, which runs
where flash-linear-attention and causal-conv1d are not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.models.families.mixtral import gated_shared_mlp
from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.layers.attention import attended
from launcher.models.layers.layout import LayerTape, Layout, of_kinds
from launcher.models.layers.linears import (
    LAYER,
    Linear,
    Sizes,
    biased_attention,
    gated_mlp,
    linears_below,
    partly_rotated,
    sparse_layers,
    without_adapters,
)
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.scans import convolution, copied, layer_types
from launcher.models.layers.tape import Storage, Value

CHUNK = 64
"""Positions that the gated delta rule computes together."""


@dataclass(frozen=True)
class _Hybrid(PreNorm):
    delta: tuple[int, int, int, int, int] | None = None
    """Of the delta rule: heads of keys and of values, their widths, positions that the convolution reads.
    None: attention."""

    @property
    def scans(self) -> bool:
        return self.delta is not None

    def attention(self, tape: LayerTape, x: Value) -> Value:
        """Queries bring a gate of their width for what attention makes."""
        if self.delta is not None:
            return _delta_rule(tape, x, self.delta)
        queries, keys, values = self.project(tape, x)
        queries, gate = tape.views(queries, *[queries.elements // 2] * 2)
        gate = tape.step([gate], gate.elements, gate.width)
        mixed = self.mix(tape, *self.place(tape, queries, keys), values)
        mixed = tape.times(mixed, tape.step([gate], gate.elements, gate.width, save_out=True))
        return attended(tape, x, mixed)


@dataclass(frozen=True, slots=True)
class _Delta:
    """Sizes of a layer's gated delta rule at one batch."""

    key_heads: int
    heads: int
    key: int
    value: int
    kernel: int
    tokens: int
    padded: int
    """Tokens with each row filled up to whole chunks."""

    @property
    def keys(self) -> int:
        return self.padded * self.heads * self.key

    @property
    def values(self) -> int:
        return self.padded * self.heads * self.value

    @property
    def pairs(self) -> int:
        """Numbers of the maps of a chunk's positions to each other."""
        return self.padded * self.heads * CHUNK

    @property
    def states(self) -> int:
        """Numbers of the states before each chunk."""
        return self.padded // CHUNK * self.heads * self.key * self.value


def _delta_rule(tape: LayerTape, x: Value, given: tuple[int, int, int, int, int]) -> Value:
    """A causal convolution, the gated delta rule, a gated norm."""
    block = tape.block
    key_heads, heads, key, value, kernel = given
    padded = block.rows * -(-block.length // CHUNK) * CHUNK
    sizes = _Delta(key_heads, heads, key, value, kernel, block.tokens, padded)
    linears = {one.name: one for one in block.layout.linears}
    if block.padded:
        x = tape.step([x], x.elements, x.width)
    mixed, z, b, a = _inputs(tape, x, sizes, linears)
    narrow = mixed.width
    width = 2 * key_heads * key + heads * value
    mixed = convolution(tape, mixed, width, kernel)
    q, k, v = tape.views(
        mixed, *(block.tokens * n for n in (key_heads * key, key_heads * key, heads * value))
    )
    beta = tape.step([b], b.elements, b.width, save_out=True)
    mixed = _chunks(tape, sizes, (q, k, v, beta, _decay(tape, a, heads)))
    # Rows without what filled them up, in the products' dtype.
    mixed = tape.step([mixed], block.tokens * heads * value, narrow)
    return tape.product(_gated_norm(tape, mixed, z, value), linears["out_proj"])


def _inputs(
    tape: LayerTape, x: Value, sizes: _Delta, linears: dict[str, Linear]
) -> tuple[Value, Value, Value, Value]:
    """Queries, keys and values side by side; the gate, the learning rates and the decays."""
    if "in_proj_qkv" in linears:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        mixed, z, b, a = (tape.product(x, linears[name]) for name in names)
        return mixed, z, b, a
    keys, values = sizes.key_heads * sizes.key, sizes.heads * sizes.value
    whole = tape.product(x, linears["in_proj_qkvz"])
    rates = tape.product(x, linears["in_proj_ba"])
    parts = tape.views(whole, *(tape.block.tokens * n for n in (keys, keys, values, values)))
    q, k, v, z = (copied(tape, one) for one in parts)
    if sizes.key_heads == sizes.heads:
        z = parts[3]
    halves = tape.views(rates, *[tape.block.tokens * sizes.heads] * 2)
    b, a = (copied(tape, one) for one in halves)
    return tape.step([q, k, v], q.elements + k.elements + v.elements, q.width, passes=True), z, b, a


def _decay(tape: LayerTape, a: Value, heads: int) -> Value:
    """The logarithm of each head's decay, in float32."""
    params = heads if tape.block.full else 0
    a = tape.step([tape.cast(a, 4)], a.elements, 4, params=params, fresh=4 * params)
    a = tape.step([a], a.elements, 4, saves=[a.storage])
    saves = [a.storage] if params else []
    return tape.step([a], a.elements, 4, saves=saves, params=params, fresh=4 * params)


def _scaled_rows(tape: LayerTape, x: Value, width: int) -> Value:
    """Each `width` values divided by their length."""
    n = x.elements
    root = tape.step([x], n // width, 4, saves=[x.storage], save_out=True, temporary=4 * n)
    return tape.broadcast(x, root)


def _chunks(tape: LayerTape, sizes: _Delta, inputs: tuple[Value, Value, Value, Value, Value]) -> Value:
    """`torch_chunk_gated_delta_rule`: within chunks, then from chunk to chunk."""
    q, k, v, beta, decay = inputs
    of_keys, small = sizes.tokens * sizes.heads * sizes.key, sizes.padded * sizes.heads
    if sizes.key_heads != sizes.heads:
        q, k = (tape.step([one], of_keys, one.width) for one in (q, k))
    # Float32 heads of whole chunks stay where they are, so that each product copies its operands.
    strided = v.width == 4 and sizes.tokens == sizes.padded
    if v.width < 4:
        q, k, v, beta = (tape.cast(one, 4) for one in (q, k, v, beta))
    q, k = _scaled_rows(tape, q, sizes.key), _scaled_rows(tape, k, sizes.key)
    q = tape.step([q], of_keys, 4)
    filled = ((q, sizes.keys), (k, sizes.keys), (v, sizes.values), (beta, small), (decay, small))
    q, k, v, beta, decay = (tape.step([one], n, 4) for one, n in filled)
    v_beta, k_beta = tape.broadcast(v, beta), tape.broadcast(k, beta)
    total = tape.step([decay], small, 4)
    pairs = tape.step([total], sizes.pairs, 4)
    pairs = tape.step([pairs], sizes.pairs, 4, saves=[Storage(CHUNK**2)])
    pairs = tape.step([pairs], sizes.pairs, 4, save_out=True)
    multiplied = [(k_beta, k), (q, k)]
    if strided:
        multiplied = [(copied(tape, one), copied(tape, other)) for one, other in multiplied]
    system, inside = (tape.times(tape.bmm(*both, sizes.pairs), pairs) for both in multiplied)
    grown = tape.step([total], small, 4, save_out=True)
    decayed = tape.broadcast(k_beta, grown)
    fresh, read = (
        tape.step([system, one], n, 4, saves=[system.storage], save_out=True, temporary=4 * sizes.pairs)
        for one, n in ((v_beta, sizes.values), (decayed, sizes.keys))
    )
    q = tape.broadcast(q, grown)
    k = tape.broadcast(k, tape.step([total], small, 4, save_out=True))
    return _scan(tape, sizes, (fresh, read, q, inside, k), strided=strided)


def _scan(
    tape: LayerTape, sizes: _Delta, inputs: tuple[Value, Value, Value, Value, Value], *, strided: bool
) -> Value:
    """The loop over chunks: five products with the state, which is kept before each chunk."""
    _, read, q, inside, k = inputs
    if tape.block.dtypes.autocast:
        # Each product casts its parts; the state's own decay reads it in float32.
        width = tape.block.dtypes.compute
        cast_parts = sum(one.elements for one in (read, q, inside, k)) + 2 * sizes.values + 2 * sizes.states
        saves = [Storage(width * cast_parts), Storage(4 * sizes.states)]
    else:
        parts = [Storage(q.size), Storage(k.size)] if strided else [q.storage, k.storage]
        saves = [read.storage, inside.storage, *parts]
        saves.append(Storage(4 * (sizes.values + sizes.states)))
    # The gradient of a chunk of an input is as large as the input; that of the output is copied.
    temporary = 4 * (max(sizes.pairs, sizes.keys, sizes.values) + sizes.values)
    return tape.step(inputs, sizes.values, 4, saves=saves, temporary=temporary)


def _gated_norm(tape: LayerTape, x: Value, gate: Value, width: int) -> Value:
    """`norm(x) * silu(gate)`, the gate in float32."""
    wide = tape.cast(x, 4)
    normed = tape.weighted(tape.cast(tape.normalised(wide, wide, width), x.width), width)
    gate = tape.cast(gate, 4)
    opened = tape.step([gate], gate.elements, 4, saves=[gate.storage])
    return tape.cast(tape.times(normed, opened), x.width)


def _gated_attention(s: Sizes) -> tuple[Linear, ...]:
    """Attention whose queries bring a gate of their width for its output."""
    query, *others = biased_attention(s)
    return (replace(query, out_features=2 * s.query_width), *others)


def _delta_linears(
    s: Sizes, names: Callable[[int, int, int], dict[str, int]]
) -> tuple[tuple[Linear, ...], int]:
    """Linear attention, and its parameters outside of linears: convolution, decay and a gated norm."""
    c, h = s.config, s.hidden
    heads = int(c["linear_num_value_heads"])
    keys = int(c["linear_num_key_heads"]) * int(c["linear_key_head_dim"])
    values = heads * int(c["linear_value_head_dim"])
    inputs = ((name, h, width, "norm1") for name, width in names(keys, values, heads).items())
    output = ("out_proj", values, h, "mixed")
    linears = linears_below(LAYER + "linear_attn.", s.layers, False, *inputs, output)
    convolution = (2 * keys + values) * int(c["linear_conv_kernel_dim"])
    return linears, convolution + 2 * heads + int(c["linear_value_head_dim"])


_DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def _next_names(keys: int, values: int, heads: int) -> dict[str, int]:
    return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}


def _3_5_names(keys: int, values: int, heads: int) -> dict[str, int]:
    return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}


def _layers(s: Sizes, names: Callable[[int, int, int], dict[str, int]], mlps: Sequence[str]) -> Layout:
    """`mlps`: of each layer, "dense" or "sparse"."""
    interval = int(s.config.get("full_attention_interval") or 4)
    often, last = "linear_attention", "full_attention"
    mixers = layer_types(s, [often if (i + 1) % interval else last for i in range(s.layers)])
    # peft takes names of Qwen3-Next's linears for those of its experts; Qwen3.5 is not in its table.
    renamed = s.config["model_type"] == "qwen3_next"

    def reached(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
        return without_adapters(linears) if renamed else linears

    def make(s: Sizes, kind: str) -> Layout:
        mixer, mlp = kind.split()
        more: dict[str, Any] = {**partly_rotated(s, 0.25), "wide_norms": True}
        if mixer == last:
            linears, extra, more["qk_norm"] = _gated_attention(s), 0, True
        else:
            linears, extra = _delta_linears(s, names)
            more["delta"] = tuple(int(s.config[key]) for key in _DELTA_SIZES)
        if mlp == "dense":
            return _Hybrid.of(s, linears + reached(gated_mlp(s)), extra, **more)
        c, (*shared, gate) = s.config, gated_shared_mlp(s)
        linears += (*reached(tuple(shared)), gate)
        sizes = (int(c["num_experts"]), int(c["moe_intermediate_size"]), int(c["num_experts_per_tok"]))
        return _Hybrid.with_experts(s, linears, sizes, extra, expert_adapters=renamed, **more)

    return of_kinds(s, [f"{mixer} {mlp}" for mixer, mlp in zip(mixers, mlps, strict=True)], make)


TYPES = (
    ModelType(
        "qwen3_next",
        lambda s: _layers(s, _next_names, sparse_layers(s, int(s.config["num_experts"]))),
        has_dense=True,
    ),
    ModelType(
        "qwen3_5_text", lambda s: _layers(s, _3_5_names, ["dense"] * s.layers), lacks=("token-classifier",)
    ),
    ModelType(
        "qwen3_5_moe_text", lambda s: _layers(s, _3_5_names, ["sparse"] * s.layers), lacks=ONLY_LANGUAGE
    ),
)
