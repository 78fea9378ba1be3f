"""Files that a worker writes: logs, errors, weights, result.json, the marker COMPLETED."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from launcher.errors import EffilaunchError
from launcher.files.rank_status import REPORT
from launcher.files.redaction import hider, line_hider, secret_values
from launcher.files.safe_files import write_json
from launcher.train.checkpoint.disk import SaveFailed, sync_file, sync_folder
from launcher.train.job import Job, rank

COMPLETED = "COMPLETED"
_LONGEST = 1500
"""Longest text of an error in the pipe, in characters: up to 4 KiB are written atomically."""
_pipe = 2
"""Descriptor of this process's original standard error, which the supervisor reads."""


class _Tee:
    """A text stream that removes secrets, and also writes to a second one."""

    def __init__(self, first: TextIO, second: TextIO | None, hide: Callable[[str], str]) -> None:
        self._first, self._second, self._hide = first, second, hide

    def __setattr__(self, name: str, value: Any) -> None:
        """A replaced `write`, such as wandb's for its console log, gets no secret either."""
        if name == "write":
            listen, hide = value, self._hide
            value = lambda text: listen(hide(text))  # noqa: E731 - it replaces a method
        object.__setattr__(self, name, value)

    def write(self, text: str) -> int:
        """Ignore errors: a full disk or a closed terminal does not end the run."""
        shown = self._hide(text)
        for stream in self._streams():
            with contextlib.suppress(OSError):
                stream.write(shown)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams():
            with contextlib.suppress(OSError):
                stream.flush()

    def _streams(self) -> list[TextIO]:
        return [self._first] if self._second is None else [self._second, self._first]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


def rank_log(run_dir: Path, number: int) -> Path:
    """The log of a rank's output."""
    return run_dir / "logs" / f"rank-{number}.log"


def redirect_output(run_dir: Path, number: int) -> None:
    """Send this rank's output to logs/rank-N.log; rank 0 writes to the terminal as well.

    Values of secret variables are removed, except from what C code writes in another rank.
    """
    global _pipe
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = rank_log(run_dir, number).open("a", encoding="utf-8", buffering=1)
    values = secret_values(os.environ)
    if number > 0:
        _pipe = os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    second = log if number == 0 else None
    tees: list[Any] = [_Tee(output, second, line_hider(values)) for output in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = tees


@contextlib.contextmanager
def also_written_to(log: Path) -> Iterator[None]:
    """Within this, Python's output goes to a log as well, without secrets."""
    values = secret_values(os.environ)
    with log.open("a", encoding="utf-8", buffering=1) as stream:
        tees: list[Any] = [_Tee(output, stream, line_hider(values)) for output in (sys.stdout, sys.stderr)]
        with contextlib.redirect_stdout(tees[0]), contextlib.redirect_stderr(tees[1]):
            yield


def write_error(run_dir: Path, who: int | str, error: Exception) -> None:
    """Write logs/error-rank-N.json (logs/error-STAGE.json): why this rank (stage) ended.

    If that fails, because the disk is full or the run directory is gone, it goes through the pipe to the
    supervisor.
    """
    found = _described(who, error)
    name = f"error-rank-{who}.json" if isinstance(who, int) else f"error-{who}.json"
    try:
        write_json(run_dir / "logs" / name, found)
    except OSError:
        _pipe_error(found)


def report_error(who: str, error: Exception) -> None:
    """Tell the supervisor why this process ended through its output alone: it may see no run directory."""
    found = _described(who, error)
    del found["traceback"]
    with contextlib.suppress(OSError):
        os.write(_pipe, f"\n{REPORT}{json.dumps(found)}\n".encode())


def _described(who: int | str, error: Exception) -> dict[str, Any]:
    problems = error.problems if isinstance(error, EffilaunchError) else []
    hide = hider(secret_values(os.environ))
    return {
        "type": type(error).__name__,
        "message": hide(str(error)),
        "traceback": hide("".join(traceback.format_exception(error))),
        "rank": who,
        "time": error.at if isinstance(error, SaveFailed) else time.time(),
        "exit_code": error.exit_code if isinstance(error, EffilaunchError) else 1,
        "problems": [
            {
                name: hide(value) if isinstance(value, str) else value
                for name, value in problem.to_json().items()
            }
            for problem in problems
        ],
    }


def _pipe_error(found: dict[str, Any]) -> None:
    """Write the error as one line of output, without its traceback, which is in the output already."""
    short = _shortened({name: value for name, value in found.items() if name != "traceback"})
    with contextlib.suppress(OSError):
        os.write(_pipe, f"\n{REPORT}{json.dumps(short)}\n".encode())


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_LONGEST]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return [_shortened(item) for item in value[:1]] if isinstance(value, list) else value


