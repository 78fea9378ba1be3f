"""An evaluation after the run against the one at its end, and against plain sums over the rows."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from cases import cases

pytest.importorskip("torch")

import torch

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.tasks import task_named
from launcher.train.job import read_job
from launcher.train.results.evaluate import evaluate

sys.path.insert(0, str(Path(__file__).parent))
from plans import GENERATES, LORA, generate, trained
from task_models import CONFIGS

ALL = {**LORA, "target_modules": "all-linear"}
SPLIT = {"trainer.max_steps": 2, "data.eval": {"split": 0.25}, "trainer.prediction_loss_only": True}
"""Rows are held out, and no metric is asked for: the plan keeps no predictions then."""
READS = {"trainer.prediction_loss_only": False}
FORMATS = {
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


def said(line: str) -> None:
    pass


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())["eval"]


def check(run: Path, *, exact: float = 1e-6) -> dict:
    """The evaluation at the end of the run again, from the saved weights; its metrics."""
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}
    found = evaluate(run, None, None, said)
    assert found.metrics["loss"] == pytest.approx(result(run)["eval_loss"], rel=exact)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")} == before
    for name, value in result(run).items():
        if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "num_tokens")):
            assert found.metrics[name.removeprefix("eval_")] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    return found.metrics


KINDS = {
    "lora": {"adapter": ALL},
    "full": {},
    "bf16-mixed": {"adapter": ALL, "trainer.bf16": True},
    "packed": {"adapter": ALL, "data.packing": True},
    "padding-free": {"adapter": ALL, "data.padding_free": True, "model.attn_implementation": "varlen"},
    "nf4": {"adapter": ALL, "model.quantization": "nf4"},
    "chunked": {"adapter": ALL, "model.loss": "chunked"},
    "tokens": {"adapter": ALL, "model.add_tokens": ["<|a|>"], "data.metrics": ["accuracy"], **READS},
}


@pytest.mark.parametrize("changes", cases(KINDS, "full", "packed", "nf4", named=True))
def test_it_is_the_loss_at_the_end_of_the_run(tmp_path, changes):
    metrics = check(trained(tmp_path / "run", {**SPLIT, **changes}))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert 0 <= metrics["accuracy"] <= 1


@pytest.mark.parametrize(
    ("task", "adapter"),
    [
        ("seq2seq-lm", ALL), ("sequence-classification", None), ("token-classification", ALL),
        ("image-classification", ALL), ("dpo", None), ("dpo", ALL), ("reward", ALL),
        ("kto", None), ("kto", ALL), ("grpo", None), ("grpo", ALL), ("embedding", ALL), ("reranker", None),
    ],
    ids=["seq2seq", "texts", "words", "pictures", "dpo", "dpo-lora", "reward", "kto", "kto-lora", "grpo",
         "grpo-lora", "embedding", "reranker"],
)  # fmt: skip
def test_every_task(tmp_path, task, adapter):
    for package in task_named(task).packages:
        pytest.importorskip(package)
    rows = [{"path": "unused", "format": FORMATS[task], "columns": {}}]
    changes = {"task": task, "model.config": CONFIGS[task], "data.train": rows, **SPLIT}
    if task == "seq2seq-lm":
        changes |= {**GENERATES, **READS, "data.metrics": ["exact_match"]}
    if task == "grpo":
        changes["trainer.top_k"] = 1  # the likeliest token: the same completions each time
    metrics = check(trained(tmp_path / "run", {**changes, **({"adapter": adapter} if adapter else {})}))
    assert ("accuracy" in metrics) == (task == "reward" or task.endswith("-classification"))
    assert ("perplexity" in metrics) == (task == "seq2seq-lm")
    assert ("rewards/accuracies" in metrics) == (task == "dpo")
    assert ("rewards/margins" in metrics) == (task in ("dpo", "kto"))
    assert ("reward" in metrics) == (task == "grpo")


def test_preferences_are_measured_from_where_training_began(tmp_path):
    pytest.importorskip("trl")
    rows = [{"path": "unused", "format": "preference", "columns": {}}]
    changes = {"task": "dpo", "data.train": rows, **SPLIT}
    first = trained(tmp_path / "first", {**changes, "adapter": ALL})
    again = {"type": "lora", "path": str(first / "adapter")}
    metrics = check(trained(tmp_path / "second", {**changes, "adapter": again}))
    assert metrics["loss"] != pytest.approx(math.log(2), abs=1e-4), "as if nothing had been learnt"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    saves = {"trainer.save_strategy": "steps", "trainer.save_steps": 2, "trainer.max_steps": 4}
    evaluates = {"trainer.eval_strategy": "steps", "trainer.eval_steps": 2}
    return trained(tmp_path_factory.mktemp("runs") / "run", {**SPLIT, "adapter": ALL, **saves, **evaluates})


def test_loss_and_accuracy_are_those_of_plain_sums(run):
    """By the model alone: no Trainer, one row at a time, weighted as batches of 8 are."""
    from launcher.train.data.build import build_evaluation
    from launcher.train.results.generate import load_trained

    found = evaluate(run, None, None, said)
    trained_model = load_trained(run, said)
    data = build_evaluation(read_job(run), trained_model.processing)
    assert found.rows == len(data.eval) == 16
    right = learnt = 0
    losses = []
    for start in range(0, 16, 8):
        total = count = 0
        for row in data.eval.select(range(start, start + 8)):
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            with torch.inference_mode():
                logits = trained_model.model(input_ids=ids).logits[0, :-1].float()
            kept = labels[0, 1:] != -100
            total += torch.nn.functional.cross_entropy(
                logits[kept], labels[0, 1:][kept], reduction="sum"
            ).item()
            count += int(kept.sum())
            right += int((logits.argmax(-1)[kept] == labels[0, 1:][kept]).sum())
        learnt += count
        losses.append(total / count)
    assert found.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(right / learnt)


def test_a_checkpoint_is_what_was_measured_at_its_step(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    for step in (2, 4):
        found = evaluate(run, f"checkpoint-{step}", None, said)
        assert found.metrics["loss"] == pytest.approx(seen[step], rel=1e-6)
    assert seen[2] != seen[4]


def test_a_checkpoint_of_a_whole_model(tmp_path):
    saves = {"trainer.save_strategy": "steps", "trainer.save_steps": 1}
    run = trained(tmp_path / "run", {**SPLIT, **saves})
    (run / "COMPLETED").unlink()
    shutil.rmtree(run / "model")
    found = evaluate(run, "checkpoint-2", None, said)
    assert found.metrics["loss"] == pytest.approx(result(run)["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["checkpoint-3", "../checkpoints/checkpoint-2", "."])
def test_a_checkpoint_that_is_not_there(run, name):
    with pytest.raises(RecipeError, match=r"it has checkpoint-2, checkpoint-4|incomplete checkpoint"):
        evaluate(run, name, None, said)


def test_shards_alone_are_refused(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    folder = copy / "checkpoints" / "checkpoint-4"
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink()
        del manifest["files"][name]
    manifest["bytes"] = sum(file["bytes"] for file in manifest["files"].values())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecipeError, match="shards of its engine"):
        evaluate(copy, "checkpoint-4", None, said)


def written_rows(folder: Path, count: int = 5) -> Path:
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"How many red stones {n}? ", "completion": f"There are {n}."} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rows_of_a_file(run, tmp_path):
    found = evaluate(run, None, written_rows(tmp_path), said)
    assert found.rows == 5
    assert found.metrics["loss"] != pytest.approx(result(run)["eval_loss"], rel=1e-3)


def test_a_run_that_held_nothing_out_takes_a_file_and_says_so(tmp_path):
    run = trained(tmp_path / "run", {"trainer.max_steps": 1, "adapter": ALL})
    with pytest.raises(RecipeError, match="--data FILE"):
        evaluate(run, None, None, said)
    assert evaluate(run, None, written_rows(tmp_path), said).rows == 5


def test_classes_keep_their_ids_when_a_file_has_few_of_them(tmp_path):
    rows = [{"path": "unused", "format": "classification", "columns": {}}]
    task = {"task": "sequence-classification", "model.config": CONFIGS["sequence-classification"]}
    run = trained(tmp_path / "run", {**task, "data.train": rows, "adapter": ALL, "trainer.max_steps": 30})

    last = json.loads((run / "data.json").read_text())["labels"][-1]
    texts = ["one red bird", "two green stones", "three"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": last}) + "\n" for text in texts))
    share = sum(generate(run, text) == last for text in texts) / 3
    assert evaluate(run, None, file, said).metrics["accuracy"] == pytest.approx(share)


def test_what_the_cache_has_lost_is_prepared_again(run, monkeypatch, tmp_path):
    """The same rows are held out, by seed."""
    lost = tmp_path / "run"
    shutil.copytree(run, lost)
    record = json.loads((lost / "data.json").read_text())
    (lost / "data.json").write_text(json.dumps({**record, "folder": str(tmp_path / "gone")}))
    words: list[str] = []
    found = evaluate(lost, None, None, words.append)
    assert "gone or damaged" in words[0]
    assert found.metrics["loss"] == pytest.approx(result(run)["eval_loss"], rel=1e-6)
    (lost / "data.json").write_text(json.dumps({**record, "folder": str(tmp_path / "gone"), "key": "other"}))
    with pytest.raises(RecipeError, match="has changed since the run"):
        evaluate(lost, None, None, said)


def test_the_plan_of_an_engine_of_many_ranks_is_evaluated_by_one(tmp_path):
    """ZeRO's file and sizes of the plan, and a hub to push to, have no part in it."""
    run = trained(tmp_path / "run", {**SPLIT, "adapter": ALL})
    expected = evaluate(run, None, None, said).metrics["loss"]
    plan = json.loads((run / "plan.json").read_text())
    for name, value in {
        "sharding.engine": "deepspeed", "sharding.zero_stage": 3, "sharding.sp_size": 2,
        "trainer.push_to_hub": True, "trainer.hub_model_id": "a/b", "trainer.report_to": "wandb",
        "trainer.load_best_model_at_end": True, "trainer.save_strategy": "steps",
        "trainer.eval_strategy": "steps",
        "early_stopping.patience": 3,
    }.items():  # fmt: skip
        plan["settings"][name] = {"value": value, "source": "recipe", "by": "x", "reason": "x"}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "ds_config.json").write_text("{}")
    assert evaluate(run, None, None, said).metrics["loss"] == expected


def test_the_command_prints_and_writes_what_it_measured(run, tmp_path, capsys):
    out = tmp_path / "eval.json"
    assert main(["eval", str(run), "--output", str(out)]) == 0
    shown, aside = capsys.readouterr()
    assert not [sign for sign in ("eval_loss", "%|", "accelerator to CPU") if sign in shown + aside]
    for word in (
        "loss ",
        "perplexity ",
        "accuracy ",
        "loss at the end of the run",
        "16 of the rows held out",
    ):
        assert word in shown
    told = json.loads(out.read_text())
    assert told["metrics"]["loss"] == pytest.approx(told["at_end"], rel=1e-6)
    assert main(["eval", str(run), "--output", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["eval", str(run), "--data", str(written_rows(tmp_path)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["at_end"]) == (5, None)


def test_an_unfinished_run_has_no_result(tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err
