"""What generated processors are made of, and where a processor's text for an image is."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")
transformers = pytest.importorskip("transformers")

from launcher.planner.narrow import narrow_config  # noqa: E402
from launcher.train.data.image_chat import replacements  # noqa: E402
from launcher.train.derived_processor import (  # noqa: E402
    image_fields,
    image_tokens,
    processor_classes,
    tokens_of,
)
from launcher.train.tiny_processor import tiny_processor  # noqa: E402

SQUARE = {"height": 32, "width": 32}


@pytest.mark.parametrize(
    ("kind", "classes", "named", "token", "fields", "tokens"),
    [
        (
            "glm46v",
            ["Glm46VProcessor", "Glm46VImageProcessorPil"],
            {"image_token": "<|image|>", "video_token": "<|video|>"},
            "<|begin_of_image|>",
            {
                "patch_size": 8,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "size": {"shortest_edge": 1024, "longest_edge": 2304},
            },
            4,
        ),
        (
            "llava_next",
            ["LlavaNextProcessor", "LlavaNextImageProcessorPil"],
            {"image_token": "<|image|>"},
            "<image>",
            {
                "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
                "size": {"shortest_edge": 32},
                "crop_size": SQUARE,
            },
            16,
        ),
    ],
)
def test_a_family_has_the_classes_tokens_and_sizes_of_its_code(
    kind: str, classes: list[str], named: dict[str, str], token: str, fields: dict[str, Any], tokens: int
) -> None:
    found = processor_classes(kind)
    assert found is not None
    assert [one.__name__ for one in found] == classes
    assert tokens_of(found[0])[0] == named
    assert token in tokens_of(found[0])[1]
    whole = transformers.AutoConfig.for_model(kind).to_dict()
    config = transformers.AutoConfig.for_model(**narrow_config(whole | {"model_type": kind}))
    assert image_fields(found[1], config) == fields
    assert image_tokens(config) == tokens


def test_a_field_that_the_processor_reads_is_made() -> None:
    kind = transformers.SiglipImageProcessorPil
    config = transformers.AutoConfig.for_model("paligemma")
    assert "image_seq_length" not in image_fields(kind, config)
    assert "image_seq_length" in image_fields(kind, config, "image_processor.image_seq_length")


def test_an_image_has_the_tokens_that_a_tower_of_fixed_queries_gives() -> None:
    """DeepSeek-OCR 2 has 144 queries for a small image, and a token after them."""
    from PIL import Image

    whole = transformers.AutoConfig.for_model("deepseek_ocr2").to_dict() | {"model_type": "deepseek_ocr2"}
    config = transformers.AutoConfig.for_model(**narrow_config(whole))
    processor = tiny_processor(config)
    image = Image.new("RGB", (900, 300))  # its class would crop it
    made = processor(text=["<image>"], images=[[image]], return_tensors="pt")
    assert int((made["input_ids"] == processor.image_token_id).sum()) == 145
    assert made["num_local_patches"].tolist() == [0]


def test_a_type_without_a_processor_has_no_classes() -> None:
    assert processor_classes("llama") is None


def test_replacements_are_where_the_texts_for_images_are() -> None:
    assert replacements("a<i>b<i>c", "<i>", ["aXXXbYYc"]) == [
        {"span": (1, 4), "new_span": (1, 4)},
        {"span": (5, 8), "new_span": (5, 7)},
    ]


@pytest.mark.parametrize("heard", [[], ["aXXXd"], ["aXXXbYYc", "aXXXbYYc"], ["ab<i>c"]])
def test_a_text_in_which_more_is_replaced_has_no_replacements(heard: list[str]) -> None:
    assert replacements("a<i>b<i>c", "<i>", heard) is None
