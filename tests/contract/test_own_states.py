"""What an optimizer of `python:` keeps, from one step on the meta device."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from engine_runs import LLAMA

from launcher.errors import RecipeError
from launcher.train.job import Job
from launcher.train.own_states import bytes_of_value

MADE = """
import torch

class Reads(torch.optim.SGD):
    def step(self, closure=None):
        return float(self.param_groups[0]["params"][0].grad.sum())

def optimizer(model, args):
    return {made}
"""


def job(folder, made: str) -> Job:
    (folder / "hooks.py").write_text(MADE.format(made=made))
    settings = {
        "task": "causal-lm", "model.dtype": "float32", "trainer.learning_rate": 0.1,
        "python.file": str(folder / "hooks.py"), "python.hooks": ["optimizer"],
    }  # fmt: skip
    return Job(folder, {"settings": {key: {"value": value} for key, value in settings.items()}})


@pytest.mark.parametrize(
    ("made", "width"),
    [
        ("torch.optim.SGD(model.parameters(), args.learning_rate)", 0.0),
        ("torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)", 4.0),
        ("torch.optim.AdamW(model.parameters(), args.learning_rate)", 8.0),
    ],
)
def test_the_bytes_of_a_trained_value(tmp_path, made, width):
    assert bytes_of_value(job(tmp_path, made), LLAMA) == pytest.approx(width, abs=0.01)


def test_an_optimizer_that_reads_values_cannot_be_traced(tmp_path):
    with pytest.raises((RuntimeError, NotImplementedError)):
        bytes_of_value(job(tmp_path, "Reads(model.parameters(), args.learning_rate)"), LLAMA)


def test_what_is_no_optimizer_is_named(tmp_path):
    with pytest.raises(RecipeError) as caught:
        bytes_of_value(job(tmp_path, "model"), LLAMA)
    assert caught.value.problems[0].code == "hook-result"
