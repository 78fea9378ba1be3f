"""TrainingArguments and Trainer of a plan, and the training itself, measured."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from launcher.errors import Problem, RecipeError, RunFailed
from launcher.train.callbacks import AlreadyTrained, Metrics
from launcher.train.data.build import Data
from launcher.train.job import Job, rank, world_size
from launcher.train.memory_meter import measure_peak

RESUME_VARIABLE = "EFFILAUNCH_RESUME"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run took."""

    seconds: float
    """Wall time of training alone."""
    tokens_before: int
    """Tokens counted by the run that was resumed."""
    peak: int
    """Peak bytes, the largest over the processes."""
    method: str
    footprint: int
    """Bytes of the model's parameters and buffers before training."""
    trainable_params: int
    total_params: int


def make_arguments(job: Job) -> TrainingArguments:
    """The plan's TrainingArguments; folders and the DeepSpeed file come from the run directory."""
    fields = job.section("trainer")
    fields.setdefault("seed", job.seed)
    fields.setdefault("logging_nan_inf_filter", False)
    if fields.get("include_num_input_tokens_seen") in (None, False, "no"):
        fields["include_num_input_tokens_seen"] = "non_padding"
    fields["output_dir"] = str(job.checkpoints)
    if job.ds_config is not None:
        fields["deepspeed"] = str(job.ds_config)
    args = TrainingArguments(**fields)
    _ = args.device  # settles device and process group now
    return args


def make_trainer(job: Job, args: TrainingArguments, model: Any, tokenizer: Any, data: Data) -> Trainer:
    """A Trainer whose batches are padded with labels of their own."""
    on_gpu = args.device.type == "cuda"
    collator = DataCollatorForSeq2Seq(tokenizer, padding=True, pad_to_multiple_of=8 if on_gpu else None)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[Metrics(job.run_dir / "metrics.jsonl", write=rank() == 0)],
    )
    check_engine(job, trainer)
    return trainer


def check_engine(job: Job, trainer: Trainer) -> None:
    """RunFailed when accelerate set up another engine or fewer processes than the plan says.

    It does so without a word, e.g. for ACCELERATE_USE_CPU beside a DeepSpeed config.
    """
    accelerator = trainer.accelerator
    planned = "deepspeed" if job.ds_config is not None else "ddp"
    found = "deepspeed" if accelerator.distributed_type.value == "DEEPSPEED" else "ddp"
    if (found, accelerator.num_processes) != (planned, world_size()):
        raise RunFailed(
            Problem(
                "engine-mismatch",
                f"planned {planned} over {world_size()} processes, accelerate set up "
                f"{accelerator.distributed_type.value} over {accelerator.num_processes}",
                hint="unset ACCELERATE_* variables of your environment",
            )
        )


def fit(job: Job, trainer: Trainer) -> Measured:
    """Train from the start or from the checkpoint that the environment asks for."""
    checkpoint = find_checkpoint(job)
    model: Any = trainer.model
    footprint = _footprint(model)
    trainable, total = _count_parameters(model)
    on_cuda = trainer.args.device.type == "cuda"
    device_type = "cuda" if on_cuda else "cpu"
    guard = job.value("runtime.autocast")
    autocast: contextlib.AbstractContextManager[Any] = (
        torch.autocast(device_type, dtype=getattr(torch, guard)) if guard else contextlib.nullcontext()
    )
    started = time.monotonic()
    with measure_peak(model, on_cuda=on_cuda) as peak, autocast:
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except AlreadyTrained:
            print(f"the checkpoint {checkpoint} has reached the last step; nothing left to train")
    return Measured(
        seconds=time.monotonic() - started,
        tokens_before=_tokens_at(checkpoint),
        peak=_largest(peak.bytes),
        method=peak.method,
        footprint=footprint,
        trainable_params=trainable,
        total_params=total,
    )


def find_checkpoint(job: Job) -> Path | None:
    """The checkpoint to go on from, None to start afresh.

    EFFILAUNCH_RESUME is `auto` (the run's last one, if any) or a folder; RecipeError without it.
    """
    asked = os.environ.get(RESUME_VARIABLE)
    if not asked:
        return None
    if asked == "auto":
        last = get_last_checkpoint(str(job.checkpoints)) if job.checkpoints.is_dir() else None
        if last is None:
            print("no checkpoint to resume from; starting afresh")
            return None
        found = Path(last)
    else:
        found = Path(asked)
    if not (found / "trainer_state.json").is_file():
        raise RecipeError(
            Problem("no-checkpoint", "no checkpoint: trainer_state.json is not there", file=str(found))
        )
    print(f"resuming from {found}")
    return found


def _tokens_at(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return int(state.get("num_input_tokens_seen", 0))


def _count_parameters(model: Any) -> tuple[int, int]:
    """(trainable, all) parameters; sharded ones in full, 4-bit ones by what they stand for."""
    trainable = total = 0
    for parameter in model.parameters():
        count = getattr(parameter, "ds_numel", None) or parameter.numel()
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            count = int(torch.Size(state.shape).numel())
        total += count
        if parameter.requires_grad:
            trainable += count
    return trainable, total


def _footprint(model: Any) -> int:
    """Bytes of parameters and buffers; ZeRO-3 leaves empty placeholders, whose true size counts."""
    sharded = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_numel")]
    hidden = sum((item.ds_numel - item.numel()) * item.element_size() for item in sharded)
    return int(model.get_memory_footprint() + hidden)


def _largest(value: int) -> int:
    """The largest value over all processes; every process must call it."""
    if not torch.distributed.is_initialized():
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return int(tensor.item())
