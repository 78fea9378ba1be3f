"""Layouts of the model families: the linear layers of a layer, and what else has parameters.

One function per family, from a resolved configuration (`Sizes`) to a `Layout`. Names and shapes
follow transformers 5.23; tests/contract/test_param_counts.py compares them with the real classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.tasks.task import Architecture


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


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides parameter counts and saved activations of the layers of one kind, and of the model."""

    linears: tuple[Linear, ...]
    """Linears in execution order, without the output head."""
    layer_extra: int
    """Parameters of one layer outside its linears: norms, router, experts."""
    model_extra: int
    """Parameters outside the layers and the token and position embeddings: the final norm."""
    embed_width: int
    """Width of the token embedding, and of a language model's head; 0 without tokens."""
    positions: int = 0
    """Learned position embeddings (rows)."""
    gated: bool = True
    """The feed-forward block multiplies an activated gate with a second product."""
    rms_norm: bool = True
    """RMSNorm in Python (upcasts to float32), else the fused LayerNorm."""
    norms: int = 2
    """Norms of hidden width per layer."""
    norm_bias: bool = True
    """A LayerNorm has a bias."""
    input_norms: bool = True
    """Attention and feed-forward block read normed inputs."""
    attention_norm: bool = True
    """Attention does, where `input_norms` holds."""
    attended_variable: bool = False
    """The layer's function has what attention made as a variable until it returns."""
    embedding_norm: bool = False
    """The embeddings are normed before the first layer."""
    output_norms: bool = False
    """Their outputs are normed before the residual sum."""
    wide_norm_weight: bool = False
    """RMSNorm multiplies by its weight in float32, before the result is narrowed."""
    qk_norm: bool = False
    """Norms on each head of queries and keys."""
    qk_norm_joint: bool = False
    """Norms on queries and on keys over all their heads at once."""
    dropout: float = 0.0
    """Residual dropout, after each attention and each feed-forward block."""
    attention_dropout: float = 0.0
    """On the attention weights; 0 for families whose published configurations have none."""
    attended_dropout: float = 0.0
    """ModernBERT: on what attention made, before the residual sum."""
    inner_dropout: float = 0.0
    """Inside the feed-forward block."""
    float_softmax: bool = True
    """Eager attention computes the softmax in float32."""
    activation: str = "silu"
    mask_buffer: int = 0
    """Bytes of a causal-mask buffer on the device."""
    experts: int = 0
    """Parameters of one layer's experts, which are no linears."""
    num_experts: int = 0
    active_inner: int = 0
    """Feed-forward width per token, over all selected experts."""
    fused_qkv: bool = False
    head_dim: int = 0
    """Width of a head in the layers of this kind; 0: the model's."""
    kv_heads: int = 0
    """Key-value heads of the layers of this kind; 0: the model's."""
    value_norm: bool = False
    """Gemma 4: values are normed by a norm without a weight."""
    shared_keys: bool = False
    """Gemma 4: keys and values are those of the last layer before with the same window that has its own."""
    layer_factor: bool = False
    """Gemma 4: a layer's output is multiplied, in place, by a stored number."""
    layer_table: tuple[int, int] = (0, 0)
    """Gemma 4: rows and width of the embedding of the layers' own inputs, of all layers side by side."""
    embed_paths: tuple[str, ...] = field(default=("model.embed_tokens",))
    segments: int = 0
    """Segment embeddings (rows)."""
    position_bias: bool = False
    """T5: learned relative-position biases are added to the attention scores."""
    crossed: bool = False
    """Each layer has cross-attention to the encoder's output."""
    tokens_per_sample: int | None = None
    """Sequence length where the configuration decides it (image patches)."""
    post_norm: bool = False
    """The norm is applied after the residual sum, not to the input of each block."""
    parallel: bool = False
    """Attention and feed-forward block both read the layer's input (parallel residual)."""
    rotary_share: float = 1.0
    """Share of each head that rotary embeddings rotate."""
    rotary_joined: bool = False
    """The rotated share is cut out of each head, and joined with the rest by a copy."""
    rotary_kind: str = ""
    """Of other ways to rotate than Llama's. halves: of gpt-oss, which turns the halves of a head with factors
    of half its width and joins them by a copy. complex: of Llama 4, as complex numbers in float32. float: of
    ModernBERT, Llama's in float32."""
    window: int = 0
    """Positions that a token attends to; 0: all before it."""
    windowed: tuple[int, ...] | None = None
    """Indices of the layers that have the window; None: all of this kind."""
    qk_norm_plain: bool = False
    """Llama 4: norms without a weight on each head of queries and keys, after rotation."""
    qkv_sliced: bool = False
    """Queries, keys and values are three slices of one product, not the parts of a split."""
    scaled_queries: bool = False
    """Queries are multiplied by a factor before attention."""
    score_cap: bool = False
    """Eager attention soft-caps its scores with tanh."""
    logit_cap: bool = False
    """The logits are soft-capped with tanh."""
    scaled_logits: bool = False
    """The logits are divided by a number."""
    scaled_stream: bool = False
    """The embeddings, and what attention and feed-forward block add to them, are multiplied by a number."""
    narrow_rotation: bool = False
    """Rotated queries and keys are cast back to the dtype that they had."""
    causal: bool = True
    """Causal attention; otherwise a batch without padding needs no mask."""
    image_values: int = 0
    """Values (pixels x channels) of one image."""
    mixer: str = "attention"
    """attention | latent (MLA) | delta (gated delta rule) | mamba: what mixes the tokens."""
    mixer_sizes: tuple[int, ...] = ()
    """Of "delta": heads of keys and of values, their widths, positions that the convolution reads.
    "latent": widths of a head's plain part, of its rotated part and of its values.
    "mamba": heads, their width, the state's width, groups, positions of a convolution, of a chunk."""
    router: str = "softmax"
    """How a token's experts are chosen: softmax | sigmoid | chosen (a softmax of the chosen ones alone) | all
    (every expert computes every token, multiplied by a share before) | normed (Gemma 4:
    of the normed residual stream, for experts beside the feed-forward block)."""
    expert_adapters: bool = True
    """`all-linear` reaches the experts and their router."""
    expert_bias: bool = False
    """gpt-oss: the experts' products have biases, and their gates are clamped."""
    sinks: bool = False
    """gpt-oss: eager attention has a learned score for each head beside those of the positions."""
    masks: int = 1
    """Masks of positions that eager attention makes for a batch: of sliding and of full attention."""
    decoder: Layout | None = None
    """The decoder of an encoder-decoder model."""
    others: tuple[Layout, ...] = ()
    """The other kinds of layers of the same stack; what is no layer's own is this layout's alone."""

    @property
    def table_params(self) -> int:
        """Parameters of the embedding of the layers' own inputs."""
        return self.layer_table[0] * self.layer_table[1]

    @property
    def layers(self) -> int:
        """Layers of this kind."""
        return self.linears[0].count

    @property
    def indices(self) -> tuple[int, ...]:
        """Of the layers of this kind in their stack."""
        return self.linears[0].indices or tuple(range(self.layers))

    @property
    def kinds(self) -> tuple[Layout, ...]:
        """The kinds of layers of this stack."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def stacks(self) -> tuple[Layout, ...]:
        """The kinds of layers of all stacks."""
        return self.kinds + (self.decoder.kinds if self.decoder else ())


def of_kinds(s: Sizes, kinds: Sequence[str], make: Callable[[Sizes, str], Layout]) -> Layout:
    """A stack whose layer i is of kind `kinds[i]`; `make` is given the layers of one kind and its name."""
    found = []
    for kind in dict.fromkeys(kinds):
        indices = tuple(i for i, one in enumerate(kinds) if one == kind)
        layout = make(replace(s, layers=len(indices)), kind)
        if len(indices) == len(kinds):
            return layout
        numbered = tuple(replace(x, indices=indices) if "{}" in x.path else x for x in layout.linears)
        found.append(replace(layout, linears=numbered))
    return replace(found[0], others=tuple(replace(kind, model_extra=0) for kind in found[1:]))


def linears_below(base: str, count: int, bias: bool, *rows: tuple[str, int, int, str]) -> tuple[Linear, ...]:
    """Linears below `base` from rows of path, inputs, outputs and the activation that it multiplies."""
    return tuple(
        Linear(path.rpartition(".")[2], inputs, outputs, count, base + path, bias, reads)
        for path, inputs, outputs, reads in rows
    )


def attention_linears(s: Sizes, *, qkv_bias: bool = False, out_bias: bool = False) -> tuple[Linear, ...]:
    base, h, kv = "model.layers.{}.self_attn.", s.hidden, s.kv_width
    inputs = (("q_proj", h, s.query_width, "norm1"), ("k_proj", h, kv, "norm1"), ("v_proj", h, kv, "norm1"))
    output = ("o_proj", s.query_width, h, "attn")
    return linears_below(base, s.layers, qkv_bias, *inputs) + linears_below(base, s.layers, out_bias, output)


def gated_mlp(s: Sizes, bias: bool = False) -> tuple[Linear, ...]:
    return linears_below(
        "model.layers.{}.mlp.", s.layers, bias,
        ("gate_proj", s.hidden, s.inner, "norm2"),
        ("up_proj", s.hidden, s.inner, "norm2"),
        ("down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip


def decoder_layout(s: Sizes, linears: tuple[Linear, ...], extra: int = 0, **more: Any) -> Layout:
    """Layers with RMSNorms and a gated feed-forward block. extra: parameters of a layer besides norms."""
    norms = more.get("norms", 2) * s.hidden + (2 * s.head_dim if more.get("qk_norm") else 0)
    norms += s.query_width + s.kv_width if more.get("qk_norm_joint") else 0
    return Layout(linears, norms + extra, s.hidden, s.hidden, **{"active_inner": s.inner, **more})


def _llama(s: Sizes, **more: Any) -> Layout:
    bias = bool(s.config.get("attention_bias", False))
    mlp = gated_mlp(s, bool(s.config.get("mlp_bias", False)))
    return decoder_layout(s, attention_linears(s, qkv_bias=bias, out_bias=bias) + mlp, **more)


def _qwen3(s: Sizes, **more: Any) -> Layout:
    bias = bool(s.config["attention_bias"])
    return decoder_layout(s, attention_linears(s, qkv_bias=bias, out_bias=bias) + gated_mlp(s), **more)


def _gemma(s: Sizes, norms: int = 2, qk_norm: bool = False) -> Layout:
    # Gemma2Config's defaults cap both.
    default = 1.0 if norms == 4 and not qk_norm else None
    return _qwen3(
        s,
        norms=norms,
        output_norms=norms == 4,
        wide_norm_weight=True,
        qk_norm=qk_norm,
        activation="gelu_pytorch_tanh",
        score_cap=s.config.get("attn_logit_softcapping", default) is not None,
        logit_cap=s.config.get("final_logit_softcapping", default) is not None,
    )


def _phi3(s: Sizes) -> Layout:
    linears = linears_below(
        "model.layers.{}.", s.layers, False,
        ("self_attn.qkv_proj", s.hidden, s.query_width + 2 * s.kv_width, "norm1"),
        ("self_attn.o_proj", s.query_width, s.hidden, "attn"),
        ("mlp.gate_up_proj", s.hidden, 2 * s.inner, "norm2"),
        ("mlp.down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip
    return decoder_layout(
        s,
        linears,
        dropout=float(s.config["resid_pdrop"]),
        fused_qkv=True,
        qkv_sliced=True,
        rotary_joined=True,
        rotary_share=rotary_share(s, 1.0),
    )


def rotary_share(s: Sizes, default: float) -> float:
    """The share of each head that is rotated; older configurations have it outside `rope_parameters`."""
    rope = s.config.get("rope_parameters") or s.config.get("rope_scaling")
    given = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return float(s.config.get("partial_rotary_factor", default) if given is None else given)


def _mixtral(s: Sizes) -> Layout:
    count, active = int(s.config["num_local_experts"]), int(s.config["num_experts_per_tok"])
    return with_experts(s, attention_linears(s), count, s.inner, active)


def _qwen3_moe(s: Sizes) -> Layout:
    c, bias = s.config, bool(s.config["attention_bias"])
    count, active = int(c.get("num_experts") or c["num_local_experts"]), int(c["num_experts_per_tok"])

    def make(s: Sizes, kind: str) -> Layout:
        linears = attention_linears(s, qkv_bias=bias, out_bias=bias)
        if kind == "dense":
            return decoder_layout(s, linears + without_adapters(gated_mlp(s)), qk_norm=True)
        return with_experts(s, linears, count, int(c["moe_intermediate_size"]), active, qk_norm=True)

    return of_kinds(s, sparse_layers(s, count), make)


def without_adapters(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Linears that `all-linear` does not reach, such as those beside experts (peft's
    `_MOE_TARGET_MODULE_MAPPING`)."""
    return tuple(replace(one, skipped=True) for one in linears)


