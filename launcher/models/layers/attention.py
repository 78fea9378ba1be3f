"""Attention as a tape records it: products, positions, scores, kernels.

As read in transformers 5.23 (the families' modeling files, integrations/sdpa_attention.py) and torch 2.13
(attention kernels of CPU and CUDA).
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.models.capabilities import is_varlen
from launcher.models.layers.layout import Block
from launcher.models.layers.operations import add, bmm, cast, dropout, product
from launcher.models.layers.tape import Storage, Tape, Value


def project(tape: Tape, block: Block, x: Value) -> tuple[Value, Value, Value]:
    """Queries, keys and values of `x`: three products, or views of one."""
    first = block.layout.reading("norm1")
    if len(first) == 1:
        return split(tape, block, product(tape, block, x, first[0]))
    q, k, v = (product(tape, block, x, one) for one in first)
    return q, k, v


def split(tape: Tape, block: Block, fused: Value) -> tuple[Value, Value, Value]:
    """Queries, keys and values as views of one product, whose gradients wait for each other."""
    whole = tape.step([fused], fused.elements, fused.width, view=fused.storage)
    if whole.node is not None:
        whole.node.joined = True
    sizes = head_sizes(block)
    q, k, v = (tape.step([whole], n, fused.width, view=fused.storage, passes=True) for n in sizes)
    return q, k, v


def head_sizes(block: Block) -> tuple[int, int, int]:
    """Elements of queries, keys and values."""
    share = block.head_dim * block.tokens
    return block.heads * share, block.kv_heads * share, block.kv_heads * share


def attended(tape: Tape, block: Block, x: Value, mixed: Value, out: str = "attn") -> Value:
    """The last product of attention, which reads `out`; `x` is the input of its function."""
    made = product(tape, block, mixed, block.layout.reading(out)[0])
    tape.reads(x)
    return made


def rotate(tape: Tape, block: Block, x: Value, *, wide: bool = False, narrow: bool = False) -> Value:
    """Rotary positions: `x * cos + rotate_half(x) * sin`; the factors are the same for all layers.

    wide: in float32; narrow: the result is cast back to the dtype of `x`.
    """
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
        straight, x = cast(tape, x, 4), cast(tape, x, 4)
    width = max(x.width, d.residual)
    straight = tape.step([straight], n, width)
    low = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([high], n // 2, x.width)
    half = tape.step([low, high], n, x.width, passes=True)
    rotated = add(tape, straight, tape.step([half], n, width))
    if narrow:
        rotated = cast(tape, rotated, given)
    if rest is None:
        return rotated
    return tape.step([rotated, rest], whole.elements, width, passes=True)


def mix(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    """What attention makes of queries, keys and values, laid out as the last product reads it."""
    return eager(tape, block, q, k, v) if block.attention == "eager" else kernel(tape, block, q, k, v)


def kernel(tape: Tape, block: Block, q: Value, k: Value, v: Value, *, biased: bool = False) -> Value:
    """Attention in one operation. biased: numbers that learn are added to each head's scores."""
    d, layout = block.dtypes, block.layout
    # torch's CPU kernel takes no dropout, no mask that learns, and values as wide as keys alone.
    wide = k.elements != v.elements
    fallback = d.on_cpu and (layout.attention_dropout > 0 or biased or wide)
    if fallback or not takes_grouped(block):
        k, v = _repeat(tape, block, k), _repeat(tape, block, v)
    if d.autocast:
        q, k, v = (cast(tape, x, d.compute) for x in (q, k, v))
    if fallback:
        return _fallback(tape, block, q, k, v)
    if block.one_by_one:  # documents are views, whose gradients are put side by side again
        q, k, v = (tape.step([x], x.elements, x.width, view=x.storage) for x in (q, k, v))
    saves = [q.storage, k.storage, v.storage, Storage(4 * block.heads * block.tokens)]
    maps = block.heads if biased else int(block.masked and block.attention == "sdpa")
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
    return _side_by_side(tape, block, mixed) if moved else mixed


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


def _repeat(tape: Tape, block: Block, x: Value) -> Value:
    """Grouped keys or values, once for each query head: transformers expands those of a single head, torch's
    sdpa, to which it leaves heads of up to 256 without a mask, copies them."""
    groups = block.heads // block.kv_heads
    left = block.attention == "sdpa" and not block.masked and block.head_dim <= 256
    view = x.storage if block.kv_heads == 1 and not left else None
    return x if groups == 1 else tape.step([x], x.elements * groups, x.width, view=view)


def eager(
    tape: Tape,
    block: Block,
    q: Value,
    k: Value,
    v: Value,
    *,
    capped: bool = False,
    joined: bool = False,
    weigh: Callable[[Tape, Block, Value, Value], Value] | None = None,
) -> Value:
    """Attention of single operations.

    capped: tanh caps the scores; joined: queries and keys were joined from parts, which puts each head's rows
    together; weigh: makes the result of scores and values, by default with a softmax.
    """
    d, n, given = block.dtypes, _scores(block), (q, _repeat(tape, block, k), _repeat(tape, block, v))
    first, second, values = (cast(tape, x, d.compute) if d.autocast else x for x in given)
    # What was repeated has each head's rows together, too.
    joined, repeated = joined or block.layout.rotary_joined, block.heads > block.kv_heads
    first = first if joined else _side_by_side(tape, block, first)
    second = second if joined or repeated else _side_by_side(tape, block, second)
    values = values if repeated else _side_by_side(tape, block, values)
    scores = bmm(tape, block, first, second, n)
    scores = tape.step([scores], n, scores.width)
    if capped:
        scores = cap(tape, scores)
    # The mask has the dtype of the residual stream.
    wide = max(scores.width, d.residual) if block.masked or block.layout.causal else scores.width
    scores = tape.step([scores], n, wide, passes=True)
    mixed = (weigh or _softmax)(tape, block, scores, values)
    for one in (k, v, *given):  # variables of two functions
        tape.reads(one)
    return mixed


def cap(tape: Tape, x: Value) -> Value:
    """`c * tanh(x / c)`."""
    x = tape.step([x], x.elements, x.width)
    x = tape.step([x], x.elements, x.width, save_out=True)
    return tape.step([x], x.elements, x.width)


def _softmax(tape: Tape, block: Block, scores: Value, values: Value) -> Value:
    d, layout = block.dtypes, block.layout
    if layout.float_softmax or block.float_operations:
        scores = cast(tape, scores, 4)
    weights = tape.step([scores], scores.elements, scores.width, save_out=True)
    weights = cast(tape, weights, d.compute)
    weights = dropout(tape, weights, layout.attention_dropout > 0, d.on_cpu)
    return bmm(tape, block, weights, values, values.elements)


def _scores(block: Block) -> int:
    """Numbers of the attention maps."""
    return block.heads * block.tokens * block.length


def _side_by_side(tape: Tape, block: Block, x: Value) -> Value:
    """A copy with each head's rows together, which a product of many heads reads."""
    if block.rows == 1 and x.width == block.dtypes.compute:
        return x
    return tape.step([x], x.elements, x.width, passes=True)


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
    mixed = tape.step([weights, v], v.elements, 4, saves=[weights.storage, v.storage])
    mixed = cast(tape, mixed, width)
    # Heads are laid side by side again, which copies.
    return tape.step([mixed], mixed.elements, width, passes=True)
