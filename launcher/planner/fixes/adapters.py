"""Fixes for adapters, activation checkpointing and quantised bases."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.engines.ddp import DDP
from launcher.models.lora import adapted_by, adapter_fields, is_all_linear, reach_of
from launcher.planner.fixes.fix import Fix, Situation

NON_REENTRANT = {"use_reentrant": False}
_READ_WEIGHTS = ("pissa", "corda", "loftq", "mica", "orthogonal")
"""Beginnings of an adapter that compute with the base's weights as they are stored. OLoRA unpacks them."""


def _input_grads(s: Situation) -> Mapping[str, object]:
    applies = s.has_adapter and s.quantization == "none" and s.trainer.activation_checkpointing
    return {"model.enable_input_require_grads": True} if applies else {}


def _no_kbit_prepare(s: Situation) -> Mapping[str, object]:
    applies = s.has_adapter and s.quantization == "none"
    return {"model.prepare_for_kbit": False} if applies else {}


def _kbit_prepare(s: Situation) -> Mapping[str, object]:
    return {"model.prepare_for_kbit": True} if s.has_adapter and s.quantization != "none" else {}


def _non_reentrant(s: Situation) -> Mapping[str, object]:
    if not s.trainer.activation_checkpointing:
        return {}
    given = s.trainer.activation_checkpointing_kwargs or {}
    merged = {**given, **NON_REENTRANT}
    return {} if merged == given else {"trainer.activation_checkpointing_kwargs": merged}


def _ddp_unused(s: Situation) -> Mapping[str, object]:
    applies = s.has_adapter and s.processes > 1
    return {"trainer.ddp_find_unused_parameters": False} if applies else {}


def _ready_twice(s: Situation) -> Mapping[str, object]:
    """Both halves of the failure, asked for by the recipe; what it leaves open is set above."""
    again = s.trainer.activation_checkpointing
    reentrant = (s.trainer.activation_checkpointing_kwargs or {}).get("use_reentrant")
    searches = s.trainer.ddp_find_unused_parameters
    ddp = s.engine is DDP and s.processes > 1
    return {"trainer.ddp_find_unused_parameters": False} if ddp and again and reentrant and searches else {}


def _reads_text(s: Situation) -> bool:
    return s.task.reads_tokens


def _use_cache(s: Situation) -> Mapping[str, object]:
    return {"trainer.use_cache": False} if _reads_text(s) else {}


def _pad_token(s: Situation) -> Mapping[str, object]:
    return {"model.pad_token": "ensure"} if _reads_text(s) else {}


def _dpo_dropout(s: Situation) -> Mapping[str, object]:
    drops = s.adapter.lora_dropout and s.trainer.disable_dropout is not False
    return {"adapter.lora_dropout": 0.0} if drops and not s.task.adapter_dropout else {}


def _purely_quantized(s: Situation) -> Mapping[str, object]:
    return {"model.quantization": "none"} if s.quantization != "none" and not s.has_adapter else {}


def _init_reads_weights(s: Situation) -> Mapping[str, object]:
    reads = s.adapter.init_lora_weights in _READ_WEIGHTS
    return {"adapter.init_lora_weights": True} if s.quantization != "none" and reads else {}


def _int8_experts(s: Situation) -> Mapping[str, object]:
    return {"model.quantization": "nf4"} if s.quantization == "int8" and s.spec.expert_weights else {}


def _experts_untouched(s: Situation) -> Mapping[str, object]:
    if not s.has_adapter or s.adapter.path:
        return {}
    given = s.draft.fields(s.adapter)
    fields = adapter_fields(given)
    if not is_all_linear(fields.get("target_modules")) or fields.get("target_parameters"):
        return {}
    reach = reach_of(s.spec, adapted_by(s.spec, given))
    missed = reach is not None and reach.experts is False
    return {"adapter.target_modules": "all-linear"} if missed else {}


def _kbit_compile(s: Situation) -> Mapping[str, object]:
    applies = s.quantization != "none" and s.trainer.torch_compile
    return {"trainer.torch_compile": False} if applies else {}


