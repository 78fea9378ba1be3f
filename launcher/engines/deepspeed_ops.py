"""What DeepSpeed compiles at the start of a run, and what that needs (0.19.8, op_builder/).

`doctor`, the checks before a start and the warnings of a plan read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.plan.plan import Plan

_QUANTIZED = tuple(
    f"zero_optimization.zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")
)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator; all of them need a C++ compiler, ninja and Python's headers."""

    used: Callable[[Plan], bool]
    """Whether the engine loads it."""
    nvcc: bool = False
    """Whether it needs the CUDA toolkit on GPUs: a CUDAOpBuilder asks nvcc for its version (builder.py,
    `nvcc_args`), also where all of its sources are C++."""
    libaio: bool = False
    instead: str = ""
    """What to do without the toolkit."""


def _offloads(plan: Plan, *devices: str) -> bool:
    return bool({plan.job.offload_optimizer, plan.job.offload_param} & set(devices))


OPERATORS: Mapping[str, Operator] = {
    "cpu_adam": Operator(lambda plan: plan.job.offload_optimizer != "none"),
    "fused_adam": Operator(
        lambda plan: (
            plan.job.offload_optimizer == "none"
            and any(key.startswith("optimizer") for key in plan.deepspeed.profile)
        ),
        nvcc=True,
        instead="remove `optimizer` from the DeepSpeed config",
    ),
    "async_io": Operator(
        lambda plan: _offloads(plan, "nvme"), nvcc=True, libaio=True, instead="offload to cpu, not to nvme"
    ),
    "quantizer": Operator(
        lambda plan: plan.job.zero_stage == 3 and any(plan.deepspeed.profile.get(key) for key in _QUANTIZED),
        nvcc=True,
        instead="remove zero_quantized_* (ZeRO++) from the DeepSpeed config",
    ),
    "deepspeed_shm_comm": Operator(lambda plan: plan.hardware.is_cpu),
}


def used_operators(plan: Plan) -> list[str]:
    """The operators that the run loads."""
    return [name for name, operator in OPERATORS.items() if operator.used(plan)]
