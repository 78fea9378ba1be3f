"""The class of `python:` under the Trainer of a run."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from launcher.errors import RecipeError
from launcher.recipe.hooks import owned_method
from launcher.train.job import Job
from launcher.train.own_trainer import has_own_loss, over_own
from launcher.train.trainers import PlannedSeq2SeqTrainer, PlannedTrainer
from launcher.train.upstream.trainer_seams import SeamTrainer

BASES = "from transformers import Seq2SeqTrainer, Trainer as Base\nclass Between(Base): pass\n"
LOSS = "    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): pass\n"


def job(folder, text: str, *more: str) -> Job:
    (folder / "hooks.py").write_text(BASES + text)
    settings = {"python.file": str(folder / "hooks.py"), "python.hooks": ["Trainer", *more]}
    return Job(folder, {"settings": {key: {"value": value} for key, value in settings.items()}})


def test_ours_is_over_theirs_and_theirs_over_transformers(tmp_path):
    made = over_own(job(tmp_path, "class Trainer(Between):\n" + LOSS), PlannedTrainer)
    names = [one.__name__ for one in made.__mro__]
    places = [names.index(name) for name in ("PlannedTrainer", "SeamTrainer", "Between")]
    assert places == sorted(places)
    assert names.index("Between") < len(names) - 2
    assert has_own_loss(made)
    assert not has_own_loss(PlannedTrainer)


@pytest.mark.parametrize(
    ("text", "more", "kind", "named"),
    [
        ("class Trainer(Base): pass\n", (), PlannedSeq2SeqTrainer, "Seq2SeqTrainer"),
        ("class Trainer(dict): pass\n", (), PlannedTrainer, "Trainer"),
        ("class Mid(Base):\n    def save_model(self): pass\nclass Trainer(Mid): pass\n", (), PlannedTrainer,
         "save_model"),
        ("class Mid(Base):\n    def compute_loss(self, m, i): pass\nclass Trainer(Mid): pass\n", (),
         PlannedTrainer, "num_items_in_batch"),
        ("def compute_loss(a, b, c): pass\nclass Trainer(Base):\n" + LOSS, ("compute_loss",), PlannedTrainer,
         "compute_loss"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_under_ours_is_refused(tmp_path, text, more, kind, named):
    with pytest.raises(RecipeError) as caught:
        over_own(job(tmp_path, text, *more), kind)
    problem = caught.value.problems[0]
    assert (problem.code, problem.file) == ("own-trainer", str(tmp_path / "hooks.py"))
    assert named in problem.message
    assert problem.hint


def test_what_ours_replace_without_calling_theirs_is_owned():
    """Each override of ours is owned, but for those that call `super()` in all ways that a step takes."""
    called = {"training_step", "compute_loss", "evaluate", "prediction_step", "log"}
    ours = {name for kind in (SeamTrainer, PlannedTrainer) for name in vars(kind)}
    upstream = {name for one in PlannedTrainer.__mro__[2:] for name in vars(one)} - set(dir(object))
    replaced = {name for name in ours & upstream if not name.startswith("__")} - called
    assert {name for name in replaced if not owned_method(name)} == set()


@pytest.mark.parametrize(
    ("own", "generates", "loss"), [(True, True, 3.0), (False, True, 1.0), (True, False, 1.0)]
)
def test_an_evaluation_that_generates_has_the_loss_of_the_file(monkeypatch, own, generates, loss):
    """transformers takes the model's own loss there."""
    found = (torch.tensor(1.0), torch.zeros(1, 2) if generates else None, torch.zeros(1, 2))
    monkeypatch.setattr(PlannedTrainer, "predicted", lambda self, *args: found)
    monkeypatch.setattr(PlannedTrainer, "compute_loss", lambda self, *args: torch.tensor(3.0))
    trainer = object.__new__(PlannedSeq2SeqTrainer)
    trainer.args, trainer.loss_is_own = SimpleNamespace(predict_with_generate=generates), own
    trainer.compute_loss_context_manager = contextlib.nullcontext
    assert trainer.predicted(None, {})[0] == loss
