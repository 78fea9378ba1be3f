"""Merged models against their oracle: plain transformers reads the folder, peft adds the adapter itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import cases

pytest.importorskip("torch")

import torch
from peft import PeftModel
from transformers import AutoConfig

from launcher.cli import main
from launcher.errors import MachineError, RecipeError, RunFailed
from launcher.tasks import task_named
from launcher.train.job import Job, read_job
from launcher.train.model.models import auto_class, leave_out_mtp, load_model
from launcher.train.results import merge as merging
from launcher.train.results.merge import merge
from launcher.train.results.trained import prepared_record, replaced

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, TINY_LLAMA, trained
from task_models import CONFIGS

ALL = {**LORA, "target_modules": "all-linear"}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
QWEN3_5 = {
    "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
STEPS = {"trainer.max_steps": 3}


def no_card(_: Any) -> str:
    return "a card\n"


def fp32_base(job: Job, processing: Any) -> Any:
    """The run's base with its quantised layers as what they stand for, by bitsandbytes' own functions."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    base = load_model(job, processing, prepared_record(job).get("labels"), distributed=False)
    for name, module in list(base.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        elif isinstance(module, bnb.nn.Linear8bitLt):
            weight = int8_vectorwise_dequant(module.weight.data, module.weight.SCB).float()
        else:
            continue
        plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight.data = weight
        if module.bias is not None:
            plain.bias.data = module.bias.data.float()
        base.set_submodule(name, plain)
    base.is_loaded_in_8bit = base.is_loaded_in_4bit = base.is_quantized = False
    return base.float()


def inputs_for(job: Job, rows: int = 2) -> dict[str, Any]:
    if job.task.name == "image-classification":
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 500, (rows, 12), generator=generator)
    if job.task.name == "seq2seq-lm":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        output = model.eval()(**inputs)
    return getattr(output, "logits", output[0])


def check(run: Path, **more: Any) -> tuple[merging.Merged, Any]:
    """Merge, and compare the folder with peft's own sum; what merging found, and the folder's model."""
    found = merge(run, run / "merged", more.pop("dtype", "float32"), no_card)
    job = read_job(run)
    from transformers import AutoImageProcessor, AutoTokenizer

    image = job.task.name == "image-classification"
    processing = (AutoImageProcessor if image else AutoTokenizer).from_pretrained(run / "merged")
    oracle = PeftModel.from_pretrained(fp32_base(job, processing), str(run / "adapter"))
    plain = auto_class(job.task.name).from_pretrained(run / "merged")
    assert not hasattr(plain.config, "quantization_config")
    inputs = inputs_for(job)
    torch.testing.assert_close(logits(plain, inputs), logits(oracle, inputs), rtol=0, atol=1e-5)
    bare = logits(fp32_base(job, processing), inputs)
    assert not torch.allclose(bare, logits(plain, inputs), atol=1e-3), "the adapter changes something"
    assert found.sum.is_none
    assert found.places > 0
    assert not list(run.glob(".merged*"))
    return found, plain


