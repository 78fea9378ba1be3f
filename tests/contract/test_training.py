"""Arguments and trainers of every task, on models and rows made here."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import IterableDataset, get_worker_info

from launcher.errors import RecipeError, RunFailed
from launcher.train.data.batches import make_collator
from launcher.train.job import rank, world_size
from launcher.train.memory_meter import Meter
from launcher.train.status import status
from launcher.train.training import final_metrics, fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from plans import GENERATES
from small import WORDS, Rows, job, llama, lora, metrics, sequences, tokenizer

pytestmark = pytest.mark.usefixtures("warm")

EVERY_STEP = {"trainer.eval_strategy": "steps", "trainer.eval_steps": 1}


def dataset(rows: list[dict]):
    from datasets import Dataset

    return Dataset.from_list(rows)


def text_rows(*, evaluated: bool = False, kind: str = "pad", words=None) -> Rows:
    held_out = dataset(sequences(6)) if evaluated else None
    return Rows(dataset(sequences(32)), held_out, make_collator(kind, words or tokenizer()))


def trained(folder: Path, changes: dict, model, rows: Rows, processing=None):
    """(trainer, Measured) of a whole run on one CPU process."""
    work = job(folder, changes)
    args = make_arguments(work)
    trainer = make_trainer(work, args, model, processing or tokenizer(), rows)
    return trainer, fit(work, trainer, Meter(on_cuda=False))


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


# --- memory


def test_batches_weigh_the_same_whichever_process_makes_them(tmp_path):
    def peak(processes: int) -> int:
        wide = {"trainer.gradient_accumulation_steps": 8, "trainer.dataloader_num_workers": processes}
        trainer, _ = trained(tmp_path / f"{processes}", wide | {"trainer.max_steps": 1}, llama(), text_rows())
        return trainer.meter.peak("train").allocated

    assert peak(1) == peak(0)


def of_lengths(*lengths: int) -> list[dict]:
    return [{"input_ids": [4 + i % WORDS for i in range(n)], "labels": [4] * n} for n in lengths]


def watched_steps(folder: Path, changes: dict, rows: Rows) -> tuple[list[tuple], object]:
    """((length of the rows, training, whether operations are watched) of each forward, the trainer)."""
    model, seen = llama(), []

    def note(module, _args, kwargs) -> None:
        seen.append((kwargs["input_ids"].shape[1], module.training, bool(_get_current_dispatch_mode_stack())))

    model.register_forward_pre_hook(note, with_kwargs=True)
    plain = {"trainer.train_sampling_strategy": "sequential", "trainer.per_device_train_batch_size": 1}
    trainer, _ = trained(folder, {**plain, **changes}, model, rows)
    return seen, trainer


def test_after_the_first_steps_only_larger_batches_are_watched(tmp_path):
    lengths = (8, 6, 8, 8, 5, 12, 8, 12)
    rows = Rows(dataset(of_lengths(*lengths)), None, make_collator("pad", tokenizer()))
    seen, trainer = watched_steps(tmp_path / "a", {"trainer.max_steps": 8}, rows)
    assert [(length, watched) for length, _, watched in seen] == [
        (8, True), (6, True), (8, True), (8, False), (5, False), (12, True), (8, False), (12, False)
    ]  # fmt: skip
    assert _get_current_dispatch_mode_stack() == []
    # The largest batch weighs what it weighs when everything is watched.
    rows = Rows(dataset(of_lengths(8, 12, 8)), None, make_collator("pad", tokenizer()))
    _, all_watched = watched_steps(tmp_path / "b", {"trainer.max_steps": 3}, rows)
    (peak, whole) = (each.meter.peak("train").allocated for each in (trainer, all_watched))
    assert peak == pytest.approx(whole, rel=2e-3)  # but for a few scalars


def test_of_evaluations_the_first_and_larger_batches_are_watched(tmp_path):
    rows = Rows(dataset(of_lengths(*[8] * 6)), dataset(of_lengths(6, 9)), make_collator("pad", tokenizer()))
    changes = {**EVERY_STEP, "trainer.max_steps": 6, "trainer.eval_steps": 2}
    changes |= {"trainer.per_device_eval_batch_size": 1}
    seen, trainer = watched_steps(tmp_path, changes, rows)
    assert [watched for _, training, watched in seen if not training] == [True, True] + [False] * 4
    assert [watched for _, training, watched in seen if training] == [True] * 3 + [False] * 3
    before = trainer.meter.peak("eval").allocated
    trainer.evaluate(dataset(of_lengths(6, 15)))
    assert seen[-2:] == [(6, False, False), (15, False, True)]
    assert trainer.meter.peak("eval").allocated > before


# --- arguments


def test_the_argument_class_of_a_task_says_what_the_plan_says(tmp_path):
    from transformers import Seq2SeqTrainingArguments

    plain = make_arguments(job(tmp_path / "a", {"task": "seq2seq-lm"}))
    assert isinstance(plain, Seq2SeqTrainingArguments)
    assert (plain.predict_with_generate, plain.generation_max_length) == (False, None)
    written = make_arguments(job(tmp_path / "b", {"task": "seq2seq-lm", **GENERATES}))
    assert (written.predict_with_generate, written.generation_max_length) == (True, 16)
    # The worker adds nothing: what a plan says reaches upstream, and what it lacks is upstream's.
    said = {
        "trainer.logging_nan_inf_filter": True,
        "trainer.include_num_input_tokens_seen": "no",
        "trainer.remove_unused_columns": True,
    }
    args = make_arguments(job(tmp_path / "c", {"task": "image-classification", **said}))
    assert [getattr(args, name.removeprefix("trainer.")) for name in said] == list(said.values())


def test_a_plan_that_lacks_a_setting_is_refused(tmp_path):
    work = job(tmp_path, {})
    with pytest.raises(RecipeError, match=r"plan.json: the plan has no setting launch.launcher"):
        assert work.launch.launcher


# --- tasks


def test_token_accuracy_and_perplexity_of_a_language_model(tmp_path):
    changes = {**EVERY_STEP, "trainer.max_steps": 30, "trainer.eval_steps": 15}
    changes |= {"data.metrics": ["perplexity", "accuracy"], "trainer.learning_rate": 1e-2}
    trainer, _ = trained(tmp_path, changes, llama(), text_rows(evaluated=True))
    rows = [row for row in metrics(tmp_path) if "eval_loss" in row]
    assert [row["step"] for row in rows] == [15, 30]
    assert all("loss" not in row for row in rows)
    assert rows[-1]["eval_perplexity"] == pytest.approx(math.exp(rows[-1]["eval_loss"]))
    assert final_metrics(job(tmp_path, changes), trainer)["eval_accuracy"] == rows[-1]["eval_accuracy"]
    # The same share, counted by hand, one row at a time.
    right = total = 0
    for row in sequences(6):
        with torch.no_grad():
            logits = trainer.model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
        pairs = list(zip(logits.argmax(-1).tolist()[:-1], row["labels"][1:], strict=True))
        right += sum(guess == label for guess, label in pairs if label != -100)
        total += sum(label != -100 for _, label in pairs)
    assert rows[-1]["eval_accuracy"] == pytest.approx(right / total)
    assert rows[0]["eval_accuracy"] != rows[-1]["eval_accuracy"]


def test_predictions_are_not_kept_when_nothing_reads_them(tmp_path):
    trainer, _ = trained(tmp_path, {"data.metrics": ["perplexity"]}, llama(), text_rows(evaluated=True))
    assert trainer.compute_metrics is None
    assert trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation", True).predictions is None


def t5():
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(0)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS + 4, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
                 eos_token_id=2, decoder_start_token_id=0, dropout_rate=0.0)
    )  # fmt: skip


def translation(count: int):
    """The answer is the prompt's first word, then the end."""
    rows = [
        {"input_ids": [4 + i % 8, 30 + i % 3, 2], "labels": [4 + i % 8] * (1 + i % 2) + [2]}
        for i in range(count)
    ]
    return dataset(rows)


