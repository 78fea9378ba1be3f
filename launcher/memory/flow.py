"""What decides the tensors of one layer: dtypes, sizes, attention, adapter. Pure types."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.architectures import Layout


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


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of a stack at one batch: everything that its memory depends on."""

    model_type: str
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
    """Paths of modules that are trained whole beside the adapters."""
    adapter_dropout: bool = False
    quantization: str = "none"
    liger: bool = False
    chunked: bool = False
    """The loss is computed by chunks of tokens."""
    one_by_one: bool = False
    """Attention is computed document by document."""
    cast_inputs: bool = True
    """An adapter copies its input into its own dtype."""
    grad: bool = True
    """The input needs a gradient; a frozen embedding's output does not."""

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
