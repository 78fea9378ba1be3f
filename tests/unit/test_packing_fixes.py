"""Packing is refused where documents would see each other, and only there."""

from __future__ import annotations

import pytest
from factories import BASE, plan, recipe

from launcher.errors import RecipeError
from launcher.planner.fixes.packing import PACKING_FIXES

OPT = BASE.replace("huggyllama/llama-7b", "facebook/opt-6.7b")
FLASH = {"model__attn_implementation": "flash_attention_2"}
SDPA = {"model__attn_implementation": "sdpa"}

# id: (recipe, overrides, setting at fault)
REFUSED = {
    "packing-family": [
        (OPT, {"data__packing": "true", **SDPA}, "data.packing"),
        (OPT, {"data__padding_free": "true", **SDPA}, "data.padding_free"),
    ],
    "packing-cache": [
        (BASE, {"data__packing": "true", "trainer__use_cache": "true"}, "trainer.use_cache"),
        (BASE, {"data__padding_free": "true", "trainer__use_cache": "true"}, "trainer.use_cache"),
    ],
    "packing-flash-rows": [
        (BASE, {"data__packing": "true", "data__padding_free": "false", **FLASH}, "data.padding_free"),
    ],
}
ACCEPTED = [
    (BASE, {}),
    (BASE, {"data__packing": "true"}),
    (BASE, {"data__packing": "true", **FLASH}),
    (BASE, {"data__padding_free": "true", "trainer__use_cache": "false"}),
    (BASE, {"trainer__use_cache": "true"}),
    (OPT, {}),
    (OPT, {"data__packing": "false"}),
    (OPT, {"data__packing": "true"}),
    (OPT, {"data__packing": "true", **FLASH}),
]


def fixes_of(made):
    return {fix.id for fix in made.fixes}


@pytest.mark.parametrize(
    ("name", "text", "overrides", "setting"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_a_leak_is_refused_where_it_is_asked_for(tmp_path, name, text, overrides, setting):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, "8xA100-80GB", text, **overrides)
    assert [problem.code for problem in caught.value.problems] == [f"fix-{name}"]
    problem = caught.value.problems[0]
    assert problem.path == setting
    assert problem.hint
    assert f"disable: [{name}]" in problem.hint
    accepted = plan(tmp_path, "8xA100-80GB", text, fixes__disable=f"[{name}]", **overrides)
    assert name not in fixes_of(accepted)


@pytest.mark.parametrize(("text", "overrides"), ACCEPTED)
def test_what_keeps_documents_apart_is_not_refused(tmp_path, text, overrides):
    made = plan(tmp_path, "8xA100-80GB", text, **overrides)
    assert not fixes_of(made) & {fix.id for fix in PACKING_FIXES if fix.action == "refuse"}


@pytest.mark.parametrize("task", ["seq2seq-lm", "sequence-classification", "dpo"])
@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_other_tasks_are_not_packed(tmp_path, task, key):
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, BASE, task=task, **{f"data__{key}": "true"})
    assert f"data.{key}" in {problem.path for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ({"data__padding_free": "true", "trainer__per_device_train_batch_size": 8, **SDPA}, False),
        ({"data__padding_free": "true", "trainer__per_device_train_batch_size": 16, **SDPA}, True),
        ({"data__padding_free": "true", "trainer__per_device_train_batch_size": 16}, False),
        ({"data__padding_free": "true", "trainer__per_device_train_batch_size": 16, **FLASH}, False),
        ({"data__packing": "true", "trainer__per_device_train_batch_size": 16}, False),
        ({"trainer__per_device_train_batch_size": 16}, False),
    ],
)
def test_a_mask_over_a_long_flattened_row_is_warned_of(tmp_path, overrides, warned):
    made = plan(tmp_path, "8xA100-80GB", BASE, data__max_length=2048, **overrides)
    assert ("padding-free-mask" in fixes_of(made)) is warned
    assert any("padding-free" in warning for warning in made.warnings) is warned


def test_rows_that_are_not_packed_are_not_said_to_be_padded(tmp_path):
    made = plan(tmp_path, "1xA100-80GB")
    assert (made.data.packing, made.data.padding_free) == (False, True)
    assert "padded" not in made.provenance["data.packing"].reason
