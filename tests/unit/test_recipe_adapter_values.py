"""Values inside mappings and lists of `adapter:` and `trainer:`, which their declared types do not reach."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from tests import factories


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("adapter__rank_pattern", '{q_proj: "8"}', "adapter.rank_pattern.q_proj"),
        ("adapter__rank_pattern", "{q_proj: 2.5}", "adapter.rank_pattern.q_proj"),
        ("adapter__rank_pattern", "{q_proj: null}", "adapter.rank_pattern.q_proj"),
        ("adapter__rank_pattern", "{q_proj: 0}", "adapter.rank_pattern.q_proj"),
        ("adapter__rank_pattern", "{q_proj: true}", "adapter.rank_pattern.q_proj"),
        ("adapter__rank_pattern", "{q_proj: 1e400}", "adapter.rank_pattern.q_proj"),
        ("adapter__alpha_pattern", "{q_proj: .nan}", "adapter.alpha_pattern.q_proj"),
        ("adapter__alpha_pattern", "{q_proj: -4}", "adapter.alpha_pattern.q_proj"),
        ("adapter__alpha_pattern", "{q_proj: [1]}", "adapter.alpha_pattern.q_proj"),
        ("adapter__trainable_token_indices", "[3, -1]", "adapter.trainable_token_indices"),
        ("adapter__trainable_token_indices", "{embed_tokens: 3}", "adapter.trainable_token_indices"),
        ("adapter__loftq_config", "{loftq_bits: .inf}", "adapter.loftq_config.loftq_bits"),
        ("adapter__layer_replication", "[[0, .nan]]", "adapter.layer_replication[0][1]"),
        (
            "trainer__activation_checkpointing_kwargs",
            "{every_n_layers: .inf}",
            "trainer.activation_checkpointing_kwargs.every_n_layers",
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_at_its_place(key, value, place, tmp_path):
    with pytest.raises(RecipeError) as caught:
        factories.recipe(tmp_path, **{key: value})
    assert [(p.code, p.path) for p in caught.value.problems] == [("wrong-value", place)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", "{q_proj: 4}"), ("alpha_pattern", "{q_proj: 4.5}"), ("rank_pattern", "null"),
        ("trainable_token_indices", "{embed_tokens: [1, 2]}"), ("trainable_token_indices", "[]"),
    ],
)  # fmt: skip
def test_a_value_that_can_be_is_taken(key, value, tmp_path):
    loaded = factories.recipe(tmp_path, **{f"adapter__{key}": value})
    assert key in loaded.recipe.adapter.model_extra
