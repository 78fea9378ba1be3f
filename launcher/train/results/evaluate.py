"""Evaluate the result of a finished run in one process, on its held-out rows or on others.

Nothing is written into the run directory: the files of the evaluation are temporary.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.engines.ddp import DDP
from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import write_json
from launcher.recipe.field_tables import METRICS
from launcher.train.data.build import build_evaluation
from launcher.train.data.prepare import prepare, prepare_rows
from launcher.train.data.store import RECORD, read_record
from launcher.train.hooks import load_hooks
from launcher.train.job import Job, read_job
from launcher.train.metrics import check_metrics
from launcher.train.model.processing import load_processing
from launcher.train.results.trained import (
    ADAPTER,
    check_readable,
    is_trained,
    on_base,
    place_of,
    portable,
    prepared_record,
    replaced,
    trained_folder,
    trained_processing,
)
from launcher.train.tasks import train_task

_ALONE: dict[str, Any] = {
    "sharding.engine": DDP.name,
    "sharding.zero_stage": None,
    "sharding.offload_optimizer": "none",
    "sharding.offload_param": "none",
    "sharding.tp_size": 1,
    "sharding.sp_size": 1,
    "sharding.cp_size": 1,
    "early_stopping.patience": None,
    "model.compile_blocks": False,
    "trainer.report_to": "none",
    "trainer.push_to_hub": False,
    "trainer.save_strategy": "no",
    "trainer.eval_strategy": "no",
    "trainer.load_best_model_at_end": False,
    "trainer.activation_checkpointing": False,
}
"""Settings of one process that only evaluates: no training, saving or reporting."""


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """An evaluation after the run."""

    weights: Path
    rows: int
    """Samples; packs if the run packs its evaluation."""
    metrics: dict[str, float | None]
    """Without the prefix `eval_`; None if not finite."""

    def to_json(self) -> dict[str, Any]:
        return {"weights": str(self.weights), "rows": self.rows, "metrics": self.metrics}


def evaluate(
    run_dir: Path, checkpoint: str | None, data: Path | None, say: Callable[[str], None]
) -> FinishedEvaluation:
    """Loss, perplexity, accuracy and the run's own metrics of its result or of one of its checkpoints.

    data: rows to use instead of the held-out ones. RecipeError without rows or weights.
    """
    job = read_job(run_dir)
    folder = trained_folder(job, checkpoint)
    check_readable(folder)
    aside = Path(tempfile.mkdtemp(prefix="effilaunch-eval-"))
    try:
        own = evaluating(job, aside)
        check_metrics(own)
        processing = trained_processing(own, folder)
        if own.task.made_by_hooks:
            _refuse_other_rows(own, data)
            record = {}
        elif data is None:
            record = _held_out(job, own, say)
        else:
            own = replaced(own, {"data.eval": [_source(job, data)]})
            record = _other_rows(job, own, processing)
        write_json(aside / RECORD, record)
        return _evaluated(job, own, folder, processing)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def evaluating(job: Job, aside: Path) -> Job:
    """The job for an evaluation in one process, with `aside` as its run directory."""
    wanted = dict.fromkeys([*job.data.metrics, "perplexity", "accuracy"])
    metrics = [name for name in wanted if name in METRICS[job.task.name]]
    changes = {**_ALONE, "data.metrics": metrics}
    if set(metrics) - {"perplexity"}:  # a run without such metrics keeps no predictions
        changes["trainer.prediction_loss_only"] = False
    changes["trainer.disable_tqdm"] = not sys.stderr.isatty()  # a progress bar in a terminal
    if job.trainer.precompute_ref_log_probs:
        changes["trainer.precompute_ref_log_probs"] = False
    if not torch.cuda.is_available():
        changes |= {"trainer.use_cpu": True, "trainer.fp16": False, "trainer.tf32": None}
    return replaced(portable(job), changes, aside)


def _held_out(job: Job, own: Job, say: Callable[[str], None]) -> dict[str, Any]:
    """The record of the run's own rows, prepared again if they are no longer in the cache."""
    if job.data.eval is None:
        raise RecipeError(
            Problem(
                "no-eval-rows",
                "the run has no held-out rows",
                file=str(job.run_dir),
                path="data.eval",
                hint="set rows with --data FILE",
            )
        )
    try:
        return read_record(job, rehash=True)
    except RecipeError as error:
        say(f"{error.problems[0].message}: preparing the rows again")
    record = prepare(own, load_processing(own), load_hooks(own))
    if prepared_record(job).get("key", record["key"]) != record["key"]:
        raise RecipeError(
            Problem(
                "eval-differs",
                "the data or the tokenizer has changed since the run, so other rows would be held out",
                file=str(job.run_dir),
                path="data",
                hint="restore the old files, or set rows with --data FILE",
            )
        )
    return record


