"""The plan's `trainer` settings as the argument class of its task."""

from __future__ import annotations

import os
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from launcher.train.job import Job
from launcher.train.loopback import keep_stores_local
from launcher.train.sharing import parallelism_config


def make_arguments(job: Job) -> TrainingArguments:
    """TrainingArguments, or the subclass of the plan's task; folders and the DeepSpeed file are the run's.

    Settles device and process group. MachineError when the task's package is missing.
    """
    task = job.value("task")
    fields = job.section("trainer")
    fields["output_dir"] = str(job.checkpoints)
    if job.ds_config is not None:
        fields["deepspeed"] = str(job.ds_config)
    if job.engine == "fsdp":
        fields |= {"fsdp": True, "fsdp_config": job.section("fsdp")}
    shared = parallelism_config(job)
    if shared is not None:
        fields["parallelism_config"] = shared
    kind: Any = TrainingArguments
    if task == "seq2seq-lm":
        kind = Seq2SeqTrainingArguments
    elif task == "dpo":
        from launcher.train.dpo import DPOConfig

        kind = DPOConfig
        fields["max_length"] = job.value("data.max_length")
    keep_stores_local()
    args = kind(**fields)
    _ = args.device  # settles device and process group now
    if job.engine == "fsdp" and job.value("fsdp.cpu_ram_efficient_loading"):
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # from_pretrained asks for it; accelerate sets it later
    return args
