"""What one layer of each family keeps for the backward pass.

`layer_cost` records a layer on a `Tape`, of the operations in operations.py. As read in transformers 5.23
(the families' modeling files, integrations/sdpa_attention.py, integrations/moe.py) and torch 2.13 (attention
kernels of CPU and CUDA).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.memory.mixers import MIXERS
from launcher.memory.operations import (
    STORED,
    Block,
    activate,
    add,
    bmm,
    broadcast,
    cast,
    dropout,
    matrices,
    matrix,
    norm,
    normalised,
    product,
    times,
    views,
)
from launcher.memory.tape import Peak, Storage, Tape, Value
from launcher.models.capabilities import is_varlen
from launcher.models.model import FOUR_BITS


def attention(tape: Tape, block: Block, x: Value, *, read: Value | None = None, out: str = "attn") -> Value:
    """Attention of `x` over itself, or over `read`; `out` names what its last product reads."""
    layout = block.layout
    if layout.mixer == "latent":
        return _latent(tape, block, x)
    if layout.mixer != "attention":
        return MIXERS[layout.mixer](tape, block, x)
    queries, keys, values = _project(tape, block, x, read, out)
    gate = None
    if queries.elements > block.tokens * block.heads * block.head_dim:
        queries, gate = views(tape, queries, *[queries.elements // 2] * 2)
        gate = tape.step([gate], gate.elements, gate.width)
    if layout.shared_keys:
        queries = rotate(tape, block, norm(tape, block, queries, block.head_dim))
        return _attended(tape, block, x, (queries, keys, values), out)
    if layout.qk_norm:
        queries, keys = norm(tape, block, queries, block.head_dim), norm(tape, block, keys, block.head_dim)
    elif layout.qk_norm_joint:
        widths = block.heads * block.head_dim, block.kv_heads * block.head_dim
        queries, keys = norm(tape, block, queries, widths[0]), norm(tape, block, keys, widths[1])
    if not layout.positions and not layout.position_bias and read is None and layout.rotary_share:
        queries, keys = rotate(tape, block, queries), rotate(tape, block, keys)
    if layout.qk_norm_plain:
        queries, keys = (plain_norm(tape, x, block.head_dim) for x in (queries, keys))
    if layout.scaled_queries:
        queries = tape.step([queries], queries.elements, queries.width)
    if layout.value_norm:
        values = plain_norm(tape, values, block.head_dim)
    return _attended(tape, block, x, (queries, keys, values), out, gate)


def _attended(
    tape: Tape, block: Block, x: Value, parts: tuple[Value, Value, Value], out: str, gate: Value | None = None
) -> Value:
    """Attention over queries, keys and values, after its last product; `x` is its input."""
    mixed = _mix(tape, block, *parts)
    if gate is not None:
        mixed = times(tape, mixed, tape.step([gate], gate.elements, gate.width, save_out=True))
    last = next(linear for linear in block.layout.linears if linear.reads == out)
    made = product(tape, block, mixed, last)
    tape.reads(x)
    return made


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
    if block.layout.shared_keys:  # those of an earlier layer, which keeps them
        elements, width = block.tokens * block.kv_heads * block.head_dim, block.dtypes.residual
        keys, values = (tape.source(elements, width, grad=block.grad, counted=False) for _ in range(2))
        return product(tape, block, x, first[0]), keys, values
    if not block.layout.fused_qkv:  # one product makes keys and values
        queries, keys = (product(tape, block, x, one) for one in first)
        return queries, keys, keys
    return _split(tape, block, product(tape, block, x, first[0]))


def _split(tape: Tape, block: Block, fused: Value) -> tuple[Value, Value, Value]:
    """Views of one product; the families that slice it write each gradient into zeros of the whole."""
    share = block.head_dim * block.tokens
    sizes = (block.heads * share, block.kv_heads * share, block.kv_heads * share)
    if block.layout.qkv_sliced:
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
    if block.layout.rotary_kind == "halves":
        return _rotate_halves(tape, x, max(x.width, d.residual))
    if block.layout.rotary_kind == "complex":
        return cast(tape, tape.step([cast(tape, x, 4)], x.elements, 4), x.width)
    whole = x
    if block.layout.rotary_joined:
        turned = int(x.elements * block.layout.rotary_share)
        x = tape.step([whole], turned, whole.width, view=whole.storage)
        rest = tape.step([whole], whole.elements - turned, whole.width, view=whole.storage)
    given, n = x.width, x.elements
    straight = x
    if block.layout.rotary_kind == "float":
        straight, x = cast(tape, x, 4), cast(tape, x, 4)
    width = max(x.width, d.residual)
    straight = tape.step([straight], n, width)
    low = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([x], n // 2, x.width, view=x.storage)
    high = tape.step([high], n // 2, x.width)
    half = tape.step([low, high], n, x.width, passes=True)
    rotated = add(tape, straight, tape.step([half], n, width))
    if block.layout.narrow_rotation or block.layout.rotary_kind == "float":
        rotated = cast(tape, rotated, given)
    if rest is None:
        return rotated
    return tape.step([rotated, rest], whole.elements, width, passes=True)


def plain_norm(tape: Tape, x: Value, width: int) -> Value:
    """An RMSNorm without a weight."""
    wide = cast(tape, x, 4)
    return cast(tape, normalised(tape, wide, wide, width), x.width)


def _rotate_halves(tape: Tape, x: Value, width: int) -> Value:
    """gpt-oss: `(a * cos - b * sin, b * cos + a * sin)` of the halves a and b of each head."""
    n = x.elements // 2
    first, second = views(tape, x, n, n)
    parts = [tape.step([one], n, width) for one in (first, second, second, first)]
    parts[1] = tape.step([parts[1]], n, width, view=parts[1].storage)  # the gradient of what is subtracted
    low, high = add(tape, *parts[:2]), add(tape, *parts[2:])
    return tape.step([low, high], x.elements, width, passes=True)


def _latent(tape: Tape, block: Block, x: Value) -> Value:
    """DeepSeek's attention: keys and values are made of a latent, queries perhaps of another one."""
    plain, rotated, values = block.layout.mixer_sizes
    linears = {one.name: one for one in block.layout.linears}
    n, heads = block.tokens, block.heads * block.tokens
    if "q_proj" in linears:
        q = product(tape, block, x, linears["q_proj"])
    else:
        low = linears["q_a_proj"]
        q = norm(tape, block, product(tape, block, x, low), low.out_features)
        q = product(tape, block, q, linears["q_b_proj"])
    passed, turned = views(tape, q, heads * plain, heads * rotated)
    up = linears["kv_b_proj"]
    both = product(tape, block, x, linears["kv_a_proj_with_mqa"])
    latent, position = views(tape, both, n * up.in_features, n * rotated)
    latent = norm(tape, block, latent, up.in_features)
    turned, position = _rotate_pairs(tape, block, turned), _rotate_pairs(tape, block, position)
    q = tape.step([passed, turned], q.elements, max(passed.width, turned.width), passes=True)
    keys, v = views(tape, product(tape, block, latent, up), heads * plain, heads * values)
    # Both parts are written into one tensor, whose gradient is copied for each.
    k = tape.step([keys], q.elements, keys.width, temporary=keys.width * q.elements)
    spread = k.width * heads * rotated
    k = tape.step([k, position], k.elements, k.width, view=k.storage, temporary=spread)
    made = product(tape, block, _mix(tape, block, q, k, v), linears["o_proj"])
    tape.reads(x)
    return made


