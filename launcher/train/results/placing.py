"""Where a trained model goes to be tried: one GPU, all that there is, or the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from launcher.train.job import Job
from launcher.train.results.trained import MODEL, is_trained, trust

SPARE = 2**30
"""Bytes that stay free on a GPU for the cache of an answer, activations and the kernels' own space."""
_BITS = {"int8": 8.0, "nf4": 4.5, "fp4": 4.5}
"""Bits a quantised weight takes with its constants: one for each row, one for each 64 weights."""

Place = Literal["cpu", "cuda", "auto"]


def placement(weights: int, free: Sequence[int]) -> Place:
    """Where weights of that many bytes go, by the free bytes of each GPU.

    `cuda`: the first GPU holds them, and SPARE beside them. `auto`: it does not, so accelerate spreads the
    layers over all GPUs and, behind them, the CPU's memory. `cpu`: there is no GPU.
    """
    if not free:
        return "cpu"
    return "cuda" if weights + SPARE <= free[0] else "auto"


def free_device_bytes() -> list[int]:
    """Free memory of each GPU that this process sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [int(torch.cuda.mem_get_info(number)[0]) for number in range(torch.cuda.device_count())]


def place_of(job: Job, folder: Path) -> Place:
    """`placement` of what lies in `folder`, on this machine; no weight is read for it."""
    free = free_device_bytes()
    if not free or job.model.device_map not in (None, "local"):
        return placement(0, free)  # the recipe's own map holds
    return placement(weight_bytes(job, folder), free)


def weight_bytes(job: Job, folder: Path) -> int:
    """Bytes of the model's weights as `trained_model` loads them, from its configuration alone."""
    import torch

    model = skeleton(job, folder if is_trained(folder) == MODEL else None)
    if is_trained(folder) == MODEL:
        return int(sum(parameter.numel() for parameter in model.parameters()) * model.dtype.itemsize)
    adapter = sum(file.stat().st_size for file in folder.glob("adapter_model.*"))
    asked, quantization = job.model.dtype, job.model.quantization
    dtype = model.dtype if asked == "auto" else getattr(torch, asked)
    inner = 0
    if quantization != "none":
        kept = {id(part) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and id(m) not in kept]
        inner = sum(module.weight.numel() for module in linears)
        adapter += int(inner * _BITS[quantization["type"]] / 8)
    outer = sum(parameter.numel() for parameter in model.parameters()) - inner
    return int(outer * dtype.itemsize + adapter)


def skeleton(job: Job, folder: Path | None = None) -> Any:
    """The base model without weights, of the checkpoint's dtype; of a saved model where a folder is given."""
    import torch
    from transformers import AutoConfig

    from launcher.train.model.models import auto_class, load_config

    config = load_config(job) if folder is None else AutoConfig.from_pretrained(str(folder), **trust(job))
    with torch.device("meta"):
        model = auto_class(job.task.name).from_config(config, **trust(job))
    return model


def settle(model: Any, place: Place) -> Any:
    """Evaluation mode, and on the GPU where it goes there; quantised and spread models stay in place.

    Returns the device that inputs belong on.
    """
    import torch

    model.eval()
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if place == "cuda" and not placed:
        model.to("cuda")
    hook = getattr(model, "_hf_hook", None)  # accelerate's: of a spread model, some parameters are elsewhere
    device = getattr(hook, "execution_device", None)
    return next(model.parameters()).device if device is None else torch.device(device)


def slow_places(model: Any) -> str | None:
    """A word about layers that are not on a GPU though there is one; None where all are."""
    import torch

    places = [str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()]
    away = [place for place in places if place in ("cpu", "disk")]
    if not away or not torch.cuda.is_available():
        return None
    where = " and ".join(sorted({"the CPU's memory" if one == "cpu" else "the disk" for one in away}))
    return (
        f"the GPUs do not hold the model: {len(away)} of its {len(places)} parts are in {where} and are sent "
        "to a GPU for every token, which takes seconds a token for billions of weights"
    )
