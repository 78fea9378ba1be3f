"""Figures that others publish, each exact by the rule that its page gives."""

from __future__ import annotations

import pytest
from memory_cases import GIB, LLAMA_7B, STARCODER

from launcher.facts.model import read_model_spec
from launcher.memory.published import (
    HF_GRADIENTS,
    HF_OPTIMIZERS,
    HF_WEIGHTS,
    ZERO_PAPER,
    deepspeed_zero2,
    deepspeed_zero3,
    hf_page_bytes,
    llama_6b_rule,
    overlap_comm_upper_bound,
    zero_paper_bytes,
)
from launcher.memory.states import StateWidths, int8_footprint, shard_states, state_widths

T5_3B = read_model_spec(
    "t5-3b",
    {"model_type": "t5", "d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24},
    "test",
    "seq2seq-lm",
)
"""The model of DeepSpeed's memory page: 2851M parameters, largest layer 32M (its embedding)."""
LARGEST = T5_3B.vocab_size * T5_3B.hidden_size


def test_starcoder_int8_footprint() -> None:
    assert int8_footprint(STARCODER) == 15_939_612_672


def test_parts_of_the_starcoder_footprint() -> None:
    rest = STARCODER.params - STARCODER.linear_weights - STARCODER.embedding_params
    assert STARCODER.linear_weights == 15_162_408_960
    assert 2 * STARCODER.embedding_params == 704_643_072
    assert 2 * rest == 5_451_776
    assert STARCODER.layout.mask_buffer == 67_108_864


@pytest.mark.parametrize(("stage", "published"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_table(stage: int, published: float) -> None:
    widths = state_widths("deepspeed", "bf16", "bfloat16", stage, "adamw_torch", adapter=False)
    assert widths == StateWidths(2, 2, 12)
    states = shard_states(7_500_000_000, 0, widths, zero_stage=stage, data_parallel=64)
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


def test_the_model_of_deepspeeds_page() -> None:
    assert T5_3B.params // 10**6 == 2851
    assert LARGEST // 10**6 == 32


@pytest.mark.parametrize(("offload", "device"), [(True, 5.31), (False, 15.93)])
def test_deepspeed_page_stage_2(offload: bool, device: float) -> None:
    assert round(deepspeed_zero2(T5_3B.params, 8, offload=offload).device / GIB, 2) == device


@pytest.mark.parametrize(
    ("offload", "device", "host"),
    [("all", 0.12, 71.71), ("optimizer", 0.79, 63.74), ("none", 6.10, 1.47)],
)
def test_deepspeed_page_stage_3(offload: str, device: float, host: float) -> None:
    needs = deepspeed_zero3(T5_3B.params, LARGEST, 8, offload=offload)
    assert (round(needs.device / GIB, 2), round(needs.host / GIB, 2)) == (device, host)


def test_rule_of_thumb_for_a_llama_6b_in_int8() -> None:
    assert llama_6b_rule(0) == pytest.approx(25.3e9)
    sample = llama_6b_rule(1) - llama_6b_rule(0)
    assert sample == 989_855_744
    assert round(sample / 1e9, 3) == 0.990
    assert round(sample / GIB, 3) == 0.922
    assert llama_6b_rule(50) < 80e9
    # The rule's layer is that of the published model.
    assert (LLAMA_7B.hidden_size, LLAMA_7B.intermediate_size, LLAMA_7B.num_layers) == (4096, 11008, 32)
