"""Attention as a tape records it: products, positions, scores, kernels.

As read in transformers 5.23 (the families' modeling files, integrations/sdpa_attention.py) and torch 2.13
(attention kernels of CPU and CUDA).
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.models.capabilities import is_varlen
from launcher.models.layers.layout import Block, LayerTape
from launcher.models.layers.tape import Storage, Tape, Value


def split(tape: LayerTape, fused: Value) -> tuple[Value, Value, Value]:
    """Queries, keys and values as views of one product, whose gradients wait for each other."""
    whole = tape.step([fused], fused.elements, fused.width, view=fused.storage)
    if whole.node is not None:
        whole.node.joined = True
    sizes = head_sizes(tape.block)
    q, k, v = (tape.step([whole], n, fused.width, view=fused.storage, passes=True) for n in sizes)
    return q, k, v


def head_sizes(block: Block) -> tuple[int, int, int]:
    """Elements of queries, keys and values."""
    share = block.head_dim * block.tokens
    return block.heads * share, block.kv_heads * share, block.kv_heads * share


def attended(tape: LayerTape, x: Value, mixed: Value, out: str = "attn") -> Value:
    """The last product of attention, which reads `out`; `x` is the input of its function."""
    made = tape.product(mixed, tape.block.layout.reading(out)[0])
    tape.reads(x)
    return made


def rotate(tape: LayerTape, x: Value, *, wide: bool = False, narrow: bool = False) -> Value:
    """Rotary positions: `x * cos + rotate_half(x) * sin`; the factors are the same for all layers.

    wide: in float32; narrow: the result is cast back to the dtype of `x`.
    """
    block = tape.block
    d, rest = block.dtypes, None
    if block.liger:  # in place, forwards and backwards
        return tape.step([x], x.elements, x.width, view=x.storage, passes=True)
    whole = x
    if block.layout.rotary_joined:
        turned = int(x.elements * block.layout.rotary_share)
        x = tape.step([whole], turned, whole.width, view=whole.storage)
        rest = tape.step([whole], whole.elements - turned, whole.width, view=whole.storage)
    given, n = x.width, x.elements
    straight = x
    if wide:
        straight, x = tape.cast(x, 4), tape.cast(x, 4)
    width = max(x.width, d.residual)
    straight = tape.step([straight], n, width)
    low = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([high], n // 2, x.width)
    half = tape.step([low, high], n, x.width, passes=True)
    rotated = tape.add(straight, tape.step([half], n, width))
    if narrow:
        rotated = tape.cast(rotated, given)
    if rest is None:
        return rotated
    return tape.step([rotated, rest], whole.elements, width, passes=True)


def kernel(tape: LayerTape, q: Value, k: Value, v: Value) -> Value:
    """Attention in one operation."""
    block = tape.block
    d, layout = block.dtypes, block.layout
    # torch's CPU kernel takes no dropout, no mask that learns, and values as wide as keys alone.
    wide = k.elements != v.elements
    fallback = d.on_cpu and (layout.attention_dropout > 0 or layout.biases_scores or wide)
    if fallback or not takes_grouped(block):
        k, v = _repeat(tape, k), _repeat(tape, v)
    if d.autocast:
        q, k, v = (tape.cast(x, d.compute) for x in (q, k, v))
    if fallback:
        return _fallback(tape, q, k, v)
    if block.one_by_one:  # documents are views, whose gradients are put side by side again
        q, k, v = (tape.step([x], x.elements, x.width, view=x.storage) for x in (q, k, v))
    saves = [q.storage, k.storage, v.storage, Storage(4 * block.heads * block.tokens)]
    maps = block.heads if layout.biases_scores else int(block.masked and block.attention == "sdpa")
    # A mask is turned into numbers by each layer; learned biases of distances are one for each head.
    saves.append(Storage(q.width * maps * block.tokens * block.length))
    # CUDA's derivative sums the queries' gradient in float32, in place where that is its dtype.
    temporary = 0 if d.on_cpu or q.width == 4 else 4 * q.elements
    elements = q.elements * v.elements // k.elements if wide else q.elements
    mixed = tape.step([q, k, v], elements, q.width, saves=saves, save_out=True, temporary=temporary)
    if block.one_by_one:  # and so is what attention makes of each
        mixed = tape.step([mixed], mixed.elements, mixed.width, passes=True)
    # Queries that were joined from parts are stored head by head, and so is the result of a kernel other than
    # CUDA's memory-efficient one; without padding in between, rows are put back to their places.
    efficient = not d.on_cpu and block.attention == "sdpa" and (q.width == 4 or block.masked or wide)
    unpadded = block.padded and block.attention == "flash_attention_2"
    moved = (layout.rotary_joined and not efficient) or unpadded
    return _side_by_side(tape, mixed) if moved else mixed


def takes_grouped(block: Block) -> bool:
    """Whether the kernel takes keys and values of groups of heads; others take them repeated.

    sdpa does without a mask (integrations/sdpa_attention.py, `use_gqa_in_sdpa`); of CUDA's kernels those in
    16 bits, from compute capability 8.0 (`repeat_keys_for_fused_attention`). torch's kernel for documents
    does from torch 2.12 on (torch/nn/attention/varlen.py, `enable_gqa`).
    """
    if is_varlen(block.attention):
        return block.dtypes.on_cpu or (block.grouped and not block.one_by_one)
    if block.masked:
        return False
    fits = block.attention == "sdpa" and block.grouped and block.dtypes.compute < 4 and block.head_dim <= 256
    return block.dtypes.on_cpu or fits


def _repeat(tape: LayerTape, x: Value) -> Value:
    """Grouped keys or values, once for each query head: transformers expands those of a single head, torch's
    sdpa, to which it leaves heads of up to 256 without a mask, copies them."""
    block = tape.block
    groups = block.heads // block.kv_heads
    left = block.attention == "sdpa" and not block.masked and block.head_dim <= 256
    view = x.storage if block.kv_heads == 1 and not left else None
    return x if groups == 1 else tape.step([x], x.elements * groups, x.width, view=view)


def eager(
    tape: LayerTape,
    q: Value,
    k: Value,
    v: Value,
    *,
    joined: bool = False,
    weigh: Callable[[LayerTape, Value, Value], Value] | None = None,
) -> Value:
    """Attention of single operations.

    joined: queries and keys were joined from parts, which puts each head's rows
    together; weigh: makes the result of scores and values, by default with a softmax.
    """
    block = tape.block
    d, n, given = block.dtypes, _scores(block), (q, _repeat(tape, k), _repeat(tape, v))
    first, second, values = (tape.cast(x, d.compute) if d.autocast else x for x in given)
    # What was repeated has each head's rows together, too.
    joined, repeated = joined or block.layout.rotary_joined, block.heads > block.kv_heads
    first = first if joined else _side_by_side(tape, first)
    second = second if joined or repeated else _side_by_side(tape, second)
    values = values if repeated else _side_by_side(tape, values)
    scores = tape.bmm(first, second, n)
    scores = tape.step([scores], n, scores.width)
    if block.layout.caps_scores:
        scores = cap(tape, scores)
    # The mask has the dtype of the residual stream.
    wide = max(scores.width, d.residual) if block.masked or block.layout.causal else scores.width
    scores = tape.step([scores], n, wide, passes=True)
    mixed = (weigh or _softmax)(tape, scores, values)
    for one in (k, v, *given):  # variables of two functions
        tape.reads(one)
    return mixed


def cap(tape: Tape, x: Value) -> Value:
    """`c * tanh(x / c)`."""
    x = tape.step([x], x.elements, x.width)
    x = tape.step([x], x.elements, x.width, save_out=True)
    return tape.step([x], x.elements, x.width)


def _softmax(tape: LayerTape, scores: Value, values: Value) -> Value:
    block = tape.block
    d, layout = block.dtypes, block.layout
    if layout.float_softmax or block.float_operations:
        scores = tape.cast(scores, 4)
    weights = tape.step([scores], scores.elements, scores.width, save_out=True)
    weights = tape.cast(weights, d.compute)
    weights = tape.dropout(weights, layout.attention_dropout > 0)
    return tape.bmm(weights, values, values.elements)


def _scores(block: Block) -> int:
    """Numbers of the attention maps."""
    return block.heads * block.tokens * block.length


def _side_by_side(tape: LayerTape, x: Value) -> Value:
    """A copy with each head's rows together, which a product of many heads reads."""
    if tape.block.rows == 1 and x.width == tape.block.dtypes.compute:
        return x
    return tape.step([x], x.elements, x.width, passes=True)


def _fallback(tape: LayerTape, q: Value, k: Value, v: Value) -> Value:
    """Attention of single operations in float32."""
    layout, n, width = tape.block.layout, _scores(tape.block), q.width
    q, k, v = (tape.cast(x, 4) for x in (q, k, v))
    q = tape.step([q], q.elements, 4)
    k = tape.step([k], k.elements, 4)
    q, k, v = (_side_by_side(tape, x) for x in (q, k, v))
    scores = tape.step([q, k], n, 4, saves=[q.storage, k.storage])
    weights = tape.step([scores], n, 4, save_out=True)
    weights = tape.dropout(weights, layout.attention_dropout > 0)
    mixed = tape.step([weights, v], v.elements, 4, saves=[weights.storage, v.storage])
    mixed = tape.cast(mixed, width)
    # Heads are laid side by side again, which copies.
    return tape.step([mixed], mixed.elements, width, passes=True)
