"""The loss in chunks is the plain loss: value, gradients, engines; and what it cannot do is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from cases import cases
from closed_form_cases import LIKE_LLAMA

pytest.importorskip("torch")

import torch
from torch.nn import functional

from launcher.errors import RecipeError
from launcher.models.model_types import found
from launcher.train.model import loss as head_loss
from launcher.train.model.loss import SummedLoss, chunk_loss

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import LORA, alone, check_alike, make_ground, planned
from small import llama, lora

SIZES = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHER_NAMES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    **{name: {"head_dim": 8} for name in ("ministral", "ministral3", "glm", "glm4")},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
        "output_router_logits": True,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    """Chunks of three rows, so that every test has several and a short one."""
    monkeypatch.setattr(head_loss, "chunk_rows", lambda _: 3)


def of_family(name: str, **more):
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **OTHER_NAMES.get(name, {}), **more})
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")
    config.update({key: 0.0 for key in dropouts if hasattr(config, key)})
    return AutoModelForCausalLM.from_config(config)


def a_batch() -> dict[str, torch.Tensor]:
    """Three rows with padding; the first token and the beginning of each row are not learnt."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    mask[2, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def learnt(model, batch, **more) -> tuple[float, dict[str, torch.Tensor]]:
    """(The loss, the gradients.)"""
    model.train()
    model.zero_grad()
    loss = model(**batch, use_cache=False, **more).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def assert_same(plain, chunked, *, rtol=1e-4, atol=1e-7) -> None:
    assert chunked[0] == pytest.approx(plain[0], rel=rtol / 10)
    assert chunked[1].keys() == plain[1].keys() != set()
    for name, grad in plain[1].items():
        assert chunked[1][name].dtype == grad.dtype
        torch.testing.assert_close(chunked[1][name], grad, rtol=rtol, atol=atol, msg=name)


def both(model, batch=None, rtol=1e-4, atol=1e-7, **more) -> None:
    batch = batch or a_batch()
    plain = learnt(model, batch, **more)
    chunk_loss(model)
    assert_same(plain, learnt(model, batch, **more), rtol=rtol, atol=atol)


# --- the same loss and gradients


@pytest.mark.parametrize("family", [family for family in LIKE_LLAMA if found(family).chunked])
def test_each_family_learns_the_same(family):
    """Mixtral and Qwen3-MoE with the loss of their routers."""
    both(of_family(family), atol=1e-6)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
