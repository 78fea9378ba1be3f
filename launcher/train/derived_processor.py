"""Generated processors of any family: classes, tokens and sizes found by transformers' own tables and code.

Image and text meet in a processor in the ways that its class says: which tokens it asks its tokenizer for is
read from its source, how many tokens an image has follows from the sizes in the configuration.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from launcher.train.model.processors import around_image, image_mark
from launcher.train.model.vision import patches_per_token, vision_part

CLASSES: Mapping[str, tuple[str, str]] = {
    "cosmos3_omni": ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    "fast_vlm": ("LlavaProcessor", "CLIPImageProcessor"),
    "glm_ocr": ("Glm46VProcessor", "Glm46VImageProcessor"),
    "glmga": ("Glm46VProcessor", "GlmgaImageProcessor"),
    "kosmos-2": ("Kosmos2Processor", "CLIPImageProcessor"),
    "kosmos-2.5": ("Kosmos2_5Processor", "Kosmos2_5ImageProcessor"),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniProcessor", "Qwen2VLImageProcessor"),
    "qwen3_omni_moe_thinker": ("Qwen3OmniMoeProcessor", "Qwen2VLImageProcessor"),
}
"""Model type -> (processor, image processor) of its published checkpoints, where transformers' tables have
none."""
_NAMED = re.compile(r"""tokenizer(?:\.|, ["'])(\w+?)_token(?:_id)?\b""")
"""A token that a processor asks its tokenizer for by an attribute."""
_WRITTEN = re.compile(r"<[\w|/][\w|/.-]{0,40}>|\[[A-Z_]{2,40}\]")
"""A token that stands in a processor's code."""
_OBJECT = re.compile(r"(\w+)_token\.content")
_USUAL = re.compile(r"""self\.(\w+)_token = ["'](<[^"']+>)["']""")
_OWN = frozenset({"pad", "bos", "eos", "unk", "add_bos", "add_eos", "cls", "sep", "mask"})
_TOKEN_FIELD = re.compile(r"(\w+?)_(?:token_)?(?:id|index)$")
_IMAGE_FIELDS = ("image_token_id", "image_token_index", "image_patch_id")
"""Fields of configurations with the id of the token that stands for a part of an image."""
_COUNTS = ("image_seq_length", "image_seq_len", "num_image_tokens", "num_query_tokens")
"""Arguments of processors that are the number of an image's tokens."""
_SIDE_IN_TOKENS = ("Cohere2VisionImageProcessor",)
"""Image processors whose `patch_size` is the number of an image's tokens beside each other."""
_LARGEST_SIDE = 8192
"""Sizes above are numbers of pixels, not sides."""
_SMALLEST_SIDE = 64
"""Sizes up to it are of the part of an image that one token is made of."""


def processor_classes(model_type: str) -> tuple[type[Any], type[Any]] | None:
    """(processor, image processor) of a model type; None for one that has none.

    Image processors are Pillow's where the family has one.
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as IMAGES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as PROCESSORS

    known = CLASSES.get(model_type)
    name = known[0] if known else PROCESSORS.get(model_type)
    alike = [model_type, *(kind for kind, other in PROCESSORS.items() if name and other == name)]
    images = {"torchvision": known[1], "pil": f"{known[1]}Pil"} if known else next(
        (IMAGES[kind] for kind in alike if kind in IMAGES), None
    )  # fmt: skip
    if name is None or images is None:
        return None
    found = (_class(images[backend]) for backend in ("pil", "torchvision") if backend in images)
    image_processor = next((one for one in found if one is not None), None)
    processor = _class(name)
    return None if image_processor is None or processor is None else (processor, image_processor)


def _class(name: str) -> type[Any] | None:
    import transformers

    found: type[Any] | None = getattr(transformers, name, None)
    return found


def tokens_of(kind: type[Any]) -> tuple[dict[str, str], list[str]]:
    """(attribute of the tokenizer -> token, other tokens) of a processor class."""
    code = inspect.getsource(importlib.import_module(kind.__module__))
    objects = set(_OBJECT.findall(code))  # no strings
    names = sorted(set(_NAMED.findall(code)) - _OWN - objects)
    usual = dict(_USUAL.findall(code))
    named = {f"{name}_token": usual.get(name, f"<|{name}|>") for name in names}
    return named, sorted(set(_WRITTEN.findall(code)) - set(named.values()))


def other_parts(kind: type[Any], model_type: str, named: Mapping[str, str]) -> dict[str, Any]:
    """Parts of a processor beside image processor and tokenizer, with their usual values."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES as SOUNDS
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES as VIDEOS

    from launcher.train.model.processors import VIDEO, has_torchvision
    from launcher.train.tiny import tiny_tokenizer

    family, found = re.sub(r"_thinker$", "", model_type), {}
    for name in kind.get_attributes():
        if name in ("image_processor", "tokenizer"):
            continue
        if name.endswith("tokenizer"):
            found[name] = tiny_tokenizer(512, named)
        elif name == VIDEO:
            names = VIDEOS.get(model_type) or VIDEOS.get(family)
            names = [names] if isinstance(names, str) else [*(names or {}).values()]
            made = _class(names[0]) if names and has_torchvision() else None
            # The family's font is a file of its published checkpoints.
            plain = {"draw_on_frames": False} if hasattr(made, "draw_on_frames") else {}
            found |= {} if made is None else {name: made(**plain)}
        else:
            made = _class(str(SOUNDS.get(family) or "WhisperFeatureExtractor"))
            found[name] = None if made is None else made()
    return found


def unknown_tokens(processor: Any) -> list[str]:
    """Tokens that a processor writes and its tokenizer does not have."""
    vocabulary = processor.tokenizer.get_vocab()
    written = (value for name, value in vars(processor).items() if name.endswith("_token"))
    return sorted({value for value in written if isinstance(value, str) and value not in vocabulary})


def image_fields(kind: type[Any], config: Any, code: str = "") -> dict[str, Any]:
    """Fields of an image processor that agree with the sizes in a configuration: one image, no tiles.

    code: of the processor, which may ask for a field that only the published files have.
    """
    vision, own = vision_part(config), kind().to_dict()
    side, patch = _side(vision) or 32, _number(vision, "patch_size") or 8
    merge = _number(vision, "spatial_merge_size", "merge_size") or own.get("merge_size") or 1
    exact = {
        "patch_size": patch, "merge_size": merge, "tile_size": side, "scale_resolution": side,
        "image_size": side, "crop_to_patches": False, "do_image_splitting": False, "split_image": False,
        "slice_mode": False, "max_image_tiles": 1, "encoder_patch_size": patch, "vision_patch_size": patch,
        "image_seq_length": image_tokens(config), "overlap_margins": [0, 0],
        "max_soft_tokens": 70, "min_num_patches": (side // patch) ** 2,
        "max_num_patches": (side // patch) ** 2,
        "image_grid_pinpoints": getattr(config, "image_grid_pinpoints", None),
        "pooling_kernel_size": getattr(vision, "pooling_kernel_size", None),
        "temporal_patch_size": _number(vision, "temporal_patch_size", "patch_temporal") or 1,
    }  # fmt: skip
    known = {*own, *(name for name in exact if hasattr(kind, name) or f"image_processor.{name}" in code)}
    found = {n: value for n, value in exact.items() if n in known and value is not None}
    if kind.__name__ in _SIDE_IN_TOKENS:
        found["patch_size"] = math.isqrt(image_tokens(config))
    if "vision_patch_size" in own:  # the other one is the side of a tile
        found["patch_size"] = side
    for name, value in own.items():
        inner = getattr(config, f"{name.removesuffix('_size')}_vision_config", vision)  # high_res_size
        if isinstance(value, Mapping) and name != "patch_size":
            found[name] = _sides(value, _side(inner) or side, (patch * merge) ** 2)
        elif isinstance(value, Mapping):
            found[name] = dict.fromkeys(value, patch)
        elif name in ("max_image_size", "min_image_size") and isinstance(value, int):
            found[name] = side
    if own.get("min_pixels"):
        found |= {"min_pixels": side**2, "max_pixels": side**2}
    return found


def _sides(own: Mapping[str, Any], side: int, token: int) -> dict[str, int]:
    """A size of the same form; token: pixels of one token."""
    largest = max(int(value or 0) for value in own.values())
    if largest > _LARGEST_SIDE:
        return {"shortest_edge": 4 * token, "longest_edge": 9 * token}
    if 1 < largest <= _SMALLEST_SIDE:
        return dict.fromkeys(own, math.isqrt(token))
    return {name: side**2 if name.endswith("pixels") else side for name in own if own[name] is not None}


def processor_fields(kind: type[Any], config: Any) -> dict[str, Any]:
    """Arguments of a processor that agree with a configuration."""
    vision = vision_part(config)
    asked = inspect.signature(kind.__init__).parameters
    found: dict[str, Any] = {}
    for name in asked:
        value = getattr(config, name, None) if hasattr(config, name) else getattr(vision, name, None)
        if name in _COUNTS:
            found[name] = image_tokens(config)
        elif name in ("img_size", "image_size"):
            found[name] = _side(vision)
        elif name == "num_additional_image_tokens":
            found[name] = int("clip" in str(getattr(vision, "model_type", "")))
        elif name == "vision_feature_select_strategy":
            found[name] = value or "default"
        elif name == "size_conversion":
            found[name] = {_side(vision): image_tokens(config)}
        elif name == "patch_size":
            found[name] = _number(vision, name)
        elif value is not None and not name.endswith("_token"):
            found[name] = value
    return found


def image_tokens(config: Any) -> int:
    """Tokens of one image."""
    for name in ("num_query_tokens", "mm_tokens_per_image", "vision_soft_tokens_per_image"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    if queries := getattr(config, "projector_patch_to_query_dict", None):
        return int(next(iter(queries.values())))
    latents = getattr(getattr(config, "perceiver_config", None), "resampler_n_latents", None)
    if latents:
        return int(latents)
    vision = vision_part(config)
    return ((_side(vision) or 32) // (_number(vision, "patch_size") or 8)) ** 2 // patches_per_token(config)


def _side(config: Any) -> int:
    return _number(config, "image_size")


def _number(config: Any, *names: str) -> int:
    """The first of these sizes that a configuration has; of a pair, its first number; else 0."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def token_ids(config: Any, processor: Any) -> dict[str, int]:
    """Fields of a configuration with the id of a token that the processor has -> that id."""
    found: dict[str, int] = {}
    for name in vars(config):
        match = _TOKEN_FIELD.fullmatch(name)
        if match is None or match[1] in _OWN:
            continue
        for holder in (processor, processor.tokenizer):
            number, token = (getattr(holder, match[1] + end, None) for end in ("_token_id", "_token"))
            if not isinstance(number, int) and isinstance(token, str):
                number = processor.tokenizer.get_vocab().get(token)
            if isinstance(number, int):
                found.setdefault(name, number)
    for name in _IMAGE_FIELDS:
        if hasattr(config, name):
            found[name] = repeated_token(processor)
    return found


def repeated_token(processor: Any) -> int:
    """Id of the token that a processor writes most often for an image; of several, the one it names."""
    from PIL import Image

    image, (begin, end) = Image.new("RGB", (64, 64)), around_image(processor)
    made = processor(text=[f"{begin}{image_mark(processor)}{end}"], images=[[image]], return_tensors="pt")
    vocabulary = processor.tokenizer.get_vocab()
    around = {vocabulary.get(begin), vocabulary.get(end)}  # some processors write them once more
    ids = [int(number) for number in made["input_ids"][0]]
    counts = Counter(number for number in ids if number not in around)
    return max(counts, key=lambda number: (counts[number], number in processor.image_token_ids))
