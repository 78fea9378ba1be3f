"""Bytes of weights, gradients and optimizer states on one device. Pure arithmetic.

Rules as read in DeepSpeed 0.19.8 (runtime/engine.py, runtime/zero), torch 2.13 (an optimizer keeps
its states in the parameter's dtype) and peft 0.21 (adapters of a 16-bit base are in float32).
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.model import ModelSpec

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value."""

_SCALE_BLOCK = 256
# Bytes per parameter of optimizer states, parameters in float32. 8-bit states carry one
# float32 scale per block of 256 values each.
_ADAM_8BIT = 2 + 2 * 4 / _SCALE_BLOCK
_OPTIMIZER_BYTES = {
    "adamw_8bit": _ADAM_8BIT,
    "adamw_bnb_8bit": _ADAM_8BIT,
    "paged_adamw_8bit": _ADAM_8BIT,
    "lion_8bit": _ADAM_8BIT / 2,
    "paged_lion_8bit": _ADAM_8BIT / 2,
    "lion_32bit": 4.0,
    "paged_lion_32bit": 4.0,
    "rmsprop": 4.0,
    "adagrad": 4.0,
    "sgd": 0.0,
    # Row and column sums only; 1/64 covers matrices of width 512 and up.
    "adafactor": 4 / 64,
}


def optimizer_state_bytes(optim: str) -> float:
    """Bytes of states per float32 parameter for a `TrainingArguments.optim` name; AdamW 8."""
    return _OPTIMIZER_BYTES.get(optim, 8.0)


@dataclass(frozen=True, slots=True)
class StateWidths:
    """Bytes per trainable parameter of each kind of state, before sharding."""

    weight: float
    gradient: float
    optimizer: float
    """Optimizer states and, where the engine keeps one, the float32 master copy."""

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.optimizer


def state_widths(
    engine: str, precision: str, dtype: str, zero_stage: int, optim: str, adapter: bool
) -> StateWidths:
    """Widths for an engine: DDP keeps parameters as loaded, DeepSpeed casts the module.

    `precision` is fp32 | bf16 | fp16 | bf16-true | fp16-true; `dtype` that of the loaded weights.
    """
    states = optimizer_state_bytes(optim)
    if engine == "deepspeed":
        if precision == "fp32":
            # ZeRO clones its partition as the master copy even where the parameters are float32.
            master = 4 if zero_stage else 0
            return StateWidths(4, 4, master + states)
        return StateWidths(2, 2, 4 + states)
    width = 4 if adapter else WIDTHS[dtype]
    # torch keeps states like the parameter; block-wise 8-bit states do not depend on it.
    scale = 1.0 if "8bit" in optim else width / 4
    return StateWidths(width, width, states * scale)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one device, and in the host memory of one node."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0

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
    devices_per_node: int = 1,
    offload_optimizer: bool = False,
    offload_param: bool = False,
) -> States:
    """Spread states over the ranks: stage 1 the optimizer, 2 also gradients, 3 also weights."""
    weights = int(trainable * widths.weight) + frozen_bytes
    gradients = int(trainable * widths.gradient)
    optimizer = int(trainable * widths.optimizer)
    if zero_stage >= 1:
        optimizer = -(-optimizer // data_parallel)
    if zero_stage >= 2:
        gradients = -(-gradients // data_parallel)
    if zero_stage >= 3:
        weights = -(-weights // data_parallel)
    host = 0
    local = min(devices_per_node, data_parallel)
    if offload_optimizer:
        # The gradient partition is copied to the host in float32 for the update there.
        host += local * (optimizer + -(-4 * trainable // data_parallel))
        optimizer = 0
        gradients = 0 if zero_stage >= 2 else gradients
    if offload_param:
        host += local * weights
        weights = 0
    return States(weights, gradients, optimizer, host)


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


def overlap_comm_upper_bound(bucket_elements: int) -> int:
    """Hugging Face's documented rule for `overlap_comm`: 4.5 buckets, twice, in 16 bits.

    The installed code allocates two buckets, which is the estimate; this is the end of the range.
    """
    return int(4.5 * bucket_elements * 2 * 2)
