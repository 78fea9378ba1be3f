"""TrainingArguments and Trainer of a plan, and the training itself, measured."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from launcher.errors import Problem, RecipeError, RunFailed
from launcher.files.checkpoint import (
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
    read_origin,
)
from launcher.files.safe_files import parse_json
from launcher.train.activation_offload import offload_activations
from launcher.train.arguments import make_arguments
from launcher.train.callbacks import Metrics, Progress, Stopping, numbers
from launcher.train.checkpoint.resuming import EarlyStopping, ready_checkpoint
from launcher.train.checkpoint.saving import SEEN_S, best_step
from launcher.train.collectives import of_all, of_rank_0
from launcher.train.data.encoded import Data
from launcher.train.data.host_counts import CountOnHost, holds_several
from launcher.train.engines import train_engine
from launcher.train.hooks import Hooks, check_collator, load_hooks, placed_in_file
from launcher.train.idle_adapters import IdleAdapters
from launcher.train.job import Job, rank, world_size
from launcher.train.memory_meter import (
    CPU,
    FirstContext,
    GradientBytes,
    Meter,
    MeteredSteps,
    bytes_by_device,
    gradient_tensors,
    held_tensors,
    optimizer_tensors,
    weight_tensors,
)
from launcher.train.metrics import asked_metrics, make_scores
from launcher.train.model.loss import chunk_loss
from launcher.train.model.models import compile_blocks
from launcher.train.optim_in_backward import StepInBackward
from launcher.train.own_trainer import has_own_loss
from launcher.train.tasks import train_task
from launcher.train.tasks.task import Evaluated, TrainTask
from launcher.train.upstream.model_seams import documents_known

__all__ = ["Measured", "final_metrics", "fit", "make_arguments", "make_trainer"]

RESUME_VARIABLE = "EFFILAUNCH_RESUME"
_NOT_METRICS = ("epoch", "step", "num_input_tokens_seen", "eval_num_tokens")
"""Of the logs of an evaluation; the last one is trl's and begins at 0 in a resumed run."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a run."""

    seconds: float
    """Wall time of training alone."""
    tokens_before: int
    """Tokens counted by the run that was resumed."""
    steps: int
    """Steps since then."""
    components: dict[str, int]
    """Bytes of weights, gradients and optimizer states on this process's fullest device, and its context."""
    contexts: list[int]
    """Bytes outside torch's allocator after the first step, by rank; [] on a CPU."""
    largest_batch: int
    """Tokens of the largest micro-batch, padding included; 0 for images."""
    footprint: int
    """Bytes of the model's parameters and buffers before training."""
    trainable_params: int
    total_params: int
    idle_adapters: dict[str, Any] | None
    """Adapters without a gradient (idle_adapters.py)."""


def make_trainer(job: Job, args: TrainingArguments, model: Any, processing: Any, data: Data) -> Any:
    """The Trainer of the plan's task, with its metrics, callbacks and the user's hooks.

    RecipeError when the model cannot train on packed rows or a hook is wrong; RunFailed when accelerate set
    up something else than the plan says.
    """
    check_positions(job, model)
    train_engine(job).check_model(job, model)
    hooks = load_hooks(job)  # which may change the model's class
    _make_faster(job, model)
    task = train_task(job.task.name)

    def scores_of(names: Sequence[str], predictions: Any, targets: Any) -> dict[str, float]:
        problem = job.data.problem_type
        return task.scores(Evaluated(names, predictions, targets, processing, data.labels, problem))

    collate = data.collate
    if task.shifts_labels and collate and hooks.data_collator is None:
        collate = CountOnHost(collate, targets=job.model.loss == "chunked")
    common = {
        "model": model,
        "args": args,
        "train_dataset": data.train,
        "eval_dataset": data.eval,
        "data_collator": collate,
        "processing_class": processing,
        "callbacks": _callbacks(job, hooks),
        "compute_metrics": make_scores(job, scores_of, hooks.compute_metrics),
    }
    workers, context = args.dataloader_num_workers, args.dataloader_multiprocessing_context
    check_collator(data.collate, workers=workers, context=context)
    with placed_in_file(job):
        trainer = task.trainer(job, model, processing, common)
    trainer.own_loss, trainer.own_optimizer = hooks.compute_loss, hooks.optimizer
    if has_own_loss(type(trainer)):
        trainer.model_accepts_loss_kwargs = False  # it is a mean, which is weighed by what it is a mean of
    trainer.loss_is_own = hooks.compute_loss is not None or has_own_loss(type(trainer))
    _set_up(job, trainer, task, data)
    check_engine(job, trainer)
    return trainer


