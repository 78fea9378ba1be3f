"""The closed form against published and traced figures, and its properties."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.facts.hardware import parse_hardware
from launcher.facts.heads import FAMILY_TASKS
from launcher.facts.model import ModelSpec, read_model_spec
from launcher.facts.probe import shipped_model_config
from launcher.memory.activations import Dtypes, layer_bytes
from launcher.memory.estimate import Components, MemoryJob, estimate_memory, max_micro_batch
from launcher.memory.states import (
    StateWidths,
    base_weight_bytes,
    int8_footprint,
    overlap_comm_upper_bound,
    shard_states,
    state_widths,
)
from launcher.plan.draft import Draft
from launcher.plan.sizing import base_job

GIB = 2**30
A100 = parse_hardware("1xA100-80GB")


def spec(name: str, task: str | None = None) -> ModelSpec:
    config = shipped_model_config(name)
    assert config is not None
    return read_model_spec(name, config, "shipped facts", task or FAMILY_TASKS[config["model_type"]][0])


LLAMA_7B = spec("huggyllama/llama-7b")
LLAMA_1B = spec("meta-llama/Llama-3.2-1B")
DPO_1B = spec("meta-llama/Llama-3.2-1B", "dpo")
BERT = spec("google-bert/bert-large-uncased")
VIT = spec("google/vit-large-patch16-224")
MT0 = spec("bigscience/mt0-large")
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
        "phases",
        "method",
        "calibration",
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


def components(model: ModelSpec, job: MemoryJob) -> Components:
    return estimate_memory(model, job, A100).components


def test_preference_pairs_keep_twice_the_activations_and_no_logits_of_the_whole_vocabulary() -> None:
    one = components(LLAMA_1B, JOB_1B)
    pairs = components(DPO_1B, replace(JOB_1B, sequences_per_sample=2))
    assert pairs.activations == 2 * one.activations
    # 4096 x 32768 logits at a time, against 8192 x 128256.
    assert pairs.logits < one.logits / 5


def test_a_reference_model_holds_the_weights_once_more_and_nothing_else() -> None:
    job = replace(JOB_1B, sequences_per_sample=2)
    without = estimate_memory(DPO_1B, job, A100)
    held = estimate_memory(DPO_1B, replace(job, reference_model=True), A100)
    assert held.total - without.total == 2 * LLAMA_1B.params


def test_classification_has_no_logits_of_a_vocabulary() -> None:
    labelled = spec("meta-llama/Llama-3.2-1B", "sequence-classification")
    job = replace(JOB_1B, trainable_params=labelled.params)
    assert components(labelled, job).logits < components(LLAMA_1B, JOB_1B).logits / 50
    assert components(BERT, replace(job, sequence_length=512)).logits < 64 * 2**20


def test_both_stacks_of_an_encoder_decoder_keep_activations() -> None:
    encoder, decoder = MT0.layout.stacks
    d = Dtypes(2, 2, False)
    first, second = (
        layer_bytes(MT0, d, attention="sdpa", sequence=128, layout=stack) for stack in (encoder, decoder)
    )
    assert second > first
    job = replace(FULL, micro_batch=64, sequence_length=128, trainable_params=MT0.params)
    assert components(MT0, job).activations == pytest.approx(64 * 128 * 24 * (first + second), rel=0.05)


def test_the_own_head_of_a_published_t5_is_part_of_its_weights() -> None:
    assert base_weight_bytes(MT0, "bfloat16") == 2 * 1_229_581_312


def test_attention_dropout_costs_maps_in_eager_attention_only() -> None:
    d = Dtypes(2, 2, False)
    quiet = replace(BERT, layout=replace(BERT.layout, attention_dropout=0.0))

    def kept(model: ModelSpec, attention: str) -> float:
        return layer_bytes(model, d, attention=attention, sequence=512)

    assert kept(BERT, "sdpa") == kept(quiet, "sdpa")
    # A mask of one byte and a second copy in 16 bits for each of 16 x 512 scores.
    assert kept(BERT, "eager") - kept(quiet, "eager") == 16 * 512 * 3


def test_documents_in_one_row_cost_a_mask_unless_flash_attention_reads_them() -> None:
    job = replace(JOB_1B, sequence_length=512)
    packed = replace(job, document_mask=True)
    rows, length, layers = 4, 512, 16
    more = estimate_memory(LLAMA_1B, packed, A100).total - estimate_memory(LLAMA_1B, job, A100).total
    assert more == rows * length**2 * (1 + 2 * layers)
    side_by_side = replace(packed, one_row=True)
    assert components(LLAMA_1B, side_by_side).buffers == (rows * length) ** 2
    flash = replace(job, attention="flash_attention_2")
    assert components(LLAMA_1B, flash) == components(
        LLAMA_1B, replace(flash, document_mask=True, one_row=True)
    )


def draft_of(**settings: object) -> Draft:
    draft = Draft({})
    values = {
        "data.max_length": 512, "precision": "bf16", "model.dtype": "float32",
        "sharding.engine": "ddp", "sharding.offload_optimizer": "none", "sharding.offload_param": "none",
        "trainer.optim": "adamw_torch", "model.attn_implementation": "sdpa",
    }  # fmt: skip
    for name, value in (values | {k.replace("__", "."): v for k, v in settings.items()}).items():
        draft.put(name, value, "test")
    return draft


def test_base_job_of_preference_pairs() -> None:
    full = base_job(draft_of(task="dpo"), DPO_1B, A100, 1)
    assert (full.sequences_per_sample, full.reference_model) == (2, True)
    ahead = draft_of(task="dpo", trainer__precompute_ref_log_probs=True)
    assert base_job(ahead, DPO_1B, A100, 1).reference_model is False
    assert base_job(draft_of(task="dpo", adapter__type="lora"), DPO_1B, A100, 1).reference_model is False
    plain = base_job(draft_of(task="causal-lm"), LLAMA_1B, A100, 1)
    assert (plain.sequences_per_sample, plain.reference_model, plain.document_mask) == (1, False, False)


def test_base_job_of_images_packs_and_an_untied_head() -> None:
    assert base_job(draft_of(task="image-classification"), VIT, A100, 1).sequence_length == 197
    packed = base_job(draft_of(task="causal-lm", data__packing=True), LLAMA_1B, A100, 1)
    assert (packed.document_mask, packed.one_row) == (True, False)
    flat = base_job(draft_of(task="causal-lm", data__padding_free=True), LLAMA_1B, A100, 1)
    assert (flat.document_mask, flat.one_row) == (True, True)
    assert base_job(draft_of(task="seq2seq-lm"), MT0, A100, 1).trainable_params == MT0.loaded_params


def test_a_classifier_beside_an_adapter_does_not_raise_its_rank() -> None:
    config, job = {"model_type": "vit"}, replace(FULL, micro_batch=64, sequence_length=197, adapter=True)
    kept = []
    for labels in (2, 20_000):
        model = read_model_spec("x", config, "test", "image-classification", labels)
        lora = model.lora_params(4, "all-linear")
        kept.append(components(model, replace(job, trainable_params=lora)).activations)
    assert kept[0] == kept[1] > 0
