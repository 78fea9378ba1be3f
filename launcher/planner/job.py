"""The memory job of a draft: what the estimate reads of it, before sizes are chosen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.engines import engine_of
from launcher.machine.hardware import AMPERE, Hardware
from launcher.machine.requirements import holds
from launcher.memory.allocator import expandable_in, rounds_pinned
from launcher.memory.job import MemoryJob
from launcher.models.adapted import Adapted
from launcher.models.layers.layout import WIDTHS
from launcher.models.lora import adapted_by
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft
from launcher.planner.rollouts import rollout_of

if TYPE_CHECKING:
    from launcher.rows.prepared_images import PreparedImages

KERNEL_WIDTHS = 256
"""The widest head that torch's varlen kernel accepts; widths are multiples of 8."""
GROUPED = "torch>=2.12"
"""Versions whose kernel of attention varlen takes grouped keys; before, they are repeated for it."""
SMALL_DEVICE_BYTES = 25 * 10**9
"""Devices up to this size get smaller buckets to reduce and gather in."""


def base_job(
    draft: Draft, spec: ModelSpec, hardware: Hardware, copies: int, versions: Mapping[str, str]
) -> MemoryJob:
    """The memory job of this draft at micro-batch 1, stage 0, without checkpointing."""
    adapter = None if draft.adapter.type is None else adapted_by(spec, draft.fields(draft.adapter))
    bucket, one_row = _bucket(hardware), bool(draft.data.padding_free)
    engine, quantization = engine_of(draft), draft.model.quantization
    job = MemoryJob(
        micro_batch=1,
        sequence_length=spec.tokens_per_sample or _length(draft),
        **_contrast(draft, copies),
        spread=_devices_of_map(draft.model.device_map, hardware),
        document_mask=one_row or bool(draft.data.packing),
        one_row=one_row,
        data_parallel=copies,
        tensor_parallel=draft.sharding.tp_size,
        sequence_parallel=draft.sharding.sp_size * draft.sharding.cp_size,
        devices_per_node=hardware.devices_per_node,
        precision=draft.precision,
        dtype=_loaded_dtype(draft, spec),
        quantization=draft.model.quantization_type,
        double_quant=quantization != "none" and bool(quantization.get("double_quant")),
        kbit_norms=draft.model.kbit_norms,
        trainable_params=spec.trained_whole if adapter is None else adapter.params,
        adapter=adapter is not None,
        adapter_dropout=draft.adapter.lora_dropout,
        engine=engine,
        zero_stage=0,
        offload_optimizer=draft.sharding.offload_optimizer,
        offload_param=draft.sharding.offload_param,
        offload_activations=draft.sharding.offload_activations,
        optim=draft.trainer.optim,
        optim_args=draft.trainer.optim_args or "",
        checkpointing=False,
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
        overlap_comm=False,
        eval_batch=1,
        attention=draft.model.attn_implementation,
        one_by_one=_one_by_one(draft, spec, hardware),
        grouped=_takes_groups(draft, hardware, versions),
        liger=_has_all_of_liger(draft),
        chunked=draft.model.loss == "chunked",
        cast_inputs=draft.adapter.cast_input_dtype_enabled is not False,
        padded=_padded(draft, spec),
        maps_weights=_maps_weights(draft, spec),
        extra_frozen=_token_rows(draft, spec) if adapter is not None else 0,
    )
    job = _with_allocator(_with_reference(job, draft), draft, hardware)
    return engine.completed(job if adapter is None else _with_adapter(job, adapter, spec), draft)


def _with_reference(job: MemoryJob, draft: Draft) -> MemoryJob:
    """With what is computed besides the model's own gradients.

    An adapter is switched off to have the reference; a full model needs a frozen copy.
    """
    task, trainer = draft.task, draft.fields(draft.trainer)
    held = task.needs_reference(trainer) and not job.adapter
    extra, rollout = task.extra_forwards(trainer), rollout_of(draft)
    extra += 1 if job.mini_batch else 0  # GradCache computes embeddings before their gradients
    copies = 2 if held else 1
    return replace(job, reference_model=held, loaded_copies=copies, extra_forwards=extra, rollout=rollout)


def _with_allocator(job: MemoryJob, draft: Draft, hardware: Hardware) -> MemoryJob:
    """With what the options of torch's allocator change; a CPU has none."""
    if hardware.is_cpu:
        return job
    env = draft.launch.env
    return replace(job, expandable=expandable_in(env), rounds_pinned=rounds_pinned(env))


def _bucket(hardware: Hardware) -> int:
    """Elements that are reduced and gathered at a time."""
    small = hardware.device_bytes is not None and hardware.device_bytes <= SMALL_DEVICE_BYTES
    return 50_000_000 if small else 200_000_000


