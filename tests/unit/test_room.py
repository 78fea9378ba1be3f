"""A run that would fill its disk is refused before it starts; and what the plan says of large logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints import checkpoint
from factories import plan, with_settings

from launcher.errors import DoesNotFit, MachineError
from launcher.execute import start_checks
from launcher.execute.start_checks import check_disk_space
from launcher.files.checkpoint import SPARE, bytes_beside_tensors
from launcher.knowledge.doctor import needs
from launcher.knowledge.doctor.needs import checkpoint_bytes as tensor_bytes
from launcher.knowledge.doctor.needs import checkpoints_kept
from launcher.machine.storage import read_folder

LONG = {"trainer__max_steps": 5000, "trainer__save_total_limit": 2}


def checkpoint_bytes(made):
    """Of the first checkpoint, as its save asks them to be free."""
    return tensor_bytes(made) + bytes_beside_tensors(made.spec.vocab_size)


def result_bytes(made):
    """Of the result, and what a save leaves free."""
    return needs.result_bytes(made) + bytes_beside_tensors(made.spec.vocab_size) + SPARE


def disk_of(monkeypatch, free):
    there = read_folder
    monkeypatch.setattr(start_checks, "read_folder", lambda path: replace(there(path), free=free))


def test_a_disk_without_room_for_the_checkpoints_is_refused_with_numbers(tmp_path, monkeypatch):
    made = plan(tmp_path, adapter="null", sharding__zero_stage=3, **LONG)
    one = checkpoint_bytes(made)
    assert one > 12 * 6_738_415_616, "weights, fp32 masters and both moments"
    assert checkpoints_kept(made) == 3, "a new one is written before the oldest goes"
    wanted = 3 * one + result_bytes(made)
    disk_of(monkeypatch, wanted)
    check_disk_space(made, tmp_path / "runs" / "new")
    disk_of(monkeypatch, wanted - 1)
    with pytest.raises(MachineError) as caught:
        check_disk_space(made, tmp_path / "runs" / "new")
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 4
    assert (problem.code, problem.path) == ("disk-full", "trainer.save_total_limit")
    assert "3 checkpoints of" in problem.message


def test_what_a_resumed_run_has_written_needs_no_room_again(tmp_path, monkeypatch):
    made = plan(tmp_path, **LONG)
    one, result = checkpoint_bytes(made), result_bytes(made)
    for there in range(5):  # at 5000 steps more of them are there than the limit leaves
        disk_of(monkeypatch, max(0, 3 - there) * one + result - 1)
        with pytest.raises(MachineError):
            check_disk_space(made, tmp_path)
        disk_of(monkeypatch, max(0, 3 - there) * one + result)
        check_disk_space(made, tmp_path)
        checkpoint(tmp_path / "checkpoints", 500 * (there + 1))


def test_one_that_was_not_finished_needs_its_room_again(tmp_path, monkeypatch):
    """It goes before the next save: what it takes is as good as free."""
    made = plan(tmp_path, **LONG)
    wanted = 3 * checkpoint_bytes(made) + result_bytes(made)
    (checkpoint(tmp_path / "checkpoints", 500) / "manifest.json").unlink()
    disk_of(monkeypatch, wanted - 1000)
    with pytest.raises(MachineError):
        check_disk_space(made, tmp_path)
    half = tmp_path / "checkpoints" / ".saving" / "checkpoint-1000"
    half.mkdir(parents=True)
    (half / "optimizer.pt").write_bytes(bytes(1000))
    check_disk_space(made, tmp_path)


def test_what_a_checkpoint_really_took_counts_for_the_next(tmp_path, monkeypatch):
    made = plan(tmp_path, **LONG)
    more = 2 * checkpoint_bytes(made)
    checkpoint(tmp_path / "checkpoints", 500, bytes=more)
    disk_of(monkeypatch, 2 * more + result_bytes(made) - 1)
    with pytest.raises(MachineError):
        check_disk_space(made, tmp_path)
    disk_of(monkeypatch, 2 * more + result_bytes(made))
    check_disk_space(made, tmp_path)


def test_a_run_of_unknown_length_needs_room_for_one_more(tmp_path, monkeypatch):
    made = plan(tmp_path, trainer__max_steps="null", trainer__num_train_epochs=3)
    made = with_settings(made, {"trainer.save_total_limit": None})
    assert checkpoints_kept(made) is None
    for step in (500, 1000, 1500):
        checkpoint(tmp_path / "checkpoints", step)
    disk_of(monkeypatch, checkpoint_bytes(made) + result_bytes(made) - 1)
    with pytest.raises(MachineError):
        check_disk_space(made, tmp_path)


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_a_run_that_saves_nothing_needs_room_for_its_result_alone(tmp_path, monkeypatch, strategy):
    made = plan(tmp_path, trainer__save_strategy=strategy, trainer__max_steps=5000)
    disk_of(monkeypatch, result_bytes(made))
    if strategy == "no":
        check_disk_space(made, tmp_path)
        return
    with pytest.raises(MachineError):
        check_disk_space(made, tmp_path)


GEMMA = {"model__name_or_path": "google/gemma-3-1b-pt", "trainer__per_device_train_batch_size": 8}


def logits_said(made):
    return [warning for warning in made.warnings if warning.startswith("logits take")]


def test_logits_that_are_most_of_the_memory_are_warned_of_with_their_size(tmp_path):
    made = plan(tmp_path, "1xA100-80GB", data__max_length=2048, model__loss="full", **GEMMA)
    (said,) = logits_said(made)
    logits, total = made.memory.components.logits, made.memory.total
    assert f"{logits / 2**30:.1f} GiB of the {total / 2**30:.1f} GiB" in said
    assert "262,144 words at 8 x 2048 positions" in said
    assert "less with model.loss: chunked, or trainer.use_liger_kernel: true" in said


@pytest.mark.parametrize(
    "mend",
    [
        {},
        {"model__loss": "full", "trainer__use_liger_kernel": "true"},
        {"model__name_or_path": "huggyllama/llama-7b"},
    ],
)
def test_what_it_names_mends_it(tmp_path, mend):
    assert logits_said(plan(tmp_path, "1xA100-80GB", data__max_length=2048, **{**GEMMA, **mend})) == []


def test_ligers_loss_that_is_switched_off_holds_its_logits(tmp_path):
    def logits(**more):
        size = {"data__max_length": 2048, "model__loss": "full", **GEMMA}
        return plan(tmp_path, "1xA100-80GB", **{**size, **more}).memory.components.logits

    on, off = {"trainer__use_liger_kernel": "true"}, "{fused_linear_cross_entropy: false}"
    assert logits(**on) < logits() / 4
    assert logits(**on, trainer__liger_kernel_config=off) == logits()


EMBEDDING = """\
model: {name_or_path: BAAI/bge-base-en-v1.5}
task: embedding
embedding: {loss: CachedMultipleNegativesRankingLoss, mini_batch_size: 1}
data: {train: [{path: data/train.jsonl}], eval: [{path: data/eval.jsonl}], max_length: 512}
trainer: {max_steps: 10}
global_batch_size: 4096
"""


def test_no_device_chooses_how_many_rows_of_an_evaluation_are_compared(tmp_path):
    """The recipe may: what then fits is said."""
    evaluated = "trainer.per_device_eval_batch_size"
    assert plan(tmp_path, "1xA100-80GB", text=EMBEDDING).at(evaluated) == 4096
    with pytest.raises(DoesNotFit) as caught:
        plan(tmp_path, "1xT4-16GB", text=EMBEDDING)
    assert f"{evaluated}: 64" in str(caught.value)
    made = plan(tmp_path, "1xT4-16GB", text=EMBEDDING, trainer__per_device_eval_batch_size=64)
    assert (made.at(evaluated), made.memory.fits) == (64, True)