def test_sequence_to_sequence_learns_and_is_scored_on_what_it_writes(tmp_path):
    words, model = tokenizer(), t5()
    rows = Rows(translation(48), translation(11), make_collator("pad", words))
    changes = {
        "task": "seq2seq-lm",
        "data.metrics": ["exact_match", "bleu", "chrf", "rouge1", "rougeL", "perplexity"],
        **GENERATES,
    }
    changes |= {
        "trainer.max_steps": 60,
        "trainer.learning_rate": 1e-2,
        "trainer.per_device_train_batch_size": 8,
    }
    trainer, _ = trained(tmp_path, changes, model, rows, words)
    found = final_metrics(job(tmp_path, changes), trainer)
    assert losses(tmp_path)[-1] < 0.5 * losses(tmp_path)[0]
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert 0.0 < found["eval_rouge1"] <= 1.0
    assert 0.0 < found["eval_chrf"] <= 100.0
    answers = [words.decode(row, skip_special_tokens=True) for row in written(trainer, translation(11))]
    wanted = [words.decode(row["labels"], skip_special_tokens=True) for row in translation(11)]
    same = [one == other for one, other in zip(answers, wanted, strict=True)]
    assert found["eval_exact_match"] == pytest.approx(sum(same) / 11)
    assert sum(same) > 0


