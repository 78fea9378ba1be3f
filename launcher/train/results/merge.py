"""Merge an adapter into its base model: added and compared in float32, written completely or not at all."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.machine.machine_facts import available_memory
from launcher.train.checkpoint.disk import (
    free_bytes,
    is_full,
    is_unwritable,
    mib,
    sync_folder,
    sync_tree,
)
from launcher.train.job import Job, read_job
from launcher.train.model.processing import added_ids, first_line
from launcher.train.model.processors import save_processing
from launcher.train.results.trained import (
    ADAPTER,
    check_readable,
    is_trained,
    on_base,
    prepared_record,
    replaced,
    skeleton,
    trained_folder,
    trained_processing,
    trust,
)
from launcher.train.tasks import train_task
from launcher.train.upstream.model_seams import attention_of, forget_stored_quantization

DTYPES = ("float32", "bfloat16", "float16")
_HOST_SPARE = 3 * 2**29
"""Bytes besides the weights: libraries, logits, and the largest matrix twice while it is added."""
_NAME = 230
"""Longest name of a folder in bytes: the limit is 255, and it is written under a longer name."""
_FILES = 64 * 2**20
"""Bytes of the tokenizer and the configuration."""
TOLERANCE = 1e-5
"""Of float32 logits that should be equal, times the largest one (at least 1). float32 is not more precise:
SmolLM2-135M with an adapter, whose logits reach 44, is 6e-5 from its own logits in float64, and merged 8e-5
from its unmerged ones."""
_ROWS, _TOKENS, _ANSWER = 3, 64, 8
_TEXT = "The quick brown fox jumps over the lazy dog, and 12 more do so in 1984."


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """How far logits are from reference logits."""

    largest: float
    """Largest absolute difference; NaN or infinite if a logit is."""
    scale: float
    """Largest absolute reference logit."""
    same_choice: float | None
    """Share of positions (tokens; rows of a classifier) with the same argmax; None for a single logit."""

    @property
    def allowed(self) -> float:
        """Rounding error of float32."""
        return TOLERANCE * max(1.0, self.scale)

    @property
    def is_none(self) -> bool:
        """Whether the difference is only rounding; False if something is not finite."""
        return self.largest <= self.allowed

    def to_json(self) -> dict[str, float | None]:
        return {"largest": self.largest, "allowed": self.allowed, "same_choice": self.same_choice}


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged model that was written, and its difference from the trained one."""

    folder: Path
    dtype: str
    params: int
    bytes: int
    places: int
    """Tokens (rows of a classifier) whose logits were compared."""
    sum: LogitDifference
    """Merged model, compared with the adapter on its base."""
    compared_in: str
    """dtype in which `sum` was computed."""
    cast: LogitDifference
    """Written weights, computed in float32, compared with the same."""
    quantized: LogitDifference | None
    """Merged model in float32, compared with the adapter on its quantised base; None without quantisation."""
    quantization: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "dtype": self.dtype,
            "params": self.params,
            "bytes": self.bytes,
            "compared": self.places,
            "largest_logit": self.sum.scale,
            "merge": {**self.sum.to_json(), "dtype": self.compared_in},
            "cast": self.cast.to_json(),
            "quantization": self.quantization,
            "quantized": None if self.quantized is None else self.quantized.to_json(),
        }


