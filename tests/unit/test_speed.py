"""Predicted time: exact counts of operations and bytes, and what may never rank above what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.machine.hardware import DEVICES, Processor, figures_of, parse_hardware
from launcher.memory.estimate import estimate_memory
from launcher.memory.job import MemoryJob
from launcher.models.lora import lora_params
from launcher.models.model import FAMILY_TASKS, ModelSpec, read_model_spec
from launcher.models.model_config import shipped_model_config
from launcher.planner.speed import HOST_MEMORY_BYTES, INT8_SLOWDOWN, predict_step, step_work


def spec(name: str) -> ModelSpec:
    config = shipped_model_config(name)
    assert config is not None
    return read_model_spec(name, config, "shipped facts", FAMILY_TASKS[config["model_type"]][0])


LLAMA = spec("huggyllama/llama-7b")
VIT = spec("google/vit-large-patch16-224")
MIXTRAL = spec("mistralai/Mixtral-8x7B-v0.1")
LAYERS, HIDDEN, VOCAB = 32, 4096, 32000
LINEARS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * 11008)
KEPT = 10**9
A100 = parse_hardware("8xA100-80GB")

FULL = MemoryJob(
    micro_batch=2, sequence_length=1024, data_parallel=8, devices_per_node=8, precision="bf16",
    dtype="bfloat16", quantization="none", double_quant=False, trainable_params=LLAMA.params,
    adapter=False, engine=DEEPSPEED, zero_stage=0, offload_optimizer="none", offload_param="none",
    optim="adamw_torch", checkpointing=False, attention="sdpa", reduce_bucket_size=200_000_000,
    allgather_bucket_size=200_000_000, overlap_comm=False, eval_batch=0, accumulation=1,
)  # fmt: skip
LORA = replace(FULL, adapter=True, trainable_params=lora_params(LLAMA, 16, "all-linear"))


def work(job: MemoryJob, model: ModelSpec = LLAMA) -> Any:
    return step_work(model, job, KEPT)


def likely(job: MemoryJob, on: str = "8xA100-80GB", model: ModelSpec = LLAMA, kept: int = KEPT) -> float:
    return predict_step(model, job, parse_hardware(on), kept=kept).likely


def test_every_device_of_the_catalogue_has_figures_and_their_source() -> None:
    for name, figures in ((name, device.figures) for name, device in DEVICES.items() if device.figures):
        assert figures.half >= figures.tf32 >= figures.single > 1e12, name
        assert figures.half > figures.memory > figures.link >= 16e9, name
        assert figures.host in ((450e9, 225e9) if name[0] == "G" else (16e9, 32e9, 64e9)), name
        assert figures.source.startswith("NVIDIA"), name
        assert figures.memory > HOST_MEMORY_BYTES.best, f"{name}: an offloaded update would be faster"


def test_operations_are_counted_by_hand() -> None:
    tokens = 2 * 1024
    linears, head = 2 * tokens * LINEARS, 2 * tokens * HIDDEN * VOCAB
    attention = 4 * tokens * 1024 * LAYERS * HIDDEN
    assert work(FULL).flops == 3 * (linears + head + attention)
    again = replace(FULL, checkpointing=True)
    assert work(again).flops == 3 * head + 4 * (linears + attention)
    adapter = 2 * tokens * LORA.trainable_params
    assert work(LORA).flops == 2 * (linears + head) + 3 * (attention + adapter)
    assert work(replace(LORA, quantization="int8")).flops - work(LORA).flops == pytest.approx(
        2 * (INT8_SLOWDOWN - 1) * linears
    )
    assert work(replace(FULL, accumulation=4)).flops == 4 * work(FULL).flops


def test_experts_are_counted_as_far_as_a_token_passes_them() -> None:
    job = replace(FULL, trainable_params=MIXTRAL.params)
    shared = MIXTRAL.linear_weights + VOCAB * HIDDEN
    attention = 4 * 2048 * 1024 * LAYERS * HIDDEN
    active = 32 * 2 * 3 * 4096 * 14336
    assert work(job, MIXTRAL).flops == 3 * (2 * 2048 * (shared + active) + attention)


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_pair_costs_the_passes_without_gradients_too(extra) -> None:
    config = shipped_model_config("huggyllama/llama-7b")
    assert config is not None
    dpo = read_model_spec("m", config, "shipped facts", "dpo")
    pair = replace(LORA, sequences_per_sample=2, micro_batch=1, extra_forwards=extra)
    forward = 2 * 2048 * (LINEARS + HIDDEN * VOCAB) + 4 * 2048 * 1024 * LAYERS * HIDDEN
    assert work(pair, dpo).flops - work(LORA).flops == extra * forward


@pytest.mark.parametrize(
    ("stage", "accumulation", "volumes"),
    [(0, 1, 2), (0, 4, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 3), (3, 4, 12)],
)
def test_communication_in_volumes_of_the_weights(stage: int, accumulation: int, volumes: int) -> None:
    """All-reduce is two volumes; ZeRO-2 reduces and ZeRO-3 gathers (twice) in every micro-step."""
    job = replace(FULL, zero_stage=stage, accumulation=accumulation)
    assert work(job).sent == pytest.approx(volumes * 2 * LLAMA.params * 7 / 8)


def test_one_process_sends_nothing() -> None:
    assert work(replace(FULL, data_parallel=1)).sent == 0


def test_an_adapter_sends_only_itself_but_zero_3_sends_the_base() -> None:
    assert work(LORA).sent < 0.02 * work(FULL).sent
    assert work(replace(LORA, zero_stage=3)).sent > 2 * 2 * LLAMA.params * 7 / 8


def test_what_is_offloaded_passes_pcie_and_the_hosts_memory() -> None:
    plain, offloaded = (replace(FULL, zero_stage=2, offload_optimizer=where) for where in ("none", "cpu"))
    assert work(plain).hosted == work(plain).host_traffic == 0
    assert work(offloaded).hosted == 2 * 2 * LLAMA.params / 8
    assert work(offloaded).host_traffic == work(plain).traffic - work(offloaded).traffic > 0
    both = replace(offloaded, zero_stage=3, offload_param="cpu")
    assert work(both).hosted == 2 * work(offloaded).hosted


def test_the_range_is_wide_and_holds_the_ranking_value() -> None:
    time = predict_step(LLAMA, FULL, A100, kept=KEPT)
    assert time.low < time.likely < time.high
    assert time.high > 1.5 * time.low
    assert time.seconds == (time.low, time.high)
    told = time.to_json(100)
    assert told["seconds_per_step"] is not None
    assert told["total"] == pytest.approx([100 * end for end in told["seconds_per_step"]], rel=0.01)
    assert told["likely"]["seconds_per_step"] == pytest.approx(time.likely, rel=0.01)
    assert told["likely"]["total"] == pytest.approx(100 * time.likely, rel=0.01)
    untold = time.to_json(None)
    assert untold["total"] is None
    assert untold["likely"]["total"] is None


def test_the_basis_names_the_large_parts_and_the_speed_of_products() -> None:
    from launcher.planner.speed import MATMUL_SHARE

    alone = replace(FULL, data_parallel=1)
    reached = MATMUL_SHARE.likely * figures_of(A100)[0].half / 1e12
    basis = predict_step(LLAMA, alone, A100, kept=KEPT).basis
    assert basis.endswith(f"products at {reached:.3g} TFLOP/s")
    assert basis.split(" % ")[1].startswith("matrix products")
    assert "communication" not in basis
    # Four ranks without NVLink reduce the gradients of all 7 B weights over PCIe.
    several = predict_step(LLAMA, replace(FULL, data_parallel=4), parse_hardware("4xA10-24GB"), kept=KEPT)
    assert "communication" in several.basis
    offloaded = replace(FULL, zero_stage=2, offload_optimizer="cpu", micro_batch=1)
    assert "offload" in predict_step(LLAMA, offloaded, A100, kept=KEPT).basis


@pytest.mark.parametrize("on", ["1x24GB", "cpu", "2xcpu"])
def test_no_seconds_without_published_figures(on: str) -> None:
    time = predict_step(LLAMA, replace(LORA, data_parallel=1), parse_hardware(on), kept=KEPT)
    assert time.seconds is None
    assert time.to_json(10) == {"seconds_per_step": None, "total": None}
    assert time.likely > 0
    assert figures_of(parse_hardware(on))[1] is False


def test_a_known_processor_gives_seconds_and_emulated_bf16_is_slower_than_fp32() -> None:
    job = replace(LORA, data_parallel=1, precision="fp32", dtype="float32")
    seconds = {}
    for name, half in (("plain", 25e9), ("matrix units", 1600e9)):
        processor = Processor(100e9, half, name)
        for precision in ("fp32", "bf16"):
            time = predict_step(
                LLAMA, replace(job, precision=precision), parse_hardware("cpu"), kept=KEPT,
                processor=processor, cores=8,
            )  # fmt: skip
            assert time.seconds is not None
            seconds[name, precision] = time.likely
    assert seconds["plain", "bf16"] > seconds["plain", "fp32"]
    assert seconds["matrix units", "bf16"] < seconds["matrix units", "fp32"]


def test_the_network_between_nodes_is_slower_than_the_link() -> None:
    job = replace(FULL, data_parallel=16)
    one = replace(parse_hardware("1x16xA100-80GB"), num_nodes=1)
    assert predict_step(LLAMA, job, parse_hardware("2x8xA100-80GB"), kept=KEPT).likely > (
        predict_step(LLAMA, job, one, kept=KEPT).likely
    )


def test_fp32_uses_tensor_cores_only_where_tf32_is_allowed() -> None:
    job = replace(FULL, precision="fp32", dtype="float32")
    plain, tf32 = (predict_step(LLAMA, job, A100, kept=KEPT, tf32=on).likely for on in (False, True))
    assert plain > 2 * tf32 > 2 * likely(FULL)


jobs = st.builds(
    replace,
    st.sampled_from([FULL, LORA, replace(LORA, quantization="nf4"), replace(LORA, quantization="int8")]),
    micro_batch=st.sampled_from([1, 2, 8]),
    accumulation=st.sampled_from([1, 2, 16]),
    data_parallel=st.sampled_from([1, 2, 8, 64]),
    zero_stage=st.integers(0, 3),
    checkpointing=st.booleans(),
    sequence_length=st.sampled_from([8, 512, 8192]),
)
machines = st.sampled_from(["8xA100-80GB", "8x8xH100-80GB", "4xT4-16GB", "32x8xL4-24GB", "2x24GB", "2xcpu"])


@given(job=jobs, on=machines)
def test_recomputation_sharding_offload_and_quantisation_are_never_faster(job: MemoryJob, on: str) -> None:
    time = likely(job, on)
    assert likely(replace(job, checkpointing=True), on) >= time
    assert likely(replace(job, zero_stage=min(3, job.zero_stage + 1)), on) >= time
    assert likely(replace(job, offload_optimizer="cpu"), on) >= time
    assert likely(replace(job, offload_param="cpu"), on) >= time
    if job.zero_stage < 3:  # ZeRO-3 gathers packed weights, which are fewer bytes
        assert time >= likely(replace(job, quantization="none"), on)


@given(job=jobs, on=machines, factor=st.sampled_from([2, 3, 4]))
def test_a_larger_micro_batch_is_never_slower(job: MemoryJob, on: str, factor: int) -> None:
    small = replace(job, accumulation=job.accumulation * factor)
    large = replace(job, micro_batch=job.micro_batch * factor)
    assert likely(large, on) <= likely(small, on)


@given(job=jobs, count=st.sampled_from([2, 4]))
def test_more_devices_train_more_samples_a_second(job: MemoryJob, count: int) -> None:
    """The same work on each of more devices of one machine: more samples, in no less time."""
    few = likely(replace(job, data_parallel=count), f"{count}xA100-80GB")
    many = likely(replace(job, data_parallel=2 * count), f"{2 * count}xA100-80GB")
    assert few <= many <= 2 * few


def test_times_are_ordered_like_the_published_ones() -> None:
    """ViT-L/16 on one GPU, minutes of rasbt/pytorch-memory-optim: fp32, mixed, bf16-true, then micro-batch
    16 and 4 x 4 accumulated. Predicted per sample, each as a multiple of bf16-true."""
    published = {"fp32": 17.94, "mixed": 3.45, "true": 2.88, "batch 16": 3.96, "4 x 4": 12.91}
    true: dict[str, Any] = {"precision": "bf16-true", "dtype": "bfloat16"}
    changes: dict[str, dict[str, Any]] = {
        "fp32": {"precision": "fp32"},
        "mixed": {},
        "true": true,
        "batch 16": {**true, "micro_batch": 16},
        "4 x 4": {**true, "micro_batch": 4, "accumulation": 4},
    }
    base = replace(
        FULL, engine=DDP, data_parallel=1, devices_per_node=1, dtype="float32", micro_batch=64,
        sequence_length=197, trainable_params=VIT.params,
    )  # fmt: skip
    hardware = parse_hardware("1xA100-40GB")
    predicted = {}
    for name, change in changes.items():
        job = replace(base, **change)
        moments = estimate_memory(VIT, replace(job, micro_batch=1), hardware).phases.values()
        kept = max(moment.activations for moment in moments)
        samples = job.micro_batch * (job.accumulation or 1)
        predicted[name] = predict_step(VIT, job, hardware, kept=kept).likely / samples
    for name, minutes in published.items():
        ratio = predicted[name] / predicted["true"]
        assert 0.5 < ratio / (minutes / published["true"]) < 2, name
    assert sorted(predicted, key=lambda n: predicted[n]) == sorted(published, key=lambda n: published[n])


@pytest.mark.parametrize("size", [{"tensor_parallel": 8}, {"sequence_parallel": 8}])
def test_what_ranks_of_a_copy_send_stays_inside_a_machine(size: dict[str, int]) -> None:
    """Alone on a machine or beside others: only groups that span machines wait for the network."""
    job = replace(FULL, zero_stage=0, data_parallel=1, **size)
    assert work(job).shared > 0
    inside, several, across = (
        predict_step(LLAMA, job, parse_hardware(on), kept=KEPT).high
        for on in ("8xH100-80GB", "2x8xH100-80GB", "2x4xH100-80GB")
    )
    between = work(job).sent  # token ranks reduce gradients as copies do
    if not between:
        assert several == inside
    assert across - several > 0.9 * work(job).shared / 3e9 * (1 - 3e9 / 90e9)