KINDS = {
    "lora": {"adapter": ALL},
    "dora": {"adapter": {**ALL, "use_dora": True}},
    "rslora": {"adapter": {**ALL, "use_rslora": True}},
    "pissa": {"adapter": {**ALL, "init_lora_weights": "pissa"}},
    "lora-bias": {"adapter": {**ALL, "bias": "lora_only"}},
    "bf16-base": {"adapter": ALL, "model.dtype": "bfloat16"},
    "gpt2-nf4": {"adapter": ALL, "model.config": GPT2, "model.quantization": "nf4"},
    "int8": {"adapter": ALL, "model.quantization": "int8"},
    "nf4-dora": {"adapter": {**ALL, "use_dora": True}, "model.quantization": "nf4"},
    "tokens": {"adapter": ALL, "model.add_tokens": ["<|a|>", "<|b|>"], "model.vocab_multiple": 64},
    "tokens-tied": {
        "adapter": ALL, "model.add_tokens": ["<|a|>", "<|b|>"],
        "model.config": {**TINY_LLAMA, "tie_word_embeddings": True},
    },
    "tokens-nf4": {"adapter": ALL, "model.add_tokens": ["<|a|>"], "model.quantization": "nf4"},
    "whole-embedding": {"adapter": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}},
    "whole-tied": {
        "adapter": {**LORA, "modules_to_save": ["embed_tokens"]},
        "model.config": {**TINY_LLAMA, "tie_word_embeddings": True},
    },
    **{
        f"lora-on-tied-{'-'.join(names)}": {
            "adapter": {**LORA, "target_modules": ["q_proj", *names]},
            "model.config": {**TINY_LLAMA, "tie_word_embeddings": True},
        }
        for names in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])
    },
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:Model (has|with) `tie_word_embeddings=True`", "ignore:Input and output embeddings",
    "ignore:Setting `save_embedding_layers`",
)  # fmt: skip
@pytest.mark.parametrize("changes", cases(KINDS, "dora", "tokens-nf4", named=True))
def test_the_folder_says_what_the_adapter_said(tmp_path, changes):
    found, plain = check(trained(tmp_path / "run", {**STEPS, **changes}))
    kind = changes.get("model.quantization")
    assert found.quantization == kind
    if kind is None:
        assert found.quantized is None
    else:
        assert found.quantized.largest > 0
    tied = plain.config.tie_word_embeddings
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    for token in changes.get("model.add_tokens", ()):
        assert token in (tmp_path / "run" / "merged" / "tokenizer.json").read_text()


TASKS = {
    "seq2seq-lm": "prompt-completion",
    "sequence-classification": "classification",
    "token-classification": "tokens",
    "image-classification": "image",
    "dpo": "preference",
    "reward": "preference",
    "kto": "unpaired-preference",
    "grpo": "prompt",
    "embedding": "positive-pair",
    "reranker": "relevance",
}


@pytest.mark.parametrize(
    ("task", "quantization"),
    cases(
        [*[(task, "none") for task in TASKS], ("seq2seq-lm", "nf4"), ("sequence-classification", "int8")],
        ("seq2seq-lm", "none"),
        ("reward", "none"),
    ),
)
def test_every_task(tmp_path, task, quantization):
    for package in task_named(task).packages:
        pytest.importorskip(package)
    rows = [{"path": "unused", "format": TASKS[task], "columns": {}}]
    changes = {"task": task, "model.config": CONFIGS[task], "adapter": ALL, "data.train": rows, **STEPS}
    run = trained(tmp_path / "run", {**changes, "model.quantization": quantization})
    _, plain = check(run)
    labels = prepared_record(read_job(run)).get("labels")
    if labels:
        assert plain.config.id2label == dict(enumerate(labels))


def test_an_adapter_that_went_on(tmp_path):
    first = trained(tmp_path / "first", {**STEPS, "adapter": ALL})
    path = {"type": "lora", "path": str(first / "adapter")}
    check(trained(tmp_path / "second", {**STEPS, "adapter": path, "seed": 42}))


def test_a_base_from_a_gguf_file(tmp_path, monkeypatch):
    """The file's conversion has tests of its own; merging takes what it gives, in its dtype."""
    from transformers import AutoConfig

    base = auto_class("causal-lm").from_config(AutoConfig.for_model(**TINY_LLAMA))
    base.save_pretrained(tmp_path / "converted")
    monkeypatch.setattr("launcher.train.model.weights.converted", lambda *_: tmp_path / "converted")
    gguf = {"model.config": None, "model.name_or_path": "org/model-GGUF", "model.gguf_file": "m.gguf"}
    found, _ = check(trained(tmp_path / "run", {**STEPS, **gguf, "adapter": ALL}), dtype="auto")
    assert found.dtype == "float32"


def test_a_cast_is_measured_and_what_is_written_is_the_cast(tmp_path):
    run = trained(tmp_path / "run", {**STEPS, "adapter": ALL})
    found = merge(run, run / "merged", "bfloat16", no_card)
    assert (found.dtype, found.sum.is_none, found.cast.is_none) == ("bfloat16", True, False)
    plain = auto_class("causal-lm").from_pretrained(run / "merged")
    assert plain.dtype == torch.bfloat16
    assert found.bytes == plain.num_parameters() * 2
    assert sum(p.stat().st_size for p in (run / "merged").glob("*.safetensors")) >= found.bytes
    exact = merge(run, tmp_path / "exact", "float32", no_card)
    assert exact.cast == exact.sum


