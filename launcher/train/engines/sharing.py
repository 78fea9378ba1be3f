"""Ranks that share one copy's work, as the libraries want to be told (launcher/planner/parallel.py decides).

Tensor parallelism: DeepSpeed's AutoTP, which ds_config.json configures. Sequence parallelism: accelerate
registers DeepSpeed's Ulysses attention. Context parallelism: accelerate with FSDP2.
"""

from __future__ import annotations

from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job, world_size


def ranks_of_copy(job: Job) -> int:
    """Ranks that compute one copy's micro-batch together."""
    sizes = job.sharding.tp_size, job.sharding.sp_size, job.sharding.cp_size
    return int(sizes[0] * sizes[1] * sizes[2])


def copies(job: Job) -> int:
    """Data-parallel copies among the ranks."""
    return world_size() // ranks_of_copy(job)


def parallelism_config(job: Job) -> Any | None:
    """accelerate's ParallelismConfig for TrainingArguments; None where it needs none."""
    tokens, context = job.sharding.sp_size, job.sharding.cp_size
    if tokens == context == 1:
        return None
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    if context > 1:
        return ParallelismConfig(cp_size=context, dp_shard_size=copies(job))
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=job.model.attn_implementation
    )
    return ParallelismConfig(
        dp_replicate_size=copies(job), sp_size=tokens, sp_backend="deepspeed", sp_handler=handler
    )


def check_shared(job: Job, model: Any) -> None:
    """RecipeError where a loaded model attends otherwise than the plan took it to."""
    if job.sharding.sp_size * job.sharding.cp_size == 1:
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
