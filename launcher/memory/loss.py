"""The last norm, the head and the loss as autograd keeps them; evaluation. Pure arithmetic.

As read in transformers 5.23 (loss/loss_utils.py, trainer.py, distributed/tensor_parallel.py), DeepSpeed
0.19.8 (module_inject/layers.py, sequence/cross_entropy.py), trl 1.16 and liger-kernel 0.8
(ops/fused_linear_cross_entropy.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.models.capabilities import chunk_rows
from launcher.models.layers.layout import Block, LayerTape
from launcher.models.layers.linears import Linear
from launcher.models.layers.tape import Peak, Storage, Value
from launcher.models.model import Head
from launcher.tasks import task_named

TILE_TOKENS, TILE_WORDS = 4096, 32768
"""trl 1.16's tiles of logits; each is allocated at its full width, whatever the vocabulary."""
CPU_TILE_COPIES = 7
"""Live float32 copies of a tile in trl's formula without Triton."""


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Bytes of what follows the last layer."""

    forward: int
    """Logits and their copies when the loss is there, or while they are gathered if that takes more."""
    backward: int
    """Logarithms of shares and two gradients of their size: the most that the loss itself takes later."""
    saved: int
    """Kept for the backward pass, the logits left out."""
    weights: int
    """Copies of weights that autocast made."""
    params: int
    peak: Peak
    """The worst moment of the backward pass through loss, head and norm."""


@functools.lru_cache(maxsize=1024)
def head_cost(block: Block, head: Head, task: str, gradient_width: float, accumulated: bool) -> HeadCost:
    """What the end of the model takes; `block` is a layer of its last stack."""
    tape = LayerTape(block, on_cpu=False)
    x = tape.source(block.tokens * block.hidden, block.dtypes.residual)
    x = block.layout.last(tape, x)
    of = task_named(task)
    if not head.dense:
        x = tape.dropout(x, head.dropout > 0)
    if of.head == "none":
        return _compared(tape, x, gradient_width, accumulated)
    if of.tiled_logits:
        return _tiled(tape, x, head)
    if block.liger and head.per_token and of.causal_loss:
        return _fused(tape, x, head, gradient_width, accumulated)
    if not head.per_token:
        # The first token alone is read; its gradient is written into zeros.
        x = tape.step([x], x.elements, x.width) if head.mean else x
        x = tape.step([x], block.rows * block.hidden, x.width, view=x.storage)
    if head.dense:
        x = tape.activate(tape.product(x, head.dense))
        x = block.layout.norm(tape, x, block.hidden)
        x = tape.dropout(x, head.dropout > 0)
    if block.chunked and head.per_token and of.causal_loss:
        return _by_chunks(tape, x, head, gradient_width, accumulated)
    before, _ = tape.saved()
    logits = _logits(tape, x, head)
    if head.apart:
        loss, forward, backward = _loss_apart(tape, logits)
    else:
        casts = of.casts_logits or block.dtypes.autocast
        loss, forward, backward = _loss(tape, logits, head, casts=casts)
    _, weights = tape.saved()
    params = sum(node.params for node in tape.nodes)
    peak = tape.backward(loss, gradient_width, accumulated=accumulated)
    return HeadCost(forward, backward, before, weights, params, peak)


def _compared(tape: LayerTape, x: Value, gradient_width: float, accumulated: bool) -> HeadCost:
    """Hidden states to embeddings, as sentence-transformers 6.2 pools: `mean` over all tokens, or the last
    token of a causal model, whose mask is as large as the states.

    contrast.py has what compares embeddings.
    """
    block = tape.block
    last = block.layout.causal
    mask = Storage(x.size if last else block.tokens * x.width)
    masked = tape.step([x], x.elements, x.width, saves=[mask])
    pooled = tape.step([masked], block.rows * block.hidden, 4, passes=not last)
    loss = tape.step([pooled], 1, 4)
    saved, weights = tape.saved()
    params = sum(node.params for node in tape.nodes)
    peak = tape.backward(loss, gradient_width, accumulated=accumulated)
    # Hidden states, and their product with the mask, which a sum of 16-bit values copies.
    forward = x.size + masked.size + (4 * x.elements if x.width < 4 else 0)
    return HeadCost(forward, 0, saved, weights, params, peak)


def _loss(tape: LayerTape, logits: Value, head: Head, *, casts: bool) -> tuple[Value, int, int]:
    """The loss, and the bytes that it takes forward and backward.

    `casts`: T5 leaves its logits as they are, others cast them up; autocast does so for all.
    """
    gathering = _gathering(logits.elements // (head.gathered or head.out_features), head, logits.width)
    forward = logits.size
    if casts:
        wide = tape.cast(logits, 4)
        forward += wide.size if wide is not logits else 0
        logits = wide
    log_shares = tape.step([logits], logits.elements, logits.width, save_out=True)
    forward += log_shares.size
    loss = tape.step([log_shares], 1, 4, saves=[log_shares.storage])
    return loss, max(gathering, forward), 3 * log_shares.size


def _gathering(rows: int, head: Head, width: int) -> int:
    """Bytes while a rank gathers its logits: the parts as they arrive, then side by side, and its own."""
    return rows * width * (head.out_features + 2 * head.gathered) if head.gathered else 0


def _loss_apart(tape: LayerTape, logits: Value) -> tuple[Value, int, int]:
    """DeepSpeed's loss of a rank's own logits; as `_loss`. Exponentials alone are kept for the way back."""
    block = tape.block
    words = logits.elements // block.tokens
    # Without the last token of each row, which has no next one.
    shifted = tape.step([logits], block.rows * (block.length - 1) * words, logits.width)
    exponentials = Storage(4 * shifted.elements)
    loss = tape.step([shifted], 1, 4, saves=[exponentials])
    cast_back = shifted.size if shifted.width < 4 else 0
    return loss, _apart(block.rows, block.length, words, logits.width), 2 * exponentials.size + cast_back


def _apart(rows: int, length: int, words: int, width: int) -> int:
    """Bytes when `_loss_apart` is there: logits, and of the shifted ones a copy, if they are of several rows,
    a float32 one, differences to the largest, and exponentials."""
    copies = (width if rows > 1 else 0) + (4 if width < 4 else 0) + 8
    return words * (rows * length * width + rows * (length - 1) * copies)


def _logits(tape: LayerTape, x: Value, head: Head) -> Value:
    block = tape.block
    entries = head.in_features * head.out_features
    trained = block.full or head.saved or head.name in block.whole
    x = block.layout.narrowed(tape, x)
    bias = head.out_features if head.bias else 0
    if not trained and block.dtypes.adapter is not None and head.name in (block.adapted or ()):
        one = Linear(head.name, head.in_features, head.out_features, 1, head.name, head.bias)
        logits = tape.adapted(x, one, block.dtypes.adapter, packed=False)  # a head is never quantised
    else:
        params = entries + bias if trained else 0
        logits = tape.matrix(x, head.out_features, entries, params=params)
    if head.gathered:
        rows = logits.elements // head.out_features
        logits = tape.step([logits], rows * head.gathered, logits.width)
    return block.layout.logits(tape, logits)


def _tiled(tape: LayerTape, x: Value, head: Head) -> HeadCost:
    """trl's log-probabilities of preference pairs, tile by tile.

    One tile of logits, the float32 copies that the formula without Triton makes of it, and float32 gradients
    of what it read and of the head.
    """
    block = tape.block
    saved, weights = tape.saved()
    trained = head.in_features * head.out_features if block.full else 0
    logits = _tile(block, head) + 4 * block.tokens * block.hidden + 4 * trained
    peak = Peak(saved + logits, saved)
    return HeadCost(logits, logits, saved, weights, trained, peak)


def _tile(block: Block, head: Head) -> int:
    """Bytes of a tile of logits, and of the copies that the formula without Triton makes of it."""
    d = block.dtypes
    copies = 4 * CPU_TILE_COPIES * min(head.out_features, TILE_WORDS) if d.on_cpu else 0
    return min(block.tokens, TILE_TOKENS) * (d.compute * TILE_WORDS + copies)


def _fused(tape: LayerTape, x: Value, head: Head, gradient_width: float, accumulated: bool) -> HeadCost:
    """Liger's head and loss in one: logits by chunks of tokens, in place of which come their gradients.

    Gradients of hidden states and head are made in the forward pass, and handed on by the backward pass.
    """
    block = tape.block
    d, tokens, words = block.dtypes, block.tokens, head.out_features
    chunks = -(-words // head.in_features)
    rows = min(tokens, 1 << (-(-tokens // chunks) - 1).bit_length())
    entries = head.in_features * words
    trained = entries if block.full or head.saved else 0
    made = Storage(x.size + d.weight * trained)
    loss = tape.step(
        [x], 1, x.width, saves=[made], temporary=-made.size, params=trained, fresh=d.weight * trained
    )
    saved, _ = tape.saved()
    logits, copies = rows * words * d.compute, 0
    if d.autocast and d.weight != d.compute:
        # Logits and the gradient of the states have a product each, whose operands autocast copies. It keeps
        # the second one's copy of a trained matrix; the first one reads a view, which it copies every time.
        copies = d.compute * entries * (2 if trained and rows < tokens else 1)
        logits += rows * head.in_features * d.compute
    peak = tape.backward(loss, gradient_width, accumulated=accumulated)
    # The states are a variable of the model's function.
    return HeadCost(x.size + logits, 0, saved, copies, trained, peak)


def _by_chunks(tape: LayerTape, x: Value, head: Head, gradient_width: float, accumulated: bool) -> HeadCost:
    """Our own loss (train/model/loss.py): gradients of hidden states and head are made in the forward pass,
    in chunks of the target tokens, as which all are counted here."""
    block = tape.block
    d = block.dtypes
    entries = head.in_features * head.out_features
    trained = entries if block.full or head.saved else 0
    x = block.layout.narrowed(tape, x)
    selected = tape.step([x], x.elements, x.width)
    read = tape.cast(selected, d.compute) if d.autocast else selected
    made = Storage(read.size + d.weight * trained)
    loss = tape.step([read], 1, 4, saves=[made], params=trained, fresh=d.weight * trained)
    saved, weights = tape.saved()
    scores = min(block.tokens, chunk_rows(head.out_features)) * head.out_features
    narrow = read.width < 4
    # The head's gradient is summed in float32, and has its own width at the end.
    wider = (4 - d.weight) * trained if d.weight < 4 else 0
    # Logits and the logarithms of their shares; a CPU widens 16-bit logits beforehand.
    first = ((10 if d.on_cpu else 6) if narrow else 8) * scores
    # Errors, in float32 over the logarithms themselves, else a copy, of which the gradient is made.
    then = (6 if narrow else 4) * scores + (read.width * trained if narrow else 0)
    chunk = wider + max(first, then)
    # The head in the dtype to multiply in.
    matrix = 0 if d.weight == read.width else read.width * entries
    forward = chunk + matrix + x.size + selected.size + (read.size if read is not selected else 0)
    peak = tape.backward(loss, gradient_width, accumulated=accumulated)
    return HeadCost(forward, 0, saved, weights, trained, peak)


def evaluation_bytes(block: Block, head: Head, task: str) -> int:
    """Bytes of an evaluation step: nothing is kept, so the widest layer step or the loss rules.

    Where metrics read predictions, a token's best prediction is all that outlives the step. trl evaluates
    preference pairs through the head that it trains with (add_fused_lm_head), so by tiles, too.
    """
    d, layout, tokens = block.dtypes, block.layout, block.tokens
    rows = tokens if head.per_token else block.rows
    if task_named(task).tiled_logits:
        logits = _tile(block, head)
    elif task_named(task).head == "none":
        logits = 8 * tokens * block.hidden
    elif head.apart:
        logits = _apart(block.rows, block.length, head.out_features, d.compute)
    else:
        # The logits, their float32 copy, and the logarithms of their shares.
        logits = rows * (head.gathered or head.out_features) * (8 if d.compute == 4 else d.compute + 8)
        logits = max(logits, _gathering(rows, head, d.compute))
    widest = d.compute * (3 * layout.active_inner + 2 * block.hidden) * tokens
    if block.attention == "eager":
        widest = max(widest, block.heads * tokens * block.length * (4 + d.compute))
    return tokens * d.residual * block.hidden + max(logits, widest)
