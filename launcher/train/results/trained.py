"""What a finished run has trained, read back outside training: its folder, its tokenizer, its model."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError
from launcher.facts.checkpoint import complete_checkpoints, defect
from launcher.facts.safe_files import parse_json
from launcher.train.job import Job
from launcher.train.model.adapters import first_lines
from launcher.train.model.processing import first_line, load_processing, own_code
from launcher.train.model.weights import weight_files

ADAPTER, MODEL = "adapter", "model"
"""Names of the folders in RUN_DIR, and what lies in them."""
_WEIGHTS = ("*.safetensors", "adapter_model.bin", "pytorch_model*.bin")
_PROCESSING = ("tokenizer_config.json", "preprocessor_config.json")
_ERROR = 600
"""Characters of an error that lists tensors."""
_ANYWHERE = ("eager", "sdpa", "varlen")
"""Attention kernels that need neither a GPU nor a package of their own; `varlen` is read as sdpa."""


def replaced(job: Job, changes: dict[str, Any], run_dir: Path | None = None) -> Job:
    """The job with other values for these settings, and with another run directory where one is given."""
    settings = {
        name: {"value": value, "source": "default", "by": "results", "reason": ""}
        for name, value in changes.items()
    }
    plan = {**job.plan, "settings": {**job.plan["settings"], **settings}}
    return Job(run_dir or job.run_dir, plan)


def _checkpoint_folder(job: Job, name: str) -> Path:
    """RUN_DIR/checkpoints/NAME. RecipeError where that is no whole checkpoint with weights of its own."""
    folder = job.checkpoints / name
    if name in ("", "..") or Path(name).name != name or not os.path.isdir(folder):  # noqa: PTH112
        names = [path.name for _, path in sorted(complete_checkpoints(job.checkpoints).items())]
        message = f"the run has no checkpoint {name}; it has {', '.join(names) or 'none'}"
        raise RecipeError(Problem("no-checkpoint", message, file=str(job.run_dir)))
    wrong = defect(folder, hashes=False)
    if wrong is not None:
        raise RecipeError(Problem("no-checkpoint", f"no whole checkpoint: {wrong}", file=str(folder)))
    if is_trained(folder) == ADAPTER or (is_trained(folder) and weight_files(folder)):
        return folder
    raise RecipeError(
        Problem(
            "checkpoint-without-weights",
            "holds the shards of its engine and no weights that can be read without it",
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
            "holds neither adapter/ nor model/",
            file=str(job.run_dir),
            hint="run the recipe to its end first",
        )
    )


def is_trained(folder: Path) -> str | None:
    """What a folder holds by its configuration: `adapter`, `model`, or None for neither."""
    if (folder / "adapter_config.json").is_file():
        return ADAPTER
    return MODEL if (folder / "config.json").is_file() else None


def check_readable(folder: Path) -> None:
    """RecipeError where the configuration or the weights of a result are gone, cut off, or no such files."""
    config = folder / ("adapter_config.json" if is_trained(folder) == ADAPTER else "config.json")
    try:
        if not isinstance(parse_json(config.read_text(encoding="utf-8")), dict):
            raise RecipeError(_damaged(config, "it is no JSON object"))
    except (OSError, ValueError) as error:
        raise RecipeError(_damaged(config, first_line(error))) from error
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    """Headers alone are read: they say how long a file has to be."""
    from safetensors import SafetensorError, safe_open

    files = [path for kind in _WEIGHTS for path in sorted(folder.glob(kind))]
    if not files:
        raise RecipeError(_damaged(folder, "no weights lie in it"))
    for file in files:
        try:
            if file.suffix == ".safetensors":
                safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise RecipeError(_damaged(file, first_line(error))) from error


def _damaged(file: Path, why: str) -> Problem:
    hint = "bring the file back as the run wrote it, or run the recipe again"
    return Problem("damaged-result", f"what was trained cannot be read: {why}", file=str(file), hint=hint)


def trained_processing(job: Job, folder: Path) -> Any:
    """The tokenizer, or image processor, that was saved with the result: with added tokens and template.

    Of a checkpoint that holds none, the one that the run began with.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    is_checkpoint = folder.parent.name == job.checkpoints.name
    if is_checkpoint and not any((folder / name).is_file() for name in _PROCESSING):
        return load_processing(job)
    try:
        if not job.task.reads_tokens:
            return AutoImageProcessor.from_pretrained(str(folder), backend="pil", **trust(job))
        return AutoTokenizer.from_pretrained(str(folder), **trust(job))
    except (EffilaunchError, MemoryError):
        raise
    except Exception as error:  # tokenizers' own errors have no class of their own
        kind = "image processor" if not job.task.reads_tokens else "tokenizer"
        raise own_code(error, str(folder)) or RecipeError(
            _damaged(folder, f"its {kind}: {first_line(error)}")
        ) from error


def trust(job: Job) -> dict[str, bool]:
    """Said either way: where nothing is said, transformers asks at the terminal."""
    return {"trust_remote_code": bool(job.model.trust_remote_code)}


def prepared_record(job: Job) -> dict[str, Any]:
    """What the preparation of the rows wrote down; nothing for a run without it."""
    path = job.run_dir / "data.json"
    try:
        found = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise RecipeError(_damaged(path, first_line(error))) from error
    if not isinstance(found, dict):
        raise RecipeError(_damaged(path, "it is no JSON object"))
    return found


def portable(job: Job) -> Job:
    """The job with an attention kernel that this machine has: the run's own where there is a GPU."""
    import torch

    asked = job.model.attn_implementation
    if asked is None or asked in _ANYWHERE or torch.cuda.is_available():
        return job
    return replaced(job, {"model.attn_implementation": None})


def trained_model(job: Job, folder: Path, processing: Any, *, device_map: str | None = None) -> Any:
    """The model of `folder`, an adapter's on its base, as a single process loads it outside training.

    device_map: spreads it over the devices, in place of the plan's placement. MachineError where they do not
    hold it.
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
    from launcher.train.model.models import auto_class, load_model

    if is_trained(folder) == MODEL:
        spread = {} if device_map is None else {"device_map": device_map}
        return auto_class(job.task.name).from_pretrained(str(folder), dtype="auto", **spread, **trust(job))
    # The embedding grows by the run's added tokens here, as it did for training.
    base = load_model(job, processing, prepared_record(job).get("labels"), distributed=False)
    return on_base(base, folder)


def on_base(base: Any, folder: Path, **options: Any) -> Any:
    """The adapter of `folder` on its base model. RecipeError where it is not that model's."""
    import torch
    from peft import PeftModel

    try:
        with warnings.catch_warnings():  # peft goes on with new values for what the file lacks
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(base, str(folder), **options)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError, UserWarning) as error:
        raise RecipeError(
            Problem(
                "adapter-mismatch",
                f"the adapter does not fit the model: {first_lines(error)[:_ERROR]}",
                file=str(folder),
                path="model.name_or_path",
                hint="bring back the base model that the run was trained on, and the run's own adapter",
            )
        ) from error