def _set_up(job: Job, trainer: Any, task: TrainTask, data: Data) -> None:
    """What ours read beside what transformers' own Trainer takes."""
    trainer.stopping = Stopping(job.run_dir)
    trainer.add_callback(trainer.stopping)  # the last one: it sees what the others asked of this step
    trainer.engine = train_engine(job)
    trainer.streams = data.streaming
    trainer.collate_eval = data.collate_eval or data.collate
    trainer.shared_by = job.sharding.ranks_of_copy
    trainer.evaluated_by = job.sharding.tp_size
    trainer.rows_are_independent = job.runtime.loss_over != "micro-batch"
    trainer.shifts_labels = task.shifts_labels
    trainer.reports_perplexity = "perplexity" in asked_metrics(job)


def _make_faster(job: Job, model: Any) -> None:
    """Loss and layers as the plan has them."""
    if job.model.loss == "chunked":
        chunk_loss(model)
    if job.model.compile_blocks:
        compile_blocks(job, model)


def _callbacks(job: Job, hooks: Hooks) -> list[TrainerCallback]:
    metrics = Metrics(job.run_dir / "metrics.jsonl", write=rank() == 0)
    callbacks: list[TrainerCallback] = [metrics, Progress()]
    patience = job.early_stopping.patience
    if patience is not None:
        callbacks.append(EarlyStopping(patience, job.early_stopping.threshold))
    return callbacks + (hooks.callbacks() if hooks.callbacks is not None else [])


def check_positions(job: Job, model: Any) -> None:
    """RecipeError when documents that share a row could see each other.

    What keeps them apart are position_ids, which the Trainer takes away from a model that does not name them.
    """
    asked = "data.packing" if job.data.packing else "data.padding_free" if job.data.padding_free else None
    if asked is None:
        return
    base = model.get_base_model() if job.has_adapter else model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise RecipeError(
            Problem(
                "packing-not-separable",
                f"{type(base).__name__} takes no position_ids, so documents in one row would see each other",
                path=asked,
                hint=f"{asked}: false",
            )
        )


def check_engine(job: Job, trainer: Trainer) -> None:
    """RunFailed when accelerate set up another engine or fewer processes than the plan says.

    It does so silently, e.g. for ACCELERATE_USE_CPU beside a DeepSpeed config.
    """
    accelerator = trainer.accelerator
    right = train_engine(job).is_set_up(accelerator.distributed_type.value)
    if not right or accelerator.num_processes != world_size():
        raise RunFailed(
            Problem(
                "engine-mismatch",
                f"planned {job.engine.name} over {world_size()} processes, accelerate set up "
                f"{accelerator.distributed_type.value} over {accelerator.num_processes}",
                hint="unset ACCELERATE_* variables of your environment",
            )
        )


def fit(job: Job, trainer: Any, meter: Meter) -> Measured:
    """Train from the start or from the checkpoint of the environment.

    trainer: one of trainers.py; its evaluations are measured separately.
    """
    checkpoint = find_checkpoint(job)
    if checkpoint is not None:
        ready_checkpoint(checkpoint)
        train_engine(job).repair(trainer, checkpoint)
        manifest = read_manifest(checkpoint)
        trainer.saver.earlier_s = None if manifest is None else manifest.elapsed
    before = _counts_at(checkpoint)
    model = trainer.model
    footprint = _footprint(model)
    trainable, total = _count_parameters(model)
    gradients = GradientBytes(steps_in_backward=train_engine(job).steps_in_backward)
    trainer.add_callback(gradients)
    if job.sharding.optim_in_backward:
        trainer.add_callback(StepInBackward(trainer.accelerator, gradients.found))
    if job.sharding.offload_activations == "cpu":
        offload_activations(model)
    trainer.add_callback(MeteredSteps(meter))
    context = FirstContext(meter, (job.plan.get("memory") or {}).get("components", {}))
    trainer.add_callback(context)
    idle = IdleAdapters(lambda: bool(trainer.has_signal))
    trainer.add_callback(idle)
    trainer.meter, meter.held = meter, lambda: _all_tensors(trainer)
    started = time.monotonic()
    with (
        meter.phase("train"), _autocast(job, trainer), documents_known(holds_several),
        placed_in_file(job),
    ):  # fmt: skip
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if checkpoint is not None and trainer.state.global_step == before["global_step"]:
        print(f"the run had ended at step {before['global_step']}: nothing left to train")
    return Measured(
        seconds=time.monotonic() - started,
        tokens_before=before["num_input_tokens_seen"],
        steps=trainer.state.global_step - before["global_step"],
        components=_components(trainer, meter, gradients),
        contexts=context.found,
        largest_batch=trainer.largest_batch,
        footprint=footprint,
        trainable_params=trainable,
        total_params=total,
        idle_adapters=idle.found,
    )


def _all_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    """Tensors of the model and its optimizer."""
    yield from held_tensors(trainer)
    yield from gradient_tensors(trainer.model, trainer.optimizer)
    yield from optimizer_tensors(trainer.model, trainer.optimizer)


