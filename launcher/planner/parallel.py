"""Ranks that share one copy's work: tensor (`tp_size`), sequence (`sp_size`) and context (`cp_size`). Pure.

Only the recipe sets these sizes. The global batch is divided among the copies: the devices by the ranks of a
copy. What trains wrongly, or was not tested, is refused here with an alternative; `docs/parallelism.md`
lists what was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from launcher.engines import engine_of
from launcher.engines.deepspeed_config import key_of
from launcher.machine.hardware import Hardware
from launcher.memory.job import MemoryJob
from launcher.models.capabilities import has_tp_plan
from launcher.models.families import sliding_window
from launcher.models.model import ModelSpec
from launcher.plan.draft import Draft, Refusal
from launcher.planner.decide import SIZES, processes_of, ranks_of_copy
from launcher.recipe.optimizer_needs import IN_SHARDS
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named

NAMES = {"tp_size": "tensor", "sp_size": "sequence", "cp_size": "context"}
FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
"""Families of which split models were compared with complete ones: their attention is plainly causal."""
PROFILE_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
"""Lower case, as DeepSpeed compares them -> as it writes them. Others need complete matrices."""
_CODE = "parallel-conflict"
_PAD = "data.pad_to_multiple_of"
_SCALED = (
    "prescale_gradients", "gradient_predivide_factor", "zero_optimization.reduce_scatter",
    "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_gradients",
    "sequence_parallel_size", "data_parallel_size",
)  # fmt: skip
"""Keys of a profile that change how DeepSpeed scales the gradients of ranks that share a sample."""


def decide_parallel(draft: Draft, recipe: Recipe, spec: ModelSpec, hardware: Hardware) -> None:
    """Settings of ranks that share a copy, nothing without such; RecipeError for what they cannot train."""
    if ranks_of_copy(recipe) == 1:
        return
    for conflict in _conflicts(draft, recipe, spec, hardware):
        raise draft.refuse(*conflict)
    name = _first(recipe)
    size = getattr(recipe.sharding, name)
    if name != "tp_size":
        parts = size if name == "sp_size" else 2 * size
        padded = lcm(parts, draft.data.pad_to_multiple_of or 1)
        draft.put(_PAD, padded, f"each of {size} ranks gets as many tokens of a sample as the others")
    if name == "cp_size":
        draft.put("fsdp.activation_checkpointing", False, "FSDP's own recomputes with other dropout masks")
    if size > hardware.devices_per_node:
        draft.warn(
            f"sharding.{name}: {size} ranks on {size // hardware.devices_per_node} nodes share every "
            "layer, so each layer waits for the network between them; keep a group on one node"
        )
    if name == "cp_size":
        draft.warn(
            "context parallelism was planned from the source of accelerate and torch, and never run: "
            "compare its first losses with those of a run without it"
        )


def trains_in_parts(job: MemoryJob) -> bool:
    """Whether a plan would accept this job with its tensor-parallel ranks, as far as the job tells."""
    if job.tensor_parallel == 1:
        return True
    moved = {job.offload_optimizer, job.offload_param} != {"none"}
    if moved or job.adapter or job.quantization != "none" or job.optim not in IN_SHARDS:
        return False
    engine = engine_of(job)
    tests = "tp_size" in engine.shares and job.precision != "fp16"
    return tests and job.zero_stage in engine.stages_to_try(job)


def _first(recipe: Recipe) -> str:
    return next(name for name in SIZES if getattr(recipe.sharding, name) > 1)


def _conflicts(draft: Draft, recipe: Recipe, spec: ModelSpec, hardware: Hardware) -> Iterator[Refusal]:
    """A refusal for each thing that cannot be shared, with what can be done instead."""
    name = _first(recipe)
    key, size = f"sharding.{name}", getattr(recipe.sharding, name)
    yield from _shape(draft, recipe, hardware)
    yield from _engine(draft, recipe, hardware)
    yield from _model(draft, spec, key, size)
    yield from _training(draft, hardware, key)
    if name == "tp_size":
        yield from _tensor(draft, spec, size)
    else:
        yield from _tokens(draft, spec, key, size)


def _shape(draft: Draft, recipe: Recipe, hardware: Hardware) -> Iterator[Refusal]:
    """The sizes, and the devices."""
    many = [name for name in SIZES if getattr(recipe.sharding, name) > 1]
    key = f"sharding.{many[0]}"
    if len(many) > 1:
        message = f"{' and '.join(many)} above 1: the installed versions were not tested with two at once"
        yield "parallel-combination", key, message, "keep one of them; ZeRO goes with each"
    processes, group = processes_of(recipe, hardware), ranks_of_copy(recipe)
    if processes == 1:
        why = "model.device_map makes one process" if recipe.model.device_map else hardware.label
        message = f"{group} ranks of one copy, but there is one process ({why})"
        hint = f"drop {key}, or name hardware with a multiple of {group} devices"
        yield "parallel-devices", key, message, hint
    per_node = hardware.devices_per_node
    if processes % group:
        message = f"{processes} devices of {hardware.label} do not divide into groups of {group}"
        hint = f"use a divisor of {processes}"
        yield "parallel-devices", key, message, hint
    if per_node % group and group % per_node:
        message = f"groups of {group} do not fit nodes of {per_node} devices"
        yield "parallel-devices", key, message, f"use a divisor of {per_node}"


def _engine(draft: Draft, recipe: Recipe, hardware: Hardware) -> Iterator[Refusal]:
    """Which engine can do what, and at which stage."""
    name = _first(recipe)
    if name == "cp_size" and hardware.is_cpu:
        message = "context parallelism needs GPUs: torch's ring attention has no kernel for a CPU"
        yield "parallel-engine", f"sharding.{name}", message, "use sp_size, which runs there"
    yield from engine_of(draft).sharing_conflicts(draft, name)
    for what in ("offload_optimizer", "offload_param"):
        to = getattr(draft.sharding, what)
        if to != "none" and (name, to) != ("sp_size", "cpu"):
            path = key_of(draft, f"sharding.{what}")
            yield "parallel-engine", path, f"{what} was not tested with {name}", f"drop {what}"


def _model(draft: Draft, spec: ModelSpec, key: str, size: int) -> Iterator[Refusal]:
    """The architecture, and heads for every rank."""
    if not task_named(spec.task).tensor_parallel:
        message = f"task {spec.task} was not tested with {key}: only causal-lm was"
        hint = f"drop {key}; ZeRO-3 and FSDP2 share the weights of any task"
        yield "parallel-task", "task", message, hint
    if spec.model_type not in FAMILIES:
        plan = has_tp_plan(spec.model_type)
        why = "has no tensor-parallel plan in transformers" if not plan and "tp" in key else "was not tested"
        message = f"{spec.model_type} {why}; known here: {', '.join(FAMILIES)}"
        hint = f"drop {key}; ZeRO-3 and FSDP2 share the weights of any model"
        yield "parallel-model", key, message, hint
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size:
        message = f"the {heads} attention heads of {spec.name} do not divide among {size} ranks"
        yield "parallel-heads", key, message, "use a divisor of them"
    if "cp" not in key and kv_heads % size:
        message = f"the {kv_heads} key-value heads of {spec.name} do not divide among {size} ranks"
        yield "parallel-heads", key, message, "use a divisor of them"


def _training(draft: Draft, hardware: Hardware, key: str) -> Iterator[Refusal]:
    """What none of the three has."""
    if draft.model.quantization != "none":
        message = f"a quantised base cannot be shared by {key}: its packed weights have no parts"
        yield _CODE, "model.quantization", message, "drop model.quantization, or use ZeRO-2 without " + key
    if draft.precision == "fp16" and draft.explicit("precision"):
        yield _CODE, "precision", f"fp16 was not tested with {key}", "use precision: bf16 or fp32"
    if draft.precision == "fp16":
        message = f"{hardware.label} implies fp16, which was not tested with {key}"
        yield _CODE, key, message, f"set precision: fp32, or drop {key}"
    theirs = draft.deepspeed.profile.get("optimizer.type")
    if theirs is not None and str(theirs).lower() not in PROFILE_OPTIMIZERS:
        message = f"optimizer {theirs} of the base profile was not tested with {key}"
        yield _CODE, "sharding.config", message, f"use one of {', '.join(PROFILE_OPTIMIZERS.values())}"
    if (optim := draft.trainer.optim) not in IN_SHARDS:
        hint = f"use one of {', '.join(IN_SHARDS)}"
        yield _CODE, "trainer.optim", f"{optim} was not tested with {key}", hint
    if draft.data.streaming:
        message = "the ranks of one copy would each read other rows of a stream"
        yield _CODE, "data.streaming", message, f"use data.streaming: false, or drop {key}"
    for name in ("use_liger_kernel", "torch_compile", "label_smoothing_factor", "neftune_noise_alpha"):
        if draft.at(f"trainer.{name}"):
            yield _CODE, f"trainer.{name}", f"was not tested with {key}", f"drop it, or {key}"
    if draft.trainer.average_tokens_across_devices is False:
        message = f"the Trainer divides labels by the ranks of a copy that it has not gathered under {key}"
        yield _CODE, "trainer.average_tokens_across_devices", message, "drop it: true is the default"
    if draft.on_oom == "adapt":
        message = f"what is left to change when memory runs out was not tested with {key}"
        yield _CODE, "on_oom", message, "use on_oom: fail"


def _tensor(draft: Draft, spec: ModelSpec, size: int) -> Iterator[Refusal]:
    """Tensor parallelism: every matrix of a layer is split."""
    key = "sharding.tp_size"
    for what, width in (("intermediate_size", spec.intermediate_size), ("hidden_size", spec.hidden_size),
                        ("vocab_size", spec.vocab_size)):  # fmt: skip
        if width % size:
            message = f"{what} {width} of {spec.name} does not divide among {size} ranks"
            yield "parallel-heads", key, message, "use a divisor of it"
    if draft.adapter.type:
        message = "an adapter beside weights that are split: its own matrices are not"
        yield _CODE, "adapter", message, "drop tp_size: ZeRO-3 and FSDP2 share a frozen base among the ranks"
    if draft.model.add_tokens:
        message = "rows for new tokens cannot be added to an embedding that is split"
        yield _CODE, "model.add_tokens", message, "drop tp_size, or add them to the model beforehand"
    noisy = [name for name, value in spec.config.items() if _drops(name, value)]
    if noisy:
        message = f"{noisy[0]} above 0: ranks that share a layer would drop different values of one tensor"
        yield _CODE, key, message, "drop tp_size, or use a model without dropout"
    read = [name for name in draft.data.metrics or [] if name != "perplexity"]
    if read or "compute_metrics" in (draft.python.hooks or []):
        message = "metrics would read each prediction once for every rank of a copy"
        yield _CODE, "data.metrics" if read else "python", message, "the evaluation loss is always reported"


def _drops(name: str, value: object) -> bool:
    return name.endswith(("dropout", "_pdrop")) and isinstance(value, (int, float)) and value > 0


def _tokens(draft: Draft, spec: ModelSpec, key: str, size: int) -> Iterator[Refusal]:
    """Sequence and context parallelism: each rank has a part of the tokens of a sample."""
    parts = size if key.endswith("sp_size") else 2 * size
    length = draft.data.max_length
    if length % parts:
        near = " or ".join(str(n * parts) for n in (length // parts, length // parts + 1) if n)
        message = f"{length} tokens do not divide into {parts} parts"
        yield "parallel-length", "data.max_length", message, f"use {near}"
    for what in ("data.packing", "data.padding_free"):
        if draft.at(what):
            message = f"documents of one row would see each other: {key} removes their mask"
            yield _CODE, what, message, f"use {what}: false, or tp_size, which keeps it"
    attention = draft.model.attn_implementation
    kernels = ("sdpa", "flash_attention_2") if key.endswith("sp_size") else ("sdpa",)
    if attention not in kernels:
        message = f"{key} needs attention {' or '.join(kernels)}, not {attention}"
        yield _CODE, "model.attn_implementation", message, f"use {kernels[0]}"
    window, _ = sliding_window(spec.model_type, spec.config, spec.num_layers)
    if window or "sliding_attention" in (spec.config.get("layer_types") or ()):
        message = f"{spec.name} attends within a window, which {key} ignores: it would attend to everything"
        yield "parallel-model", key, message, f"drop {key}; ZeRO-3 takes such models"
    if not key.endswith("sp_size") and draft.data.eval is not None:
        yield _CODE, "data.eval", f"evaluations were not tested with {key}", "drop data.eval, or use sp_size"
    micro = draft.trainer.per_device_train_batch_size
    if micro not in (None, 1):
        message, hint = f"{key} trains one sample at a time", "use 1: accumulation makes up the global batch"
        yield _CODE, "trainer.per_device_train_batch_size", message, hint
    scaled = [name for name in _SCALED if name in draft.deepspeed.profile]
    if scaled:
        message = f"the base profile sets {scaled[0]}, which changes how gradients are averaged"
        yield _CODE, "sharding.config", message, f"remove it from the profile, or drop {key}"
