"""Fixes for device placement, sharding engines and what DeepSpeed changes silently."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.engines.ddp import DDP
from launcher.models.families import type_of
from launcher.planner.fixes.fix import Fix, Situation


def _device_map_distributed(s: Situation) -> Mapping[str, object]:
    return {"model.device_map": None} if s.model.device_map and s.hardware.num_nodes > 1 else {}


def _device_map_zero(s: Situation) -> Mapping[str, object]:
    asked = s.draft.explicit("model.device_map") and s.model.device_map is not None
    return {"model.device_map": None} if asked and s.engine is not DDP else {}


def _device_map_ranks(s: Situation) -> Mapping[str, object]:
    asked = s.draft.explicit("model.device_map") and s.model.device_map is not None
    spawned = s.launch.launcher != "python"
    return {"model.device_map": None} if asked and spawned else {}


def _local_map(s: Situation) -> Mapping[str, object]:
    applies = s.quantization != "none" and s.model.device_map is None and s.sharding.zero_stage != 3
    return {"model.device_map": "local"} if applies else {}


def _zero3_no_map(s: Situation) -> Mapping[str, object]:
    return {"model.device_map": None} if s.sharding.zero_stage == 3 else {}


def _args_first(s: Situation) -> Mapping[str, object]:
    return {"runtime.training_arguments_first": True} if s.sharding.zero_stage == 3 else {}


def _zero3_int8(s: Situation) -> Mapping[str, object]:
    return {"sharding.zero_stage": 2} if s.sharding.zero_stage == 3 and s.quantization == "int8" else {}


def _zero3_four_bits(s: Situation) -> Mapping[str, object]:
    return (
        {"sharding.zero_stage": 2} if s.sharding.zero_stage == 3 and s.quantization in ("nf4", "fp4") else {}
    )


def _offload_optim(s: Situation) -> Mapping[str, object]:
    offloads = s.sharding.offload_optimizer != "none" and s.engine.has_stages
    plain = str(s.trainer.optim).startswith("adamw_torch")
    return {"trainer.optim": "adamw_torch"} if offloads and not plain else {}


def _offload_param(s: Situation) -> Mapping[str, object]:
    useless = s.sharding.offload_param != "none" and s.engine.has_stages and s.sharding.zero_stage != 3
    return {"sharding.offload_param": "none"} if useless else {}


def _offload_stage0(s: Situation) -> Mapping[str, object]:
    useless = s.sharding.offload_optimizer != "none" and s.sharding.zero_stage == 0
    return {"sharding.zero_stage": 1} if useless else {}


def _auto_batch(s: Situation) -> Mapping[str, object]:
    return {"trainer.auto_find_batch_size": False} if s.trainer.auto_find_batch_size else {}


def _nan_filter(_: Situation) -> Mapping[str, object]:
    return {"trainer.logging_nan_inf_filter": False}


def _no_kernel(s: Situation) -> Mapping[str, object]:
    asked = s.model.attn_implementation
    biased = asked == "flash_attention_2" and s.spec.layout.biases_scores
    capped = asked == "sdpa" and (type_of(s.spec.model_type).only_eager or not s.spec.has_sdpa)
    return {"model.attn_implementation": "eager"} if biased or capped else {}


DEVICE_FIXES = (
    Fix(
        id="attention-kernel",
        title="an attention kernel that the model does not have",
        condition="T5 or mT5 with flash_attention_2; Gemma-2, BLOOM and other families without it with sdpa",
        action="refuse",
        reason="T5 and BLOOM add a bias to each pair of positions and Gemma-2 caps its scores; transformers "
        "refuses the kernel when the weights are loaded, after the job has waited in the queue.",
        source="transformers/models/t5/modeling_t5.py _supports_flash_attn; _supports_sdpa of gemma2, bloom",
        versions="transformers>=5",
        changes=_no_kernel,
        hint="drop model.attn_implementation",
        early=True,
    ),
    Fix(
        id="device-map-distributed",
        title="device_map against distributed launch",
        condition="model.device_map with more than one process",
        action="refuse",
        reason="device_map spreads one process's layers over devices; with several processes accelerate "
        "stops: 'You can't train a model that has been loaded with device_map=auto in any distributed mode'.",
        source="accelerate/accelerator.py prepare_model",
        versions="*",
        changes=lambda s: _device_map_distributed(s) or _device_map_ranks(s),
        hint="drop model.device_map (each rank then holds the model), or launch.launcher: python",
        early=True,
    ),
    Fix(
        id="zero-device-map-asked",
        title="device_map under DeepSpeed or FSDP2",
        condition="model.device_map in the recipe with engine deepspeed or fsdp",
        action="refuse",
        reason="The engine places the weights itself; ZeRO-3 refuses any device_map at load.",
        source="transformers/integrations/accelerate.py check_and_set_device_map",
        versions="*",
        changes=_device_map_zero,
        hint="drop model.device_map, or use sharding.engine: ddp with one process",
        early=True,
    ),
    Fix(
        id="zero3-int8",
        title="int8 base under ZeRO-3",
        condition="zero_stage 3 with quantization int8",
        action="refuse",
        reason="Partitioned int8 weights have a history of wrong losses and of 'Only Tensors of floating "
        "point and complex dtype can require gradients'.",
        source="axolotl-ai-cloud/axolotl#2068; huggingface/accelerate#3730",
        versions="*",
        changes=_zero3_int8,
        hint="use zero_stage 2 or nf4, or disable this fix to insist",
    ),
    Fix(
        id="zero3-4bit-load",
        title="ZeRO-3 loads a 4-bit base whole",
        condition="zero_stage 3 with quantization nf4 or fp4",
        action="warn",
        reason="Quantised weights are partitioned after they are loaded: each device holds the whole base "
        "model once, whatever its share.",
        source="transformers/modeling_utils.py get_init_context (no zero.Init for quantised models)",
        versions="*",
        changes=_zero3_four_bits,
        hint="a stage below 3 where the base model fits one device",
    ),
    Fix(
        id="offload-needs-adamw",
        title="CPU offload trains with DeepSpeedCPUAdam only",
        condition="offload_optimizer cpu under ZeRO with an optimizer other than adamw_torch*",
        action="refuse",
        reason="accelerate swaps the optimizer for one of DeepSpeed's silently: 8-bit AdamW becomes "
        "plain Adam, and Adafactor, Adagrad and Lion crash.",
        source="accelerate/utils/deepspeed.py map_pytorch_optim_to_deepspeed",
        versions="accelerate>=0.25",
        changes=_offload_optim,
        hint="use trainer.optim: adamw_torch, or offload_optimizer: none",
        early=True,
    ),
    Fix(
        id="offload-param-stage",
        title="parameter offload needs ZeRO-3",
        condition="offload_param cpu below zero_stage 3",
        action="refuse",
        reason="DeepSpeed accepts the key at stages 0 to 2 and does nothing.",
        source="deepspeed/runtime/zero/config.py",
        versions="*",
        changes=_offload_param,
        hint="set zero_stage: 3 or drop offload_param",
    ),
    Fix(
        id="offload-optimizer-stage",
        title="optimizer offload needs ZeRO",
        condition="offload_optimizer cpu at zero_stage 0",
        action="refuse",
        reason="At stage 0 there is no ZeRO optimizer that could be offloaded; the key has no effect.",
        source="deepspeed/runtime/engine.py _configure_optimizer",
        versions="*",
        changes=_offload_stage0,
        hint="set zero_stage: 1, 2 or 3",
    ),
    Fix(
        id="auto-find-batch-size",
        title="auto_find_batch_size changes the global batch",
        condition="trainer.auto_find_batch_size",
        action="refuse",
        reason="It halves the micro-batch without raising accumulation, so another batch size is trained "
        "than asked for, and ZeRO-3 refuses it.",
        source="transformers/trainer.py; huggingface/transformers#24558",
        versions="*",
        changes=_auto_batch,
        hint="drop it: the planner finds the largest micro-batch that fits at the same global batch",
        early=True,
    ),
    Fix(
        id="local-device-map",
        title="each rank loads a quantised base on its own device",
        condition="quantised base without device_map, ZeRO stage below 3",
        action="set",
        reason="Without a map every rank would load onto device 0: 'in 8-bit or 4-bit precision on a "
        "different device than the one you're training on'.",
        source="accelerate/accelerator.py prepare_model",
        versions="*",
        changes=_local_map,
    ),
    Fix(
        id="zero3-no-device-map",
        title="no device_map under ZeRO-3",
        condition="zero_stage 3",
        action="set",
        reason="from_pretrained refuses it: 'DeepSpeed Zero-3 is not compatible with passing a device_map'.",
        source="transformers/integrations/accelerate.py check_and_set_device_map",
        versions="*",
        changes=_zero3_no_map,
    ),
    Fix(
        id="zero3-args-before-model",
        title="TrainingArguments before the model under ZeRO-3",
        condition="zero_stage 3",
        action="set",
        reason="TrainingArguments registers the ZeRO-3 config that makes from_pretrained partition while "
        "loading; built later, every rank silently holds the whole model.",
        source="transformers/integrations/deepspeed.py is_deepspeed_zero3_enabled",
        versions="*",
        changes=_args_first,
    ),
    Fix(
        id="nan-shown-as-zero",
        title="a nan loss is logged as nan",
        condition="always",
        action="set",
        reason="The Trainer's default replaces nan by 0.0 in the log, so a dead run looks perfect.",
        source="transformers/training_args.py logging_nan_inf_filter",
        versions="*",
        changes=_nan_filter,
        yields=True,
    ),
)
