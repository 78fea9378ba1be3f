"""Callbacks of the Trainer: metrics.jsonl, the status of the rank, and one stop for all ranks."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from launcher.errors import Problem, RunFailed
from launcher.files.checkpoint import complete_checkpoints, read_manifest
from launcher.files.safe_files import is_after, read_lines, write_json
from launcher.train import faults
from launcher.train.agreement import Agreement
from launcher.train.job import rank
from launcher.train.status import Bar, status
from launcher.train.stopping import SUPERVISOR_GONE, cause, stop

MAX_NON_FINITE = 3
# Names of upstream and trl for values that a row has already; trl's counts begin at 0 in a resumed run.
_LOGGED_ELSEWHERE = (
    "epoch",
    "num_tokens",
    "eval_num_tokens",
    "num_input_tokens_seen",
    "train_runtime",
    "train_tokens_per_second",
)


class Metrics(TrainerCallback):
    """Appends one line to metrics.jsonl at each log of a loss and at each evaluation; logs both ends.

    A line of training has `loss`; one of an evaluation has `eval_loss` and no `loss`. Other numbers of a task
    (rewards of preferences) keep their names. RunFailed after three losses in a row that are not finite.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self._path = path
        self._write = write
        self._non_finite = 0
        self._since = time.monotonic()
        self._tokens = 0
        self._last_logged = -1
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._write:
            self._remove_later_rows(state.global_step)
            if args.max_steps <= 0:  # of a number of steps that the recipe sets, the plan warns
                _warn_of_warmup(args.get_warmup_steps(state.max_steps), state.max_steps)
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        self._since = time.monotonic()
        self._tokens = state.num_input_tokens_seen

    def _remove_later_rows(self, step: int) -> None:
        """Remove the rows after `step`; a file that cannot be read or rewritten stays as it is."""
        aside = self._path.with_name(f".{self._path.name}.part")
        try:
            with aside.open("wb") as stream, contextlib.suppress(FileNotFoundError):
                rows = read_lines(self._path)
                stream.writelines(line for line, row in rows if row is not None and not is_after(row, step))
            aside.replace(self._path)  # a run that is killed before this keeps the rows that it had
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            print(
                f"WARNING: {self._path} stays as it is, with rows after step {step} that it may hold; new "
                f"rows are appended: {error}",
                flush=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (1, state.max_steps):
            control.should_log = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and any(name.startswith("eval_") for name in logs):
            self._append({"step": state.global_step, **numbers(logs, _LOGGED_ELSEWHERE)})
            self._since += logs.get("eval_runtime", 0.0)  # the speed is that of training
        if not logs or "loss" not in logs or state.global_step == self._last_logged:
            return
        self._last_logged = state.global_step
        now, tokens = time.monotonic(), state.num_input_tokens_seen
        speed = (tokens - self._tokens) / max(now - self._since, 1e-9)
        self._since, self._tokens = now, tokens
        loss = float(logs["loss"])
        row = {
            "step": state.global_step,
            "loss": _finite(loss),
            "learning_rate": logs.get("learning_rate"),
            "grad_norm": _finite(logs.get("grad_norm")),
            "tokens": tokens,
            "tokens_per_second": round(speed, 3),
            "memory": _memory_now(),
        }
        self._append(row | numbers(logs, (*row, *_LOGGED_ELSEWHERE)))
        self._count_non_finite(loss, state.global_step)

    def _append(self, row: dict[str, Any]) -> None:
        if self._write:
            with self._tolerant(), self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{json.dumps(row)}\n")

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A row that cannot be written, on a full disk, does not end the run; the first one is a warning."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(f"WARNING: {self._path} lacks rows, the run continues: {error}", flush=True)

    def _count_non_finite(self, loss: float, step: int) -> None:
        self._non_finite = 0 if math.isfinite(loss) else self._non_finite + 1
        if self._non_finite >= MAX_NON_FINITE:
            raise RunFailed(
                Problem(
                    "loss-not-finite",
                    f"the loss was not finite {MAX_NON_FINITE} times in a row, last at step {step}",
                    path="trainer.learning_rate",
                    hint="lower the learning rate; with fp16 use bf16 or fp32",
                )
            )


def _warn_of_warmup(warmup: int, end: int) -> None:
    if warmup > end:
        print(
            f"WARNING: trainer.warmup_steps: {warmup}: the run ends after {end}, below its learning rate",
            flush=True,
        )


class Progress(TrainerCallback):
    """Keeps this rank's status, and injects the faults between two steps."""

    _batches = 0
    """Of the current evaluation."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        status().begin_training(state.global_step, state.max_steps, _memory_now)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        faults.before_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        status().step_ended(state.global_step)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        self._batches += 1
        status().moved(Bar("Evaluating", self._batches, _batches_of(eval_dataloader), "batches"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._batches = 0


STOPPED = "stopped.json"


class EvaluationCut(Exception):
    """All ranks agreed to stop within an evaluation, whose metrics would be of a part of the rows only."""


class Stopping(TrainerCallback):
    """Ends training on all ranks after the step in which any rank got a signal; the last of all callbacks.

    `launcher/train/stopping.py` notes signals; here the ranks agree at the end of steps (`agreement.py`), and
    one process acts at the end of its own. If a checkpoint is due anyway, it is the stop's; else one is
    saved at the end of the step. A stop in the run's last step changes nothing: the run finishes. Upstream's
    `enable_jit_checkpoint` is a flag of one process, so its ranks may save at different steps.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._group: Any = None
        self._distributed = False
        self._in_train = False
        self._agreement = Agreement()
        self.stopped = False
        """Whether training was ended before its last step, on every rank."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self._distributed and self._group is None:
            # A group on the CPU: no rank waits for the queue of its device, and no NCCL call is between.
            self._group = dist.new_group(backend="gloo")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        stop.at_once = False
        self._in_train = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._may_end(control) and self._asked("step"):
            self.end(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._may_end(control) and self._asked("batch"):
            raise EvaluationCut

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._may_end(control) and self._asked("save"):
            self.stopped = control.should_training_stop = True
        self.record(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped:  # the checkpoint is saved; there is no time for what is due at the end of an epoch
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._in_train = False

    def end(self, control: Any) -> None:
        """Make the Trainer log, save and end, without an evaluation."""
        self.stopped = True
        control.should_log = control.should_save = control.should_training_stop = True
        control.should_evaluate = False

    def _may_end(self, control: Any) -> bool:
        """Whether a stop may end training here: not before the first step, nor in the last one."""
        return self._in_train and not stop.at_once and not control.should_training_stop

    def _asked(self, kind: str) -> bool:
        """Whether any rank was asked to stop; every rank must call it at the same places.

        kind: what has ended. Of several ranks only where they agree: between, a request waits.
        """
        if not self._distributed:
            return stop.number != 0
        if not self._agreement.is_due(kind):
            return False
        latest = torch.tensor([stop.number, int(stop.seconds * 1e6), int(self._agreement.slowest * 1e6)])
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._group)
        number, waited, slowest = latest.tolist()
        self._agreement.fix_next(slowest / 1e6)
        if number and not stop.number:
            stop.ask(number, since_s=waited / 1e6)
        return bool(number)

    def record(self, step: int, error: Exception | None = None) -> None:
        """Write stopped.json on rank 0 after a stop: the last checkpoint, and the time of the stop.

        error: why the checkpoint of the stop was not saved.
        """
        if not self.stopped or rank() != 0:
            return
        complete = complete_checkpoints(self._run_dir / "checkpoints")
        last = complete[max(complete)].name if complete else None
        saved = None if error is not None or step not in complete else read_manifest(complete[step])
        why = f"{cause(stop.number)}: all ranks stopped at the end of step {step}"
        if saved is None:
            why += f", without a checkpoint of it: {error or 'it does not exist'}"
        record = {
            "signal": None if stop.number == SUPERVISOR_GONE else cause(stop.number),
            "step": step,
            "checkpoint": last,
            "seconds": round(stop.seconds, 3),
            "save_seconds": None if saved is None else saved.seconds,
            "reason": why,
        }
        try:
            write_json(self._run_dir / STOPPED, record)
        except OSError as failed:  # the checkpoint matters more; and `error` is reported anyway
            print(f"WARNING: {self._run_dir / STOPPED} cannot be written: {failed}", flush=True)


def _batches_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream
        return None


def numbers(logs: Mapping[str, Any], without: Collection[str]) -> dict[str, float | None]:
    """The numbers among logged values; None for those that are not finite."""
    return {
        name: _finite(value)
        for name, value in logs.items()
        if name not in without and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _finite(value: Any) -> float | None:
    """None for a value that is not finite, since JSON has no NaN."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _memory_now() -> int:
    """Peak bytes so far: of the device on CUDA, else of the process's resident set."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
