"""Optimizer states of model types without a closed form: those of the parameters of transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.errors import RecipeError
from launcher.memory.states import OPTIMIZERS, model_shapes, moments
from launcher.models.model import ModelSpec, foreign_spec, read_model_spec
from launcher.train.trace.spec import describe


def sparse_specs() -> Iterator[ModelSpec]:
    """Of each type with experts that is planned from its class, at the size of its class's default."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(name)
            fields = config.to_dict()
            if "expert" not in str(fields) or has_closed_form(name, fields):
                continue
            answer = json.loads(json.dumps(describe(config, "causal-lm")))
        except Exception:  # the class cannot build its own default configuration
            continue
        if answer["experts"]:
            yield foreign_spec(name, fields, "a test", "causal-lm", answer)


def has_closed_form(name: str, fields: dict[str, Any]) -> bool:
    try:
        return bool(read_model_spec(name, fields, "a test", "causal-lm"))
    except RecipeError:
        return False


@pytest.mark.filterwarnings("ignore")
def test_8_bit_states_of_experts_never_need_more_than_fused_adamw() -> None:
    """In 16 bits: fused AdamW keeps 4 bytes a value there, bitsandbytes 8 of tensors below 4,096 values."""
    eight, fused, found = OPTIMIZERS["adamw_bnb_8bit"], OPTIMIZERS["adamw_torch_fused"], 0
    for spec in sparse_specs():
        shapes = model_shapes(spec)
        assert sum(shape.values * shape.count for shape in shapes) == spec.params, spec.name
        bound = moments(fused, shapes, 2, named=True).device
        assert moments(eight, shapes, 2, named=True).device <= bound, spec.name
        found += 1
    assert found >= 20


def test_the_shapes_are_those_of_the_parameters() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "olmoe", **sizes, vocab_size=100, intermediate_size=48, num_experts=6, tie_word_embeddings=False
    )
    answer = json.loads(json.dumps(describe(config, "causal-lm")))
    shapes = model_shapes(foreign_spec("m", config.to_dict(), "a test", "causal-lm", answer))
    experts = {(s.stacks, s.rows, s.columns): s.count for s in shapes if s.stacks > 1}
    assert experts == {(6, 2 * 48, 64): 3, (6, 64, 48): 3}
    heads = [(s.rows, s.columns, s.count) for s in shapes if s.embedding]
    assert heads == [(100, 64, 1)], "the untied head is none"
    assert torch.Size((100, 64)).numel() in {s.values for s in shapes if not s.embedding}
