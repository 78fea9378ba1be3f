"""What a worker finds out about a model that it loaded, before anything is trained. Without torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.errors import RecipeError
from launcher.train.job import Job
from launcher.train.model.adapters import _keep_tied
from launcher.train.model.models import check_bare, check_recomputes


def job(**values):
    settings = {name.replace("__", "."): {"value": value} for name, value in values.items()}
    return Job(Path(), {"settings": settings})


class Model:
    """A model with an embedding and a head, which may share one matrix."""

    def __init__(self, *, tied):
        matrix = object()
        self.embed = SimpleNamespace(weight=matrix)
        self.head = SimpleNamespace(weight=matrix if tied else object())

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def named_modules(self):
        layer = SimpleNamespace(weight=object())
        return [("model.embed_tokens", self.embed), ("model.layers.0", layer), ("lm_head", self.head)]


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_matrix_that_is_trained_whole_stays_one(name):
    settings = {"modules_to_save": [name], "r": 8}
    assert _keep_tied(settings, Model(tied=True)) == {**settings, "ensure_weight_tying": True}
    assert _keep_tied(settings, Model(tied=False)) == settings


def test_a_recipe_that_says_how_tied_weights_are_trained_is_followed():
    settings = {"modules_to_save": ["lm_head"], "ensure_weight_tying": False}
    assert _keep_tied(settings, Model(tied=True)) == settings


def test_other_modules_that_are_trained_whole_leave_tying_alone():
    settings = {"modules_to_save": ["layers.0"]}
    assert _keep_tied(settings, Model(tied=True)) == settings


def test_the_folder_of_an_adapter_is_no_model():
    with pytest.raises(RecipeError) as caught:
        check_bare(SimpleNamespace(_hf_peft_config_loaded=True))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("double-peft", "model.name_or_path")
    check_bare(SimpleNamespace(_hf_peft_config_loaded=False))


def test_a_model_that_cannot_recompute_its_layers_is_refused_where_it_shall():
    unable = SimpleNamespace(supports_gradient_checkpointing=False)
    able = SimpleNamespace(supports_gradient_checkpointing=True)
    again, plain = (job(trainer__activation_checkpointing=asked) for asked in (True, False))
    with pytest.raises(RecipeError) as caught:
        check_recomputes(again, unable)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("checkpointing-unsupported", "trainer.activation_checkpointing")
    check_recomputes(again, able)
    check_recomputes(plain, unable)
