"""What is known of model types that were run, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import facts, recipe

from launcher.errors import RecipeError
from launcher.models.model_types import found, why_not_apart, why_not_chunked, why_not_compiled
from launcher.planner.planner import make_plan

A100 = "1xA100-80GB"
KERNEL, FREE, LOSS, BLOCKS = (
    "model.attn_implementation", "data.padding_free", "model.loss", "model.compile_blocks",
)  # fmt: skip


def plan_of(folder, config, *, foreign=True, **overrides):
    """The plan for a model of another type with llama's sizes: what is decided looks at its configuration."""
    told = facts(A100)
    model = replace(told.model, model_type=config["model_type"], config=config, foreign=foreign)
    return make_plan(recipe(folder, **overrides), replace(told, model=model))


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        ("llama", {"eager", "sdpa", "varlen", "flash_attention_2", "flex_attention"}),
        ("opt", {"varlen", "flash_attention_2"}),  # its mask ignores position_ids
        ("afmoe", {"varlen", "flash_attention_2"}),
        ("stablelm", {"eager", "sdpa", "varlen", "flex_attention"}),  # does not hand on the bounds
        ("gemma2", {"eager", "flash_attention_2", "flex_attention"}),  # capped scores
        ("lfm2", set()),
        ("mamba", set()),
        ("qwen3_next", set()),
        ("llama4_text", set()),  # scales queries by their place in the row
        ("unheard_of", set()),
    ],
)
def test_kernels_that_keep_documents_apart(kind, apart):
    kernels = ("eager", "sdpa", "varlen", "flash_attention_2", "flex_attention")
    assert {kernel for kernel in kernels if not why_not_apart({"model_type": kind}, kernel)} == apart


@pytest.mark.parametrize(
    ("kind", "plain"),
    [("llama", True), ("deepseek_v3", True), ("mamba", True), ("mixtral", True), ("gemma2", False),
     ("granite", False), ("cohere2", False), ("falcon_h1", False), ("unheard_of", False)],
)  # fmt: skip
def test_heads_that_are_one_matrix(kind, plain):
    assert bool(why_not_chunked({"model_type": kind})) is not plain


@pytest.mark.parametrize(
    ("config", "kernel", "word"),
    [
        ({"model_type": "qwen2"}, "varlen", ""),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "varlen", ""),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "conv"]}, "varlen", "conv"),
        ({"model_type": "qwen2", "layer_types": None}, "varlen", ""),
        ({"model_type": "qwen2_moe", "layer_types": ["full_attention"]}, "varlen", ""),
        ({"model_type": "qwen2_moe", "layer_types": ["sliding_attention"]}, "varlen", "sliding_attention"),
        ({"model_type": "qwen2_moe", "layer_types": ["sliding_attention"]}, "sdpa", ""),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "varlen", "bidirectional"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": False}, "varlen", ""),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "varlen", "all"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}, "varlen", ""),
    ],
)
def test_a_switch_that_was_not_tried_is_no_proof(config, kernel, word):
    why = why_not_apart(config, kernel)
    assert bool(why) is bool(word)
    assert word in why


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ({"model_type": "gemma4_text", "final_logit_softcapping": 30.0}, False),
        ({"model_type": "gemma4_text", "final_logit_softcapping": None}, True),
        ({"model_type": "cohere_compass_text", "logit_scale": 0.25}, False),
        ({"model_type": "falcon", "multi_query": False}, False),
        ({"model_type": "falcon", "multi_query": True}, True),
        ({"model_type": "gemma3", "text_config": {"layer_types": ["full_attention"]}}, True),
        ({"model_type": "gemma3", "text_config": {"layer_types": ["linear_attention"]}}, False),
    ],
)
def test_a_head_is_plain_with_the_switches_that_were_tried(config, plain):
    assert bool(why_not_chunked(config)) is not plain


@pytest.mark.parametrize(
    ("kind", "kernel", "free", "loss"),
    [
        ("llama", "varlen", True, "chunked"),
        ("opt", "varlen", True, "chunked"),
        ("deepseek_v3", "varlen", True, "chunked"),
        ("cohere2", "varlen", True, "full"),
        ("lfm2", "sdpa", False, "chunked"),
        ("mamba", "sdpa", False, "chunked"),
        ("llama4_text", "sdpa", False, "chunked"),
        ("falcon_h1", "sdpa", False, "full"),
        ("unheard_of", "sdpa", False, "full"),
    ],
)
def test_what_a_plan_turns_on_for_a_type(tmp_path, kind, kernel, free, loss):
    made = plan_of(tmp_path, {"model_type": kind})
    assert (made.at(KERNEL), made.at(FREE), made.at(LOSS)) == (kernel, free, loss)
    if not free:
        assert f"samples of {kind} in one row were not shown to stay apart" in made.provenance[FREE].reason


@pytest.mark.parametrize(
    ("kind", "given", "place"),
    [
        ("lfm2", {"data__packing": "true"}, "data.packing"),
        ("mamba", {"data__padding_free": "true"}, "data.padding_free"),
        ("llama4_text", {"data__packing": "true", "model__attn_implementation": "sdpa"}, "data.packing"),
        ("afmoe", {"data__packing": "true", "model__attn_implementation": "sdpa"}, "data.packing"),
        ("stablelm", {"data__packing": "true", "model__attn_implementation": "flash_attention_2"},
         "data.packing"),
    ],
)  # fmt: skip
def test_packing_is_refused_where_the_chosen_kernel_leaks(tmp_path, kind, given, place):
    with pytest.raises(RecipeError) as caught:
        plan_of(tmp_path, {"model_type": kind}, **given)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("fix-packing-family", place)


@pytest.mark.parametrize("kind", ["afmoe", "deepseek_v3", "gemma4_text"])
def test_packing_takes_the_kernel_that_keeps_documents_apart(tmp_path, kind):
    made = plan_of(tmp_path, {"model_type": kind}, data__packing="true")
    assert (made.at(KERNEL), made.at(FREE)) == ("varlen", True)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"model__attn_implementation": "varlen"}, "attention-conflict"),
        ({"model__attn_implementation": "flex_attention"}, "attention-conflict"),
    ],
)
def test_a_kernel_that_leaks_is_refused_at_its_line(tmp_path, given, code):
    with pytest.raises(RecipeError) as caught:
        plan_of(tmp_path, {"model_type": "lfm2"}, **given)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == (code, KERNEL)


def test_flex_attention_is_for_closed_forms(tmp_path):
    given = {"model__attn_implementation": "flex_attention"}
    assert plan_of(tmp_path, {"model_type": "llama"}, foreign=False, **given).at(KERNEL) == "flex_attention"
    with pytest.raises(RecipeError):
        plan_of(tmp_path, {"model_type": "deepseek_v3"}, **given)


def test_blocks_are_compiled_by_default_only_where_that_was_tried(tmp_path):
    long = {"trainer__max_steps": 200000}
    assert plan_of(tmp_path, {"model_type": "llama"}, **long).at(BLOCKS) is True
    made = plan_of(tmp_path, {"model_type": "unheard_of"}, **long)
    assert made.at(BLOCKS) is False
    assert why_not_compiled("unheard_of") in made.provenance[BLOCKS].reason
    asked = plan_of(tmp_path, {"model_type": "unheard_of"}, **long, model__compile_blocks="true")
    assert asked.at(BLOCKS) is True


def test_types_that_passed_nothing_are_not_listed():
    assert found("xlm") == found("unheard_of")
