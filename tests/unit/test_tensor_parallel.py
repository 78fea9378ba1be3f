"""What one tensor-parallel rank holds, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import A100, JOB_1B, LLAMA_1B, LLAMA_7B, LORA_1B, NODE, STARCODER, ZERO, spec

from launcher.errors import RecipeError
from launcher.memory.estimate import estimate_memory
from launcher.memory.tensor_parallel import check_ranks, on_rank, rank_spec


def llama(hidden: int, inner: int, layers: int, query: int, keys: int) -> int:
    """Weights of the matrices of a Llama's layers."""
    return layers * (2 * hidden * query + 2 * hidden * keys + 3 * hidden * inner)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_key_value_heads_are_divided_then_copied(ranks: int) -> None:
    part = rank_spec(LLAMA_1B, ranks)
    keys = max(1, 8 // ranks) * 64
    assert part.linear_weights == llama(2048, 8192 // ranks, 16, 2048 // ranks, keys)
    assert (part.num_heads, part.num_kv_heads) == (32 // ranks, max(1, 8 // ranks))


def test_a_single_key_value_head_is_held_by_every_rank() -> None:
    part = rank_spec(STARCODER, 8)
    fused = next(linear for linear in part.linears if linear.name == "c_attn")
    assert fused.out_features == 6144 // 8 + 2 * 128


def test_a_head_is_cut_and_an_embedding_only_where_it_is_the_head() -> None:
    matrices, norms, table = llama(4096, 11008, 32, 4096, 4096), 65 * 4096, 32000 * 4096
    assert rank_spec(LLAMA_7B, 4).params == matrices // 4 + norms + table + table // 4
    one_b = llama(2048, 8192, 16, 2048, 512) // 4 + 33 * 2048
    assert rank_spec(LLAMA_1B, 4).params == one_b + 128_256 * 2048 // 4


def test_experts_and_both_stacks_are_divided() -> None:
    mixtral = spec("mistralai/Mixtral-8x7B-v0.1")
    assert rank_spec(mixtral, 4).layout.experts == mixtral.layout.experts // 4
    mt0 = spec("bigscience/mt0-large")
    part = rank_spec(mt0, 4)
    assert part.linear_weights == mt0.linear_weights // 4


def test_adapters_are_divided_with_their_matrices() -> None:
    job = replace(JOB_1B, adapter=True, trainable_params=LORA_1B, tensor_parallel=4)
    part, own = on_rank(LLAMA_1B, job)
    assert (own.tensor_parallel, own.trainable_params) == (1, part.lora_params(16, "all-linear"))
    assert on_rank(LLAMA_1B, JOB_1B) == (LLAMA_1B, JOB_1B)


def test_more_ranks_hold_and_need_less_each() -> None:
    found = []
    for ranks in (1, 2, 4, 8):
        job = replace(ZERO, engine="ddp", dtype="float32", tensor_parallel=ranks, data_parallel=8 // ranks)
        found.append(estimate_memory(LLAMA_7B, job, NODE))
    weights = [memory.components.weights for memory in found]
    assert weights == sorted(weights, reverse=True)
    needs = [memory.needed for memory in found]
    assert needs == sorted(needs, reverse=True)


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        (LLAMA_7B, 33, "33 tensor-parallel ranks are more than the 32 attention heads"),
        (LLAMA_7B, 5, "the 32 attention heads of huggyllama/llama-7b do not divide among 5 ranks"),
        (LLAMA_7B, 16, "8 devices of 8xA100-80GB do not divide into groups of 16"),
        (LLAMA_7B, -1, "-1 tensor-parallel ranks"),
    ],
)
def test_ranks_that_cannot_share(model: object, ranks: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        check_ranks(model, ranks, NODE)  # type: ignore[arg-type]


def test_uneven_key_value_heads_are_refused_and_one_rank_is_always_right() -> None:
    grouped = replace(LLAMA_7B, num_heads=24, num_kv_heads=6)
    with pytest.raises(RecipeError, match="6 key-value heads"):
        check_ranks(grouped, 4, NODE)
    check_ranks(grouped, 2, NODE)
    check_ranks(LLAMA_7B, 1, A100)
