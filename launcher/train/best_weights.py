"""The best checkpoint's weights at the end of a run that went on from a converted checkpoint.

DeepSpeed (0.19.8) would look for every checkpoint of such a run in its universal form (`load_universal`), in
which no run saves one, and the states of the best one may be cut for other ranks. What from_pretrained reads
is the same for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.errors import Problem, RunFailed
from launcher.train.job import rank


def load_weights(model: Any, checkpoint: Path) -> None:
    """Read a checkpoint's weights, or its adapter's, into a model under DeepSpeed; every rank must call it.

    Its optimizer keeps what it had. RunFailed where a weight is not there.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from safetensors import safe_open

    places: dict[str, Path] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            places |= dict.fromkeys(stream.keys(), file)
    for name, parameter in model.named_parameters():
        if hasattr(model, "peft_config") and not parameter.requires_grad:
            continue  # the base is not in the checkpoint
        key = name.replace("modules_to_save.default.", "").replace(".default", "")
        if key not in places:
            raise RunFailed(_absent(checkpoint, key))
        with GatheredParameters([parameter], modifier_rank=0):
            if rank() == 0 or not hasattr(parameter, "ds_id"):
                with safe_open(places[key], "pt") as stream:
                    parameter.data.copy_(stream.get_tensor(key))


def _absent(checkpoint: Path, key: str) -> Problem:
    return Problem(
        "best-without-weights",
        f"the best checkpoint holds no weight {key} that could be read without DeepSpeed's states",
        file=str(checkpoint),
        path="trainer.load_best_model_at_end",
        hint="go on with trainer.load_best_model_at_end: false; ZeRO-3 writes whole weights with "
        "stage3_gather_16bit_weights_on_model_save",
    )
