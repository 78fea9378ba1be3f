"""Mixtures of experts: 4-bit experts, and LoRA over them, with the real libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

from launcher.errors import MachineError
from launcher.inputs.model_spec import find_spec
from launcher.models.lora import adapted_by, reach_of
from launcher.models.model import read_model_spec
from launcher.train.job import read_job
from launcher.train.model.adapters import attach_adapter, find_adapted
from launcher.train.model.experts import expert_parameters, packed_experts
from launcher.train.model.models import load_model
from launcher.train.results.merge import merge
from launcher.train.results.trained import on_base
from launcher.train.tiny import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from cases import cases
from plans import TINY_LLAMA, write_run

SIZES = {key: value for key, value in TINY_LLAMA.items() if key != "model_type"}
QWEN = {**SIZES, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", **QWEN},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "olmoe": {"model_type": "olmoe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "gpt_oss": {
        "model_type": "gpt_oss", **SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "granitemoe": {"model_type": "granitemoe", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 64,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "float32"}
ALL = {"type": "lora", "r": 4, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
IDS = torch.arange(4, 44).view(2, 20)


def run_of(folder: Path, name: str, changes: dict[str, Any]) -> Any:
    """A run of a checkpoint with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        set_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name])).save_pretrained(checkpoint)
        tiny_tokenizer(512).save_pretrained(checkpoint)
    base = {"tiny": False, "model.name_or_path": str(checkpoint), "model.config": None}
    base |= {"model.device_map": "local", "trainer.use_cpu": True, "model.quantization": NF4}
    attention = "eager" if name == "gpt_oss" else "sdpa"  # its sinks
    base |= {"model.prepare_for_kbit": True, "model.attn_implementation": attention}
    return read_job(write_run(folder / "run", {**base, **changes}))


def loaded(job: Any) -> Any:
    model = load_model(job, tiny_tokenizer(512), None)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # packs the weights anew, which rounds their constants
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def spread(model: Any) -> None:
    """Values for the halves of adapters that begin at zero."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_quantised_while_they_are_read(tmp_path, name):
    model = loaded(run_of(tmp_path, name, {}))
    packed = list(packed_experts(model))
    assert packed
    assert not list(expert_parameters(model))
    plain = loaded(run_of(tmp_path, name, {"model.quantization": "none"}))
    originals = {path: parameter for path, parameter in plain.named_parameters()}
    paths = {id(module): path for path, module in model.named_modules()}
    for module, last, _how in packed:
        original = originals[f"{paths[id(module)]}.{last}"]
        assert module.parametrizations[last].original.nbytes * 8 == original.nbytes
        found = getattr(module, last)
        assert found.shape == original.shape
        error = (found - original).abs().mean() / original.abs().mean()
        assert 0 < error < 0.12  # of nf4 on normally distributed values
    assert (logits(model) - logits(plain)).abs().mean() < 0.2 * logits(plain).abs().mean()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe"])
@pytest.mark.parametrize("quantized", [True, False])
def test_adapters_reach_experts_and_are_merged(tmp_path, name, quantized):
    """Each expert's adapter gets a gradient, and saved, read and merged it gives the same logits."""
    wanted = {path for path, _, _ in expert_parameters(plain_model(name))}
    adapter = {**ALL, "target_modules": ["o_proj"], "target_parameters": sorted(wanted)}
    changes = {"adapter": adapter, "trainer.activation_checkpointing": True}
    if not quantized:
        changes |= {"model.quantization": "none", "model.prepare_for_kbit": False}
        changes |= {"model.device_map": None, "model.enable_input_require_grads": True}
    job = run_of(tmp_path, name, changes)
    model = attach_adapter(job, loaded(job), tiny_tokenizer(512))
    assert set(find_adapted(model).parameters) == wanted
    before = logits(model)
    spread(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
    model.eval()
    after = logits(model)
    assert not torch.allclose(before, after, atol=1e-3)
    model.save_pretrained(job.run_dir / "adapter")
    tiny_tokenizer(512).save_pretrained(job.run_dir / "adapter")
    again = on_base(loaded(job), job.run_dir / "adapter").eval()
    assert torch.equal(logits(again), after)
    found = merge(job.run_dir, tmp_path / "merged", "float32", lambda _: "card")
    assert found.sum.is_none
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), after, atol=2e-3)


def plain_model(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))


