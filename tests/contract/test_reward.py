"""Reward models: samples as trl makes them, and its trainer under the plan's values."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

import torch

from launcher.train.memory_meter import Meter
from launcher.train.training import final_metrics, fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from small import Rows, job, llama, metrics, tokenizer

REWARD = {"task": "reward", "trainer.learning_rate": 5e-3, "data.max_length": 24}
MESSAGES = {
    "prompt": [{"role": "user", "content": "w1 w2"}],
    "chosen": [{"role": "assistant", "content": "w9 w2"}],
    "rejected": [{"role": "assistant", "content": "w9 w3 w4"}],
}


def pairs(count: int) -> list[dict[str, str]]:
    """An even word is the better answer."""
    return [
        {"prompt": f"w{i % 20}", "chosen": f" w{2 * i % 30}", "rejected": f" w{(2 * i + 1) % 30} w41"}
        for i in range(count)
    ]


def talking():
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    return words


def encoded(folder: Path, rows: list[dict], words=None, **changes):
    from launcher.rows.sources import Row
    from launcher.train.tasks.reward import encode_pairs

    numbered = [Row(values, "pairs.jsonl", number) for number, values in enumerate(rows, 1)]
    return encode_pairs(job(folder / "encoded", REWARD | changes), words or tokenizer(), numbered)


def prepared(folder: Path, count: int = 32):
    from datasets import Dataset

    return Dataset.from_dict(encoded(folder, pairs(count)).columns)


def scorer():
    """A Llama with one score for a text."""
    import transformers

    config = llama().config
    config.num_labels, config.pad_token_id = 1, tokenizer().pad_token_id
    torch.manual_seed(3)
    return transformers.LlamaForSequenceClassification(config)


def scored_lora():
    import peft

    targets = ["q_proj", "v_proj"]
    settings = peft.LoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS", modules_to_save=["score"])
    return peft.get_peft_model(scorer(), settings)


def run(folder: Path, changes: dict, model):
    work = job(folder, REWARD | changes)
    data = Rows(prepared(folder), prepared(folder, 8))
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), data)
    return trainer, fit(work, trainer, Meter(on_cuda=False))


def test_no_default_of_trl_changes_a_run(tmp_path):
    from transformers import TrainingArguments
    from trl import RewardConfig

    upstream = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    differing = {
        field.name
        for field in dataclasses.fields(RewardConfig)
        if field.name in upstream
        and field.default_factory is dataclasses.MISSING
        and field.default != upstream[field.name]
    }
    assert differing == {"learning_rate", "bf16", "gradient_checkpointing", "logging_steps"}
    args = make_arguments(job(tmp_path, REWARD))
    assert isinstance(args, RewardConfig)
    assert (args.bf16, args.gradient_checkpointing, args.max_length) == (False, False, 24)


@pytest.mark.parametrize("rows", [pairs(4), [MESSAGES]], ids=["text", "messages"])
def test_samples_are_those_of_trl(tmp_path, rows):
    from datasets import IterableDataset
    from trl import RewardTrainer

    words = talking()
    stream = IterableDataset.from_generator(lambda: iter(rows))
    settings = SimpleNamespace(max_length=24, dataset_num_proc=None)
    theirs = list(RewardTrainer._prepare_dataset(SimpleNamespace(), stream, words, settings, "train"))
    ours = encoded(tmp_path, rows, words)
    names = ("chosen_ids", "rejected_ids")
    assert ours.columns == {name: [row[name] for row in theirs] for name in names} | {
        "margin": [0.0] * len(rows)
    }
    assert ours.kept == len(rows)


def test_what_is_left_out_is_counted(tmp_path):
    short, equal = pairs(2)[1], {"prompt": "w1", "chosen": " w2", "rejected": " w2"}
    long = {"prompt": "w1", "chosen": " w2", "rejected": " w3" * 30}
    found = encoded(tmp_path, [equal, long, short])
    assert (found.kept, found.rows, found.dropped) == (1, [2], {"equal": 1, "no-targets": 1})
    assert (
        found.tokens == sum(len(found.columns[f"{side}_ids"][0]) for side in ("chosen", "rejected")) + 3 + 32
    )
    asked = encoded(tmp_path / "b", [long, short], **{"data.overlong": "drop"})
    assert asked.dropped == {"overlong": 1}


def test_a_margin_is_what_the_loss_asks_for(tmp_path):
    """Step 1, whose rewards are near 0: the loss is about that of the margins alone."""
    from datasets import Dataset

    rows = [{**row, "margin": 2.0} for row in pairs(8)]
    work = job(tmp_path, REWARD | {"trainer.max_steps": 1, "trainer.per_device_train_batch_size": 8})
    data = Rows(Dataset.from_dict(encoded(tmp_path, rows).columns))
    trainer = make_trainer(work, make_arguments(work), scorer(), tokenizer(), data)
    fit(work, trainer, Meter(on_cuda=False))
    (row,) = [row for row in metrics(tmp_path) if "loss" in row]
    assert row["loss"] == pytest.approx(math.log1p(math.exp(2.0)), abs=0.1)
    assert {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"} <= row.keys()


@pytest.mark.parametrize("held", ["much", "nan", True, [1]])
def test_a_margin_that_is_no_number_is_refused(held):
    from launcher.errors import RecipeError
    from launcher.rows.recognise import canonical, detect
    from launcher.rows.sources import Row

    row = Row({**pairs(1)[0], "margin": held}, "pairs.jsonl", 7)
    with pytest.raises(RecipeError) as caught:
        canonical(row, detect([row], "auto", {}, "reward", "pairs.jsonl"))
    assert (caught.value.problems[0].file, caught.value.problems[0].line) == ("pairs.jsonl", 7)


def test_losses_are_those_of_the_plain_trainer(tmp_path):
    """Six steps of two micro-batches, beside trl's trainer on the same samples."""
    from trl import RewardTrainer

    from launcher.train.trainers import PlannedTrainer

    changes = {"trainer.max_steps": 6, "trainer.gradient_accumulation_steps": 2}
    trainer, _ = run(tmp_path / "ours", changes, scorer())
    ours = [row["loss"] for row in metrics(tmp_path / "ours") if "loss" in row]
    args = make_arguments(job(tmp_path / "plain", REWARD | changes))
    plain = RewardTrainer(scorer(), args, train_dataset=prepared(tmp_path), processing_class=tokenizer())
    plain.train()
    theirs = [row["loss"] for row in plain.state.log_history if "loss" in row]
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert isinstance(trainer, PlannedTrainer)


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_the_better_answer_gets_the_higher_reward(tmp_path, adapter):
    changes = {"trainer.max_steps": 16, "trainer.eval_strategy": "steps", "trainer.eval_steps": 16}
    changes |= {"adapter.type": "lora"} if adapter else {}
    trainer, measured = run(tmp_path, changes, scored_lora() if adapter else scorer())
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=0.1)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05
    found = final_metrics(job(tmp_path, REWARD), trainer)
    assert found["eval_accuracy"] > 0.9
    assert found["eval_margin"] > 0
    assert (measured.trainable_params < measured.total_params) == adapter


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_resume_continues_exactly(tmp_path, monkeypatch, kind):
    saving = {"trainer.save_strategy": "steps", "trainer.save_steps": 2, "trainer.max_steps": 4}
    saving |= {"adapter.type": "lora"} if kind == "lora" else {}
    new = scored_lora if kind == "lora" else scorer
    run(tmp_path / "whole", saving, new())
    shutil.copytree(tmp_path / "whole", tmp_path / "halved")
    shutil.rmtree(tmp_path / "halved" / "checkpoints" / "checkpoint-4")
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    run(tmp_path / "halved", saving, new())
    keys = ("step", "loss", "grad_norm", "tokens", "margin")
    whole, halved = (
        [[row[key] for key in keys] for row in metrics(tmp_path / name)] for name in ("whole", "halved")
    )
    assert halved == whole


