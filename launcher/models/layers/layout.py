"""The layers of one kind, one of them at a batch (a block), and the tape that records what it keeps.

`Layout` has the facts that decide parameters and saved activations, and what a plan asks of them; a family's
subclass (launcher/models/families/) says what one layer does, with the operations of `LayerTape`. Names and
shapes follow transformers 5.23; tests/contract/test_param_counts.py compares them with the real classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from launcher.models.layers.linears import Linear, Sizes
from launcher.models.layers.tape import Storage, Tape, Value
from launcher.tasks.task import HeadKind

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value."""


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

    # What some families alone have, as attributes of their classes or fields.
    rms_norm = True
    """RMSNorm in Python, which upcasts to float32; else the fused LayerNorm."""
    drops_embeddings = False
    """A part of what the first layer reads is dropped, too."""
    biases_scores = False
    """Learned numbers are added to attention's scores."""
    caps_scores = False
    """Attention soft-caps its scores with tanh."""
    caps_logits = False
    """The logits are soft-capped with tanh."""
    reads_keys = False
    """Keys and values are those of the last layer before with the same window that has its own."""
    image_values = 0
    """Values (pixels x channels) of one image."""
    mask_buffer = 0
    """Bytes of a causal-mask buffer on the device."""

    def run(self, tape: LayerTape, x: Value) -> Value:
        """One layer: what it makes of the stream `x` of `block.tokens` x `block.hidden` values."""
        raise NotImplementedError

    def norm(self, tape: LayerTape, x: Value, width: int) -> Value:
        """A norm over the last `width` values of `x`."""
        raise NotImplementedError

    def norm_params(self, width: int) -> int:
        """Parameters of such a norm."""
        return width

    def route(self, tape: LayerTape, x: Value) -> Value:
        """The weight of each chosen expert of each token."""
        raise NotImplementedError

    def last(self, tape: LayerTape, x: Value) -> Value:
        """What follows the last layer: the final norm, unless each layer ends with one."""
        return self.norm(tape, x, tape.block.hidden)

    def narrowed(self, tape: LayerTape, x: Value) -> Value:
        """Hidden states as a language model's head reads them."""
        return x

    def logits(self, tape: LayerTape, logits: Value) -> Value:
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
    def tokens_per_sample(self) -> int | None:
        """Sequence length where the configuration decides it (image patches)."""
        return None

    @property
    def scans(self) -> bool:
        """Something with kernels of its own packages mixes the tokens, counted as torch's operations."""
        return False

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

    @property
    def input_bytes(self) -> int:
        """Of one layer's input, which is as large as its output."""
        return self.block.tokens * self.block.hidden * self.block.dtypes.residual


STORED = Storage(0)
"""A weight that is kept without a copy: a checkpoint computes again when its derivative is wanted."""


