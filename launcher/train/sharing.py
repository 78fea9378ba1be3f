"""Ranks that share one copy's work, as the libraries want to be told (launcher/plan/parallel.py decides).

Tensor parallelism: under DeepSpeed by ds_config.json (AutoTP); else transformers cuts the layers while it
reads the weights. Sequence parallelism: accelerate registers DeepSpeed's Ulysses attention. Context
parallelism: accelerate with FSDP2.
"""

from __future__ import annotations

from typing import Any

from launcher.errors import Problem, RecipeError, RunFailed
from launcher.train.job import Job, world_size


def ranks_of_copy(job: Job) -> int:
    """Ranks that compute one copy's micro-batch together."""
    sizes = job.value("sharding.tp_size"), job.value("sharding.sp_size"), job.value("sharding.cp_size")
    return int(sizes[0] * sizes[1] * sizes[2])


def copies(job: Job) -> int:
    """Data-parallel copies among the ranks."""
    return world_size() // ranks_of_copy(job)


def parallelism_config(job: Job) -> Any | None:
    """accelerate's ParallelismConfig for TrainingArguments; None where it needs none."""
    tokens, context = job.value("sharding.sp_size"), job.value("sharding.cp_size")
    if tokens == context == 1:
        return None  # the Trainer reads tensor parallelism off the model
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    if context > 1:
        return ParallelismConfig(cp_size=context, dp_shard_size=copies(job))
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=job.value("model.attn_implementation")
    )
    return ParallelismConfig(
        dp_replicate_size=copies(job), sp_size=tokens, sp_backend="deepspeed", sp_handler=handler
    )


def distributed_config(job: Job) -> Any | None:
    """transformers' DistributedConfig for from_pretrained, which then cuts the layers; None elsewhere."""
    size = job.value("sharding.tp_size")
    if size == 1 or job.ds_config is not None:
        return None
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=size)


def check_shared(job: Job, model: Any) -> None:
    """RecipeError where a loaded model attends otherwise than the plan took it to."""
    if job.value("sharding.sp_size") * job.value("sharding.cp_size") == 1:
        return
    config = model.config.get_text_config()
    windowed = getattr(config, "sliding_window", None) is not None
    if windowed or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise RecipeError(
            Problem(
                "parallel-model",
                f"{type(model).__name__} attends within a window, which sequence and context parallelism do "
                "not keep",
                path="sharding",
                hint="drop sp_size and cp_size; ZeRO-3 takes such models",
            )
        )


def no_cpu(error: ValueError) -> RunFailed | None:
    """accelerate's refusal to cut anything over CPU processes in our words; None for another error."""
    if "ParallelismConfig is only compatible" not in str(error):
        return None
    return RunFailed(
        Problem(
            "engine-mismatch",
            "accelerate sets up neither tensor nor context parallelism over CPU processes",
            path="sharding",
            hint="use sharding.engine: deepspeed on a CPU, where tp_size and sp_size run",
        )
    )
