"""What the DeepSpeed configs set that axolotl ships in its folder `deepspeed_configs` (axolotl 0.21)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_BF16 = {"bf16": {"enabled": True}}
_COMPILED = {"compile": {"disable": False, "backend": "inductor"}}
_CPU = {"device": "cpu"}
_ONE = {"stage": 1, "overlap_comm": True}
_TWO = {"stage": 2, "overlap_comm": True, "offload_optimizer": _CPU}
_THREE = {
    "stage": 3, "overlap_comm": True, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0,
}  # fmt: skip
_OFFLOADED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, **_BF16}
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"zero_optimization": _ONE},
    "zero1_torch_compile": {"zero_optimization": _ONE, **_COMPILED},
    "zero2": {"zero_optimization": _TWO},
    "zero2_torch_compile": {"zero_optimization": _TWO, **_COMPILED},
    "zero3": {"zero_optimization": _THREE},
    "zero3_bf16": {"zero_optimization": _THREE, **_BF16},
    "zero3_bf16_cpuoffload_params": {"zero_optimization": {**_THREE, "offload_param": _CPU}, **_OFFLOADED},
    "zero3_bf16_cpuoffload_all": {
        "zero_optimization": {**_THREE, "offload_param": _CPU, "offload_optimizer": _CPU},
        **_OFFLOADED,
    },
}
"""Name -> what is set in it; "auto" and defaults are left out."""


def shipped(file: str) -> Mapping[str, Any] | None:
    """The config that a recipe of axolotl names (`deepspeed_configs/zero2.json`), if axolotl ships it."""
    path = PurePath(file)
    known = (path.parent.name, path.suffix) == ("deepspeed_configs", ".json")
    return SHIPPED.get(path.stem) if known else None
