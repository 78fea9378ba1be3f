"""Attention as autograd keeps it: projections, rotated positions, and the kernel or its single operations.

As read in transformers 5.23 (the families' modeling files, integrations/sdpa_attention.py) and torch 2.13
(its kernels for CPU and CUDA, and the fallback of scaled_dot_product_attention).
"""

from __future__ import annotations

from launcher.facts.attention import is_varlen
from launcher.memory.flow import Block
from launcher.memory.norms import norm
from launcher.memory.products import add, cast, dropout, product
from launcher.memory.tape import Storage, Tape, Value

SLICED = ("gpt_neox", "phi3")
"""Families that rotate a part of each head and put it together with the rest."""


def attention(tape: Tape, block: Block, x: Value, *, read: Value | None = None, out: str = "attn") -> Value:
    """Attention of `x` over itself, or over `read`; `out` names what its last product reads."""
    queries, keys, values = _project(tape, block, x, read, out)
    layout = block.layout
    if layout.qk_norm:
        queries, keys = norm(tape, block, queries, block.head_dim), norm(tape, block, keys, block.head_dim)
    if not layout.positions and not layout.position_bias and read is None:
        queries, keys = rotate(tape, block, queries), rotate(tape, block, keys)
    if block.model_type == "opt":  # scales its queries before the kernel does not
        queries = tape.step([queries], queries.elements, queries.width)
    mixed = _mix(tape, block, queries, keys, values)
    last = next(linear for linear in layout.linears if linear.reads == out)
    return product(tape, block, mixed, last)


def _project(tape: Tape, block: Block, x: Value, read: Value | None, out: str) -> tuple[Value, Value, Value]:
    linears = block.layout.linears
    if out == "attn_cross":
        first = [one for one in linears if one.reads in ("norm_cross", "encoder")]
    else:
        first = [one for one in linears if one.reads == "norm1"]
    if len(first) == 3:
        reads = (x, read or x, read or x)
        q, k, v = (product(tape, block, y, one) for y, one in zip(reads, first, strict=True))
        return q, k, v
    return _split(tape, block, product(tape, block, x, first[0]))


def _split(tape: Tape, block: Block, fused: Value) -> tuple[Value, Value, Value]:
    """Views of one product; the families that slice it write each gradient into zeros of the whole."""
    share = block.head_dim * block.tokens
    sizes = (block.heads * share, block.kv_heads * share, block.kv_heads * share)
    if block.model_type == "phi3":
        q, k, v = (tape.step([fused], n, fused.width, view=fused.storage) for n in sizes)
        return q, k, v
    whole = tape.step([fused], fused.elements, fused.width, view=fused.storage)
    if whole.node is not None:
        whole.node.joined = True
    q, k, v = (tape.step([whole], n, fused.width, view=fused.storage, passes=True) for n in sizes)
    return q, k, v