def sparse_layers(s: Sizes, count: int) -> list[str]:
    """Of each layer, "dense" or "sparse", as Qwen's configurations have it."""
    step, dense = int(s.config.get("decoder_sparse_step") or 1), s.config.get("mlp_only_layers") or ()
    every = ((i + 1) % step == 0 and i not in dense and count > 0 for i in range(s.layers))
    return ["sparse" if one else "dense" for one in every]


def with_experts(
    s: Sizes, linears: tuple[Linear, ...], count: int, width: int, active: int, extra: int = 0, **more: Any
) -> Layout:
    """`count` experts of this width, of which each token uses `active`, and a router.

    extra: parameters of a layer besides norms, router and experts.
    """
    if count < active:
        raise ValueError(f"num_experts_per_tok {active} is more than the {count} experts")
    experts, router = count * 3 * s.hidden * width, count * s.hidden
    more |= {"experts": experts, "num_experts": count, "active_inner": active * width}
    return decoder_layout(s, linears, experts + router + extra, **more)


def _plain(s: Sizes, linears: tuple[Linear, ...], **more: Any) -> Layout:
    """Layers with two biased LayerNorms and a feed-forward block without gate."""
    facts: dict[str, Any] = {
        "layer_extra": 4 * s.hidden,
        "model_extra": 2 * s.hidden,
        "embed_width": s.hidden,
        "gated": False,
        "rms_norm": False,
        "activation": str(s.config.get("activation_function") or s.config.get("hidden_act")),
        "active_inner": s.inner,
    }
    return Layout(linears, **(facts | more))


