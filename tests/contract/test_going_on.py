"""A resumed run ends as the undisturbed one does: at the same step, with the same best checkpoint."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from launcher.files.checkpoint import complete_checkpoints
from launcher.train import stopping
from launcher.train.checkpoint.saving import best_step
from launcher.train.data.batches import make_collator
from launcher.train.memory_meter import Meter
from launcher.train.status import Status, status
from launcher.train.training import final_metrics, fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from small import Rows, job, llama, sequences, tokenizer

BEST = {
    "trainer.save_strategy": "steps", "trainer.save_steps": 2, "trainer.eval_strategy": "steps",
    "trainer.eval_steps": 2, "trainer.max_steps": 8, "trainer.load_best_model_at_end": True,
    "trainer.metric_for_best_model": "eval_loss", "trainer.greater_is_better": False,
}  # fmt: skip
PATIENCE = {"early_stopping.patience": 2, "early_stopping.threshold": 0.0}
SCORES = {0: 9.0, 2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}


class Asks(TrainerCallback):
    """A signal within a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self.step:
            stopping.stop.ask(signal.SIGTERM)


@pytest.fixture(autouse=True)
def scored(monkeypatch):
    """Evaluations give the scores above; the steps at which they were made."""
    made: list[int] = []

    def evaluate(self, *_, **__):
        step = self.state.global_step
        made.append(step)
        numbers = {"eval_loss": SCORES[step]}
        self.log(dict(numbers))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, numbers)
        return numbers

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    return made


def run(folder: Path, monkeypatch, changes: dict | None = None, *, resume=None, asked: int | None = None):
    """(job, trainer) of a run that has ended; asked: a signal comes in this step."""
    from datasets import Dataset

    monkeypatch.setattr(stopping, "stop", stopping.Stop())
    monkeypatch.setattr("launcher.train.callbacks.stop", stopping.stop)
    monkeypatch.setenv("EFFILAUNCH_RESUME", "" if resume is None else str(resume))
    work = job(folder, {**BEST, **(changes or {})})
    rows = Rows(
        Dataset.from_list(sequences(32)), Dataset.from_list(sequences(4)), make_collator("pad", tokenizer())
    )
    trainer = make_trainer(work, make_arguments(work), llama(), tokenizer(), rows)
    trainer.add_callback(Asks(asked))
    fit(work, trainer, Meter(on_cuda=False))
    return work, trainer


def ends_with(trainer, checkpoint: Path) -> bool:
    """Whether the weights are those of a checkpoint."""
    saved, own = load_file(checkpoint / "model.safetensors"), trainer.model.state_dict()
    return all(torch.equal(own[name], value) for name, value in saved.items())