def _contrast(draft: Draft, copies: int) -> dict[str, Any]:
    """How many sequences a sample makes, and what those of a micro-batch are compared with."""
    task = draft.task
    gathers = task.compares_texts and task.compares(draft) and draft.embedding.gather_across_devices
    embeds = task.head == "none"
    widths = len(draft.embedding.matryoshka_dims) if embeds else 0
    return {
        "sequences_per_sample": task.sequences(draft),
        # An embedding model reads a column of texts at a time, a reranker all pairs of a micro-batch.
        "passes": task.sequences(draft) if embeds else 1,
        "mini_batch": task.mini_batch(draft) or 0,
        "gathered": copies if gathers else 1,
        "matryoshka": widths,
    }


def _with_adapter(job: MemoryJob, adapter: Adapted, spec: ModelSpec) -> MemoryJob:
    # A sketch of a family has other products than the model; their number of parameters is right.
    paths = None if spec.foreign else adapter.paths
    return replace(job, adapted=paths, adapter_rank=adapter.rank, uneven=adapter.uneven, whole=adapter.whole)


def _length(draft: Draft) -> int:
    """Tokens of the longest row with its padding; a flattened row is padded once, by less than a multiple.

    Prompt and completion of a rollout are padded each for itself.
    """
    rollout = rollout_of(draft)
    completion = 0 if rollout is None else rollout.completion_length
    multiple = 1 if draft.data.padding_free else draft.data.pad_to_multiple_of or 1
    return sum(-(-part // multiple) * multiple for part in (draft.data.max_length - completion, completion))


def with_prepared(job: MemoryJob, images: PreparedImages | None, draft: Draft) -> MemoryJob:
    """The job with the images of its prepared rows.

    A source with a weight above 1 may put its largest sample into a batch several times.
    """
    if images is None:
        return job
    repeats = any(source["weight"] > 1 for source in draft.data.train)
    pixels = images.pixels[:1] if repeats else images.pixels
    return replace(job, pixels=pixels, pixels_of_image=images.of_image)


def _has_all_of_liger(draft: Draft) -> bool:
    """Whether no kernel of Liger's is switched off; with one, memory is counted as without any."""
    config = draft.trainer.others.get("liger_kernel_config")
    given = config if isinstance(config, Mapping) else {}
    off = [name for name, value in given.items() if value is False and name != "cross_entropy"]
    return bool(draft.trainer.use_liger_kernel) and not off


def _one_by_one(draft: Draft, spec: ModelSpec, hardware: Hardware) -> bool:
    """Whether attention varlen calls a kernel per document: torch's kernel for all of them needs 16 bits and
    compute capability 8.0."""
    if draft.model.attn_implementation != "varlen":
        return False
    in_16_bits = draft.precision != "fp32" or draft.model.dtype in ("float16", "bfloat16")
    fits = spec.head_dim % 8 == 0 and spec.head_dim <= KERNEL_WIDTHS
    return not (in_16_bits and fits and _is_ampere(hardware))


def _takes_groups(draft: Draft, hardware: Hardware, versions: Mapping[str, str]) -> bool:
    return _is_ampere(hardware) and (draft.model.attn_implementation != "varlen" or holds(GROUPED, versions))


def _is_ampere(hardware: Hardware) -> bool:
    return hardware.compute_capability is not None and hardware.compute_capability >= AMPERE


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


def _devices_of_map(device_map: str | Mapping[str, object] | None, hardware: Hardware) -> int:
    """Devices that a device_map of from_pretrained uses: all of the node, or those that it names."""
    if isinstance(device_map, Mapping):
        return max(1, len({str(device) for device in device_map.values()} - {"cpu", "disk"}))
    return hardware.devices_per_node if device_map else 1


def _maps_weights(draft: Draft, spec: ModelSpec) -> bool:
    """Whether from_pretrained copies no weights: safetensors of the dtype that is asked for stay memory maps.

    Seen with transformers 5.23: 3 MiB of 509 are copied, all of them where the dtype is another.
    """
    from_files = draft.model.config is None and not draft.model.gguf_file
    return from_files and spec.pretrained_dtype == _loaded_dtype(draft, spec)


def _loaded_dtype(draft: Draft, spec: ModelSpec) -> str:
    dtype: str = draft.model.dtype
    dtype = dtype if dtype != "auto" else spec.pretrained_dtype or "float32"
    if dtype not in WIDTHS:
        message = f"dtype auto is that of the checkpoint, {dtype}, which nothing here trains"
        raise draft.refuse("checkpoint-dtype", "model.dtype", message, f"use one of {', '.join(WIDTHS)}")
    return dtype