def _starcoder2(s: Sizes) -> Layout:
    bias, rows = (
        bool(s.config["use_bias"]),
        (("c_fc", s.hidden, s.inner, "norm2"), ("c_proj", s.inner, s.hidden, "act")),
    )
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias)
    linears += linears_below("model.layers.{}.mlp.", s.layers, bias, *rows)
    return _plain(s, linears, dropout=float(s.config["residual_dropout"]))


def _gpt2(s: Sizes, qkv_width: int | None = None, **more: Any) -> Layout:
    h = s.hidden
    linears = linears_below(
        "transformer.h.{}.", s.layers, True,
        ("attn.c_attn", h, qkv_width or 3 * h, "norm1"),
        ("attn.c_proj", h, h, "attn"),
        ("mlp.c_fc", h, s.inner, "norm2"),
        ("mlp.c_proj", s.inner, h, "act"),
    )  # fmt: skip
    return _plain(
        s,
        linears,
        positions=s.positions,
        dropout=float(s.config["resid_pdrop"]),
        attention_dropout=float(s.config["attn_pdrop"]),
        fused_qkv=True,
        embed_paths=("transformer.wte", "transformer.wpe"),
        **more,
    )


def _gpt_bigcode(s: Sizes) -> Layout:
    # One bool per pair of positions.
    return _gpt2(s, s.hidden + 2 * s.kv_width, mask_buffer=s.positions**2)


