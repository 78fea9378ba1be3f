"""Granite: stream and logits are multiplied by numbers; attention or Mamba-2, experts and a shared block.

As read in transformers 5.23 (models/granitemoehybrid): the way of torch's operations, which runs where
mamba-ssm and causal-conv1d are not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.models.families.model_type import ONLY_LANGUAGE, ModelType
from launcher.models.layers.layout import Block, LayerTape, Layout, of_kinds
from launcher.models.layers.linears import LAYER, Linear, Sizes, biased_attention, gated_mlp, linears_below
from launcher.models.layers.pre_norm import PreNorm
from launcher.models.layers.scans import convolution, copied, layer_types
from launcher.models.layers.tape import Value


@dataclass(frozen=True)
class _Granite(PreNorm):
    mamba: tuple[int, int, int, int, int, int] | None = None
    """Of Mamba-2: heads, their width, the state's width, groups, positions of a convolution, of a chunk.
    None: attention."""

    @property
    def scans(self) -> bool:
        return self.mamba is not None

    def attention(self, tape: LayerTape, x: Value) -> Value:
        if self.mamba is None:
            return super().attention(tape, x)
        return _mamba(tape, x, self.mamba)

    def join(self, tape: LayerTape, x: Value, made: Value) -> Value:
        return super().join(tape, x, tape.step([made], made.elements, made.width))

    def logits(self, tape: LayerTape, logits: Value) -> Value:
        return tape.step([logits], logits.elements, logits.width)

    def shared(self, block: Block, grad: bool) -> int:
        """A frozen embedding's output that is made to ask for a gradient is kept beside its multiple."""
        embedded = block.tokens * block.hidden * block.dtypes.residual
        return super().shared(block, grad) + (embedded if grad and not block.full else 0)


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


