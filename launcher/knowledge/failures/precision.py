"""Known failures of precision: 16 bits where the device, the weights or the scaler have none."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

PRECISION = (
    Failure(
        id="bf16-emulated",
        title="bf16 on a GPU that only emulates it",
        cause="V100 and T4 accept bf16 because torch.cuda.is_bf16_supported() counts emulation, but run it "
        "many times slower. There is no warning.",
        fix="train in fp16, or on a GPU with compute capability 8.0 or later",
        source="torch/cuda/__init__.py is_bf16_supported; huggingface/diffusers#14129",
        versions="torch>=2.5",
        places=("fix bf16-emulated", "doctor bf16"),
        changes={"precision": "fp16"},
    ),
    Failure(
        id="bf16-no-device",
        title="bf16 requested, but no GPU is visible",
        cause="TrainingArguments reports missing bf16 support when torch sees no CUDA device: no driver, "
        "CUDA_VISIBLE_DEVICES without a valid device, or a CPU build of torch.",
        fix="make the GPU visible (`effilaunch doctor` shows what is missing)",
        source="transformers/training_args.py",
        versions="transformers>=4.40",
        places=("doctor devices",),
        patterns=(r"Your setup doesn't support bf16/gpu(?!\. You need (?:torch>=|Ampere))",),
    ),
    Failure(
        id="bf16-pre-ampere",
        title="bf16 on a GPU without bf16 support",
        cause="GPUs before Ampere (V100, T4, RTX 20, P100) have no bf16 units. transformers releases before "
        "2025 raise the same error when torch sees no GPU at all.",
        fix="train in fp16 (`precision: fp16`); if nvidia-smi shows a newer GPU, make it visible (see "
        "`effilaunch doctor`)",
        source="transformers/training_args.py; lm-sys/FastChat#1191; OptimalScale/LMFlow#88",
        places=("fix bf16-emulated", "doctor bf16"),
        patterns=(
            r"Your setup doesn't support bf16/gpu\. You need (?:torch>=|Ampere)",
            r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
        ),
        changes={"precision": "fp16"},
    ),
    Failure(
        id="fp16-unscale",
        title="GradScaler received fp16 gradients",
        cause="Mixed fp16 needs trainable weights in fp32. Here they were loaded in fp16, and GradScaler "
        "cannot unscale fp16 gradients.",
        fix="load the weights in fp32, or train an adapter (kept in fp32) on fp16 weights",
        source="torch/amp/grad_scaler.py; huggingface/transformers#23165",
        places=("fix fp16-unscale",),
        patterns=(r"Attempting to unscale FP16 gradients",),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="fp16-on-bf16-params",
        title="GradScaler received bf16 gradients",
        cause="The weights are bf16 (the dtype of the checkpoint) and the run uses mixed fp16. CUDA has no "
        "unscale kernel for bf16.",
        fix="load the weights in fp32, or train in bf16 on compute capability 8.0 or later",
        source="pytorch/pytorch#127176; huggingface/trl#4901",
        places=("fix fp16-unscale", "fix explicit-dtype"),
        patterns=(
            r"_amp_foreach_non_finite_check_and_unscale_cuda.{0,3} not implemented for .{0,3}BFloat16",
        ),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="dtype-auto-default",
        title="weights loaded in the dtype of the checkpoint",
        cause="Since transformers 5, from_pretrained without a dtype uses that of the checkpoint; before, it "
        "used fp32. The same recipe trains different weights.",
        fix="set `model.dtype`, or leave it to the plan, which always writes one",
        source="transformers/modeling_utils.py from_pretrained; huggingface/trl#5457",
        versions="transformers>=5",
        places=("fix explicit-dtype",),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="pure-half-training",
        title="weights and optimizer states in 16 bits",
        cause="Half-precision weights are trained without mixed precision. Adam's states are 16-bit too, "
        "small updates round to zero, and the loss stalls without an error.",
        fix="train in mixed precision, or set `precision: bf16-true` if this is intended",
        source="transformers/modeling_utils.py (dtype is the training dtype without autocast)",
        places=("fix pure-half-training", "fix explicit-dtype"),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="half-float-matmul",
        title="matrix multiplication of two dtypes",
        cause="fp32 modules (norms, heads, adapters on a quantised base) met 16-bit ones outside autocast.",
        fix="train in mixed precision, and wrap your own forward passes in torch.autocast",
        source="bitsandbytes-foundation/bitsandbytes#240; tloen/alpaca-lora#203; huggingface/trl#4457",
        places=("fix autocast-guard",),
        patterns=(
            r"expected scalar type (?:Half|Float|BFloat16) but found (?:Half|Float|BFloat16)\b",
            r"expected (?:mat1|self) and mat2 to have the same dtype",
            r"(?:mat1|self) and mat2 must have the same dtype",
            r"expected m1 and m2 to have the same dtype",
            r"Expected query, key, and value to have the same dtype",
            r"Input type \((?:float|c10::\w+|torch\.cuda\.\w+)\) and (?:weight|bias) type "
            r"\((?:float|c10::\w+|torch\.cuda\.\w+)\) should be the same",
        ),
        changes={"precision": "auto", "model.dtype": None},
    ),
    Failure(
        id="fp16-bf16-pretrained",
        title="a model pre-trained in bf16 overflows in fp16",
        cause="T5, Gemma and many newer models were trained in bf16. Their activations exceed fp16's maximum "
        "of 65504, so the loss becomes nan or every step is skipped.",
        fix="train in bf16 on compute capability 8.0 or later, otherwise in fp32",
        source="huggingface/transformers#10956, #14189, #23918",
        places=(
            "fix fp16-bf16-pretrained",
            "fix fp16-bf16-checkpoint",
            "worker launcher.train.callbacks:_count_non_finite",
        ),
        changes={"precision": "auto"},
    ),
    Failure(
        id="loss-scale-minimum",
        title="fp16 overflowed at the smallest loss scale",
        cause="Every step overflowed until DeepSpeed's loss scale reached its minimum: activations or "
        "gradients do not fit fp16, or the learning rate is too high.",
        fix="train in bf16 or fp32, or lower the learning rate; a smaller min_loss_scale only hides the "
        "problem",
        source="deepspeed/runtime/fp16/loss_scaler.py; deepspeedai/DeepSpeedExamples#418",
        patterns=(r"Current loss scale already at minimum",),
        changes={"precision": "bf16"},
    ),
    Failure(
        id="nan-shown-as-zero",
        title="nan loss logged as 0.0",
        cause="logging_nan_inf_filter, on by default in the Trainer, replaces a non-finite loss by 0.",
        fix="turn the filter off and find the cause: fp16 overflow, a learning rate that is too high, or "
        "rows without target tokens",
        source="transformers/training_args.py logging_nan_inf_filter",
        places=("fix nan-shown-as-zero", "worker launcher.train.callbacks:_count_non_finite", "diagnose"),
        changes={"trainer.logging_nan_inf_filter": False},
    ),
    Failure(
        id="fp16-and-bf16",
        title="fp16 and bf16 are both enabled",
        cause="Two kinds of mixed precision are on, or one in the Trainer and the other in the DeepSpeed "
        "config.",
        fix="set `precision` in the recipe and keep both blocks out of the DeepSpeed config",
        source="transformers/training_args.py; deepspeed/runtime/config.py; accelerate/utils/dataclasses.py",
        places=("refusal owned-key", "refusal profile-conflict", "lint ds-fp16-and-bf16"),
        patterns=(
            r"At most one of fp16 and bf16 can be True",
            r"bfloat16 and fp16 modes cannot be simultaneously enabled",
            r"arg cannot be set to `\w+` when `\w+` is set in the DeepSpeed config",
        ),
    ),
    Failure(
        id="tf32-pre-ampere",
        title="tf32 on a GPU without tf32 support",
        cause="tf32 needs compute capability 8.0. TrainingArguments refuses it on other GPUs.",
        fix="remove `trainer.tf32`",
        source="transformers/training_args.py",
        places=("fix tf32-pre-ampere",),
        patterns=(r"--tf32 requires Ampere or a newer GPU arch",),
        changes={"trainer.tf32": None},
    ),
    Failure(
        id="ds-fp16-pascal",
        title="DeepSpeed fp16 on a device without fp16 units",
        cause="DeepSpeed refuses fp16 on CPUs and on GPUs below compute capability 7.0 (Pascal).",
        fix="train in fp32, or with `sharding.engine: ddp`",
        source="deepspeed/accelerator/cuda_accelerator.py is_fp16_supported; runtime/engine.py",
        places=("fix ds-fp16-pascal",),
        patterns=(r"Type fp16 is not supported\b",),
        changes={"precision": "fp32"},
    ),
    Failure(
        id="fa2-pre-ampere",
        title="FlashAttention-2 on a GPU before Ampere",
        cause="transformers loads the kernel on any device; the first forward pass fails below compute "
        "capability 8.0.",
        fix="set `model.attn_implementation: sdpa`",
        source="transformers/modeling_flash_attention_utils.py",
        places=("fix fa2-pre-ampere",),
        patterns=(r"FlashAttention(?:-?2)? only supports Ampere GPUs or newer",),
        changes={"model.attn_implementation": "sdpa"},
    ),
)