def test_the_sum_is_divided_by_what_the_step_learns(items):
    both(llama(), num_items_in_batch=items)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_matrix_has_the_gradients_of_both_its_uses(tied):
    model = llama(tie_word_embeddings=tied)
    both(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_head_with_a_bias():
    model = llama()
    model.lm_head = torch.nn.Linear(32, 64)
    both(model, atol=1e-6)  # gradients to 1.1, of which float32 has 7 digits
    assert model.lm_head.bias.grad.abs().sum() > 0


def test_an_adapter_leaves_the_head_without_a_gradient():
    model = lora(llama(), init_lora_weights=False)
    both(model)
    assert model.get_base_model().lm_head.weight.grad is None


def test_recomputed_layers_learn_the_same():
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    both(model)


def test_under_autocast_products_are_taken_as_autocast_takes_them():
    model, batch = llama(), a_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = learnt(model, batch)
        chunk_loss(model)
        chunked = learnt(model, batch)
    head, whole = (each[1].pop("lm_head.weight") for each in (chunked, plain))
    assert chunked[0] == pytest.approx(plain[0], rel=1e-6)
    assert all(torch.equal(chunked[1][name], grad) for name, grad in plain[1].items())
    # Of the chunks' products each is rounded to bfloat16, but not their sum.
    assert head.dtype == whole.dtype == torch.float32
    assert (head - whole).norm() < 2**-8 * whole.norm()


def test_a_sum_of_16_bit_rows_is_a_float32_sum():
    """torch's own function sums the losses of bfloat16 rows in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(64, 32, generator=generator).bfloat16()
    targets = torch.randint(64, (400,), generator=generator)
    plain = functional.cross_entropy(functional.linear(rows, weight).float(), targets, reduction="sum")
    found = SummedLoss.apply(rows, weight, None, targets)
    assert found.item() == pytest.approx(plain.item(), rel=1e-6)


def test_a_gradient_of_16_bits_is_summed_over_chunks_in_32(monkeypatch):
    """Rounded once, as that of the plain loss is; a sum in bfloat16 forgets what is small beside it."""
    monkeypatch.setattr("launcher.train.model.loss.chunk_rows", lambda words: 2)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, 16, generator=generator).bfloat16()
    weight = torch.randn(8, 16, generator=generator).bfloat16().requires_grad_()
    bias = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 8, (600,), generator=generator)
    SummedLoss.apply(rows, weight, bias, targets).backward()
    wide, offset = (own.detach().float().requires_grad_() for own in (weight, bias))
    SummedLoss.apply(rows.float(), wide, offset, targets).backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.bfloat16
    assert (weight.grad.float() - wide.grad).norm() < 4e-3 * wide.grad.norm()
    assert (bias.grad.float() - offset.grad).norm() < 4e-3 * offset.grad.norm()


def test_a_first_loss_that_is_nan_is_no_fault_of_the_head():
    model = of_family("llama")
    chunk_loss(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert math.isnan(learnt(model, a_batch())[0]), "as from the plain loss"


def test_a_batch_that_learns_nothing_has_the_loss_that_upstream_gives():
    batch = a_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    both(llama(), batch, num_items_in_batch=5)
    assert torch.isnan(llama()(**batch).loss)
    model = llama().train()
    chunk_loss(model)
    assert torch.isnan(model(**batch).loss)


def test_labels_that_are_shifted_already_are_taken_as_they_are():
    batch = a_batch()
    batch["shift_labels"] = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    both(llama(), batch)


def test_a_second_backward_is_refused():
    model = llama().train()
    chunk_loss(model)
    loss = model(**a_batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


# --- what needs logits has them


def test_evaluation_and_generation_have_logits():
    plain, model, batch = llama(), llama(), a_batch()
    chunk_loss(model)
    for each in (plain, model):
        each.eval()
    with torch.no_grad():
        found, expected = model(**batch), plain(**batch)
        assert torch.equal(found.logits, expected.logits)
        assert found.loss == expected.loss
        model.train()
        assert torch.equal(model(batch["input_ids"]).logits, plain(batch["input_ids"]).logits)
    assert model(**batch, logits_to_keep=11).logits.shape == (3, 11, 64)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_the_trainer_sees_the_arguments_of_the_forward():
    import inspect

    expected = inspect.signature(llama().forward)
    model = llama()
    chunk_loss(model)
    assert inspect.signature(model.forward) == expected


# --- what is no plain head is refused


def assert_refused(model, match: str) -> None:
    def train() -> None:
        chunk_loss(model)
        model.train()
        model(**a_batch())

    with pytest.raises(RecipeError, match=match) as caught:
        train()
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, problem.hint) == ("chunked-loss", "model.loss", "model.loss: full")


def test_a_model_that_changes_its_logits_is_refused():
    assert_refused(of_family("gemma2"), "changes the logits before the loss")


def test_a_head_that_is_called_for_a_part_or_twice_is_refused():
    model = llama()
    call = model.model.forward

    def shorter(*args, **kwargs):
        found = call(*args, **kwargs)
        found.last_hidden_state = found.last_hidden_state[:, 1:]
        return found

    model.model.forward = shorter
    assert_refused(model, "is not given every token")
    twice = llama()
    inner = twice.model.forward

    def also(*args, **kwargs):
        found = inner(*args, **kwargs)
        twice.lm_head(found.last_hidden_state)
        return found

    twice.model.forward = also
    assert_refused(twice, "called more than once")


def test_a_model_with_a_loss_of_its_own_is_refused():
    model = llama()
    forward = model.forward
    model.forward = lambda labels=None, **kwargs: forward(**kwargs)
    assert_refused(model, "does not hand the logits to its loss function")


def test_a_head_with_an_adapter_is_refused():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    assert_refused(get_peft_model(llama(), config), "its head is a ")


def test_a_failed_forward_leaves_nothing_behind():
    model, batch = llama().train(), a_batch()
    chunk_loss(model)
    with pytest.raises(IndexError):
        model(**{**batch, "input_ids": batch["input_ids"] + 1000})
    assert model(batch["input_ids"]).logits.shape == (3, 11, 64)


# --- engines


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    return make_ground(tmp_path_factory.mktemp("ground"), tie_word_embeddings=True)


def with_chunks(run: tuple[Path, dict]) -> tuple[Path, dict]:
    """The same run directory, whose plan says that the loss is computed in chunks."""
    plan = json.loads((run[0] / "plan.json").read_text())
    plan["settings"]["model.loss"] = {"value": "chunked", "source": "recipe", "by": None, "reason": None}
    (run[0] / "plan.json").write_text(json.dumps(plan))
    return run


ENGINES = {
    "ddp": {"sharding": {"engine": "ddp"}},
    "zero2": {"sharding": {"zero_stage": 2}},
    "zero3": {"sharding": {"zero_stage": 3}},
    "zero3-lora": {"sharding": {"zero_stage": 3}, "adapter": LORA},
    "fsdp2": {"sharding": {"engine": "fsdp"}},
}


@pytest.mark.parametrize("name", cases(ENGINES, "zero3-lora"))
def test_ranks_learn_in_chunks_what_one_process_learns_from_whole_logits(name, ground, tmp_path, forks):
    said = {**ENGINES[name], "global_batch_size": 8, "trainer": {"per_device_train_batch_size": 2}}
    plain = alone({**said, "sharding": {}}, ground, tmp_path / "plain", forks)
    out, env = with_chunks(planned(said, ground, tmp_path / "chunks", forks))
    ended = forks.run(out, 2, env)
    assert set(ended.codes) == {0}, ended.said
    check_alike(plain, out)
