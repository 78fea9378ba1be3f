"""One stop for all ranks: at the same step, with one checkpoint, and a record of it.

`launcher/train/stopping.py` notes signals; here the ranks ask each other, and the Trainer is told to save and
to end. The upstream flag of `enable_jit_checkpoint` belongs to one process, so its ranks may save at
different steps.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from launcher.facts.checkpoint import complete_checkpoints, read_manifest
from launcher.facts.safe_files import write_json
from launcher.train.job import rank
from launcher.train.stopping import SUPERVISOR_GONE, cause, stop

STOPPED = "stopped.json"


class EvaluationCut(Exception):
    """All ranks agreed to stop within an evaluation, whose numbers are of a part of the rows only."""


class EndedBefore(Exception):
    """The evaluation that a stop had left out shows that the run had ended there: no step follows."""


class Stopping(TrainerCallback):
    """Ends training behind the step at which any rank was asked to stop. The last of all callbacks.

    The first checkpoint that is due anyway is the stop's; else one is saved at the end of the step. A stop
    that meets the run's last step changes nothing: the run just finishes.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._group: Any = None
        self._distributed = False
        self._in_train = False
        self.stopped = False
        """Whether training was ended before its last step, on every rank alike."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self._distributed and self._group is None:
            # Of its own and on the CPU: no rank waits for its device's queue, and no NCCL call is between.
            self._group = dist.new_group(backend="gloo")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        stop.at_once = False
        self._in_train = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._may_end(control) and self._asked():
            self.end(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._may_end(control) and self._asked():
            raise EvaluationCut

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._may_end(control) and self._asked():
            self.stopped = control.should_training_stop = True
        self.record(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped:  # what is due at the end of an epoch: the checkpoint is there, the time is not
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._in_train = False

    def end(self, control: Any) -> None:
        """Tell the Trainer to log, to save and to end; nothing is evaluated any more."""
        self.stopped = True
        control.should_log = control.should_save = control.should_training_stop = True
        control.should_evaluate = False

    def _may_end(self, control: Any) -> bool:
        """Whether a stop would be answered here: in training, unless it ends behind this step anyway."""
        return self._in_train and not stop.at_once and not control.should_training_stop

    def _asked(self) -> bool:
        """Whether any rank was asked to stop; every rank must call it at the same place."""
        if not self._distributed:
            return stop.number != 0
        said = torch.tensor([stop.number, int(stop.seconds * 1000)])
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        number, milliseconds = said.tolist()
        if number and not stop.number:
            stop.ask(number, since_s=milliseconds / 1000)
        return bool(number)

    def record(self, step: int, error: Exception | None = None) -> None:
        """Write stopped.json, on rank 0: what is there to go on from, and what the stop took.

        error: what kept the stop's checkpoint from being saved. Nothing is written without a stop.
        """
        if not self.stopped or rank() != 0:
            return
        complete = complete_checkpoints(self._run_dir / "checkpoints")
        last = complete[max(complete)].name if complete else None
        saved = None if error is not None or step not in complete else read_manifest(complete[step])
        why = f"{cause(stop.number)}: all ranks stopped at the end of step {step}"
        if saved is None:
            why += f", without a checkpoint of it: {error or 'it is not there'}"
        said = {
            "signal": None if stop.number == SUPERVISOR_GONE else cause(stop.number),
            "step": step,
            "checkpoint": last,
            "seconds": round(stop.seconds, 3),
            "save_seconds": None if saved is None else saved.seconds,
            "reason": why,
        }
        try:
            write_json(self._run_dir / STOPPED, said)
        except OSError as failed:  # the checkpoint is what counts; and `error` is told anyway
            print(f"WARNING: {self._run_dir / STOPPED} cannot be written: {failed}", flush=True)


def evaluation_owed(strategy: str, delay: float, state: Any) -> bool:
    """Whether the step that a run goes on from should have been evaluated, and was not. Pure.

    strategy, delay, and `state` with its eval_steps: of the recipe that the checkpoint was saved with.
    """
    step, epoch = state.global_step, state.epoch or 0.0
    if strategy == "steps":
        due = step % state.eval_steps == 0 and delay <= step
    else:
        due = strategy == "epoch" and float(epoch).is_integer() and delay <= epoch
    if not due or step == 0:
        return False
    return not any(row["step"] == step and "eval_loss" in row for row in state.log_history)


def random_states() -> tuple[Any, ...]:
    """Of all generators that a rank draws from, as a checkpoint holds them."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, ...] | None) -> None:
    if states is None:
        return
    own, of_numpy, of_torch, cuda = states
    random.setstate(own)
    numpy.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
