"""Bytes of weights, gradients and optimizer states: what one rank holds of each tensor. Pure arithmetic.

What engines do differently is in engines/. Rules as read in torch 2.13 (a state has its parameter's dtype),
bitsandbytes 0.50 (optim/optimizer.py), torchao's optimizers, transformers 5.23 (optimization.Adafactor;
trainer_optimizer.py for the names) and peft 0.21 (adapters of a 16-bit base are float32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.models.layers.layout import WIDTHS, Layout
from launcher.models.model import ModelSpec

MIXED = ("bf16", "fp16")
"""Precisions that compute in 16 bits with float32 weights."""


@dataclass(frozen=True, slots=True)
class StateWidths:
    """Bytes per trainable parameter of each kind of state, before sharding."""

    weight: float
    gradient: float
    optimizer: float
    """Optimizer states of a large tensor and, where the engine keeps one, the float32 master copy."""

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.optimizer


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one device, and what one rank keeps elsewhere."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    """States that were offloaded to host memory, most of it page-locked."""
    staging: int = 0
    """Page-locked buffers through which offloaded states travel."""
    pinned: tuple[int, ...] = ()
    """Sizes of the page-locked buffers, each counted in `host` or `staging`."""
    pageable: int = 0
    """Paged optimizer states: in host memory as soon as the device is full."""
    nvme: int = 0
    """Files of offloaded states."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def shard_states(
    trainable: int,
    frozen_bytes: int,
    widths: StateWidths,
    *,
    stage: int,
    data_parallel: int,
    optimizer_bytes: int | None = None,
) -> States:
    """Spread states over the ranks: stage 1 the optimizer, 2 also gradients, 3 also weights.

    optimizer_bytes: counted tensor by tensor, in place of the width of large tensors.
    """

    def spread(size: int, from_stage: int) -> int:
        return -(-size // data_parallel) if stage >= from_stage else size

    optimizer = int(trainable * widths.optimizer) if optimizer_bytes is None else optimizer_bytes
    return States(
        weights=spread(int(trainable * widths.weight) + frozen_bytes, 3),
        gradients=spread(int(trainable * widths.gradient), 2),
        optimizer=spread(optimizer, 1),
    )


def base_weight_bytes(
    spec: ModelSpec,
    dtype: str,
    quantization: str = "none",
    *,
    double_quant: bool = True,
    upcast_rest: bool = False,
) -> int:
    """Bytes of the base model's parameters as stored.

    Quantisation replaces the linears except the head, and in 4 bits the experts. `upcast_rest`: every other
    16-bit parameter was cast to float32, as prepare_model_for_kbit_training does.
    """
    if quantization == "none":
        return spec.loaded_params * WIDTHS[dtype]
    packed = spec.quantized_weights(quantization)
    rest = (spec.loaded_params - packed) * (4 if upcast_rest else WIDTHS[dtype])
    constants = quantized_constants(spec, quantization, double_quant=double_quant)
    return (packed if quantization == "int8" else packed // 2) + rest + constants


def quantized_constants(spec: ModelSpec, quantization: str, *, double_quant: bool) -> int:
    """Bytes of the constants by which packed weights are multiplied."""
    if quantization == "int8":  # one float32 per row
        return 4 * sum(linear.out_features * linear.count for linear in spec.linears)
    # 4-bit: one float32 per 64 weights; quantised again: 1 byte, and one float32 per 256.
    per_block = 1 + 4 / 256 if double_quant else 4
    return int(spec.quantized_weights(quantization) / 64 * per_block)


SMALL_VALUES = 4096
"""Tensors of fewer values keep 32-bit states in an 8-bit optimizer."""
PAGED_VALUES = 100_000
"""Tensors of fewer values are not paged."""

Library = Literal["torch", "bnb", "torchao", "adafactor"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps of each value."""

    moments: int
    library: Library = "torch"
    bits: int = 32
    """Of one moment; in `torch` it has the parameter's dtype instead."""
    block: int = 256
    """Values that share one float32 scale, where `bits` is below 32."""
    paged: bool = False
    """Large states are allocated as memory that CUDA moves between host and device."""
    exact: bool = True
    """False: counted as an upper bound."""

    def per_value(self, width: float) -> float:
        """Bytes per value of a large tensor whose values have `width` bytes."""
        if self.library == "torch":
            return self.moments * width
        scale = 4 / self.block if self.bits < 32 else 0
        return self.moments * (self.bits / 8 + scale)


ADAMW = Optimizer(2)
_BNB_ADAMW_8BIT = Optimizer(2, "bnb", 8)
OPTIMIZERS: dict[str, Optimizer] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), ADAMW),
    "adamw_torch_8bit": Optimizer(2, "torchao", 8),
    "adamw_torch_4bit": Optimizer(2, "torchao", 4, 128),
    "adamw_8bit": _BNB_ADAMW_8BIT,
    "adamw_bnb_8bit": _BNB_ADAMW_8BIT,
    "paged_adamw_8bit": Optimizer(2, "bnb", 8, paged=True),
    "paged_adamw_32bit": Optimizer(2, "bnb", paged=True),
    "lion_8bit": Optimizer(1, "bnb", 8),
    "lion_32bit": Optimizer(1, "bnb"),
    "paged_lion_8bit": Optimizer(1, "bnb", 8, paged=True),
    "paged_lion_32bit": Optimizer(1, "bnb", paged=True),
    "ademamix": Optimizer(3, "bnb"),
    "ademamix_8bit": Optimizer(3, "bnb", 8),
    "paged_ademamix_32bit": Optimizer(3, "bnb", paged=True),
    "paged_ademamix_8bit": Optimizer(3, "bnb", 8, paged=True),
    "rmsprop": Optimizer(1),
    "rmsprop_bnb": Optimizer(1, "bnb"),
    "rmsprop_bnb_32bit": Optimizer(1, "bnb"),
    "rmsprop_bnb_8bit": Optimizer(1, "bnb", 8),
    "adagrad": Optimizer(1),
    "sgd": Optimizer(0),
    "adafactor": Optimizer(1, "adafactor"),
}