@pytest.mark.parametrize("asked", [True, False])
def test_the_auxiliary_loss_is_as_configured(tmp_path, monkeypatch, asked):
    configured = {**MODELS["qwen3_moe"], "output_router_logits": asked, "router_aux_loss_coef": 0.5}
    monkeypatch.setitem(MODELS, "qwen3_moe", configured)
    job = run_of(tmp_path, "qwen3_moe", {"adapter": {**ALL, "target_modules": ["q_proj"]}})
    model = attach_adapter(job, loaded(job), tiny_tokenizer(512))
    with torch.no_grad():
        out = model(input_ids=IDS, labels=IDS)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
    added = 0.5 * out.aux_loss if asked else 0.0
    assert out.loss.item() == pytest.approx(float(plain + added), rel=1e-5)
    assert not asked or out.aux_loss > 1


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # of peft's own making
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoe"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj"]])
def test_what_adapters_reach_is_what_peft_adapts(name, targets):
    from peft import LoraConfig, get_peft_model

    config = {"max_position_embeddings": 256, **MODELS[name]}
    spec = read_model_spec(name, config, "test")
    reach = reach_of(spec, adapted_by(spec, {"r": 4, "target_modules": targets}))
    sizes = {path: parameter.numel() for path, parameter in plain_model(name).named_parameters()}
    found = find_adapted(get_peft_model(plain_model(name), LoraConfig(r=4, target_modules=targets)))
    adapted = [*(f"{path}.weight" for path in found.modules), *found.parameters]
    assert reach.params == sum(sizes[path] for path in adapted)
    assert reach.experts == any(".experts." in path for path in adapted)
    assert reach.router == any("gate.weight" in path for path in adapted)


@pytest.mark.parametrize("name", cases(["qwen3_moe", "mixtral"], "mixtral"))
def test_the_router_is_trained_by_choice(tmp_path, name):
    adapter = {**ALL, "target_modules": ["q_proj"], "modules_to_save": ["gate"]}
    job = run_of(tmp_path, name, {"adapter": adapter})
    model = attach_adapter(job, loaded(job), tiny_tokenizer(512)).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    routers = {n: p for n, p in model.named_parameters() if "gate" in n and p.requires_grad}
    assert routers
    assert all(p.grad.abs().max() > 0 for p in routers.values())
    with torch.no_grad():
        for parameter in routers.values():
            parameter.add_(torch.randn_like(parameter))
    after = logits(model.eval())
    model.save_pretrained(job.run_dir / "adapter")
    tiny_tokenizer(512).save_pretrained(job.run_dir / "adapter")
    assert torch.equal(logits(on_base(loaded(job), job.run_dir / "adapter").eval()), after)
    assert merge(job.run_dir, tmp_path / "merged", "float32", lambda _: "card").sum.is_none
    asked = {key: value for key, value in adapter.items() if key != "type"}
    config = {"max_position_embeddings": 256, **MODELS[name]}
    spec, _ = find_spec(name, config, "test", "causal-lm", ask=True, adapter=asked)
    reach = reach_of(spec, adapted_by(spec, asked))
    assert (reach.experts, reach.router) == (False, True)


FOREIGN = {"olmoe": MODELS["olmoe"], "ernie4_5_moe": {
    "model_type": "ernie4_5_moe", **SIZES, "moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2,
    "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
}}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
@pytest.mark.parametrize("name", cases(FOREIGN, "olmoe"))
@pytest.mark.parametrize("targets", cases(["all-linear", ["q_proj", "o_proj"]], "all-linear"))
def test_experts_of_unknown_families_are_counted(monkeypatch, name, targets):
    from peft import LoraConfig, get_peft_model

    from launcher.memory.states import base_weight_bytes

    monkeypatch.setitem(MODELS, name, FOREIGN[name])
    adapter = {"r": 4, "target_modules": targets}
    spec, _ = find_spec(name, FOREIGN[name], "test", "causal-lm", ask=True, adapter=adapter)
    assert spec.foreign
    model = plain_model(name)
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    experts = [path for path, _, _ in expert_parameters(model)]
    assert spec.expert_weights == sum(sizes[path] for path in experts) > 0
    packed = spec.linear_weights + spec.expert_weights
    saved = base_weight_bytes(spec, "bfloat16") - base_weight_bytes(spec, "bfloat16", "nf4")
    assert saved == pytest.approx(1.5 * packed, rel=0.02)
    reach = reach_of(spec, adapted_by(spec, adapter))
    found = find_adapted(get_peft_model(model, LoraConfig(**adapter)))
    adapted = {*(f"{path}.weight" for path in found.modules), *found.parameters}
    assert reach.params == sum(sizes[path] for path in adapted)
    assert reach.experts == bool(adapted & set(experts))
    assert reach.router == any(path.endswith("gate.weight") for path in adapted)


def test_matrices_of_all_experts_are_not_left_in_16_bits_silently(tmp_path, monkeypatch):
    """DBRX keeps them as rows of plain matrices, which nothing packs."""
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 128, "vocab_size": 512}
    inner = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
    dbrx = {"model_type": "dbrx", **sizes, "attn_config": attention, "ffn_config": inner}
    monkeypatch.setitem(MODELS, "dbrx", dbrx)
    with pytest.raises(MachineError) as caught:
        loaded(run_of(tmp_path, "dbrx", {}))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("not-quantized", "model.quantization")
    assert "3 parameters of experts" in problem.message
    assert "experts.mlp." in problem.message
