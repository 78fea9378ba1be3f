"""Runs whose batches are flattened learn, count and evaluate what padded ones do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from launcher.train.data.batches import make_collator  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, generate, prepared, trained  # noqa: E402
from small import Rows, job, llama, metrics, sequences, tokenizer  # noqa: E402

FLAT = {"model.attn_implementation": "varlen", "data.padding_free": True}
UNEVEN: dict[str, Any] = {
    "data.eval": {"split": 0.2},
    "data.metrics": ["perplexity", "accuracy"],
    "trainer.gradient_accumulation_steps": 3,
    "trainer.per_device_train_batch_size": 3,
    "trainer.per_device_eval_batch_size": 4,
    "trainer.max_steps": 9,  # more than an epoch, whose last step has fewer micro-batches
    "trainer.eval_strategy": "steps",
    "trainer.eval_steps": 4,
    "trainer.learning_rate": 1e-3,
}


def source(name: str) -> dict[str, Any]:
    return {"data.train": [{"path": "unused.jsonl", "format": name, "columns": {}}]}


def measured(folder: Path) -> list[dict[str, float]]:
    timed = (
        "tokens_per_second",
        "memory",
        "eval_runtime",
        "eval_samples_per_second",
        "eval_steps_per_second",
    )
    return [{name: x for name, x in row.items() if name not in timed} for row in metrics(folder)]


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]], rel: float) -> None:
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=rel)


@pytest.mark.parametrize(("rows", "multiple"), [("chat", 64), ("text", None)])
def test_a_flattened_run_is_the_padded_run(tmp_path: Path, rows: str, multiple: int | None) -> None:
    """Losses under accumulation, gradients' norms, tokens, and every number of the evaluations."""
    changes = {**UNEVEN, **source(rows)}
    trained(tmp_path / "padded", changes)
    trained(tmp_path / "flat", {**changes, **FLAT, "data.pad_to_multiple_of": multiple})
    expected, found = measured(tmp_path / "padded"), measured(tmp_path / "flat")
    assert_alike(found, expected, rel=2e-4)
    assert len([row for row in found if "eval_accuracy" in row]) == 3
    assert [row["tokens"] for row in found if "loss" in row] == [
        row["tokens"] for row in expected if "loss" in row
    ]


def test_evaluations_keep_their_rows(tmp_path: Path) -> None:
    """Of samples; packs are evaluated as they are trained."""
    from launcher.train.data.build import build_data
    from launcher.train.data.host_counts import CountOnHost
    from launcher.train.job import read_job
    from launcher.train.model.processing import load_processing
    from launcher.train.training import make_arguments, make_trainer

    shapes = []
    for packing in (False, True):
        work = read_job(prepared(tmp_path / str(packing), {**UNEVEN, **FLAT, "data.packing": packing}))
        words = load_processing(work)
        data = build_data(work, words)
        trainer = make_trainer(work, make_arguments(work), llama(), words, data)
        assert isinstance(trainer.data_collator, CountOnHost)
        loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
        batches = [next(iter(loader)) for loader in (*loaders, trainer.get_test_dataloader(data.eval))]
        shapes.append([(len(batch["input_ids"]), "attention_mask" in batch) for batch in batches])
    assert shapes == [[(1, False), (4, True), (4, True)], [(1, False)] * 3]


def test_tokens_are_exact_at_every_log_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are brought together only there: each time, all ranks and the device are waited for."""
    from accelerate import Accelerator
    from datasets import Dataset

    from launcher.train.memory_meter import Meter
    from launcher.train.training import fit, make_arguments, make_trainer

    rows = sequences(40)
    lengths = [len(row["input_ids"]) for row in rows]
    work = job(tmp_path, {
        **FLAT, "trainer.max_steps": 10, "trainer.logging_steps": 4, "trainer.save_strategy": "steps",
        "trainer.save_steps": 3, "trainer.per_device_train_batch_size": 2,
        "trainer.gradient_accumulation_steps": 2, "trainer.train_sampling_strategy": "sequential",
    })  # fmt: skip
    collate = make_collator("flatten", tokenizer(), pad_to_multiple_of=16)
    data = Rows(Dataset.from_list(rows), None, collate)
    trainer = make_trainer(work, make_arguments(work), llama(), tokenizer(), data)
    gathered = []
    real = Accelerator.gather
    monkeypatch.setattr(Accelerator, "gather", lambda self, x: gathered.append(x) or real(self, x))
    fit(work, trainer, Meter(on_cuda=False))
    expected = {step: sum(lengths[: 4 * step]) for step in range(1, 11)}
    assert {row["step"]: row["tokens"] for row in metrics(tmp_path)} == {
        step: expected[step] for step in (1, 4, 8, 10)
    }
    saved = {
        int(folder.name.removeprefix("checkpoint-")): json.loads(
            (folder / "trainer_state.json").read_text(encoding="utf-8")
        )["num_input_tokens_seen"]
        for folder in (tmp_path / "checkpoints").glob("checkpoint-*")
    }
    assert saved == {step: expected[step] for step in (3, 6, 9, 10)}
    assert len(gathered) == 7  # steps 1, 3, 4, 6, 8, 9, 10


def test_what_was_trained_flattened_writes_and_goes_on_without_it(tmp_path: Path) -> None:
    """The adapter's base is loaded with sdpa: nothing else makes rows of documents."""
    from launcher.train.job import read_job
    from launcher.train.model.processing import load_processing
    from launcher.train.results.trained import trained_model

    run = trained(tmp_path / "run", {**FLAT, "adapter": LORA})
    assert isinstance(generate(run, "How many red stones are there? ", max_new_tokens=4), str)
    work = read_job(run)
    model = trained_model(work, run / "adapter", load_processing(work))
    assert model.config._attn_implementation == "sdpa"


WORKERS = {
    "trainer.dataloader_num_workers": 2,
    "trainer.dataloader_persistent_workers": True,
    "trainer.dataloader_prefetch_factor": 2,
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_workers_make_the_same_batches_and_a_resume_goes_on_exactly(
    tmp_path: Path, monkeypatch: Any, dropout: float
) -> None:
    """Over more than two epochs, from a checkpoint within the second, with evaluations."""
    # A loader's idle workers are asked to end, and waited for in vain so long each (torch 2.13).
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    changes = {
        **UNEVEN, **FLAT, "adapter": {**LORA, "lora_dropout": dropout}, "trainer.max_steps": 15,
        "trainer.save_strategy": "steps", "trainer.save_steps": 9,
    }  # fmt: skip
    trained(tmp_path / "workers", {**changes, **WORKERS})
    shutil.copytree(tmp_path / "workers", tmp_path / "halved")
    shutil.rmtree(tmp_path / "halved" / "checkpoints" / "checkpoint-15")
    for name in ("COMPLETED", "result.json"):
        (tmp_path / "halved" / name).unlink()
    with monkeypatch.context() as patch:
        patch.setenv("EFFILAUNCH_RESUME", "auto")
        trained(tmp_path / "halved", {**changes, **WORKERS})
    whole = measured(tmp_path / "workers")
    assert measured(tmp_path / "halved") == whole
    assert [row["step"] for row in whole if "loss" in row] == list(range(1, 16))
    if not dropout:
        trained(tmp_path / "alone", changes)
        assert measured(tmp_path / "alone") == whole
