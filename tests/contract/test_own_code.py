"""Hooks of `python:` that replace parts of the training, in real runs, compared with runs without them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_runs import column, make_ground, planned, result, trained, weights
from forked import KILL, Forks

RESUME_VARIABLE = "EFFILAUNCH_RESUME"

if not find_spec("torch"):
    pytest.skip("the training stack is not installed", allow_module_level=True)

ONE = {
    "sharding": {"engine": "ddp"},
    "model": {"name_or_path": "model", "tokenizer": "tokenizer", "loss": "full"},
}
EVALUATED = {
    **ONE,
    "data": {"train": [{"path": "rows.jsonl"}], "eval": [{"path": "five.jsonl"}], "max_length": 32},
    "trainer": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2},
}
LOSS = """
from torch.nn import functional


def compute_loss(outputs, labels, num_items_in_batch):
    scores, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(scores.float(), targets, reduction="sum") / num_items_in_batch
"""
ALL = """
import torch
from transformers import LlamaForCausalLM
from transformers import Trainer as Base


def optimizer(model, args):
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    made.param_groups[0]["weight_decay"] = 0.0
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / 4)


class Pad:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, samples):
        width = max(len(one["input_ids"]) for one in samples)

        def filled(name, value):
            return torch.tensor([one[name] + [value] * (width - len(one[name])) for one in samples])

        ids = filled("input_ids", self.tokenizer.pad_token_id)
        masks = [[1] * len(one["input_ids"]) + [0] * (width - len(one["input_ids"])) for one in samples]
        return {"input_ids": ids, "labels": filled("labels", -100), "attention_mask": torch.tensor(masks)}


def data_collator(processing):
    return Pad(processing)


def make_model(config):
    return LlamaForCausalLM.from_pretrained(config.name_or_path)


def prepare_model(model):
    model.model.embed_tokens.requires_grad_(False)
    return model


class Trainer(Base):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = super().compute_loss(model, inputs, return_outputs)  # a mean, as most write it
        return (found[0] * 1.0, found[1]) if return_outputs else found * 1.0
"""
FROZEN = """
def prepare_model(model):
    model.model.embed_tokens.requires_grad_(False)
    return model
"""


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    return make_ground(tmp_path_factory.mktemp("ground"))


def alike(one: Path, other: Path, apart: float = 1e-5) -> None:
    """The same losses of training and evaluation, and the same weights but for the order of additions."""
    for name in ("loss", "eval_loss"):
        assert column(other, name) == pytest.approx(column(one, name), rel=2e-6)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor - second[name]).abs().max() < apart, name


def sized(micro: int) -> dict[str, object]:
    return {**EVALUATED, "trainer": {**EVALUATED["trainer"], "per_device_train_batch_size": micro}}


def test_a_loss_of_the_file_is_the_same_for_every_micro_batch(ground, tmp_path, forks: Forks):
    plain = trained(sized(4), ground, tmp_path / "plain", forks, world=0)
    whole = trained(sized(4), ground, tmp_path / "whole", forks, world=0, hooks=LOSS)
    parts = trained(sized(1), ground, tmp_path / "parts", forks, world=0, hooks=LOSS)
    assert len(column(plain, "eval_loss")) > 1
    alike(plain, whole)
    alike(plain, parts)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{"engine": "ddp"}, {"zero_stage": 2}, {"engine": "fsdp"}], ids=str)
def test_a_loss_of_the_file_is_the_same_on_two_ranks(sharding, ground, tmp_path, forks: Forks):
    plain = trained(sized(2), ground, tmp_path / "plain", forks, world=0)
    said = {**sized(1), "sharding": sharding}
    ranks = trained(said, ground, tmp_path / "ranks", forks, world=2, hooks=LOSS)
    alike(plain, ranks)


ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def own(ground, tmp_path_factory, forks: Forks) -> Path:
    """A run in which every part that may be of the file is."""
    return trained(of_own(), ground, tmp_path_factory.mktemp("own") / "run", forks, world=0, hooks=ALL)


def of_own() -> dict[str, object]:
    said = sized(2)
    return {**said, "trainer": {**said["trainer"], **ADAM, "optim": None}}


def test_a_run_of_own_parts_learns_what_the_run_of_ours_learns(own, ground, tmp_path, forks: Forks):
    said = sized(2)
    said["trainer"] = {**said["trainer"], **ADAM, "lr_scheduler_type": "linear"}
    plain = trained(said, ground, tmp_path / "plain", forks, world=0, hooks=FROZEN)
    alike(plain, own, apart=1e-4)  # Adam divides by small numbers
    assert result(own)["trainable_params"] == result(plain)["trainable_params"]
    assert result(own)["trainable_params"] < result(own)["total_params"]


def test_a_run_of_own_parts_is_killed_and_resumed_to_the_last_bit(own, ground, tmp_path, forks: Forks):
    out, env = planned(of_own(), ground, tmp_path / "killed", forks, world=0, hooks=ALL)
    assert forks.run(out, 0, {**env, KILL: "3"}).codes == (-9,)
    ended = forks.run(out, 0, {**env, RESUME_VARIABLE: "auto"})
    assert ended.codes == (0,), ended.said
    assert column(out, "loss")[-1] == column(own, "loss")[-1]
    found = weights(out)
    assert all(torch_equal(tensor, found[name]) for name, tensor in weights(own).items())


def torch_equal(one, other) -> bool:
    return bool((one == other).all())


FAILS = {
    "compute_loss": """
def compute_loss(outputs, labels, num_items_in_batch):
    return outputs.scores
""",
    "Trainer": """
from transformers import Trainer as Base


class Trainer(Base):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * self.factor
""",
}
LINES = {"compute_loss": "outputs.scores", "Trainer": "self.factor"}


def failed(name: str, ground: Path, folder: Path, forks: Forks, world: int) -> None:
    """The run ends with status 5 on every rank, which names file and line."""
    out, env = planned(ONE, ground, folder, forks, world, FAILS[name])
    ended = forks.run(out, world, env)
    assert set(ended.codes) == {5}, ended.said
    text = (folder / "hooks.py").read_text().splitlines()
    line = next(number for number, one in enumerate(text, 1) if LINES[name] in one)
    for rank in range(max(world, 1)):
        [problem] = json.loads((out / "logs" / f"error-rank-{rank}.json").read_text())["problems"]
        assert (problem["code"], problem["line"]) == ("hook-failed", line)
        assert problem["file"] == str(folder / "hooks.py")


def test_an_error_in_the_users_trainer_names_its_line(ground, tmp_path, forks: Forks):
    failed("Trainer", ground, tmp_path / "run", forks, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILS)
def test_an_error_in_the_file_ends_all_ranks(name, ground, tmp_path, forks: Forks):
    failed(name, ground, tmp_path / "run", forks, 2)
