"""Preference tuning: trl's preparation without its process group, and its trainer under the plan's values."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden_plans import whole_plans

pytest.importorskip("torch")
pytest.importorskip("trl")

import torch

from launcher.errors import MachineError
from launcher.train.memory_meter import Meter
from launcher.train.training import final_metrics, fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from plans import trained, write_run, zero_config
from small import Rows, job, llama, lora, metrics, tokenizer

pytestmark = pytest.mark.usefixtures("warm")

DPO = {"task": "dpo", "trainer.learning_rate": 5e-3}


def pairs(count: int) -> list[dict[str, str]]:
    """An even word is the better answer."""
    return [
        {
            "prompt": f"w{i % 20} w{i % 7}",
            "chosen": f" w{2 * i % 30} w40",
            "rejected": f" w{(2 * i + 1) % 30} w41",
        }
        for i in range(count)
    ]


def encoded(folder: Path, rows: list[dict], words=None, **changes):
    """The rows as `encode_preferences` gives them."""
    from launcher.rows.sources import Row
    from launcher.train.tasks.dpo import encode_preferences

    numbered = [Row(values, "pairs.jsonl", number) for number, values in enumerate(rows, 1)]
    work = job(folder / "encoded", {"task": "dpo", **changes})
    return encode_preferences(work, words or tokenizer(), numbered)


@pytest.mark.parametrize(
    ("task", "rows"),
    [("dpo", "preference"), ("kto", "unpaired-preference"), ("reward", "preference"), ("grpo", "prompt")],
)
def test_trl_pads_to_the_multiple_of_the_plan(tmp_path, monkeypatch, task, rows):
    from transformers import Trainer
    from trl import GRPOTrainer

    widths = set()
    cls = GRPOTrainer if task == "grpo" else Trainer
    prepare = cls._prepare_inputs

    def spy(self, *args):
        inputs = prepare(self, *args)
        widths.update(tensor.shape[-1] for name, tensor in inputs.items() if name.endswith("_ids"))
        return inputs

    monkeypatch.setattr(cls, "_prepare_inputs", spy)
    source = {"path": "unused", "format": rows, "columns": {}}
    changes = {"task": task, "data.train": [source], "trainer.max_steps": 1}
    trained(tmp_path / "run", {**changes, "data.pad_to_multiple_of": 24, "trainer.pad_to_multiple_of": 24})
    assert widths
    assert {width % 24 for width in widths} == {0}


def prepared(folder: Path, count: int = 32):
    from datasets import Dataset

    return Dataset.from_dict(encoded(folder, pairs(count)).columns)


def run(folder: Path, changes: dict, model):
    work = job(folder, DPO | changes)
    args = make_arguments(work)
    data = Rows(prepared(folder), prepared(folder, 8))
    trainer = make_trainer(work, args, model, tokenizer(), data)
    return trainer, fit(work, trainer, Meter(on_cuda=False))


# --- arguments


def test_no_default_of_trl_changes_a_run(tmp_path):
    from transformers import TrainingArguments
    from trl import DPOConfig

    def default(field):
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    upstream = {field.name: default(field) for field in dataclasses.fields(TrainingArguments)}
    differing = {
        field.name
        for field in dataclasses.fields(DPOConfig)
        if field.name in upstream and default(field) != upstream[field.name]
    }
    assert differing == {"learning_rate", "bf16", "gradient_checkpointing", "logging_steps"}
    settings = whole_plans()["qwen3_8b_dpo"]["settings"]
    said = differing - {"gradient_checkpointing"} | {"activation_checkpointing"}
    assert {f"trainer.{name}" for name in said} <= set(settings), "the plan leaves none of them to trl"
    args = make_arguments(job(tmp_path, {"task": "dpo", "data.max_length": 24}))
    assert isinstance(args, DPOConfig)
    assert args.bf16 is False
    assert (args.activation_checkpointing, args.gradient_checkpointing) == (False, False)
    assert args.max_length == 24
    planned = {"trainer.activation_checkpointing": True, "trainer.learning_rate": 1e-4, "trainer.beta": 0.3}
    args = make_arguments(job(tmp_path / "b", {"task": "dpo", **planned}))
    assert (args.gradient_checkpointing, args.learning_rate, args.beta) == (True, 1e-4, 0.3)


# --- preparation


def test_preparation_counts_what_is_lost(tmp_path):
    short = {"prompt": "w1 w2", "chosen": " w3", "rejected": " w4 w5"}
    long_prompt = {"prompt": "w1 " * 16, "chosen": " w3", "rejected": " w4"}
    long_answer = {"prompt": "w1 w2 w3", "chosen": " w4" * 20, "rejected": " w5"}
    found = encoded(tmp_path, [short, long_prompt, long_answer])
    assert list(found.columns) == ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert (found.kept, found.rows, found.dropped, found.truncated) == (2, [0, 2], {"no-targets": 1}, 1)
    # The end of a text is a token of its own in both answers.
    first = [column[0] for column in found.columns.values()]
    assert first == [[5, 6], [7, 2], [8, 9, 2]]
    assert (found.tokens, found.tokens_lost) == (4 + 5 + 24 + 5, 8)
    everything_dropped = encoded(tmp_path, [long_prompt])
    assert (everything_dropped.kept, everything_dropped.columns["prompt_ids"]) == (0, [])


def test_preparation_reads_conversations(tmp_path):
    words = tokenizer()
    turns = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    words.chat_template = turns + "{% if add_generation_prompt %}w9 {% endif %}"
    row = {
        "prompt": [{"role": "user", "content": "w1"}],
        "chosen": [{"role": "assistant", "content": "w9 w2"}],
        "rejected": [{"role": "assistant", "content": "w9 w3"}],
    }
    found = encoded(tmp_path, [row], words).columns
    assert found == {"prompt_ids": [[5, 2, 13]], "chosen_ids": [[6, 2]], "rejected_ids": [[7, 2]]}


def test_preparation_starts_no_process_group_and_is_silent(tmp_path, capfd):
    encoded(tmp_path, pairs(4))
    assert not torch.distributed.is_initialized()
    assert "examples/s" not in capfd.readouterr().err


# --- training


def test_a_new_adapter_is_compared_with_the_bare_model(tmp_path):
    model = lora(llama(), init_lora_weights=False)
    work = job(tmp_path / "work", DPO | {"adapter.type": "lora"})
    data = Rows(prepared(tmp_path))
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), data)
    assert list(model.peft_config) == ["default"]
    assert trainer.ref_model is None
    batch = trainer.data_collator([data.train[i] for i in range(4)])
    chosen, rejected = trainer.compute_ref_log_probs(model, batch)
    with model.disable_adapter(), torch.no_grad():
        wanted = log_probabilities(model, batch)
    assert torch.cat([chosen, rejected]).tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    with torch.no_grad():
        assert log_probabilities(model, batch).tolist() != pytest.approx(wanted.tolist(), rel=1e-3)


def log_probabilities(model, batch) -> torch.Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return (chosen * batch["completion_mask"][:, 1:]).sum(1)


def test_the_shared_beginning_is_that_of_trl():
    from trl.data_utils import extract_prompt

    from launcher.rows.recognise import canonical
    from launcher.rows.sources import Detected, Row

    found = Detected("preference", {"chosen": "chosen", "rejected": "rejected"})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pairs = [
        ("a b", "a c"), ("a b c", "a b d e"), ("a b", "a b c"), ("ab", "ac"), ("a\nb", "a\nc"), ("a b",) * 2,
        (talk, [talk[0], {"role": "assistant", "content": "c"}]),
        ([*talk, talk[0], talk[1]], [*talk, talk[0], {"role": "assistant", "content": "c"}]),
        ([*talk, talk[0]], talk),
    ]  # fmt: skip
    for chosen, rejected in pairs:
        pair = {"chosen": chosen, "rejected": rejected}
        assert canonical(Row(pair, "x", 1), found).values == extract_prompt(pair), pair


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_preferences_are_learnt(tmp_path, adapter):
    changes = {"trainer.max_steps": 12, "trainer.save_strategy": "steps", "trainer.save_steps": 12}
    changes |= {"trainer.eval_strategy": "steps", "trainer.eval_steps": 12}
    changes |= {"adapter.type": "lora"} if adapter else {"trainer.learning_rate": 1e-3}
    model = lora(llama()) if adapter else llama()
    total = sum(parameter.numel() for parameter in model.parameters())
    trainer, measured = run(tmp_path, changes, model)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    # Policy and reference are the same model before the first step.
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.015
    assert rows[-1]["rewards/accuracies"] == 1.0
    assert rows[-1]["tokens"] == 12 * 4 * 2 * 5
    assert measured.total_params == total
    assert (measured.trainable_params < total) == adapter
    found = final_metrics(job(tmp_path, DPO), trainer)
    assert found["eval_rewards/accuracies"] == 1.0


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_loss_without_a_reference_builds_and_runs_none(tmp_path, adapter):
    model, rows = lora(llama(), task_type="CAUSAL_LM") if adapter else llama(), []
    model.register_forward_hook(lambda _, given, out: rows.append(torch.is_grad_enabled()))
    changes = {"trainer.loss_type": "sft", "trainer.max_steps": 2, "trainer.gradient_accumulation_steps": 1}
    trainer, _ = run(tmp_path, changes | ({"adapter.type": "lora"} if adapter else {}), model)
    assert trainer.ref_model is None
    assert "ref" not in getattr(model, "peft_config", {})
    assert rows == [True, True]
    logged = [row for row in metrics(tmp_path) if "loss" in row][-1]
    beta = trainer.beta
    assert logged["rewards/chosen"] == pytest.approx(beta * logged["logps/chosen"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "given", "reference", "forwards"),
    [
        ("dpo", {}, True, 1),
        ("dpo", {"loss_type": "sft"}, False, 0),
        ("dpo", {"loss_type": ["sft", "sigmoid"]}, True, 1),
        ("dpo", {"precompute_ref_log_probs": True}, False, 0),
        ("kto", {}, True, 3),
        ("kto", {"loss_type": "apo_zero_unpaired"}, True, 1),
        ("kto", {"precompute_ref_log_probs": True}, False, 1),
        ("reward", {}, False, 0),
    ],
)
def test_passes_besides_that_of_training(task, given, reference, forwards):
    from launcher.tasks import task_named

    assert task_named(task).needs_reference(given) == reference
    assert task_named(task).extra_forwards(given) == forwards


def test_the_reference_is_counted_in_the_memory(tmp_path):
    with_reference, measured = run(tmp_path / "a", {}, llama())
    without, _ = run(tmp_path / "b", {"trainer.precompute_ref_log_probs": True}, llama())
    peaks = [trainer.meter.peak("train").allocated for trainer in (with_reference, without)]
    assert peaks[0] - peaks[1] == pytest.approx(measured.footprint, rel=0.01)


def test_a_continued_adapter_is_compared_with_itself(tmp_path):
    from peft import PeftModel

    lora(llama(), init_lora_weights=False).save_pretrained(tmp_path / "first")
    base = llama()
    model = PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)
    total = sum(parameter.numel() for parameter in model.parameters())
    changes = {
        "adapter.type": "lora",
        "adapter.path": str(tmp_path / "first"),
        "trainer.save_strategy": "steps",
    }
    trainer, measured = run(tmp_path / "run", changes | {"trainer.save_steps": 4}, model)
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert measured.total_params == total
    trainer.save_model(str(tmp_path / "adapter"))
    for folder in (tmp_path / "adapter", tmp_path / "run" / "checkpoints" / "checkpoint-4"):
        assert (folder / "adapter_model.safetensors").is_file()
        assert not (folder / "ref").exists()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_resume_goes_on_exactly(tmp_path, monkeypatch, kind):
    import shutil

    saving = {"trainer.save_strategy": "steps", "trainer.save_steps": 2, "trainer.max_steps": 4}
    if kind == "lora":
        saving["adapter.type"] = "lora"
    new = (lambda: lora(llama())) if kind == "lora" else llama
    run(tmp_path / "whole", saving, new())
    shutil.copytree(tmp_path / "whole", tmp_path / "halved")
    shutil.rmtree(tmp_path / "halved" / "checkpoints" / "checkpoint-4")
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    run(tmp_path / "halved", saving, new())
    keys = ("step", "loss", "grad_norm", "tokens", "rewards/margins")
    whole, halved = (
        [[row[key] for key in keys] for row in metrics(tmp_path / name)] for name in ("whole", "halved")
    )
    assert halved == whole


ZERO_3 = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_dpo import Meter, Rows, fit, make_arguments, make_trainer, prepared, tokenizer
from transformers import set_seed
from launcher.train.job import read_job
from launcher.train.model.models import load_model
from launcher.train.worker import leave

work = read_job(Path(sys.argv[1]))
rows = Rows(prepared(work.run_dir))
args = make_arguments(work)
set_seed(args.seed)
trainer = make_trainer(work, args, load_model(work, tokenizer()), tokenizer(), rows)
fit(work, trainer, Meter(on_cuda=False))
leave(0)
"""


