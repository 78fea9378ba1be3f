"""Known failures of checkpoints: saving them, and going on from them."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

_DIFFERS = "refusal resume-differs"

SAVING = (
    Failure(
        id="rng-weights-only",
        title="torch refuses to unpickle a checkpoint file",
        cause="torch.load uses weights_only, and a file of the checkpoint, usually rng_state*.pth, contains "
        "objects outside its allowlist, written by another numpy major version or an old run.",
        fix="move rng_state*.pth out of the checkpoint (the run resumes with new random states), or resume "
        "with the versions that wrote it",
        source="transformers/trainer.py _load_rng_state; huggingface/transformers#34631",
        versions="torch>=2.6",
        places=("worker launcher.train.checkpoint.resuming:put_aside_random_states",),
        patterns=(r"Weights only load failed", r"WeightsUnpickler error"),
    ),
    Failure(
        id="torch-load-refused",
        title="pickled file with torch before 2.6",
        cause="transformers refuses torch.load below torch 2.6 (CVE-2025-32434). This affects weights that "
        "are not safetensors and the optimizer.pt of checkpoints.",
        fix="update torch to 2.6 or later; otherwise use safetensors weights and start a new run from the "
        "checkpoint's weights",
        source="transformers/utils/import_utils.py check_torch_load_is_safe; hiyouga/LlamaFactory#8379",
        patterns=(r"Due to a serious vulnerability issue in `torch\.load`",),
    ),
    Failure(
        id="optimizer-other-weights",
        title="optimizer states of other weights",
        cause="Different weights were trainable when the checkpoint was written: other target_modules or "
        "modules_to_save, other frozen layers, added tokens, or an adapter loaded without is_trainable.",
        fix="resume with the settings that wrote the checkpoint, or start a new run from its weights",
        source="torch/optim/optimizer.py load_state_dict; huggingface/peft#859; unslothai/unsloth#3108",
        places=(_DIFFERS,),
        patterns=(
            r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            r"loaded state dict has a different number of parameter groups",
        ),
    ),
    Failure(
        id="zero-world-size",
        title="ZeRO checkpoint from another number of ranks",
        cause="ZeRO shards the optimizer states over ranks, and this checkpoint was written by another "
        "number of ranks.",
        fix="resume on the same number of devices, or start a new run from the saved weights",
        source="deepspeed/runtime/engine.py _load_zero_checkpoint; deepspeedai/DeepSpeed#2921",
        places=(_DIFFERS,),
        patterns=(
            r"partitioning with a new world size is not currently supported",
            r"The checkpoint being loaded used a DP world size of \d+ but the current world size is \d+",
        ),
    ),
    Failure(
        id="zero-stage-change",
        title="checkpoint of another ZeRO stage",
        cause="ZeRO-3 writes other files than lower stages; DeepSpeed finds none that it can read and raises "
        "a bare assertion.",
        fix="resume with the sharding.zero_stage that wrote the checkpoint",
        source="deepspeed/runtime/state_dict_factory.py check_ckpt_list",
        places=(_DIFFERS,),
        patterns=(
            r"(?s)AssertionError.*\bin check_ckpt_list\b",
            r"checkpoint count \d+ is different from saved mp_world_size",
        ),
    ),
    Failure(
        id="save-only-model-resume",
        title="checkpoint without training states",
        cause="DeepSpeed resumes from its own states, and the folder has none: it was saved with "
        "save_only_model, or is not a checkpoint. Without DeepSpeed such a run resumes silently with a new "
        "optimizer and schedule.",
        fix="resume from a checkpoint-N folder with states (trainer.save_only_model: false), or start a new "
        "run from its weights",
        source="transformers/integrations/deepspeed.py deepspeed_load_checkpoint",
        places=("refusal checkpoint-without-states",),
        patterns=(
            r"Can't find a valid checkpoint at ",
            r"No such file or directory: '\S*checkpoint-\d+/(?:scheduler|optimizer)\.pt'",
        ),
        changes={"trainer.save_only_model": False},
    ),
    Failure(
        id="save-only-model-best",
        title="load_best_model_at_end without DeepSpeed states",
        cause="load_best_model_at_end loads through DeepSpeed and needs the states that save_only_model "
        "omits.",
        fix="remove trainer.save_only_model or trainer.load_best_model_at_end",
        source="transformers/trainer.py _validate_args",
        places=("fix save-only-model-best",),
        patterns=(r"can't be used with `save_only_model` along with `load_best_model_at_end`",),
        changes={"trainer.save_only_model": False},
    ),
    Failure(
        id="no-checkpoint",
        title="no checkpoint to resume from",
        cause="Resuming was requested, and the folder holds no checkpoint yet.",
        fix="start without resuming; `run --resume auto` starts a new run in this case",
        source="transformers/trainer.py train",
        places=("worker launcher.train.training:find_checkpoint", "refusal no-checkpoint"),
        patterns=(
            r"No valid checkpoint found in output directory",
            r"(?s)Can't find a valid checkpoint at .*\n  File \S*transformers/trainer\.py, line \d+, in "
            r"_load_from_checkpoint\b",
        ),
    ),
    Failure(
        id="output-dir-reuse",
        title="a second run in the same output folder",
        cause="transformers no longer protects the output folder: checkpoints of both runs mix, and old ones "
        "are overwritten.",
        fix="set another --output-dir, or resume the first run with --resume auto",
        source="transformers/training_args.py (overwrite_output_dir was removed)",
        versions="transformers>=5",
        places=("refusal run-dir-not-empty",),
    ),
    Failure(
        id="resume-args-drift",
        title="resumed with different settings",
        cause="Batch size or number of steps differ from the checkpoint, so the Trainer skips the wrong "
        "rows. It only warns.",
        fix="restore the original values, or start a new run",
        source="transformers/trainer_utils.py compare_trainer_and_checkpoint_args",
        places=(_DIFFERS,),
        signs=(r"do not match the ones in the `{1,2}trainer_state\.json`{1,2}",),
    ),
    Failure(
        id="best-strategy",
        title="save and evaluation strategies do not match",
        cause="load_best_model_at_end needs an evaluation for each checkpoint: equal strategies, and "
        "save_steps a multiple of eval_steps.",
        fix="set save_strategy and eval_strategy to the same value, and save_steps to a multiple of "
        "eval_steps",
        source="transformers/training_args.py __post_init__",
        places=("refusal conflict",),
        patterns=(
            r"--load_best_model_at_end requires the sav(?:e|ing)\b",
            r"requires the saving steps to be a (?:round )?multiple of the evaluation",
        ),
    ),
    Failure(
        id="best-metric",
        title="metric_for_best_model is not computed",
        cause="The evaluation does not return the value of metric_for_best_model; without metrics it returns "
        "only the loss. The error is raised at the first evaluation.",
        fix="add the metric to data.metrics, or use eval_loss",
        source="transformers/trainer.py _determine_best_metric",
        places=("refusal conflict",),
        patterns=(
            r"which is not found in the evaluation metrics",
            r"(?s)^KeyError: 'eval_\w+'\n.*\n  File \S*transformers/trainer\.py",
        ),
        changes={"trainer.metric_for_best_model": "eval_loss"},
    ),
    Failure(
        id="peft-prompt-best",
        title="load_best_model_at_end with prompt learning",
        cause="Prompt-learning adapters cannot be reloaded into a running model, so the best checkpoint is "
        "not restored.",
        fix="remove trainer.load_best_model_at_end, or train a LoRA adapter",
        source="transformers/trainer.py _load_best_model; huggingface/peft#2256",
        places=("refusal wrong-choice",),
        patterns=(r"When using prompt learning PEFT methods such as \w+, setting load_best_model_at_end",),
    ),
    Failure(
        id="shared-tensors",
        title="weights share memory when saved",
        cause="Two parameters are the same tensor but not declared as tied, so safetensors refuses to save "
        "them.",
        fix="declare them in the model's _tied_weights_keys, or clone one before saving",
        source="safetensors/torch.py; transformers/modeling_utils.py save_pretrained",
        places=("refusal shared-tensors",),
        patterns=(
            r"Some tensors share memory, this will lead to duplicate memory on disk",
            r"The weights trying to be saved contained shared tensors",
        ),
    ),
    Failure(
        id="checkpoint-disk",
        title="the disk is full",
        cause="A checkpoint of a full fine-tune with AdamW takes 12 to 16 bytes per parameter, and "
        "save_total_limit + 1 of them exist during a save. A disk quota has the same effect.",
        fix="free space, set --output-dir to a larger disk, or save less (trainer.save_total_limit: 1, "
        "trainer.save_only_model: true, an adapter)",
        source="transformers/trainer.py _save_checkpoint",
        places=("refusal disk-full", "worker launcher.planner.arguments:decide_trainer", "doctor disk"),
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


_PLANNED = "refusal does-not-fit"
_ALLOCATOR = "worker launcher.planner.arguments:decide_runtime"

MEMORY = (
    Failure(
        id="auto-batch-eval-oom",
        title="evaluation ran out of memory despite auto_find_batch_size",
        cause="auto_find_batch_size reduces only the training batch size, not the evaluation batch size.",
        fix="remove trainer.auto_find_batch_size and lower trainer.per_device_eval_batch_size",
        source="transformers/trainer.py _evaluate",
        versions="transformers>=5",
        places=("fix auto-find-batch-size",),
        patterns=(r"Evaluation hit an out-of-memory error",),
        changes={"trainer.auto_find_batch_size": None, "trainer.per_device_eval_batch_size": 1},
    ),
    Failure(
        id="eval-oom",
        title="out of memory during evaluation",
        cause="Evaluation keeps the logits of all rows for compute_metrics, [rows, length, vocabulary], and "
        "its batch size may be larger than in training.",
        fix="lower trainer.per_device_eval_batch_size; drop logits (trainer.prediction_loss_only: true) or "
        "move them to the host (trainer.eval_accumulation_steps: 1)",
        source="transformers/trainer.py evaluation_loop",
        places=(
            "worker launcher.planner.arguments:_evaluation",
            "worker launcher.train.metrics:keep_predictions",
            _PLANNED,
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
        cause="The loss holds several fp32 copies of the logits, batch x length x vocabulary x 4 bytes each; "
        "with a large vocabulary this exceeds all other activations.",
        fix="lower trainer.per_device_train_batch_size or data.max_length, or set trainer.use_liger_kernel: "
        "true, which never materialises the full logits",
        source="transformers/loss/loss_utils.py ForCausalLMLoss",
        places=(
            "worker launcher.planner.planner:_logits_warnings",
            "worker launcher.memory.loss:head_cost",
            _PLANNED,
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
        title="fragmented device memory",
        cause="torch has gigabytes reserved but unallocated, in blocks too small for the requested tensor.",
        fix="set launch.env.PYTORCH_ALLOC_CONF: expandable_segments:True, as the plan does",
        source="torch/lib/libc10 PYTORCH_ALLOC_CONF",
        places=(_ALLOCATOR,),
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
        cause="Weights, gradients, optimizer states and activations need more memory than the device has "
        "free.",
        fix="let the run adapt (on_oom: adapt), or change it manually: smaller micro-batch with more "
        "accumulation, trainer.activation_checkpointing: true, shorter data.max_length, higher "
        "sharding.zero_stage, model.quantization: nf4 with an adapter",
        source="torch/cuda/memory.py OutOfMemoryError",
        places=(_PLANNED, "worker launcher.planner.adapting:adapt"),
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