def written(trainer, rows):
    """One row at a time, so that nothing is padded."""
    model = trainer.model.eval()
    return [model.generate(torch.tensor([row["input_ids"]]), max_length=16)[0] for row in rows]


def test_classes_of_texts(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS + 4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                   intermediate_size=64, num_labels=3)
    )  # fmt: skip
    rows = [{"input_ids": [4 + i % 3, *range(10, 12 + i % 2)], "labels": i % 3} for i in range(24)]
    names = ["accuracy", "f1", "precision", "recall", "matthews_correlation"]
    changes = {"task": "sequence-classification", "data.metrics": names, "trainer.learning_rate": 1e-2}
    changes |= {"trainer.max_steps": 40}
    data = Rows(dataset(rows), dataset(rows[:9]), make_collator("pad", tokenizer()), ("a", "b", "c"))
    trainer, _ = trained(tmp_path, changes, model, data)
    found = final_metrics(job(tmp_path, changes), trainer)
    assert [found[f"eval_{name}"] for name in names] == [1.0] * 5


class Squares:
    """Dark and bright pictures; a row has columns that no model knows."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict:
        return {"pixels": torch.full((3, 16, 16), float(index % 2)), "kind": index % 2}


def stack(rows):
    return {
        "pixel_values": torch.stack([row["pixels"] for row in rows]),
        "labels": torch.tensor([row["kind"] for row in rows]),
    }


def test_classes_of_pictures(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, set_seed

    set_seed(0)
    model = ViTForImageClassification(
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                  image_size=16, patch_size=8, num_labels=2)
    )  # fmt: skip
    changes = {"task": "image-classification", "data.metrics": ["accuracy", "f1"], "trainer.max_steps": 20}
    trainer, _ = trained(
        tmp_path, changes | {"trainer.learning_rate": 1e-2}, model, Rows(Squares(16), Squares(5), stack)
    )
    found = final_metrics(job(tmp_path, changes), trainer)
    assert (found["eval_accuracy"], found["eval_f1"]) == (1.0, 1.0)
    assert metrics(tmp_path)[0]["tokens"] == 0


def test_device_maps_train_and_are_measured(tmp_path):
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map={"": "cpu"})
    trainer, measured = trained(tmp_path / "run", {}, model, text_rows())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (measured.trainable_params, measured.total_params) == (count, count)
    assert trainer.meter.peak("train").allocated > measured.footprint >= 4 * count


# --- tokens


@pytest.mark.parametrize("pad", ["<pad>", "</s>"], ids=["pad", "pad-is-end"])
@pytest.mark.parametrize("kind", ["packed", "flatten", "pad"])
def test_tokens_are_counted_without_padding_however_rows_are_batched(tmp_path, kind, pad):
    words = tokenizer(pad)
    packs = [
        {
            "input_ids": first["input_ids"] + second["input_ids"],
            "labels": first["labels"] + second["labels"],
            "position_ids": [*range(len(first["input_ids"])), *range(len(second["input_ids"]))],
        }
        for first, second in zip(sequences(32)[::2], sequences(32)[1::2], strict=True)
    ]
    rows = sequences(32) if kind == "pad" else packs
    changes = {
        "data.packing": kind != "pad",
        "trainer.max_steps": 4,
        "trainer.per_device_train_batch_size": 4,
    }
    changes["trainer.train_sampling_strategy"] = "sequential"
    data = Rows(dataset(rows), None, make_collator(kind, words, pad_to_multiple_of=16))
    trained(tmp_path, changes, llama(), data, words)
    assert metrics(tmp_path)[-1]["tokens"] == sum(len(row["input_ids"]) for row in rows[:16])


def test_packing_is_refused_for_models_that_take_no_positions(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    work = job(tmp_path, {"data.packing": True})
    with pytest.raises(RecipeError, match=r"BloomForCausalLM takes no position_ids.*data.packing: false"):
        make_trainer(work, make_arguments(work), model, tokenizer(), text_rows(kind="packed"))


# --- streams


PHASES: list[str] = []
"""In which of them a row was read."""


class Counting(IterableDataset):
    """Rows without end, dealt out over processes and workers as the worker's own streams are."""

    def __iter__(self):
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        shards, shard = world_size() * workers, rank() * workers + own
        rows = sequences(16)
        number = shard
        while True:
            if worker is None:
                PHASES.append(status().phase)
            yield {**rows[number % 16], "label_of_row": number}
            number += shards