def rotate(tape: Tape, block: Block, x: Value) -> Value:
    """Rotary positions: `x * cos + rotate_half(x) * sin`; the factors are the same for all layers."""
    d, rest = block.dtypes, None
    if block.liger:  # in place, forwards and backwards
        return tape.step([x], x.elements, x.width, view=x.storage, passes=True)
    whole = x
    if block.model_type in SLICED:
        turned = int(x.elements * block.layout.rotary_share)
        x = tape.step([whole], turned, whole.width, view=whole.storage)
        rest = tape.step([whole], whole.elements - turned, whole.width, view=whole.storage)
    width, n = max(x.width, d.residual), x.elements
    straight = tape.step([x], n, width)
    low = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([high], n // 2, x.width)
    half = tape.step([low, high], n, x.width, passes=True)
    rotated = add(tape, straight, tape.step([half], n, width))
    if rest is None:
        return rotated
    return tape.step([rotated, rest], whole.elements, width, passes=True)


def _repeat(tape: Tape, block: Block, x: Value) -> Value:
    """Grouped keys or values, once for each query head."""
    groups = block.heads // block.kv_heads
    return x if groups == 1 else tape.step([x], x.elements * groups, x.width)


def _mix(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    """What attention makes of queries, keys and values, laid out as the last product reads it."""
    d, layout = block.dtypes, block.layout
    if block.attention == "eager":
        return _eager(tape, block, q, _repeat(tape, block, k), _repeat(tape, block, v))
    # torch's CPU kernel takes neither dropout nor a mask that learns.
    fallback = d.on_cpu and (layout.attention_dropout > 0 or layout.position_bias)
    # Kernels of CPU and those of any length take grouped keys, others take them repeated.
    varlen = is_varlen(block.attention)
    grouped = not fallback if d.on_cpu and (varlen or not block.masked) else varlen and not block.one_by_one
    if not grouped:
        k, v = _repeat(tape, block, k), _repeat(tape, block, v)
    if d.autocast:
        q, k, v = (cast(tape, x, d.compute) for x in (q, k, v))
    if fallback:
        return _fallback(tape, block, q, k, v)
    if block.one_by_one:  # documents are views, whose gradients are put side by side again
        q, k, v = (tape.step([x], x.elements, x.width, view=x.storage) for x in (q, k, v))
    saves = [q.storage, k.storage, v.storage, Storage(4 * (q.elements // block.head_dim))]
    maps = block.heads if layout.position_bias else int(block.masked and block.attention == "sdpa")
    # A mask is turned into numbers by each layer; learnt biases of distances are one for each head.
    saves.append(Storage(q.width * maps * block.tokens * block.length))
    # CUDA's derivative sums the queries' gradient in float32.
    temporary = 0 if d.on_cpu else 4 * q.elements
    mixed = tape.step([q, k, v], q.elements, q.width, saves=saves, save_out=True, temporary=temporary)
    if block.one_by_one:  # and so is what attention makes of each
        mixed = tape.step([mixed], mixed.elements, mixed.width, passes=True)
    # Queries that were put together from parts lie head by head, and so does the kernel's answer; without
    # padding in between, rows are put back to their places.
    moved = block.model_type in SLICED or (block.padded and block.attention == "flash_attention_2")
    return _side_by_side(tape, block, mixed) if moved else mixed


def _scores(block: Block) -> int:
    """Numbers of the attention maps."""
    return block.heads * block.tokens * block.length


def _bmm(tape: Tape, block: Block, first: Value, second: Value, elements: int) -> Value:
    """A product of two activations, each copied where heads do not lie side by side."""
    d = block.dtypes
    if d.autocast:
        first, second = cast(tape, first, d.compute), cast(tape, second, d.compute)
    return tape.step([first, second], elements, first.width, saves=[first.storage, second.storage])


def _side_by_side(tape: Tape, block: Block, x: Value) -> Value:
    """A copy with each head's rows together, which a product of many heads reads."""
    if block.rows == 1 and x.width == block.dtypes.compute:
        return x
    return tape.step([x], x.elements, x.width, passes=True)


def _eager(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    d, layout, n = block.dtypes, block.layout, _scores(block)
    q, k, v = (cast(tape, x, d.compute) if d.autocast else x for x in (q, k, v))
    q, k, v = (_side_by_side(tape, block, x) for x in (q, k, v))
    scores = _bmm(tape, block, q, k, n)
    scores = tape.step([scores], n, scores.width)
    if layout.score_cap:
        scores = tape.step([scores], n, scores.width)
        scores = tape.step([scores], n, scores.width, save_out=True)
        scores = tape.step([scores], n, scores.width)
    # The mask has the dtype of the residual stream.
    wide = max(scores.width, d.residual) if block.masked or layout.causal else scores.width
    scores = tape.step([scores], n, wide, passes=True)
    if layout.float_softmax or block.float_operations:
        scores = cast(tape, scores, 4)
    weights = tape.step([scores], n, scores.width, save_out=True)
    weights = cast(tape, weights, d.compute)
    weights = dropout(tape, weights, layout.attention_dropout > 0, d.on_cpu)
    return _bmm(tape, block, weights, v, q.elements)


def _fallback(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    """Attention of single operations in float32."""
    d, layout, n, width = block.dtypes, block.layout, _scores(block), q.width
    q, k, v = (cast(tape, x, 4) for x in (q, k, v))
    q = tape.step([q], q.elements, 4)
    k = tape.step([k], k.elements, 4)
    q, k, v = (_side_by_side(tape, block, x) for x in (q, k, v))
    scores = tape.step([q, k], n, 4, saves=[q.storage, k.storage])
    weights = tape.step([scores], n, 4, save_out=True)
    weights = dropout(tape, weights, layout.attention_dropout > 0, d.on_cpu)
    mixed = tape.step([weights, v], q.elements, 4, saves=[weights.storage, v.storage])
    mixed = cast(tape, mixed, width)
    # Heads are laid side by side again, which copies.
    return tape.step([mixed], mixed.elements, width, passes=True)
