"""Adapters of modules that are never called, or whose gradient is zero, are counted in a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")

import torch

from launcher.train.idle_adapters import WATCHED
from launcher.train.memory_meter import Meter
from launcher.train.training import fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import LORA, make_ground, result
from engine_runs import trained as trained_by
from small import Rows, job, llama, lora, sequences, tokenizer

from launcher.train.data.batches import make_collator

pytestmark = pytest.mark.usefixtures("warm")
PREFIX = "model.layers.1.mlp"


class Never(torch.nn.Module):
    """An MLP, a layer that is never called, one with a gradient of zero, and one that is called late."""

    def __init__(self, inner, late: int) -> None:
        super().__init__()
        self.inner, self.late, self.calls = inner, late, 0
        for name in ("skipped", "zeroed", "expert"):
            setattr(self, name, torch.nn.Linear(32, 32))

    def forward(self, x):
        self.calls += 1
        out = self.inner(x) + 0 * self.zeroed(x)
        return out + self.expert(x) if self.calls > self.late else out


def measured(folder: Path, steps: int, late: int, **changes):
    from datasets import Dataset

    base = llama()
    base.model.layers[1].mlp = Never(base.model.layers[1].mlp, late)
    model = lora_of(base)
    work = job(folder, {"adapter": {"type": "lora"}, "trainer.max_steps": steps, **changes})
    rows = Rows(Dataset.from_list(sequences(32)), None, make_collator("pad", tokenizer()))
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), rows)
    return fit(work, trainer, Meter(on_cuda=False))


def lora_of(base):
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "v_proj", "skipped", "zeroed", "expert"]
    return get_peft_model(base, LoraConfig(r=4, target_modules=names))


@pytest.mark.parametrize("steps", [4, WATCHED + 2])
def test_adapters_that_get_no_gradient_are_counted(steps, tmp_path, capsys):
    found = measured(tmp_path, steps, late=2).idle_adapters
    assert found == {
        "count": 2,
        "of": 7,
        "steps": min(steps, WATCHED),
        "first": [f"{PREFIX}.skipped", f"{PREFIX}.zeroed"],
    }
    assert capsys.readouterr().out.count("WARNING: adapters: 2 of 7") == 1


def test_an_expert_that_no_token_has_chosen_so_far_counts_at_the_end(tmp_path):
    found = measured(tmp_path, 2, late=1000).idle_adapters
    assert (found["count"], found["steps"], found["first"][-1]) == (3, 2, f"{PREFIX}.expert")


def test_without_idle_adapters_nothing_is_found(tmp_path):
    from datasets import Dataset

    work = job(tmp_path, {"adapter": {"type": "lora"}, "trainer.max_steps": 2})
    rows = Rows(Dataset.from_list(sequences(32)), None, make_collator("pad", tokenizer()))
    trainer = make_trainer(work, make_arguments(work), lora(llama()), tokenizer(), rows)
    assert fit(work, trainer, Meter(on_cuda=False)).idle_adapters is None
    assert not any(p._backward_hooks for p in trainer.model.parameters())


def test_an_embedding_trains_from_the_first_step_on(tmp_path):
    """Of its adapter, the first matrix begins as zeros."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model

    work = job(tmp_path, {"adapter": {"type": "lora"}, "trainer.max_steps": 1})
    rows = Rows(Dataset.from_list(sequences(32)), None, make_collator("pad", tokenizer()))
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), rows)
    assert fit(work, trainer, Meter(on_cuda=False)).idle_adapters is None


IDLE = """
from transformers.models.llama.modeling_llama import LlamaMLP


def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) + 0 * self.up_proj(x))


LlamaMLP.forward = forward


def callbacks():
    return []
"""


@pytest.mark.parametrize(
    "sharding",
    cases(
        {name: {"engine": name} for name in ("ddp", "fsdp")}
        | {f"zero{stage}": {"zero_stage": stage} for stage in (2, 3)},
        "zero3",
        named=True,
    ),
)
def test_every_engine_counts_them_alike(sharding, tmp_path, forks):
    ground = make_ground(tmp_path / "ground")
    (ground / "idle.py").write_text(IDLE)
    said = {"adapter": LORA, "sharding": sharding, "python": "idle.py"}
    found = result(trained_by(said, ground, tmp_path / "run", forks))["idle_adapters"]
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    assert found == {"count": 2, "of": 14, "steps": 4, "first": names}
