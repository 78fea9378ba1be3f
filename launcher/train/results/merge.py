"""An adapter into its base's weights: added in float32, compared in float32, written whole or not at all."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.facts.machine_facts import available_memory
from launcher.train.checkpoint.disk_full import free_bytes, is_full, is_unwritable, mib
from launcher.train.checkpoint.moving import sync_folder, sync_tree
from launcher.train.job import Job, read_job
from launcher.train.model.processing import first_line
from launcher.train.results.likeness import Difference, difference, logits_of, probes
from launcher.train.results.placing import skeleton
from launcher.train.results.trained import (
    ADAPTER,
    check_readable,
    is_trained,
    on_base,
    prepared_record,
    replaced,
    trained_folder,
    trained_processing,
    trust,
)
from launcher.train.upstream.model_seams import attention_of

DTYPES = ("float32", "bfloat16", "float16")
_HOST_SPARE = 3 * 2**29
"""Bytes beside the weights: libraries, logits, and the largest matrix twice while it is added to."""
_NAME = 230
"""Bytes of a folder's name: 255 may be, and it is written under a longer one."""
_FILES = 64 * 2**20
"""Bytes beside the weights' file: the tokenizer and the configuration."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A model that has been written, and how far it is from what was trained."""

    folder: Path
    dtype: str
    params: int
    bytes: int
    places: int
    """Tokens (rows of a classifier) whose logits were compared."""
    sum: Difference
    """Of the merged model in float32 from the adapter on its base in float32."""
    cast: Difference
    """Of the weights as they were written, from the same; computed in float32."""
    quantized: Difference | None
    """Of the merged model in float32 from the quantised base with the adapter, as it trained; else None."""
    quantization: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "dtype": self.dtype,
            "params": self.params,
            "bytes": self.bytes,
            "compared": self.places,
            "largest_logit": self.sum.scale,
            "merge": self.sum.to_json(),
            "cast": self.cast.to_json(),
            "quantization": self.quantization,
            "quantized": None if self.quantized is None else self.quantized.to_json(),
        }


def merge(
    run_dir: Path, target: Path, dtype: str, card: Callable[[Merged], str], checkpoint: str | None = None
) -> Merged:
    """Write the run's adapter, added to its base, as a model of its own to `target`, with its model card.

    dtype: of DTYPES, or `auto` for the base checkpoint's own. checkpoint: the name of one whose adapter is
    taken in the place of the result's. RecipeError when there is no adapter or the
    target exists; MachineError without the memory or the room; RunFailed, and nothing is written, when the
    merged model says something else than the adapter did.
    """
    job = on_cpu(read_job(run_dir))
    folder = job.run_dir / ADAPTER if checkpoint is None else trained_folder(job, checkpoint)
    if is_trained(folder) != ADAPTER:
        raise RecipeError(nothing_to_merge(run_dir))
    check_readable(folder)
    refuse_existing(target)
    name = base_dtype(job) if dtype == "auto" else dtype
    _check_room(job, folder, target, name)
    processing = trained_processing(job, folder)
    with _quiet_upstream():
        return _merged(job, folder, processing, target, name, card)


def _merged(
    job: Job, folder: Path, processing: Any, target: Path, dtype: str, card: Callable[[Merged], str]
) -> Merged:
    inputs = probes(job, processing, prepared_record(job))
    kind = None if job.model.quantization == "none" else job.model.quantization["type"]
    running = None
    if kind is not None:
        running = logits_of(_as_trained(on_base(_base(job, processing), folder)), inputs)
        gc.collect()
    adapted = on_base(_base(job, processing, dequantized=True), folder).float()
    wanted = logits_of(adapted, inputs)
    model = _added(adapted)
    restore_conv1d(job, model)
    found = logits_of(model, inputs)
    exact = difference(found, wanted)
    if not exact.is_none:
        raise RunFailed(_unlike("the merged model", "the adapter on its base", exact))
    round_to(model, dtype)
    rounded = logits_of(model, inputs)
    cast = difference(rounded, wanted)
    if not math.isfinite(cast.largest):
        raise RunFailed(_not_finite(dtype))
    result = Merged(
        folder=target,
        dtype=dtype,
        params=sum(parameter.numel() for parameter in model.parameters()),
        bytes=sum(parameter.numel() for parameter in model.parameters()) * getattr(torch, dtype).itemsize,
        places=sum(one[..., 0].numel() for one in wanted),
        sum=exact,
        cast=cast,
        quantized=None if running is None else difference(found, running),
        quantization=kind,
    )
    attention = attention_of(model.config)
    with _written_aside(target) as aside:
        _cast(model, dtype)
        model.save_pretrained(aside)
        processing.save_pretrained(aside)
        (aside / "README.md").write_text(card(result), encoding="utf-8")
        del model, adapted  # the model that is read back needs the same memory
        gc.collect()
        _check_written(job, aside, inputs, rounded, attention)
    return result