def _gpt_neox(s: Sizes) -> Layout:
    base, n, h = "gpt_neox.layers.{}.", s.layers, s.hidden
    bias = bool(s.config["attention_bias"])
    attention = (("attention.query_key_value", h, 3 * h, "norm1"), ("attention.dense", h, h, "attn"))
    mlp = (("mlp.dense_h_to_4h", h, s.inner, "norm2"), ("mlp.dense_4h_to_h", s.inner, h, "act"))
    # Defaults of GPTNeoXConfig; current configurations have the share in rope_parameters.
    rope = s.config.get("rope_parameters") or {}
    return _plain(
        s,
        linears_below(base, n, bias, *attention) + linears_below(base, n, True, *mlp),
        dropout=float(s.config["hidden_dropout"]),
        fused_qkv=True,
        embed_paths=("gpt_neox.embed_in",),
        parallel=bool(s.config.get("use_parallel_residual", True)),
        rotary_joined=True,
        rotary_share=float(rope.get("partial_rotary_factor", s.config.get("rotary_pct", 0.25))),
    )


def _opt(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    linears = linears_below(
        "model.decoder.layers.{}.", s.layers, bool(c["enable_bias"]),
        *((f"self_attn.{name}", h, h, "norm1") for name in ("q_proj", "k_proj", "v_proj")),
        ("self_attn.out_proj", h, h, "attn"),
        ("fc1", h, s.inner, "norm2"),
        ("fc2", s.inner, h, "act"),
    )  # fmt: skip
    width = int(c["word_embed_proj_dim"] or h)
    if width != h:
        rows = (("project_out", h, width, ""), ("project_in", width, h, ""))
        linears += linears_below("model.decoder.", 1, False, *rows)
    affine = 1 if c["layer_norm_elementwise_affine"] else 0
    final_norm = c["do_layer_norm_before"] and not c["_remove_final_layer_norm"]
    return _plain(
        s,
        linears,
        layer_extra=4 * h * affine,
        model_extra=2 * h * affine if final_norm else 0,
        embed_width=width,
        # Position ids have an offset of two.
        positions=s.positions + 2,
        dropout=float(c["dropout"]),
        post_norm=not c["do_layer_norm_before"],
        scaled_queries=True,
        embed_paths=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    )


def _ungated_mlp(s: Sizes, bias: bool) -> tuple[Linear, ...]:
    rows = (("up_proj", s.hidden, s.inner, "norm2"), ("down_proj", s.inner, s.hidden, "act"))
    return linears_below("model.layers.{}.mlp.", s.layers, bias, *rows)


def _arcee(s: Sizes) -> Layout:
    bias = bool(s.config["attention_bias"])
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias) + _ungated_mlp(s, bool(s.config["mlp_bias"]))
    return decoder_layout(s, linears, gated=False, activation=str(s.config["hidden_act"]))


