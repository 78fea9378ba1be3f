"""The result of a finished run, loaded outside training: its folder, tokenizer and model, and their place."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Literal

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError
from launcher.files.checkpoint import complete_checkpoints, defect
from launcher.files.safe_files import parse_json
from launcher.train.job import Job
from launcher.train.model.adapters import check_restored, first_lines
from launcher.train.model.processing import first_line, load_processing, own_code
from launcher.train.model.processors import read_processor
from launcher.train.model.weights import weight_files
from launcher.train.tasks import train_task

ADAPTER, MODEL = "adapter", "model"
"""Names of the folders in RUN_DIR, and of their contents."""
_MODULE = "model.safetensors"
"""Weights of a module that has no configuration."""
_WEIGHTS = ("*.safetensors", "adapter_model.bin", "pytorch_model*.bin")
_PROCESSING = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_ERROR = 600
"""Characters of an error that lists tensors."""
_ANYWHERE = ("eager", "sdpa", "varlen")
"""Attention kernels that need neither a GPU nor an extra package; `varlen` is read as sdpa."""
SPARE = 2**30
"""Bytes left free on a GPU for the KV cache, activations and workspaces of kernels."""
_BITS = {"int8": 8.0, "nf4": 4.5, "fp4": 4.5}
"""Bits of a quantised weight with its constants: one per row, one per 64 weights."""

Place = Literal["cpu", "cuda", "auto"]


def replaced(job: Job, changes: dict[str, Any], run_dir: Path | None = None) -> Job:
    """The job with other values for these settings, and with another run directory if given."""
    settings = {
        name: {"value": value, "source": "default", "by": "results", "reason": ""}
        for name, value in changes.items()
    }
    plan = {**job.plan, "settings": {**job.plan["settings"], **settings}}
    return Job(run_dir or job.run_dir, plan)


def _checkpoint_folder(job: Job, name: str) -> Path:
    """RUN_DIR/checkpoints/NAME. RecipeError if that is not a complete checkpoint with weights."""
    folder = job.checkpoints / name
    if name in ("", "..") or Path(name).name != name or not os.path.isdir(folder):  # noqa: PTH112
        names = [path.name for _, path in sorted(complete_checkpoints(job.checkpoints).items())]
        message = f"the run has no checkpoint {name}; it has {', '.join(names) or 'none'}"
        raise RecipeError(Problem("no-checkpoint", message, file=str(job.run_dir)))
    wrong = defect(folder, hashes=False)
    if wrong is not None:
        raise RecipeError(Problem("no-checkpoint", f"incomplete checkpoint: {wrong}", file=str(folder)))
    if is_trained(folder) == ADAPTER or (is_trained(folder) and weight_files(folder)):
        return folder
    raise RecipeError(
        Problem(
            "checkpoint-without-weights",
            "has the shards of its engine, and no weights that can be read without it",
            file=str(folder),
            hint="use the run's result, without --checkpoint",
        )
    )


def trained_folder(job: Job, checkpoint: str | None = None) -> Path:
    """RUN_DIR/adapter or RUN_DIR/model, or a checkpoint by its name. RecipeError when there is none."""
    if checkpoint is not None:
        return _checkpoint_folder(job, checkpoint)
    for kind in (ADAPTER, MODEL):
        if is_trained(job.run_dir / kind) == kind:
            return job.run_dir / kind
    raise RecipeError(
        Problem(
            "not-trained",
            "has neither adapter/ nor model/",
            file=str(job.run_dir),
            hint="run the recipe to its end first",
        )
    )


def is_trained(folder: Path) -> str | None:
    """The content of a folder by its configuration: `adapter`, `model`, or None."""
    if (folder / "adapter_config.json").is_file():
        return ADAPTER
    return MODEL if any((folder / name).is_file() for name in ("config.json", _MODULE)) else None


def check_readable(folder: Path) -> None:
    """RecipeError if the configuration or the weights of a result are missing or damaged."""
    config = folder / ("adapter_config.json" if is_trained(folder) == ADAPTER else "config.json")
    try:
        is_bare = not config.is_file() and (folder / _MODULE).is_file()
        if not is_bare and not isinstance(parse_json(config.read_text(encoding="utf-8")), dict):
            raise RecipeError(_damaged(config, "it is no JSON object"))
    except (OSError, ValueError) as error:
        raise RecipeError(_damaged(config, first_line(error))) from error
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    """Reads only the headers, which have the length of the file."""
    from safetensors import SafetensorError, safe_open

    files = [path for kind in _WEIGHTS for path in sorted(folder.glob(kind))]
    if not files:
        raise RecipeError(_damaged(folder, "it has no weights"))
    for file in files:
        try:
            if file.suffix == ".safetensors":
                safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise RecipeError(_damaged(file, first_line(error))) from error


def _damaged(file: Path, why: str) -> Problem:
    hint = "restore the file as the run wrote it, or run the recipe again"
    return Problem("damaged-result", f"the result cannot be read: {why}", file=str(file), hint=hint)


def trained_processing(job: Job, folder: Path) -> Any:
    """The tokenizer, or image processor, that was saved with the result: with added tokens and template.

    For a checkpoint without one, that of the recipe.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    if job.task.made_by_hooks:
        return train_task(job.task.name).processing(job)
    is_checkpoint = folder.parent.name == job.checkpoints.name
    if is_checkpoint and not any((folder / name).is_file() for name in _PROCESSING):
        return load_processing(job)
    try:
        if job.task.sees_images:
            # Its files have these sizes too, but a class's own values would come before them.
            return read_processor(str(folder), trust(job), {} if job.tiny else job.model.image_sizes)
        if not job.task.reads_tokens:
            return AutoImageProcessor.from_pretrained(str(folder), backend="pil", **trust(job))
        return AutoTokenizer.from_pretrained(str(folder), **trust(job))
    except (EffilaunchError, MemoryError):
        raise
    except Exception as error:  # tokenizers' own errors have no class of their own
        kind = "image processor" if not job.task.reads_tokens else "tokenizer"
        kind = "processor" if job.task.sees_images else kind
        raise own_code(error, str(folder)) or RecipeError(
            _damaged(folder, f"its {kind}: {first_line(error)}")
        ) from error