def test_a_finished_run_that_is_resumed_ends_with_the_best_weights_too(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    _, straight = run(folder, monkeypatch)
    best = folder / "checkpoints" / "checkpoint-4"
    assert ends_with(straight, best)
    work, resumed = run(folder, monkeypatch, resume="auto")
    assert "the run had ended at step 8" in capsys.readouterr().out
    assert (resumed.state.global_step, ends_with(resumed, best)) == (8, True)
    assert final_metrics(work, resumed) == {"step": 4, "eval_loss": 1.0}


def test_a_run_directory_that_was_moved_keeps_its_best_checkpoint(tmp_path, monkeypatch):
    """Upstream forgets a best checkpoint that is not where it was; here the old place has another run's."""
    run(tmp_path / "old", monkeypatch)
    moved = (tmp_path / "old").rename(tmp_path / "new")
    run(tmp_path / "old", monkeypatch, {"trainer.learning_rate": 1e-4})
    limit = {"trainer.save_total_limit": 1}
    _, resumed = run(moved, monkeypatch, limit, resume=moved / "checkpoints" / "checkpoint-8")
    best = moved / "checkpoints" / "checkpoint-4"
    assert resumed.state.best_model_checkpoint == str(best)
    assert ends_with(resumed, best)


def test_a_run_that_goes_on_in_another_directory_finds_the_best_one_in_the_first(tmp_path, monkeypatch):
    first = run(tmp_path / "first", monkeypatch)[0].checkpoints
    _, resumed = run(tmp_path / "second", monkeypatch, resume=first / "checkpoint-6")
    assert resumed.state.best_model_checkpoint == str(first / "checkpoint-4")
    assert ends_with(resumed, first / "checkpoint-4")


def test_the_best_one_of_what_was_put_aside_is_put_aside_too(tmp_path, monkeypatch):
    """The run went back to step 2 with other values and saved its own checkpoint-4 since."""
    first = run(tmp_path / "first", monkeypatch)[0].checkpoints
    for step in (4, 6, 8):
        (first / f"checkpoint-{step}").rename(first / f"superseded-{step}")
    run(tmp_path / "first", monkeypatch, {"trainer.learning_rate": 1e-4}, resume="auto")
    assert (first / "checkpoint-4").is_dir()
    best = first / "superseded-4"
    run(tmp_path / "second", monkeypatch, resume=first / "superseded-6", asked=7)
    for resume in ("auto", first / "superseded-6"):
        _, resumed = run(tmp_path / "second", monkeypatch, resume=resume)
        assert resumed.state.best_model_checkpoint == str(best)
        assert ends_with(resumed, best)


def test_a_best_checkpoint_that_is_gone_is_told(tmp_path, monkeypatch, capsys):
    first = run(tmp_path, monkeypatch)[0].checkpoints
    (first / "checkpoint-4" / "manifest.json").unlink()
    _, resumed = run(tmp_path, monkeypatch, resume="auto")
    assert "WARNING: checkpoint-4, the best one so far, does not exist any more" in capsys.readouterr().out
    assert ends_with(resumed, first / "checkpoint-8")


def test_the_evaluation_that_is_told_is_that_of_the_weights(tmp_path, monkeypatch):
    """Step 4 was the best, and its checkpoint had no room: the weights are those of step 2."""
    from launcher.train.checkpoint.saving import Saver, SaveSkipped

    real = Saver._check_space

    def check(self, step, *given):
        if step == 4:
            raise SaveSkipped("no room")
        real(self, step, *given)

    monkeypatch.setattr(Saver, "_check_space", check)
    work, trainer = run(tmp_path, monkeypatch)
    assert (best_step(trainer), trainer.state.best_global_step) == (2, 4)
    assert ends_with(trainer, work.checkpoints / "checkpoint-2")
    assert final_metrics(work, trainer) == {"step": 2, "eval_loss": 3.0}


@pytest.mark.parametrize("resumed_at", [6, 8])
def test_early_stopping_counts_on(resumed_at, tmp_path, monkeypatch, scored):
    longer = {**PATIENCE, "trainer.max_steps": 12}
    work, straight = run(tmp_path, monkeypatch, longer)
    assert straight.state.global_step == 8, "two evaluations behind the best one"
    del scored[:]
    checkpoint = work.checkpoints / f"checkpoint-{resumed_at}"
    _, resumed = run(tmp_path, monkeypatch, longer, resume=checkpoint)
    assert resumed.state.global_step == 8
    assert scored == list(range(resumed_at + 2, 9, 2))
    assert ends_with(resumed, work.checkpoints / "checkpoint-4")


def test_an_evaluation_that_a_stop_left_out_may_be_the_last_one(tmp_path, monkeypatch, scored):
    """Upstream's early stopping would count anew; and no step may follow the evaluation."""
    longer = {**PATIENCE, "trainer.max_steps": 12}
    work, stopped = run(tmp_path, monkeypatch, longer, asked=8)
    assert (stopped.stopping.stopped, stopped.state.global_step) == (True, 8)
    assert scored == [2, 4, 6]
    _, resumed = run(tmp_path, monkeypatch, longer, resume="auto")
    assert resumed.state.global_step == 8
    assert scored == [2, 4, 6, 8]
    assert ends_with(resumed, work.checkpoints / "checkpoint-4")
    assert resumed.state.best_model_checkpoint == str(work.checkpoints / "checkpoint-4")


def test_an_interval_that_is_new_on_resume_leaves_nothing_to_make_up(tmp_path, monkeypatch, scored):
    """Step 2 was not left out: it would be an evaluation too many, which early stopping counts."""
    rare = {"trainer.eval_steps": 4, "trainer.save_steps": 2, "trainer.load_best_model_at_end": False}
    work, _ = run(tmp_path, monkeypatch, {**rare, "trainer.max_steps": 4})
    del scored[:]
    often = {**rare, "trainer.eval_steps": 2}
    run(tmp_path, monkeypatch, often, resume=work.checkpoints / "checkpoint-2")
    assert scored == [4, 6, 8]
    never = {**rare, "trainer.eval_strategy": "no", "trainer.max_steps": 2}
    run(tmp_path / "never", monkeypatch, never)
    del scored[:]
    run(tmp_path / "never", monkeypatch, often, resume="auto")
    assert scored == [4, 6, 8]


def test_early_stopping_that_is_added_on_resume_begins_to_count(tmp_path, monkeypatch):
    """Upstream saves no callback that the checkpoint does not know: KeyError."""
    run(tmp_path, monkeypatch, {"trainer.max_steps": 4})
    _, resumed = run(tmp_path, monkeypatch, {**PATIENCE, "trainer.max_steps": 12}, resume="auto")
    assert resumed.state.global_step == 8


def test_intervals_of_the_new_recipe_hold(tmp_path, monkeypatch):
    """Upstream goes on with those of the checkpoint, and only warns."""
    plain = {"trainer.eval_strategy": "no", "trainer.load_best_model_at_end": False, "trainer.max_steps": 2}
    work, _ = run(tmp_path, monkeypatch, plain)
    run(tmp_path, monkeypatch, {**plain, "trainer.max_steps": 8, "trainer.save_steps": 3}, resume="auto")
    assert list(complete_checkpoints(work.checkpoints)) == [2, 3, 6, 8]


def test_an_evaluation_at_the_start_is_not_one_of_a_resumed_run(tmp_path, monkeypatch, scored):
    run(tmp_path, monkeypatch, {**PATIENCE, "trainer.eval_on_start": True, "trainer.max_steps": 4})
    run(tmp_path, monkeypatch, {**PATIENCE, "trainer.eval_on_start": True}, resume="auto")
    assert scored == [0, 2, 4, 6, 8]


def test_rows_grouped_by_length_are_read_in_the_same_order(tmp_path, monkeypatch):
    """Upstream shuffles anew within the epoch that a run goes on in: here the second of two."""
    plain = {"trainer.eval_strategy": "no", "trainer.load_best_model_at_end": False, "trainer.max_steps": 14}
    plain |= {"trainer.train_sampling_strategy": "group_by_length"}
    work, straight = run(tmp_path, monkeypatch, plain)
    _, resumed = run(tmp_path, monkeypatch, plain, resume=work.checkpoints / "checkpoint-10")
    losses = [
        {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        for trainer in (straight, resumed)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 14


def test_a_stream_that_reads_again_what_it_gave_shows_progress(tmp_path, monkeypatch):
    """Or a run that takes longer than the hour before the first step would be ended as one that hangs."""
    moved: list[str] = []
    monkeypatch.setattr(Status, "moved", lambda status: moved.append(status.phase))
    _, trainer = run(tmp_path, monkeypatch, {"trainer.max_steps": 2})
    trainer._caught_up = False
    told = trainer._with_status(len)
    assert (told([1, 2]), moved[-1:]) == (2, [status().phase])
    trainer._caught_up, before = True, len(moved)
    assert (told([1]), len(moved)) == (1, before)
