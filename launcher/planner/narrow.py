"""A model's configuration made small: two layers, or one of each kind, of width 64. Pure.

Works on the keys alone, for any model type: sizes are known by the names that configurations of transformers
5.23 give them, lists with an entry for each layer keep the entries of the layers that stay, and all other
keys stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LAYERS = 2
"""Fewest layers; a model with more kinds of layers keeps one of each."""


def _all(size: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, size)


NARROW: Mapping[str, int] = {
    **_all(
        64, "hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embed_dim", "embedding_size",
        "embedding_dim", "out_hidden_size", "text_hidden_size", "projection_dim", "output_dim",
        "hidden_size_global", "moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size",
        "shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "moe_shared_expert_intermediate_size", "projection_hidden_size", "projector_hidden_size",
        "vision_output_dim", "projector_input_dim", "projector_output_dim", "adapter_in_dim",
        "adapter_input_size", "encoder_hidden_size", "adapter_out_dim", "vision_hidden_size",
        "output_proj_dims", "mm_embed_dim", "downsample_channels",
    ),
    **_all(
        128, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "d_inner", "dff", "dim_ff", "mlp_dim",
        "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "intermediate_size_mlp",
        "dense_intermediate_size", "attention_hidden_size", "mamba_d_ssm",
    ),
    **_all(
        4, "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
        "decoder_attention_heads", "attention_heads", "swa_num_attention_heads", "num_query_groups",
        "linear_num_value_heads", "linear_num_heads", "num_attention_heads_per_layer",
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
    ),
    **_all(
        16, "head_dim", "d_kv", "d_head", "dim_head", "kv_channels", "swa_head_dim", "qk_nope_head_dim",
        "v_head_dim",
        "indexer_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head",
        "mamba_head_dim", "mamba_headdim", "mamba_d_state", "state_size", "ssm_state_size",
        "mamba_chunk_size", "chunk_size", "hidden_size_per_layer_input",
    ),
    **_all(8, "mamba_n_heads", "mamba_num_heads", "mamba_dt_rank", "time_step_rank", "qk_rope_head_dim",
           "rotary_dim"),
    **_all(32, "kv_lora_rank", "q_lora_rank", "o_lora_rank", "image_size"),
    # Four by four patches, of which a projector makes two by two tokens.
    "img_size": 32,
    "patch_size": 8, "mm_tokens_per_image": 4, "scale_factor": 2, "num_query_tokens": 4,
    "vision_soft_tokens_per_image": 4, "resampler_n_latents": 4, "ref_feat_shape": 4,
    **_all(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k",
           "linear_num_key_heads", "swa_num_key_value_heads"),
    **_all(1, "n_group", "topk_group", "num_expert_group", "mamba_n_groups", "n_groups", "mamba_ngroups",
           "o_groups"),
    **_all(0, "num_kv_shared_layers", "num_nextn_predict_layers"),
    **_all(1024, "vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size",
           "ngram_vocab_size_base", "encoder_hash_byte_group_vocab"),
    **_all(512, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"),
}  # fmt: skip
"""Size -> what it is in the small configuration, see `_LIMIT`."""
WITH_PLACES = 2048
"""Vocabulary of a model of images and text: processors add up to 1,152 tokens for places in an image."""
SPECIAL_IDS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIRST_DECODED = "decoder_start_token_id"
_DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers", "num_blocks", "depth",
    "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers",
)  # fmt: skip
_KINDS = ("layers_block_type", "layer_types")
"""Lists whose length is the depth where no number says it."""
_INDICES = re.compile(r"(_indexes|_indices|_idxs|_layers|layer_ids)$")
"""Lists of the layers that are of a kind."""
_PERIOD = re.compile(r"_(period|interval|pattern|frequency|n_layers|sparse_step|layer_step|group_size)$")
"""Every so many layers one is of another kind."""
_LAYER = re.compile(r"(feature|target)_layers?$")
"""A layer, or several, counted from the first or from the last."""
_OF_IMAGES: Mapping[str, Any] = {
    "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
    "projector_patch_to_query_dict": {"16": 4},
    "downsample_rate": "2/4",
}
"""Sizes in pixels into which images are divided, patches -> tokens, and the side of a window in tokens / in
patches, for this size of images."""
_TIMM: Mapping[str, Mapping[str, Any]] = {
    "fastvit_mci3": {"layers": [1, 1, 1, 1, 1]},
    "mobilenetv5_300m_enc": {"channel_multiplier": 0.125, "msfa_output_resolution": 2},
}
"""Architecture of timm -> arguments that make it small. Its `hidden_size` stays: these arguments leave it."""
_OFFSET = re.compile(r"layer_offset$")
_LIMIT = re.compile(r"vocab_size|_per_tok|topk|top_k")
"""Sizes that are not made larger."""
_TOKEN = re.compile(r"token_(id|index)$")
# Per-layer lists, what only the published weights need, and the labels, which the rows decide.
_DROPPED = (
    "rope_scaling", "quantization_config", "id2label", "label2id", "label_names", "num_labels",
    "per_layer_config",
)  # fmt: skip


def narrow_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with few narrow layers, keeping its kinds of layers and all other keys."""
    narrow = _narrow(config)
    if "image_size" not in config:
        narrow |= SPECIAL_IDS
    text, own = narrow.get("text_config"), config.get("text_config")
    if isinstance(text, dict) and isinstance(own, Mapping) and own.get("vocab_size"):
        text["vocab_size"] = min(own["vocab_size"], WITH_PLACES)
    if "d_model" in config:
        # Labels become the decoder's input after this token; older configurations leave it out.
        narrow[FIRST_DECODED] = 0
    return narrow


