"""Generated processors for `--tiny` and tests: the image processor of a family with a generated tokenizer.

Sizes of images and patches are those of the configuration, so that an image has the number of tokens that the
model gives it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.derived_processor import (
    image_fields,
    other_parts,
    processor_classes,
    processor_fields,
    token_ids,
    tokens_of,
    unknown_tokens,
)

_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{% for part in m['content'] %}{{ part['text'] }}"
    "{% endfor %}<|eos|>{% endgeneration %}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|eos|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Family:
    """How the processor of a family is made."""

    processor: str
    """Class names of transformers."""
    image_processor: str
    tokens: Mapping[str, str]
    """Field of the configuration with a token's id -> the token."""
    image: str
    """What a chat template writes for an image."""
    sizes: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]
    """Configuration -> (fields of the image processor, of the processor)."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Attribute of the tokenizer -> token, where the processor asks for it."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Other parts of the processor -> their classes."""
    others: tuple[str, ...] = ()
    """Tokens that no field of the configuration names."""


def _of_qwen(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = config.vision_config
    token = (vision.patch_size * vision.spatial_merge_size) ** 2  # pixels
    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    return {**sizes, "min_pixels": 4 * token, "max_pixels": 9 * token}, {}


def _of_gemma3(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    side = config.vision_config.image_size
    return {"size": {"height": side, "width": side}}, {"image_seq_length": config.mm_tokens_per_image}


def _of_gemma4(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = config.vision_config
    return {
        "patch_size": vision.patch_size,
        "pooling_kernel_size": vision.pooling_kernel_size,
        "max_soft_tokens": 70,
    }, {}


def _of_idefics3(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    sizes = {
        "size": {"longest_edge": vision.image_size},  # one tile, not several
        "max_image_size": {"longest_edge": vision.image_size},
    }
    return sizes, {"image_seq_len": tokens}


def _of_llava(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    side = config.vision_config.image_size
    more = {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": 1,
    }
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}, more


def _of_fast_vlm(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    patch, side = 64, 128  # FastViT makes a token of 64 x 64 pixels, of which no configuration has the number
    more = {"patch_size": patch, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}, more


def _of_deepseek_ocr2(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    # The tower has queries for images of 12 x 12 and of 16 x 16 tokens, whatever the configuration says.
    patch, share = config.vision_config.sam_config.patch_size, 4
    side = 12 * patch * share
    sizes = {"size": {"height": side, "width": side}, "tile_size": side, "crop_to_patches": False}
    return sizes, {"patch_size": patch, "downsample_ratio": share}


def _of_perception_lm(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = config.vision_config
    patch = int(re.findall(r"patch(\d+)", vision.architecture)[0])
    sizes = {"tile_size": vision.model_args["img_size"][0], "vision_input_type": "vanilla"}
    return sizes, {"patch_size": patch, "pooling_ratio": config.projector_pooling_ratio}


_QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN3 = Family("Qwen3VLProcessor", "Qwen2VLImageProcessorPil", _QWEN_TOKENS, _QWEN_IMAGE, _of_qwen)
_IDEFICS_TOKENS = {"image_token_id": "<image>"}
_IDEFICS_OTHERS = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen2_5_vl": Family(
        "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", _QWEN_TOKENS, _QWEN_IMAGE, _of_qwen
    ),
    "qwen2_vl": Family("Qwen2VLProcessor", "Qwen2VLImageProcessorPil", _QWEN_TOKENS, _QWEN_IMAGE, _of_qwen),
    "gemma3": Family(
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        "<start_of_image>",
        _of_gemma3,
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "gemma4": Family(
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        {
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "image_token_id": "<|image|>",
            "boa_token_id": "<|audio>",
            "eoa_token_id": "<audio|>",
            "audio_token_id": "<|audio|>",
        },
        "<|image|>",
        _of_gemma4,
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        {"feature_extractor": "Gemma4AudioFeatureExtractor"},
    ),
    "idefics3": Family(
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        _IDEFICS_TOKENS,
        "<image>",
        _of_idefics3,
        others=_IDEFICS_OTHERS,
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        "SmolVLMImageProcessorPil",
        _IDEFICS_TOKENS,
        "<image>",
        _of_idefics3,
        others=_IDEFICS_OTHERS,
    ),
    "llava": Family(
        "LlavaProcessor", "LlavaImageProcessorPil", {"image_token_index": "<image>"}, "<image>", _of_llava
    ),
    "deepseek_ocr2": Family(
        "DeepseekOcr2Processor",
        "DeepseekOcr2ImageProcessorPil",
        {"image_token_id": "<image>"},
        "<image>",
        _of_deepseek_ocr2,
    ),
    "fast_vlm": Family(
        "LlavaProcessor", "CLIPImageProcessorPil", {"image_token_index": "<image>"}, "<image>", _of_fast_vlm
    ),
    "perception_lm": Family(
        "PerceptionLMProcessor",
        "PerceptionLMImageProcessor",
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
        "<|image|>",
        _of_perception_lm,
        {"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
}
"""Families whose processors need more than `derived_processor` finds, by model type."""


def tiny_processor(config: Any) -> Any:
    """The processor of a configuration, with the vocabulary of `tiny_tokenizer` and the family's tokens.

    RecipeError for a model type whose processor is not known.
    """
    from launcher.train.model.processors import around_image, image_mark, make_processor, preferring
    from launcher.train.tiny import tiny_tokenizer

    kind, family = config.model_type, FAMILIES.get(config.model_type)
    made = _of_family(family, config) if family else _of_classes(config)
    tokenizer = tiny_tokenizer(512, made.named)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(made.tokens)})
    image_processor = made.image_processor(**made.sizes)
    parts = {"image_processor": image_processor, "tokenizer": tokenizer, **made.parts}
    try:
        processor = make_processor(made.processor, **parts, **made.fields)
        if lacking := unknown_tokens(processor):
            tokenizer.add_special_tokens({"additional_special_tokens": lacking})
            processor = make_processor(made.processor, **parts, **made.fields)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _unknown(kind, f": {type(error).__name__}: {error}") from error
    image = family.image if family else image_mark(processor)
    if not isinstance(image, str):
        raise _unknown(kind, f": {made.processor.__name__} has no image_token")
    if not family:
        begin, end = around_image(processor)
        image = f"{begin}{image}{end}\n"  # two images beside each other can be told apart
    processor.chat_template = tokenizer.chat_template = _TEMPLATE.replace("IMAGE", image)
    return preferring(processor, made.sizes)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a processor is made of."""

    processor: type[Any]
    image_processor: type[Any]
    named: Mapping[str, str]
    tokens: frozenset[str]
    sizes: Mapping[str, Any]
    fields: Mapping[str, Any]
    parts: Mapping[str, Any]


def _of_family(family: Family, config: Any) -> _Made:
    import transformers

    sizes, more = family.sizes(config)
    parts = {name: getattr(transformers, kind)() for name, kind in family.parts.items()}
    classes = [getattr(transformers, name) for name in (family.processor, family.image_processor)]
    tokens = frozenset({*family.tokens.values(), *family.others})
    return _Made(classes[0], classes[1], family.named, tokens, sizes, more, parts)


def _of_classes(config: Any) -> _Made:
    found = processor_classes(config.model_type)
    if found is None:
        raise _unknown(config.model_type, ": transformers has no processor for it")
    named, tokens = tokens_of(found[0])
    code = inspect.getsource(found[0])
    sizes, fields = image_fields(found[1], config, code), processor_fields(found[0], config)
    parts = other_parts(found[0], config.model_type, named)
    return _Made(*found, named, frozenset(tokens), sizes, fields, parts)


def _unknown(model_type: str, why: str) -> RecipeError:
    message = f"no processor can be generated for model_type {model_type}{why}"
    hint = "run the recipe itself with `trainer.max_steps: 4` where its processor can be read"
    return RecipeError(Problem("tiny-processor", message, path="model.name_or_path", hint=hint))


def set_token_ids(config: Any, processor: Any) -> None:
    """The configuration's ids of a family's tokens as the generated tokenizer has them."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        for name, number in token_ids(config, processor).items():
            setattr(config, name, number)
        return
    for name, token in family.tokens.items():
        setattr(config, name, processor.tokenizer.convert_tokens_to_ids(token))
