"""Write facts/data/module_names.json: `python -m launcher.train.module_names`.

The names of every module that LoRA cannot adapt, or that has no closed form, of the families that are known,
from transformers' own classes on the device "meta"; and the model types that read images and text.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from launcher.facts.heads import FAMILY_TASKS
from launcher.facts.shipped import facts_file
from launcher.train.models import auto_class

_COUNTED = ("Linear", "Conv1D", "Embedding")
_LAYERS = ("h", "layers", "layer", "block")
"""Names of the lists of layers."""


def names() -> dict[str, dict[str, str]]:
    """Family -> module's name, `{}` for the layer's index -> class."""
    return {family: _of_family(family) for family in FAMILY_TASKS}


def _of_family(family: str) -> dict[str, str]:
    config = transformers.AutoConfig.for_model(family)
    with torch.device("meta"):
        model = auto_class(FAMILY_TASKS[family][0]).from_config(config)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name and kind not in _COUNTED:
            found[_template(name)] = kind
    return found


def _template(name: str) -> str:
    """`{}` for the first index alone: blocks of T5 have numbered parts."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit() and parts[i - 1] in _LAYERS), None)
    if place is not None:
        parts[place] = "{}"
    return ".".join(parts)


def table() -> dict[str, Any]:
    types = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return {"version": transformers.__version__, "names": names(), "image_text_to_text": types}


if __name__ == "__main__":
    facts_file("module_names.json").write_text(json.dumps(table(), indent=1) + "\n", "utf-8")