def _narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    depth = _depth(config)
    kept = _kept(config, depth)
    narrow = {
        key: _smaller(key, value, depth, kept)
        for key, value in config.items()
        if key not in _DROPPED and _is_finite(value)
    }
    _fit(config, narrow)
    if "architecture" in config:
        more = {**(narrow.get("model_args") or {}), **_TIMM.get(config["architecture"], {})}
        narrow["model_args"] = more or None
        if "hidden_size" in config:
            narrow["hidden_size"] = config["hidden_size"]
    return narrow


def _is_finite(value: Any) -> bool:
    """Whether JSON can hold it; an infinite limit of a Mamba layer's step is the default of its class."""
    values = value if isinstance(value, list) else [value]
    return all(not isinstance(one, float) or math.isfinite(one) for one in values)


def _depth(config: Mapping[str, Any]) -> int:
    numbers = (config[name] for name in _DEPTHS if type(config.get(name)) is int)
    lists = (len(config[name]) for name in _KINDS if isinstance(config.get(name), list))
    return next(numbers, next(lists, 0))


def _kept(config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """Indices of the layers that stay: the first of each kind, and more up to `LAYERS`."""
    dense = config.get("first_k_dense_replace")
    first: dict[Any, int] = {}
    for layer in range(depth):
        kind = [
            layer in value if _is_indices(key, value) else repr(value[layer])
            for key, value in config.items()
            if isinstance(value, list) and (_is_indices(key, value) or len(value) == depth)
        ]
        first.setdefault((*kind, type(dense) is int and layer < dense), layer)
    kept = sorted(first.values())
    more = (layer for layer in range(depth) if layer not in kept)
    return tuple(sorted([*kept, *(next(more) for _ in range(min(LAYERS, depth) - len(kept)))]))


def _is_indices(key: str, value: Any) -> bool:
    return isinstance(value, list) and bool(_INDICES.search(key)) and value == sorted({*_integers(value)})


def _integers(values: Sequence[Any]) -> Iterator[int]:
    return (value for value in values if type(value) is int)


def _smaller(key: str, value: Any, depth: int, kept: Sequence[int]) -> Any:
    """A value of the small configuration; kept: the layers of `depth` that stay."""
    of_images = _OF_IMAGES.get(key)
    if value and isinstance(value, type(of_images)):  # other models have another type under the same name
        return of_images
    if isinstance(value, Mapping):
        return _rope(value) if key == "rope_parameters" else _narrow(value)
    if isinstance(value, list):
        return _smaller_list(key, value, depth, kept)
    if type(value) is not int:
        return value
    if key in _DEPTHS:
        return len(kept) if value == depth else min(value, LAYERS)
    if _LAYER.search(key):
        return _of_two(value)
    if key == "first_k_dense_replace":
        return sum(layer < value for layer in kept)
    for pattern, most in ((_PERIOD, 2), (_OFFSET, 1)):
        if pattern.search(key):
            return min(value, most)
    return _smaller_size(key, value)


def _of_two(layer: int) -> int:
    """A layer of the small model in the place of this one, counted from the first or from the last."""
    return max(-LAYERS, min(layer, LAYERS - 1))


def _smaller_list(key: str, value: list[Any], depth: int, kept: Sequence[int]) -> list[Any]:
    if key == "deepstack_layer_map":  # layers of the tower, each with one of the language model
        pairs = {_of_two(text): _of_two(tower) for tower, text in value}
        return [[tower, text] for text, tower in sorted(pairs.items())]
    if _LAYER.search(key):
        return sorted({_smaller(key, layer, depth, kept) for layer in value})
    if _is_indices(key, value):
        return [place for place, layer in enumerate(kept) if layer in value]
    values = [value[layer] for layer in kept] if depth and len(value) == depth else value
    return [_smaller(key, one, depth, kept) if type(one) is int else one for one in values]


def _smaller_size(key: str, value: int) -> int:
    if key in SPECIAL_IDS or key == FIRST_DECODED:
        return SPECIAL_IDS.get(key, 0)
    if _TOKEN.search(key) and value >= NARROW["vocab_size"]:
        return NARROW["vocab_size"] - 1 - value % 100
    size = NARROW.get(key, value)
    return min(value, size) if _LIMIT.search(key) or value == 0 else size


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions of a short model: without factors for each frequency, for any kind of layer."""
    narrow = {key: _rope(value) if isinstance(value, Mapping) else value for key, value in rope.items()}
    if any(isinstance(value, list) and key != "mrope_section" for key, value in narrow.items()):
        narrow = {key: value for key, value in narrow.items() if not isinstance(value, list)}
        narrow |= {key: "default" for key in ("type", "rope_type") if key in narrow}
    return narrow


def _fit(config: Mapping[str, Any], narrow: dict[str, Any]) -> None:
    """Make sizes that depend on each other agree, in place."""
    heads = config.get("num_attention_heads", config.get("num_heads"))
    kv_heads = config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int):
        narrow["num_key_value_heads"] = 4 if kv_heads == heads else min(kv_heads, 2)
    if "kv_lora_rank" in config:  # the widths of its heads follow from their parts
        narrow.pop("qk_head_dim", None)
        if config.get("head_dim") == config.get("qk_rope_head_dim"):
            narrow["head_dim"] = NARROW["qk_rope_head_dim"]
        else:
            narrow.pop("head_dim", None)
    inner = int(config.get("mamba_expand") or config.get("expand") or 2) * NARROW["hidden_size"]
    if "state_size" in config and "num_heads" in config:
        narrow["num_heads"] = inner // NARROW["head_dim"]
    if "n_mamba_heads" in config:
        narrow["n_mamba_heads"] = min(int(config["n_mamba_heads"]), 2)
        if "mamba_headdim" in config:
            narrow["mamba_headdim"] = inner // narrow["n_mamba_heads"]
    rope = narrow.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        width = int(NARROW["head_dim"] * float(rope.get("partial_rotary_factor") or 1)) // 2
        rope["mrope_section"] = _section(rope["mrope_section"], width)
    _fit_images(config, narrow)


def _section(given: Sequence[int], width: int) -> list[int]:
    """Parts of a head's frequencies for time, height and width; height and width have equal ones."""
    third = width // 3
    if len(given) > 3:  # a width of their own for the tokens of text
        return [width // len(given)] * len(given)
    if given[0] == given[1]:  # time comes last
        side = round(width * given[0] / sum(given))
        return [side, side, width - 2 * side]
    return [width - 2 * third, third, third]


def _fit_images(config: Mapping[str, Any], narrow: dict[str, Any]) -> None:
    """The same of a tower, and of what joins it with the language model."""
    vision = narrow.get("vision_config")
    if "out_hidden_size" in config and isinstance(vision, Mapping):  # of the patches of a token together
        narrow["out_hidden_size"] *= int(vision.get("merge_size", 1)) ** 2
    if "pixel_shuffle_ratio" in config:
        narrow["intermediate_size"] = round(NARROW["hidden_size"] / float(config["pixel_shuffle_ratio"]) ** 2)
    patch = 3 * NARROW["patch_size"] ** 2
    if "patch_dim" in config:
        narrow["patch_dim"] = patch
        narrow["video_patch_dim"] = patch * int(config.get("video_temporal_patch_size", 1))
    if {"num_position_embeddings", "image_size"} <= config.keys():
        narrow["num_position_embeddings"] = (NARROW["image_size"] // NARROW["patch_size"]) ** 2