def merge(
    run_dir: Path, target: Path, dtype: str, card: Callable[[Merged], str], checkpoint: str | None = None
) -> Merged:
    """Merge the run's adapter into its base model and write that to `target`, with its model card.

    dtype: one of DTYPES, or `auto` for the base checkpoint's. checkpoint: the name of one to use instead of
    the result. RecipeError without an adapter or if the target exists; MachineError without
    enough memory or disk space; RunFailed, and nothing is written, if the merged model has other logits.
    """
    job = on_cpu(read_job(run_dir))
    folder = job.run_dir / ADAPTER if checkpoint is None else trained_folder(job, checkpoint)
    if is_trained(folder) != ADAPTER:
        raise RecipeError(nothing_to_merge(run_dir))
    check_readable(folder)
    refuse_existing(target)
    name = base_dtype(job) if dtype == "auto" else dtype
    _check_space(job, folder, target, name)
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
    exact, compared_in = difference(found, wanted), "float32"
    if not exact.is_none and _fits_float64(model):
        exact, compared_in = _in_float64(job, folder, processing, inputs), "float64"
    if not exact.is_none:
        raise RunFailed(_unlike("the merged model", "the adapter on its base", exact, compared_in))
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
        compared_in=compared_in,
        cast=cast,
        quantized=None if running is None else difference(found, running),
        quantization=kind,
    )
    attention = attention_of(model.config)
    with written_aside(target, like="README.md") as aside:
        _cast(model, dtype)
        model.save_pretrained(aside)
        save_processing(processing, aside)
        train_task(job.task.name).write_beside(job, model, aside)
        (aside / "README.md").write_text(card(result), encoding="utf-8")
        del model, adapted  # the model that is read back needs the same memory
        gc.collect()
        _check_written(job, aside, inputs, rounded, attention)
    return result


def _fits_float64(model: Any) -> bool:
    """Whether the host has memory for a float64 copy of the model besides the model itself."""
    available = available_memory()
    params = sum(parameter.numel() for parameter in model.parameters())
    return available is None or available >= 8 * params + _HOST_SPARE


def _in_float64(
    job: Job, folder: Path, processing: Any, inputs: Sequence[Mapping[str, Any]]
) -> LogitDifference:
    """Difference between the logits of the merged model and those of the adapter on its base, in float64.

    There rounding is negligible and a wrong sum is not. Some models amplify float32 rounding: with a Gemma 4
    of two layers, merged and unmerged logits differ by 1.9e-5 in float32 and not at all in float64.
    """
    adapted = on_base(_base(job, processing, dequantized=True), folder).double()
    wanted = logits_of(adapted, inputs, torch.float64)
    model = _added(adapted)
    restore_conv1d(job, model)
    return difference(logits_of(model, inputs, torch.float64), wanted)


def on_cpu(job: Job) -> Job:
    """The job for merging: in the host's memory, with kernels that the CPU has."""
    kernel = job.model.attn_implementation
    changes = {
        "trainer.use_cpu": True,
        # bitsandbytes quantises while it places; everything else is on the CPU without a map.
        "model.device_map": None if job.model.quantization == "none" else "local",
        "model.attn_implementation": kernel if kernel in ("eager", "sdpa") else None,
    }
    return replaced(job, changes)


def _base(job: Job, processing: Any, *, dequantized: bool = False) -> Any:
    """The base that the adapter was trained on; dequantized: with its quantised layers as float32."""
    from launcher.train.model.models import load_model

    base = load_model(job, processing, prepared_record(job).get("labels"), distributed=False)
    if not dequantized or job.model.quantization == "none":
        return base
    plain = base.dequantize(dtype=torch.float32).requires_grad_(False)
    forget_stored_quantization(plain)
    return plain


