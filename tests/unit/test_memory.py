"""The closed form against published and traced figures, and its properties."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.facts.hardware import parse_hardware
from launcher.facts.model import ModelSpec, read_model_spec
from launcher.facts.probe import shipped_model_config
from launcher.memory.activations import Dtypes, layer_bytes
from launcher.memory.estimate import MemoryJob, estimate_memory, max_micro_batch
from launcher.memory.states import (
    StateWidths,
    base_weight_bytes,
    int8_footprint,
    overlap_comm_upper_bound,
    shard_states,
    state_widths,
)

GIB = 2**30
A100 = parse_hardware("1xA100-80GB")


def spec(name: str) -> ModelSpec:
    config = shipped_model_config(name)
    assert config is not None
    return read_model_spec(name, config, "shipped facts")


LLAMA_7B = spec("huggyllama/llama-7b")
LLAMA_1B = spec("meta-llama/Llama-3.2-1B")
STARCODER = spec("bigcode/starcoder")

FULL = MemoryJob(
    micro_batch=1,
    sequence_length=2048,
    data_parallel=1,
    devices_per_node=1,
    precision="bf16-true",
    dtype="bfloat16",
    quantization="none",
    double_quant=False,
    trainable_params=LLAMA_7B.params,
    adapter=False,
    engine="ddp",
    zero_stage=0,
    offload_optimizer="none",
    offload_param="none",
    optim="adamw_torch_fused",
    checkpointing=False,
    attention="sdpa",
    reduce_bucket_size=200_000_000,
    allgather_bucket_size=200_000_000,
    overlap_comm=False,
    eval_batch=1,
    accumulation=1,
)
JOB_1B = replace(FULL, micro_batch=4, trainable_params=LLAMA_1B.params)
LORA_1B = LLAMA_1B.lora_params(16, "all-linear")


def test_starcoder_int8_footprint() -> None:
    assert int8_footprint(STARCODER) == 15_939_612_672


@pytest.mark.parametrize(("stage", "published"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_table(stage: int, published: float) -> None:
    widths = state_widths("deepspeed", "bf16", "bfloat16", stage, "adamw_torch", adapter=False)
    assert widths == StateWidths(2, 2, 12)
    states = shard_states(7_500_000_000, 0, widths, zero_stage=stage, data_parallel=64)
    assert states.total / 1e9 == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(
    ("optim", "precision", "dtype", "expected"),
    [
        ("adamw_torch", "fp16", "float32", (4, 4, 8)),
        ("sgd", "fp32", "float32", (4, 4, 0)),
        ("adamw_torch", "bf16-true", "bfloat16", (2, 2, 4)),
        ("adamw_bnb_8bit", "fp32", "float32", (4, 4, 2.03125)),
    ],
)
def test_bytes_per_parameter_of_ddp(
    optim: str, precision: str, dtype: str, expected: tuple[float, float, float]
) -> None:
    assert state_widths("ddp", precision, dtype, 0, optim, False) == StateWidths(*expected)


def test_deepspeed_keeps_a_master_copy_in_float32_too() -> None:
    assert state_widths("deepspeed", "fp32", "float32", 1, "adamw_torch", False).total == 20
    assert state_widths("deepspeed", "fp32", "float32", 0, "adamw_torch", False).total == 16


@pytest.mark.parametrize(("bucket", "expected"), [(500_000_000, 9.0e9), (200_000_000, 3.6e9)])
def test_overlap_comm_upper_bound(bucket: int, expected: float) -> None:
    assert overlap_comm_upper_bound(bucket) == expected


@pytest.mark.parametrize(("adapter", "expected"), [(None, 45.533), (2, 41.588), (4, 67.018)])
def test_saved_bytes_of_a_llama_7b_layer(adapter: int | None, expected: float) -> None:
    """Per hidden value; traced 45.533 full, 41.6 with 16-bit and 67.0 with float32 adapters."""
    kept = layer_bytes(LLAMA_7B, Dtypes(2, 2, False, adapter), attention="sdpa", sequence=2048, rank=16)
    assert kept / 4096 == pytest.approx(expected, abs=0.001)


TRACED = {
    "7B full": (LLAMA_7B, FULL, 50.22),
    "7B checkpointing": (LLAMA_7B, replace(FULL, checkpointing=True), 50.22),
    "1B full": (LLAMA_1B, JOB_1B, 32.81),
    "1B checkpointing": (LLAMA_1B, replace(JOB_1B, checkpointing=True), 19.29),
    "1B LoRA": (
        LLAMA_1B,
        replace(JOB_1B, checkpointing=True, adapter=True, trainable_params=LORA_1B),
        14.75,
    ),
    "1B eager": (LLAMA_1B, replace(JOB_1B, attention="eager"), 80.77),
}


@pytest.mark.parametrize("case", TRACED)
def test_peaks_traced_with_fake_tensors(case: str) -> None:
    model, job, traced = TRACED[case]
    estimate = estimate_memory(model, job, A100)
    without_context = estimate.total - estimate.components.context
    assert without_context / GIB == pytest.approx(traced, rel=0.005)


def test_the_total_is_the_sum_of_the_components_and_json_is_complete() -> None:
    estimate = estimate_memory(LLAMA_7B, FULL, A100)
    answer = estimate.to_json()
    assert sum(answer["components"].values()) == answer["total"]
    assert set(answer) == {
        "device_bytes",
        "fits",
        "margin",
        "low",
        "high",
        "components",
        "total",
        "save_peak",
        "eval_peak",
        "host_bytes",
        "phase",
    }
    assert answer["low"] < answer["total"] < answer["high"]


def test_unknown_device_memory_gives_no_verdict() -> None:
    assert estimate_memory(LLAMA_7B, FULL, parse_hardware("cpu")).fits is None


def test_cpu_has_no_cuda_context() -> None:
    assert estimate_memory(LLAMA_7B, FULL, parse_hardware("cpu")).components.context == 0


def test_starcoder_holds_its_causal_mask() -> None:
    job = replace(FULL, trainable_params=STARCODER.params)
    assert estimate_memory(STARCODER, job, A100).components.buffers == 8192**2


def test_optimizer_offload_moves_states_to_the_host() -> None:
    job = replace(FULL, engine="deepspeed", precision="bf16", zero_stage=2, data_parallel=8)
    job = replace(job, devices_per_node=8)
    node = parse_hardware("8xA100-80GB")
    kept = estimate_memory(LLAMA_7B, job, node)
    moved = estimate_memory(LLAMA_7B, replace(job, offload_optimizer="cpu"), node)
    assert moved.components.optimizer == 0
    assert moved.host_bytes - kept.host_bytes == pytest.approx(16 * LLAMA_7B.params, rel=1e-6)


def test_zero3_needs_room_to_save() -> None:
    job = replace(FULL, engine="deepspeed", precision="bf16", zero_stage=3, data_parallel=8)
    estimate = estimate_memory(LLAMA_7B, job, parse_hardware("8xA100-80GB"))
    assert estimate.host_bytes > 2 * LLAMA_7B.params
    assert estimate.save_peak > 0


@given(
    params=st.integers(1_000, 10**11),
    ranks=st.integers(1, 512),
    precision=st.sampled_from(["bf16", "fp16"]),
)
def test_states_never_grow_with_the_zero_stage(params: int, ranks: int, precision: str) -> None:
    totals = []
    for stage in range(4):
        widths = state_widths("deepspeed", precision, "bfloat16", stage, "adamw_torch", False)
        totals.append(shard_states(params, 0, widths, zero_stage=stage, data_parallel=ranks).total)
    assert totals == sorted(totals, reverse=True)


JOBS = st.builds(
    lambda stage, precision, checkpointing, attention, adapter: replace(
        JOB_1B,
        engine="ddp" if stage is None else "deepspeed",
        zero_stage=stage or 0,
        data_parallel=4,
        precision=precision,
        dtype="float32",
        checkpointing=checkpointing,
        attention=attention,
        adapter=adapter,
        trainable_params=LORA_1B if adapter else LLAMA_1B.params,
    ),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.booleans(),
    st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    st.booleans(),
)


@given(job=JOBS, batch=st.integers(1, 64), length=st.integers(8, 8192), more=st.integers(1, 64))
def test_estimate_grows_with_batch_and_length(job: MemoryJob, batch: int, length: int, more: int) -> None:
    def total(micro: int, tokens: int) -> int:
        sized = replace(job, micro_batch=micro, sequence_length=tokens)
        return estimate_memory(LLAMA_1B, sized, A100).total

    here = total(batch, length)
    assert total(batch + more, length) >= here
    assert total(batch, length + more) >= here


@pytest.mark.parametrize("name", ["bigcode/starcoder", "huggyllama/llama-7b", "Qwen/Qwen3-0.6B"])
def test_quantised_weights_are_smaller(name: str) -> None:
    model = spec(name)
    sizes = [base_weight_bytes(model, "bfloat16", kind) for kind in ("nf4", "int8", "none")]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[2]


def test_double_quantisation_saves_0_373_bits_per_weight() -> None:
    plain = base_weight_bytes(LLAMA_7B, "bfloat16", "nf4", double_quant=False)
    double = base_weight_bytes(LLAMA_7B, "bfloat16", "nf4", double_quant=True)
    assert (plain - double) * 8 / LLAMA_7B.linear_weights == pytest.approx(0.373, abs=0.003)


def test_largest_micro_batch_fits_and_the_next_does_not() -> None:
    best = max_micro_batch(LLAMA_1B, JOB_1B, A100)
    assert best > 1
    assert estimate_memory(LLAMA_1B, replace(JOB_1B, micro_batch=best), A100).fits
    assert not estimate_memory(LLAMA_1B, replace(JOB_1B, micro_batch=best + 1), A100).fits


def test_no_micro_batch_fits_a_small_device() -> None:
    assert max_micro_batch(LLAMA_7B, FULL, parse_hardware("1x24GB")) == 0


def test_two_hundred_estimates_are_quick() -> None:
    start = time.perf_counter()
    for size in range(1, 201):
        estimate_memory(LLAMA_7B, replace(FULL, micro_batch=size), A100)
    assert time.perf_counter() - start < 1.0
