"""Fixes for precision: bf16 on devices that only emulate it, fp16 forward passes, unset dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.engines.ddp import DDP
from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.deepspeed_config import flatten
from launcher.planner.fixes.fix import Fix, Situation


def _bf16_without_units(s: Situation) -> Mapping[str, object]:
    asks = str(s.precision).startswith("bf16")
    return {"precision": "fp16"} if asks and s.pre_ampere else {}


_BF16 = ("bf16", "bfloat16", "torch.bfloat16")
_NAMES_DTYPE = re.compile(r"dtype|data_type|precision", re.IGNORECASE)
_IN_A_TEXT = re.compile(r"\w*dtype\s*[=:]\s*['\"]?(?:torch\.)?(?:bfloat16|bf16)\b")
"""As `trainer.optim_args` has it: `momentum_dtype=bfloat16`."""


def _chooses_bf16(key: str, value: object) -> bool:
    """Whether a setting names bf16: as a dtype, by a switch of the Trainer, or in a text of options."""
    if isinstance(value, str):
        whole = value in _BF16 and _NAMES_DTYPE.search(key) is not None
        return whole or _IN_A_TEXT.search(value) is not None
    return value is True and key.startswith("trainer.") and "bf16" in key


_COMPUTE = "model.quantization.compute_dtype"


def _bf16_beside(s: Situation) -> dict[str, object]:
    """Settings that name bf16 where `precision` does not: nothing that follows from it is bf16 then."""
    if str(s.precision).startswith("bf16"):
        return {}
    found: dict[str, object] = {}
    for dotted in s.draft.names:
        held = s.at(dotted)
        inside = held if isinstance(held, Mapping) else {"": held}
        for key, value in flatten(inside).items():
            full = f"{dotted}.{key}" if key else dotted
            if _chooses_bf16(full, value):
                found["sharding.config" if dotted == "deepspeed.profile" else full] = value
    if s.model.dtype == "auto" and s.spec.pretrained_dtype == "bfloat16":
        found["model.dtype"] = "bfloat16"
    return found


def _bf16_named(s: Situation) -> Mapping[str, object]:
    found = _bf16_beside(s) if s.pre_ampere else {}
    return {key: value for key, value in found.items() if key != _COMPUTE}


def _bf16_products(s: Situation) -> Mapping[str, object]:
    found = _bf16_beside(s) if s.pre_ampere else {}
    return {key: value for key, value in found.items() if key == _COMPUTE}


def _bf16_unknown_device(s: Situation) -> Mapping[str, object]:
    asks = str(s.precision).startswith("bf16")
    if s.hardware.compute_capability is not None or s.hardware.is_cpu:
        return {}
    return {"precision": s.precision} if asks else _bf16_beside(s)


def _dtype_unset(s: Situation) -> Mapping[str, object]:
    known = s.draft.provenance["model.dtype"]
    return {"model.dtype": s.model.dtype} if known.by == "explicit-dtype" else {}


def _autocast_guard(s: Situation) -> Mapping[str, object]:
    mixed_modules = s.has_adapter or s.quantization != "none"
    if s.pre_ampere and s.precision == "fp16" and mixed_modules:
        return {"runtime.autocast": "float16"}
    return {}


def _tf32_pre_ampere(s: Situation) -> Mapping[str, object]:
    return {"trainer.tf32": None} if s.trainer.tf32 and (s.pre_ampere or s.hardware.is_cpu) else {}


def _fp16_model_trained_in_bf16(s: Situation) -> Mapping[str, object]:
    fragile = s.spec.model_type.startswith(("gemma", "t5", "mt5", "umt5"))
    return {"precision": "fp32"} if fragile and s.precision == "fp16" else {}


def _fp16_checkpoint_in_bf16(s: Situation) -> Mapping[str, object]:
    """Models that are not known to overflow, but whose weights were published in bf16."""
    in_bf16 = s.spec.pretrained_dtype == "bfloat16" and not _fp16_model_trained_in_bf16(s)
    return {"precision": "fp16"} if in_bf16 and str(s.precision).startswith("fp16") else {}


def _fp16_pascal(s: Situation) -> Mapping[str, object]:
    capability = s.hardware.compute_capability
    without = capability is not None and capability < (7, 0)
    asks = s.precision == "fp16" and s.engine is DEEPSPEED
    return {"precision": "fp32"} if asks and without else {}


def _flash_pre_ampere(s: Situation) -> Mapping[str, object]:
    flash = s.model.attn_implementation == "flash_attention_2"
    return {"model.attn_implementation": "sdpa"} if flash and (s.pre_ampere or s.hardware.is_cpu) else {}


def _flash_in_32_bit(s: Situation) -> Mapping[str, object]:
    """Nothing makes its inputs 16-bit: neither autocast (`bf16`, `fp16`) nor the weights."""
    flash = s.model.attn_implementation == "flash_attention_2"
    dtype = s.model.dtype
    stored = s.spec.pretrained_dtype if dtype == "auto" else dtype
    whole = s.precision not in ("bf16", "fp16") and stored == "float32"
    elsewhere = bool(_flash_pre_ampere(s))  # refused for the device already
    return {"model.attn_implementation": "sdpa"} if flash and whole and not elsewhere else {}


def _pure_half_full(s: Situation) -> Mapping[str, object]:
    half_weights = s.model.dtype in ("float16", "bfloat16")
    plain = s.precision == "fp32" and not s.has_adapter
    return {"model.dtype": "float32"} if half_weights and plain else {}


def _fp16_trainable_half(s: Situation) -> Mapping[str, object]:
    scaler = s.precision == "fp16" and s.engine is DDP
    half_weights = s.model.dtype in ("float16", "bfloat16", "auto")
    return {"model.dtype": "float32"} if scaler and half_weights and not s.has_adapter else {}


PRECISION_FIXES = (
    Fix(
        id="bf16-emulated",
        title="bf16 needs compute capability 8.0",
        condition="precision bf16 or bf16-true on a device below compute capability 8.0",
        action="refuse",
        reason="V100 and T4 accept bf16 and emulate it, silently and many times slower: "
        "torch.cuda.is_bf16_supported() counts emulation as support.",
        source="torch/cuda/__init__.py is_bf16_supported(including_emulation=True)",
        versions="torch>=2.5",
        changes=_bf16_without_units,
        hint="use precision: fp16 or auto",
        early=True,
    ),
    Fix(
        id="bf16-dtype-emulated",
        title="a bf16 dtype needs compute capability 8.0",
        condition="a dtype of bf16 beside `precision` (of the weights, the evaluation, the optimizer, a "
        "DeepSpeed profile) on a device below compute capability 8.0",
        action="refuse",
        reason="V100 and T4 emulate bf16, many times slower. `precision: auto` becomes fp16 there, and a "
        "dtype that is named elsewhere stays bf16.",
        source="torch/cuda/__init__.py is_bf16_supported(including_emulation=True)",
        versions="torch>=2.5",
        changes=_bf16_named,
        hint="write float16 (fp16), or drop it: it then follows precision",
        early=True,
    ),
    Fix(
        id="bf16-compute-emulated",
        title="products of a quantised base in bf16 below compute capability 8.0",
        condition="model.quantization.compute_dtype bfloat16 on a device below compute capability 8.0",
        action="warn",
        reason="Each product casts its input to that dtype and its result back, so it is right, but V100 and "
        "T4 emulate bf16, many times slower.",
        source="bitsandbytes/nn/modules.py Linear4bit.forward",
        versions="torch>=2.5",
        changes=_bf16_products,
        hint="drop it: it then follows precision",
        early=True,
    ),
    Fix(
        id="bf16-unknown-device",
        title="bf16 on an unnamed device",
        condition="precision or a dtype of bf16 on hardware whose compute capability is not known",
        action="warn",
        reason="Only devices of compute capability 8.0 and later have bf16 units; "
        "the recipe's bf16 is taken as consent.",
        source="NVIDIA CUDA programming guide, compute capabilities",
        versions="*",
        changes=_bf16_unknown_device,
        hint="name the device, e.g. --on 1xRTX4090-24GB",
        early=True,
    ),
    Fix(
        id="explicit-dtype",
        title="weights get an explicit dtype",
        condition="the recipe does not say model.dtype",
        action="set",
        reason="from_pretrained(dtype=None) takes the checkpoint's dtype since transformers 5, so the same "
        "recipe would train fp32 or half weights depending on how the checkpoint was saved.",
        source="transformers/modeling_utils.py from_pretrained; huggingface/trl#5457",
        versions="transformers>=5",
        changes=_dtype_unset,
        early=True,
    ),
    Fix(
        id="fp16-bf16-pretrained",
        title="model whose activations overflow fp16",
        condition="precision fp16 with a Gemma or T5 family model",
        action="refuse",
        reason="These models were trained in bf16; their activations exceed fp16's 65504 and the loss "
        "becomes nan or every step is skipped.",
        source="huggingface/transformers#10956, #23918",
        versions="*",
        changes=_fp16_model_trained_in_bf16,
        hint="use bf16 on compute capability 8.0 and later, else precision: fp32",
        early=True,
    ),
    Fix(
        id="fp16-bf16-checkpoint",
        title="weights published in bf16, trained in fp16",
        condition="precision fp16 or fp16-true with a checkpoint in bfloat16 of another family",
        action="warn",
        reason="Activations that bf16 holds may exceed fp16's 65504; skipped steps that do not end, or a nan "
        "loss, come from it.",
        source="huggingface/transformers#14189, #11461",
        versions="*",
        changes=_fp16_checkpoint_in_bf16,
        hint="precision: bf16 on compute capability 8.0 and later, else fp32 where it overflows",
        early=True,
    ),
    Fix(
        id="ds-fp16-pascal",
        title="DeepSpeed has no fp16 below compute capability 7.0",
        condition="precision fp16 and engine deepspeed on a device below compute capability 7.0",
        action="refuse",
        reason="DeepSpeed stops with 'Type fp16 is not supported on your device'.",
        source="deepspeed/accelerator/cuda_accelerator.py is_fp16_supported",
        versions="*",
        changes=_fp16_pascal,
        hint="use precision: fp32, or sharding.engine: ddp",
        early=True,
    ),
    Fix(
        id="fp16-unscale",
        title="fp16 training needs fp32 master weights",
        condition="full fine-tune, precision fp16, engine ddp, model.dtype 16-bit or auto",
        action="refuse",
        reason="GradScaler refuses 16-bit gradients: 'Attempting to unscale FP16 gradients'.",
        source="torch/amp/grad_scaler.py; huggingface/transformers#23165",
        versions="*",
        changes=_fp16_trainable_half,
        hint="drop model.dtype or set it to float32",
        early=True,
    ),
    Fix(
        id="pure-half-training",
        title="16-bit weights under precision fp32",
        condition="full fine-tune, precision fp32, model.dtype 16-bit",
        action="refuse",
        reason="Weights and Adam states would all be 16-bit and small updates round to zero, silently.",
        source="transformers/modeling_utils.py (dtype is the training dtype without autocast)",
        versions="*",
        changes=_pure_half_full,
        hint="say precision: bf16-true if that is wanted, else drop model.dtype",
        early=True,
    ),
    Fix(
        id="autocast-guard",
        title="autocast around train() on pre-Ampere fp16",
        condition="precision fp16 below compute capability 8.0, with an adapter or a quantised base",
        action="set",
        reason="fp32 adapters and norms meet fp16 activations outside the Trainer's own autocast; without "
        "the guard matrix products fail with 'expected scalar type Half but found Float'.",
        source="bitsandbytes-foundation/bitsandbytes#240; tloen/alpaca-lora#203",
        versions="*",
        changes=_autocast_guard,
    ),
    Fix(
        id="tf32-pre-ampere",
        title="tf32 needs Ampere",
        condition="trainer.tf32 on a device below compute capability 8.0",
        action="refuse",
        reason="TrainingArguments stops with '--tf32 requires Ampere or a newer GPU arch'.",
        source="transformers/training_args.py",
        versions="*",
        changes=_tf32_pre_ampere,
        hint="drop trainer.tf32",
        early=True,
    ),
    Fix(
        id="fa2-pre-ampere",
        title="FlashAttention-2 needs Ampere",
        condition="attn_implementation flash_attention_2 below compute capability 8.0",
        action="refuse",
        reason="transformers does not check it; the kernel stops in the first forward pass.",
        source="transformers/modeling_flash_attention_utils.py",
        versions="*",
        changes=_flash_pre_ampere,
        hint="use attn_implementation: sdpa",
        early=True,
    ),
    Fix(
        id="fa2-fp32",
        title="FlashAttention-2 takes 16 bits alone",
        condition="attn_implementation flash_attention_2 with fp32 weights and no bf16 or fp16 computation",
        action="refuse",
        reason="transformers loads the kernel for fp32 weights with a warning; it stops in the first forward "
        "pass: 'FlashAttention only support fp16 and bf16 data type'.",
        source="transformers/integrations/flash_attention.py get_target_dtype; modeling_utils.py",
        versions="*",
        changes=_flash_in_32_bit,
        hint="use attn_implementation: sdpa, or precision: bf16",
        early=True,
    ),
)
