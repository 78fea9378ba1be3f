"""Layers of one kind: the facts that decide parameters and saved activations, and what each family defines.

A family's subclass of `Layout` (launcher/models/families/) records its layer on a tape. Its names and shapes
follow transformers 5.23; tests/contract/test_param_counts.py compares them with the real classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from launcher.models.layers.tape import Tape, Value
from launcher.tasks.task import HeadKind

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value."""


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
class Dtypes:
    """Widths in bytes of what flows through a layer."""

    compute: int
    """Output of the matrix products."""
    residual: int
    """The stream between layers."""
    autocast: bool
    """torch.autocast: every product casts its own copy of a float32 input."""
    adapter: int | None = None
    """Weights of a LoRA adapter; None: the model itself is trained."""
    on_cpu: bool = False
    frozen_inputs: bool = False
    """Products keep their input though their matrix is frozen."""

    @property
    def weight(self) -> int:
        """Of the stored weights that are not quantised: as the stream that they write."""
        return self.residual


@dataclass(frozen=True)
class Layout:
    """The layers of one kind, and of the model what no layer owns.

    The methods are what the estimate asks; `tape` records operations on values of `block.tokens` rows.
    """

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
    embed_paths: tuple[str, ...] = ("model.embed_tokens",)
    """Paths of the embeddings, that of tokens first."""
    embed_sizes: tuple[tuple[int, int], ...] = ()
    """Rows and width of the embeddings after that of tokens."""
    activation: str = "silu"
    dropout: float = 0.0
    """Residual dropout, after each attention and each feed-forward block."""
    attention_dropout: float = 0.0
    """On the attention weights; 0 for families whose published configurations have none."""
    float_softmax: bool = True
    """Eager attention computes the softmax in float32."""
    rotary_share: float = 1.0
    """Share of each head that rotary embeddings rotate."""
    rotary_joined: bool = False
    """The rotated share is cut out of each head, and joined with the rest by a copy."""
    window: int = 0
    """Positions that a token attends to; 0: all before it."""
    windowed: tuple[int, ...] | None = None
    """Indices of the layers that have the window; None: all of this kind."""
    causal: bool = True
    """Causal attention; otherwise a batch without padding needs no mask."""
    masks: int = 1
    """Masks of positions that eager attention makes for a batch: of sliding and of full attention."""
    experts: int = 0
    """Parameters of one layer's experts, which are no linears."""
    num_experts: int = 0
    active_inner: int = 0
    """Feed-forward width per token, over all selected experts."""
    expert_adapters: bool = True
    """`all-linear` reaches the experts and their router."""
    decoder: Layout | None = None
    """The decoder of an encoder-decoder model."""
    others: tuple[Layout, ...] = ()
    """The other kinds of layers of the same stack; what is no layer's own is this layout's alone."""

    rms_norm: ClassVar[bool] = True
    """RMSNorm in Python, which upcasts to float32; else the fused LayerNorm."""
    drops_embeddings: ClassVar[bool] = False
    """A part of what the first layer reads is dropped, too."""

    def run(self, tape: Tape, block: Block, x: Value) -> Value:
        """One layer: what it makes of the stream `x` of `block.tokens` x `block.hidden` values."""
        raise NotImplementedError

    def norm(self, tape: Tape, block: Block, x: Value, width: int) -> Value:
        """A norm over the last `width` values of `x`."""
        raise NotImplementedError

    def norm_params(self, width: int) -> int:
        """Parameters of such a norm."""
        return width

    def route(self, tape: Tape, block: Block, x: Value) -> Value:
        """The weight of each chosen expert of each token."""
        raise NotImplementedError

    def last(self, tape: Tape, block: Block, x: Value) -> Value:
        """What follows the last layer: the final norm, unless each layer ends with one."""
        return self.norm(tape, block, x, block.hidden)

    def narrowed(self, tape: Tape, block: Block, x: Value) -> Value:
        """Hidden states as a language model's head reads them."""
        return x

    def logits(self, tape: Tape, block: Block, logits: Value) -> Value:
        """What becomes of the head's product."""
        return logits

    def with_head(self, sizes: Sizes, head: HeadKind) -> Self:
        """The layout of the class that has this head: some add a block before it, or leave a pooler out."""
        return self

    def fit(self, block: Block) -> Block:
        """The block with what this kind of layers has of its own: sizes of heads."""
        return block

    def shared(self, block: Block, grad: bool) -> int:
        """Bytes that all layers keep once; `grad`: the first layer's input asks for a gradient.

        Factors of rotary positions, of each token's place, and what dropout of the embeddings keeps.
        """
        d, kept = block.dtypes, 0
        if not self.positions:
            kept = 2 * block.length * int(block.head_dim * self.rotary_share) * d.residual
        if self.drops_embeddings and self.dropout and grad:
            kept += block.tokens * block.hidden * (d.residual if d.on_cpu else 1)
        return kept

    @property
    def shared_by(self) -> int:
        """Layers of one stack with equal numbers keep these bytes together."""
        return 0

    def embedded(self, block: Block) -> int:
        """Bytes that are kept between the embeddings and the first layer; `block`: its own."""
        return 0

    def own_inputs(self, block: Block) -> tuple[Tape, Value] | None:
        """What makes inputs of each layer's own before the first layer, whose `block` it is."""
        return None

    def own_keys(self, block: Block) -> tuple[Tape, Value, Value] | None:
        """Keys and values that later layers of the same window read; None: nobody does."""
        return None

    @property
    def reads_keys(self) -> bool:
        """Keys and values are those of the last layer before with the same window that has its own."""
        return False

    @property
    def layer_table(self) -> tuple[int, int]:
        """Rows and width of the embedding of such inputs, of all layers side by side."""
        return 0, 0

    @property
    def table_params(self) -> int:
        """Parameters of the embedding of the layers' own inputs."""
        return self.layer_table[0] * self.layer_table[1]

    @property
    def attentions(self) -> int:
        """Attentions of a layer."""
        return 1

    @property
    def scans(self) -> bool:
        """Something with kernels of its own packages mixes the tokens, counted as torch's operations."""
        return False

    @property
    def biases_scores(self) -> bool:
        """Learned numbers are added to attention's scores."""
        return False

    @property
    def caps_scores(self) -> bool:
        """Attention soft-caps its scores with tanh."""
        return False

    @property
    def caps_logits(self) -> bool:
        """The logits are soft-capped with tanh."""
        return False

    @property
    def tokens_per_sample(self) -> int | None:
        """Sequence length where the configuration decides it (image patches)."""
        return None

    @property
    def image_values(self) -> int:
        """Values (pixels x channels) of one image."""
        return 0

    @property
    def mask_buffer(self) -> int:
        """Bytes of a causal-mask buffer on the device."""
        return 0

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

    def reading(self, *reads: str) -> list[Linear]:
        """The linears that multiply one of these activations."""
        return [one for one in self.linears if one.reads in reads]

    def linear(self, name: str) -> Linear:
        """The first linear of this name."""
        return next(one for one in self.linears if one.name == name)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of a stack at one batch: everything that its memory depends on."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: Layout
    dtypes: Dtypes
    attention: str
    """eager | sdpa | flash_attention_2 | flex_attention | varlen"""
    rows: int
    length: int
    """Tokens of a row."""
    masked: bool = False
    """Attention gets a mask of positions."""
    padded: bool = False
    """Some of the tokens are padding."""
    rank: int = 0
    """Of the LoRA adapters."""
    adapted: tuple[str, ...] | None = None
    """Paths of the linears that have an adapter; None: all of them."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are trained completely beside the adapters."""
    adapter_dropout: bool = False
    quantization: str = "none"
    liger: bool = False
    chunked: bool = False
    """The loss is computed by chunks of tokens."""
    one_by_one: bool = False
    """Attention is computed document by document."""
    grouped: bool = True
    """CUDA's 16-bit kernel of this attention takes keys of groups of heads."""
    cast_inputs: bool = True
    """An adapter copies its input into its own dtype."""
    grad: bool = True
    """The input needs a gradient; a frozen embedding's output does not."""
    inputs_grad: bool = False
    """The layers' own inputs need one."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def full(self) -> bool:
        """The model itself is trained."""
        return self.dtypes.adapter is None

    @property
    def float_operations(self) -> bool:
        """CUDA's autocast computes norms, powers and softmax in float32; a CPU's leaves them alone."""
        return self.dtypes.autocast and not self.dtypes.on_cpu


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal layers, one after another."""

    block: Block
    layers: int
    first: Block
    """The first layer: the output of a frozen embedding asks for no gradient."""
    decodes: bool = False
    """It reads what the encoder before it has made."""


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


def without_adapters(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Linears that `all-linear` does not reach, such as those beside experts (peft's
    `_MOE_TARGET_MODULE_MAPPING`)."""
    return tuple(replace(one, skipped=True) for one in linears)
