"""What happens beside the training loop: metrics.jsonl, and the end of runs that cannot go on."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from launcher.errors import Problem, RunFailed
from launcher.facts.safe_files import is_after, read_lines
from launcher.train import faults
from launcher.train.status import Bar, status

MAX_NON_FINITE = 3
# Upstream's and trl's own names for what a row holds already.
_LOGGED_ELSEWHERE = (
    "epoch",
    "num_tokens",
    "num_input_tokens_seen",
    "train_runtime",
    "train_tokens_per_second",
)


class Metrics(TrainerCallback):
    """Appends one line to metrics.jsonl at each log of a loss and at each evaluation; both ends are logged.

    A line of training has `loss`; one of an evaluation has `eval_loss` and no `loss`. Numbers that a task
    logs besides (rewards of preferences) stand under their own names.
    Stops the run (RunFailed) after three logged losses in a row that are not finite.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self._path = path
        self._write = write
        self._non_finite = 0
        self._since = time.monotonic()
        self._tokens = 0
        self._last_logged = -1
        self._told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._write:
            self._remove_later_rows(state.global_step)
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
        """A row that cannot be written, on a full disk, does not end the run; the first one is told."""
        try:
            yield
        except OSError as error:
            if not self._told:
                self._told = True
                print(f"WARNING: {self._path} lacks rows, the run goes on: {error}", flush=True)

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


class Progress(TrainerCallback):
    """Keeps this rank's status, and is where faults on purpose strike between two steps."""

    _batches = 0
    """Of the evaluation that is under way."""

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


def _batches_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of rows that nobody has counted
        return None


def numbers(logs: Mapping[str, Any], without: Collection[str]) -> dict[str, float | None]:
    """The numbers among logged values, those that are not finite as None."""
    return {
        name: _finite(value)
        for name, value in logs.items()
        if name not in without and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _finite(value: Any) -> float | None:
    """JSON has no NaN; a value that is not finite becomes null."""
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