def trust(job: Job) -> dict[str, bool]:
    """Always explicit: otherwise transformers asks at the terminal."""
    return {"trust_remote_code": bool(job.model.trust_remote_code)}


def prepared_record(job: Job) -> dict[str, Any]:
    """The content of data.json; {} for a run without it."""
    path = job.run_dir / "data.json"
    try:
        found = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise RecipeError(_damaged(path, first_line(error))) from error
    if not isinstance(found, dict):
        raise RecipeError(_damaged(path, "it is no JSON object"))
    return found


def portable(job: Job) -> Job:
    """The job with an attention kernel that this machine has: the run's own if there is a GPU."""
    import torch

    asked = job.model.attn_implementation
    if asked is None or asked in _ANYWHERE or torch.cuda.is_available():
        return job
    return replaced(job, {"model.attn_implementation": None})


def trained_model(job: Job, folder: Path, processing: Any, *, device_map: str | None = None) -> Any:
    """The model of `folder`, an adapter's on its base, as a single process loads it outside training.

    device_map: spreads it over the devices, instead of the plan's placement. MachineError if it does not fit.
    """
    job = portable(job)
    if device_map is not None:
        job = replaced(job, {"model.device_map": device_map})
    try:
        return _loaded(job, folder, processing, device_map)
    except ValueError as error:
        if device_map is None or "dispatched on the CPU or the disk" not in str(error):
            raise
        raise MachineError(
            Problem(
                "model-too-large",
                f"the GPUs do not hold the model, and its quantised layers cannot be elsewhere: "
                f"{first_line(error)}",
                path="model.quantization",
                hint="free the GPUs' memory, or use larger or more of them",
            )
        ) from error


