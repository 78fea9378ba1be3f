"""FSDP2 in the workers: its configuration, its units, and the trained weights gathered from the shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.engines.engine import TrainEngine, stand_in_for_launcher
from launcher.train.job import Job, copies
from launcher.train.upstream.fsdp_seams import shard_over_cpu
from launcher.train.upstream.model_seams import layer_classes, leave_embedding_out
from launcher.train.upstream.trainer_seams import save_state_dict


class TrainFsdp(TrainEngine):
    pickled_enum = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")

    def before_arguments(self, job: Job) -> None:
        stand_in_for_launcher()
        if job.fsdp.cpu_offload:
            # Read when the process group is made: norms of gradients in host memory go through gloo.
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}

    def arguments(self, job: Job) -> dict[str, Any]:
        fields: dict[str, Any] = {"fsdp": True, "fsdp_config": job.fields(job.fsdp)}
        if job.sharding.cp_size > 1:
            from accelerate import ParallelismConfig

            fields["parallelism_config"] = ParallelismConfig(
                cp_size=job.sharding.cp_size, dp_shard_size=copies(job)
            )
        return fields

    def after_arguments(self, job: Job) -> None:
        if job.trainer.use_cpu:
            shard_over_cpu()
        if job.fsdp.cpu_ram_efficient_loading:
            os.environ["ACCELERATE_USE_FSDP"] = "true"  # for from_pretrained; accelerate sets it later

    def check_model(self, job: Job, model: Any) -> None:
        """Without layers the complete model would be one unit, which every rank gathers at once."""
        leave_embedding_out(model)
        if not layer_classes(model):
            raise RecipeError(
                Problem(
                    "fsdp-no-layers",
                    f"{type(model).__name__} does not name the layers that FSDP gathers one by one",
                    path="sharding.engine",
                    hint="name their classes in its _no_split_modules, or use sharding.engine: deepspeed",
                )
            )

    def is_set_up(self, distributed_type: str) -> bool:
        return distributed_type == "FSDP"

    def weights_to_save(self, trainer: Any) -> dict[str, Any] | None:
        """With trainer.save_only_model accelerate would gather the frozen base of an adapter, too."""
        plugin = trainer.accelerator.state.fsdp_plugin
        if "FULL" not in str(plugin.state_dict_type) or not hasattr(trainer.model, "peft_config"):
            return None
        return gathered(trainer.model, trained_alone=True)

    def save_trained(self, job: Job, trainer: Any, folder: Path) -> None:
        """Its checkpoints are shards, and the Trainer saves nothing else: rank 0 gathers what was trained.

        Of an adapter that leaves out the base, which stays sharded.
        """
        save_state_dict(trainer, folder, gathered(trainer.model, trained_alone=job.has_adapter))
        if hasattr(trainer, "drop_reference"):  # of DPO
            trainer.drop_reference(folder)


TRAIN_ENGINE = TrainFsdp()


def gathered(model: Any, *, trained_alone: bool) -> dict[str, Any]:
    """Name -> complete tensor in host memory, on rank 0; {} on the others.

    Names of one parameter have one tensor, so that save_pretrained sees that they are tied.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_alone)
    state = dict(get_model_state_dict(model, options=options))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(parameter), name)]
    return state
