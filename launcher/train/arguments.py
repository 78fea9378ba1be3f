"""The plan's `trainer` settings as the argument class of its task."""

from __future__ import annotations

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
    return args
