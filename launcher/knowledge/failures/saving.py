"""Known failures of checkpoints: saving them, and going on from them."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

_DIFFERS = Place("refusal", "resume-differs")

SAVING = (
    Failure(
        id="rng-weights-only",
        title="a checkpoint that torch will not unpickle",
        cause="torch.load reads weights only; a file of the checkpoint, mostly rng_state*.pth, holds objects "
        "outside its list of safe types, as numpy of another major version or an old run wrote them.",
        fix="move rng_state*.pth out of the checkpoint (the run then goes on with fresh random states), or "
        "resume with the versions that wrote it",
        source="transformers/trainer.py _load_rng_state; huggingface/transformers#34631",
        versions="torch>=2.6",
        places=(Place("worker", "launcher.train.resuming:put_aside_random_states"), Place("diagnose")),
        patterns=(r"Weights only load failed", r"WeightsUnpickler error"),
    ),
    Failure(
        id="torch-load-refused",
        title="a pickled file that transformers opens with torch 2.6 only",
        cause="transformers refuses torch.load below torch 2.6 (CVE-2025-32434): weights that are no "
        "safetensors, and a checkpoint's optimizer.pt, which has no other form.",
        fix="update torch to 2.6 or later; without that take weights in safetensors, and start a new run "
        "from the checkpoint's weights",
        source="transformers/utils/import_utils.py check_torch_load_is_safe; hiyouga/LlamaFactory#8379",
        places=(Place("diagnose"),),
        patterns=(r"Due to a serious vulnerability issue in `torch\.load`",),
    ),
    Failure(
        id="optimizer-other-weights",
        title="optimizer states of other weights",
        cause="The checkpoint was written while other weights were trained: other target_modules or "
        "modules_to_save, another number of frozen layers, added tokens, or an adapter that was loaded "
        "without is_trainable.",
        fix="resume with the settings that wrote the checkpoint, or start a new run from its weights",
        source="torch/optim/optimizer.py load_state_dict; huggingface/peft#859; unslothai/unsloth#3108",
        places=(_DIFFERS, Place("diagnose")),
        patterns=(
            r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            r"loaded state dict has a different number of parameter groups",
        ),
    ),
    Failure(
        id="zero-world-size",
        title="ZeRO states of another number of devices",
        cause="ZeRO cuts the optimizer's states into one piece a rank, and this checkpoint was written by "
        "another number of ranks.",
        fix="resume on as many devices as wrote it, or start a new run from the saved weights",
        source="deepspeed/runtime/engine.py _load_zero_checkpoint; deepspeedai/DeepSpeed#2921",
        places=(_DIFFERS, Place("diagnose")),
        patterns=(
            r"partitioning with a new world size is not currently supported",
            r"The checkpoint being loaded used a DP world size of \d+ but the current world size is \d+",
        ),
    ),
    Failure(
        id="zero-stage-change",
        title="a checkpoint of another ZeRO stage",
        cause="ZeRO-3 writes other files than the stages below it; DeepSpeed finds none that it can read "
        "and stops at a bare assertion.",
        fix="resume with the sharding.zero_stage that wrote the checkpoint",
        source="deepspeed/runtime/state_dict_factory.py check_ckpt_list",
        places=(_DIFFERS, Place("diagnose")),
        patterns=(
            r"(?s)AssertionError.*\bin check_ckpt_list\b",
            r"checkpoint count \d+ is different from saved mp_world_size",
        ),
    ),
    Failure(
        id="save-only-model-resume",
        title="a folder without training states",
        cause="DeepSpeed resumes from its own states, and the folder has none: it was saved with "
        "save_only_model, or it is no checkpoint. Without DeepSpeed such a run goes on silently, with a "
        "fresh optimizer and schedule.",
        fix="resume from a checkpoint-N folder with states (trainer.save_only_model: false), or start a new "
        "run from its weights",
        source="transformers/integrations/deepspeed.py deepspeed_load_checkpoint",
        places=(Place("refusal", "checkpoint-without-states"), Place("diagnose")),
        patterns=(
            r"Can't find a valid checkpoint at ",
            r"No such file or directory: '\S*checkpoint-\d+/(?:scheduler|optimizer)\.pt'",
        ),
        changes={"trainer.save_only_model": False},
    ),
    Failure(
        id="save-only-model-best",
        title="the best checkpoint without DeepSpeed's states",
        cause="load_best_model_at_end loads through DeepSpeed, which needs the states that save_only_model "
        "leaves out.",
        fix="drop trainer.save_only_model, or trainer.load_best_model_at_end",
        source="transformers/trainer.py _validate_args",
        places=(Place("fix", "save-only-model-best"), Place("diagnose")),
        patterns=(r"can't be used with `save_only_model` along with `load_best_model_at_end`",),
        changes={"trainer.save_only_model": False},
    ),
    Failure(
        id="no-checkpoint",
        title="nothing to resume from",
        cause="Resuming was asked for, and the folder holds no checkpoint yet.",
        fix="start without resuming; `run --resume auto` starts afresh by itself",
        source="transformers/trainer.py train",
        places=(
            Place("worker", "launcher.train.training:find_checkpoint"),
            Place("refusal", "no-checkpoint"),
            Place("diagnose"),
        ),
        patterns=(
            r"No valid checkpoint found in output directory",
            r"(?s)Can't find a valid checkpoint at .*\n  File \S*transformers/trainer\.py, line \d+, in "
            r"_load_from_checkpoint\b",
        ),
    ),
    Failure(
        id="output-dir-reuse",
        title="a second run in the folder of a first",
        cause="Nothing upstream guards an output folder any more: checkpoints of two runs mix, and old ones "
        "are overwritten.",
        fix="name another --output-dir, or continue that run with --resume auto",
        source="transformers/training_args.py (overwrite_output_dir was removed)",
        versions="transformers>=5",
        places=(Place("refusal", "run-dir-not-empty"),),
    ),
    Failure(
        id="resume-args-drift",
        title="a continuation with other settings",
        cause="Batch size or number of steps differ from those of the checkpoint, so the Trainer skips the "
        "wrong rows; it only warns.",
        fix="restore the values that the run began with, or start a new run",
        source="transformers/trainer_utils.py compare_trainer_and_checkpoint_args",
        places=(_DIFFERS, Place("diagnose")),
        signs=(r"do not match the ones in the `{1,2}trainer_state\.json`{1,2}",),
    ),
    Failure(
        id="best-strategy",
        title="checkpoints and evaluations that do not meet",
        cause="load_best_model_at_end needs an evaluation for each checkpoint: equal strategies, and "
        "save_steps a multiple of eval_steps.",
        fix="give save_strategy and eval_strategy one value, and save_steps a multiple of eval_steps",
        source="transformers/training_args.py __post_init__",
        places=(Place("refusal", "conflict"), Place("diagnose")),
        patterns=(
            r"--load_best_model_at_end requires the sav(?:e|ing)\b",
            r"requires the saving steps to be a (?:round )?multiple of the evaluation",
        ),
    ),
    Failure(
        id="best-metric",
        title="a best metric that nobody measures",
        cause="metric_for_best_model names a value that the evaluation does not return; without metrics only "
        "the loss is there. It is found out at the first evaluation.",
        fix="add the metric to data.metrics, or use eval_loss",
        source="transformers/trainer.py _determine_best_metric",
        places=(Place("refusal", "conflict"), Place("diagnose")),
        patterns=(
            r"which is not found in the evaluation metrics",
            r"(?s)^KeyError: 'eval_\w+'\n.*\n  File \S*transformers/trainer\.py",
        ),
        changes={"trainer.metric_for_best_model": "eval_loss"},
    ),
    Failure(
        id="peft-prompt-best",
        title="the best checkpoint of a prompt-learning adapter",
        cause="Prompt-learning adapters cannot be loaded back into a running model, so the best one is not "
        "restored at the end.",
        fix="drop trainer.load_best_model_at_end, or train a LoRA adapter",
        source="transformers/trainer.py _load_best_model; huggingface/peft#2256",
        places=(Place("refusal", "wrong-choice"), Place("diagnose")),
        patterns=(r"When using prompt learning PEFT methods such as \w+, setting load_best_model_at_end",),
    ),
    Failure(
        id="shared-tensors",
        title="weights that share memory when saved",
        cause="Two parameters are one tensor, and the model does not declare them tied, so safetensors "
        "refuses to write both.",
        fix="declare them in the model's _tied_weights_keys, or clone one of them before saving",
        source="safetensors/torch.py; transformers/modeling_utils.py save_pretrained",
        places=(
            Place("refusal", "shared-tensors"),
            Place("diagnose"),
        ),
        patterns=(
            r"Some tensors share memory, this will lead to duplicate memory on disk",
            r"The weights trying to be saved contained shared tensors",
        ),
    ),
    Failure(
        id="checkpoint-disk",
        title="the disk is full",
        cause="A checkpoint of a full fine-tune with AdamW takes 12 to 16 bytes a parameter, and one more "
        "than save_total_limit exist while it is written; a quota ends a run like a full disk.",
        fix="free space, point --output-dir at a larger disk, or save less (trainer.save_total_limit: 1, "
        "trainer.save_only_model: true, an adapter)",
        source="transformers/trainer.py _save_checkpoint",
        places=(
            Place("refusal", "disk-full"),
            Place("worker", "launcher.plan.arguments:decide_trainer"),
            Place("doctor", "disk"),
            Place("diagnose"),
        ),
        patterns=(
            # Shared memory says the same of itself: that is no disk.
            r"(?m)^(?!.*(?:</torch_|/dev/shm)).*No space left on device",
            r"Disk quota exceeded",
            r"FilesystemQuotaExceeded",
            r"code: 28, kind: StorageFull",
            # torch.save's writer, which does not ask why.
            r"PytorchStreamWriter failed writing file",
            r"basic_ios::clear: iostream error",
            r"inline_container\.cc:\d+\] ?\.? ?unexpected pos \d+ vs \d+",
        ),
        changes={"trainer.save_total_limit": 1},
    ),
)


_PLANNED = Place("refusal", "does-not-fit")
_ALLOCATOR = Place("worker", "launcher.plan.arguments:decide_runtime")

MEMORY = (
    Failure(
        id="auto-batch-eval-oom",
        title="out of memory in an evaluation that auto_find_batch_size does not reach",
        cause="auto_find_batch_size halves the batch of training alone; the evaluation ran out of memory "
        "with its own.",
        fix="drop trainer.auto_find_batch_size and lower trainer.per_device_eval_batch_size",
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
        fix="lower trainer.per_device_eval_batch_size; keep no logits (trainer.prediction_loss_only: true), "
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
        fix="lower trainer.per_device_train_batch_size or data.max_length, or set "
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
        fix="set launch.env.PYTORCH_ALLOC_CONF: expandable_segments:True, as the plan does",
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
        fix="let the run shrink itself (on_oom: adapt), or by hand: a smaller micro-batch with more "
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
