"""What peft and transformers do with tied weights and with adapters in place of models."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.train.adapters import _keep_tied
from launcher.train.models import check_bare, check_shared

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def tied_llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trained_matrices(settings):
    """Storages of the whole matrices that this adapter trains."""
    model = peft.get_peft_model(tied_llama(), peft.LoraConfig(target_modules=["q_proj"], **settings))
    trained = [p for name, p in model.named_parameters(remove_duplicate=False) if "modules_to_save" in name]
    assert trained
    assert all(parameter.requires_grad for parameter in trained)
    return {parameter.data_ptr() for parameter in trained}, model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_matrix_that_is_trained_whole_stays_one(name):
    given = {"modules_to_save": [name]}
    _, apart = trained_matrices(given)
    base = apart.get_base_model()
    assert embedding_of(base).data_ptr() != head_of(base).data_ptr()
    matrices, model = trained_matrices(_keep_tied(given, tied_llama()))
    base = model.get_base_model()
    assert matrices == {embedding_of(base).data_ptr()} == {head_of(base).data_ptr()}


def used(module):
    """The weight that a module computes with: its trained copy, where it has one."""
    copies = getattr(module, "modules_to_save", None)
    return copies["default"].weight if copies is not None else module.weight


def embedding_of(model):
    return used(model.model.embed_tokens)


def head_of(model):
    return used(model.lm_head)


def test_the_folder_of_an_adapter_loads_as_a_model_and_is_refused(tmp_path):
    tied_llama().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    check_bare(base)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with pytest.raises(RecipeError, match="folder of an adapter"):
        check_bare(loaded)


class Work:
    """What `check_shared` asks of a job."""

    def __init__(self, *, adapter=False, stage=None):
        self.has_adapter, self.zero_stage = adapter, stage


def test_weights_that_cannot_be_saved_are_refused_before_training(tmp_path):
    model = tied_llama()
    model.save_pretrained(tmp_path / "tied")
    check_shared(Work(), model)  # a tie that transformers knows
    block = model.model.layers[0]
    block.mlp.up_proj.weight = block.mlp.gate_proj.weight
    with pytest.raises(RuntimeError, match="shared tensors"):
        model.save_pretrained(tmp_path / "shared")
    with pytest.raises(RecipeError) as caught:
        check_shared(Work(), model)
    assert [problem.code for problem in caught.value.problems] == ["shared-tensors"]
    check_shared(Work(adapter=True), model)