def test_what_lies_beside_the_weights_is_kept(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    run = trained(tmp_path / "run", {**STEPS, "adapter": ALL, "model.chat_template": template})
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    merge(run, run / "merged", "auto", no_card)
    merged = run / "merged"
    names = {path.name for path in merged.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    } <= names
    assert (merged / "chat_template.jinja").read_text() == template
    assert json.loads((merged / "config.json").read_text())["dtype"] == "float32"
    assert (merged / "README.md").read_text() == "a card\n"
    assert {p.stat().st_mode for p in merged.iterdir()} == {(run / "plan.json").stat().st_mode}
    assert merged.stat().st_mode == run.stat().st_mode
    changed = {p for p in before if p.is_file() and p.stat().st_mtime_ns != before[p]}
    assert changed == set()
    assert {p.name for p in run.iterdir()} - {p.name for p in before} == {"merged"}


@pytest.fixture
def run(tmp_path) -> Path:
    return trained(tmp_path / "run", {"trainer.max_steps": 1, "adapter": LORA})


def left(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir() if "merged" in p.name)


def test_a_sum_that_says_something_else_is_not_written(run, monkeypatch):
    real = merging._added

    def wrong(adapted):
        model = real(adapted)
        model.get_output_embeddings().weight.data[7] += 0.1
        return model

    monkeypatch.setattr(merging, "_added", wrong)
    with pytest.raises(RunFailed, match="Nothing was written") as caught:
        merge(run, run / "merged", "auto", no_card)
    assert caught.value.problems[0].code == "merge-differs"
    assert left(run) == []


def test_float64_decides_what_float32_leaves_open(run, monkeypatch):
    """With less allowed than float32 can tell, the same sum passes where it is computed in float64."""
    monkeypatch.setattr(merging, "TOLERANCE", 1e-9)
    found = merge(run, run / "merged", "float32", no_card)
    assert (found.compared_in, found.sum.is_none) == ("float64", True)
    assert found.to_json()["merge"]["dtype"] == "float64"


def test_without_memory_for_float64_nothing_is_loaded_for_it(run, monkeypatch):
    monkeypatch.setattr(merging, "TOLERANCE", 1e-9)
    answers, loaded, real = iter([2**40, 0]), [], merging._base
    monkeypatch.setattr(merging, "available_memory", lambda: next(answers))
    monkeypatch.setattr(merging, "_base", lambda *a, **k: loaded.append(a) or real(*a, **k))
    with pytest.raises(RunFailed) as caught:
        merge(run, run / "merged", "float32", no_card)
    (problem,) = caught.value.problems
    assert problem.code == "merge-differs"
    assert "8 bytes" in problem.hint
    assert len(loaded) == 1


def test_float64_compares_what_is_written(run, monkeypatch):
    """A step after the sum that spoils the model is found in both dtypes."""

    def spoil(job, model):
        model.get_output_embeddings().weight.data[7] += 0.1

    monkeypatch.setattr(merging, "restore_conv1d", spoil)
    with pytest.raises(RunFailed) as caught:
        merge(run, run / "merged", "float32", no_card)
    assert caught.value.problems[0].code == "merge-differs"
    assert left(run) == []


def test_a_file_that_says_something_else_gets_no_name(run, monkeypatch):
    real = merging._cast

    def wrong(model, dtype):
        real(model, dtype)
        model.get_output_embeddings().weight.data[7] += 0.1

    monkeypatch.setattr(merging, "_cast", wrong)
    with pytest.raises(RunFailed, match="loaded again"):
        merge(run, run / "merged", "auto", no_card)
    assert left(run) == []


def test_weights_beyond_float16_are_refused(run):
    from safetensors.torch import load_file, save_file

    file = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj.lora_B" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], 1e7)}, file, {"format": "pt"})
    with pytest.raises(RunFailed) as caught:
        merge(run, run / "merged", "float16", no_card)
    assert caught.value.problems[0].code == "merge-overflow"
    assert left(run) == []


def test_what_is_there_stays(run):
    (run / "merged").mkdir()
    with pytest.raises(RecipeError, match="exists already"):
        merge(run, run / "merged", "auto", no_card)
    (run / "link").symlink_to("nowhere")
    with pytest.raises(RecipeError, match="exists already"):
        merge(run, run / "link", "auto", no_card)


def test_memory_and_room_are_looked_at_before_anything_is_read(run, monkeypatch):
    monkeypatch.setattr("launcher.train.model.models.load_model", None)
    monkeypatch.setattr(merging, "available_memory", lambda: 2**30)
    with pytest.raises(MachineError, match=r"takes about 1\.5 GiB of host memory, 1\.0 GiB are available"):
        merge(run, run / "merged", "auto", no_card)
    monkeypatch.setattr(merging, "available_memory", lambda: None)
    monkeypatch.setattr(merging, "free_bytes", lambda folder: 1000)
    with pytest.raises(MachineError, match=r"0\.0 MiB are free"):
        merge(run, run / "merged", "auto", no_card)


def test_a_full_disk_is_named_and_leaves_nothing(run, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "sync_tree", full)
    with pytest.raises(MachineError, match="could not be written"):
        merge(run, run / "merged", "auto", no_card)
    assert left(run) == []


def test_a_folder_that_nobody_may_write_to_is_named(run):
    (run / "file").touch()
    with pytest.raises(RecipeError, match="could not be written"):
        merge(run, run / "file" / "merged", "auto", no_card)


def test_what_a_killed_merge_left_is_removed_and_a_living_ones_is_not(run):
    dead, living = run / ".merged.part-999999999", run / f".merged.part-{os.getppid()}"
    for folder in (dead, living):
        folder.mkdir()
    merge(run, run / "merged", "auto", no_card)
    assert left(run) == [living.name, "merged"]


def test_without_an_adapter_there_is_nothing_to_merge(tmp_path):
    run = trained(tmp_path / "run", {"trainer.max_steps": 1})
    with pytest.raises(RecipeError, match="model/ is the complete model already"):
        merge(run, run / "merged", "auto", no_card)


def test_the_dtype_is_the_checkpoints_own(run, tmp_path):
    from small import llama

    llama().to(torch.float16).save_pretrained(tmp_path / "base")
    job = replaced(read_job(run), {"model.name_or_path": str(tmp_path / "base"), "model.config": None})
    assert merging.base_dtype(job) == "float16"
    assert merging.base_dtype(read_job(run)) == "float32"


@pytest.mark.parametrize("adapter", [True, False])
def test_a_result_without_mtp_layers_says_so(tmp_path, capsys, adapter):
    """transformers leaves them out of a model that it loads, and keeps their number in the configuration."""
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    auto_class("causal-lm").from_config(AutoConfig.for_model(**QWEN3_5)).save_pretrained(base)
    weights = load_file(base / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(64, 128)}, base / "model.safetensors", {"format": "pt"})
    named = {"model.name_or_path": str(base), "model.config": None, **STEPS}
    run = trained(tmp_path / "run", named | ({"adapter": ALL} if adapter else {}))
    folder = run / "model"
    if adapter:
        folder = merge(run, run / "merged", "float32", no_card).folder
    assert json.loads((base / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    assert not [name for name in load_file(folder / "model.safetensors") if "mtp" in name]
    assert "mtp_num_hidden_layers" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers"])
def test_each_name_of_the_number_of_mtp_layers_is_set_to_zero(name, capsys):
    settings = {key: value for key, value in QWEN3_5.items() if key != "mtp_num_hidden_layers"}
    model = auto_class("causal-lm").from_config(AutoConfig.for_model(**settings, **{name: 1}))
    leave_out_mtp(model)
    assert model.config.to_dict()[name] == 0
    assert name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("target", ["transformers", "vllm"])
def test_an_export_without_mtp_layers_says_so(tmp_path, target, warm):
    """Of a run of 0.2.0, whose result has their number and none of their weights."""
    run = trained(tmp_path / "run", {"model.config": QWEN3_5, "trainer.max_steps": 1})
    (run / "COMPLETED").touch()
    config = run / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "mtp_num_hidden_layers": 1}))
    assert main(["export", str(run), "--to", target, "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 0