def _as_trained(model: Any) -> Any:
    """Keep the 4-bit weights of training: for inference, bitsandbytes packs them again for some CPUs.

    That rounds their constants to bfloat16, and fails for matrices narrower than 64.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
    return model


def _added(adapted: Any) -> Any:
    """The base model with the adapter in its weights."""
    _untie(adapted.get_base_model())
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # peft's error for NaN in a sum
        raise RunFailed(
            Problem(
                "merge-unfit",
                f"peft cannot add the adapter to its base: {first_line(error)}",
                hint="the adapter may have values that are not finite: look at the run's last losses",
            )
        ) from error


def _untie(model: Any) -> None:
    """Give the output layer a weight of its own where it or the embedding tied to it has an adapter.

    peft 0.21 would add what belongs to one of them to the weight of both (tuners/lora/layer.py `merge`).
    """
    from peft.tuners.lora import LoraLayer

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if not any(isinstance(end, LoraLayer) for end in ends):
        return
    embedding, head = (getattr(end, "base_layer", end) for end in ends)
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def restore_conv1d(job: Job, model: Any) -> None:
    """Restore GPT-2's own layers (with transposed matrices) that bitsandbytes replaced by linear ones."""
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
    """The dtype of the base checkpoint's configuration, else of the run."""
    from launcher.train.model.models import load_config

    own = load_config(job).get_text_config().dtype
    name = str(own if own is not None else job.model.dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def round_to(model: Any, dtype: str) -> None:
    """Round every weight to `dtype`, kept in float32, so that logits show only the rounding."""
    for tensor in _floating(model):
        tensor.data = tensor.data.to(getattr(torch, dtype)).float()


def _cast(model: Any, dtype: str) -> None:
    for tensor in _floating(model):
        tensor.data = tensor.data.to(getattr(torch, dtype))


def _floating(model: Any) -> Iterator[torch.Tensor]:
    """Saved tensors of a floating dtype, shared ones once."""
    seen: set[int] = set()
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _check_written(
    job: Job, folder: Path, inputs: list[dict[str, Any]], wanted: list[torch.Tensor], attention: str
) -> None:
    """Load the files with from_pretrained. RunFailed if the logits differ."""
    from launcher.train.model.models import auto_class

    options = {"dtype": torch.float32, "attn_implementation": attention, **trust(job)}
    found = difference(
        logits_of(auto_class(job.task.name).from_pretrained(str(folder), **options), inputs), wanted
    )
    if not found.is_none:
        raise RunFailed(_unlike("the written model, loaded again,", "the merged model", found))


@contextmanager
def written_aside(target: Path, like: str) -> Iterator[Path]:
    """A folder next to the target, which gets its name when it is complete, and is removed on failure.

    like: a file in it with the permissions that all files get.
    """
    aside = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        for left in target.parent.glob(f".{target.name}.part-*"):
            if not Path("/proc", left.name.rpartition("-")[2]).exists():  # of one that was killed
                shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for file in aside.iterdir():  # safetensors makes files that only their owner may read
            file.chmod((aside / like).stat().st_mode & 0o777 | (file.stat().st_mode & 0o111))
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
    """The error for users of a full disk or a folder without permission; None for any other."""
    message = f"the model could not be written: {first_line(error)}"
    if is_full(error):
        free = mib(free_bytes(target.parent))
        hint = f"{free} are free there; free disk space, or set --output to another disk"
        return MachineError(Problem("disk-full", message, file=str(target), hint=hint))
    if is_unwritable(error):
        hint = "set --output to a folder that you may write to"
        return RecipeError(Problem("file-unwritable", message, file=str(target), hint=hint))
    return None


def refuse_existing(target: Path) -> None:
    """RecipeError if the target of the merged model exists, or cannot exist."""
    if "\0" in str(target) or len(os.fsencode(target.name)) > _NAME:
        hint = "set --output to another folder"
        raise RecipeError(Problem("file-unwritable", "no folder has such a name", str(target), hint=hint))
    if os.path.lexists(target):
        raise RecipeError(
            Problem(
                "file-exists",
                "exists already, and nothing is overwritten",
                file=str(target),
                hint="remove it, or set --output to another folder; `hf upload REPO FOLDER` pushes a merged "
                "model",
            )
        )


def nothing_to_merge(run_dir: Path) -> Problem:
    """Why a run without an adapter is not merged."""
    return Problem(
        "nothing-to-merge",
        "the run trained without an adapter: model/ is the complete model already",
        file=str(run_dir),
        hint="load it with from_pretrained, or push it with `effilaunch merge RUN_DIR --push REPO`",
    )


def _check_space(job: Job, folder: Path, target: Path, dtype: str) -> None:
    """MachineError without enough host memory or disk space for the model."""
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
                hint="merge on a machine with more memory; the adapter can be used without merging: "
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
                hint="free disk space, set --output to another disk, or use a smaller --dtype",
            )
        )


