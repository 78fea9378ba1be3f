"""What trains faster while the same is learned: attention kernel, batches, loss, casts and workers. Pure.

A value of the recipe stays; where it is impossible it is refused at its line. What is decided here keeps the
samples of a step and their gradients, up to the order in which numbers are added.

Laid end to end, the samples of a batch are one row without padding. The samples and their gradients stay the
same, unlike with packing, under which a batch of N holds more of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.engines import engine_of
from launcher.machine.hardware import AMPERE, VOLTA
from launcher.memory.states import MIXED
from launcher.models.capabilities import chunk_rows, is_varlen
from launcher.models.families import type_of
from launcher.models.lora import adapted_by
from launcher.models.model import ModelSpec
from launcher.models.model_types import why_not_apart, why_not_chunked, why_not_compiled
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.planner.candidates import Candidate
from launcher.planner.decide import shares
from launcher.planner.own_code import turned_off
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named

ATTENTION, FREE, MULTIPLE = "model.attn_implementation", "data.padding_free", "data.pad_to_multiple_of"
LIGER = "liger-kernel"
MOST_WORKERS, WORKERS_ELSEWHERE, PREFETCHED = 4, 2, 2
COMPILED_FROM_SECONDS = 3600
"""Predicted length of a run from which compiling its blocks, which takes minutes, pays off."""
PLAIN_LORA = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "bias",
        "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
        "alpha_pattern", "fan_in_fan_out", "task_type", "inference_mode", "type", "path",
        "cast_input_dtype_enabled", "autocast_adapter_dtype",
    }
)  # fmt: skip
"""Fields under which a LoRA layer only multiplies its input: what autocast narrows again is the same. DoRA
also takes the norm of weights in the input's dtype."""


