"""Bytes of weights, gradients and optimizer states on one device. Pure arithmetic.

Rules as read in DeepSpeed 0.19.8 (runtime/engine.py, runtime/zero), torch 2.13 (FSDP2; an optimizer keeps
its states in the parameter's dtype), accelerate 1.15 (utils/fsdp_utils.py) and peft 0.21 (adapters of a
16-bit base are in float32). What others publish instead stands in published.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.model import ModelSpec
from launcher.memory.job import WIDTHS
from launcher.memory.optimizers import optimizer_of

MIXED = ("bf16", "fp16")
"""Precisions that compute in 16 bits beside float32 weights."""


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


def engine_width(precision: str) -> int:
    """Bytes of a value in DeepSpeed's module, which it casts as a whole."""
    return 4 if precision == "fp32" else 2


def master_width(precision: str, zero_stage: int) -> int:
    """Bytes per parameter of DeepSpeed's master copy.

    ZeRO clones its partition even where the parameters are float32 already: stage 3 means to spare that,
    but compares a device with its name, which are never equal.
    """
    return 4 if zero_stage or precision != "fp32" else 0


def trained_width(engine: str, precision: str, dtype: str, adapter: bool) -> int:
    """Bytes of a trained value outside DeepSpeed."""
    if engine == "fsdp" and precision in MIXED:
        # accelerate casts trained parameters up to float32 before it shards them.
        return 4
    return 4 if adapter else WIDTHS[dtype]


def adapter_width(precision: str, zero_stage: int) -> int:
    """Bytes of an adapter's value under DeepSpeed.

    The engine casts the whole module, but not one whose weights were sharded while they were made: stage 3
    leaves adapters in peft's float32, and each of their products casts its input up.
    """
    return 4 if zero_stage == 3 else engine_width(precision)


def state_widths(
    engine: str, precision: str, dtype: str, zero_stage: int, optim: str, adapter: bool
) -> StateWidths:
    """Widths for an engine: DDP keeps parameters as loaded, FSDP2 in float32, DeepSpeed casts the module.

    `precision` is fp32 | bf16 | fp16 | bf16-true | fp16-true; `dtype` that of the loaded weights.
    """
    optimizer = optimizer_of(optim)
    if engine == "deepspeed":
        width = engine_width(precision)
        weight = adapter_width(precision, zero_stage) if adapter else width
        return StateWidths(weight, width, master_width(precision, zero_stage) + optimizer.per_value(4))
    width = trained_width(engine, precision, dtype, adapter)
    return StateWidths(width, width, optimizer.per_value(width))


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
    zero_stage: int,
    data_parallel: int,
    optimizer_bytes: int | None = None,
) -> States:
    """Spread states over the ranks: stage 1 the optimizer, 2 also gradients, 3 also weights.

    `optimizer_bytes`: counted tensor by tensor, in place of the width of large tensors.
    """

    def spread(size: int, stage: int) -> int:
        return -(-size // data_parallel) if zero_stage >= stage else size

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
    scales: bool = True,
) -> int:
    """Bytes of the base model's parameters as stored.

    Quantisation replaces the linears except the head. `upcast_rest`: every other 16-bit parameter
    was cast to float32, as prepare_model_for_kbit_training does. `scales`: count
    the quantisation constants.
    """
    if quantization == "none":
        return spec.loaded_params * WIDTHS[dtype]
    rest = (spec.loaded_params - spec.linear_weights) * (4 if upcast_rest else WIDTHS[dtype])
    if quantization == "int8":
        row_scales = 4 * sum(linear.out_features * linear.count for linear in spec.linears)
        return spec.linear_weights + rest + (row_scales if scales else 0)
    # 4-bit: one float32 constant per 64 weights; quantised again: 1 byte, and one float32 per 256.
    per_block = 1 + 4 / 256 if double_quant else 4
    constants = int(spec.linear_weights / 64 * per_block) if scales else 0
    return spec.linear_weights // 2 + rest + constants


def int8_footprint(spec: ModelSpec) -> int:
    """What `get_memory_footprint()` reports for the model loaded in int8 with a float16 rest.

    Parameters and buffers; the rows' scales hang on the quantised parameter and are not reported.
    """
    weights = base_weight_bytes(spec, "float16", "int8", scales=False)
    return weights + spec.layout.mask_buffer
