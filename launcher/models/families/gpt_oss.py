"""gpt-oss: sinks beside the scores of positions, experts with biases and clamped gates."""

from __future__ import annotations

from typing import Any

from launcher.models.families.model_type import ModelType
from launcher.models.layers.attention import eager, kernel
from launcher.models.layers.feed_forward import chosen_rows, run_experts
from launcher.models.layers.layout import Block, LayerTape, Layout
from launcher.models.layers.linears import Sizes, biased_attention
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.tape import Storage, Value


class _GptOss(PreNorm):
    def place(self, tape: LayerTape, queries: Value, keys: Value) -> tuple[Value, Value]:
        return _rotate(tape, queries), _rotate(tape, keys)

    def mix(self, tape: LayerTape, q: Value, k: Value, v: Value) -> Value:
        if tape.block.attention == "eager":
            return eager(tape, q, k, v, joined=True, weigh=_with_sinks)
        return kernel(tape, q, k, v)

    def feed_forward(self, tape: LayerTape, x: Value) -> Value:
        return run_experts(tape, x, self.route(tape, x), opened=_clamped, biased=_biased)

    def route(self, tape: LayerTape, x: Value) -> Value:
        """A softmax of the scores of the chosen experts alone."""
        block = tape.block
        count, chosen = self.num_experts, chosen_rows(block)
        entries = count * block.hidden
        scores = tape.matrix(x, count, entries, params=entries + count if block.full else 0)
        top = tape.step([scores], chosen, scores.width, saves=[Storage(8 * chosen)])
        return tape.step([top], chosen, top.width, save_out=True)

    def shared(self, block: Block, grad: bool) -> int:
        """Factors of positions have half a head's width."""
        return super().shared(block, grad) // 2


def _biased(tape: LayerTape, x: Value, ids: Storage) -> Value:
    """Rows with the bias of the expert of each added in place; `ids`: of the experts."""
    chosen = ids.size // 8
    params = tape.block.layout.num_experts * (x.elements // chosen) if tape.block.full else 0
    bias = tape.step([], x.elements, x.width, saves=[ids], params=params, fresh=x.width * params)
    return tape.step([x, bias], x.elements, x.width, view=x.storage, passes=True)


def _clamped(tape: LayerTape, both: Value) -> Value:
    """Every second value is a gate; `(up + 1) * gate * sigmoid(a * gate)` of clamped values."""
    n, width = both.elements // 2, both.width
    gate, up = (tape.step([both], n, width, view=both.storage) for _ in range(2))
    gate, up = (tape.step([x], n, width, saves=[both.storage], temporary=2 * n) for x in (gate, up))
    opened = tape.step([tape.step([gate], n, width)], n, width, save_out=True)
    return tape.times(tape.step([up], n, width, passes=True), tape.times(gate, opened))


def _with_sinks(tape: LayerTape, scores: Value, values: Value) -> Value:
    """A softmax of the scores beside a learned one for each head, which is cut off again.

    Its function has the scores, and those beside it, as variables until they are set anew or it returns.
    """
    block = tape.block
    rows, elements, params = block.heads * block.tokens, values.elements, block.heads if block.full else 0
    n, width = scores.elements + rows, max(scores.width, block.dtypes.weight)
    weight = block.dtypes.weight
    joined = tape.step([scores], n, width, passes=True, params=params, fresh=weight * params)
    largest = tape.step([joined], rows, width, saves=[Storage(8 * rows)])
    spread = tape.step([largest], n, width, view=largest.storage, temporary=n * width)
    moved = tape.step([joined, spread], n, width, passes=True)
    shares = tape.step([moved], n, width, save_out=True)
    weights = tape.step([shares], scores.elements, width, view=shares.storage)
    weights = tape.cast(weights, block.dtypes.compute)
    tape.reads(scores)
    mixed = tape.bmm(weights, values, elements)
    mixed = tape.step([mixed], elements, mixed.width, passes=True)
    tape.reads(moved)
    return mixed


def _rotate(tape: LayerTape, x: Value) -> Value:
    """`(a * cos - b * sin, b * cos + a * sin)` of the halves a and b of each head."""
    n, width = x.elements // 2, max(x.width, tape.block.dtypes.residual)
    first, second = tape.views(x, n, n)
    parts = [tape.step([one], n, width) for one in (first, second, second, first)]
    parts[1] = tape.step([parts[1]], n, width, view=parts[1].storage)  # the gradient of what is subtracted
    low, high = tape.add(*parts[:2]), tape.add(*parts[2:])
    return tape.step([low, high], x.elements, width, passes=True)


def _layers(s: Sizes) -> Layout:
    count, active = int(s.config["num_local_experts"]), int(s.config["num_experts_per_tok"])
    more: dict[str, Any] = {"expert_adapters": False, "wide_norms": True, "masks": 2}
    # A sink for each head, biases of the router and of both products of each expert.
    extra = s.heads + count * (1 + 2 * s.inner + s.hidden)
    return _GptOss.with_experts(s, biased_attention(s), (count, s.inner, active), extra, **more)


TYPES = (ModelType("gpt_oss", _layers, only_eager=True),)