def optimizer_of(name: str, options: str = "") -> Optimizer:
    """The optimizer of a `TrainingArguments.optim` name; `options` is its `optim_args`.

    A name that is not listed is counted as AdamW and marked: the low-rank, schedule-free and fused-update
    optimizers keep at most that.
    """
    known = OPTIMIZERS.get(name, Optimizer(2, exact=False))
    if name in ("sgd", "rmsprop"):
        given = dict(part.split("=", 1) for part in options.replace(" ", "").split(",") if "=" in part)
        more = int(float(given.get("momentum", 0)) != 0)
        more += int(name == "rmsprop" and given.get("centered", "").lower() in ("true", "1", "yes"))
        return Optimizer(known.moments + more)
    return known


@dataclass(frozen=True, slots=True)
class Shape:
    """`count` equal tensors of `stacks` matrices, or vectors where `columns` is 1."""

    rows: int
    columns: int = 1
    count: int = 1
    stacks: int = 1
    embedding: bool = False

    @property
    def values(self) -> int:
        """Of one tensor."""
        return self.rows * self.columns * self.stacks


def model_shapes(spec: ModelSpec) -> list[Shape]:
    """The parameters of a model as tensors.

    Of an unknown family its own; else norms, routers and the like as vectors of the hidden width.
    """
    if spec.foreign_parameters:
        return [_shape(*found) for found in spec.foreign_parameters]
    layout, hidden = spec.layout, spec.hidden_size
    shapes = []
    for linear in spec.linears:
        shapes.append(Shape(linear.out_features, linear.in_features, linear.count))
        if linear.bias:
            shapes.append(Shape(linear.out_features, count=linear.count))
    if layout.embed_width:
        shapes.append(Shape(spec.vocab_size, layout.embed_width, embedding=True))
    if layout.table_params:
        shapes.append(Shape(*layout.layer_table, embedding=True))
    if layout.positions:
        shapes.append(Shape(layout.positions, hidden, embedding=layout.embed_width > 0))
    for stack in layout.stacks:
        if stack.num_experts:
            inner = stack.experts // (3 * stack.num_experts * hidden)
            shapes.append(Shape(2 * inner, hidden, stack.layers, stack.num_experts))
            shapes.append(Shape(hidden, inner, stack.layers, stack.num_experts))
        rest = stack.layers * (stack.layer_extra - stack.experts) + stack.model_extra
        shapes += _vectors(rest, hidden)
    head = spec.head
    own_heads = int(not head.tied and head.out_features > 0) + int(spec.loaded_params > spec.params)
    if own_heads:
        shapes.append(Shape(head.out_features, head.in_features, own_heads))
        if head.bias and not head.tied:
            shapes.append(Shape(head.out_features))
    return shapes