def save_outcome(
    job: Job, trainer: Any, processing: Any, data: Any, measured: Any, meter: Any, started: float
) -> None:
    """Save weights and tokenizer; when all ranks are done, result.json and the marker."""
    from launcher.train.engines import train_engine
    from launcher.train.memory_meter import memory_record
    from launcher.train.model.processors import save_processing
    from launcher.train.tasks import train_task
    from launcher.train.tracking import end_trackers
    from launcher.train.training import final_metrics

    kind = "adapter" if job.has_adapter else "model"
    evaluated = final_metrics(job, trainer)
    folder = job.run_dir / kind
    base = trainer.model.get_base_model() if job.has_adapter else trainer.model
    if hasattr(getattr(base, "config", None), "use_cache"):
        base.config.use_cache = True  # the Trainer turned it off, which would be saved

    def write(aside: Path) -> None:
        train_engine(job).save_trained(job, trainer, aside)
        if rank() == 0:
            save_processing(processing, aside)
            train_task(job.task.name).write_beside(job, base, aside)

    with meter.phase("save"):
        trainer.saver.save_result(trainer, folder, write)
    rows = _rows(job, data)
    memory = memory_record(job, meter, measured)
    if rank() != 0:
        return
    result = _result(job, trainer, data, measured, evaluated, kind, started)
    with trainer.saver.explained("result.json", job.run_dir):
        write_json(job.run_dir / "result.json", {**result, "memory": memory, "rows": rows})
        sync_file(job.run_dir / "result.json")  # before the marker
    if trainer.args.push_to_hub:
        trainer.pusher.expect_result()
    with trainer.saver.explained(COMPLETED, job.run_dir):
        (job.run_dir / COMPLETED).write_text("", encoding="utf-8")
    sync_folder(job.run_dir)
    end_trackers(trainer, memory)
    if trainer.args.push_to_hub:  # the run has finished, whatever becomes of it
        trainer.pusher.result(trainer, folder)


def _rows(job: Job, data: Any) -> dict[str, Any]:
    """Counts of the rows; every process must call it, since each streams a share of them."""
    if not data.streaming:
        return dict(data.counts)
    from launcher.train.data.stream import streamed_rows

    return streamed_rows(job, data.train, data.counts)


def _result(
    job: Job, trainer: Any, data: Any, measured: Any, evaluated: Any, kind: str, started: float
) -> dict[str, Any]:
    seconds, total = time.monotonic() - started, trainer.saver.elapsed
    first, last = _losses(job.run_dir / "metrics.jsonl")
    tokens = trainer.state.num_input_tokens_seen
    speed = (tokens - measured.tokens_before) / measured.seconds if measured.seconds else None
    return {
        "schema_version": 1,
        "loss": {"first": first, "last": last},
        "eval": evaluated,
        "steps": trainer.state.global_step,
        "resumed_at": trainer.state.global_step
        - measured.steps,  # times are since then, except for the total
        "train_seconds": round(measured.seconds, 3),
        "tokens": tokens,
        "tokens_per_second": speed,
        "memory_footprint": measured.footprint,
        "labels": None if data.labels is None else list(data.labels),
        "trainable_params": measured.trainable_params,
        "total_params": measured.total_params,
        "idle_adapters": measured.idle_adapters,
        "optimizer": _optimizer_name(trainer),
        **getattr(trainer, "notes", {}),
        "processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "adaptations": job.adaptations,
        "output": kind,
        "checkpoints": trainer.saver.record.to_json(),
        "seconds": round(seconds, 3),
        "total_seconds": None if total is None else round(total, 3),
    }


def _losses(metrics: Path) -> tuple[Any, Any]:
    """The first and the last logged training loss; None if none can be read."""
    from launcher.files.safe_files import read_lines

    ends: list[Any] = []
    with contextlib.suppress(OSError):
        for _, row in read_lines(metrics):
            if row is not None and "loss" in row:
                ends = [*ends[:1], row["loss"]]
    return (ends[0], ends[-1]) if ends else (None, None)


def _optimizer_name(trainer: Any) -> str:
    """The class that updates the weights, below the wrappers of accelerate and DeepSpeed."""
    optimizer = trainer.optimizer
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return type(optimizer).__name__
