"""What of a draft decides memory: the job that is estimated, before sizes are chosen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.engines import engine_of
from launcher.errors import Problem, RecipeError
from launcher.facts.hardware import Hardware
from launcher.facts.lora import Adapted, adapted_by
from launcher.facts.model import ModelSpec
from launcher.memory.job import WIDTHS, MemoryJob
from launcher.plan.draft import Draft
from launcher.planner.decide import AMPERE

KERNEL_WIDTHS = 256
"""The widest head that torch's kernel for documents of any length takes; widths are multiples of 8."""
SMALL_DEVICE_BYTES = 25 * 10**9
"""Devices up to this size get smaller buckets to reduce and gather in."""


def base_job(draft: Draft, spec: ModelSpec, hardware: Hardware, copies: int) -> MemoryJob:
    """The memory job of this draft at micro-batch 1, stage 0, without checkpointing."""
    quantization = draft.model.quantization
    has_adapter = draft.adapter.type is not None
    adapter = adapted_by(spec, draft.fields(draft.adapter)) if has_adapter else None
    small = hardware.device_bytes is not None and hardware.device_bytes <= SMALL_DEVICE_BYTES
    bucket = 50_000_000 if small else 200_000_000
    task, one_row = draft.task, bool(draft.data.padding_free)
    engine = engine_of(draft)
    job = MemoryJob(
        micro_batch=1,
        sequence_length=spec.tokens_per_sample or _length(draft),
        sequences_per_sample=task.sequences_per_sample,
        # An adapter is switched off to have the reference; a full model needs a frozen copy.
        reference_model=task.has_reference and not has_adapter and not draft.trainer.precompute_ref_log_probs,
        spread=_devices_of_map(draft.model.device_map, hardware),
        document_mask=one_row or bool(draft.data.packing),
        one_row=one_row,
        data_parallel=copies,
        tensor_parallel=draft.sharding.tp_size,
        sequence_parallel=draft.sharding.sp_size * draft.sharding.cp_size,
        devices_per_node=hardware.devices_per_node,
        precision=draft.precision,
        dtype=_loaded_dtype(draft, spec),
        quantization=quantization["type"] if isinstance(quantization, dict) else "none",
        double_quant=isinstance(quantization, dict) and bool(quantization.get("double_quant")),
        trainable_params=spec.loaded_params if adapter is None else adapter.params,
        adapter=has_adapter,
        **_adapter(adapter, spec),
        adapter_dropout=draft.adapter.lora_dropout,
        engine=engine,
        zero_stage=0,
        offload_optimizer=draft.sharding.offload_optimizer,
        offload_param=draft.sharding.offload_param,
        optim=draft.trainer.optim,
        optim_args=draft.trainer.optim_args or "",
        checkpointing=False,
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
        overlap_comm=False,
        eval_batch=1,
        **_kernels(draft, spec, hardware),
        padded=_padded(draft, spec),
        extra_frozen=_token_rows(draft, spec) if has_adapter else 0,
    )
    return engine.completed(job, draft)


def _adapter(adapter: Adapted | None, spec: ModelSpec) -> dict[str, Any]:
    """The fields of a job that say what of the model an adapter changes."""
    if adapter is None:
        return {}
    # A sketch of a family has other products than the model; their number of parameters is right.
    paths = None if spec.foreign else adapter.paths
    return {
        "adapted": paths, "adapter_rank": adapter.rank, "uneven": adapter.uneven, "whole": adapter.whole,
    }  # fmt: skip


def _kernels(draft: Draft, spec: ModelSpec, hardware: Hardware) -> dict[str, Any]:
    """The fields of a job that say by which kernels it is computed."""
    return {
        "attention": draft.model.attn_implementation,
        "one_by_one": _one_by_one(draft, spec, hardware),
        "liger": bool(draft.trainer.use_liger_kernel),
        "chunked": draft.model.loss == "chunked",
        "cast_inputs": draft.adapter.cast_input_dtype_enabled is not False,
    }


def _length(draft: Draft) -> int:
    """Tokens of the longest row as it is filled up; a flattened row is filled up once, by less than one."""
    length: int = draft.data.max_length
    multiple = 1 if draft.data.padding_free else draft.data.pad_to_multiple_of or 1
    return -(-length // multiple) * multiple


def _one_by_one(draft: Draft, spec: ModelSpec, hardware: Hardware) -> bool:
    """Whether attention varlen has to call a kernel for each document: torch's for all of them is for 16 bits
    on compute capability 8.0 and later."""
    if draft.model.attn_implementation != "varlen":
        return False
    in_16_bits = draft.precision != "fp32" or draft.model.dtype in ("float16", "bfloat16")
    fits = spec.head_dim % 8 == 0 and spec.head_dim <= KERNEL_WIDTHS
    ampere = hardware.compute_capability is not None and hardware.compute_capability >= AMPERE
    return not (in_16_bits and fits and ampere)


def _padded(draft: Draft, spec: ModelSpec) -> bool:
    """Whether a batch carries a mask of its padding; ranks that share a sample's tokens do without."""
    shares = draft.sharding.sp_size > 1 or draft.sharding.cp_size > 1
    one_row = draft.data.padding_free or draft.data.packing
    return spec.tokens_per_sample is None and not one_row and not shares


def _token_rows(draft: Draft, spec: ModelSpec) -> int:
    """Bytes of the copies that peft makes of embedding and head to train the rows of added tokens."""
    if not draft.model.add_tokens:
        return 0
    rows = spec.vocab_size * spec.layout.embed_width * (1 if spec.head.tied else 2)
    return rows * WIDTHS[_loaded_dtype(draft, spec)]


def _devices_of_map(device_map: Any, hardware: Hardware) -> int:
    """Devices that a device_map of from_pretrained uses: all of the machine, or those that it names."""
    if isinstance(device_map, Mapping):
        return max(1, len({str(device) for device in device_map.values()} - {"cpu", "disk"}))
    return hardware.devices_per_node if device_map else 1


def _loaded_dtype(draft: Draft, spec: ModelSpec) -> str:
    dtype: str = draft.model.dtype
    dtype = dtype if dtype != "auto" else spec.pretrained_dtype or "float32"
    if dtype not in WIDTHS:
        message = f"dtype auto is that of the checkpoint, {dtype}, which nothing here trains"
        hint = f"name one of {', '.join(WIDTHS)}"
        file, line = draft.place("model.dtype")
        raise RecipeError(Problem("checkpoint-dtype", message, file, line, "model.dtype", hint))
    return dtype