def _rotate_pairs(tape: Tape, block: Block, x: Value) -> Value:
    """`(a * cos - b * sin, b * cos + a * sin)`, where a and b are every second value."""
    n, width = x.elements // 2, max(x.width, block.dtypes.residual)
    first, second = (tape.step([x], n, x.width, view=x.storage) for _ in range(2))
    pairs = (first, second), (second, first)
    low, high = (add(tape, *(tape.step([one], n, width) for one in pair)) for pair in pairs)
    return tape.step([low, high], x.elements, width, passes=True)


def _repeat(tape: Tape, block: Block, x: Value) -> Value:
    """Grouped keys or values, once for each query head: transformers expands those of a single head, torch's
    sdpa, to which it leaves heads of up to 256 without a mask, copies them."""
    groups = block.heads // block.kv_heads
    left = block.attention == "sdpa" and not block.masked and block.head_dim <= 256
    view = x.storage if block.kv_heads == 1 and not left else None
    return x if groups == 1 else tape.step([x], x.elements * groups, x.width, view=view)


def _mix(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    """What attention makes of queries, keys and values, laid out as the last product reads it."""
    d, layout = block.dtypes, block.layout
    if block.attention == "eager":
        given = q, _repeat(tape, block, k), _repeat(tape, block, v)
        mixed = _eager(tape, block, *given)
        for one in (k, v, *given):  # variables of two functions
            tape.reads(one)
        return mixed
    # torch's CPU kernel takes no dropout, no mask that learns, and values as wide as keys alone.
    wide = k.elements != v.elements
    fallback = d.on_cpu and (layout.attention_dropout > 0 or layout.position_bias or wide)
    if fallback or not takes_grouped(block):
        k, v = _repeat(tape, block, k), _repeat(tape, block, v)
    if d.autocast:
        q, k, v = (cast(tape, x, d.compute) for x in (q, k, v))
    if fallback:
        return _fallback(tape, block, q, k, v)
    if block.one_by_one:  # documents are views, whose gradients are put side by side again
        q, k, v = (tape.step([x], x.elements, x.width, view=x.storage) for x in (q, k, v))
    saves = [q.storage, k.storage, v.storage, Storage(4 * block.heads * block.tokens)]
    maps = block.heads if layout.position_bias else int(block.masked and block.attention == "sdpa")
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


def _scores(block: Block) -> int:
    """Numbers of the attention maps."""
    return block.heads * block.tokens * block.length


def _side_by_side(tape: Tape, block: Block, x: Value) -> Value:
    """A copy with each head's rows together, which a product of many heads reads."""
    if block.rows == 1 and x.width == block.dtypes.compute:
        return x
    return tape.step([x], x.elements, x.width, passes=True)


def _eager(tape: Tape, block: Block, q: Value, k: Value, v: Value) -> Value:
    d, layout, n = block.dtypes, block.layout, _scores(block)
    q, k, v = (cast(tape, x, d.compute) if d.autocast else x for x in (q, k, v))
    # What was repeated, or joined from parts, has each head's rows together.
    joined, repeated = layout.rotary_joined or layout.rotary_kind == "halves", block.heads > block.kv_heads
    q = q if joined else _side_by_side(tape, block, q)
    k = k if joined or repeated else _side_by_side(tape, block, k)
    v = v if repeated else _side_by_side(tape, block, v)
    scores = bmm(tape, block, q, k, n)
    scores = tape.step([scores], n, scores.width)
    if layout.score_cap:
        scores = tape.step([scores], n, scores.width)
        scores = tape.step([scores], n, scores.width, save_out=True)
        scores = tape.step([scores], n, scores.width)
    # The mask has the dtype of the residual stream.
    wide = max(scores.width, d.residual) if block.masked or layout.causal else scores.width
    scores = tape.step([scores], n, wide, passes=True)
    if layout.sinks:
        return _with_sinks(tape, block, scores, v, q.elements)
    if layout.float_softmax or block.float_operations:
        scores = cast(tape, scores, 4)
    weights = tape.step([scores], n, scores.width, save_out=True)
    weights = cast(tape, weights, d.compute)
    weights = dropout(tape, weights, layout.attention_dropout > 0, d.on_cpu)
    return bmm(tape, block, weights, v, v.elements)


def _with_sinks(tape: Tape, block: Block, scores: Value, values: Value, elements: int) -> Value:
    """gpt-oss: a softmax of the scores beside a learned one for each head, which is cut off again.

    Its function has the scores, and those beside it, as variables until they are set anew or it returns.
    """
    rows, params = block.heads * block.tokens, block.heads if block.full else 0
    n, width = scores.elements + rows, max(scores.width, block.dtypes.weight)
    weight = block.dtypes.weight
    joined = tape.step([scores], n, width, passes=True, params=params, fresh=weight * params)
    largest = tape.step([joined], rows, width, saves=[Storage(8 * rows)])
    spread = tape.step([largest], n, width, view=largest.storage, temporary=n * width)
    moved = tape.step([joined, spread], n, width, passes=True)
    shares = tape.step([moved], n, width, save_out=True)
    weights = tape.step([shares], scores.elements, width, view=shares.storage)
    weights = cast(tape, weights, block.dtypes.compute)
    tape.reads(scores)
    mixed = bmm(tape, block, weights, values, elements)
    mixed = tape.step([mixed], elements, mixed.width, passes=True)
    tape.reads(moved)
    return mixed


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


def feed_forward(tape: Tape, block: Block, x: Value) -> Value:
    layout = block.layout
    if layout.router == "all":
        return _all_experts(tape, block, x)
    if layout.experts and layout.router != "normed":
        return _with_shared_block(tape, block, x)
    first = [linear for linear in layout.linears if linear.reads == "norm2"]
    last = next(linear for linear in layout.linears if linear.reads == "act" and "{}" in linear.path)
    if len(first) == 2 and block.liger:
        inner = _fused_gate(tape, *(product(tape, block, x, one) for one in first))
    elif len(first) == 2:
        gate = activate(tape, block, product(tape, block, x, first[0]))
        inner = times(tape, gate, product(tape, block, x, first[1]))
    elif layout.gated:  # both in one product, taken apart by a view
        inner = _gated(tape, block, product(tape, block, x, first[0]))
    else:
        inner = activate(tape, block, product(tape, block, x, first[0]))
    inner = dropout(tape, inner, layout.inner_dropout > 0, block.dtypes.on_cpu)
    made = product(tape, block, inner, last)
    tape.reads(x)
    return made


def _with_shared_block(tape: Tape, block: Block, x: Value) -> Value:
    """Experts and the block beside them: Qwen's, which has a gate, is computed before them, others after."""
    gate = next((one for one in block.layout.linears if one.reads == "shared_gate"), None)
    if gate is None:
        routed, shared = _experts(tape, block, x), _shared_block(tape, block, x)
        return routed if shared is None else add(tape, routed, shared)
    shared, routed = _shared_block(tape, block, x), _experts(tape, block, x)
    assert shared is not None
    share = product(tape, block, x, gate)
    share = tape.step([share], share.elements, share.width, save_out=True)
    return add(tape, routed, broadcast(tape, shared, share))


def _shared_block(tape: Tape, block: Block, x: Value) -> Value | None:
    """What all tokens pass through beside their experts."""
    linears = block.layout.linears
    first = [one for one in linears if one.reads == "shared"]
    if not first:
        return None
    both = [product(tape, block, x, one) for one in first]
    inner = times(tape, activate(tape, block, both[0]), both[1]) if both[1:] else _gated(tape, block, both[0])
    return product(tape, block, inner, next(one for one in linears if one.reads == "shared_act"))


def _fused_gate(tape: Tape, gate: Value, up: Value) -> Value:
    """Liger's kernel keeps both inputs and writes their gradients over them."""
    saves = [gate.storage, up.storage]
    return tape.step([gate, up], gate.elements, gate.width, saves=saves, temporary=-gate.size - up.size)


def _gated(tape: Tape, block: Block, both: Value) -> Value:
    gate, up = views(tape, both, *[both.elements // 2] * 2)
    return times(tape, activate(tape, block, gate), up)


def _experts(tape: Tape, block: Block, x: Value, weight: Value | None = None) -> Value:
    """The way `grouped_mm`, transformers' default: chosen rows sorted by expert, two fused products.

    `weight`: of each chosen expert, where the router reads something else than the experts.
    """
    layout = block.layout
    count, hidden = layout.num_experts, block.hidden
    width = layout.experts // (3 * count * hidden)
    chosen = block.tokens * (layout.active_inner // width)
    weight = weight or _route(tape, block, x, count, chosen)
    # Sorting keeps two numbers of 8 bytes for each chosen row.
    rows = tape.step([x], chosen * hidden, x.width, saves=[Storage(16 * chosen)])
    # peft gives the two matrices that are stored as one twice the rank.
    reached = int(layout.expert_adapters)
    ids = Storage(8 * chosen)
    adapter = 2 * reached * block.rank * count * (2 * width + hidden)
    both = _grouped(
        tape, block, cast(tape, rows, _expert_width(block)), 2 * width * chosen, layout.experts * 2 // 3,
        adapter,
    )  # fmt: skip
    adapter = reached * block.rank * count * (width + hidden)
    if layout.expert_bias:
        inner = _clamped(tape, _biased(tape, block, both, ids))
    else:
        inner = _gated(tape, block, both)
    out = _grouped(tape, block, inner, hidden * chosen, layout.experts // 3, adapter)
    out = _biased(tape, block, out, ids) if layout.expert_bias else out
    saves = [weight.storage] if weight.node is None else [weight.storage, out.storage]
    scaled_width = max(out.width, weight.width)
    temporary = scaled_width * out.elements if weight.node is not None else 0
    scaled = tape.step([out, weight], out.elements, scaled_width, saves=saves, temporary=temporary)
    back = tape.step([scaled], out.elements, scaled_width, saves=[Storage(8 * chosen)])
    wide = cast(tape, back, 4) if block.float_operations else back
    # The gradient of a sum is the same for all its rows, and is laid out when it is narrowed.
    total = tape.step([wide], x.elements, wide.width, passes=wide is not back)
    for one in (rows, out, back):  # variables of the function
        tape.reads(one)
    return cast(tape, total, x.width)


def _all_experts(tape: Tape, block: Block, x: Value) -> Value:
    """Llama 4: every expert multiplies every token, which its share has scaled; a shared block is added."""
    layout, tokens = block.layout, block.tokens
    count, entries = layout.num_experts, layout.experts
    inner = layout.active_inner // count
    n, index = count * tokens, Storage(8 * tokens)
    router = next(one for one in layout.linears if one.reads == "router")
    scores = product(tape, block, x, router)
    top = tape.step([scores], tokens, scores.width, saves=[index])
    spread = cast(tape, tape.step([top], n, top.width, saves=[index]), 4)
    shares = cast(tape, tape.step([spread], n, 4, save_out=True), scores.width)
    shares = tape.step([shares], n, shares.width)
    rows = broadcast(tape, tape.step([x], n * block.hidden, x.width), shares)
    both = _batched(tape, block, rows, 2 * n * inner, entries * 2 // 3)
    gate, up = views(tape, both, n * inner, n * inner)
    made = times(tape, up, activate(tape, block, gate))
    made = _batched(tape, block, made, n * block.hidden, entries // 3)
    shared = _shared_block(tape, block, x)
    total = tape.step([made], x.elements, 4 if block.float_operations else made.width)
    assert shared is not None
    out = tape.step([shared, total], x.elements, shared.width, view=shared.storage, passes=True)
    for one in (rows, made):  # variables of the function
        tape.reads(one)
    return out


def _batched(tape: Tape, block: Block, x: Value, elements: int, entries: int) -> Value:
    """The products of all experts, each with as many rows."""
    if block.quantization in FOUR_BITS:
        return _grouped(tape, block, cast(tape, x, _expert_width(block)), elements, entries, 0)
    return matrices(tape, block, x, elements, entries, params=entries if block.full else 0)


def _biased(tape: Tape, block: Block, x: Value, ids: Storage) -> Value:
    """Rows with the bias of the expert of each added in place; `ids`: of the experts."""
    chosen = ids.size // 8
    params = block.layout.num_experts * (x.elements // chosen) if block.full else 0
    bias = tape.step([], x.elements, x.width, saves=[ids], params=params, fresh=x.width * params)
    return tape.step([x, bias], x.elements, x.width, view=x.storage, passes=True)


def _clamped(tape: Tape, both: Value) -> Value:
    """gpt-oss: every second value is a gate; `(up + 1) * gate * sigmoid(a * gate)` of clamped values."""
    n, width = both.elements // 2, both.width
    gate, up = (tape.step([both], n, width, view=both.storage) for _ in range(2))
    gate, up = (tape.step([x], n, width, saves=[both.storage], temporary=2 * n) for x in (gate, up))
    opened = tape.step([tape.step([gate], n, width)], n, width, save_out=True)
    return times(tape, tape.step([up], n, width, passes=True), times(tape, gate, opened))


def _expert_width(block: Block) -> int:
    """Of an expert's value as it is multiplied."""
    return block.dtypes.compute if block.quantization in FOUR_BITS else block.dtypes.weight


def _grouped(tape: Tape, block: Block, x: Value, elements: int, entries: int, adapter: int) -> Value:
    """Each expert's product with its rows; `adapter`: parameters of what `all-linear` adds to the weights.

    peft adds an adapter's product to a copy of all experts' weights, through which gradients pass. Packed
    weights are unpacked for each pass, and kept for the input's gradient.
    """
    width = _expert_width(block)
    stored = block.dtypes.adapter
    if stored is None:
        fresh = width * entries
        return tape.step([x], elements, width, saves=[x.storage], params=entries, fresh=fresh)
    if block.adapted is not None or not adapter:
        unpacked = [Storage(width * entries, weight=True)] if block.quantization in FOUR_BITS else []
        return tape.step([x], elements, width, saves=unpacked)
    copy = Storage(width * entries, weight=True)
    # Each of the adapter's matrices is kept for the other's gradient, in the dtype of the experts.
    factors = [Storage(width * adapter, weight=True)] if width != stored else []
    folded = tape.step([], entries, width, view=copy, saves=factors, params=adapter, fresh=stored * adapter)
    return tape.step([x, folded], elements, width, saves=[x.storage, copy])


def _route(tape: Tape, block: Block, x: Value, count: int, chosen: int) -> Value:
    """The router: a small product, a softmax in float32, and the weights of the chosen experts."""
    entries = count * block.hidden
    reached = block.adapted is None and block.layout.expert_adapters
    adapter = block.rank * (count + block.hidden) if reached else 0
    if block.layout.router == "sigmoid":
        return _sigmoid_route(tape, block, x, chosen, entries if block.full else adapter)
    if block.layout.router == "chosen":
        # gpt-oss: a softmax of the scores of the chosen experts alone.
        scores = matrix(tape, block, x, count, entries, params=entries + count if block.full else 0)
        top = tape.step([scores], chosen, scores.width, saves=[Storage(8 * chosen)])
        return tape.step([top], chosen, top.width, save_out=True)
    scores = matrix(tape, block, x, count, entries, params=entries if block.full else adapter)
    narrow = scores.width
    scores = cast(tape, scores, 4)
    shares = tape.step([scores], scores.elements, 4, save_out=True)
    top = tape.step([shares], chosen, 4, saves=[Storage(8 * chosen)])
    total = tape.step([top], block.tokens, 4)
    scaled = tape.step([top, total], chosen, 4, saves=[top.storage, total.storage])
    return scaled if block.model_type == "mixtral" else cast(tape, scaled, narrow)


def _normed_route(tape: Tape, block: Block, x: Value) -> Value:
    """Gemma 4's router: a norm without a weight, factors of its input and of the experts."""
    layout, full = block.layout, block.full
    count = layout.num_experts
    chosen = block.tokens * (layout.active_inner * 3 * count * block.hidden // layout.experts)
    normed, weight = plain_norm(tape, x, block.hidden), block.dtypes.weight
    params = block.hidden if full else 0
    scaled = tape.step(
        [normed], x.elements, max(normed.width, weight), saves=[normed.storage] if full else [],
        temporary=normed.size if full else 0, params=params, fresh=weight * params,
    )  # fmt: skip
    scaled = tape.step([scaled], scaled.elements, scaled.width)
    scores = product(tape, block, scaled, next(one for one in layout.linears if one.reads == "router"))
    scores = cast(tape, scores, 4)
    shares = tape.step([scores], scores.elements, 4, save_out=True)
    top = tape.step([shares], chosen, 4, saves=[Storage(8 * chosen)])
    total = tape.step([top], block.tokens, 4)
    share = tape.step([top, total], chosen, 4, saves=[top.storage, total.storage])
    params = count if full else 0
    factors = tape.step([], chosen, weight, saves=[Storage(8 * chosen)], params=params, fresh=weight * params)
    return times(tape, share, factors)


def _sigmoid_route(tape: Tape, block: Block, x: Value, chosen: int, params: int) -> Value:
    """DeepSeek's router: a product in float32, and a sigmoid of each expert's score."""
    count, d = block.layout.num_experts, block.dtypes
    weights = count * block.hidden
    wide = cast(tape, x, 4)
    if not d.autocast:
        saves = [wide.storage] if params else []
        if wide.node is not None and d.weight < 4:
            saves.append(Storage(4 * weights, weight=True))
        scores = tape.step([wide], block.tokens * count, 4, saves=saves, params=params, fresh=4 * params)
    else:
        scores = matrix(tape, block, wide, count, weights, params=params)
    shares = tape.step([scores], scores.elements, scores.width, save_out=True)
    top = tape.step([shares], chosen, shares.width, saves=[Storage(8 * chosen)])
    total = tape.step([top], block.tokens, top.width)
    shares = tape.step([top, total], chosen, top.width, saves=[top.storage, total.storage])
    return tape.step([shares], chosen, shares.width)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes of one layer."""

    saved: int
    """Kept for the backward pass, its input included where it is read."""
    weights: int
    """Copies of weights that autocast made, kept like activations."""
    held: int
    """Kept under checkpointing as well: what the context of a function holds."""
    params: int
    """Parameters that are trained, as counted by the products."""
    peak: Peak
    """The worst moment of the layer's backward pass; nothing outside the layer is counted."""
    first_pass: Peak
    """The worst moment of its forward pass; empty under checkpointing, where recomputation needs more."""


def _add_residual(tape: Tape, block: Block, x: Value, made: Value) -> Value:
    made = dropout(tape, made, block.layout.dropout > 0, block.dtypes.on_cpu)
    if block.layout.scaled_stream:
        made = tape.step([made], made.elements, made.width)
    return add(tape, made, x)


def _pre_norm(tape: Tape, block: Block, x: Value, encoder: Value | None) -> Value:
    """Llama and most others; some norm the outputs as well or instead, T5's decoder attends twice."""
    h, inner, outer = block.hidden, block.layout.input_norms, block.layout.output_norms
    own = _own_input(tape, block) if block.inputs_width else None
    made = attention(tape, block, norm(tape, block, x, h) if inner and block.layout.attention_norm else x)
    made = dropout(tape, made, block.layout.attended_dropout > 0, block.dtypes.on_cpu)
    x, attended = _add_residual(tape, block, x, norm(tape, block, made, h) if outer else made), made
    if encoder is not None:
        made = attention(tape, block, norm(tape, block, x, h), read=encoder, out="attn_cross")
        x = _add_residual(tape, block, x, made)
    made = feed_forward(tape, block, norm(tape, block, x, h) if inner else x)
    if block.layout.router == "normed":  # experts beside the feed-forward block
        made, weight = norm(tape, block, made, h), _normed_route(tape, block, x)
        made = add(tape, made, norm(tape, block, _experts(tape, block, norm(tape, block, x, h), weight), h))
    x = _add_residual(tape, block, x, norm(tape, block, made, h) if outer else made)
    if block.layout.attended_variable:
        tape.reads(attended)
    if own is not None:
        x = _gated_input(tape, block, x, own)
    if block.layout.layer_factor:
        return tape.step([x], x.elements, x.width, saves=[STORED], view=x.storage)
    return x


def _own_input(tape: Tape, block: Block) -> Value:
    """A slice of the layers' own inputs, whose gradient is written into zeros of those of all layers."""
    width = next(one.in_features for one in block.layout.linears if one.reads == "gated")
    every = tape.source(
        block.tokens * block.inputs_width, block.dtypes.residual, grad=block.inputs_grad, counted=False
    )
    return tape.step([every], block.tokens * width, every.width, view=every.storage)


def _gated_input(tape: Tape, block: Block, x: Value, own: Value) -> Value:
    """Gemma 4: the layer's own input, gated by the stream, is added to it."""
    gate, back = (
        next(one for one in block.layout.linears if one.reads == reads) for reads in ("stream", "gated")
    )
    gated = times(tape, activate(tape, block, product(tape, block, x, gate)), own)
    return add(tape, norm(tape, block, product(tape, block, gated, back), block.hidden), x)


def _post_norm(tape: Tape, block: Block, x: Value) -> Value:
    """BERT: each sum is normed."""
    x = norm(tape, block, _add_residual(tape, block, x, attention(tape, block, x)), block.hidden)
    return norm(tape, block, _add_residual(tape, block, x, feed_forward(tape, block, x)), block.hidden)


def _parallel(tape: Tape, block: Block, x: Value) -> Value:
    """GPT-NeoX: both halves read the layer's input."""
    p, on_cpu = block.layout.dropout > 0, block.dtypes.on_cpu
    first = dropout(tape, attention(tape, block, norm(tape, block, x, block.hidden)), p, on_cpu)
    second = dropout(tape, feed_forward(tape, block, norm(tape, block, x, block.hidden)), p, on_cpu)
    return add(tape, add(tape, second, first), x)


def record(block: Block, *, counted: bool, learns: bool = True) -> tuple[Tape, Value]:
    """The layer's tape and its output; not `counted`: something else keeps its input. learns: see `Tape`."""
    tape = Tape(block.dtypes.on_cpu, learns)
    size = block.tokens * block.hidden
    x = tape.source(size, block.dtypes.residual, grad=block.grad, counted=counted)
    if block.layout.post_norm:
        out = _post_norm(tape, block, x)
    elif block.layout.parallel:
        out = _parallel(tape, block, x)
    else:
        encoder = None
        if block.layout.crossed:
            encoder = tape.source(size, block.dtypes.residual, counted=False)
        out = _pre_norm(tape, block, x, encoder)
    tape.reads(x)  # an argument of the layer
    return tape, out


@functools.lru_cache(maxsize=4096)
def layer_cost(block: Block, gradient_width: float, *, accumulated: bool, checkpointed: bool) -> LayerCost:
    """What `block` keeps, and the worst moment of its backward pass.

    `checkpointed`: a checkpoint keeps the layer's input, which is not counted here.
    """
    tape, out = record(block, counted=not checkpointed)
    return tape_cost(tape, out, gradient_width, accumulated=accumulated, checkpointed=checkpointed)


def tape_cost(
    tape: Tape, out: Value, gradient_width: float, *, accumulated: bool, checkpointed: bool
) -> LayerCost:
    """What a tape keeps, and the worst moment of its backward pass; the tape is used up."""
    saved, weights = tape.saved()
    held = sum({id(kept): kept.size for kept in tape.held}.values())
    params = sum(node.params for node in tape.nodes)
    first_pass = Peak() if checkpointed else tape.first_pass()
    peak = tape.backward(out, gradient_width, accumulated=accumulated, recompute=checkpointed)
    return LayerCost(saved, weights, held, params, peak, first_pass)
