"""What mixers of tokens other than attention keep for the backward pass, operation by operation.

As read in transformers 5.23 (models/qwen3_next, models/qwen3_5, models/granitemoehybrid): the way of torch's
operations, which runs where flash-linear-attention, mamba-ssm and causal-conv1d are not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.memory.operations import (
    Block,
    activate,
    add,
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
from launcher.models.architectures import Linear

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
    q, k, v, z = (_copy(tape, one) for one in parts)
    if sizes.key_heads == sizes.heads:
        z = parts[3]
    halves = views(tape, rates, *[block.tokens * sizes.heads] * 2)
    b, a = (_copy(tape, one) for one in halves)
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
    # Float32 heads of whole chunks stay where they are, so that each product copies its operands.
    strided = v.width == 4 and sizes.tokens == sizes.padded
    if v.width < 4:
        q, k, v, beta = (cast(tape, one, 4) for one in (q, k, v, beta))
    q, k = _scaled_rows(tape, q, sizes.key), _scaled_rows(tape, k, sizes.key)
    q = tape.step([q], of_keys, 4)
    filled = ((q, sizes.keys), (k, sizes.keys), (v, sizes.values), (beta, small), (decay, small))
    q, k, v, beta, decay = (tape.step([one], n, 4) for one, n in filled)
    v_beta, k_beta = broadcast(tape, v, beta), broadcast(tape, k, beta)
    total = tape.step([decay], small, 4)
    pairs = tape.step([total], sizes.pairs, 4)
    pairs = tape.step([pairs], sizes.pairs, 4, saves=[Storage(CHUNK**2)])
    pairs = tape.step([pairs], sizes.pairs, 4, save_out=True)
    multiplied = [(k_beta, k), (q, k)]
    if strided:
        multiplied = [(_copy(tape, one), _copy(tape, other)) for one, other in multiplied]
    system, inside = (times(tape, bmm(tape, block, *both, sizes.pairs), pairs) for both in multiplied)
    grown = tape.step([total], small, 4, save_out=True)
    decayed = broadcast(tape, k_beta, grown)
    fresh, read = (
        tape.step([system, one], n, 4, saves=[system.storage], save_out=True, temporary=4 * sizes.pairs)
        for one, n in ((v_beta, sizes.values), (decayed, sizes.keys))
    )
    q = broadcast(tape, q, grown)
    k = broadcast(tape, k, tape.step([total], small, 4, save_out=True))
    return _scan(tape, block, sizes, (fresh, read, q, inside, k), strided=strided)


def _copy(tape: Tape, x: Value) -> Value:
    """A copy with the rows of each head together."""
    return tape.step([x], x.elements, x.width, passes=True)


def _scan(
    tape: Tape,
    block: Block,
    sizes: _Delta,
    inputs: tuple[Value, Value, Value, Value, Value],
    *,
    strided: bool,
) -> Value:
    """The loop over chunks: five products with the state, which is kept before each chunk."""
    _, read, q, inside, k = inputs
    if block.dtypes.autocast:
        # Each product casts its parts; the state's own decay reads it in float32.
        width = block.dtypes.compute
        cast_parts = sum(one.elements for one in (read, q, inside, k)) + 2 * sizes.values + 2 * sizes.states
        saves = [Storage(width * cast_parts), Storage(4 * sizes.states)]
    else:
        parts = [Storage(q.size), Storage(k.size)] if strided else [q.storage, k.storage]
        saves = [read.storage, inside.storage, *parts]
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


@dataclass(frozen=True, slots=True)
class _Scan:
    """Numbers of a layer's Mamba-2 scan, by what they are of: rows are filled up to whole chunks."""

    values: int
    keys: int
    """Of inputs or of outputs of the state, repeated for each head."""
    pairs: int
    """Of the maps of a chunk's positions to each other."""
    states: int
    """Of the states before each chunk, and after the last."""
    small: int
    """One for each head and position."""


