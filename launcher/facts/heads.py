"""Which tasks a family can learn, and the head that each task puts on the model. Pure.

Heads are those of transformers 5.23's AutoModelForCausalLM, AutoModelForSeq2SeqLM,
AutoModelForSequenceClassification, AutoModelForTokenClassification and AutoModelForImageClassification.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.architectures import FAMILIES, Layout, Sizes
from launcher.facts.encoders import ENCODER_FAMILIES, ENCODER_KINDS
from launcher.facts.shipped import facts_file
from launcher.tasks import DEFAULT_TASK, task_named, tasks_of
from launcher.tasks.task import Architecture

_KINDS: Mapping[str, Architecture] = {**dict.fromkeys(FAMILIES, "decoder"), **ENCODER_KINDS}
FAMILY_TASKS: Mapping[str, tuple[str, ...]] = {
    family: tuple(task for task in tasks_of(kind) if family not in task_named(task).without_class)
    for family, kind in _KINDS.items()
}
"""Model type -> its tasks, the most usual one first."""


_OWN_TOKEN_HEADS = frozenset({"bert", "gpt2", "gpt_bigcode", "gpt_neox"})
"""Families whose class for token classification is not transformers' generic one."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer."""

    name: str
    """lm_head | score | classifier"""
    in_features: int
    out_features: int
    """Logits: the vocabulary, or the labels."""
    bias: bool = False
    per_token: bool = True
    """Logits for each token, else for each sample."""
    tied: bool = False
    """Its matrix is that of the token embedding."""
    dropout: float = 0.0
    """Of what it reads, where it reads each token."""
    saved: bool = False
    """Trained in full beside an adapter: peft does it for the heads of classification."""
    gathered: int = 0
    """Logits of all tensor-parallel ranks, which each of them gathers; 0: a rank has its `out_features`."""
    apart: bool = False
    """Each tensor-parallel rank keeps its own logits, and takes its part of the loss from them."""

    @property
    def own_params(self) -> int:
        """Parameters that no other module holds."""
        if self.tied:
            return 0
        return self.out_features * (self.in_features + (1 if self.bias else 0))


def check_task(name: str, model_type: Any, task: str) -> None:
    """RecipeError `unknown-architecture` for a family that is not known, or not for this task."""
    tasks = FAMILY_TASKS.get(str(model_type), ())
    if task in tasks:
        return
    if tasks:
        message = f"model {name!r} cannot learn {task}: the family {model_type} is for {' and '.join(tasks)}"
    else:
        message = f"model {name!r} has model_type {model_type!r}, which is not supported"
    hint = f"supported for {task}: {', '.join(f for f, known in FAMILY_TASKS.items() if task in known)}"
    raise RecipeError(Problem("unknown-architecture", message, path="model.name_or_path", hint=hint))


@functools.cache
def _image_text_types() -> frozenset[str]:
    """Model types of transformers 5.23 that read images and text."""
    table = json.loads(facts_file("module_names.json").read_text("utf-8"))
    return frozenset(table["image_text_to_text"])


def check_text_only(name: str, config: Mapping[str, Any]) -> None:
    """RecipeError `multimodal-model` for a language model inside a model of images or sound."""
    kind, inner = str(config.get("model_type")), config.get("text_config")
    if kind in FAMILY_TASKS or not (isinstance(inner, Mapping) or kind in _image_text_types()):
        return
    part = inner.get("model_type") if isinstance(inner, Mapping) else None
    holds = f", which holds a language model of type {part}" if part and part != kind else ""
    why = "models that read more than text are not supported yet"
    message = f"model {name!r} has model_type {kind!r}{holds}: {why}"
    causal = ", ".join(family for family, tasks in FAMILY_TASKS.items() if DEFAULT_TASK in tasks)
    hint = f"name a checkpoint of a text model, such as one of type {causal}"
    raise RecipeError(Problem("multimodal-model", message, path="model.name_or_path", hint=hint))


def family_layout(model_type: str, sizes: Sizes, task: str) -> Layout:
    """The layout of a family that `check_task` let pass."""
    family = FAMILIES.get(model_type) or ENCODER_FAMILIES[model_type]
    layout = family(sizes)
    if task_named(task).head == "token-classifier":
        # transformers leaves out what reads the first token alone (add_pooling_layer=False).
        linears = tuple(one for one in layout.linears if not one.path.endswith(".pooler.dense"))
        layout = replace(layout, linears=linears)
    return layout


def task_head(task: str, model_type: str, sizes: Sizes, layout: Layout, num_labels: int) -> Head:
    """The head that `task` puts on a model of this family."""
    if task_named(task).head == "language-model":
        # transformers 5.23 ties every T5, whatever the configuration says.
        tied = layout.decoder is not None or bool(sizes.config["tie_word_embeddings"])
        return Head("lm_head", layout.embed_width, sizes.vocab, tied=tied)
    if task_named(task).head == "token-classifier":
        name = "classifier" if model_type in _OWN_TOKEN_HEADS else "score"
        keys = ("classifier_dropout", "hidden_dropout", "hidden_dropout_prob")
        given = [sizes.config[key] for key in keys if sizes.config.get(key) is not None]
        dropout = float([*given, 0.1][0])
        return Head(name, sizes.hidden, num_labels, bias=True, saved=True, dropout=dropout)
    if model_type in ENCODER_FAMILIES:
        return Head("classifier", sizes.hidden, num_labels, bias=True, per_token=False, saved=True)
    # Every token is scored, and the last one's score is taken.
    return Head("score", layout.embed_width, num_labels, saved=True)


def labels_of(config: Mapping[str, Any], task: str) -> int:
    """Labels that the task or a configuration names, 2 where none does, as transformers takes it."""
    fixed = task_named(task).num_labels
    if fixed is not None:
        return fixed
    if config.get("num_labels") is not None:
        return int(config["num_labels"])
    return len(config.get("id2label") or ()) or 2
