"""Checkpoints whose weights are stored quantised: trained as if quantised while loading, or refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("bitsandbytes")

import torch
from factories import recipe

from launcher.errors import RecipeError
from launcher.inputs.planning_facts import check_model
from launcher.train.job import read_job
from launcher.train.model.models import load_model
from launcher.train.results.merge import merge
from launcher.train.tiny import tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, TINY_LLAMA, write_run

NF4 = {"type": "nf4", "double_quant": False, "compute_dtype": "float32"}
STORED = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Folders `plain`, `nf4` and `int8` with the same random weights and a tokenizer."""
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, set_seed

    folder = tmp_path_factory.mktemp("checkpoints")
    set_seed(0)
    sizes = {key: value for key, value in TINY_LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "plain")
    for name, options in STORED.items():
        stored = LlamaForCausalLM.from_pretrained(
            folder / "plain", quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32
        )
        stored.save_pretrained(folder / name)
    for name in ("plain", *STORED):
        tiny_tokenizer(512).save_pretrained(folder / name)
    return folder


def run_of(folder: Path, checkpoint: Path, quantization, adapter=None):
    changes = {"tiny": False, "model.name_or_path": str(checkpoint), "model.config": None}
    changes |= {"model.quantization": quantization, "model.device_map": "local", "trainer.use_cpu": True}
    return read_job(write_run(folder, {**changes, **({"adapter": adapter} if adapter else {})}))


def logits(job):
    from transformers import AutoTokenizer

    processing = AutoTokenizer.from_pretrained(job.model.name_or_path)
    model = load_model(job, processing, None, distributed=False).train()
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # packs the weights anew, which rounds their constants
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 40)[None]).logits


@pytest.mark.parametrize("kind", cases({"nf4": NF4, "int8": {"type": "int8"}}, "nf4", "int8", named=True))
def test_it_computes_what_is_quantised_while_loading(tmp_path, checkpoints, kind):
    """With the compute_dtype of the recipe, not with the one that is stored."""
    stored = logits(run_of(tmp_path / "a", checkpoints / kind["type"], kind))
    loaded = logits(run_of(tmp_path / "b", checkpoints / "plain", kind))
    assert torch.equal(stored, loaded)


@pytest.mark.parametrize("kind", cases({"nf4": NF4, "int8": {"type": "int8"}}, "nf4", named=True))
def test_an_adapter_over_it_is_merged(tmp_path, checkpoints, kind):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    job = run_of(tmp_path / "run", checkpoints / kind["type"], kind, LORA)
    plain = AutoModelForCausalLM.from_pretrained(checkpoints / "plain")
    adapted = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(job.run_dir / "adapter")
    tiny_tokenizer(512).save_pretrained(job.run_dir / "adapter")
    found = merge(job.run_dir, tmp_path / "merged", "float32", lambda _: "card")
    assert found.sum.is_none
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    assert type(merged.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def asking(folder: Path, checkpoint: Path, quantization: str):
    model = f"model: {{name_or_path: {checkpoint}, quantization: {quantization}}}"
    rest = "adapter: {type: lora}\ndata: {train: [{path: a.jsonl}]}\ntrainer: {max_steps: 1}\n"
    return recipe(folder, f"{model}\n{rest}")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("checkpoint", "asked", "path"),
    [
        ("nf4", "none", "model.quantization"),
        ("nf4", "auto", "model.quantization"),
        ("nf4", "int8", "model.quantization"),
        ("nf4", "nf4", "model.quantization.double_quant"),
        ("int8", "none", "model.quantization"),
        ("int8", "{type: nf4}", "model.quantization"),
        ("gptq", "none", "model.name_or_path"),
        ("gptq", "nf4", "model.name_or_path"),
    ],
)
def test_a_recipe_that_says_otherwise_is_refused(tmp_path, checkpoints, checkpoint, asked, path):
    folder = checkpoints / checkpoint
    if checkpoint == "gptq":
        folder = tmp_path / "gptq"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, "quantization_config": GPTQ}))
    asks = asking(tmp_path, folder, asked)
    with pytest.raises(RecipeError) as refused:
        check_model(asks.recipe)
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("checkpoint-quantized", path)


@pytest.mark.parametrize(
    ("checkpoint", "asked"), [("nf4", "{type: nf4, double_quant: false}"), ("int8", "int8")]
)
def test_a_recipe_that_says_the_same_is_planned(tmp_path, checkpoints, checkpoint, asked):
    check_model(asking(tmp_path, checkpoints / checkpoint, asked).recipe)