def mamba(tape: Tape, block: Block, x: Value) -> Value:
    """Mamba-2: a causal convolution, a scan by chunks, a gated norm."""
    heads, head, state, groups, kernel, chunk = block.layout.mixer_sizes
    linears = {one.name: one for one in block.layout.linears}
    inner, n = heads * head, block.tokens
    chunks = block.rows * -(-block.length // chunk)
    small = chunks * chunk * heads
    sizes = _Scan(small * head, small * state, small * chunk, (chunks + block.rows) * inner * state, small)
    if block.padded:
        x = tape.step([x], x.elements, x.width)
    width = inner + 2 * groups * state
    made = product(tape, block, x, linears["in_proj"])
    gate, mixed, dt = views(tape, made, n * inner, n * width, n * heads)
    mixed = _convolution(tape, block, mixed, width, kernel)
    if block.padded:
        mixed = tape.step([mixed], mixed.elements, mixed.width)
    values, keys, reads = views(tape, mixed, n * inner, n * groups * state, n * groups * state)
    params = heads if block.full else 0
    dt = tape.step([dt], dt.elements, max(dt.width, block.dtypes.weight), params=params, fresh=4 * params)
    dt = cast(tape, dt, 4) if block.float_operations else dt
    dt = tape.step([dt], dt.elements, dt.width, saves=[dt.storage])
    dt = tape.step([dt], dt.elements, dt.width, saves=[dt.storage])
    scanned = _scan_chunks(tape, block, sizes, (cast(tape, values, 4), keys, reads, dt), params)
    gate = cast(tape, gate, 4)
    opened = tape.step([gate], gate.elements, 4, saves=[gate.storage])
    wide = times(tape, tape.step([scanned], n * inner, 4), opened)
    normed = cast(tape, normalised(tape, wide, wide, inner // groups), 4)
    out = weighted(tape, block, normed, inner)
    return product(tape, block, cast(tape, out, block.dtypes.compute), linears["out_proj"])


def _scan_chunks(
    tape: Tape, block: Block, sizes: _Scan, inputs: tuple[Value, Value, Value, Value], params: int
) -> Value:
    """`mamba2_chunk_scan`; each product of an einsum copies operands whose heads are not together."""
    values, keys, reads, dt = inputs
    keys, reads = (tape.step([cast(tape, one, 4)], sizes.keys, 4) for one in (keys, reads))
    filled = tape.step([values], sizes.values, 4)
    kept, temporary = ([filled.storage], filled.size) if params else ([], 0)
    skip = tape.step(
        [filled], filled.elements, 4, saves=kept, temporary=temporary, params=params, fresh=4 * params
    )
    wide = cast(tape, dt, 4)
    values = broadcast(tape, values, wide)
    decay = tape.step([wide], dt.elements, 4, saves=[dt.storage], params=params, fresh=4 * params)
    parts = (
        (values, sizes.values), (keys, sizes.keys), (reads, sizes.keys), (decay, sizes.small)
    )  # fmt: skip
    values, keys, reads, decay = (tape.step([one], size, 4) for one, size in parts)
    total = tape.step([decay], sizes.small, 4)
    # A sum of decays between two masks.
    pairs = tape.step([decay], sizes.pairs, 4)
    pairs = tape.step([tape.step([pairs], sizes.pairs, 4)], sizes.pairs, 4)
    pairs = tape.step([pairs], sizes.pairs, 4, save_out=True)
    scores = bmm(tape, block, _copy(tape, reads), _copy(tape, keys), sizes.pairs)
    near = bmm(tape, block, times(tape, scores, pairs), _copy(tape, values), sizes.values)
    written = broadcast(tape, keys, tape.step([total], sizes.small, 4, save_out=True))
    states = bmm(tape, block, _copy(tape, written), _copy(tape, values), sizes.states)
    states = tape.step([states], sizes.states, 4, passes=True)
    states = bmm(tape, block, states, tape.step([total], sizes.small, 4), sizes.states)
    far = bmm(tape, block, _copy(tape, reads), _copy(tape, states), sizes.values)
    far = broadcast(tape, far, tape.step([total], sizes.small, 4, save_out=True))
    return add(tape, add(tape, near, far), skip)


MIXERS = {"delta": delta_rule, "mamba": mamba}