def _shape(sizes: tuple[int, ...], embedding: bool, count: int) -> Shape:
    *stacks, rows, columns = (1, *sizes, 1) if len(sizes) < 2 else sizes
    return Shape(rows, columns, count, math.prod(stacks), embedding)


def _vectors(values: int, width: int) -> list[Shape]:
    whole, rest = divmod(values, width)
    return [Shape(size, count=n) for size, n in ((width, whole), (rest, 1)) if size and n]


def adapter_shapes(spec: ModelSpec, trainable: int, adapted: Sequence[str] | None) -> list[Shape]:
    """LoRA's pairs, of the mean rank that gives this number of trainable parameters.

    `adapted`: paths of the linears that have one, None for all.
    """
    saved = spec.head.own_params if spec.head.saved else 0
    linears = [x for x in spec.linears if (not x.skipped if adapted is None else x.path in adapted)]
    linears = linears or list(spec.linears)
    width = sum((x.in_features + x.out_features) * x.count for x in linears)
    rank = max(1, (trainable - saved) // max(width, 1))
    shapes = [Shape(rank, x.in_features, x.count) for x in linears]
    shapes += [Shape(x.out_features, rank, x.count) for x in linears]
    if saved:
        shapes.append(Shape(spec.head.out_features, spec.head.in_features))
    return shapes


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes of optimizer states."""

    device: int
    pageable: int = 0
    """Of them in memory that CUDA moves to the host when the device is full."""


def _tensor(optimizer: Optimizer, shape: Shape, width: float, named: bool) -> tuple[float, int]:
    """Bytes of one tensor's states, and of their scales."""
    values = shape.values
    if optimizer.library == "adafactor":
        factored = shape.stacks * (shape.rows + shape.columns) if shape.columns > 1 else values
        return 4 * factored, 0
    if optimizer.bits == 32:
        return optimizer.per_value(width) * values, 0
    if values < SMALL_VALUES or (named and shape.embedding and optimizer.library == "bnb"):
        return 4 * optimizer.moments * values, 0
    blocks = -(-values // optimizer.block)
    return optimizer.moments * values * optimizer.bits / 8, 4 * optimizer.moments * blocks


def moments(optimizer: Optimizer, shapes: Sequence[Shape], width: float, *, named: bool) -> Moments:
    """States of all tensors of `shapes`, whose values have `width` bytes.

    `named`: the optimizer sees the model's own parameters, so transformers' exception holds, which keeps
    the states of embeddings in 32 bits where bitsandbytes would keep 8.
    """
    device, pageable = 0.0, 0.0
    for shape in shapes:
        states, scales = _tensor(optimizer, shape, width, named)
        if optimizer.paged and shape.values >= PAGED_VALUES:
            pageable += states * shape.count
            states = 0
        device += (states + scales) * shape.count
    return Moments(int(device), int(pageable))


def read_experts(spec: ModelSpec) -> int:
    """Bytes of the 16-bit tensors that are there while the largest parameter of experts is read.

    Gate and up projections of all experts of a layer, stacked each, and both as one.
    """
    largest = max(stack.experts * 2 // 3 for stack in spec.layout.stacks)
    return 2 * 2 * max(largest, *spec.foreign_experts, 0)


def layer_values(spec: ModelSpec) -> int:
    """Parameters of the widest layer."""
    return max(map(layer_params, spec.layout.stacks))


def layer_params(stack: Layout) -> int:
    """Parameters of one of its layers."""
    linears = sum(linear.params // linear.count for linear in stack.linears if "{}" in linear.path)
    return linears + stack.layer_extra


def packed_layer(spec: ModelSpec, width: int) -> int:
    """Bytes of the widest layer whose matrices are packed in 4 bits; `width`: of its other values."""
    inside = [
        (sum(x.weights for x in stack.linears if "{}" in x.path) + stack.experts, stack)
        for stack in spec.layout.stacks
    ]
    return max(packed // 2 + width * (layer_params(stack) - packed) for packed, stack in inside)


def largest_tensor(spec: ModelSpec) -> int:
    """Values of the largest single parameter."""
    return max(shape.values for shape in model_shapes(spec))
