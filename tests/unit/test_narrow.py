"""Configurations made small: which layers stay, sizes that depend on each other, what JSON cannot hold."""

from __future__ import annotations

import json

import pytest

from launcher.planner.narrow import NARROW, WITH_PLACES, narrow_config

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"num_hidden_layers": 8, "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2}, [LINEAR, FULL]),
        ({"num_hidden_layers": 6, "layer_types": [FULL] * 6}, [FULL, FULL]),
        ({"num_hidden_layers": 6, "layer_types": [LINEAR, SLIDING, FULL] * 2}, [LINEAR, SLIDING, FULL]),
        ({"num_hidden_layers": 1, "layer_types": [FULL]}, [FULL]),
    ],
)
def test_a_layer_of_each_kind_stays_and_at_least_two(config: dict, kept: list[str]) -> None:
    narrow = narrow_config(config)
    assert narrow["layer_types"] == kept
    assert narrow["num_hidden_layers"] == len(kept)


def test_the_depth_may_be_the_length_of_a_list() -> None:
    kinds = [LINEAR, "moe", FULL, "moe", LINEAR]
    assert narrow_config({"layers_block_type": kinds})["layers_block_type"] == [LINEAR, "moe", FULL]


def test_indices_of_layers_are_those_that_the_layers_have_afterwards() -> None:
    config = {"num_hidden_layers": 8, "moe_layers": [1, 3, 5, 7], "first_k_dense_replace": 1}
    narrow = narrow_config(config)
    assert (narrow["num_hidden_layers"], narrow["moe_layers"], narrow["first_k_dense_replace"]) == (3, [1], 1)


def test_parts_are_made_small_as_well() -> None:
    text = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    vision = {"hidden_size": 1152, "depth": 27, "image_size": 448, "patch_size": 14}
    narrow = narrow_config({"text_config": text, "vision_config": vision, "image_token_id": 151655})
    assert narrow["text_config"]["hidden_size"] == NARROW["hidden_size"]
    assert narrow["text_config"]["num_key_value_heads"] == 2
    assert (
        narrow["vision_config"] | {"depth": 2, "image_size": 32, "patch_size": 8} == narrow["vision_config"]
    )
    assert narrow["image_token_id"] < NARROW["vocab_size"]


def test_places_in_an_image_have_room_in_the_vocabulary() -> None:
    """PaliGemma's processor adds 1,024 tokens for places and 128 for segments."""
    large, small = ({"text_config": {"vocab_size": size}, "vision_config": {}} for size in (257216, 900))
    assert narrow_config(large)["text_config"]["vocab_size"] == WITH_PLACES
    assert narrow_config(small)["text_config"]["vocab_size"] == 900
    assert narrow_config({"vocab_size": 257216})["vocab_size"] == NARROW["vocab_size"]


def test_a_key_of_another_kind_of_value_is_another_thing() -> None:
    """`downsample_rate` is a window in Granite 4 Vision and a factor in Phi-4's audio part."""
    found = [narrow_config({"downsample_rate": rate})["downsample_rate"] for rate in ("4/8", 1)]
    assert found == ["2/4", 1]


@pytest.mark.parametrize(
    ("tower", "hidden", "arguments"),
    [
        (
            {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "model_args": None},
            2048,
            {"channel_multiplier": 0.125, "msfa_output_resolution": 2},
        ),
        (
            {
                "architecture": "vit_pe",
                "model_args": {"embed_dim": 1024, "depth": 23, "img_size": [448, 448]},
            },
            None,
            {"embed_dim": 64, "depth": 2, "img_size": [32, 32]},
        ),
        ({"architecture": "resnet50", "model_args": None}, None, None),
    ],
)
def test_a_tower_of_timm_has_the_width_of_its_architecture(
    tower: dict, hidden: int | None, arguments: dict | None
) -> None:
    narrow = narrow_config({"vision_config": tower})["vision_config"]
    assert (narrow.get("hidden_size"), narrow["model_args"]) == (hidden, arguments)


def test_layers_that_take_an_image_are_layers_that_stay() -> None:
    """Pairs of a tower's and a language model's layer: one for each that is left of the language model's."""
    pairs = [[-19, 9], [-13, 6], [-7, 3], [-1, 0]]
    narrow = narrow_config({"deepstack_layer_map": pairs, "spatial_target_layers": [12, 15, 18, 21]})
    assert narrow == narrow | {"deepstack_layer_map": [[-1, 0], [-2, 1]], "spatial_target_layers": [1]}


@pytest.mark.parametrize(("share", "pairs"), [(1.0, 8), (0.25, 2)])
def test_the_sections_of_positions_add_up_to_the_rotated_pairs(share: float, pairs: int) -> None:
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": share, "rope_theta": 1e6}
    assert sum(narrow_config({"rope_parameters": rope})["rope_parameters"]["mrope_section"]) == pairs


def test_factors_of_each_frequency_leave_with_their_kind() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "rope_theta": 10000.0}
    narrow = narrow_config({"rope_parameters": rope})["rope_parameters"]
    assert narrow == {"rope_type": "default", "rope_theta": 10000.0}


def test_json_can_hold_it() -> None:
    config = {"num_hidden_layers": 2, "time_step_limit": [0.0, float("inf")], "time_step_min": 0.001}
    narrow = narrow_config(config)
    assert json.loads(json.dumps(narrow, allow_nan=False)) == narrow
    assert "time_step_limit" not in narrow
    assert narrow["time_step_min"] == 0.001
