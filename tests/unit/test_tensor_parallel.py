"""What one tensor-parallel rank holds, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import A100, JOB_1B, LLAMA_1B, LLAMA_7B, LORA_1B, NODE, STARCODER, ZERO, spec

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.errors import RecipeError
from launcher.machine.hardware import parse_hardware
from launcher.memory.activations import make_block
from launcher.memory.estimate import estimate_memory, max_micro_batch
from launcher.memory.loss import evaluation_bytes, head_cost
from launcher.memory.tensor_parallel import check_ranks, on_rank, rank_spec
from launcher.models.layers.layout import Dtypes
from launcher.models.lora import lora_params
from launcher.models.model import read_model_spec

GEMMA = read_model_spec(
    "gemma-2b",
    {
        "model_type": "gemma", "vocab_size": 256_000, "hidden_size": 2048, "intermediate_size": 16384,
        "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256,
    },
    "test",
)  # fmt: skip

ENGINE = {engine.name: engine for engine in (DDP, DEEPSPEED)}


def llama(hidden: int, inner: int, layers: int, query: int, keys: int) -> int:
    """Weights of the matrices of a Llama's layers."""
    return layers * (2 * hidden * query + 2 * hidden * keys + 3 * hidden * inner)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_key_value_heads_are_divided_then_copied(ranks: int) -> None:
    part = rank_spec(LLAMA_1B, ranks, DEEPSPEED)
    keys = max(1, 8 // ranks) * 64
    assert part.linear_weights == llama(2048, 8192 // ranks, 16, 2048 // ranks, keys)
    assert (part.num_heads, part.num_kv_heads) == (32 // ranks, max(1, 8 // ranks))


def test_a_single_key_value_head_is_held_by_every_rank() -> None:
    part = rank_spec(STARCODER, 8, DEEPSPEED)
    fused = next(linear for linear in part.linears if linear.name == "c_attn")
    assert fused.out_features == 6144 // 8 + 2 * 128


@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
def test_a_head_is_cut_and_an_embedding_only_where_it_is_the_head(engine: str) -> None:
    matrices, norms, table = llama(4096, 11008, 32, 4096, 4096), 65 * 4096, 32000 * 4096
    assert rank_spec(LLAMA_7B, 4, ENGINE[engine]).params == matrices // 4 + norms + table + table // 4
    one_b = llama(2048, 8192, 16, 2048, 512) // 4 + 33 * 2048
    assert rank_spec(LLAMA_1B, 4, ENGINE[engine]).params == one_b + 128_256 * 2048 // 4


def test_a_tied_embedding_that_scales_stays_whole_under_autotp_with_its_head() -> None:
    table = 256_000 * 2048
    cut, whole = rank_spec(GEMMA, 2, DDP), rank_spec(GEMMA, 2, DEEPSPEED)
    assert whole.params - cut.params == table // 2
    assert whole.head == GEMMA.head


ROWS, LENGTH = 4, 2048
MODELS = {"untied": (LLAMA_7B, 32_000), "tied": (LLAMA_1B, 128_256), "tied, scaling": (GEMMA, 256_000)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["deepspeed", "ddp"])
@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_holds_the_scores_of_all_words_unless_autotp_leaves_them_apart(
    kind: str, engine: str, precision: str
) -> None:
    """Bytes as an allocator saw them on two real ranks."""
    model, words = MODELS[kind]
    tokens, shifted = ROWS * LENGTH, ROWS * (LENGTH - 1)
    part = rank_spec(model, 8, ENGINE[engine])
    d = Dtypes(2, 2, False) if precision == "bf16" else Dtypes(4, 4, False)
    block = make_block(part, d, part.layout, ROWS, LENGTH, "sdpa")
    found = head_cost(block, part.head, "causal-lm", 4.0, False)
    evaluated = evaluation_bytes(block, part.head, part.task)
    stream = tokens * part.hidden_size * d.compute
    if kind == "tied" and engine == "deepspeed":
        own = words // 8
        forward = (
            own * (tokens * 2 + shifted * 14) if precision == "bf16" else own * (tokens + shifted * 3) * 4
        )
        backward = own * shifted * (10 if precision == "bf16" else 8)
    else:
        # Two whole copies beside the own part while they are gathered: more than a float32 loss takes.
        gathered = (2 + 1 / 8) * 4 if part.head.gathered else 8
        forward = int(words * tokens * (10 if precision == "bf16" else gathered))
        backward = 12 * words * tokens
    assert (found.forward, found.backward) == (forward, backward)
    assert found.peak.total >= backward
    assert evaluated == stream + forward


def test_one_rank_alone_holds_what_it_held() -> None:
    assert on_rank(LLAMA_7B, ZERO)[0].head == LLAMA_7B.head


def test_a_batch_whose_gathered_scores_do_not_fit_is_not_chosen() -> None:
    model, node = spec("meta-llama/Llama-3.1-8B"), parse_hardware("8xH100-80GB")
    job = replace(
        ZERO, zero_stage=1, trainable_params=model.params, tensor_parallel=8, data_parallel=1,
        sequence_length=8192, eval_batch=0, checkpointing=True,
    )  # fmt: skip
    found = estimate_memory(model, replace(job, micro_batch=8), node)
    assert found.fits is False
    assert found.components.logits == 12 * 8 * 8192 * 128_256
    assert max_micro_batch(model, job, node) in (3, 4)


def test_experts_and_both_stacks_are_divided() -> None:
    mixtral = spec("mistralai/Mixtral-8x7B-v0.1")
    assert rank_spec(mixtral, 4, DEEPSPEED).layout.experts == mixtral.layout.experts // 4
    mt0 = spec("bigscience/mt0-large")
    part = rank_spec(mt0, 4, DEEPSPEED)
    assert part.linear_weights == mt0.linear_weights // 4


def test_adapters_are_divided_with_their_matrices() -> None:
    job = replace(JOB_1B, adapter=True, trainable_params=LORA_1B, tensor_parallel=4)
    part, own = on_rank(LLAMA_1B, job)
    assert (own.tensor_parallel, own.trainable_params) == (1, lora_params(part, 16, "all-linear"))
    assert on_rank(LLAMA_1B, JOB_1B) == (LLAMA_1B, JOB_1B)


def test_more_ranks_hold_and_need_less_each() -> None:
    found = []
    for ranks in (1, 2, 4, 8):
        job = replace(ZERO, engine=DDP, dtype="float32", tensor_parallel=ranks, data_parallel=8 // ranks)
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
