"""What the process of `task: own` reads of hooks, and the Trainer around batches of any kind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from launcher.errors import RecipeError
from launcher.inputs.own_model import made_model
from launcher.recipe.loading import load_recipe
from launcher.train.job import Job
from launcher.train.own import SeededCollator, SeededRows, own_data
from launcher.train.own_trace import describe, reply

LINE = """
import torch


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.layer.bias.requires_grad = False

    def forward(self, features, labels):
        found = self.layer(features)[:, 0]
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield {"features": torch.ones(4), "labels": torch.ones(())}


def make_model(config):
    return Line()


def make_datasets():
    return TRAIN, EVAL


def data_collator(processing):
    def collate(samples):
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    return collate


ROWS = [{"features": torch.ones(4), "labels": torch.ones(())}] * 3
"""
NAMES = ["make_model", "make_datasets", "data_collator"]


def job(folder: Path, train: str = "ROWS", evaluation: str = "ROWS", **more: Any) -> Job:
    (folder / "hooks.py").write_text(LINE + f"TRAIN, EVAL = {train}, {evaluation}\n")
    values = {
        "task": "own", "seed": 1, "python.file": str(folder / "hooks.py"), "python.hooks": NAMES,
        "python.digest": None, "model.name_or_path": None, "model.config": None, "trainer.max_steps": None,
        **more,
    }  # fmt: skip
    return Job(folder, {"settings": {name: {"value": value} for name, value in values.items()}})


def test_a_module_and_its_datasets_are_described(tmp_path):
    found = describe(job(tmp_path))
    assert (found["name"], found["params"], found["frozen"]) == ("Line", 5, 1)
    assert (found["train_rows"], found["eval_rows"], found["recomputes"]) == (3, 3, False)
    assert found["length"] is None


@pytest.mark.parametrize(
    ("train", "evaluation", "steps", "code"),
    [
        ("[]", "None", None, "no-rows"),
        ("ROWS", "[]", None, "no-rows"),
        ("Endless()", "None", None, "endless-rows"),
        ("ROWS", "Endless()", 10, "endless-rows"),
        ("Endless()", "ROWS", 10, None),
    ],
)
def test_datasets_without_rows_or_without_an_end(tmp_path, train, evaluation, steps, code):
    asked = job(tmp_path, train, evaluation, **{"trainer.max_steps": steps})
    if code is None:
        assert own_data(asked, None).counts == {"train": 0, "eval": 3}
        return
    with pytest.raises(RecipeError) as caught:
        own_data(asked, None)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_random_numbers_of_a_batch_are_its_own(tmp_path):
    class Drawn:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, number: int) -> float:
            return number + random.random() + float(torch.rand(()))

    def collate(samples: list[float]) -> tuple[list[float], float]:
        return samples, float(torch.rand(()))

    rows, collated = SeededRows(Drawn(), 1), SeededCollator(collate)

    def batch(*numbers: int) -> Any:
        return collated(rows.__getitems__(list(numbers)))

    torch.manual_seed(0)
    expected, first = float(torch.rand(())), batch(1, 2)
    torch.manual_seed(0)
    batch(3, 4)
    assert float(torch.rand(())) == expected, "the process's own numbers are as if nothing was drawn"
    assert batch(1, 2) == first
    assert batch(2, 1) != first
    assert collated(SeededRows(Drawn(), 2).__getitems__([1, 2])) != first


def test_an_evaluation_that_hooks_do_not_make_is_refused_at_its_key(tmp_path, warm):
    job(tmp_path, evaluation="None")
    file = tmp_path / "r.yaml"
    file.write_text("task: own\npython: hooks.py\ntrainer: {eval_strategy: epoch}\n")
    with pytest.raises(RecipeError) as caught:
        made_model(load_recipe(file), tiny=False, ask_torch=True)
    assert [(p.code, p.path) for p in caught.value.problems] == [("conflict", "trainer.eval_strategy")]


def test_weights_of_a_module_are_read_under_its_own_names(tmp_path):
    from safetensors.torch import save_file

    from launcher.train.model.weights import read_weights

    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    save_file({**module.state_dict(), "more": torch.ones(1)}, tmp_path / "model.safetensors")
    assert read_weights(other, tmp_path) == ([], ["more"])
    assert other.weight.equal(module.weight)


def test_the_answer_is_of_the_asked_kind(tmp_path):
    asked = {"ask": "model", "settings": job(tmp_path).plan["settings"]}
    assert reply(asked)["params"] == 5
