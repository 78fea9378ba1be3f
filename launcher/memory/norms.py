"""Norms as autograd keeps them: the fused LayerNorm, and RMSNorm written in Python (transformers 5.23)."""

from __future__ import annotations

from launcher.memory.flow import Block
from launcher.memory.products import cast
from launcher.memory.tape import Storage, Tape, Value


def norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    """A norm over the last `width` values of `x`."""
    if not block.layout.rms_norm:
        return _layer_norm(tape, block, x, width)
    if block.liger:
        # Liger's kernel keeps its input and one float32 per row; but for Gemma 2 and 3 it writes gradients
        # over their source.
        saves = [x.storage, Storage(4 * (x.elements // width))]
        return tape.step([x], x.elements, x.width, saves=saves, passes=block.layout.norms < 4)
    if block.model_type in ("gemma", "gemma2", "gemma3_text"):
        return _gemma_norm(tape, block, x, width)
    return _rms_norm(tape, block, x, width)


def _layer_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    rows = x.elements // width
    if block.float_operations:
        x = cast(tape, x, 4)
    params = 2 * width if block.full else 0
    statistics = Storage(8 * rows)
    return tape.step(
        [x], x.elements, x.width, saves=[x.storage, statistics], params=params, fresh=x.width * params
    )


def _normalised(tape: Tape, squared: Value, x: Value, width: int) -> Value:
    """`x * rsqrt(mean(squared ** 2))`, in float32."""
    n, rows = x.elements, x.elements // width
    # The derivative of a power holds the power below it and its multiple.
    power = tape.step([squared], n, 4, saves=[squared.storage], temporary=2 * squared.size)
    mean = tape.step([power], rows, 4)
    root = tape.step([mean], rows, 4, save_out=True)
    saves = [root.storage]
    if root.node is not None:
        saves.append(x.storage)
    # The gradient of the factors is as wide as the values before it is summed.
    return tape.step([x, root], n, 4, saves=saves, temporary=4 * n)


def _weighted(tape: Tape, block: Block, x: Value, width: int) -> Value:
    """`weight * x`; the weight's gradient is as wide as `x` before it is summed."""
    params = width if block.full else 0
    saves = [x.storage] if params else []
    temporary = x.size if params else 0
    return tape.step(
        [x], x.elements, x.width, saves=saves, temporary=temporary, params=params, fresh=x.width * params
    )


def _rms_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    wide = cast(tape, x, 4)
    # T5 scales the 16-bit input itself, beside the copy that was squared.
    read = x if block.layout.position_bias else wide
    return _weighted(tape, block, cast(tape, _normalised(tape, wide, read, width), x.width), width)


def _gemma_norm(tape: Tape, block: Block, x: Value, width: int) -> Value:
    wide = cast(tape, x, 4)
    return cast(tape, _weighted(tape, block, _normalised(tape, wide, wide, width), width), x.width)