def _refuse_other_rows(job: Job, data: Path | None) -> None:
    if data is not None:
        message = (
            f"--data names rows of a file, and task {job.task.name} is evaluated on those of make_datasets"
        )
        raise RecipeError(Problem("usage", message, hint="leave --data out"))


def _source(job: Job, data: Path) -> dict[str, Any]:
    """The rows of a file as a source of the recipe, with format and columns of the training rows."""
    sources = job.data.train
    formats = set(prepared_record(job).get("formats") or [source["format"] for source in sources])
    columns = [source["columns"] for source in sources]
    return {
        **sources[0],
        "path": str(data.absolute()),
        "format": formats.pop() if len(formats) == 1 else "auto",
        "columns": columns[0] if all(one == columns[0] for one in columns) else {},
        "weight": 1.0,
    }


def _other_rows(job: Job, own: Job, processing: Any) -> dict[str, Any]:
    labels = prepared_record(job).get("labels")
    real = replaced(own, {"tiny": False})  # the rows of the file, not generated ones
    return prepare_rows(real, processing, load_hooks(own), labels, own.run_dir)


def _evaluated(job: Job, own: Job, folder: Path, processing: Any) -> FinishedEvaluation:
    from transformers import PrinterCallback, set_seed

    from launcher.train.training import final_metrics, make_arguments, make_trainer

    data = build_evaluation(own, processing)
    assert data.eval is not None, "build_evaluation refuses a run without held-out rows"
    args = make_arguments(own)
    set_seed(args.seed)
    model = _model(own, folder, processing, prepared_record(job).get("labels"))
    trainer = make_trainer(own, args, model, processing, data)
    trainer.remove_callback(PrinterCallback)  # the command prints the same numbers
    train_task(own.task.name).as_it_began(own, trainer, processing)
    found = final_metrics(own, trainer)
    found.pop("step", None)  # of training
    metrics = {name.removeprefix("eval_"): value for name, value in found.items()}
    return FinishedEvaluation(folder, len(data.train), metrics)


def _model(own: Job, folder: Path, processing: Any, labels: Any) -> Any:
    """The weights of a folder, loaded as for training; spread over devices if no GPU can hold them."""
    from launcher.train.model.models import load_model
    from launcher.train.model.weights import check_missing, read_weights

    spread = not own.task.made_by_hooks and place_of(own, folder) == "auto"
    if spread:
        own = replaced(own, {"model.device_map": "auto"})
    if is_trained(folder) == ADAPTER:
        base = load_model(own, processing, labels, distributed=not spread)
        autocast = own.adapter.autocast_adapter_dtype
        return on_base(base, folder, autocast_adapter_dtype=autocast)
    if own.task.made_by_hooks:
        model = train_task(own.task.name).model(own, processing, labels)
        missing, _ = read_weights(model, folder)
        check_missing(model, missing, folder)
        return model
    place = {"name_or_path": str(folder), "config": None, "gguf_file": None, "revision": None}
    read = replaced(own, {f"model.{name}": value for name, value in place.items()})
    return load_model(read, processing, labels, distributed=not spread)