def on_cpu(job: Job) -> Job:
    """The job as merging loads it: in the host's memory, with kernels that the CPU has."""
    kernel = job.model.attn_implementation
    changes = {
        "trainer.use_cpu": True,
        # bitsandbytes quantises while it places; everything else lies on the CPU without a map.
        "model.device_map": None if job.model.quantization == "none" else "local",
        "model.attn_implementation": kernel if kernel in ("eager", "sdpa") else None,
    }
    return replaced(job, changes)


def _base(job: Job, processing: Any, *, dequantized: bool = False) -> Any:
    """The base that the adapter was trained on, with its rounding; its quantised layers as float32."""
    from launcher.train.model.models import load_model

    base = load_model(job, processing, prepared_record(job).get("labels"), distributed=False)
    if not dequantized or job.model.quantization == "none":
        return base
    return base.dequantize(dtype=torch.float32).requires_grad_(False)


def _as_trained(model: Any) -> Any:
    """With the 4-bit weights that a run trains over; to answer, bitsandbytes packs them anew for some CPUs.

    These have their constants rounded to bfloat16, and it fails for matrices that are narrower than 64.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
    return model


def _added(adapted: Any) -> Any:
    """The base model with the adapter in its weights."""
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # peft's word for NaN in a sum
        raise RunFailed(
            Problem(
                "merge-unfit",
                f"peft cannot add the adapter to its base: {first_line(error)}",
                hint="the adapter itself may hold values that are not finite: look at the run's last losses",
            )
        ) from error


def restore_conv1d(job: Job, model: Any) -> None:
    """GPT-2's own layers, which hold the transposed matrix, where bitsandbytes took linear ones for them."""
    from transformers.pytorch_utils import Conv1D

    for name, module in skeleton(job).named_modules():
        if not isinstance(module, Conv1D):
            continue
        found = model.get_submodule(name)
        if isinstance(found, torch.nn.Linear):
            own = Conv1D(found.out_features, found.in_features)
            own.weight.data = found.weight.data.t().contiguous()
            if found.bias is not None:
                own.bias.data = found.bias.data
            model.set_submodule(name, own)