def _loaded(job: Job, folder: Path, processing: Any, device_map: str | None) -> Any:
    from launcher.train.model.models import auto_class, class_options, leave_out_mtp, load_model

    if is_trained(folder) == MODEL:
        spread = class_options(job) | ({} if device_map is None else {"device_map": device_map})
        kind = auto_class(job.task.name)
        model = kind.from_pretrained(str(folder), dtype="auto", **spread, **trust(job))
        leave_out_mtp(model)  # a run of 0.2.0 left the number in the configuration
        return model
    # The embedding grows by the run's added tokens here, as it did for training.
    base = load_model(job, processing, prepared_record(job).get("labels"), distributed=False)
    return on_base(base, folder)


def on_base(base: Any, folder: Path, **options: Any) -> Any:
    """The adapter of `folder` on its base model. RecipeError if it is not that model's."""
    import torch
    from peft import PeftModel

    from launcher.train.model.experts import seen_as_plain
    from launcher.train.upstream.model_seams import adapters_by_own_names

    try:
        with (
            seen_as_plain(base),
            adapters_by_own_names(),
            warnings.catch_warnings(),
        ):  # peft continues with new values
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(base, str(folder), **options)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError, UserWarning) as error:
        raise RecipeError(
            Problem(
                "adapter-mismatch",
                f"the adapter does not fit the model: {first_lines(error)[:_ERROR]}",
                file=str(folder),
                path="model.name_or_path",
                hint="restore the base model that the run was trained on, and the run's own adapter",
            )
        ) from error
    check_restored(adapted, str(folder))
    return adapted


def placement(weights: int, free: int | None) -> Place:
    """Where to place so many bytes of weights, by the free bytes of the first GPU.

    `cuda`: it holds them and SPARE. `auto`: it does not, so accelerate spreads the layers over all GPUs and
    then the CPU's memory. `cpu`: there is no GPU.
    """
    if free is None:
        return "cpu"
    return "cuda" if weights + SPARE <= free else "auto"


def free_device_bytes() -> int | None:
    """Free memory of the first GPU that this process sees; None without one.

    Asking another one would open a context on it, of some 500 MB.
    """
    import torch

    return int(torch.cuda.mem_get_info(0)[0]) if torch.cuda.is_available() else None


def place_of(job: Job, folder: Path) -> Place:
    """`placement` of the model in `folder` on this machine, without reading a weight."""
    free = free_device_bytes()
    if free is None or job.model.device_map not in (None, "local"):
        return placement(0, free)  # the recipe's own map is used
    return placement(weight_bytes(job, folder), free)


def weight_bytes(job: Job, folder: Path) -> int:
    """Bytes of the model's weights as `trained_model` loads them, from its configuration alone."""
    import torch

    from launcher.train.model.experts import expert_parameters

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
        if quantization["type"] != "int8":
            inner += sum(getattr(module, name).numel() for _, module, name in expert_parameters(model))
        adapter += int(inner * _BITS[quantization["type"]] / 8)
    outer = sum(parameter.numel() for parameter in model.parameters()) - inner
    return int(outer * dtype.itemsize + adapter)


def skeleton(job: Job, folder: Path | None = None) -> Any:
    """The base model (of a folder, if given, the saved one) without weights, with the checkpoint's dtype."""
    import torch
    from transformers import AutoConfig

    from launcher.train.model.models import auto_class, load_config

    config = load_config(job) if folder is None else AutoConfig.from_pretrained(str(folder), **trust(job))
    with torch.device("meta"):
        model = auto_class(job.task.name).from_config(config, **trust(job))
    return model


def settle(model: Any, place: Place) -> Any:
    """Set evaluation mode and move the model to its place; quantised and spread models stay.

    Returns the device for inputs.
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
    """A warning about layers that are not on a GPU although there is one; None without any."""
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