@pytest.mark.slow
def test_under_zero_3_the_reference_is_loaded_again(tmp_path):
    """Shards cannot be copied; both models are dealt out over the processes."""
    from launcher.machine.probe import free_port

    llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    changes = {"tiny": False, "model.config": None, "model.name_or_path": str(tmp_path / "base")}
    changes |= {"data.max_length": 16, "trainer.max_steps": 3, "trainer.learning_rate": 1e-3}
    changes |= {"sharding.engine": "deepspeed", "sharding.zero_stage": 3}
    folder = write_run(tmp_path / "run", {"task": "dpo", **changes}, zero_config(3))
    (tmp_path / "dpo.py").write_text(ZERO_3.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(tmp_path / "dpo.py"), str(folder)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = metrics(folder)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.01


def test_trainable_weights_over_a_quantised_model_keep_their_type(tmp_path):
    model = lora(llama())
    model.is_loaded_in_8bit = True  # what trl asks; real 8-bit layers behave alike
    before = {name: value.clone() for name, value in model.named_parameters() if value.requires_grad}
    work = job(tmp_path, DPO | {"adapter.type": "lora"})
    make_trainer(work, make_arguments(work), model, tokenizer(), Rows(prepared(tmp_path)))
    after = dict(model.named_parameters())
    assert {after[name].dtype for name in before} == {torch.float32}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_without_trl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "launcher.train.tasks.dpo", raising=False)
    with pytest.raises(MachineError, match=re.escape("pip install 'effilaunch[dpo]'")):
        importlib.import_module("launcher.train.tasks.dpo")
