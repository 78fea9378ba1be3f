"""The text model inside a checkpoint of text and images (`text_config`), which tasks on text load alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.errors import Problem, RecipeError
from launcher.files.shipped import facts_file
from launcher.tasks import task_named

UNEQUAL = {
    "aya_vision": "its own class scales logits (logit_scale), the wrapper's does not",
    "cohere2_vision": "its own class scales logits (logit_scale), the wrapper's does not",
}
"""Types whose text model alone computes other logits than inside the wrapper, on text -> why; measured with
transformers 5.23."""


class TextPart(NamedTuple):
    """The configuration that is planned."""

    config: Mapping[str, Any]
    wrapper: str | None
    """`model_type` of the checkpoint that holds this text model among others; None: it is the model."""


@functools.cache
def _types() -> dict[str, Any]:
    return dict(json.loads(facts_file("module_names.json").read_text("utf-8")))


def image_text_types() -> Mapping[str, Mapping[str, Any]]:
    """Model type that reads images and text -> {"text": type of its text model, "tied": default}."""
    return dict(_types()["image_text_to_text"])


def causal_types() -> frozenset[str]:
    """Model types that have a causal language model in transformers 5.23."""
    return frozenset(_types()["causal_lm"])


def text_part(name: str, config: Mapping[str, Any], task: str) -> TextPart:
    """What `task` trains of the model: of one for text and images its text model, for a task on text.

    A task that sees images trains the whole model. RecipeError `multimodal-model` where transformers has no
    class for that text model alone.
    """
    kind, inner = str(config.get("model_type")), config.get("text_config")
    known = image_text_types().get(kind)
    if task_named(task).sees_images or (known is None and not isinstance(inner, Mapping)):
        return TextPart(config, None)
    if known is not None and known["text"] is None and kind in causal_types():
        return TextPart(config, None)
    inner = inner if isinstance(inner, Mapping) else {}
    text = inner.get("model_type") or (known or {}).get("text")
    if not inner or text not in causal_types():
        raise RecipeError(_no_text_model(name, kind, text))
    if kind in UNEQUAL:
        message = f"the text model of {name!r} ({kind}) cannot be trained alone: {UNEQUAL[kind]}"
        raise RecipeError(Problem("multimodal-model", message, path="model.name_or_path"))
    part = {"model_type": text, **inner}
    tied = [c["tie_word_embeddings"] for c in (config, inner) if c.get("tie_word_embeddings") is not None]
    part["tie_word_embeddings"] = [*tied, (known or {}).get("tied", False)][0]
    for key in ("dtype", "torch_dtype"):
        if part.get(key) is None and config.get(key) is not None:
            part[key] = config[key]
    return TextPart(part, kind)


def _no_text_model(name: str, kind: str, text: Any) -> Problem:
    holds = f" with a text model of type {text}" if text else ""
    message = f"model {name!r} reads images and text (model_type {kind}{holds})"
    return Problem(
        "multimodal-model",
        f"{message}, and transformers has no class for its text model alone",
        path="model.name_or_path",
        hint="task: image-text-to-text trains the whole model; a task on text needs a text model",
    )