class LayerTape(Tape):
    """The tape of one block, with the operations that layers are made of.

    As read in transformers 5.23, torch 2.13 (autocast_mode: every product casts its inputs; `mm` keeps its
    input where the weight is trained, and the weight where the input needs a gradient), peft 0.21
    (tuners/lora/layer.py, bnb.py) and bitsandbytes 0.50 (autograd/_functions.py).
    """

    def __init__(self, block: Block, *, on_cpu: bool | None = None, learns: bool = True) -> None:
        super().__init__(block.dtypes.on_cpu if on_cpu is None else on_cpu, learns)
        self.block = block

    def cast(self, x: Value, width: int) -> Value:
        """A copy in another dtype; the tensor itself where it has that dtype."""
        if x.width == width:
            return x
        return self.step([x], x.elements, width)

    def dropout(self, x: Value, active: bool) -> Value:
        """A CPU keeps the factors of each value in its dtype, CUDA a bool."""
        if not active:
            return x
        mask = Storage(x.size if self.block.dtypes.on_cpu else x.elements)
        return self.step([x], x.elements, x.width, saves=[mask])

    def add(self, first: Value, second: Value) -> Value:
        """The sum, in the wider dtype."""
        return self.step([first, second], first.elements, max(first.width, second.width), passes=True)

    def product(self, x: Value, linear: Linear) -> Value:
        """What `linear` makes of `x`."""
        if self.block.dtypes.adapter is not None and linear.path not in self.block.whole:
            return self.adapted(x, linear, self.block.dtypes.adapter)
        bias = linear.out_features if linear.bias else 0
        return self.matrix(x, linear.out_features, linear.weights, params=linear.weights + bias)

    def matrix(self, x: Value, out: int, weights: int, *, params: int) -> Value:
        """A product with a stored matrix of `weights` entries; `params` of it are trained."""
        rows = x.elements // _inputs(weights, out)
        return self.matrices(x, rows * out, weights, params=params)

    def matrices(self, x: Value, elements: int, weights: int, *, params: int) -> Value:
        """As `matrix`, of one or of several that read a part of `x` each; `elements`: of the output."""
        d = self.block.dtypes
        width, saves = d.weight, [STORED]
        if d.autocast:
            x, width = self.cast(x, d.compute), d.compute
            if x.node is not None and d.weight != d.compute:
                saves.append(Storage(d.compute * weights, weight=True))
        if params or d.frozen_inputs:
            saves.append(x.storage)
        return self.step(
            [x], elements, width, saves=saves, params=params, fresh=width * params, makes_views=True
        )

    def adapted(self, x: Value, linear: Linear, width: int, *, packed: bool = True) -> Value:
        """A frozen product, and the two small ones of an adapter that is trained.

        `width`: bytes of an adapter's value. `packed`: the matrix is quantised where the model is.
        """
        out, quantization = linear.out_features, self.block.quantization if packed else "none"
        base = self.frozen(x, out, linear.weights, quantization)
        if linear.skipped if self.block.adapted is None else linear.path not in self.block.adapted:
            return base
        d = self.block.dtypes
        # peft's layers over quantised weights leave casts to autocast, but ask only whether CUDA's is on.
        conversion = quantization == "none" or not d.autocast or d.on_cpu
        source = self.cast(x, width) if conversion and self.block.cast_inputs else x
        dropped = self.dropout(source, self.block.adapter_dropout)
        inner = self._small(dropped, linear.in_features, self.block.rank, width)
        update = self._small(inner, self.block.rank, out, width)
        scaled = self.step([update], update.elements, update.width)
        for one in (x, source):  # an argument and a variable of the adapter's function
            self.reads(one)
        if quantization != "none":
            return self.add(base, self.cast(scaled, base.width) if conversion else scaled)
        return self.cast(self.add(base, scaled), base.width)

    def _small(self, x: Value, inputs: int, out: int, stored: int) -> Value:
        """A product with one of an adapter's matrices, whose values are `stored` as so many bytes."""
        d = self.block.dtypes
        width = d.compute if d.autocast else stored
        x = self.cast(x, width)
        rows = x.elements // inputs
        params = inputs * out
        saves = [x.storage]
        if width != stored and x.node is not None:
            saves.append(Storage(width * params, weight=True))
        return self.step(
            [x], rows * out, width, saves=saves, params=params, fresh=width * params, makes_views=True
        )

    def frozen(self, x: Value, out: int, weights: int, quantization: str) -> Value:
        """A product whose matrix is not trained, perhaps quantised."""
        d, inputs = self.block.dtypes, _inputs(weights, out)
        if quantization == "none":
            return self.matrix(x, out, weights, params=0)
        if quantization == "int8":
            # The function's context keeps the input itself, out of reach of saved-tensor hooks.
            if x.node is not None:
                self.hold(x.storage)
            rows = x.elements // inputs
            # The CPU's way is an ordinary product, which autocast narrows; CUDA's has the input's dtype.
            width = d.compute if d.autocast and d.on_cpu else x.width
            # The derivative unpacks the weight, and casts the gradient, to the input's dtype.
            temporary = x.width * weights + (x.width * rows * out if width != x.width else 0)
            return self.step([x], rows * out, width, temporary=temporary)
        # 4 bits: nothing is kept; the derivative unpacks the weight in the compute dtype, then casts it.
        inner = self.cast(x, d.compute)
        made = self.step([inner], x.elements // inputs * out, d.compute, temporary=d.compute * weights)
        return self.cast(made, x.width)

    def liger_norm(self, x: Value, width: int, *, in_place: bool = True) -> Value:
        """Liger's kernel keeps its input and one float32 per row; `in_place`: it writes gradients over their
        source."""
        saves = [x.storage, Storage(4 * (x.elements // width))]
        return self.step([x], x.elements, x.width, saves=saves, passes=in_place)

    def layer_norm(self, x: Value, width: int) -> Value:
        """The fused LayerNorm over the last `width` values of `x`."""
        rows = x.elements // width
        if self.block.float_operations:
            x = self.cast(x, 4)
        params = self.block.layout.norm_params(width) if self.block.full else 0
        statistics = Storage(8 * rows)
        return self.step(
            [x], x.elements, x.width, saves=[x.storage, statistics], params=params, fresh=x.width * params
        )

    def normalised(self, squared: Value, x: Value, width: int) -> Value:
        """`x * rsqrt(mean(squared ** 2))`, in float32."""
        n, rows = x.elements, x.elements // width
        # The derivative of a power holds the power below it and its multiple.
        power = self.step([squared], n, 4, saves=[squared.storage], temporary=2 * squared.size)
        mean = self.step([power], rows, 4)
        root = self.step([mean], rows, 4, save_out=True)
        saves = [root.storage]
        if root.node is not None:
            saves.append(x.storage)
        # The gradient of the factors is as wide as the values before it is summed.
        return self.step([x, root], n, 4, saves=saves, temporary=4 * n)

    def weighted(self, x: Value, width: int) -> Value:
        """`weight * x`; the weight's gradient is as wide as `x` before it is summed."""
        params = width if self.block.full else 0
        saves = [x.storage] if params else [STORED]
        temporary = x.size if params else 0
        return self.step(
            [x], x.elements, x.width, saves=saves, temporary=temporary, params=params, fresh=x.width * params
        )

    def rms_norm(self, x: Value, width: int, *, scales_input: bool = False) -> Value:
        """`scales_input`: the 16-bit input itself is scaled, in addition to the copy that was squared."""
        wide = self.cast(x, 4)
        read = x if scales_input else wide
        return self.weighted(self.cast(self.normalised(wide, read, width), x.width), width)

    def wide_norm(self, x: Value, width: int) -> Value:
        """An RMSNorm that multiplies by its weight in float32, before the result is narrowed."""
        wide = self.cast(x, 4)
        return self.cast(self.weighted(self.normalised(wide, wide, width), width), x.width)

    def plain_norm(self, x: Value, width: int) -> Value:
        """An RMSNorm without a weight."""
        wide = self.cast(x, 4)
        return self.cast(self.normalised(wide, wide, width), x.width)

    def bmm(self, first: Value, second: Value, elements: int) -> Value:
        """A product of two activations, each copied where heads are not contiguous."""
        d = self.block.dtypes
        if d.autocast:
            first, second = self.cast(first, d.compute), self.cast(second, d.compute)
        return self.step([first, second], elements, first.width, saves=[first.storage, second.storage])

    def broadcast(self, x: Value, factors: Value) -> Value:
        """`x` times fewer factors, whose gradient is as wide as `x` before it is summed."""
        width = max(x.width, factors.width)
        saves = [one.storage for one, other in ((x, factors), (factors, x)) if other.node is not None]
        temporary = x.elements * width if factors.node is not None else 0
        return self.step([x, factors], x.elements, width, saves=saves, temporary=temporary)

    def views(self, whole: Value, *sizes: int) -> list[Value]:
        """Parts of a product as views of it, whose gradients wait for each other."""
        both = self.step([whole], whole.elements, whole.width, view=whole.storage)
        if both.node is not None:
            both.node.joined = True
        return [self.step([both], n, whole.width, view=whole.storage, passes=True) for n in sizes]

    def times(self, first: Value, second: Value) -> Value:
        """A product of two activations, each of which the other's gradient reads."""
        saves = [x.storage for x, other in ((first, second), (second, first)) if other.node is not None]
        return self.step([first, second], first.elements, max(first.width, second.width), saves=saves)

    def activate(self, x: Value) -> Value:
        """The activation; most are one operation that keeps its input, a ReLU keeps its output."""
        n, w = x.elements, x.width
        name = self.block.layout.activation
        if name in ("relu", "relu2"):
            positive = self.step([x], n, w, save_out=True)
            return self._square(positive) if name == "relu2" else positive
        if name == "xielu":
            return self._xielu(x)
        if name != "gelu_new":
            return self.step([x], n, w, saves=[x.storage])
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), operation by operation.
        half = self.step([x], n, w)
        base = self.cast(x, 4) if self.block.float_operations else x
        w = base.width
        cube = self.step([base], n, w, saves=[base.storage], temporary=2 * n * w)
        total = self.add(x, self.step([cube], n, w))
        tanh = self.step([self.step([total], n, w)], n, w, save_out=True)
        return self.times(half, self.step([tanh], n, w, passes=True))

    def _square(self, x: Value) -> Value:
        wide = self.cast(x, 4) if self.block.float_operations else x
        return self.step([wide], x.elements, wide.width, saves=[wide.storage], temporary=2 * wide.size)

    def _xielu(self, x: Value) -> Value:
        """transformers' Python version.

        `where(x > 0, a * x * x + b * x, (expm1(min(x, e)) - x) * c + b * x)`; `a` and `c` are trained, in the
        dtype of the weights; with the model frozen they are constants.
        """
        n, trained, positive = x.elements, self.block.full, Value(x.elements, 1, Storage(x.elements), None)
        self.reads(positive)
        kept = [x.storage] if trained else []
        width = max(x.width, self.block.dtypes.weight)
        scaled = self.step([x], n, width, saves=kept, temporary=n * width if trained else 0)
        square = self.times(scaled, x)
        above = self.add(square, self.step([x], n, x.width))
        least = self.step([x], n, x.width, saves=[x.storage])
        base = self.cast(least, 4) if self.block.float_operations else least
        power = self.step([base], n, base.width, save_out=True)
        gap = self.step([power, x], n, power.width)
        kept = [gap.storage] if trained else []
        width = max(gap.width, self.block.dtypes.weight)
        curve = self.step([gap], n, width, saves=kept, temporary=n * width if trained else 0)
        below = self.add(curve, self.step([x], n, x.width))
        return self.step([above, below], n, max(above.width, below.width), saves=[positive.storage])


def _inputs(weights: int, out: int) -> int:
    return max(1, weights // max(out, 1))


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