def decide_throughput(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """Kernel, batches, loss, casts and workers; after precision, engine and weights are decided.

    RecipeError for what the recipe asks for and is impossible.
    """
    _decide_batches(draft, recipe, facts)
    _decide_liger(draft, recipe, facts)
    _decide_loss(draft, recipe, facts)
    _decide_compile(draft, recipe)
    _decide_casts(draft, recipe)
    _decide_vocabulary(draft, recipe, facts)
    _decide_tf32(draft, facts)
    _decide_workers(draft, recipe, facts)


def _decide_batches(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """Kernel, padding, the multiple of a row. RecipeError for an impossible kernel."""
    _check_kernel(draft, recipe, facts)
    asked = recipe.model.attn_implementation
    usual, why_usual = _usual(facts.model)
    flattening = usual if why_not_apart(facts.model.config, "varlen") else "varlen"
    padded = _why_padded(draft, recipe, facts.model, asked or flattening)
    if asked is not None:
        draft.put_recipe(ATTENTION, asked, "")
    elif recipe.data.padding_free is False:
        draft.put(ATTENTION, usual, why_usual)
    elif why := (padded if recipe.data.padding_free is None else "") or _why_not_chosen(draft, recipe, facts):
        draft.put(ATTENTION, usual, f"{why_usual}; not varlen: {why}")
    else:
        reason = "each sample of a batch attends to itself alone: nothing is spent on padding, or on a mask"
        draft.put(ATTENTION, "varlen", reason)
    _decide_padding_free(draft, recipe, padded)
    _decide_multiple(draft, recipe, facts)


def _usual(spec: ModelSpec) -> tuple[str, str]:
    if type_of(spec.model_type).only_eager:
        return "eager", "its attention scores, capped or with sinks, have no sdpa kernel in transformers"
    if not spec.has_sdpa:
        return "eager", f"transformers has no sdpa attention for {spec.model_type}"
    return "sdpa", "torch's own kernels: present on every device, no extra package"


def _decide_padding_free(draft: Draft, recipe: Recipe, padded: str) -> None:
    kernel = draft.model.attn_implementation
    if recipe.data.padding_free is not None:
        draft.put_recipe(FREE, recipe.data.padding_free, "")
    elif padded and not (recipe.data.packing and is_varlen(kernel)):  # packs hold several documents anyway
        draft.put(FREE, False, padded)
    elif is_varlen(kernel):
        reason = f"{kernel} takes the same samples side by side: what was padding is not computed"
        draft.put(FREE, True, reason)
    else:
        draft.put(FREE, False, f"{kernel} would pay for a mask over the whole batch")


def _why_padded(draft: Draft, recipe: Recipe, spec: ModelSpec, kernel: str) -> str:
    """Why the samples of a batch are not put into one row by default; empty where they may be."""
    noise = "trainer.neftune_noise_alpha"
    if not draft.task.flattens:
        return "not asked for; its samples are padded"
    if off := turned_off(draft, FREE):
        return off
    if leaks := why_not_apart(spec.config, kernel):
        return leaks
    if _is_foreign(draft, spec):
        return "the model's code is the repository's own: nobody knows whether samples in one row stay apart"
    if shares(recipe):
        return "ranks that share a copy take rows apart"
    if draft.trainer.use_cache:
        return "with a cache samples in one row would see each other"
    if draft.trainer.neftune_noise_alpha:
        return f"{noise}: its noise follows from the length of a row"
    if spec.config.get("output_router_logits"):
        return "the loss of the routers counts every token of a row"
    if recipe.data.packing and _reads_predictions(draft, recipe):  # evaluations of samples stay padded
        return "metrics read the predictions of each pack"
    if "dispatch_batches" in str(draft.trainer.accelerator_config):
        return "trainer.accelerator_config deals out a batch by its rows"
    return ""


def _is_foreign(draft: Draft, spec: ModelSpec) -> bool:
    """Whether the model's class comes from its repository, and not from transformers."""
    return bool(draft.model.trust_remote_code) and "auto_map" in spec.config


def _reads_predictions(draft: Draft, recipe: Recipe) -> bool:
    read = [name for name in recipe.data.metrics if name != "perplexity"]
    own = "compute_metrics" in (draft.python.hooks or [])
    return recipe.data.eval is not None and (bool(read) or own)


def _why_not_chosen(draft: Draft, recipe: Recipe, facts: Facts) -> str:
    """Why the kernel is not the default; empty where it is."""
    if _attention_dropout(facts.model) > 0:
        return f"{facts.model.name} drops attention weights, which torch's kernel for it does not"
    return _why_not_varlen(draft, recipe, facts)


def _why_not_varlen(draft: Draft, recipe: Recipe, facts: Facts) -> str:
    """Why this model cannot have the kernel; empty where it can."""
    spec = facts.model
    if not draft.task.flattens:
        return f"task {draft.task.name} was not tried with it"
    if off := turned_off(draft, FREE):
        return off
    if spec.layout.caps_scores:
        return f"{spec.name} caps its scores, which it cannot"
    if leaks := why_not_apart(spec.config, "varlen"):
        return leaks
    if shares(recipe):
        return "ranks that share a copy divide attention in their own way"
    if _is_foreign(draft, spec):
        return "the model's code is the repository's own"
    return ""


def _attention_dropout(spec: ModelSpec) -> float:
    given = spec.config.get("attention_dropout")
    drops = [float(given)] if isinstance(given, (int, float)) else []
    return max(drops + [stack.attention_dropout for stack in spec.layout.stacks])


def _check_kernel(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """RecipeError for varlen or flex_attention that the recipe asks for and the model cannot use."""
    asked, spec = recipe.model.attn_implementation, facts.model
    why = ""
    if asked == "varlen":
        why = _why_not_varlen(draft, recipe, facts)
    elif asked == "flex_attention" and facts.hardware.is_cpu:
        why = "torch has no backward pass of it for a CPU"
    elif asked == "flex_attention" and (spec.foreign or why_not_apart(spec.config, asked)):
        why = f"{spec.model_type} was not tried with it"
    elif asked == "flex_attention" and _attention_dropout(spec) > 0:
        why = f"it has no dropout, and {spec.name} drops attention weights"
    elif asked == "flex_attention" and shares(recipe):
        why = "ranks that share a copy divide attention in their own way"
    if why:
        draft.put_recipe(ATTENTION, asked, "")
        message = f"{asked} is impossible here: {why}"
        raise draft.refuse("attention-conflict", ATTENTION, message, "drop it: the plan chooses a kernel")


def _decide_multiple(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """The multiple of tokens to which the rows of a batch are padded; None: to the longest row."""
    hardware, asked = facts.hardware, recipe.data.pad_to_multiple_of
    if asked is not None:
        draft.put_recipe(MULTIPLE, asked, "")
        if draft.task.pads_as_asked:
            draft.put("trainer.pad_to_multiple_of", asked, f"trl pads to {MULTIPLE}")
        multiple = _tensor_multiple(hardware.compute_capability)
        if not hardware.is_cpu and asked > 1 and asked % multiple:  # 1: nothing is padded
            draft.warn(f"{MULTIPLE}: {asked} is no multiple of {multiple}, which tensor cores want here")
    elif own := draft.task.own_padding or turned_off(draft, MULTIPLE):
        draft.put(MULTIPLE, None, own)
    elif hardware.is_cpu:
        draft.put(MULTIPLE, None, "a CPU gains nothing from it, and every padded token costs there")
    else:
        multiple = _tensor_multiple(hardware.compute_capability)
        reason = f"tensor cores want multiples of {multiple}"
        length = recipe.data.max_length
        if length % multiple:
            filled = -(-length // multiple) * multiple
            reason += f"; data.max_length {length} is none, so rows of that length are filled up to {filled}"
        draft.put(MULTIPLE, multiple, reason, source="hardware", by=hardware.device)


def _tensor_multiple(capability: tuple[int, int] | None) -> int:
    """The multiple that sizes need for tensor cores."""
    return 64 if capability is not None and capability >= AMPERE else 8


def _decide_liger(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    """Set where it is on, or where a GPU could have it; upstream's default is off."""
    key, hardware, spec = "trainer.use_liger_kernel", facts.hardware, facts.model
    capability = hardware.compute_capability
    experts = _float32_before_experts(draft, spec)
    if key in draft.names and draft.trainer.use_liger_kernel and experts:
        raise draft.refuse("liger-conflict", key, f"true is impossible here: {experts}", "drop it")
    if key in draft.names or hardware.is_cpu or not draft.task.causal_loss:
        return
    changed = _changed_head(draft, recipe, spec)
    if not type_of(spec.model_type).liger:
        off = f"Liger has no kernels for {spec.model_type}"
    elif LIGER not in facts.versions:
        off = "liger-kernel is not installed here: pip install 'effilaunch[liger]'"
    elif capability is None or capability < VOLTA:
        off = "Triton, which compiles its kernels, needs compute capability 7.0"
    elif shares(recipe):
        off = "was not tried with ranks that share a copy"
    elif experts:
        off = experts
    elif own := turned_off(draft, key):
        off = own
    elif changed:
        off = f"its loss reads the head's own matrix alone: {changed}"
    elif draft.trainer.label_smoothing_factor:
        off = "its loss knows no label smoothing"
    else:
        reason = f"kernels for {spec.model_type}, whose loss holds no logits of all words"
        draft.put(key, True, reason, source="hardware", by=hardware.device)
        return
    draft.put(key, False, off)


def _float32_before_experts(draft: Draft, spec: ModelSpec) -> str:
    """Why Liger's kernels for experts, which know no autocast, get other dtypes than the weights have.

    Seen on an H100 with liger-kernel 0.8.5 for a 4-bit base, whose norms are float32: the kernel does not
    compile ("Both operands must be same dtype").
    """
    if not type_of(spec.model_type).liger_experts:
        return ""
    if draft.model.quantization != "none":
        return (
            "norms of a quantised base give float32, and Liger's kernels for experts take the weights' dtype"
        )
    if draft.precision in ("bf16", "fp16") and draft.model.dtype == "float32":
        return "Liger's kernels for experts know no autocast: they would multiply in float32"
    return ""


def _decide_loss(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    key, asked = "model.loss", recipe.model.loss
    full = _why_full(draft, recipe, facts)
    if asked is not None:
        if asked == "chunked" and full:
            raise draft.refuse("loss-conflict", key, f"chunked is impossible here: {full}", "use loss: full")
        draft.put_recipe(key, asked, "")
        return
    if full:
        draft.put(key, "full", full)
        return
    rows, words = chunk_rows(facts.model.vocab_size), facts.model.vocab_size
    reason = (
        f"logits of {rows:,} target tokens at a time ({words:,} each); the full logits are never materialised"
    )
    draft.put(key, "chunked", reason)


def _why_full(draft: Draft, recipe: Recipe, facts: Facts) -> str:
    """Why the loss has to see all logits at once; empty where it need not."""
    spec, task = facts.model, draft.task.name
    capped = spec.layout.caps_logits or spec.config.get("final_logit_softcapping") is not None
    if not task_named(task).causal_loss:
        return f"task {task} has a loss of its own"
    if off := turned_off(draft, "model.loss"):
        return off
    if draft.trainer.use_liger_kernel:
        return "Liger's loss rules, which makes no logits either"
    if capped:
        return f"{spec.model_type} caps its logits"
    if more := why_not_chunked(spec.config):
        return more
    if _is_foreign(draft, spec):
        return "the model's code is the repository's own"
    if shares(recipe):
        return "ranks that share a copy have a loss of their own"
    if draft.model.device_map:
        return "model.device_map may put the head on another device"
    if draft.trainer.label_smoothing_factor:
        return "label smoothing reads all logits"
    if draft.trainer.torch_compile:
        return "trainer.torch_compile compiles the complete model, and the number of target tokens varies"
    return _changed_head(draft, recipe, spec)


def _changed_head(draft: Draft, recipe: Recipe, spec: ModelSpec) -> str:
    """Why the head is more than one matrix; empty where it is none."""
    if draft.adapter.path is not None:
        return "the adapter that is continued may change the head"
    if draft.adapter.type is None:
        return ""
    if recipe.model.add_tokens or draft.adapter.trainable_token_indices:
        return "the rows of added tokens are trained in addition to the frozen head"
    if draft.adapter.modules_to_save or draft.adapter.target_parameters:
        return "the adapter may train the head or the embedding tied to it"
    paths = adapted_by(spec, draft.fields(draft.adapter)).paths
    tied = spec.layout.embed_paths[:1] if spec.head.tied else ()
    if paths is not None and {spec.head.name, *tied} & set(paths):
        return "the adapter changes the head, or the embedding tied to it"
    return ""


def _decide_compile(draft: Draft, recipe: Recipe) -> None:
    """What is known before sizes are; `settle_compile` decides."""
    key, asked = "model.compile_blocks", recipe.model.compile_blocks
    if asked and shares(recipe):
        message = "was not tried with ranks that share a copy"
        raise draft.refuse("compile-conflict", key, message, "drop it, or tp_size, sp_size and cp_size")
    draft.put_recipe(key, bool(asked), "")


def settle_compile(draft: Draft, recipe: Recipe, chosen: Candidate, facts: Facts) -> None:
    """Whether blocks are compiled, once stage and predicted time of the run are known."""
    if recipe.model.compile_blocks is None:
        off = turned_off(draft, "model.compile_blocks") or _why_not_beside(draft)
        off = off or _why_not_compiled(draft, recipe, chosen, facts)
        seconds = chosen.time.low * _steps(draft)
        reason = off or f"the run takes {seconds / 3600:.1f} h or more, compiling a block a few minutes"
        draft.put("model.compile_blocks", not off, reason)


def _steps(draft: Draft) -> int:
    steps = draft.trainer.max_steps
    return steps if isinstance(steps, int) and steps > 0 else 0


def _why_not_beside(draft: Draft) -> str:
    """Empty where nothing else that the plan has excludes compiled blocks."""
    if draft.trainer.torch_compile:
        return "trainer.torch_compile compiles the complete model"
    if draft.sharding.offload_activations != "none":
        return "the copies of sharding.offload_activations would break each layer's graph"
    return ""


def _why_not_compiled(draft: Draft, recipe: Recipe, chosen: Candidate, facts: Facts) -> str:
    """Empty where it pays: only for a device with known figures and a run whose steps are known."""
    hardware, job = facts.hardware, chosen.job
    capability = hardware.compute_capability
    if hardware.is_cpu:
        return "a CPU compiles for minutes and gains little"
    if draft.tiny:
        return "a rehearsal is too short"
    if not draft.task.causal_loss or _is_foreign(draft, facts.model):
        return "was tried with transformers' own causal language models alone"
    if untried := why_not_compiled(facts.model.model_type):
        return untried
    if capability is None or capability < AMPERE:
        return "was meant for compute capability 8.0 and later"
    if draft.model.quantization != "none":
        return "bitsandbytes' products break the graph"
    if shares(recipe):
        return "was not tried with ranks that share a copy"
    if job.engine.stage(job) > 2:
        return "weights that are gathered layer by layer break the graph"
    if not _steps(draft) or not chosen.time.figures_known:
        return "how long the run takes is not known: it pays from an hour on"
    if chosen.time.low * _steps(draft) < COMPILED_FROM_SECONDS:
        return "the run may take less than an hour: compiling would cost more than it gains"
    return ""


def _decide_casts(draft: Draft, recipe: Recipe) -> None:
    """Copies in float32 that a LoRA adapter makes: of its input, and of its own weights."""
    if recipe.adapter is None:
        return
    key, own = "adapter.cast_input_dtype_enabled", "adapter.autocast_adapter_dtype"
    if not recipe.adapter.autocast_adapter_dtype and draft.precision == "fp16":
        message = "false makes float16 adapters, whose gradients the loss scaler refuses"
        raise draft.refuse("adapter-dtype", own, message, "drop it, or use another precision")
    draft.put_recipe(own, recipe.adapter.autocast_adapter_dtype, _FLOAT_ADAPTER)
    if recipe.adapter.cast_input_dtype_enabled is not None:
        draft.put_recipe(key, recipe.adapter.cast_input_dtype_enabled, "")
        return
    more = sorted({k for k, v in recipe.adapter.model_dump().items() if v} - PLAIN_LORA)
    autocast = draft.precision in MIXED and engine_of(draft).has_autocast
    if not autocast:
        draft.put(key, True, "peft's default: no autocast here, so products need it")
    elif draft.adapter.path is not None:
        draft.put(key, True, "the adapter that is continued may have dropout")
    elif draft.adapter.lora_dropout:
        draft.put(key, True, "dropout would round in 16 bits")
    elif more:
        draft.put(key, True, f"adapter.{more[0]} was not compared without it")
    else:
        draft.put(key, False, "autocast narrows the copy again: the same numbers, without the copy")


_FLOAT_ADAPTER = "peft's default: the adapter's weights and updates are kept in float32"


def _decide_vocabulary(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    key, hardware, words = "model.vocab_multiple", facts.hardware, facts.model.vocab_size
    asked, added = recipe.model.vocab_multiple, len(recipe.model.add_tokens)
    if asked is not None:
        if shares(recipe):
            message = "an embedding that is split cannot get further rows"
            raise draft.refuse("vocabulary-conflict", key, message, "drop it, or change the model beforehand")
        draft.put_recipe(key, asked, "")
        return
    reason = "further words would take part in every softmax: another model"
    multiple = _tensor_multiple(hardware.compute_capability)
    if not hardware.is_cpu and words and (words + added) % multiple:
        reason += f"; {words + added:,} words are no multiple of {multiple}, which tensor cores want"
        if added:
            draft.warn(
                f"the vocabulary may grow to {words + added:,} words, no multiple of {multiple}, which "
                f"tensor cores want; model.vocab_multiple: {multiple} pads it with tokens that are never used"
            )
    draft.put(key, None, reason)


def _decide_tf32(draft: Draft, facts: Facts) -> None:
    """Of a device that has it; on others nothing is set."""
    key, capability = "trainer.tf32", facts.hardware.compute_capability
    if key in draft.names or capability is None or capability < AMPERE:
        return
    if draft.precision == "fp32":
        draft.put(
            key, None, "true would be faster, with products of 10 bits of mantissa: not what fp32 means"
        )
        return
    reason = "products that stay in float32 beside 16-bit ones use the tensor cores"
    draft.put(key, True, reason, source="hardware", by=facts.hardware.device)


def _decide_workers(draft: Draft, recipe: Recipe, facts: Facts) -> None:
    workers, hardware = "trainer.dataloader_num_workers", facts.hardware
    ahead: Mapping[str, tuple[object, str]] = {
        "trainer.dataloader_prefetch_factor": (PREFETCHED, "batches that each worker has ready"),
        "trainer.dataloader_persistent_workers": (True, "started once, not for each epoch"),
    }
    asking = [name for name in ahead if draft.at(name)]
    if workers in draft.names:
        if asking and draft.trainer.dataloader_num_workers == 0:
            message = f"there are no workers for it: {workers.removeprefix('trainer.')} is 0"
            raise draft.refuse("workers-conflict", asking[0], message, f"drop it, or set {workers}: 1")
        return
    count, reason = _workers(recipe, facts)
    if count == 0 and asking:
        count, reason = 1, f"{asking[0]} is about workers; without it none, since {reason}"
    draft.put(workers, count, reason, source="hardware", by=hardware.device)
    for name, (value, why) in ahead.items():
        if count and name not in draft.names:
            draft.put(name, value, why)


def _workers(recipe: Recipe, facts: Facts) -> tuple[int, str]:
    hardware = facts.hardware
    if hardware.is_cpu:
        return 0, "a CPU's cores train"
    if facts.tiny:
        return 0, "a rehearsal's rows are few"
    if recipe.data.streaming:
        return 0, "each worker would stream a share of its own, in another order"
    if facts.host_bytes is None:
        return WORKERS_ELSEWHERE, "makes batches while the device computes; cores there are not known"
    spare = max(0, facts.cpu_cores // hardware.devices_per_node - 1)
    reason = f"{facts.cpu_cores} cores for {hardware.devices_per_node} ranks, one of them left to each rank"
    return min(MOST_WORKERS, spare), reason
