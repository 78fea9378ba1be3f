"""What peft and transformers do with tied weights and with adapters in place of models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launcher.errors import RecipeError
from launcher.train.job import read_job
from launcher.train.model.adapters import _keep_tied, attach_adapter
from launcher.train.model.models import check_bare, check_shared

sys.path.insert(0, str(Path(__file__).parent))
from plans import write_run

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


def test_an_adapter_that_lacks_weights_is_not_continued(tmp_path):
    peft.get_peft_model(tied_llama(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    weights.popitem()
    save_file(weights, tmp_path / "adapter_model.safetensors")
    work = read_job(write_run(tmp_path / "run", {"adapter": {"type": "lora", "path": str(tmp_path)}}))
    with pytest.raises(RecipeError) as caught:
        attach_adapter(work, tied_llama(), None)
    assert [(one.code, one.path) for one in caught.value.problems] == [("adapter-mismatch", "adapter.path")]


def test_an_adapter_is_read_on_the_host(tmp_path, monkeypatch):
    """Else on "cuda", which safetensors takes for GPU 0: continued ones, and those of checkpoints."""
    peft.get_peft_model(tied_llama(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    devices, read = [], peft.peft_model.load_peft_weights
    monkeypatch.setattr(
        peft.peft_model,
        "load_peft_weights",
        lambda *given, device, **more: devices.append(device) or read(*given, device="cpu", **more),
    )
    monkeypatch.setattr(peft.peft_model, "infer_device", lambda: "cuda")
    work = read_job(write_run(tmp_path / "run", {"adapter": {"type": "lora", "path": str(tmp_path)}}))
    model = attach_adapter(work, tied_llama(), None)
    model.load_adapter(str(tmp_path), "default", is_trainable=True)  # as transformers' Trainer does
    assert devices == ["cpu", "cpu"]


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


# --- peft's casts

WIDE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def adapted(folder, dtype, **adapter):
    """(A model of that dtype with the plan's adapter, ready to train.)"""
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).to(dtype)
    asked = {"type": "lora", "r": 4, "target_modules": "all-linear", "init_lora_weights": False, **adapter}
    work = read_job(write_run(folder, {"adapter": {"lora_dropout": 0.0, **asked}}))
    return attach_adapter(work, model, None).train()


def one_step(model):
    """(Loss, gradients, bytes that autograd saved beside the weights) under bfloat16 autocast."""
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    saved: dict[int, torch.Tensor] = {}

    def save(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    size = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own)
    saved.clear()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, size


@pytest.mark.parametrize("more", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_inputs_that_autocast_alone_brings_into_its_dtype_learn_the_same_and_save_less(tmp_path, more):
    loss, gradients, size = one_step(adapted(tmp_path / "a", torch.bfloat16, **more))
    left = {"cast_input_dtype_enabled": False, **more}
    found, others, less = one_step(adapted(tmp_path / "b", torch.bfloat16, **left))
    assert found == loss
    assert others.keys() == gradients.keys() != set()
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
    # q, k and v, and gate and up, each had a 16-bit copy of an input that they share.
    assert less < 0.9 * size


def test_without_autocast_inputs_are_copied_all_the_same(tmp_path):
    """As `generate` of an evaluation runs: bfloat16 weights beside a float32 adapter."""
    model = adapted(tmp_path, torch.bfloat16, cast_input_dtype_enabled=False).eval()
    plain = adapted(tmp_path / "plain", torch.bfloat16).eval()
    ids = torch.arange(6)[None]
    made = [one.generate(input_ids=ids, max_new_tokens=4, do_sample=False) for one in (model, plain)]
    assert torch.equal(*made)


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=["dora", "dropout"])
def test_what_computes_on_the_input_itself_learns_otherwise_without_the_cast(tmp_path, more):
    """DoRA's norms, and dropout, which rounds what it scales up."""
    losses = []
    for cast in (True, False):
        model = adapted(tmp_path / f"{cast}", torch.bfloat16, cast_input_dtype_enabled=cast, **more)
        losses.append(one_step(model)[0])
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize("asked", [None, True, False])
def test_an_adapter_has_the_dtype_that_the_plan_says(tmp_path, asked):
    said = {} if asked is None else {"autocast_adapter_dtype": asked}
    model = adapted(tmp_path / "new", torch.bfloat16, **said)
    wanted = torch.bfloat16 if asked is False else torch.float32
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {wanted}
    model.save_pretrained(tmp_path / "saved")
    base = model.unload()
    work = read_job(write_run(tmp_path / "on", {"adapter": {"path": str(tmp_path / "saved"), **said}}))
    continued = attach_adapter(work, base, None)
    assert {p.dtype for p in continued.parameters() if p.requires_grad} == {wanted}
