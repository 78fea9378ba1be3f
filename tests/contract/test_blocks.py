"""Layers that are compiled in their place: the same losses, the same names, one compilation for all."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")

import torch
import torch._dynamo.utils

from launcher.errors import RecipeError
from launcher.train.data.batches import make_collator
from launcher.train.memory_meter import METERED_STEPS, Meter
from launcher.train.model.models import repeated_layers
from launcher.train.training import fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from small import Rows, job, llama, lora, metrics, sequences, tokenizer

STEPS = METERED_STEPS + 3


@pytest.fixture(autouse=True)
def dynamo():
    """Nothing compiled before, and nothing left for other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def trained(folder: Path, model, **changes) -> list[float]:
    """Losses of a run over rows of mixed lengths, which is saved in the end."""
    from datasets import Dataset

    saves = {"trainer.max_steps": STEPS, "trainer.save_strategy": "steps", "trainer.save_steps": STEPS}
    kind = "lora" if hasattr(model, "peft_config") else None
    work = job(folder, {**saves, "adapter.type": kind, **changes})
    rows = Rows(Dataset.from_list(sequences(32, 14)), None, make_collator("pad", tokenizer()))
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), rows)
    fit(work, trainer, Meter(on_cuda=False))
    return [row["loss"] for row in metrics(folder) if "loss" in row]


def deep_llama(layers: int):
    from transformers import LlamaForCausalLM, set_seed

    set_seed(0)
    config = llama().config
    config.num_hidden_layers = layers
    return LlamaForCausalLM(config)


def names(folder: Path) -> set[str]:
    from safetensors import safe_open

    (file,) = (folder / "checkpoints" / f"checkpoint-{STEPS}").glob("*model.safetensors")
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize("adapter", cases({"full": False, "lora": True}, "lora", named=True))
def test_one_compilation_serves_all_layers_and_lengths(tmp_path, monkeypatch, dynamo, adapter):
    """Without the C++ compiler, which the slow test has: what is compiled is run as it is."""
    compile_ = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)

    def model():
        deep = deep_llama(6)
        return lora(deep) if adapter else deep

    plain = trained(tmp_path / "plain", model(), **{"trainer.activation_checkpointing": True})
    assert not dynamo["stats"]
    compiled = {"model.compile_blocks": True, "trainer.activation_checkpointing": True}
    assert trained(tmp_path / "compiled", model(), **compiled) == pytest.approx(plain, rel=1e-6)
    # Behind the steps in which memory is measured; a first layer whose input needs no gradient differs.
    assert 1 <= dynamo["stats"]["unique_graphs"] <= 2
    assert not dynamo["graph_break"]
    assert names(tmp_path / "compiled") == names(tmp_path / "plain") != set()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_compiled_layers_learn_the_same(tmp_path, monkeypatch, dynamo, adapter):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torch sets it, and leaves it set
    made = [lora(llama()) if adapter else llama() for _ in range(2)]
    plain = trained(tmp_path / "plain", made[0])
    compiled = trained(tmp_path / "compiled", made[1], **{"model.compile_blocks": True})
    assert dynamo["stats"]["unique_graphs"] >= 1
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert names(tmp_path / "compiled") == names(tmp_path / "plain") != set()


def test_a_layer_that_cannot_be_compiled_trains_as_it_is(tmp_path, monkeypatch, caplog):
    def no_compiler(graph, inputs):
        raise RuntimeError("Failed to find C compiler")

    compile_ = functools.partialmethod(torch.nn.Module.compile, backend=no_compiler)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    plain = trained(tmp_path / "plain", llama())
    assert trained(tmp_path / "tried", llama(), **{"model.compile_blocks": True}) == plain
    assert "Failed to find C compiler" in caplog.text


def test_the_layers_of_a_model_are_those_that_it_names(tmp_path):
    assert len(repeated_layers(lora(deep_llama(3)))) == 3
    nameless = llama()
    nameless._no_split_modules = None
    with pytest.raises(RecipeError, match="does not name the layers"):
        trained(tmp_path, nameless, **{"model.compile_blocks": True})