def stream_rows() -> Rows:
    return Rows(Counting(), None, make_collator("pad", tokenizer()), streaming=True)


STREAM = {"trainer.gradient_accumulation_steps": 2, "trainer.per_device_train_batch_size": 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_resumed_where_it_stopped(tmp_path, monkeypatch, workers):
    saving = {"trainer.save_strategy": "steps", "trainer.save_steps": 3, "trainer.max_steps": 6}
    changes = {**STREAM, **saving, "trainer.dataloader_num_workers": workers}
    trained(tmp_path / "whole", changes, llama(), stream_rows())
    shutil.copytree(tmp_path / "whole", tmp_path / "halved")
    shutil.rmtree(tmp_path / "halved" / "checkpoints" / "checkpoint-6")
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    PHASES.clear()
    trained(tmp_path / "halved", changes, llama(), stream_rows())
    if workers == 0:  # 3 steps of 4 rows are read again, and those of the next step
        assert (PHASES[:16], set(PHASES[16:])) == (["skip"] * 16, {"train"})
    keys = ("step", "loss", "grad_norm", "tokens")
    whole, halved = (
        [[row[key] for key in keys] for row in metrics(tmp_path / name)] for name in ("whole", "halved")
    )
    assert halved == whole
    assert [row[0] for row in whole] == [1, 2, 3, 4, 5, 6]
    if workers == 0:  # 4 rows a step, in the stream's order
        assert whole[0][3] == sum(len(row["input_ids"]) for row in sequences(4))


def test_two_processes_learn_and_score_what_one_does(tmp_path):
    """Each reads its own share of a stream, once: two batches of two rows are one batch of four.

    Three rows of evaluation do not fill two processes' batches; those repeated to fill them are not scored.
    """
    script = tmp_path / "stream.py"
    script.write_text(STREAM_SCRIPT.format(tests=str(Path(__file__).parent)))
    run = {
        "trainer.max_steps": 3,
        "trainer.dataloader_num_workers": 0,
        "trainer.logging_steps": 3,
        "trainer.save_strategy": "steps",
        "trainer.save_steps": 2,
    }
    for folder, batch in (("one", 4), ("two", 2)):
        job(tmp_path / folder, run | {"trainer.per_device_train_batch_size": batch})
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        free_port(),
    ]
    for start, folder in (([sys.executable], "one"), (command, "two")):
        run = [*start, str(script), str(tmp_path / folder)]
        done = subprocess.run(run, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [row["tokens"] for row in two] == [row["tokens"] for row in one]
    states = [
        json.loads((tmp_path / folder / "checkpoints/checkpoint-2/trainer_state.json").read_text())
        for folder in ("one", "two")
    ]
    assert states[1]["num_input_tokens_seen"] == states[0]["num_input_tokens_seen"] > one[0]["tokens"]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)
    scores = [json.loads((tmp_path / folder / "scores.json").read_text()) for folder in ("one", "two")]
    assert [found["eval_rows"] for found in scores] == [3, 3]


STREAM_SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_training import GENERATES, Meter, Rows, fit, job, llama, make_arguments, make_collator
from test_training import make_trainer
from test_training import stream_rows, t5, tokenizer, translation
from launcher.train.job import read_job
from launcher.train.worker import leave

folder = Path(sys.argv[1])
work = read_job(folder)
trainer = make_trainer(work, make_arguments(work), llama(), tokenizer(), stream_rows())
fit(work, trainer, Meter(on_cuda=False))

changes = {{"task": "seq2seq-lm", "data.metrics": ["chrf"], **GENERATES}}
work = job(folder / f"scored-{{os.getpid()}}", changes)
model = t5()
rows = Rows(translation(4), translation(3), make_collator("pad", tokenizer()))
trainer = make_trainer(work, make_arguments(work), model, tokenizer(), rows)
trainer.compute_metrics = lambda prediction: {{"rows": len(prediction.label_ids)}}
found = trainer.evaluate()
if trainer.is_world_process_zero():
    (folder / "scores.json").write_text(json.dumps(found))