def _unlike(this: str, that: str, found: LogitDifference, precision: str = "") -> Problem:
    """`precision`: dtype of the comparison of a merge; "" for a comparison of the written weights."""
    hint = "use the adapter without merging (peft's PeftModel.from_pretrained), and please report this"
    if precision == "float32":
        hint = (
            "merge on a machine with more memory: only a comparison in float64 can tell rounding from a "
            "wrong merge, and this machine has less than the 8 bytes per parameter that it needs"
        )
    return Problem(
        "merge-differs",
        f"the logits of {this} differ by {found.largest:.3g} from those of {that}, which are up to "
        f"{found.scale:.3g}; {precision or 'float32'} allows {found.allowed:.2g}. Nothing was written",
        hint=hint,
    )


def _not_finite(dtype: str) -> Problem:
    return Problem(
        "merge-overflow",
        f"the merged weights or their logits exceed the range of {dtype}. Nothing was written",
        hint="use --dtype bfloat16 or float32",
    )


@contextmanager
def _quiet_upstream() -> Iterator[None]:
    """Hide transformers' message that a layer is dequantised, which is intended."""
    logger = logging.getLogger("transformers.integrations.bitsandbytes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def probes(job: Job, processing: Any, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs of the model, one row each: the first samples by data.json, with the ids of added tokens.

    An image is generated; a run without samples gets a fixed sentence.
    """
    if not job.task.reads_tokens:
        return [dict(processing(_image(), return_tensors="pt"))]
    if job.task.sees_images:
        return _with_images(job, processing)
    texts = ["".join(text for text, _ in sample["pieces"]) for sample in record.get("samples", ())][:_ROWS]
    extra = added_ids(job, processing)
    rows = []
    for text in texts or [_TEXT]:
        ids = processing(text, add_special_tokens=True)["input_ids"][:_TOKENS]
        rows.append(torch.tensor([ids + extra or [processing.eos_token_id or 0]]))
    if not job.task.is_encoder_decoder:
        return [{"input_ids": row} for row in rows]
    start = processing.pad_token_id  # T5's; any token works
    return [
        {"input_ids": row, "decoder_input_ids": torch.tensor([[start, *row[0, :_ANSWER].tolist()]])}
        for row in rows
    ]


def _with_images(job: Job, processor: Any) -> list[dict[str, Any]]:
    """A question about two images that has all added tokens."""
    from launcher.rows.image_rows import MARK
    from launcher.train.data.image_chat import prompt_inputs

    added = processor.tokenizer.decode(added_ids(job, processor.tokenizer))
    turns = [{"role": "user", "content": MARK * 2 + _TEXT + added}]
    return [dict(prompt_inputs(processor, turns, [_image(), _image()]))]


def _image() -> Any:
    """An image with every value and no symmetry."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def logits_of(
    model: Any, inputs: Sequence[Mapping[str, Any]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Logits of each input, [..., classes] in `dtype`, on the CPU; without a cache, which some models with
    layers beside attention cannot make for a first call."""
    model.eval()
    config = model.config.get_text_config()
    caches = getattr(config, "use_cache", None)
    try:
        if caches:
            config.use_cache = False
        with torch.inference_mode():
            outputs = [model(**_cast_to(dtype, one)) for one in inputs]
        # A model without a head ends with its hidden states.
        return [getattr(one, "logits", one[0]).to("cpu", dtype) for one in outputs]
    finally:
        if caches:
            config.use_cache = caches


def _cast_to(dtype: torch.dtype, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def difference(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> LogitDifference:
    """How far `these` logits are from the reference `those`, of the same inputs."""
    gaps = torch.cat([(one - other).abs().flatten() for one, other in zip(these, those, strict=True)])
    choices = [
        (one.argmax(-1) == other.argmax(-1)).flatten() for one, other in zip(these, those, strict=True)
    ]
    return LogitDifference(
        largest=gaps.max().item(),  # a NaN wins
        scale=max(one.abs().max().item() for one in those),
        same_choice=torch.cat(choices).float().mean().item() if those[0].shape[-1] > 1 else None,
    )