def _apertus(s: Sizes) -> Layout:
    bias, activation = bool(s.config["attention_bias"]), str(s.config["hidden_act"])
    linears = attention_linears(s, qkv_bias=bias, out_bias=bias) + _ungated_mlp(s, False)
    extra = 2 if activation == "xielu" else 0  # the two parameters of the activation
    return decoder_layout(s, linears, extra, gated=False, activation=activation, qk_norm=True)


def _olmo2(s: Sizes) -> Layout:
    norms = {"input_norms": False, "output_norms": True, "wide_norm_weight": True, "qk_norm_joint": True}
    return _qwen3(s, narrow_rotation=True, **norms)


def _glm(s: Sizes, **more: Any) -> Layout:
    mlp = linears_below(
        "model.layers.{}.mlp.", s.layers, False,
        ("gate_up_proj", s.hidden, 2 * s.inner, "norm2"),
        ("down_proj", s.inner, s.hidden, "act"),
    )  # fmt: skip
    linears = attention_linears(s, qkv_bias=bool(s.config["attention_bias"])) + mlp
    return decoder_layout(s, linears, rotary_joined=True, rotary_share=rotary_share(s, 0.5), **more)


FAMILIES: dict[str, Callable[[Sizes], Layout]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda s: decoder_layout(s, attention_linears(s, qkv_bias=True) + gated_mlp(s)),
    "qwen3": lambda s: _qwen3(s, qk_norm=True),
    "gemma": _gemma,
    "gemma2": lambda s: _gemma(s, norms=4),
    "gemma3_text": lambda s: _gemma(s, norms=4, qk_norm=True),
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt2": lambda s: _gpt2(s, float_softmax=False),
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _llama,
    "arcee": _arcee,
    "ministral": lambda s: decoder_layout(s, attention_linears(s) + gated_mlp(s)),
    "ministral3": lambda s: decoder_layout(s, attention_linears(s) + gated_mlp(s), scaled_queries=True),
    "granite": lambda s: _llama(s, scaled_stream=True, scaled_logits=True),
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "apertus": _apertus,
    "glm": _glm,
    "glm4": lambda s: _glm(s, norms=4, output_norms=True),
}