ADAPTER_FIXES = (
    Fix(
        id="purely-quantized",
        title="a quantised base needs an adapter",
        condition="model.quantization without adapter",
        action="refuse",
        reason="int8 and 4-bit weights cannot be trained: the Trainer stops with 'You cannot perform "
        "fine-tuning on purely quantized models'.",
        source="transformers/trainer_utils.py validate_quantization_for_training",
        versions="transformers>=4.31",
        changes=_purely_quantized,
        hint="add adapter: {type: lora}, or drop model.quantization",
        early=True,
    ),
    Fix(
        id="adapter-init-quantized",
        title="a beginning of the adapter that needs unquantised weights",
        condition="init_lora_weights pissa, corda, loftq, mica or orthogonal with model.quantization",
        action="refuse",
        reason="peft computes with the weights as they are stored, and packed bytes are no matrix: it "
        "stops when the adapter is made, after the weights are loaded ('Please initialize PiSSA').",
        source="peft/tuners/lora/layer.py pissa_init, mica_init; peft/utils/loftq_utils.py",
        versions="*",
        changes=_init_reads_weights,
        hint="use init_lora_weights: olora, gaussian or true, or drop model.quantization",
        early=True,
    ),
    Fix(
        id="int8-experts",
        title="experts are not quantised to int8",
        condition="model.quantization int8 on a mixture of experts",
        action="refuse",
        reason="bitsandbytes has int8 for linear layers alone. transformers 5 stores experts as parameters "
        "of three dimensions: they stay unquantised, and prepare_model_for_kbit_training makes them fp32.",
        source="bitsandbytes/nn/modules.py Linear8bitLt; peft/utils/other.py prepare_model_for_kbit_training",
        versions="transformers>=5",
        changes=_int8_experts,
        hint="use model.quantization: nf4, which packs experts, or drop it",
        early=True,
    ),
    Fix(
        id="experts-untouched",
        title="all-linear leaves the experts without adapters",
        condition="adapter all-linear on a mixture of experts whose experts peft does not know",
        action="refuse",
        reason="peft adapts fused experts under all-linear for the families in its table alone. In this one "
        "they hold most of the parameters, and all-linear would train none of them.",
        source="peft/utils/transformers_weight_conversion.py _MOE_TARGET_MODULE_MAPPING",
        versions="transformers>=5",
        changes=_experts_untouched,
        hint="name the experts' parameters in adapter.target_parameters, or the layers to adapt in "
        "adapter.target_modules",
        early=True,
    ),
    Fix(
        id="kbit-compile",
        title="torch.compile and a quantised base",
        condition="trainer.torch_compile with model.quantization",
        action="warn",
        reason="transformers refuses a quantised model that was compiled before the Trainer is built. What "
        "trainer.torch_compile asks for is compiled after that check: nothing promises that it trains.",
        source="transformers/trainer_utils.py validate_quantization_for_training",
        versions="*",
        changes=_kbit_compile,
        hint="drop trainer.torch_compile unless it was seen to help",
        early=True,
    ),
    Fix(
        id="enable-input-require-grads",
        title="input embeddings hand gradients to a frozen base",
        condition="16-bit or fp32 base, adapter, activation checkpointing",
        action="set",
        reason="With a frozen base no checkpointed block has an input that requires grad, and reentrant "
        "checkpointing then ends in 'element 0 of tensors does not require grad'.",
        source="huggingface/peft#1142; transformers/modeling_utils.py enable_input_require_grads",
        versions="*",
        changes=_input_grads,
    ),
    Fix(
        id="no-kbit-prepare-on-16-bit",
        title="prepare_model_for_kbit_training stays off an unquantised base",
        condition="adapter on an unquantised base",
        action="set",
        reason="That call casts every 16-bit parameter to fp32, which doubles the base model's memory.",
        source="peft/utils/other.py prepare_model_for_kbit_training; huggingface/peft#816",
        versions="*",
        changes=_no_kbit_prepare,
    ),
    Fix(
        id="kbit-prepare",
        title="prepare_model_for_kbit_training on a quantised base",
        condition="int8, nf4 or fp4 base with an adapter",
        action="set",
        reason="Norms and the head must be fp32 for a stable loss, and the inputs must require grad.",
        source="peft/utils/other.py prepare_model_for_kbit_training",
        versions="*",
        changes=_kbit_prepare,
    ),
    Fix(
        id="non-reentrant-checkpointing",
        title="activation checkpointing is non-reentrant",
        condition="activation checkpointing without an explicit use_reentrant",
        action="set",
        reason="prepare_model_for_kbit_training passes no use_reentrant and torch still defaults to True, "
        "which under DDP ends in 'Expected to mark a variable ready only once'.",
        source="peft/utils/other.py; torch/utils/checkpoint.py; huggingface/peft#301",
        versions="*",
        changes=_non_reentrant,
        yields=True,
    ),
    Fix(
        id="ddp-find-unused",
        title="DDP does not search for unused parameters",
        condition="adapter over several processes",
        action="set",
        reason="The Trainer turns the search on for every PeftModel; with checkpointing it marks "
        "parameters ready twice, and it costs a graph walk each step.",
        source="transformers/trainer.py _build_accelerator_args; huggingface/trl#4782",
        versions="*",
        changes=_ddp_unused,
        yields=True,
    ),
    Fix(
        id="ddp-ready-twice",
        title="reentrant checkpointing while DDP searches for unused parameters",
        condition="activation checkpointing with use_reentrant true and ddp_find_unused_parameters true, "
        "engine ddp over several processes",
        action="refuse",
        reason="The recomputed part marks its parameters ready again: 'Expected to mark a variable ready "
        "only once'.",
        source="huggingface/peft#301; huggingface/trl#4782",
        versions="*",
        changes=_ready_twice,
        hint="drop use_reentrant, or ddp_find_unused_parameters",
    ),
    Fix(
        id="use-cache-off",
        title="no KV cache while training",
        condition="always",
        action="set",
        reason="A KV cache wastes memory in training, conflicts with checkpointing and lets packed "
        "documents see each other; the saved config gets the original value back.",
        source="transformers/trainer.py (model.config.use_cache = args.use_cache)",
        versions="transformers>=5",
        changes=_use_cache,
        yields=True,
    ),
    Fix(
        id="pad-token",
        title="a pad token that masks no real target",
        condition="always; acts where the tokenizer has no pad token",
        action="set",
        reason="Without one padding fails, and with pad = eos the usual collator masks eos, so the model "
        "never learns to stop. An unused token is taken; labels are made before padding.",
        source="huggingface/transformers#23530; huggingface/trl#976",
        versions="*",
        changes=_pad_token,
    ),
    Fix(
        id="dpo-dropout",
        title="trl turns dropout off",
        condition="task dpo with adapter.lora_dropout, without trainer.disable_dropout: false",
        action="warn",
        reason="DPOConfig.disable_dropout is true by default, so that policy and reference compare alike; "
        "the recipe's lora_dropout then does nothing.",
        source="trl/trainer/dpo_config.py disable_dropout",
        versions="trl>=0.12",
        changes=_dpo_dropout,
        hint="drop adapter.lora_dropout, or set trainer.disable_dropout: false",
    ),
)
