"""What engine fsdp (FSDP2, through accelerate) is given, and what it is not given. Pure.

`sharding.engine: auto` never chooses it: DeepSpeed stays the engine that shards, because its stages, offload
and quantised bases are covered by more tests. FSDP2 was run over CPU processes; on GPUs nothing of it was
measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.errors import RecipeError
from launcher.facts.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.planner.decide import processes_of, refuse
from launcher.recipe.optimizer_needs import IN_SHARDS
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named

_SHARDS = "checkpoints of engine fsdp are shards, nothing that from_pretrained reads"
_CONFIG = "trainer.accelerator_config"


def decide_fsdp(draft: Draft, recipe: Recipe, hardware: Hardware) -> None:
    """Settings of engine fsdp, nothing for another engine. RecipeError for what FSDP2 cannot train."""
    if draft.sharding.engine != "fsdp":
        return
    for conflict in _conflicts(draft, recipe, hardware):
        raise conflict
    if hardware.is_cpu:
        draft.warn(
            "accelerate does not shard over CPU processes: it sets up DDP in place of FSDP2, and the run "
            "stops with engine-mismatch; use sharding.engine: deepspeed there"
        )
    weights_alone = bool(draft.trainer.save_only_model)
    settings: dict[str, tuple[object, str]] = {
        "version": (2, "FSDP1 is deprecated"),
        "auto_wrap_policy": (
            "TRANSFORMER_BASED_WRAP",
            "a layer is the unit that is gathered; the model's class names it (_no_split_modules)",
        ),
        "reshard_after_forward": (True, "a layer's weights are freed after its forward pass, as in ZeRO-3"),
        "activation_checkpointing": (
            False,
            "FSDP's own recomputes with other dropout masks; the Trainer's is used",
        ),
        "cpu_ram_efficient_loading": _loading(draft),
        "state_dict_type": (
            "FULL_STATE_DICT" if weights_alone else "SHARDED_STATE_DICT",
            "trainer.save_only_model: a model that from_pretrained reads"
            if weights_alone
            else "each rank writes its own shards; only the end of the run gathers the model",
        ),
    }
    for name, (value, reason) in settings.items():
        draft.put(f"fsdp.{name}", value, reason)
    if draft.trainer.push_to_hub and draft.trainer.hub_strategy is None and not weights_alone:
        draft.put("trainer.hub_strategy", "end", f"{_SHARDS}; the result is whole")
    _reduce_each(draft)


def _loading(draft: Draft) -> tuple[bool, str]:
    """Whether the first rank of a machine reads the weights for all, and why.

    The other ranks hold empty tensors until FSDP2 shards what rank 0 has, so nothing may be made of the
    weights before: no rows for new tokens, and no new head, which the others would not have at all.
    """
    if draft.model.config is not None:
        return False, "random weights are made, alike on every rank"
    if draft.model.gguf_file:
        return False, "each rank reads the GGUF file, which is dequantised"
    if draft.model.add_tokens:
        return False, "each rank reads the weights: rows of added tokens are made from them"
    if not draft.task.head_in_checkpoint:
        return False, "each rank reads the weights: a new head is not in the checkpoint"
    return True, "one rank of a machine reads the weights, the others get their shards from it"


def _reduce_each(draft: Draft) -> None:
    """Have gradients reduced after every micro-batch, where the recipe leaves it open.

    Upstream's default waits for the last one: between the micro-batches of a step every rank would hold the
    gradients of the whole model, summed up in the precision of the computation.
    """
    said = draft.trainer.accelerator_config
    if said is not None and (not isinstance(said, Mapping) or "gradient_accumulation_kwargs" in said):
        return
    reason = "gradients stay shards between the micro-batches of a step, as in ZeRO-3"
    draft.put(_CONFIG, {**(said or {}), "gradient_accumulation_kwargs": {"sync_each_batch": True}}, reason)


def reduces_each(draft: Draft) -> bool:
    """Whether FSDP2 reduces gradients after every micro-batch."""
    config = draft.trainer.accelerator_config
    if draft.sharding.engine != "fsdp" or not isinstance(config, Mapping):
        return False
    given = config.get("gradient_accumulation_kwargs")
    return isinstance(given, Mapping) and bool(given.get("sync_each_batch"))


def _conflicts(draft: Draft, recipe: Recipe, hardware: Hardware) -> Iterator[RecipeError]:
    """A refusal for each thing that FSDP2 cannot train, with what can."""
    sharding, optim = recipe.sharding, draft.trainer.optim
    other = "use sharding.engine: deepspeed"
    offloads = {sharding.offload_optimizer, sharding.offload_param} - {"none", "auto"}
    if sharding.zero_stage != "auto" or sharding.config is not None or offloads:
        message = "engine fsdp has no zero_stage, offload or DeepSpeed profile"
        yield refuse(draft, "engine-conflict", "sharding.engine", message, f"drop them, or {other}")
    if processes_of(recipe, hardware) == 1:
        message = "engine fsdp over one process has nothing to shard, and the Trainer refuses it"
        hint = "use sharding.engine: auto, or hardware with several devices"
        yield refuse(draft, "engine-conflict", "sharding.engine", message, hint)
    if task_named(recipe.task).is_encoder_decoder:
        message = (
            "engine fsdp and an encoder-decoder: both sides share an embedding, which FSDP2 refuses in two "
            "groups ('is shared with a parameter already managed by another FSDP group')"
        )
        yield refuse(draft, "engine-conflict", "sharding.engine", message, other)
    if draft.precision == "fp16":
        message = "fp16 and engine fsdp: how FSDP2 goes with a loss scaler was not tested"
        yield refuse(
            draft, "precision-conflict", "precision", message, f"use precision: bf16 or fp32, or {other}"
        )
    if draft.model.quantization != "none":
        message = (
            "engine fsdp cannot shard int8 and 4-bit weights: FSDP2 leaves their bytes whole on every rank"
        )
        hint = f"{other} (int8 with zero_stage 2), or drop model.quantization"
        yield refuse(draft, "fsdp-quantized", "model.quantization", message, hint)
    every_save = draft.trainer.push_to_hub and draft.trainer.hub_strategy == "every_save"
    if every_save and not draft.trainer.save_only_model:
        hint = "use hub_strategy: end, or checkpoint to send what a run can go on from"
        yield refuse(draft, "fsdp-push", "trainer.hub_strategy", _SHARDS, hint)
    if optim not in IN_SHARDS:
        message = f"optimizer {optim} does not update FSDP2's shards"
        yield refuse(
            draft,
            "fsdp-optimizer",
            "trainer.optim",
            message,
            f"use one of {', '.join(IN_SHARDS)}, or {other}",
        )
