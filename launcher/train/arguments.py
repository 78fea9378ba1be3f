"""The plan's `trainer` settings as the argument class of its task."""

from __future__ import annotations

import os

from transformers import TrainingArguments

from launcher.train.engines.sharing import parallelism_config
from launcher.train.job import Job
from launcher.train.loopback import keep_stores_local
from launcher.train.tasks import train_task


def make_arguments(job: Job) -> TrainingArguments:
    """TrainingArguments, or the subclass of the plan's task; folders and the DeepSpeed file are the run's.

    Settles device and process group. MachineError when the task's package is missing.
    """
    fields = job.fields(job.trainer)
    fields["output_dir"] = str(job.checkpoints)
    if job.ds_config is not None:
        fields["deepspeed"] = str(job.ds_config)
    if job.engine == "fsdp":
        fields |= {"fsdp": True, "fsdp_config": job.fields(job.fsdp)}
    shared = parallelism_config(job)
    if shared is not None:
        fields["parallelism_config"] = shared
    kind, own = train_task(job.task.name).arguments(job)
    keep_stores_local()
    args: TrainingArguments = kind(**fields, **own)
    _ = args.device  # settles device and process group now
    if job.engine == "fsdp" and job.fsdp.cpu_ram_efficient_loading:
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # from_pretrained asks for it; accelerate sets it later
    return args
