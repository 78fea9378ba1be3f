"""Bytes per parameter of each engine, precision and optimizer; what moves to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_cases import (
    A100,
    CPU,
    FULL,
    JOB_1B,
    LLAMA_1B,
    LLAMA_7B,
    LORA_1B,
    MT0,
    NODE,
    ZERO,
    buffers_of,
    spec,
    states_of,
    step_of,
)

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.engine import Engine
from launcher.engines.fsdp import FSDP
from launcher.files.shipped import facts_file
from launcher.memory.host import host_memory
from launcher.memory.job import MemoryJob
from launcher.memory.phases import training_phases
from launcher.memory.states import (
    OPTIMIZERS,
    Shape,
    StateWidths,
    base_weight_bytes,
    model_shapes,
    moments,
    optimizer_of,
    quantized_constants,
    shard_states,
)
from launcher.models.lora import lora_params
from launcher.models.model import FAMILY_TASKS, read_model_spec
from launcher.models.model_config import shipped_model_config

P7, P1 = LLAMA_7B.params, LLAMA_1B.params


@pytest.mark.parametrize(
    ("engine", "precision", "dtype", "stage", "expected"),
    [
        (DDP, "fp32", "float32", 0, (4, 4, 8)),
        (DDP, "fp16", "float32", 0, (4, 4, 8)),
        (DDP, "bf16", "float32", 0, (4, 4, 8)),
        (DDP, "bf16", "bfloat16", 0, (2, 2, 4)),
        (DDP, "bf16-true", "bfloat16", 0, (2, 2, 4)),
        (FSDP, "fp32", "float32", 0, (4, 4, 8)),
        (FSDP, "bf16", "bfloat16", 0, (4, 4, 8)),
        (FSDP, "bf16-true", "bfloat16", 0, (2, 2, 4)),
        (DEEPSPEED, "fp32", "float32", 0, (4, 4, 8)),
        (DEEPSPEED, "fp32", "float32", 1, (4, 4, 12)),
        (DEEPSPEED, "fp32", "float32", 3, (4, 4, 12)),
        (DEEPSPEED, "bf16", "float32", 0, (2, 2, 12)),
        (DEEPSPEED, "fp16", "float16", 2, (2, 2, 12)),
        (DEEPSPEED, "bf16", "bfloat16", 3, (2, 2, 12)),
    ],
)
def test_bytes_per_parameter_of_adamw(
    engine: Engine, precision: str, dtype: str, stage: int, expected: tuple[float, float, float]
) -> None:
    job = replace(
        FULL, engine=engine, precision=precision, dtype=dtype, zero_stage=stage, optim="adamw_torch"
    )
    assert job.engine.widths(job) == StateWidths(*expected)


@pytest.mark.parametrize(
    ("optim", "options", "expected"),
    [
        ("adamw_torch", "", 8), ("adamw_torch_fused", "", 8), ("adamw_bnb_8bit", "", 2 + 8 / 256),
        ("adamw_8bit", "", 2 + 8 / 256), ("paged_adamw_32bit", "", 8), ("lion_8bit", "", 1 + 4 / 256),
        ("lion_32bit", "", 4), ("adagrad", "", 4), ("rmsprop", "", 4), ("rmsprop", "momentum=0.9", 8),
        ("rmsprop", "momentum=0.9, centered=true", 12), ("sgd", "", 0), ("sgd", "momentum=0.9", 4),
        ("sgd", "momentum=0", 0), ("ademamix", "", 12), ("adamw_torch_4bit", "", 1 + 8 / 128),
    ],
)  # fmt: skip
def test_bytes_per_value_of_optimizers(optim: str, options: str, expected: float) -> None:
    assert optimizer_of(optim, options).per_value(4) == expected


def test_every_optimizer_of_the_trainer_is_counted_or_marked() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    names = {name.value for name in training_args.OptimizerNames}
    assert set(OPTIMIZERS) <= names
    bounded = {name for name in names if not optimizer_of(name).exact}
    assert bounded == names - set(OPTIMIZERS)
    assert {"adamw_torch", "sgd", "adafactor"}.isdisjoint(bounded)


@pytest.mark.parametrize("name", ["huggyllama/llama-7b", "bigscience/mt0-large", "bigcode/starcoder"])
def test_shapes_of_a_model_are_all_its_parameters(name: str) -> None:
    model = spec(name)
    assert sum(shape.values * shape.count for shape in model_shapes(model)) == model.loaded_params


def test_shapes_of_all_shipped_models_and_tasks() -> None:
    import json

    names = json.loads(facts_file("models.json").read_text(encoding="utf-8"))["models"]
    assert len(names) >= 20
    for name in names:
        config = shipped_model_config(name)
        assert config is not None
        if "text_config" in config:
            continue  # of images and text: read from their classes
        for task in FAMILY_TASKS[config["model_type"]]:
            model = read_model_spec(name, config, "test", task)
            assert sum(s.values * s.count for s in model_shapes(model)) == model.loaded_params, (name, task)


def test_small_tensors_and_embeddings_keep_32_bit_states() -> None:
    eight = OPTIMIZERS["adamw_bnb_8bit"]
    assert moments(eight, [Shape(4095)], 4, named=True).device == 8 * 4095
    assert moments(eight, [Shape(4096)], 4, named=True).device == 2 * 4096 + 8 * 16
    # 257 blocks: 65,536 values and one more.
    assert moments(eight, [Shape(65_537)], 4, named=True).device == 2 * 65_537 + 8 * 257
    embedding = Shape(1000, 64, embedding=True)
    assert moments(eight, [embedding], 4, named=True).device == 8 * 64_000
    assert moments(eight, [embedding], 4, named=False).device == 2 * 64_000 + 8 * 250


def test_8_bit_adamw_of_a_whole_model() -> None:
    job = replace(JOB_1B, dtype="float32", precision="fp32", optim="adamw_bnb_8bit")
    embedding = 128_256 * 2048
    norms = 2048 * (2 * 16 + 1)
    matrices = P1 - embedding - norms
    assert states_of(LLAMA_1B, job).optimizer == 8 * (embedding + norms) + 2 * matrices + matrices // 32


def test_paged_states_are_pageable_and_not_on_the_device() -> None:
    job = replace(JOB_1B, optim="paged_adamw_32bit")
    states = states_of(LLAMA_1B, job)
    norms = 2048 * (2 * 16 + 1)
    assert (states.optimizer, states.pageable) == (8 * norms, 8 * (P1 - norms))
    assert host_memory(LLAMA_1B, job, A100, 0).pageable == states.pageable


def test_adafactor_keeps_rows_and_columns() -> None:
    job = replace(FULL, optim="adafactor")
    h, inner, vocab, layers = 4096, 11008, 32000, 32
    sums = layers * (4 * 2 * h + 3 * (h + inner)) + 2 * (vocab + h)
    assert states_of(LLAMA_7B, job).optimizer == 4 * (sums + h * (2 * layers + 1))
    # ZeRO's flat partition is one vector, of which every value is kept.
    flat = states_of(LLAMA_7B, replace(ZERO, zero_stage=1, optim="adafactor"))
    assert flat.optimizer == (4 + 4) * P7 // 8


def test_sgd_momentum_comes_from_optim_args() -> None:
    plain = states_of(LLAMA_1B, replace(JOB_1B, optim="sgd"))
    moving = states_of(LLAMA_1B, replace(JOB_1B, optim="sgd", optim_args="momentum=0.9"))
    assert (plain.optimizer, moving.optimizer) == (0, 2 * P1)


def test_8_bit_lora_of_small_adapters_stays_in_32_bits() -> None:
    small = lora_params(LLAMA_1B, 1, "all-linear")
    job = replace(JOB_1B, adapter=True, trainable_params=small, optim="adamw_bnb_8bit")
    # At rank 1 only the feed-forward block's vectors of 8192 values reach 4096.
    wide = 16 * 3 * 8192
    assert states_of(LLAMA_1B, job).optimizer == 8 * (small - wide) + 2 * wide + wide // 32


def test_fsdp_shards_everything_and_holds_gradients_between_micro_batches() -> None:
    job = replace(ZERO, engine=FSDP, dtype="float32")
    states = states_of(LLAMA_7B, job)
    # Weights and AdamW: 12 bytes a parameter over 8 ranks.
    assert states.weights + states.optimizer == pytest.approx(12 * P7 / 8, abs=8)
    assert states.gradients == pytest.approx(4 * P7 / 8, abs=8)
    waiting = states_of(LLAMA_7B, replace(job, accumulation=4))
    assert waiting.gradients == 2 * P7
    moved = states_of(LLAMA_7B, replace(job, offload_optimizer="cpu", offload_param="cpu"))
    assert (moved.total, moved.host) == (0, states.total)


def test_fsdp_shards_packed_weights_and_leaves_their_constants() -> None:
    job = replace(
        ZERO, engine=FSDP, adapter=True, quantization="nf4", trainable_params=lora_params(LLAMA_7B, 16, None)
    )
    whole = base_weight_bytes(LLAMA_7B, "bfloat16", "nf4", double_quant=False, upcast_rest=True)
    constants = quantized_constants(LLAMA_7B, "nf4", double_quant=False)
    adapters = 4 * job.trainable_params
    expected = (whole - constants + adapters) / 8 + constants
    assert states_of(LLAMA_7B, job).weights == pytest.approx(expected, abs=16)


@pytest.mark.parametrize(
    ("stage", "accumulation", "expected"),
    [(0, 1, 2), (1, 2, 2), (1, 1, 2 / 8), (2, 2, 2 / 8), (3, 2, 2 / 8)],
)
def test_gradients_of_zero(stage: int, accumulation: int, expected: float) -> None:
    states = states_of(LLAMA_7B, replace(ZERO, zero_stage=stage, accumulation=accumulation))
    assert states.gradients == pytest.approx(expected * P7, abs=8)


def test_optimizer_offload_of_stage_2() -> None:
    kept = states_of(LLAMA_7B, replace(ZERO, zero_stage=2))
    job = replace(ZERO, zero_stage=2, offload_optimizer="cpu")
    moved = states_of(LLAMA_7B, job)
    owned, largest = P7 // 8, 32000 * 4096
    assert (moved.weights, moved.gradients, moved.optimizer) == (kept.weights, 0, 0)
    # Master copy, its gradient and two moments; weights that travel back and one gradient in 16 bits.
    assert moved.host == pytest.approx(16 * owned, abs=64)
    assert moved.staging == pytest.approx(2 * (owned + largest), abs=64)
    more = states_of(LLAMA_7B, replace(job, accumulation=2))
    assert more.staging - moved.staging == pytest.approx(2 * owned, abs=64)
    assert buffers_of(LLAMA_7B, job) == 2 * largest


def test_offload_of_stage_3_to_host_and_nvme() -> None:
    owned = P7 // 8
    job = replace(ZERO, zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    host = states_of(LLAMA_7B, job)
    assert host.total == 0
    assert host.host == pytest.approx(18 * owned, abs=64)
    assert host.staging == pytest.approx(2 * owned, abs=64)
    disk = states_of(LLAMA_7B, replace(job, offload_optimizer="nvme", offload_param="nvme"))
    # Each parameter is written when it is made, those that then fit max_in_cpu as well.
    assert disk.nvme == pytest.approx((16 + 2) * owned, abs=64)
    # The partition of gradients, four float32 buffers of it, and five of 1e8 parameters.
    assert disk.staging == pytest.approx(2 * owned + 16 * owned + 2 * 5 * 10**8, abs=64)
    none_stay = states_of(
        LLAMA_7B, replace(job, offload_optimizer="nvme", offload_param="nvme", params_in_host=0)
    )
    # What an updated sub-group is written through.
    assert (none_stay.host, none_stay.staging) == (0, disk.staging + 2 * owned)


def test_buffers_of_engines() -> None:
    assert buffers_of(LLAMA_7B, replace(ZERO, engine=DDP, dtype="float32")) == 4 * P7
    assert buffers_of(LLAMA_7B, replace(FULL, engine=DDP)) == 0
    assert buffers_of(LLAMA_7B, replace(ZERO, zero_stage=0)) == 2 * 500_000_000
    for stage in (1, 2):  # its buckets come with the first gradient, see test_memory_held.py
        assert buffers_of(LLAMA_7B, replace(ZERO, zero_stage=stage)) == 0
    assert buffers_of(LLAMA_7B, replace(ZERO, zero_stage=3)) == 2 * 200_000_000
    assert buffers_of(LLAMA_7B, replace(ZERO, engine=FSDP)) == 0


def test_copies_of_embeddings_for_added_tokens_are_frozen_weights() -> None:
    job = replace(JOB_1B, adapter=True, trainable_params=LORA_1B)
    more = states_of(LLAMA_1B, replace(job, extra_frozen=1234))
    assert more.weights - states_of(LLAMA_1B, job).weights == 1234


@given(
    params=st.integers(1_000, 10**11),
    ranks=st.integers(1, 512),
    precision=st.sampled_from(["bf16", "fp16"]),
)
def test_states_never_grow_with_the_zero_stage(params: int, ranks: int, precision: str) -> None:
    totals = []
    for stage in range(4):
        job = replace(ZERO, precision=precision, dtype="bfloat16", zero_stage=stage, optim="adamw_torch")
        widths = job.engine.widths(job)
        totals.append(shard_states(params, 0, widths, stage=stage, data_parallel=ranks).total)
    assert totals == sorted(totals, reverse=True)


@given(optim=st.sampled_from(sorted(OPTIMIZERS)), ranks=st.sampled_from([2, 8, 64]), adapter=st.booleans())
def test_more_ranks_never_hold_more(optim: str, ranks: int, adapter: bool) -> None:
    trained = LORA_1B if adapter else P1
    for engine, stage in ((FSDP, 0), (DEEPSPEED, 1), (DEEPSPEED, 3)):
        job = replace(
            JOB_1B, engine=engine, zero_stage=stage, optim=optim, adapter=adapter, trainable_params=trained
        )
        few, many = (states_of(LLAMA_1B, replace(job, data_parallel=n)) for n in (ranks, 2 * ranks))
        assert few.total > many.total


@pytest.mark.parametrize("name", ["bigcode/starcoder", "huggyllama/llama-7b", "Qwen/Qwen3-0.6B"])
def test_quantised_weights_are_smaller(name: str) -> None:
    model = spec(name)
    sizes = [base_weight_bytes(model, "bfloat16", kind) for kind in ("nf4", "int8", "none")]
    assert sizes[0] < sizes[1] < sizes[2]


def test_double_quantisation_saves_0_373_bits_per_weight() -> None:
    plain = base_weight_bytes(LLAMA_7B, "bfloat16", "nf4", double_quant=False)
    double = base_weight_bytes(LLAMA_7B, "bfloat16", "nf4", double_quant=True)
    assert (plain - double) * 8 / LLAMA_7B.linear_weights == pytest.approx(0.373, abs=0.003)


def test_the_own_head_of_a_published_t5_is_part_of_its_weights() -> None:
    assert base_weight_bytes(MT0, "bfloat16") == 2 * 1_229_581_312


def host(job: MemoryJob, on_cpu: bool = False) -> dict[str, int]:
    parts = host_memory(LLAMA_7B, job, CPU if on_cpu else NODE, 10**9)
    return {name: getattr(parts, name) for name in parts.__slots__} | {"peak": parts.peak}


def test_host_memory_by_its_parts() -> None:
    weights = 2 * P7
    ddp = host(replace(FULL, data_parallel=8, devices_per_node=8))
    assert ddp["workers"] == 8 << 30
    # Every rank reads the whole model; only one writes it.
    assert (ddp["loading"], ddp["saving"]) == (8 * weights, weights)
    assert ddp["peak"] == ddp["workers"] + 8 * weights
    # Every rank of ZeRO below stage 3 clones the model to save it.
    assert host(replace(ZERO, zero_stage=2))["saving"] == 4 * P7, "each rank its shard of the float32 weights"
    third = host(replace(ZERO, zero_stage=3))
    assert (third["loading"], third["saving"]) == (weights, 4 * P7)
    full = host(replace(ZERO, engine=FSDP, dtype="float32"))
    assert (full["loading"], full["saving"]) == (4 * P7, 4 * P7)
    assert host(replace(ZERO, engine=FSDP, dtype="float32", each_loads=True))["loading"] == 8 * 4 * P7


def test_host_memory_of_adapters_and_of_a_cpu() -> None:
    lora = lora_params(LLAMA_7B, 16, "all-linear")
    job = replace(ZERO, engine=DDP, adapter=True, trainable_params=lora)
    assert host(job)["saving"] == 4 * lora
    assert host(replace(job, quantization="nf4"))["loading"] == 0
    cpu = host(replace(FULL, data_parallel=2, devices_per_node=2), on_cpu=True)
    assert (cpu["tensors"], cpu["loading"]) == (2 * 10**9, 0)


@pytest.mark.parametrize(("optim", "width"), [("adamw_torch_fused", 2 + 4), ("adamw_torch", 4 + 4)])
def test_stage_3_steps_by_sub_groups(optim, width):
    """Float32 gradients of a sub-group, and before it the 16-bit ones joined or after it torch's copies."""
    job = replace(ZERO, zero_stage=3, data_parallel=2, optim=optim)
    largest = 32_000 * 4096
    assert step_of(LLAMA_7B, job, A100) == width * (1_000_000_000 + largest // 2)
    assert step_of(LLAMA_7B, replace(job, data_parallel=64), A100) == width * -(-P7 // 64)
    # Stages 1 and 2: separate, joined and cast gradients, then the cast ones and torch's copies.
    for stage in (1, 2):
        below = replace(job, zero_stage=stage)
        assert step_of(LLAMA_7B, below, A100) == 8 * -(-P7 // 2)
        step = training_phases(LLAMA_7B, below, A100)["step"]
        assert step.gradients + step.temporary == 8 * -(-P7 // 2)
