"""Known failures of precision: 16 bits where the device, the weights or the scaler have none."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

PRECISION = (
    Failure(
        id="bf16-emulated",
        title="bf16 on a device that only emulates it",
        cause="torch.cuda.is_bf16_supported() counts emulation, so V100 and T4 accept bf16 and run it many "
        "times slower, without a word.",
        fix="train in fp16 there, or on compute capability 8.0 and later",
        source="torch/cuda/__init__.py is_bf16_supported; huggingface/diffusers#14129",
        versions="torch>=2.5",
        places=(Place("fix", "bf16-emulated"), Place("doctor", "bf16")),
        changes={"precision": "fp16"},
    ),
    Failure(
        id="bf16-no-device",
        title="bf16 asked for, no GPU visible",
        cause="TrainingArguments blames bf16 when torch sees no CUDA device at all: a driver, a "
        "CUDA_VISIBLE_DEVICES that names nothing, or a build of torch without CUDA.",
        fix="make the GPU visible (`effilaunch doctor` says what is missing)",
        source="transformers/training_args.py",
        versions="transformers>=4.40",
        places=(Place("doctor", "devices"), Place("diagnose")),
        patterns=(r"Your setup doesn't support bf16/gpu(?!\. You need (?:torch>=|Ampere))",),
    ),
    Failure(
        id="bf16-pre-ampere",
        title="bf16 on a GPU that has none",
        cause="The GPU has no bf16 units: it is older than Ampere (V100, T4, RTX 20, P100). transformers of "
        "before 2025 raises the same error where torch sees no GPU at all.",
        fix="train in fp16 (`precision: fp16`); where nvidia-smi shows a newer GPU, make it visible "
        "(`effilaunch doctor` says what is missing)",
        source="transformers/training_args.py; lm-sys/FastChat#1191; OptimalScale/LMFlow#88",
        places=(Place("fix", "bf16-emulated"), Place("doctor", "bf16"), Place("diagnose")),
        patterns=(
            r"Your setup doesn't support bf16/gpu\. You need (?:torch>=|Ampere)",
            r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
        ),
        changes={"precision": "fp16"},
    ),
    Failure(
        id="fp16-unscale",
        title="GradScaler met fp16 gradients",
        cause="Mixed fp16 keeps trainable weights in fp32; here they were loaded in fp16, and the scaler "
        "cannot unscale 16-bit gradients.",
        fix="load the weights in fp32, or train an adapter (kept in fp32) over fp16 weights",
        source="torch/amp/grad_scaler.py; huggingface/transformers#23165",
        places=(Place("fix", "fp16-unscale"), Place("diagnose")),
        patterns=(r"Attempting to unscale FP16 gradients",),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="fp16-on-bf16-params",
        title="the fp16 scaler met bf16 weights",
        cause="The weights are bf16 (the checkpoint's own dtype) while the run is mixed fp16; CUDA's scaler "
        "has no bf16 kernel.",
        fix="load the weights in fp32, or train in bf16 on compute capability 8.0 and later",
        source="pytorch/pytorch#127176; huggingface/trl#4901",
        places=(Place("fix", "fp16-unscale"), Place("fix", "explicit-dtype"), Place("diagnose")),
        patterns=(
            r"_amp_foreach_non_finite_check_and_unscale_cuda.{0,3} not implemented for .{0,3}BFloat16",
        ),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="dtype-auto-default",
        title="weights in the checkpoint's own dtype",
        cause="from_pretrained without a dtype takes that of the checkpoint since transformers 5; before, it "
        "was fp32. The same recipe trains other weights.",
        fix="say `model.dtype`, or leave it to the plan, which always writes one",
        source="transformers/modeling_utils.py from_pretrained; huggingface/trl#5457",
        versions="transformers>=5",
        places=(Place("fix", "explicit-dtype"),),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="pure-half-training",
        title="weights and optimizer states in 16 bits",
        cause="Half-precision weights are trained with no mixed precision around them: Adam's states are "
        "16-bit too, small updates round to zero and the loss stalls without an error.",
        fix="train in mixed precision, or say `precision: bf16-true` if that is wanted",
        source="transformers/modeling_utils.py (dtype is the training dtype without autocast)",
        places=(Place("fix", "pure-half-training"), Place("fix", "explicit-dtype")),
        changes={"model.dtype": "float32"},
    ),
    Failure(
        id="half-float-matmul",
        title="a matrix product of two dtypes",
        cause="Modules in fp32 (norms, heads and adapters of a quantised base) met 16-bit ones outside of "
        "autocast.",
        fix="train in mixed precision, and wrap a forward pass of your own in torch.autocast",
        source="bitsandbytes-foundation/bitsandbytes#240; tloen/alpaca-lora#203; huggingface/trl#4457",
        places=(Place("fix", "autocast-guard"), Place("diagnose")),
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
        title="a model trained in bf16 overflows fp16",
        cause="T5, Gemma and many newer models were trained in bf16, and their activations exceed fp16's "
        "65504: the loss is nan, or every step is skipped.",
        fix="train in bf16 on compute capability 8.0 and later, else in fp32",
        source="huggingface/transformers#10956, #14189, #23918",
        places=(
            Place("fix", "fp16-bf16-pretrained"),
            Place("fix", "fp16-bf16-checkpoint"),
            Place("worker", "launcher.train.callbacks:_count_non_finite"),
        ),
        changes={"precision": "auto"},
    ),
    Failure(
        id="loss-scale-minimum",
        title="fp16 overflowed at the smallest loss scale",
        cause="Every step overflowed until DeepSpeed's loss scale could not go down any more: the model's "
        "activations or gradients do not fit fp16, or the learning rate is too high.",
        fix="train in bf16 or fp32, or lower the learning rate; a smaller min_loss_scale only hides it",
        source="deepspeed/runtime/fp16/loss_scaler.py; deepspeedai/DeepSpeedExamples#418",
        places=(Place("diagnose"),),
        patterns=(r"Current loss scale already at minimum",),
        changes={"precision": "bf16"},
    ),
    Failure(
        id="nan-shown-as-zero",
        title="a nan loss logged as 0.0",
        cause="The Trainer's logging_nan_inf_filter, on by default, replaces a loss that is not finite by 0.",
        fix="turn the filter off, and look for the cause: an overflow in fp16, a learning rate too high, "
        "or rows without a single target",
        source="transformers/training_args.py logging_nan_inf_filter",
        places=(
            Place("fix", "nan-shown-as-zero"),
            Place("worker", "launcher.train.callbacks:_count_non_finite"),
            Place("diagnose"),
        ),
        changes={"trainer.logging_nan_inf_filter": False},
    ),
    Failure(
        id="fp16-and-bf16",
        title="fp16 and bf16 at once",
        cause="Both kinds of mixed precision are switched on, or one here and the other in the DeepSpeed "
        "config.",
        fix="say `precision` in the recipe and keep both blocks out of the DeepSpeed config",
        source="transformers/training_args.py; deepspeed/runtime/config.py; accelerate/utils/dataclasses.py",
        places=(
            Place("refusal", "owned-key"),
            Place("refusal", "profile-conflict"),
            Place("lint", "ds-fp16-and-bf16"),
            Place("diagnose"),
        ),
        patterns=(
            r"At most one of fp16 and bf16 can be True",
            r"bfloat16 and fp16 modes cannot be simultaneously enabled",
            r"arg cannot be set to `\w+` when `\w+` is set in the DeepSpeed config",
        ),
    ),
    Failure(
        id="tf32-pre-ampere",
        title="tf32 on a GPU that has none",
        cause="tf32 exists from compute capability 8.0 on; TrainingArguments refuses it elsewhere.",
        fix="drop `trainer.tf32`",
        source="transformers/training_args.py",
        places=(Place("fix", "tf32-pre-ampere"), Place("diagnose")),
        patterns=(r"--tf32 requires Ampere or a newer GPU arch",),
        changes={"trainer.tf32": None},
    ),
    Failure(
        id="ds-fp16-pascal",
        title="DeepSpeed's fp16 on a device without it",
        cause="DeepSpeed refuses fp16 on GPUs below compute capability 7.0 (Pascal) and on CPUs, which have "
        "no units for it.",
        fix="train in fp32 there, or with engine ddp",
        source="deepspeed/accelerator/cuda_accelerator.py is_fp16_supported; runtime/engine.py",
        places=(Place("fix", "ds-fp16-pascal"), Place("diagnose")),
        patterns=(r"Type fp16 is not supported\b",),
        changes={"precision": "fp32"},
    ),
    Failure(
        id="fa2-pre-ampere",
        title="FlashAttention-2 on a GPU before Ampere",
        cause="transformers loads the kernel on any device; it stops in the first forward pass below compute "
        "capability 8.0.",
        fix="use `model.attn_implementation: sdpa`",
        source="transformers/modeling_flash_attention_utils.py",
        places=(Place("fix", "fa2-pre-ampere"), Place("diagnose")),
        patterns=(r"FlashAttention(?:-?2)? only supports Ampere GPUs or newer",),
        changes={"model.attn_implementation": "sdpa"},
    ),
)