def _components(trainer: Any, meter: Meter, gradients: GradientBytes) -> dict[str, int]:
    """Exact bytes on the device with the highest peak in training."""
    device = meter.fullest("train")
    place = device if trainer.args.device.type == "cuda" else CPU
    weights = bytes_by_device(weight_tensors(trainer.model))
    states = bytes_by_device(optimizer_tensors(trainer.model, trainer.optimizer))
    return {
        "weights": weights.get(place, 0),
        "gradients": gradients.found.get(place, 0),
        "optimizer": states.get(place, 0),
        "context": meter.context(device),
    }


def final_metrics(job: Job, trainer: Trainer) -> dict[str, float | None]:
    """The evaluation of the final weights, {} without evaluation rows; None for values that are not finite.

    From the log if it is there, else evaluated now. Every process must call it before weights are saved.
    """
    if trainer.eval_dataset is None:
        return {}
    state, step = trainer.state, trainer.state.global_step
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        step = best_step(trainer)
    rows = [row for row in state.log_history if row["step"] == step and "eval_loss" in row]
    if not rows:
        with _autocast(job, trainer), placed_in_file(job):
            rows = [trainer.evaluate()]
    return {"step": step} | numbers(rows[-1], _NOT_METRICS)


def _autocast(job: Job, trainer: Trainer) -> contextlib.AbstractContextManager[Any]:
    """The mixed precision around training, if the plan has one because upstream does not set it."""
    dtype = job.runtime.autocast
    if not dtype:
        return contextlib.nullcontext()
    autocast: contextlib.AbstractContextManager[Any] = torch.autocast(
        trainer.args.device.type, dtype=getattr(torch, dtype)
    )
    return autocast


def find_checkpoint(job: Job) -> Path | None:
    """The checkpoint to resume, None to start from the beginning: rank 0's choice, the same on every rank.

    EFFILAUNCH_RESUME is `auto` (the run's last complete one, else the one of another run that it began with)
    or a folder. RecipeError, on every rank, if that is no complete checkpoint, or one rank does not see it.
    """
    found: Path | None
    found, wrong = of_rank_0(_chosen(job) if rank() == 0 else None)
    if found is None:
        return None
    by_rank = of_all(wrong or (_awaited(found) if rank() else None))
    lacking = [number for number, defect_there in enumerate(by_rank) if defect_there is not None]
    if lacking:
        who = f" on rank {lacking[0]}" if lacking[0] else ""
        raise RecipeError(
            Problem(
                "no-checkpoint",
                f"no complete checkpoint{who}: {by_rank[lacking[0]]}",
                file=str(found),
                hint="the run directory must be a folder that all nodes share" if who else None,
            )
        )
    print(f"resuming from {found}")
    return found


def _chosen(job: Job) -> tuple[Path | None, str | None]:
    """The checkpoint of the environment, and what is wrong with it."""
    asked = os.environ.get(RESUME_VARIABLE)
    if not asked:
        return None, None
    found = (
        (_last_checkpoint(job.checkpoints) or read_origin(job.run_dir)) if asked == "auto" else Path(asked)
    )
    if found is None:
        print("no checkpoint to resume; starting from the beginning")
        return None, None
    return found, defect(found, hashes=False)


def _awaited(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint that rank 0 found complete: a network filesystem may show it late."""
    until = time.monotonic() + SEEN_S
    while (wrong := defect(checkpoint, hashes=False)) is not None and time.monotonic() < until:
        time.sleep(0.5)
    return wrong


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; prints which others are skipped, and why."""
    complete = complete_checkpoints(folder)
    for path, wrong in incomplete_checkpoints(folder).items():
        print(f"{path} is skipped: {wrong}")
    return complete[max(complete)] if complete else None


def _counts_at(checkpoint: Path | None) -> dict[str, int]:
    """Steps and tokens before a checkpoint."""
    state = {}
    if checkpoint is not None:
        state = parse_json((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return {name: int(state.get(name, 0)) for name in ("global_step", "num_input_tokens_seen")}


def _count_parameters(model: Any) -> tuple[int, int]:
    """(trainable, all) parameters; sharded and 4-bit ones by their full shape."""
    trainable = total = 0
    reference = "ref" in getattr(model, "peft_config", {})  # trl's frozen copy of a continued adapter
    for name, parameter in model.named_parameters():
        if reference and ".ref." in name:
            continue
        count = getattr(parameter, "ds_numel", None) or parameter.numel()
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            count = int(torch.Size(state.shape).numel())
        total += count
        if parameter.requires_grad:
            trainable += count
    return trainable, total


def _footprint(model: Any) -> int:
    """Bytes of parameters and buffers; placeholders of ZeRO-3 count with their full size."""
    sharded = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_numel")]
    hidden = sum((item.ds_numel - item.numel()) * item.element_size() for item in sharded)
    if hasattr(model, "get_memory_footprint"):
        return int(model.get_memory_footprint() + hidden)
    held = (*model.parameters(), *model.buffers())
    return int(sum(one.numel() * one.element_size() for one in held) + hidden)
