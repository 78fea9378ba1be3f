"""The closed form against published and traced figures, and its properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import (
    A100,
    FULL,
    GIB,
    JOB_1B,
    LLAMA_1B,
    LLAMA_7B,
    LORA_1B,
    MT0,
    STARCODER,
    WORKSPACES,
    layer_bytes,
    spec,
)

from launcher.memory.estimate import estimate_memory
from launcher.memory.job import Components, MemoryJob
from launcher.models.capabilities import chunk_rows
from launcher.models.layers.layout import Dtypes
from launcher.models.lora import lora_params
from launcher.models.model import ModelSpec, read_model_spec
from launcher.plan.draft import Draft
from launcher.planner.job import base_job

DPO_1B = spec("meta-llama/Llama-3.2-1B", "dpo")
BERT = spec("google-bert/bert-large-uncased")
VIT = spec("google/vit-large-patch16-224")


@pytest.mark.parametrize(("adapter", "expected"), [(None, 45.533), (2, 41.588), (4, 67.018)])
def test_saved_bytes_of_a_llama_7b_layer(adapter: int | None, expected: float) -> None:
    """Per hidden value; traced 45.533 full, 41.6 with 16-bit and 67.0 with float32 adapters."""
    kept = layer_bytes(LLAMA_7B, Dtypes(2, 2, False, adapter), attention="sdpa", sequence=2048, rank=16)
    assert kept / 4096 == pytest.approx(expected, abs=0.001)


TRACED = {
    "7B full": (LLAMA_7B, FULL, 50.22),
    "7B checkpointing": (LLAMA_7B, replace(FULL, checkpointing=True), 50.22),
    "1B full": (LLAMA_1B, JOB_1B, 32.04),
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


def test_starcoder_holds_its_causal_mask() -> None:
    job = replace(FULL, trainable_params=STARCODER.params)
    assert estimate_memory(STARCODER, job, A100).components.buffers == WORKSPACES + 8192**2


def components(model: ModelSpec, job: MemoryJob) -> Components:
    return estimate_memory(model, job, A100).components


def test_preference_pairs_keep_twice_the_activations_and_no_logits_of_the_whole_vocabulary() -> None:
    one = components(LLAMA_1B, JOB_1B)
    pairs = components(DPO_1B, replace(JOB_1B, sequences_per_sample=2))
    # The factors of rotary positions are there once.
    assert pairs.activations == pytest.approx(2 * one.activations, rel=1e-4)
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
    # With a mask sdpa takes, and keeps, the keys and values of 8 heads repeated for 32, in 16 bits.
    repeated = 2 * rows * length * (32 - 8) * 64 * 2
    assert more == rows * length**2 * (1 + 2 * layers) + layers * repeated
    side_by_side = replace(packed, one_row=True)
    assert components(LLAMA_1B, side_by_side).buffers == WORKSPACES + (rows * length) ** 2
    flash = replace(job, attention="flash_attention_2")
    documents = components(LLAMA_1B, replace(flash, document_mask=True, one_row=True))
    assert (documents.buffers, documents.total) == (
        WORKSPACES,
        pytest.approx(components(LLAMA_1B, flash).total, rel=1e-4),
    )


def draft_of(**settings: object) -> Draft:
    draft = Draft({})
    values = {
        "data.max_length": 512, "precision": "bf16", "model.dtype": "float32",
        "sharding.engine": "ddp", "sharding.offload_optimizer": "none", "sharding.offload_param": "none",
        "sharding.offload_activations": "none",
        "trainer.optim": "adamw_torch", "model.attn_implementation": "sdpa",
        "model.quantization": "none", "model.device_map": None, "model.loss": "full", "model.add_tokens": [],
        "model.config": None, "model.gguf_file": None,
        "adapter.type": None, "data.packing": False, "data.padding_free": False,
        "data.pad_to_multiple_of": None, "sharding.tp_size": 1, "sharding.sp_size": 1, "sharding.cp_size": 1,
        "sharding.optim_in_backward": False,
    }  # fmt: skip
    for name, value in (values | {k.replace("__", "."): v for k, v in settings.items()}).items():
        draft.put(name, value, "test")
    return draft


def test_base_job_of_preference_pairs() -> None:
    full = base_job(draft_of(task="dpo"), DPO_1B, A100, 1, {})
    assert (full.sequences_per_sample, full.reference_model) == (2, True)
    ahead = draft_of(task="dpo", trainer__precompute_ref_log_probs=True)
    assert base_job(ahead, DPO_1B, A100, 1, {}).reference_model is False
    assert base_job(draft_of(task="dpo", adapter__type="lora"), DPO_1B, A100, 1, {}).reference_model is False
    plain = base_job(draft_of(task="causal-lm"), LLAMA_1B, A100, 1, {})
    assert (plain.sequences_per_sample, plain.reference_model, plain.document_mask) == (1, False, False)


def test_base_job_of_images_packs_and_an_untied_head() -> None:
    assert base_job(draft_of(task="image-classification"), VIT, A100, 1, {}).sequence_length == 197
    packed = base_job(draft_of(task="causal-lm", data__packing=True), LLAMA_1B, A100, 1, {})
    assert (packed.document_mask, packed.one_row) == (True, False)
    flat = base_job(draft_of(task="causal-lm", data__padding_free=True), LLAMA_1B, A100, 1, {})
    assert (flat.document_mask, flat.one_row) == (True, True)
    assert base_job(draft_of(task="seq2seq-lm"), MT0, A100, 1, {}).trainable_params == MT0.loaded_params


def test_a_classifier_beside_an_adapter_does_not_raise_its_rank() -> None:
    config, job = {"model_type": "vit"}, replace(FULL, micro_batch=64, sequence_length=197, adapter=True)
    kept = []
    for labels in (2, 20_000):
        model = read_model_spec("x", config, "test", "image-classification", labels)
        lora = lora_params(model, 4, "all-linear")
        kept.append(components(model, replace(job, trainable_params=lora)).activations)
    assert kept[0] == kept[1] > 0


def test_documents_in_one_row_cost_varlen_what_they_cost_flash_attention() -> None:
    row = replace(JOB_1B, sequence_length=512, document_mask=True, one_row=True)
    varlen, flash = (replace(row, attention=name) for name in ("varlen", "flash_attention_2"))
    assert components(LLAMA_1B, varlen) == components(LLAMA_1B, flash)
    sdpa = components(LLAMA_1B, replace(row, attention="sdpa"))
    assert components(LLAMA_1B, varlen).total < sdpa.total
    # Where no kernel takes all documents, what attention makes of each is put side by side, and keys and
    # values are repeated.
    apart = components(LLAMA_1B, replace(varlen, one_by_one=True))
    assert components(LLAMA_1B, varlen).total < apart.total < sdpa.total


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_by_chunks_never_holds_all_logits(adapter: bool, precision: str) -> None:
    job = replace(JOB_1B, precision=precision, adapter=adapter, sequence_length=4096, checkpointing=True)
    full, chunked = (components(LLAMA_1B, replace(job, chunked=value)) for value in (False, True))
    assert chunked.total < full.total
    rows = chunk_rows(LLAMA_1B.vocab_size)
    weights = LLAMA_1B.head.in_features * LLAMA_1B.head.out_features
    hidden = 4 * 4096 * LLAMA_1B.hidden_size
    assert chunked.logits <= rows * LLAMA_1B.vocab_size * 8 + 4 * weights + 8 * hidden
    longer = replace(job, chunked=True, sequence_length=8192)
    grown = components(LLAMA_1B, longer).logits - chunked.logits
    assert grown <= 8 * hidden, "the chunk itself does not grow with the rows"


def test_an_adapter_that_reads_its_input_as_it_is_keeps_no_copy() -> None:
    job = replace(JOB_1B, precision="bf16", dtype="bfloat16", adapter=True, trainable_params=10**7)
    saves = components(LLAMA_1B, replace(job, cast_inputs=False)).activations
    copies = components(LLAMA_1B, job).activations
    assert saves <= copies
    masked = replace(job, adapter_dropout=0.1)
    assert components(LLAMA_1B, masked).activations >= copies
