"""DeepSpeed's own estimators beside the rules of its documentation."""

from __future__ import annotations

import pytest

from launcher.memory.published import deepspeed_zero2, deepspeed_zero3

pytest.importorskip("deepspeed")
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
from deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs as stage2,
)

PARAMS, LARGEST, GIB = 2_851_598_336, 32_899_072, 2**30


def test_stage_2_with_offload_is_what_the_page_says() -> None:
    host, device = stage2(PARAMS, num_gpus_per_node=8, cpu_offload=True)
    ours = deepspeed_zero2(PARAMS, 8, offload=True)
    assert (ours.device, ours.host) == (device, host)
    assert round(device / GIB, 2) == 5.31


def test_stage_2_without_offload_has_changed_since_the_page_was_written() -> None:
    host, device = stage2(PARAMS, num_gpus_per_node=8, cpu_offload=False)
    ours = deepspeed_zero2(PARAMS, 8, offload=False)
    assert ours.host == host
    assert round(ours.device / GIB, 2) == 15.93
    assert device == 2 * PARAMS + 18 * PARAMS // 8


@pytest.mark.parametrize(
    ("offload", "optimizer", "params"),
    [("all", True, True), ("optimizer", True, False), ("none", False, False)],
)
def test_stage_3(offload: str, optimizer: bool, params: bool) -> None:
    host, device, _ = stage3(
        PARAMS, LARGEST, num_gpus_per_node=8, cpu_offload=optimizer, cpu_offload_params=params, zero_init=True
    )
    ours = deepspeed_zero3(PARAMS, LARGEST, 8, offload=offload)
    assert (ours.device, ours.host) == (device, host)