def base_dtype(job: Job) -> str:
    """The dtype that the base checkpoint's configuration names; else that the run loaded it in."""
    from launcher.train.model.models import load_config

    own = load_config(job).get_text_config().dtype
    name = str(own if own is not None else job.model.dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def round_to(model: Any, dtype: str) -> None:
    """Round every weight to what `dtype` holds; they stay in float32, so that logits show this alone."""
    for tensor in _floating(model):
        tensor.data = tensor.data.to(getattr(torch, dtype)).float()


def _cast(model: Any, dtype: str) -> None:
    for tensor in _floating(model):
        tensor.data = tensor.data.to(getattr(torch, dtype))


def _floating(model: Any) -> Iterator[torch.Tensor]:
    """What is saved and has a floating dtype, shared tensors once."""
    seen: set[int] = set()
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _check_written(
    job: Job, folder: Path, inputs: list[dict[str, Any]], wanted: list[torch.Tensor], attention: str
) -> None:
    """Read the files as anybody does. RunFailed where they say something else than what was written."""
    from launcher.train.model.models import auto_class

    options = {"dtype": torch.float32, "attn_implementation": attention, **trust(job)}
    found = difference(
        logits_of(auto_class(job.task.name).from_pretrained(str(folder), **options), inputs), wanted
    )
    if not found.is_none:
        raise RunFailed(_unlike("what was written, read back,", "the merged model", found))


@contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    """A folder beside the target that gets its name when it is whole, and vanishes when something fails."""
    aside = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        for left in target.parent.glob(f".{target.name}.part-*"):
            if not Path("/proc", left.name.rpartition("-")[2]).exists():  # of one that was killed
                shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for file in aside.iterdir():  # safetensors makes files that nobody else may read
            file.chmod((aside / "README.md").stat().st_mode & 0o777)
        sync_tree(aside)
        refuse_existing(target)
        aside.rename(target)
        sync_folder(target.parent)
    except EffilaunchError:
        raise
    except Exception as error:
        refusal = _unwritten(target, error)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unwritten(target: Path, error: Exception) -> EffilaunchError | None:
    message = f"the merged model could not be written: {first_line(error)}"
    if is_full(error):
        hint = f"{mib(free_bytes(target.parent))} are free there; make room, or name another disk by --output"
        return MachineError(Problem("disk-full", message, file=str(target), hint=hint))
    if is_unwritable(error):
        hint = "name a folder that you may write to by --output"
        return RecipeError(Problem("file-unwritable", message, file=str(target), hint=hint))
    return None


def refuse_existing(target: Path) -> None:
    """RecipeError when something lies where the merged model should go."""
    if "\0" in str(target) or len(os.fsencode(target.name)) > _NAME:
        hint = "name another folder by --output"
        raise RecipeError(Problem("file-unwritable", "no folder has such a name", str(target), hint=hint))
    if os.path.lexists(target):
        raise RecipeError(
            Problem(
                "file-exists",
                "is there already, and nothing is overwritten",
                file=str(target),
                hint="remove it, or name another folder by --output; `hf upload REPO FOLDER` sends one that "
                "is merged",
            )
        )


def nothing_to_merge(run_dir: Path) -> Problem:
    """Why a run without an adapter is not merged."""
    return Problem(
        "nothing-to-merge",
        "the run trained without an adapter: model/ is the whole model already",
        file=str(run_dir),
        hint="load it by from_pretrained, or send it with `effilaunch merge RUN_DIR --push REPO`",
    )


def _check_room(job: Job, folder: Path, target: Path, dtype: str) -> None:
    """MachineError where host memory or the disk cannot hold the model."""
    params = sum(parameter.numel() for parameter in skeleton(job).parameters())
    adapter = sum(file.stat().st_size for file in folder.glob("adapter_model.*"))
    needed = 4 * params + 2 * adapter + _HOST_SPARE
    available = available_memory()
    if available is not None and available < needed:
        raise MachineError(
            Problem(
                "merge-memory",
                f"merging {params / 1e9:.2g} billion weights in float32 takes about {mib(needed)} of host "
                f"memory, {mib(available)} are available",
                hint="merge on a machine with more memory; the adapter is of use without it: "
                "`effilaunch generate RUN_DIR`, and peft's PeftModel.from_pretrained",
            )
        )
    size, free = params * getattr(torch, dtype).itemsize + _FILES, free_bytes(target.parent)
    if free < size:
        raise MachineError(
            Problem(
                "disk-full",
                f"the merged model takes about {mib(size)}, {mib(free)} are free",
                file=str(target),
                hint="make room, name another disk by --output, or take a smaller --dtype",
            )
        )


def _unlike(this: str, that: str, found: Difference) -> Problem:
    return Problem(
        "merge-differs",
        f"{this} is {found.largest:.3g} away from {that} in its logits, up to {found.scale:.3g} large; "
        f"{found.allowed:.2g} is what float32 may lose. Nothing was written",
        hint="use the adapter as it is (peft's PeftModel.from_pretrained), and please report this",
    )


def _not_finite(dtype: str) -> Problem:
    return Problem(
        "merge-overflow",
        f"the merged weights or their logits leave the range of {dtype}. Nothing was written",
        hint="take --dtype bfloat16 or float32",
    )


@contextmanager
def _quiet_upstream() -> Iterator[None]:
    """Without transformers' word, once a layer, that a layer is dequantised: that is what is asked for."""
    logger = logging.getLogger("transformers.integrations.bitsandbytes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
