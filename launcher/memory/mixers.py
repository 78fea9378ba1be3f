"""What mixers of tokens other than attention keep for the backward pass, operation by operation.

As read in transformers 5.23 (models/qwen3_next/modeling_qwen3_next.py, models/qwen3_5): the way of torch's
operations, which runs where flash-linear-attention and causal-conv1d are not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.architectures import Linear
from launcher.memory.operations import (
    Block,
    activate,
    bmm,
    broadcast,
    cast,
    normalised,
    product,
    times,
    views,
    weighted,
)
from launcher.memory.tape import Storage, Tape, Value

CHUNK = 64
"""Positions that the gated delta rule computes together."""


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


def delta_rule(tape: Tape, block: Block, x: Value) -> Value:
    """Qwen's linear attention: a causal convolution, the gated delta rule, a gated norm."""
    key_heads, heads, key, value, kernel = block.layout.mixer_sizes
    padded = block.rows * -(-block.length // CHUNK) * CHUNK
    sizes = _Delta(key_heads, heads, key, value, kernel, block.tokens, padded)
    linears = {one.name: one for one in block.layout.linears}
    if block.padded:
        x = tape.step([x], x.elements, x.width)
    mixed, z, b, a = _inputs(tape, block, x, sizes, linears)
    narrow = mixed.width
    width = 2 * key_heads * key + heads * value
    mixed = _convolution(tape, block, mixed, width, kernel)
    q, k, v = views(
        tape, mixed, *(block.tokens * n for n in (key_heads * key, key_heads * key, heads * value))
    )
    beta = tape.step([b], b.elements, b.width, save_out=True)
    mixed = _chunks(tape, block, sizes, (q, k, v, beta, _decay(tape, block, a, heads)))
    # Rows without what filled them up, in the products' dtype.
    mixed = tape.step([mixed], block.tokens * heads * value, narrow)
    return product(tape, block, _gated_norm(tape, block, mixed, z, value), linears["out_proj"])


def _inputs(
    tape: Tape, block: Block, x: Value, sizes: _Delta, linears: dict[str, Linear]
) -> tuple[Value, Value, Value, Value]:
    """Queries, keys and values side by side; the gate, the learning rates and the decays."""
    if "in_proj_qkv" in linears:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        mixed, z, b, a = (product(tape, block, x, linears[name]) for name in names)
        return mixed, z, b, a
    keys, values = sizes.key_heads * sizes.key, sizes.heads * sizes.value
    whole = product(tape, block, x, linears["in_proj_qkvz"])
    rates = product(tape, block, x, linears["in_proj_ba"])
    parts = views(tape, whole, *(block.tokens * n for n in (keys, keys, values, values)))
    q, k, v, z = (tape.step([one], one.elements, one.width, passes=True) for one in parts)
    halves = views(tape, rates, *[block.tokens * sizes.heads] * 2)
    b, a = (tape.step([one], one.elements, one.width, passes=True) for one in halves)
    return tape.step([q, k, v], q.elements + k.elements + v.elements, q.width, passes=True), z, b, a


def _convolution(tape: Tape, block: Block, x: Value, width: int, kernel: int) -> Value:
    """A depthwise convolution over the positions before, and an activation."""
    d = block.dtypes
    narrow, params = d.weight, width * kernel if block.full else 0
    if d.autocast:
        x, narrow = cast(tape, x, d.compute), d.compute
    longer = block.rows * (block.length + kernel - 1) * width
    out = tape.step([x], longer, narrow, saves=[x.storage], params=params, fresh=narrow * params)
    return activate(tape, block, tape.step([out], x.elements, narrow, view=out.storage))


def _decay(tape: Tape, block: Block, a: Value, heads: int) -> Value:
    """The logarithm of each head's decay, in float32."""
    params = heads if block.full else 0
    a = tape.step([cast(tape, a, 4)], a.elements, 4, params=params, fresh=4 * params)
    a = tape.step([a], a.elements, 4, saves=[a.storage])
    saves = [a.storage] if params else []
    return tape.step([a], a.elements, 4, saves=saves, params=params, fresh=4 * params)


def _scaled_rows(tape: Tape, x: Value, width: int) -> Value:
    """Each `width` values divided by their length."""
    n = x.elements
    root = tape.step([x], n // width, 4, saves=[x.storage], save_out=True, temporary=4 * n)
    return broadcast(tape, x, root)


def _chunks(
    tape: Tape, block: Block, sizes: _Delta, inputs: tuple[Value, Value, Value, Value, Value]
) -> Value:
    """`torch_chunk_gated_delta_rule`: within chunks, then from chunk to chunk."""
    q, k, v, beta, decay = inputs
    of_keys, small = sizes.tokens * sizes.heads * sizes.key, sizes.padded * sizes.heads
    if sizes.key_heads != sizes.heads:
        q, k = (tape.step([one], of_keys, one.width) for one in (q, k))
    q, k, v = (tape.step([one], one.elements, 4) for one in (q, k, v))
    beta = tape.step([beta], beta.elements, 4)
    q, k = _scaled_rows(tape, q, sizes.key), _scaled_rows(tape, k, sizes.key)
    q = tape.step([q], of_keys, 4)
    filled = ((q, sizes.keys), (k, sizes.keys), (v, sizes.values), (beta, small), (decay, small))
    q, k, v, beta, decay = (tape.step([one], n, 4) for one, n in filled)
    v_beta, k_beta = broadcast(tape, v, beta), broadcast(tape, k, beta)
    total = tape.step([decay], small, 4)
    pairs = tape.step([total], sizes.pairs, 4)
    pairs = tape.step([pairs], sizes.pairs, 4, saves=[Storage(CHUNK**2)])
    pairs = tape.step([pairs], sizes.pairs, 4, save_out=True)
    system = times(tape, bmm(tape, block, k_beta, k, sizes.pairs), pairs)
    inside = times(tape, bmm(tape, block, q, k, sizes.pairs), pairs)
    grown = tape.step([total], small, 4, save_out=True)
    decayed = broadcast(tape, k_beta, grown)
    fresh, read = (
        tape.step([system, one], n, 4, saves=[system.storage], save_out=True, temporary=4 * sizes.pairs)
        for one, n in ((v_beta, sizes.values), (decayed, sizes.keys))
    )
    q = broadcast(tape, q, grown)
    k = broadcast(tape, k, tape.step([total], small, 4, save_out=True))
    return _scan(tape, block, sizes, (fresh, read, q, inside, k))


def _scan(tape: Tape, block: Block, sizes: _Delta, inputs: tuple[Value, Value, Value, Value, Value]) -> Value:
    """The loop over chunks: five products with the state, which is kept before each chunk."""
    _, read, q, inside, k = inputs
    if block.dtypes.autocast:
        # Each product casts its parts; the state's own decay reads it in float32.
        width = block.dtypes.compute
        cast_parts = sum(one.elements for one in (read, q, inside, k)) + 2 * sizes.values + 2 * sizes.states
        saves = [Storage(width * cast_parts), Storage(4 * sizes.states)]
    else:
        saves = [read.storage, q.storage, inside.storage, k.storage]
        saves.append(Storage(4 * (sizes.values + sizes.states)))
    # The gradient of a chunk of an input is as large as the input; that of the output is copied.
    temporary = 4 * (max(sizes.pairs, sizes.keys, sizes.values) + sizes.values)
    return tape.step(inputs, sizes.values, 4, saves=saves, temporary=temporary)


def _gated_norm(tape: Tape, block: Block, x: Value, gate: Value, width: int) -> Value:
    """`norm(x) * silu(gate)`, the gate in float32."""
    wide = cast(tape, x, 4)
    normed = weighted(tape, block, cast(tape, normalised(tape, wide, wide, width), x.width), width)
    gate = cast(tape, gate, 4)
    opened = tape.step([gate], gate.elements, 4, saves=[gate.storage])
    return cast(tape, times(tape, normed, opened), x.width)


def plain_mixer(tape: Tape, block: Block, x: Value) -> Value:
    """Its products, and a guess of what is between them; such layers are traced."""
    linears = block.layout.linears
    first = [product(tape, block, x, one) for one in linears if one.reads == "norm1"]
    last = next(one for one in linears if one.reads in ("mixed", "attn"))
    elements = block.tokens * last.in_features
    kept = [Storage(4 * elements) for _ in range(10)]
    mixed = tape.step(first, elements, first[0].width, saves=kept, temporary=16 * elements)
    return product(tape, block, mixed, last)


MIXERS = {"delta": delta_rule, "latent": plain_mixer, "mamba": plain_mixer}
