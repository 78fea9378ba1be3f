"""The linear layers of a model, and the sizes that decide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

LAYER = "model.layers.{}."


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer; `count` copies, one per layer where `path` contains `{}`."""

    name: str
    """Last part of the module's name, e.g. `q_proj`."""
    in_features: int
    out_features: int
    count: int
    path: str = ""
    """Dotted module name, `{}` for the layer index."""
    bias: bool = False
    reads: str = ""
    """The activation that it multiplies; linears with equal `reads` share their input."""
    indices: tuple[int, ...] = ()
    """Of the layers that have it; empty: the first `count` ones."""
    skipped: bool = False
    """`all-linear` leaves it out: peft takes its name for an expert's, or it returns several tensors."""

    @property
    def weights(self) -> int:
        """Entries of one copy's matrix."""
        return self.in_features * self.out_features

    @property
    def params(self) -> int:
        """Parameters of all copies, with their biases."""
        return self.count * (self.weights + (self.out_features if self.bias else 0))

    def names(self) -> Iterator[str]:
        """Module names of all copies."""
        if "{}" not in self.path:
            yield self.path
        else:
            yield from (self.path.replace("{}", str(i), 1) for i in self.indices or range(self.count))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a configuration under the same names for all families."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    config: Mapping[str, Any]
    """The configuration with the class defaults filled in."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def linears_below(base: str, count: int, bias: bool, *rows: tuple[str, int, int, str]) -> tuple[Linear, ...]:
    """Linears below `base` from rows of path, inputs, outputs and the activation that it multiplies."""
    return tuple(
        Linear(path.rpartition(".")[2], inputs, outputs, count, base + path, bias, reads)
        for path, inputs, outputs, reads in rows
    )


def without_adapters(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Linears that `all-linear` does not reach, such as those beside experts (peft's
    `_MOE_TARGET_MODULE_MAPPING`)."""
    return tuple(replace(one, skipped=True) for one in linears)


def attention_linears(s: Sizes, *, qkv_bias: bool = False, out_bias: bool = False) -> tuple[Linear, ...]:
    base, h, kv = LAYER + "self_attn.", s.hidden, s.kv_width
    inputs = (("q_proj", h, s.query_width, "norm1"), ("k_proj", h, kv, "norm1"), ("v_proj", h, kv, "norm1"))
    output = ("o_proj", s.query_width, h, "attn")
    return linears_below(base, s.layers, qkv_bias, *inputs) + linears_below(base, s.layers, out_bias, output)


def biased_attention(s: Sizes) -> tuple[Linear, ...]:
    """With biases where `attention_bias` is set."""
    bias = bool(s.config.get("attention_bias", False))
    return attention_linears(s, qkv_bias=bias, out_bias=bias)


def gated_mlp(s: Sizes, bias: bool = False) -> tuple[Linear, ...]:
    return linears_below(
        LAYER + "mlp.", s.layers, bias,
        ("gate_proj", s.hidden, s.inner, "norm2"),
        ("up_proj", s.hidden, s.inner, "norm2"),
        ("down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip


def ungated_mlp(s: Sizes, bias: bool) -> tuple[Linear, ...]:
    rows = (("up_proj", s.hidden, s.inner, "norm2"), ("down_proj", s.inner, s.hidden, "act"))
    return linears_below(LAYER + "mlp.", s.layers, bias, *rows)


def shared_mlp(s: Sizes, name: str, width: int) -> tuple[Linear, ...]:
    """The feed-forward block that all tokens pass through beside the experts."""
    rows = (("gate_proj", s.hidden, width, "shared"), ("up_proj", s.hidden, width, "shared"))
    return linears_below(
        f"{LAYER}{name}.", s.layers, False, *rows, ("down_proj", width, s.hidden, "shared_act")
    )


def rotary_share(s: Sizes, default: float) -> float:
    """The share of each head that is rotated; older configurations have it outside `rope_parameters`."""
    rope = s.config.get("rope_parameters") or s.config.get("rope_scaling")
    given = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return float(s.config.get("partial_rotary_factor", default) if given is None else given)


def partly_rotated(s: Sizes, default: float) -> dict[str, Any]:
    """Rotary embeddings on a share of each head, cut out and joined where it is a part."""
    share = rotary_share(s, default)
    return {"rotary_share": share, "rotary_joined": 0 < share < 1}


def sparse_layers(s: Sizes, count: int) -> list[str]:
    """Of each layer, "dense" or "sparse", as Qwen's configurations have it."""
    step, dense = int(s.config.get("decoder_sparse_step") or 1), s.config.get("mlp_only_layers") or ()
    every = ((i + 1) % step == 0 and i not in dense and count > 0 for i in range(s.layers))
    return ["sparse" if one else "dense" for one in every]