def test_weights_over_a_quantised_model_keep_their_type(tmp_path):
    model = scored_lora()
    model.is_loaded_in_8bit = True  # what trl asks; real 8-bit layers behave alike
    work = job(tmp_path, REWARD | {"adapter.type": "lora"})
    make_trainer(work, make_arguments(work), model, tokenizer(), Rows(prepared(tmp_path)))
    trained = [value for value in model.parameters() if value.requires_grad]
    assert {value.dtype for value in trained} == {torch.float32}


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_generate_gives_the_reward_of_a_side_as_it_was_trained(kind):
    """With the EOS of text and the template of messages, without which the model saw no row."""
    import json

    from launcher.train.tasks.reward import TRAIN_TASK

    words, model = talking(), scorer().eval()
    whole = "w1 w2 w9" if kind == "text" else [*MESSAGES["prompt"], *MESSAGES["chosen"]]
    prompt = whole if kind == "text" else json.dumps(whole)
    raw = words(prompt, return_tensors="pt")
    trained = words("w1 w2 w9 </s>" if kind == "text" else "w1 w2 </s> w9 w2 </s>", return_tensors="pt")
    with torch.inference_mode():
        expected, other = (float(model(**given).logits[0, 0]) for given in (trained, raw))
        reply = float(TRAIN_TASK.reply(model, words, prompt, raw))
    assert other != pytest.approx(expected, abs=1e-3)
    assert reply == pytest.approx(expected, abs=1e-4)
