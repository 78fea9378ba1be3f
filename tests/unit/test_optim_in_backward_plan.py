"""`sharding.optim_in_backward` in the plan: what it needs, what it saves, and where it is offered."""

from __future__ import annotations

import pytest
from factories import BASE, facts, plan, recipe

from launcher.errors import DoesNotFit, RecipeError
from launcher.planner.planner import make_plan

FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")
ONE = {
    "global_batch_size": 1, "precision": "bf16-true", "data__max_length": 2048,
    "trainer__activation_checkpointing": "true", "trainer__optim": "paged_adamw_8bit",
}  # fmt: skip
WITHIN = {**ONE, "trainer__max_grad_norm": 0, "sharding__optim_in_backward": "true"}
CARD = "1xRTX4090-24GB"


@pytest.mark.parametrize(
    ("overrides", "on", "path"),
    [
        ({}, "2xRTX4090-24GB", "sharding.optim_in_backward"),
        ({"sharding__engine": "fsdp"}, CARD, "sharding.optim_in_backward"),
        ({"sharding__engine": "deepspeed", "precision": "bf16"}, CARD, "sharding.optim_in_backward"),
        ({"text": BASE}, CARD, "sharding.optim_in_backward"),
        ({"trainer__max_grad_norm": 1.0}, CARD, "trainer.max_grad_norm"),
        ({"precision": "fp16"}, CARD, "precision"),
        ({"trainer__optim": "lomo"}, CARD, "trainer.optim"),
        (
            {"global_batch_size": 2, "trainer__per_device_train_batch_size": 1},
            CARD, "sharding.optim_in_backward",
        ),
    ],
)  # fmt: skip
def test_what_needs_several_gradients_at_once_is_refused(tmp_path, overrides, on, path):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, on, **{"text": FULL, **WITHIN, **overrides})
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("optim-in-backward", path)
    assert problem.hint


def test_one_gradient_is_counted_and_every_one_without(tmp_path):
    after = plan(tmp_path, "1xA100-80GB", FULL, **ONE)
    within = plan(tmp_path, "1xA100-80GB", FULL, **WITHIN)
    largest = 2 * after.spec.head.in_features * after.spec.head.out_features
    assert after.memory.phases["step"].gradients == 2 * after.spec.params
    assert within.memory.phases["step"].gradients == largest
    assert after.memory.needed - within.memory.needed > 0.8 * 2 * after.spec.params
    assert within.time.likely == pytest.approx(after.time.likely, rel=1e-6), "as many bytes and products"


def test_the_search_takes_micro_batches_of_whole_steps_alone(tmp_path):
    made = plan(tmp_path, "1xA100-80GB", FULL, **{**WITHIN, "global_batch_size": 2})
    assert (made.batch.micro, made.batch.accumulation) == (2, 1)


def test_it_is_offered_where_one_card_holds_the_weights_and_not_their_gradients(tmp_path):
    loaded, known = recipe(tmp_path, FULL, **ONE), facts(CARD)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(loaded, known)
    change = {"sharding.optim_in_backward": True, "trainer.max_grad_norm": 0}
    (offered,) = [other for other in caught.value.would_fit if other.change == change]
    made = make_plan(recipe(tmp_path, FULL, **WITHIN), known)
    assert made.memory == offered.candidate.memory, "what is offered is what would be planned"
