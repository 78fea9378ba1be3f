"""Known failures of memory on the device; more exact ones come before the plain one."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

_PLANNED = Place("refusal", "does-not-fit")
_ALLOCATOR = Place("worker", "launcher.plan.arguments:decide_runtime")

MEMORY = (
    Failure(
        id="auto-batch-eval-oom",
        title="out of memory in an evaluation that auto_find_batch_size does not reach",
        cause="auto_find_batch_size halves the batch of training alone; the evaluation ran out of memory "
        "with its own.",
        mend="drop trainer.auto_find_batch_size and lower trainer.per_device_eval_batch_size",
        source="transformers/trainer.py _evaluate",
        versions="transformers>=5",
        places=(Place("fix", "auto-find-batch-size"), Place("diagnose")),
        patterns=(r"Evaluation hit an out-of-memory error",),
        changes={"trainer.auto_find_batch_size": None, "trainer.per_device_eval_batch_size": 1},
    ),
    Failure(
        id="eval-oom",
        title="out of memory while evaluating",
        cause="An evaluation keeps the logits of all rows for compute_metrics, [rows, length, vocabulary], "
        "and its batch may be larger than that of training.",
        mend="lower trainer.per_device_eval_batch_size; keep no logits (trainer.prediction_loss_only: true), "
        "or move them to the host step by step (trainer.eval_accumulation_steps: 1)",
        source="transformers/trainer.py evaluation_loop",
        places=(
            Place("worker", "launcher.plan.arguments:_evaluation"),
            Place("worker", "launcher.train.metrics:keep_predictions"),
            _PLANNED,
            Place("diagnose"),
        ),
        # The message alone does not say where: the calls below it do.
        patterns=(
            r"(?s)(?:out of memory\. Tried to allocate|CUDA error: out of memory|DefaultCPUAllocator: |"
            r"^(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b).*\n.*"
            r"\bin "
            r"(?:evaluation_loop|prediction_loop|prediction_step|evaluate|_evaluate|_loglikelihood_tokens|"
            r"torch_pad_and_concatenate|nested_concat|nested_numpify|gather_for_metrics)\b",
        ),
        changes={"trainer.per_device_eval_batch_size": 1, "trainer.eval_accumulation_steps": 1},
    ),
    Failure(
        id="logits-oom",
        title="out of memory in the loss",
        cause="The loss holds several fp32 copies of the logits, batch x length x vocabulary x 4 bytes each: "
        "with a large vocabulary more than the rest of the model's activations.",
        mend="lower trainer.per_device_train_batch_size or data.max_length, or set "
        "trainer.use_liger_kernel: true, which never holds all logits",
        source="transformers/loss/loss_utils.py ForCausalLMLoss",
        places=(
            Place("worker", "launcher.plan.planner:_logits_warnings"),
            Place("worker", "launcher.memory.loss:head_cost"),
            _PLANNED,
            Place("diagnose"),
        ),
        patterns=(
            r"(?s)out of memory\. Tried to allocate.*\n.*(?:\bin (?:ForCausalLMLoss|ForMaskedLMLoss|"
            r"fixed_cross_entropy|cross_entropy|log_softmax|selective_log_softmax)\b|_cross_entropy\(|"
            r"logits = logits\.(?:float\(\)|to\(torch\.float32\)))",
        ),
        changes={"trainer.per_device_train_batch_size": 1},
    ),
    Failure(
        id="oom-fragmentation",
        title="device memory in pieces",
        cause="Gigabytes are reserved by torch and free, but in blocks that are too small for the tensor "
        "that was asked for.",
        mend="set launch.env.PYTORCH_ALLOC_CONF: expandable_segments:True, as the plan does",
        source="torch/lib/libc10 PYTORCH_ALLOC_CONF",
        places=(_ALLOCATOR, Place("diagnose")),
        # At least 3 GiB; a process always has some.
        patterns=(
            r"out of memory\. Tried to allocate .*\b(?:[3-9]|\d{2,})\.\d+ GiB is reserved by PyTorch but "
            r"unallocated",
        ),
        changes={"launch.env.PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
    Failure(
        id="cuda-oom",
        title="out of device memory",
        cause="Weights, gradients, optimizer states and activations together take more than the device has "
        "left.",
        mend="let the run shrink itself (on_oom: adapt), or by hand: a smaller micro-batch with more "
        "accumulation, trainer.activation_checkpointing: true, a shorter data.max_length, a higher "
        "sharding.zero_stage, model.quantization: nf4 with an adapter",
        source="torch/cuda/memory.py OutOfMemoryError",
        places=(_PLANNED, Place("worker", "launcher.plan.adapting:adapt"), Place("diagnose")),
        patterns=(
            r"(?:CUDA|HIP|XPU) out of memory\b",
            r"(?:CUDA|HIP) error: out of memory",
            r"^(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b",
            r"\btorch\.(?:cuda\.)?OutOfMemoryError: ",
            r"Cuda failure (?:\d+ )?'out of memory'",
            r"CUBLAS_STATUS_ALLOC_FAILED when calling",
        ),
        changes={"on_oom": "adapt"},
    ),
)
