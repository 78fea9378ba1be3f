"""Tiny vision-language models of the families that people train, their processors, and rows with images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 600, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, "mrope_interleaved": True}
_IDEFICS: dict[str, Any] = {
    "text_config": {**_TEXT, "model_type": "llama"},
    "vision_config": {**_VISION, "image_size": 28, "patch_size": 7},
    "scale_factor": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_interleaved": False}},
        "vision_config": {**_QWEN, "window_size": 56, "fullatt_block_indexes": [1]},
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
    },
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 64},
        "vision_config": {
            **_VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **_TEXT, "num_kv_shared_layers": 0, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 600, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            **_VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 64,
        },
        "audio_config": None,
    },
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {
            **_VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14,
            "projection_dim": 32,
        },
    },
}  # fmt: skip
"""Model type -> configuration; the ids of the image tokens are those of the generated processor."""
EVERY = list(CONFIGS)


def config(name: str) -> dict[str, Any]:
    return {"model_type": name, **CONFIGS[name]}


def image_bytes(side: int = 40, colour: Any = (200, 30, 30), mode: str = "RGB", kind: str = "PNG") -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, (side, side + 8), colour).save(buffer, format=kind)
    return buffer.getvalue()


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*content: Any, answer: str = "A red square.") -> list[dict[str, Any]]:
    """One question and its answer; content: texts and parts."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def colour_rows(folder: Path, count: int = 16) -> list[dict[str, Any]]:
    """Rows about images in files beside them: one image, none in every fifth row, two in every seventh."""
    colours = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        name = list(colours)[number % 3]
        images = 0 if number % 5 == 4 else 2 if number % 7 == 6 else 1
        paths = [f"{number}-{image}.png" for image in range(images)]
        for index, path in enumerate(paths):
            (folder / path).write_bytes(image_bytes(40 + 9 * (number % 4) + index, colours[name]))
        question = "Which colour is it?" if images else "Which colour has grass?"
        answer = name if images else "green"
        rows.append({"messages": chat({"type": "image"}, *[{"type": "image"}] * (images - 1), question,
                                      answer=answer) if images else chat(question, answer=answer),
                     "images": paths})  # fmt: skip
    return rows


def save_base(folder: Path, name: str) -> Path:
    """A checkpoint of a family: random weights, and its processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from launcher.train.model.processors import save_processing
    from launcher.train.tiny_processor import set_token_ids, tiny_processor

    built = AutoConfig.for_model(**config(name))
    processor = tiny_processor(built)
    set_token_ids(built, processor)
    built.get_text_config().pad_token_id = processor.tokenizer.pad_token_id
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(built).save_pretrained(folder)
    save_processing(processor, folder)
    return folder