def _bert(s: Sizes) -> Layout:
    h, types = s.hidden, int(s.config["type_vocab_size"])
    linears = linears_below(
        "bert.encoder.layer.{}.", s.layers, True,
        *((f"attention.self.{name}", h, h, "norm1") for name in ("query", "key", "value")),
        ("attention.output.dense", h, h, "attn"),
        ("intermediate.dense", h, s.inner, "norm2"),
        ("output.dense", s.inner, h, "act"),
    )  # fmt: skip
    return _encoder(
        s,
        linears + linears_below("bert.", 1, True, ("pooler.dense", h, h, "")),
        # Segment embeddings and the embeddings' norm.
        model_extra=types * h + 2 * h,
        positions=s.positions,
        segments=types,
        embed_paths=tuple(f"bert.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")),
        float_softmax=False,
        post_norm=True,
        embedding_norm=True,
    )


def _modernbert(s: Sizes) -> Layout:
    c, h = s.config, s.hidden
    bias, mlp_bias = bool(c["attention_bias"]), bool(c["mlp_bias"])
    norm = h * (2 if c["norm_bias"] else 1)

    def make(s: Sizes, kind: str) -> Layout:
        attention = (("attn.Wqkv", h, 3 * h, "norm1"), ("attn.Wo", h, h, "attn"))
        mlp = (("mlp.Wi", h, 2 * s.inner, "norm2"), ("mlp.Wo", s.inner, h, "act"))
        base, n, first = "model.layers.{}.", s.layers, kind == "first"
        return _plain(
            s,
            linears_below(base, n, bias, *attention) + linears_below(base, n, mlp_bias, *mlp),
            layer_extra=norm if first else 2 * norm,
            # The norm of the embeddings and the final one.
            model_extra=2 * norm,
            gated=True,
            norm_bias=bool(c["norm_bias"]),
            attention_norm=not first,
            attended_variable=True,
            embedding_norm=True,
            activation=str(c.get("hidden_activation", "gelu")),
            attention_dropout=float(c.get("attention_dropout", 0.0)),
            attended_dropout=float(c.get("attention_dropout", 0.0)),
            inner_dropout=float(c["mlp_dropout"]),
            fused_qkv=True,
            rotary_kind="float",
            causal=False,
            embed_paths=("model.embeddings.tok_embeddings",),
        )

    return of_kinds(s, ["first", *["others"] * (s.layers - 1)], make)


def with_prediction_head(s: Sizes, layout: Layout) -> Layout:
    """ModernBERT's block before a classifier: a product, an activation and a norm."""
    rows = (("dense", s.hidden, s.hidden, "head"),)
    linears = linears_below("head.", 1, bool(s.config["classifier_bias"]), *rows)
    norm = s.hidden * (2 if layout.norm_bias else 1)
    return replace(layout, linears=layout.linears + linears, model_extra=layout.model_extra + norm)


