"""Figures that others publish, each exact by the rule that its page gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import FULL, STARCODER

from launcher.engines.deepspeed import DEEPSPEED
from launcher.memory.published import (
    HF_GRADIENTS,
    HF_OPTIMIZERS,
    HF_WEIGHTS,
    ZERO_PAPER,
    hf_page_bytes,
    overlap_comm_upper_bound,
    zero_paper_bytes,
)
from launcher.memory.states import StateWidths, base_weight_bytes, quantized_constants, shard_states


def test_starcoder_int8_footprint() -> None:
    """As `get_memory_footprint` reports it: parameters and buffers, without the scales of the rows."""
    weights = base_weight_bytes(STARCODER, "float16", "int8")
    weights -= quantized_constants(STARCODER, "int8", double_quant=False)
    assert weights + STARCODER.layout.mask_buffer == 15_939_612_672


def test_parts_of_the_starcoder_footprint() -> None:
    rest = STARCODER.params - STARCODER.linear_weights - STARCODER.embedding_params
    assert STARCODER.linear_weights == 15_162_408_960
    assert 2 * STARCODER.embedding_params == 704_643_072
    assert 2 * rest == 5_451_776
    assert STARCODER.layout.mask_buffer == 67_108_864


@pytest.mark.parametrize(("stage", "published"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_table(stage: int, published: float) -> None:
    job = replace(FULL, engine=DEEPSPEED, zero_stage=stage, precision="bf16", dtype="bfloat16")
    widths = job.engine.widths(job)
    assert widths == StateWidths(2, 2, 12)
    states = shard_states(7_500_000_000, 0, widths, stage=stage, data_parallel=64)
    assert states.total / 1e9 == pytest.approx(published, abs=0.05)
    assert zero_paper_bytes(7_500_000_000, 64, stage) / 1e9 == pytest.approx(published, abs=0.05)


def test_two_conventions_of_bytes_per_parameter() -> None:
    assert ZERO_PAPER == {"weights": 2, "gradients": 2, "optimizer": 12}
    assert sum(ZERO_PAPER.values()) == 16
    assert (HF_WEIGHTS, HF_GRADIENTS) == ({"fp32": 4, "mixed": 6}, 4)
    assert HF_OPTIMIZERS == {"adamw": 8, "adamw_8bit": 2, "sgd_momentum": 4}
    assert hf_page_bytes(1) == 18
    assert hf_page_bytes(1, "fp32") == 16
    assert hf_page_bytes(1, "mixed", "adamw_8bit") == 12
    assert hf_page_bytes(1, "mixed", "sgd_momentum") == 14


@pytest.mark.parametrize(("bucket", "expected"), [(500_000_000, 9.0e9), (200_000_000, 3.6e9)])
def test_overlap_comm_upper_bound(bucket: int, expected: float) -> None:
    assert overlap_comm_upper_bound(bucket) == expected
