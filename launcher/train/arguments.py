"""The plan's `trainer` settings as the argument class of its task."""

from __future__ import annotations

import torch
from transformers import TrainingArguments

from launcher.train.engines import train_engine
from launcher.train.job import Job
from launcher.train.loopback import keep_stores_local
from launcher.train.tasks import train_task


def make_arguments(job: Job) -> TrainingArguments:
    """TrainingArguments, or the subclass of the plan's task; folders and the DeepSpeed file are the run's.

    Initialises device and process group. MachineError when the task's package is missing.
    """
    fields = job.fields(job.trainer)
    fields["output_dir"] = str(job.checkpoints)
    engine = train_engine(job)
    engine.before_arguments(job)
    fields |= engine.arguments(job)
    kind, own = train_task(job.task.name).arguments(job)
    keep_stores_local()
    args: TrainingArguments = kind(**fields, **own)
    _ = args.device  # initialises device and process group
    engine.after_arguments(job)
    settle_tf32()
    return args


def settle_tf32() -> None:
    """Let both of torch's interfaces to tf32 know what TrainingArguments has chosen.

    transformers 5.23 (utils/import_utils.py enable_tf32) sets torch.backends.fp32_precision alone, after
    which the earlier one raises: torch.get_float32_matmul_precision(), which torch.compile calls
    (torch/_inductor/codecache.py), and torch.backends.cuda.matmul.allow_tf32.
    """
    chosen = getattr(torch.backends, "fp32_precision", "none")  # of torch 2.9
    if chosen != "none":
        torch.set_float32_matmul_precision("high" if chosen == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = chosen == "tf32"