def _vit(s: Sizes) -> Layout:
    base, n, h, c = "vit.layers.{}.", s.layers, s.hidden, s.config
    inputs = ((f"attention.{name}", h, h, "norm1") for name in ("q_proj", "k_proj", "v_proj"))
    others = (
        ("attention.o_proj", h, h, "attn"),
        ("mlp.fc1", h, s.inner, "norm2"),
        ("mlp.fc2", s.inner, h, "act"),
    )
    (height, width), (down, across) = _pair(c["image_size"]), _pair(c["patch_size"])
    tokens = (height // down) * (width // across) + 1
    return _encoder(
        s,
        linears_below(base, n, bool(c["qkv_bias"]), *inputs) + linears_below(base, n, True, *others),
        # The class token, the patch convolution and the final norm.
        model_extra=h + (int(c["num_channels"]) * down * across + 1) * h + 2 * h,
        embed_width=0,
        positions=tokens,
        embed_paths=(),
        tokens_per_sample=tokens,
        image_values=int(c["num_channels"]) * height * width,
    )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, also from one number."""
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def _encoder(s: Sizes, linears: tuple[Linear, ...], **more: Any) -> Layout:
    return _plain(
        s,
        linears,
        dropout=float(s.config["hidden_dropout_prob"]),
        attention_dropout=float(s.config["attention_probs_dropout_prob"]),
        causal=False,
        **more,
    )


def _t5(s: Sizes) -> Layout:
    """The encoder, with its `decoder`; both share the token embedding."""
    layers = int(s.config.get("num_decoder_layers") or s.layers)
    return _t5_stack(s, "encoder", s.layers, decoder=_t5_stack(s, "decoder", layers))


def _t5_stack(s: Sizes, stack: str, n: int, decoder: Layout | None = None) -> Layout:
    base, h, inner, width = f"{stack}.block.{{}}.layer.", s.hidden, s.inner, s.query_width
    crossed = stack == "decoder"
    kind, _, activation = str(s.config["feed_forward_proj"]).rpartition("-")

    def attention(path: str, norm: str, read: str, out: str) -> tuple[Linear, ...]:
        reads = {"q": norm, "k": read, "v": read}
        return (
            *(Linear(x, h, width, n, f"{base}{path}.{x}", False, reads[x]) for x in reads),
            Linear("o", width, h, n, f"{base}{path}.o", False, out),
        )

    linears = attention("0.SelfAttention", "norm1", "norm1", "attn")
    if crossed:
        linears += attention("1.EncDecAttention", "norm_cross", "encoder", "attn_cross")
    block = f"{base}{2 if crossed else 1}.DenseReluDense."
    names = ("wi_0", "wi_1") if kind == "gated" else ("wi",)
    linears += tuple(Linear(x, h, inner, n, block + x, False, "norm2") for x in names)
    linears += (Linear("wo", inner, h, n, block + "wo", False, "act"),)
    dropout = float(s.config["dropout_rate"])
    return Layout(
        linears,
        layer_extra=(3 if crossed else 2) * h,
        # The final norm, and the relative-position biases, which only the first layer has.
        model_extra=h + int(s.config["relative_attention_num_buckets"]) * s.heads,
        embed_width=h,
        gated=kind == "gated",
        norms=3 if crossed else 2,
        dropout=dropout,
        attention_dropout=dropout,
        inner_dropout=dropout,
        float_softmax=False,
        # T5's gated-gelu means gelu_new.
        activation="gelu_new" if (kind, activation) == ("gated", "gelu") else activation,
        active_inner=inner,
        position_bias=True,
        crossed=crossed,
        causal=crossed,
        embed_paths=("shared",),
        decoder=decoder,
    )


ENCODER_FAMILIES: dict[str, Callable[[Sizes], Layout]] = {
    "bert": _bert, "vit": _vit, "t5": _t5, "mt5": _t5, "modernbert": _modernbert,
}  # fmt: skip
ENCODER_KINDS: dict[str, Architecture] = {
    "bert": "encoder", "vit": "image-encoder", "t5": "encoder-decoder", "mt5": "encoder-decoder",
    "modernbert": "encoder",
}  # fmt: skip
PREDICTION_HEADS: dict[str, Callable[[Sizes, Layout], Layout]] = {"modernbert": with_prediction_head}
"""Families whose classifiers read what a block of their own makes of the last hidden states."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What an adapter is put on."""

    params: int
    """Parameters of the matrices that have an adapter, or are trained in full beside it."""
    experts: bool | None
    """Whether experts are among them; None: there are none."""
    router: bool | None


@dataclass(frozen=True, slots=True)
class Adapted:
    """What an adapter trains."""

    params: int
    """Trained parameters: adapters, modules trained in full, a classifier."""
    paths: tuple[str, ...] | None
    """Paths of the adapted modules, `{}` for the layer's index; None: `all-linear`."""
    rank: int
    """Mean rank over the modules of `paths`, at least 1."""
    uneven: bool = False
    """Layers differ in whether they have an adapter, or in its rank."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are trained in full (modules_to_save)."""
    reach: Reach | None = None
    """Where peft itself was asked."""
