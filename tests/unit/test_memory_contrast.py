"""What losses over embeddings hold: several forward passes, similarities, cached mini-batches; their time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.engines.ddp import DDP
from launcher.machine.hardware import parse_hardware
from launcher.memory.contrast import contrast
from launcher.memory.estimate import estimate_memory, kept_predictions
from launcher.memory.job import MemoryJob
from launcher.models.model import ModelSpec, read_model_spec
from launcher.planner.speed import step_work

CPU = parse_hardware("cpu")
BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 2000, "hidden_size": 128, "intermediate_size": 512,
    "num_attention_heads": 4, "num_hidden_layers": 6,
}  # fmt: skip
HIDDEN = 128


def spec_of(task: str) -> ModelSpec:
    return read_model_spec("m", BERT, "test", task)


EMBEDDING, RERANKER, CLASSES = map(spec_of, ("embedding", "reranker", "sequence-classification"))
PAIRS = MemoryJob(
    micro_batch=16, sequence_length=64, data_parallel=1, devices_per_node=1, precision="fp32",
    dtype="float32", quantization="none", double_quant=False, trainable_params=EMBEDDING.params,
    adapter=False, engine=DDP, zero_stage=0, offload_optimizer="none", offload_param="none",
    optim="adamw_torch", checkpointing=False, attention="sdpa", reduce_bucket_size=1,
    allgather_bucket_size=1, overlap_comm=False, eval_batch=8, accumulation=1,
    sequences_per_sample=2, passes=2,
)  # fmt: skip
CACHED = replace(PAIRS, mini_batch=4)


def peak(job: MemoryJob, spec: ModelSpec = EMBEDDING) -> int:
    return estimate_memory(spec, job, CPU).total


def activations(job: MemoryJob) -> int:
    return estimate_memory(EMBEDDING, job, CPU).components.activations


def test_rows_are_those_of_a_forward_pass() -> None:
    assert (PAIRS.rows, PAIRS.sequences, PAIRS.forwards) == ((16, 64), 32, 2)
    assert (CACHED.rows, CACHED.sequences, CACHED.forwards) == ((4, 64), 32, 8)
    assert replace(CACHED, micro_batch=18).forwards == 2 * 5
    assert replace(CACHED, mini_batch=64).rows == (16, 64)
    assert replace(PAIRS, passes=1).rows == (32, 64)


def test_activations_of_all_texts_of_a_row_are_kept() -> None:
    one = activations(PAIRS)
    four = activations(replace(PAIRS, sequences_per_sample=4, passes=4))
    assert four == pytest.approx(2 * one, rel=0.02)


def test_a_later_pass_runs_backwards_beside_all_gradients() -> None:
    """With short texts the last backward pass but one has the peak."""
    short = replace(PAIRS, micro_batch=1, sequence_length=8)
    found = estimate_memory(EMBEDDING, short, CPU).phases
    assert found["backward"].gradients > 0.9 * 4 * EMBEDDING.params
    alone = estimate_memory(EMBEDDING, replace(short, sequences_per_sample=1, passes=1), CPU).phases
    assert alone["backward"].gradients < 0.2 * 4 * EMBEDDING.params


def test_a_cached_loss_keeps_a_mini_batch_whatever_the_micro_batch() -> None:
    wide = replace(CACHED, micro_batch=256)
    # Inputs, gradients of embeddings and states of the generator grow.
    grown = (
        contrast(EMBEDDING, wide, 4, on_cpu=True).cache - contrast(EMBEDDING, CACHED, 4, on_cpu=True).cache
    )
    inputs = 24 * (wide.sequences - CACHED.sequences) * 64
    assert peak(wide) - peak(CACHED) == grown + inputs
    assert peak(CACHED) < 0.6 * peak(PAIRS)
    small = contrast(EMBEDDING, CACHED, 4, on_cpu=False).cache
    assert small == 32 * HIDDEN * 4
    assert contrast(EMBEDDING, CACHED, 4, on_cpu=True).cache == small + 8 * 5056


def test_similarities_grow_with_negatives_ranks_and_widths() -> None:
    def of(**more: Any) -> Any:
        return contrast(EMBEDDING, replace(PAIRS, micro_batch=1024, **more), 4, on_cpu=False)

    matrix, column = 1024 * 1024 * 4, 1024 * HIDDEN * 4
    pairs = of()
    assert pairs.saved == matrix + (2 + 2 * 2) * column
    assert of(sequences_per_sample=4).saved - pairs.saved == 2 * matrix + 2 * 3 * column
    assert of(gathered=8).saved - pairs.saved == 7 * (matrix + 2 * column)
    assert of(gathered=8).flow - pairs.flow == 7 * (3 * matrix + column)
    widths = of(matryoshka=3)
    assert widths.saved - pairs.saved == 2 * (matrix + 4 * column) + 2 * 64 * column, "and all hidden states"
    assert of(mini_batch=32).flow == 3 * matrix // 32 + 2 * column
    assert of(mini_batch=32, matryoshka=3).saved == of(mini_batch=32).saved


def test_a_large_micro_batch_of_short_texts_peaks_in_the_loss() -> None:
    short = replace(PAIRS, micro_batch=8192, sequence_length=1, gathered=8)
    assert estimate_memory(EMBEDDING, short, CPU).components.logits > 3 * 4 * 8192 * 8192 * 8


def test_a_reranker_has_no_matrix() -> None:
    assert contrast(RERANKER, PAIRS, 4, on_cpu=True).saved == 0
    single = replace(PAIRS, sequences_per_sample=1, passes=1, trainable_params=RERANKER.params)
    assert peak(single, RERANKER) == pytest.approx(peak(single, CLASSES), rel=0.001)


def test_predictions_of_an_evaluation_are_embeddings() -> None:
    assert kept_predictions(EMBEDDING, PAIRS) == 8 * 2 * (4 * HIDDEN + 8)
    lists = replace(PAIRS, sequences_per_sample=4, passes=4)
    assert kept_predictions(RERANKER, lists) == 8 * 4 * (4 + 8)


def test_a_cached_loss_computes_all_embeddings_twice() -> None:
    plain, cached = (step_work(EMBEDDING, job, 10**6) for job in (PAIRS, CACHED))
    forward = plain.flops / 3
    assert cached.flops == plain.flops, "the pass without gradients is one of extra_forwards"
    twice = step_work(EMBEDDING, replace(CACHED, extra_forwards=1), 10**6)
    assert twice.flops == pytest.approx(plain.flops + forward)
    assert cached.traffic > 1.2 * plain.traffic
    assert cached.launches == pytest.approx(4 * plain.launches * 4 / 3)
