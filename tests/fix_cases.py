"""For each known fix: recipes and machines where it must act, and near ones where it must not. Data.

A fix without both fails tests/unit/test_fixes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from factories import BASE, facts, recipe

from launcher.models.model import read_model_spec
from launcher.plan.plan import Plan
from launcher.planner.planner import make_plan

A100, EIGHT, V100 = "1xA100-80GB", "8xA100-80GB", "1xV100-32GB"


@dataclass(frozen=True)
class Case:
    """A recipe (`factories.BASE` and dotted overrides) on a machine."""

    on: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""
    """Of a case that must act: what the fix sets, warns of or refuses."""
    value: Any = None
    """What the fix sets it to."""
    published: str | None = None
    """The dtype of the checkpoint."""
    config: Mapping[str, Any] | None = None
    """Of the model, in place of the shipped one."""


def case(
    on: str, setting: str = "", value: Any = None, *, published: str | None = None,
    config: Mapping[str, Any] | None = None, **overrides: Any,
) -> Case:  # fmt: skip
    return Case(on, overrides, setting, value, published, config)


def plan_of(folder: Path, given: Case, *, versions: Mapping[str, str] | None = None, **more: Any) -> Plan:
    """The plan of a case, with further overrides."""
    loaded = recipe(folder, BASE, **{**given.overrides, **more})
    told = facts(given.on, loaded.recipe.model.name_or_path, loaded.recipe.task)
    if given.config is not None:
        told = replace(told, model=read_model_spec(told.model.name, given.config, "test"))
    if given.published is not None:
        told = replace(told, model=replace(told.model, pretrained_dtype=given.published))
    return make_plan(loaded, replace(told, versions=versions or {}))


FULL = {"adapter": "null"}
AGAIN = {"trainer__activation_checkpointing": "true"}
ZERO = {"sharding__engine": "deepspeed"}
ZERO2, ZERO3 = {**ZERO, "sharding__zero_stage": 2}, {**ZERO, "sharding__zero_stage": 3}
DDP = {"sharding__engine": "ddp"}
INT8, NF4 = {"model__quantization": "int8"}, {"model__quantization": "nf4"}
NF4_BF16 = {"model__quantization": "{type: nf4, compute_dtype: bfloat16}"}
FLASH = {"model__attn_implementation": "flash_attention_2"}
VARLEN = {"model__attn_implementation": "varlen"}
SDPA = {"model__attn_implementation": "sdpa"}
DPO = {"task": "dpo", "adapter__lora_dropout": 0.1}
GEMMA, MT0 = {"model__name_or_path": "google/gemma-2-9b"}, {"model__name_or_path": "bigscience/mt0-large"}
OPT = {"model__name_or_path": "facebook/opt-6.7b"}
QWEN_MOE = {"model__name_or_path": "Qwen/Qwen3-30B-A3B"}
GRANITE_MOE = {
    "model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 49155, "num_local_experts": 32,
    "num_experts_per_tok": 8, "tie_word_embeddings": True,
}  # fmt: skip
PACKED, FREE = {"data__packing": "true"}, {"data__padding_free": "true"}
MICRO = "trainer__per_device_train_batch_size"
SEARCHES = {"trainer__ddp_find_unused_parameters": "true"}
REENTRANT = {"trainer__activation_checkpointing_kwargs": "{use_reentrant: true}"}
GPT2 = {"model__name_or_path": "openai-community/gpt2"}
PICTURES = {
    "model__name_or_path": "google/vit-large-patch16-224",
    "task": "image-classification",
    "data": "{train: [{path: data/images, format: image}]}",
    **FULL,
}
BEST = {
    "trainer__save_strategy": "epoch",
    "data__eval": "{split: 0.1}",
    "trainer__load_best_model_at_end": "true",
}

# id: (where it must act, where it must not)
CASES: dict[str, tuple[list[Case], list[Case]]] = {
    # precision
    "bf16-emulated": (
        [case("8xV100-32GB", "precision", precision="bf16"),
         case("8xV100-32GB", "precision", precision="bf16-true", **DDP)],
        [case(EIGHT, precision="bf16"), case("8xV100-32GB"), case("cpu", precision="bf16")],
    ),
    "bf16-dtype-emulated": (
        [case(V100, "model.dtype", model__dtype="bfloat16"),
         case(V100, "model.dtype", model__dtype="auto", published="bfloat16"),
         case(V100, "trainer.bf16_full_eval", trainer__bf16_full_eval="true"),
         case(V100, "trainer.optim_args", trainer__optim="adamw_anyprecision",
              trainer__optim_args="variance_dtype=bfloat16, momentum_dtype=float32")],
        [case(A100, **NF4_BF16), case("1xT4-16GB", **NF4), case(V100, **NF4, precision="fp16"),
         case(V100, model__dtype="auto", published="float16"), case(V100, trainer__run_name="bf16"),
         case("cpu", **NF4_BF16), case("1x96GB", **NF4_BF16),
         case(V100, trainer__fp16_full_eval="true")],
    ),
    "bf16-compute-emulated": (
        [case("1xT4-16GB", "model.quantization.compute_dtype", **NF4_BF16),
         case(V100, "model.quantization.compute_dtype", **NF4_BF16, precision="fp32")],
        [case(A100, **NF4_BF16), case("1xT4-16GB", **NF4), case("cpu", **NF4_BF16)],
    ),
    "bf16-unknown-device": (
        [case("1x96GB", "precision", precision="bf16"),
         case("1x96GB", "model.quantization.compute_dtype", **NF4_BF16)],
        [case("1x96GB"), case(A100, precision="bf16"), case("cpu", precision="bf16")],
    ),
    "explicit-dtype": (
        [case(EIGHT, "model.dtype", "bfloat16"), case(A100, "model.dtype", "float32", precision="fp32")],
        [case(EIGHT, model__dtype="float32")],
    ),
    "fp16-bf16-pretrained": (
        [case(EIGHT, "precision", precision="fp16", **GEMMA),
         case(EIGHT, "precision", precision="fp16", task="seq2seq-lm", **MT0)],
        [case(EIGHT, precision="bf16", **GEMMA), case(EIGHT, precision="fp16")],
    ),
    "fp16-bf16-checkpoint": (
        [case(V100, "precision", published="bfloat16"),
         case(A100, "precision", published="bfloat16", precision="fp16-true")],
        [case(A100, published="bfloat16"), case(V100, published="float16"), case(V100)],
    ),
    "ds-fp16-pascal": (
        [case("8xP100-16GB", "precision", precision="fp16", **NF4, **ZERO)],
        [case("8xV100-32GB", precision="fp16", **ZERO), case("8xP100-16GB", precision="fp16", **NF4, **DDP),
         case("8xP100-16GB", precision="fp32", **NF4, **ZERO)],
    ),
    "fp16-unscale": (
        [case(V100, "model.dtype", model__dtype="float16", **GPT2, **FULL)],
        [case(V100, model__dtype="float32", **GPT2, **FULL),
         case(V100, model__dtype="float16")],
    ),
    "pure-half-training": (
        [case(A100, "model.dtype", precision="fp32", model__dtype="bfloat16", **FULL)],
        [case(EIGHT, precision="bf16-true", **DDP, **FULL),
         case(A100, precision="fp32", model__dtype="bfloat16")],
    ),
    "autocast-guard": (
        [case(V100, "runtime.autocast", "float16"),
         case(V100, "runtime.autocast", "float16", **INT8)],
        [case(A100), case(V100, **GPT2, **FULL),
         case(V100, precision="fp32", **NF4)],
    ),
    "tf32-pre-ampere": (
        [case(V100, "trainer.tf32", trainer__tf32="true"),
         case("cpu", "trainer.tf32", trainer__tf32="true", **NF4)],
        [case(A100, trainer__tf32="true"), case(V100, trainer__tf32="false"), case(V100)],
    ),
    "fa2-pre-ampere": (
        [case("1xT4-16GB", "model.attn_implementation", **FLASH, **NF4),
         case("cpu", "model.attn_implementation", **FLASH)],
        [case(A100, **FLASH), case(V100)],
    ),
    "fa2-fp32": (
        [case(A100, "model.attn_implementation", **FLASH, precision="fp32"),
         case(EIGHT, "model.attn_implementation", **FLASH, **NF4, precision="fp32"),
         case(EIGHT, "model.attn_implementation", **FLASH, **FULL, **ZERO, precision="fp32"),
         case(A100, "model.attn_implementation", **FLASH, precision="bf16-true", model__dtype="float32"),
         case(A100, "model.attn_implementation", **FLASH, precision="fp32", model__dtype="auto",
              published="float32"),
         case("8xH100-80GB", "model.attn_implementation", **FLASH, **FULL, **ZERO, sharding__sp_size=2,
              precision="fp32")],
        [case(A100, **FLASH), case(A100, **FLASH, precision="bf16-true"),
         case(A100, **FLASH, precision="fp32", model__dtype="bfloat16"), case(A100, precision="fp32"),
         case(A100, **FLASH, precision="bf16", model__dtype="float32"), case(EIGHT, **FLASH, **DDP)],
    ),
    # adapters, checkpointing, quantised bases
    "purely-quantized": (
        [case(A100, "model.quantization", **INT8, **FULL), case(A100, "model.quantization", **NF4, **FULL)],
        [case(A100, **INT8), case(EIGHT, **FULL)],
    ),
    "adapter-init-quantized": (
        [case(A100, "adapter.init_lora_weights", **NF4, adapter__init_lora_weights="pissa"),
         case(A100, "adapter.init_lora_weights", **INT8, adapter__init_lora_weights="pissa"),
         case(A100, "adapter.init_lora_weights", **NF4, adapter__init_lora_weights="orthogonal")],
        [case(A100, adapter__init_lora_weights="pissa"), case(A100, **NF4),
         case(A100, **NF4, adapter__init_lora_weights="olora"),
         case(A100, **INT8, adapter__init_lora_weights="gaussian"),
         case(A100, **INT8, adapter__init_lora_weights="false"),
         case(A100, model__quantization="auto", adapter__init_lora_weights="pissa")],
    ),
    "int8-experts": (
        [case(A100, "model.quantization", **INT8, config=GRANITE_MOE,
              adapter__target_modules="[q_proj]")],
        [case(A100, **NF4, **QWEN_MOE), case(EIGHT, **QWEN_MOE), case(A100, **INT8)],
    ),
    "experts-untouched": (
        [case(A100, "adapter.target_modules", config=GRANITE_MOE),
         case(A100, "adapter.target_modules", config=GRANITE_MOE, adapter__target_modules="all-linear")],
        [case(A100, config=GRANITE_MOE, adapter__target_modules="[q_proj, v_proj]"), case(EIGHT, **QWEN_MOE),
         case(A100, config=GRANITE_MOE, **FULL)],
    ),
    "kbit-compile": (
        [case(A100, "trainer.torch_compile", trainer__torch_compile="true", **NF4)],
        [case(A100, **NF4), case(A100, trainer__torch_compile="true")],
    ),
    "enable-input-require-grads": (
        [case(A100, "model.enable_input_require_grads", True, **AGAIN)],
        [case(A100, trainer__activation_checkpointing="false"), case(A100, **AGAIN, **NF4),
         case(EIGHT, **AGAIN, **FULL)],
    ),
    "no-kbit-prepare-on-16-bit": (
        [case(A100, "model.prepare_for_kbit", False)],
        [case(A100, **INT8), case(EIGHT, **FULL)],
    ),
    "kbit-prepare": (
        [case(A100, "model.prepare_for_kbit", True, **NF4),
         case(A100, "model.prepare_for_kbit", True, **INT8)],
        [case(A100), case(EIGHT, **FULL)],
    ),
    "non-reentrant-checkpointing": (
        [case(A100, "trainer.activation_checkpointing_kwargs", {"use_reentrant": False}, **AGAIN)],
        [case(A100, trainer__activation_checkpointing="false")],
    ),
    "ddp-find-unused": (
        [case(EIGHT, "trainer.ddp_find_unused_parameters", False),
         case(EIGHT, "trainer.ddp_find_unused_parameters", False, **NF4, **DDP)],
        [case(A100), case(EIGHT, **FULL), case(EIGHT, model__device_map="auto")],
    ),
    "ddp-ready-twice": (
        [case(EIGHT, "trainer.ddp_find_unused_parameters", **AGAIN, **DDP, **SEARCHES, **REENTRANT),
         case(EIGHT, "trainer.ddp_find_unused_parameters", **AGAIN, **DDP, **SEARCHES, **REENTRANT, **NF4)],
        [case(EIGHT, **AGAIN, **DDP, **SEARCHES), case(EIGHT, **AGAIN, **DDP, **REENTRANT),
         case(EIGHT, **AGAIN, **ZERO, **SEARCHES, **REENTRANT), case(A100, **AGAIN, **SEARCHES, **REENTRANT),
         case(EIGHT, trainer__activation_checkpointing="false", **DDP, **SEARCHES, **REENTRANT)],
    ),
    "use-cache-off": (
        [case(A100, "trainer.use_cache", False)],
        [case(A100, **PICTURES)],
    ),
    "pad-token": (
        [case(A100, "model.pad_token", "ensure")],
        [case(A100, **PICTURES)],
    ),
    "dpo-dropout": (
        [case(A100, "adapter.lora_dropout", **DPO)],
        [case(A100, trainer__disable_dropout="false", **DPO), case(A100, adapter__lora_dropout=0.1),
         case(A100, task="dpo")],
    ),
    # devices and engines
    "attention-kernel": (
        [case(EIGHT, "model.attn_implementation", model__attn_implementation="sdpa", **GEMMA),
         case(EIGHT, "model.attn_implementation", task="seq2seq-lm", **FLASH, **MT0)],
        [case(EIGHT, **GEMMA), case(EIGHT, **FLASH, **GEMMA), case(EIGHT, task="seq2seq-lm", **MT0),
         case(EIGHT, model__attn_implementation="sdpa")],
    ),
    "device-map-distributed": (
        [case(EIGHT, "model.device_map", model__device_map="auto", launch__launcher="accelerate", **DDP),
         case("2x8xA100-80GB", "model.device_map", model__device_map="auto", **DDP)],
        [case(EIGHT, model__device_map="auto"), case(EIGHT, launch__launcher="accelerate", **DDP)],
    ),
    "zero-device-map-asked": (
        [case(A100, "model.device_map", model__device_map="auto", **ZERO),
         case(A100, "model.device_map", model__device_map="auto", sharding__engine="fsdp")],
        [case(A100, model__device_map="auto", **DDP), case(A100, **ZERO)],
    ),
    "zero3-int8": (
        [case(EIGHT, "sharding.zero_stage", **INT8, **ZERO3)],
        [case(EIGHT, **INT8, **ZERO2), case(EIGHT, **NF4, **ZERO3), case(EIGHT, **ZERO3)],
    ),
    "zero3-4bit-load": (
        [case(EIGHT, "sharding.zero_stage", **NF4, **ZERO3),
         case(EIGHT, "sharding.zero_stage", model__quantization="fp4", **ZERO3)],
        [case(EIGHT, **NF4, **ZERO2), case(EIGHT, **ZERO3)],
    ),
    "offload-needs-adamw": (
        [case(EIGHT, "trainer.optim", sharding__offload_optimizer="cpu", trainer__optim="adafactor"),
         case(EIGHT, "trainer.optim", sharding__offload_optimizer="cpu", trainer__optim="adamw_bnb_8bit")],
        [case(EIGHT, sharding__offload_optimizer="cpu", trainer__optim="adamw_torch"),
         case(EIGHT, sharding__offload_optimizer="cpu"), case(EIGHT, trainer__optim="adafactor")],
    ),
    "offload-param-stage": (
        [case(EIGHT, "sharding.offload_param", sharding__offload_param="cpu", **ZERO2)],
        [case(EIGHT, sharding__offload_param="cpu", **ZERO3), case(EIGHT, **ZERO2)],
    ),
    "offload-optimizer-stage": (
        [case(EIGHT, "sharding.zero_stage", sharding__offload_optimizer="cpu", sharding__zero_stage=0)],
        [case(EIGHT, sharding__offload_optimizer="cpu", sharding__zero_stage=1),
         case(EIGHT, sharding__zero_stage=0)],
    ),
    "auto-find-batch-size": (
        [case(A100, "trainer.auto_find_batch_size", trainer__auto_find_batch_size="true")],
        [case(A100, trainer__auto_find_batch_size="false"), case(A100)],
    ),
    "local-device-map": (
        [case(A100, "model.device_map", "local", **INT8),
         case(EIGHT, "model.device_map", "local", **NF4, **ZERO2)],
        [case(A100), case(EIGHT, **NF4, **ZERO3), case(EIGHT, model__device_map="auto", **NF4)],
    ),
    "zero3-no-device-map": (
        [case(EIGHT, "model.device_map", None, **ZERO3),
         case(EIGHT, "model.device_map", None, **ZERO3, **NF4)],
        [case(EIGHT, **ZERO2), case(EIGHT, **DDP)],
    ),
    "zero3-args-before-model": (
        [case(EIGHT, "runtime.training_arguments_first", True, **ZERO3)],
        [case(EIGHT, **ZERO2), case(EIGHT, **DDP)],
    ),
    "nan-shown-as-zero": (
        [case(A100, "trainer.logging_nan_inf_filter", False)],
        [case(A100, trainer__logging_nan_inf_filter="false")],
    ),
    # launch and save
    "rtx40-p2p": (
        [case("4xRTX4090-24GB", "launch.env.NCCL_P2P_DISABLE", "1"),
         case("4xRTX4090-24GB", "launch.env.NCCL_IB_DISABLE", "1", **NF4, **DDP)],
        [case("1xRTX4090-24GB"), case("4xA100-80GB"), case("2xcpu"),
         case("4xRTX4090-24GB", model__device_map="auto")],
    ),
    "save-only-model-best": (
        [case(EIGHT, "trainer.save_only_model", trainer__save_only_model="true", **BEST, **ZERO)],
        [case(EIGHT, trainer__save_only_model="true", **BEST, **DDP),
         case(EIGHT, trainer__save_only_model="true", **ZERO), case(EIGHT, **BEST, **ZERO)],
    ),
    # packing
    "packing-family": (
        [case(EIGHT, "data.packing", **OPT, **PACKED, **SDPA),
         case(EIGHT, "data.padding_free", **OPT, **FREE, **SDPA)],
        [case(EIGHT, **PACKED), case(EIGHT, **OPT), case(EIGHT, **OPT, **PACKED),
         case(EIGHT, **OPT, **PACKED, **FLASH), case(EIGHT, data__packing="false", **OPT)],
    ),
    "packing-cache": (
        [case(EIGHT, "trainer.use_cache", trainer__use_cache="true", **PACKED),
         case(EIGHT, "trainer.use_cache", trainer__use_cache="true", **FREE)],
        [case(EIGHT, trainer__use_cache="false", **FREE), case(EIGHT, trainer__use_cache="true"),
         case(EIGHT, **PACKED)],
    ),
    "packing-flash-rows": (
        [case(EIGHT, "data.padding_free", data__padding_free="false", **PACKED, **FLASH),
         case(EIGHT, "data.padding_free", data__padding_free="false", **PACKED, **VARLEN)],
        [case(EIGHT, **PACKED, **FLASH), case(EIGHT, data__padding_free="false", **PACKED)],
    ),
    "padding-free-mask": (
        [case(EIGHT, "data.padding_free", data__max_length=2048, **FREE, **SDPA, **{MICRO: 16})],
        [case(EIGHT, data__max_length=2048, **FREE, **SDPA, **{MICRO: 8}),
         case(EIGHT, data__max_length=2048, **FREE, **{MICRO: 16}),
         case(EIGHT, data__max_length=2048, **FREE, **FLASH, **{MICRO: 16}),
         case(EIGHT, data__max_length=2048, **PACKED, **{MICRO: 16})],
    ),
}  # fmt: skip

# id of a fix that sets -> a recipe value that it would not have chosen, on its first case; None where no
# recipe can say what it sets.
CONTRARY: dict[str, Mapping[str, Any] | None] = {
    "explicit-dtype": {"model__dtype": "float32"},
    "autocast-guard": None,
    "enable-input-require-grads": None,
    "no-kbit-prepare-on-16-bit": None,
    "kbit-prepare": None,
    "non-reentrant-checkpointing": REENTRANT,
    "ddp-find-unused": SEARCHES,
    "use-cache-off": {"trainer__use_cache": "true"},
    "pad-token": None,
    "local-device-map": {"model__device_map": "auto"},
    "zero3-no-device-map": {"model__device_map": "auto"},
    "zero3-args-before-model": None,
    "nan-shown-as-zero": {"trainer__logging_nan_inf_filter": "true"},
    "rtx40-p2p": {"launch__env": "{NCCL_P2P_DISABLE: '0'}"},
}

_REAL, _PROCESSES = "test_fixes_real", "test_fixes_processes"
# id -> the test in tests/contract that shows the failure with the real library, and its absence with the fix.
SHOWN = {
    "explicit-dtype": (_REAL, "test_explicit_dtype"),
    "fp16-bf16-pretrained": (_REAL, "test_activations_of_a_bf16_checkpoint_overflow_fp16"),
    "fp16-bf16-checkpoint": (_REAL, "test_activations_of_a_bf16_checkpoint_overflow_fp16"),
    "ds-fp16-pascal": (_PROCESSES, "test_deepspeed_refuses_fp16_below_capability_7"),
    "fp16-unscale": (_REAL, "test_fp16_unscale"),
    "pure-half-training": (_REAL, "test_small_updates_of_16_bit_weights_are_lost"),
    "autocast-guard": (_REAL, "test_autocast_guard"),
    "tf32-pre-ampere": (_REAL, "test_tf32"),
    "fa2-pre-ampere": (_REAL, "test_flash_attention_on_a_cpu"),
    "fa2-fp32": (_REAL, "test_what_flash_attention_is_given"),
    "purely-quantized": (_REAL, "test_purely_quantized"),
    "adapter-init-quantized": (_REAL, "test_beginnings_of_an_adapter_over_a_quantised_base"),
    "int8-experts": (_REAL, "test_experts_stay_as_they_are_in_int8"),
    "experts-untouched": (_REAL, "test_all_linear_leaves_the_experts_of_some_families"),
    "kbit-compile": (_REAL, "test_a_quantised_model_that_was_compiled_before"),
    "enable-input-require-grads": (_REAL, "test_enable_input_require_grads"),
    "no-kbit-prepare-on-16-bit": (_REAL, "test_no_kbit_prepare_on_16_bit"),
    "kbit-prepare": (_REAL, "test_kbit_prepare"),
    "non-reentrant-checkpointing": (_REAL, "test_kbit_prepare_with_non_reentrant_checkpointing"),
    "ddp-find-unused": (_PROCESSES, "test_the_trainer_lets_ddp_search_in_every_adapter_run"),
    "ddp-ready-twice": (_PROCESSES, "test_reentrant_checkpointing_while_ddp_searches"),
    "use-cache-off": (_REAL, "test_use_cache"),
    "pad-token": (_REAL, "test_pad_token"),
    "dpo-dropout": (_REAL, "test_trl_turns_dropout_off"),
    "attention-kernel": (_REAL, "test_kernels_that_models_do_not_have"),
    "device-map-distributed": (_PROCESSES, "test_device_map_against_distributed_launch"),
    "zero-device-map-asked": (_PROCESSES, "test_zero3_with_device_map"),
    "zero3-4bit-load": (_PROCESSES, "test_a_4bit_base_is_loaded_whole_under_zero3"),
    "offload-needs-adamw": (_PROCESSES, "test_offload_swaps_the_optimizer"),
    "offload-param-stage": (_PROCESSES, "test_parameters_are_offloaded_at_stage_3_only"),
    "offload-optimizer-stage": (_PROCESSES, "test_the_optimizer_is_offloaded_from_stage_1_on"),
    "auto-find-batch-size": (_REAL, "test_auto_find_batch_size_changes_the_global_batch"),
    "local-device-map": (_PROCESSES, "test_a_quantised_base_lies_on_its_own_device"),
    "zero3-no-device-map": (_PROCESSES, "test_zero3_with_device_map"),
    "zero3-args-before-model": (_PROCESSES, "test_zero3_arguments_before_the_model"),
    "nan-shown-as-zero": (_REAL, "test_nan_shown_as_zero"),
    "rtx40-p2p": (_PROCESSES, "test_rtx_40_cards_need_both_variables"),
    "save-only-model-best": (_PROCESSES, "test_save_only_model_with_the_best_checkpoint"),
    "packing-family": ("test_packing", "test_other_families_do_leak"),
    "packing-cache": ("test_packing", "test_a_mask_or_a_cache_lets_documents_see_each_other"),
    "packing-flash-rows": (_REAL, "test_flash_attention_reads_borders_from_one_row_only"),
    "padding-free-mask": (_REAL, "test_the_mask_of_a_flattened_row_grows_with_its_square"),
}
# id -> why no test on a CPU can have the failure.
NOT_ON_CPU = {
    "bf16-emulated": "bf16 is emulated by GPUs below compute capability 8.0, and is slow on them alone",
    "bf16-dtype-emulated": "bf16 is emulated by GPUs below compute capability 8.0, and is slow on them alone",
    "bf16-compute-emulated": "as bf16-dtype-emulated",
    "bf16-unknown-device": "whether an unnamed device has bf16 units is known where there is one",
    "zero3-int8": "int8 over ZeRO-3 trains right on two CPU ranks; the wrong losses were reported from GPUs",
}
