"""DeepSpeed in the workers: its configuration, its process group, universal checkpoints that are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from launcher.files.safe_files import read_json
from launcher.recipe.env import has_reference
from launcher.train.engines.engine import TrainEngine, innermost, stand_in_for_launcher
from launcher.train.engines.universal import MODEL_FILES, STAGES, STATES, universal_folder
from launcher.train.job import Job, copies, resolve_references


class TrainDeepSpeed(TrainEngine):
    pickled_enum = STAGES
    steps_in_backward = True

    def before_arguments(self, job: Job) -> None:
        stand_in_for_launcher()

    def arguments(self, job: Job) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if job.ds_config is not None:
            config = read_json(job.ds_config)
            fields["deepspeed"] = resolve_references(config) if has_reference(config) else str(job.ds_config)
        if job.sharding.sp_size > 1:
            from accelerate import ParallelismConfig
            from accelerate.utils import DeepSpeedSequenceParallelConfig

            handler = DeepSpeedSequenceParallelConfig(
                sp_seq_length_is_variable=True, sp_attn_implementation=job.model.attn_implementation
            )
            fields["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=copies(job), sp_size=job.sharding.sp_size, sp_backend="deepspeed",
                sp_handler=handler,
            )  # fmt: skip
        return fields

    def after_arguments(self, job: Job) -> None:
        """On a CPU the Trainer does not initialise DeepSpeed's communication, which ZeRO-3 needs to load."""
        if job.trainer.use_cpu:
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo")

    def trainer_class(self, job: Job) -> Any:
        if job.sharding.sp_size == 1:
            return super().trainer_class(job)
        from launcher.train.engines.sequence import SequenceTrainer

        return SequenceTrainer

    def is_set_up(self, distributed_type: str) -> bool:
        return distributed_type == "DEEPSPEED"

    def weights_to_save(self, trainer: Any) -> dict[str, Any] | None:
        """Below stage 3 each rank holds all weights, and rank 0 alone copies what was trained.

        accelerate 1.15 clones the complete state dict into host memory, on every rank and with the frozen
        base (accelerator.py `get_state_dict`). Copies are needed: ZeRO keeps trained weights in one buffer,
        which save_pretrained takes for shared tensors. Stage 3 and AutoTP gather together.
        """
        engine = trainer.deepspeed
        if engine.zero_optimization_stage() == 3 or engine.autotp_size() > 1:
            return None
        return copied_trained(trainer.accelerator.unwrap_model(engine)) if trainer.args.should_save else {}

    def repair(self, trainer: Any, checkpoint: Path) -> None:
        if (universal := universal_folder(checkpoint)) is not None:
            trainer.add_callback(OwnStates(universal))


TRAIN_ENGINE = TrainDeepSpeed()


class OwnStates(TrainerCallback):
    """Restores each parameter group's own values and steps, and the model's buffers.

    Stage 3 of deepspeed 0.19.8 (runtime/zero/stage3.py load_hp_checkpoint_state_from_checkpoint_dir_stage3)
    gives all groups one tensor as their step, which each group's update then increments: from the second step
    on Adam corrects its bias for a later step than it has reached. It also gives the first group's values to
    all groups, so that biases and norms begin to decay. No stage reads the model's buffers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        saved = torch.load(self._folder / STATES, map_location="cpu", weights_only=False)
        optimizer = innermost(given["optimizer"])
        restore_groups(optimizer, saved["param_groups"])
        model = torch.load(self._folder / MODEL_FILES[0], map_location="cpu", weights_only=False)
        buffers = dict(given["model"].named_buffers())
        for name, value in model["module"].items():
            buffers[name].copy_(value)


def copied_trained(model: Any) -> dict[str, Any]:
    """The state dict with copies of trained weights in host memory.

    The frozen ones of an adapter's base stay where they are: peft reads few of them, or none.
    """
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    if not hasattr(model, "peft_config"):
        frozen = set()
    return {
        name: value if name in frozen or not torch.is_tensor(value) else value.to("cpu", copy=True)
        for name, value in model.state_dict().items()
    }


def restore_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """The groups' own values, and a step of its own for each parameter."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
