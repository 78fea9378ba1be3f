"""`model.kbit_norms`: what a plan makes of it, where it is refused, and that it is offered."""

from __future__ import annotations

import pytest
from factories import BASE, facts, plan, recipe

from launcher.errors import DoesNotFit, RecipeError
from launcher.planner.planner import make_plan
from launcher.planner.search import search, search_rows
from launcher.planner.tiny import tiny_on_cpu

KEY = "model.kbit_norms"
LLAMA = "meta-llama/Llama-3.1-8B"
QLORA = BASE.replace("huggyllama/llama-7b}", LLAMA + ", quantization: nf4}") + "precision: bf16\n"
ONE = "1xA100-80GB"


def planned(folder, on=ONE, text=QLORA, task="causal-lm", **changes):
    return make_plan(recipe(folder, text, **changes), facts(on, LLAMA, task))


def refused(folder, on=ONE, text=QLORA, task="causal-lm", **changes):
    with pytest.raises(RecipeError) as caught:
        planned(folder, on, text, task, **changes)
    (problem,) = caught.value.problems
    return problem.code, problem.path


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp4"])
def test_frozen_values_take_two_bytes_less(tmp_path, kind):
    quantised = {"model__quantization": kind, "trainer__per_device_train_batch_size": 1}
    wide = planned(tmp_path, **quantised)
    narrow = planned(tmp_path, **quantised, model__kbit_norms="bfloat16")
    assert (wide.model.kbit_norms, narrow.model.kbit_norms) == ("float32", "bfloat16")
    assert narrow.provenance[KEY].source == "override"
    rest = narrow.spec.params - narrow.spec.quantized_weights(kind)
    assert wide.memory.components.weights - narrow.memory.components.weights == 2 * rest
    assert narrow.memory.total < wide.memory.total - 2 * rest, "and what flows between the layers"
    adapter = 4 * narrow.job.trainable_params
    assert narrow.memory.load_peak >= wide.memory.load_peak - adapter, "peft widens them first"


def test_an_unquantised_plan_has_none(tmp_path):
    assert KEY not in plan(tmp_path).provenance


@pytest.mark.parametrize("quantization", ["none", "null"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_it_needs_a_quantised_base(tmp_path, dtype, quantization):
    text = QLORA.replace(
        "quantization: nf4", f"quantization: {quantization}" if quantization != "null" else ""
    )
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, text.replace("model: {", f"model: {{kbit_norms: {dtype}, "))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("conflict", KEY)
    assert problem.line is not None


@pytest.mark.parametrize(
    ("on", "changes"),
    [
        (ONE, {"precision": "fp16"}),
        (ONE, {"precision": "fp32"}),
        (ONE, {"model__dtype": "float16"}),
        (ONE, {"model__dtype": "auto"}),
        ("1xV100-32GB", {"precision": "auto"}),
        ("cpu", {"precision": "auto"}),
    ],
)
def test_it_needs_bfloat16(tmp_path, on, changes):
    found = refused(tmp_path, on, model__kbit_norms="bfloat16", **changes)
    assert found == ("kbit-norms-precision", KEY)


@pytest.mark.parametrize("saved", ["[lm_head]", "[embed_tokens]", "[model.embed_tokens]"])
def test_embedding_and_head_cannot_be_trained_beside_it(tmp_path, saved):
    found = refused(tmp_path, model__kbit_norms="bfloat16", adapter__modules_to_save=saved)
    assert found == ("kbit-norms-trained", KEY)
    assert planned(tmp_path, adapter__modules_to_save=saved).model.kbit_norms == "float32"


def test_a_classifiers_head_needs_autocast(tmp_path):
    classes = {"task": "sequence-classification", "model__kbit_norms": "bfloat16"}
    assert planned(tmp_path, **classes).model.kbit_norms == "bfloat16"
    assert refused(tmp_path, precision="bf16-true", **classes) == ("kbit-norms-trained", KEY)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_deepspeed_casts_them_whatever_peft_did(tmp_path, precision, dtype):
    changes = {"sharding__zero_stage": 2, "precision": precision}
    made = planned(tmp_path, "2xA100-80GB", **changes)
    assert made.model.kbit_norms == made.job.kbit_norms == dtype
    for asked in ("float32", "bfloat16"):
        if asked == dtype:
            assert (
                planned(tmp_path, "2xA100-80GB", **changes, model__kbit_norms=asked).model.kbit_norms == dtype
            )
        else:
            code, path = refused(tmp_path, "2xA100-80GB", **changes, model__kbit_norms=asked)
            assert path == KEY
            assert code == ("kbit-norms-precision" if precision == "fp32" else "kbit-norms-engine")


def test_auto_is_searched_with_its_trade(tmp_path):
    found = search(recipe(tmp_path, QLORA, model__kbit_norms="auto"), facts(ONE, LLAMA))
    rows = search_rows(found, 10)
    by_dtype = {row["settings"][KEY]: row for row in rows}
    assert set(by_dtype) == {"float32", "bfloat16"}
    assert "bfloat16 norms: saves" in by_dtype["bfloat16"]["trade"]
    assert "bfloat16 norms" not in by_dtype["float32"]["trade"]


def test_auto_beside_a_quantisation_that_is_open(tmp_path):
    text = QLORA.replace("quantization: nf4", "quantization: auto, kbit_norms: auto")
    found = search(recipe(tmp_path, text), facts(ONE, LLAMA))
    kinds = [(c.job.quantization, c.job.kbit_norms) for c in (*found.ranked, *found.misses)]
    assert ("none", "float32") in kinds
    assert ("none", "bfloat16") not in kinds
    assert {("int8", "bfloat16"), ("nf4", "bfloat16"), ("nf4", "float32")} <= set(kinds)


def test_auto_is_float32_where_bfloat16_cannot_be(tmp_path):
    assert planned(tmp_path, precision="fp16", model__kbit_norms="auto").model.kbit_norms == "float32"


def pinned(length):
    return {
        "data__max_length": length,
        "trainer__per_device_train_batch_size": 1,
        "trainer__activation_checkpointing": True,
    }


def test_it_is_offered_where_it_makes_a_plan_fit(tmp_path):
    known = facts("1x12GB", LLAMA)
    for length in range(1024, 32768, 1024):
        try:
            make_plan(recipe(tmp_path, QLORA, **pinned(length)), known)
        except DoesNotFit as error:
            missed = error
            break
    (other,) = [one for one in missed.would_fit if KEY in one.change]
    assert other.change == {KEY: "bfloat16"}
    assert other.text in missed.problems[0].hint
    assert "less exact" in other.text
    fits = make_plan(recipe(tmp_path, QLORA, **pinned(length), model__kbit_norms="bfloat16"), known)
    assert fits.memory == other.candidate.memory


def test_it_is_not_offered_where_it_cannot_be(tmp_path):
    text = QLORA.replace("precision: bf16", "precision: fp16")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(recipe(tmp_path, text, **pinned(65536)), facts("1xV100-16GB", LLAMA))
    assert not [one for one in caught.value.would_fit if KEY in one.change]


def test_a_rehearsal_on_a_cpu_has_float32(tmp_path):
    loaded = recipe(tmp_path, QLORA.replace("precision: bf16\n", ""), model__kbit_norms="bfloat16")
    assert tiny_on_cpu(loaded).recipe.model.kbit_norms is None
    loaded = recipe(tmp_path, QLORA, model__kbit_norms="bfloat16")
    assert tiny_on_cpu(loaded).recipe.model.kbit_norms == "bfloat16"