leave(0)
"""


def environment() -> dict[str, str]:
    import os

    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def free_port() -> str:
    from launcher.machine.probe import free_port as find

    return str(find())


# --- evaluation and its ends


def test_early_stopping_ends_with_the_best_weights(tmp_path):
    """Told that greater is better, a run that learns gets worse: the first evaluation stays the best."""
    changes = {**EVERY_STEP, "early_stopping.patience": 2, "early_stopping.threshold": 0.0}
    changes |= {"trainer.load_best_model_at_end": True, "trainer.metric_for_best_model": "perplexity"}
    changes |= {"trainer.greater_is_better": True, "trainer.save_strategy": "steps", "trainer.save_steps": 1}
    changes |= {"data.metrics": ["perplexity"], "trainer.save_total_limit": 1, "trainer.max_steps": 20}
    trainer, measured = trained(tmp_path, changes, lora(llama()), text_rows(evaluated=True))
    assert trainer.state.global_step == 3
    assert measured.trainable_params < measured.total_params
    rows = [row for row in metrics(tmp_path) if "eval_loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    found = final_metrics(job(tmp_path, changes), trainer)
    assert (found["step"], found["eval_loss"]) == (1, rows[0]["eval_loss"])
    assert found["eval_loss"] > rows[2]["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


def test_the_threshold_of_early_stopping_counts(tmp_path):
    changes = {**EVERY_STEP, "early_stopping.patience": 1, "early_stopping.threshold": 100.0}
    changes |= {"trainer.load_best_model_at_end": True, "trainer.metric_for_best_model": "eval_loss"}
    changes |= {"trainer.save_strategy": "steps", "trainer.save_steps": 1, "trainer.max_steps": 20}
    trainer, _ = trained(tmp_path, changes, llama(), text_rows(evaluated=True))
    assert trainer.state.global_step == 2


def test_the_end_is_evaluated_when_no_step_was(tmp_path):
    changes = {"data.metrics": ["perplexity"]}
    trainer, _ = trained(tmp_path, changes, llama(), text_rows(evaluated=True))
    assert not [row for row in metrics(tmp_path) if "eval_loss" in row]
    found = final_metrics(job(tmp_path, changes), trainer)
    assert found["step"] == 4
    assert metrics(tmp_path)[-1]["eval_loss"] == found["eval_loss"]
    assert final_metrics(job(tmp_path, changes), trainer) == found
    trainer.eval_dataset = None
    assert final_metrics(job(tmp_path, changes), trainer) == {}


# --- hooks


HOOKS = """
from transformers import TrainerCallback

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step == 2
        if {fail!r} == "event":
            state.nothing

def callbacks():
    return [Stop()]

def compute_metrics(prediction):
    if {fail!r} == "metric":
        return {{"accuracy": 1.0}}
    if {fail!r} == "error":
        {{}}["gone"]
    assert prediction.predictions.shape == prediction.label_ids.shape
    return {{"rows": len(prediction.label_ids)}}
"""


def hooked(folder: Path, fail: str) -> dict:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "hooks.py").write_text(HOOKS.format(fail=fail))
    return {
        "python.file": str(folder / "hooks.py"),
        "python.hooks": ["callbacks", "compute_metrics"],
        "data.metrics": ["accuracy"],
    }


def test_hooks_add_metrics_and_callbacks(tmp_path):
    changes = {**hooked(tmp_path, ""), **EVERY_STEP}
    trainer, _ = trained(tmp_path / "run", changes, llama(), text_rows(evaluated=True))
    assert trainer.state.global_step == 2
    found = final_metrics(job(tmp_path / "run", changes), trainer)
    assert found["eval_rows"] == 6
    assert 0.0 <= found["eval_accuracy"] <= 1.0


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        (
            "event",
            RunFailed,
            r"hooks.py:8: python: the hook Stop.on_step_end raised AttributeError",
        ),
        ("error", RunFailed, r"hooks.py:17: python: the hook compute_metrics raised KeyError: 'gone'"),
        ("metric", RecipeError, "compute_metrics returned 'accuracy', which is measured already"),
    ],
)
def test_errors_of_hooks_name_their_line(tmp_path, fail, error, message):
    changes = {**hooked(tmp_path, fail), **EVERY_STEP}
    with pytest.raises(error, match=message):
        trained(tmp_path / "run", changes, llama(), text_rows(evaluated=True))


def test_resuming_keeps_evaluations_and_repeats_none(tmp_path, monkeypatch):
    saving = {"trainer.save_strategy": "steps", "trainer.save_steps": 2}
    changes = {**EVERY_STEP, **saving, "trainer.eval_steps": 2}
    trained(tmp_path, changes, llama(), text_rows(evaluated=True))
    before = json.dumps([row["step"] for row in metrics(tmp_path)])
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    trainer, _ = trained(tmp_path, changes, llama(), text_rows(evaluated=True))
    assert final_metrics(job(tmp_path, changes), trainer)["step"] == 4
    assert json.dumps([row["step"] for row in metrics(tmp_path)]) == before