def _mamba(tape: LayerTape, x: Value, given: tuple[int, int, int, int, int, int]) -> Value:
    """A causal convolution, a scan by chunks, a gated norm."""
    block = tape.block
    heads, head, state, groups, kernel, chunk = given
    linears = {one.name: one for one in block.layout.linears}
    inner, n = heads * head, block.tokens
    chunks = block.rows * -(-block.length // chunk)
    small = chunks * chunk * heads
    sizes = _Scan(small * head, small * state, small * chunk, (chunks + block.rows) * inner * state, small)
    if block.padded:
        x = tape.step([x], x.elements, x.width)
    width = inner + 2 * groups * state
    made = tape.product(x, linears["in_proj"])
    gate, mixed, dt = tape.views(made, n * inner, n * width, n * heads)
    mixed = convolution(tape, mixed, width, kernel)
    if block.padded:
        mixed = tape.step([mixed], mixed.elements, mixed.width)
    values, keys, reads = tape.views(mixed, n * inner, n * groups * state, n * groups * state)
    params = heads if block.full else 0
    dt = tape.step([dt], dt.elements, max(dt.width, block.dtypes.weight), params=params, fresh=4 * params)
    dt = tape.cast(dt, 4) if block.float_operations else dt
    dt = tape.step([dt], dt.elements, dt.width, saves=[dt.storage])
    dt = tape.step([dt], dt.elements, dt.width, saves=[dt.storage])
    scanned = _scan_chunks(tape, sizes, (tape.cast(values, 4), keys, reads, dt), params)
    gate = tape.cast(gate, 4)
    opened = tape.step([gate], gate.elements, 4, saves=[gate.storage])
    wide = tape.times(tape.step([scanned], n * inner, 4), opened)
    normed = tape.cast(tape.normalised(wide, wide, inner // groups), 4)
    out = tape.weighted(normed, inner)
    return tape.product(tape.cast(out, block.dtypes.compute), linears["out_proj"])


def _scan_chunks(
    tape: LayerTape, sizes: _Scan, inputs: tuple[Value, Value, Value, Value], params: int
) -> Value:
    """`mamba2_chunk_scan`; each product of an einsum copies operands whose heads are not together."""
    values, keys, reads, dt = inputs
    keys, reads = (tape.step([tape.cast(one, 4)], sizes.keys, 4) for one in (keys, reads))
    filled = tape.step([values], sizes.values, 4)
    kept, temporary = ([filled.storage], filled.size) if params else ([], 0)
    skip = tape.step(
        [filled], filled.elements, 4, saves=kept, temporary=temporary, params=params, fresh=4 * params
    )
    wide = tape.cast(dt, 4)
    values = tape.broadcast(values, wide)
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
    scores = tape.bmm(copied(tape, reads), copied(tape, keys), sizes.pairs)
    near = tape.bmm(tape.times(scores, pairs), copied(tape, values), sizes.values)
    written = tape.broadcast(keys, tape.step([total], sizes.small, 4, save_out=True))
    states = tape.bmm(copied(tape, written), copied(tape, values), sizes.states)
    states = tape.step([states], sizes.states, 4, passes=True)
    states = tape.bmm(states, tape.step([total], sizes.small, 4), sizes.states)
    far = tape.bmm(copied(tape, reads), copied(tape, states), sizes.values)
    far = tape.broadcast(far, tape.step([total], sizes.small, 4, save_out=True))
    return tape.add(tape.add(near, far), skip)


def _granite(s: Sizes) -> Layout:
    return _Granite.of(s, biased_attention(s) + gated_mlp(s, bool(s.config.get("mlp_bias", False))))


def _granite_moe(s: Sizes) -> Layout:
    sizes = (int(s.config["num_local_experts"]), s.inner, int(s.config["num_experts_per_tok"]))
    return _Granite.with_experts(s, biased_attention(s), sizes, expert_adapters=False)


def _granite_hybrid(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    count, width = int(c.get("num_local_experts") or 0), int(c["shared_intermediate_size"])
    rope = c.get("position_embedding_type") == "rope"

    def make(s: Sizes, kind: str) -> Layout:
        more: dict[str, Any] = {"expert_adapters": False, "rotary_share": float(rope)}
        linears, extra = biased_attention(s), 0
        if kind == "linear_attention":
            linears, extra = _mamba_linears(s)
            heads = int(c["mamba_n_heads"])
            others = (int(c[key]) for key in _MAMBA_SIZES)
            more["mamba"] = (heads, int(c["mamba_expand"]) * h // heads, *others)
        rows = (("input_linear", h, 2 * width, "shared"), ("output_linear", width, h, "shared_act"))
        if not count:
            rows = (("input_linear", h, 2 * width, "norm2"), ("output_linear", width, h, "act"))
        linears += linears_below(LAYER + "shared_mlp.", s.layers, False, *rows)
        if not count:
            return _Granite.of(s, linears, extra, active_inner=width, **more)
        sizes = (count, s.inner, int(c["num_experts_per_tok"]))
        return _Granite.with_experts(s, linears, sizes, extra, **more)

    return of_kinds(s, layer_types(s, ["linear_attention"] * s.layers), make)


_MAMBA_SIZES = ("mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_chunk_size")


def _mamba_linears(s: Sizes) -> tuple[tuple[Linear, ...], int]:
    """Mamba-2, and its parameters outside of linears: convolution, decay, skip, step and a gated norm."""
    c, h = s.config, s.hidden
    inner, heads = int(c["mamba_expand"]) * h, int(c["mamba_n_heads"])
    convolved = inner + 2 * int(c["mamba_n_groups"]) * int(c["mamba_d_state"])
    rows = (("in_proj", h, inner + convolved + heads, "norm1"), ("out_proj", inner, h, "mixed"))
    linears = linears_below(LAYER + "mamba.", s.layers, bool(c["mamba_proj_bias"]), *rows)
    convolution = convolved * (int(c["mamba_d_conv"]) + int(bool(c["mamba_conv_bias"])))
    return linears, convolution + 3 * heads + inner


TYPES = (
    ModelType("granite", _granite, lacks=ONLY_LANGUAGE),
    ModelType("granitemoe", _granite_moe, lacks=ONLY_LANGUAGE),
    ModelType("granitemoehybrid", _granite_hybrid, lacks=ONLY_LANGUAGE, has_dense=True),
)
