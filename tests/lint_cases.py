"""Broken DeepSpeed configs: text, and the code, line, column and path that lint has to name."""

from __future__ import annotations

BASE = '"train_batch_size": 8'


def zero(body: str, stage: int = 3) -> str:
    """A config whose section starts in line 2: the body is in line 3."""
    return f'{{{BASE},\n"zero_optimization": {{"stage": {stage},\n{body}}}}}'


def optimizer(kind: str, params: str) -> str:
    """A config whose optimizer has these parameters in line 3."""
    return top(f'"optimizer": {{"type": "{kind}", "params": {{\n{params}}}}}')


def scheduler(kind: str, params: str) -> str:
    """A config whose scheduler has these parameters in line 3."""
    return top(f'"scheduler": {{"type": "{kind}", "params": {{\n{params}}}}}')


def top(body: str) -> str:
    """A config with the body in line 2."""
    return f"{{{BASE},\n{body}}}"


# text, code, line, column, path
BROKEN = {
    # unknown, misspelt, moved
    "zero_optimisation": (
        top('"zero_optimisation": {"stage": 3}'),
        "ds-typo-toplevel", 2, 1, "zero_optimisation",
    ),
    "gradient_cliping": (top('  "gradient_cliping": 0.5'), "ds-typo-toplevel", 2, 3, "gradient_cliping"),
    "fp_16": (top('"fp_16": {"enabled": true}'), "ds-typo-toplevel", 2, 1, "fp_16"),
    "capital": (top('"Zero_Optimization": {}'), "ds-typo-toplevel", 2, 1, "Zero_Optimization"),
    "space in a key": (top('"gradient_clipping ": 1.0'), "ds-typo-toplevel", 2, 1, "gradient_clipping "),
    "section at the top": (
        top('"offload_optimizer": {"device": "cpu"}'), "ds-typo-toplevel", 2, 1, "offload_optimizer"
    ),
    "overlap_com": (zero('"overlap_com": true'), "ds-typo-nested", 3, 1, "zero_optimization.overlap_com"),
    "pin_memroy": (
        zero('"offload_optimizer": {"device": "cpu", "pin_memroy": true}'),
        "ds-typo-nested", 3, 40, "zero_optimization.offload_optimizer.pin_memroy",
    ),
    "stage3 prefix forgotten": (
        zero('"stage3_contiguous_gradients": true'),
        "ds-typo-nested", 3, 1, "zero_optimization.stage3_contiguous_gradients",
    ),
    "misspelt optimizer parameter": (
        top('"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}}'),
        "ds-typo-nested", 2, 43, "optimizer.params.learning_rate",
    ),
    "fused with FusedAdam": (
        top('"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "fused": true}}'),
        "ds-typo-nested", 2, 54, "optimizer.params.fused",
    ),
    "adamw_mode with offload": (
        zero('"offload_optimizer": {"device": "cpu"}},\n'
             '"optimizer": {"type": "Adam", "params": {"adamw_mode": true}'),
        "ds-typo-nested", 4, 42, "optimizer.params.adamw_mode",
    ),
    "misspelt checkpointing key": (
        top('"activation_checkpointing": {"partition_activation": true}'),
        "ds-typo-nested", 2, 30, "activation_checkpointing.partition_activation",
    ),
    "old aio key": (top('"aio": {"thread_count": 1}'), "ds-typo-nested", 2, 9, "aio.thread_count"),
    "bf16 with a loss scale": (
        top('"bf16": {"enabled": true, "loss_scale": 0}'), "ds-typo-nested", 2, 27, "bf16.loss_scale"
    ),
    "scheduler parameter of another": (
        top('"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}'),
        "ds-typo-nested", 2, 46, "scheduler.params.total_num_steps",
    ),
    "compile of old versions": (
        top('"compile": {"backend": "inductor"}'), "ds-typo-nested", 2, 13, "compile.backend"
    ),
    # removed and renamed
    "amp off": (top('"amp": {"enabled": false}'), "ds-removed-key", 2, 1, "amp"),
    "elasticity": (top('"elasticity": {}'), "ds-removed-key", 2, 1, "elasticity"),
    "sparse_gradients": (top('"sparse_gradients": false'), "ds-removed-key", 2, 1, "sparse_gradients"),
    "mics": (zero('"mics_shard_size": 8'), "ds-removed-key", 3, 1, "zero_optimization.mics_shard_size"),
    "bfloat16": (top('"bfloat16": {"enabled": true}'), "ds-bfloat16-alias", 2, 1, "bfloat16"),
    "cpu_offload": (
        zero('"cpu_offload": true', 2),
        "ds-deprecated-key", 3, 1, "zero_optimization.cpu_offload",
    ),
    "both spellings": (
        zero('"max_live_parameters": 1, "stage3_max_live_parameters": 1'),
        "ds-alias-twice", 3, 27, "zero_optimization.stage3_max_live_parameters",
    ),
    "1-bit Adam": (top('"optimizer": {"type": "OneBitAdam"}'), "ds-optimizer-type", 2, 23, "optimizer.type"),
    "sgd in small letters": (
        top('"optimizer": {"type": "sgd"}'),
        "ds-optimizer-type", 2, 23, "optimizer.type",
    ),
    "scheduler in small letters": (
        top('"scheduler": {"type": "warmuplr"}'), "ds-scheduler-type", 2, 23, "scheduler.type"
    ),
    # types and ranges
    "8 as text": ('{"train_batch_size": "8"}', "ds-wrong-type", 1, 22, "train_batch_size"),
    "8.0": ('{"train_batch_size": 8.0}', "ds-wrong-type", 1, 22, "train_batch_size"),
    "clipping as text": (top('"gradient_clipping": "1.0"'), "ds-wrong-type", 2, 22, "gradient_clipping"),
    "stage as text": (
        top('"zero_optimization": {"stage": "3"}'), "ds-wrong-type", 2, 32, "zero_optimization.stage"
    ),
    "1e5 steps": (top('"steps_per_print": 1e5'), "ds-wrong-type", 2, 20, "steps_per_print"),
    "true as text": (top('"wall_clock_breakdown": "false"'), "ds-wrong-type", 2, 25, "wall_clock_breakdown"),
    "enabled as text": (top('"fp16": {"enabled": "true"}'), "ds-wrong-type", 2, 21, "fp16.enabled"),
    "section as true": (top('"fp16": true'), "ds-wrong-type", 2, 9, "fp16"),
    "zero as true": (top('"zero_optimization": true'), "ds-wrong-type", 2, 22, "zero_optimization"),
    "section as null": (top('"zero_optimization": null'), "ds-wrong-type", 2, 22, "zero_optimization"),
    "bucket of half an element": (
        zero('"reduce_bucket_size": 0.5'), "ds-float-bucket", 3, 23, "zero_optimization.reduce_bucket_size"
    ),
    "bucket 5e8 as text": (
        zero('"reduce_bucket_size": "5e8"'), "ds-float-bucket", 3, 23, "zero_optimization.reduce_bucket_size"
    ),
    "no bucket at all": (
        zero('"reduce_bucket_size": 0'), "ds-wrong-value", 3, 23, "zero_optimization.reduce_bucket_size"
    ),
    "stage 4": (top('"zero_optimization": {"stage": 4}'), "ds-wrong-value", 2, 32, "zero_optimization.stage"),
    "device gpu": (
        zero('"offload_optimizer": {"device": "gpu"}'),
        "ds-wrong-value", 3, 33, "zero_optimization.offload_optimizer.device",
    ),
    "ratio above one": (
        zero('"offload_optimizer": {"device": "cpu", "ratio": 1.5}'),
        "ds-wrong-value", 3, 49, "zero_optimization.offload_optimizer.ratio",
    ),
    "float32 for fp32": (
        top('"communication_data_type": "float32"'), "ds-comm-dtype", 2, 28, "communication_data_type"
    ),
    "beyond every number": (top('"gradient_clipping": 1e999'), "ds-wrong-value", 2, 22, "gradient_clipping"),
    # contradictions
    "fp16 and bf16": (
        top('"bf16": {"enabled": true},\n"fp16": {"enabled": true}'),
        "ds-fp16-and-bf16", 3, 21, "fp16.enabled"
    ),
    "batch numbers": (
        '{"train_batch_size": 32,\n"train_micro_batch_size_per_gpu": 5}', "ds-batch-mismatch", 1, 22,
        "train_batch_size",
    ),
    "no batch size": ('{"gradient_clipping": 1.0}', "ds-no-batch-size", 1, 1, ""),
    "offload_param at stage 2": (
        zero('"offload_param": {"device": "cpu"}', 2),
        "ds-stage2-offload-param", 3, 1, "zero_optimization.offload_param",
    ),
    "stage 3 key at stage 2": (
        zero('"stage3_max_live_parameters": 1000000000', 2),
        "ds-no-effect", 3, 1, "zero_optimization.stage3_max_live_parameters",
    ),
    "threshold 0 at stage 1": (
        zero('"stage3_param_persistence_threshold": 0', 1),
        "ds-no-effect", 3, 1, "zero_optimization.stage3_param_persistence_threshold",
    ),
    "nvme at stage 2": (
        zero('"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}', 2),
        "ds-no-effect", 3, 33, "zero_optimization.offload_optimizer.device",
    ),
    "stage 3 key at stage 0": (
        zero('"stage3_max_live_parameters": 5', 0),
        "ds-no-effect", 3, 1, "zero_optimization.stage3_max_live_parameters",
    ),
    "contiguous gradients without ZeRO": (
        zero('"contiguous_gradients": true', 0),
        "ds-no-effect", 3, 1, "zero_optimization.contiguous_gradients",
    ),
    "overlap at stage 0": (
        zero('"overlap_comm": true', 0), "ds-no-effect", 3, 1, "zero_optimization.overlap_comm",
    ),
    "partitions at stage 3": (
        zero('"allgather_partitions": true'),
        "ds-no-effect", 3, 1, "zero_optimization.allgather_partitions",
    ),
    "partitions by broadcast at stage 2": (
        zero('"allgather_partitions": false', 2),
        "ds-no-effect", 3, 1, "zero_optimization.allgather_partitions",
    ),
    "gather bucket at stage 3": (
        zero('"allgather_bucket_size": 5e8'),
        "ds-no-effect", 3, 1, "zero_optimization.allgather_bucket_size",
    ),
    "unused parameters at stage 3": (
        zero('"ignore_unused_parameters": false'),
        "ds-no-effect", 3, 1, "zero_optimization.ignore_unused_parameters",
    ),
    "unused parameters without offload": (
        zero('"ignore_unused_parameters": false', 2),
        "ds-no-effect", 3, 1, "zero_optimization.ignore_unused_parameters",
    ),
    "round robin at stage 3": (
        zero('"round_robin_gradients": true'),
        "ds-no-effect", 3, 1, "zero_optimization.round_robin_gradients",
    ),
    "ranks' buckets at stage 3": (
        zero('"use_multi_rank_bucket_allreduce": true'),
        "ds-no-effect", 3, 1, "zero_optimization.use_multi_rank_bucket_allreduce",
    ),
    "alignment at stage 3": (
        zero('"parameter_alignment": true'),
        "ds-no-effect", 3, 1, "zero_optimization.parameter_alignment",
    ),
    "elastic checkpoints at stage 3": (
        zero('"elastic_checkpoint": true'),
        "ds-no-effect", 3, 1, "zero_optimization.elastic_checkpoint",
    ),
    "nvme's buffers on the CPU": (
        zero('"offload_optimizer": {"device": "cpu", "buffer_count": 4}'),
        "ds-no-effect", 3, 40, "zero_optimization.offload_optimizer.buffer_count",
    ),
    "nvme's path on the CPU": (
        zero('"offload_param": {"device": "cpu", "nvme_path": "/x"}'),
        "ds-no-effect", 3, 36, "zero_optimization.offload_param.nvme_path",
    ),
    "fast init on the CPU": (
        zero('"offload_optimizer": {"device": "cpu", "fast_init": true}'),
        "ds-no-effect", 3, 40, "zero_optimization.offload_optimizer.fast_init",
    ),
    "super offload at stage 2": (
        zero('"offload_optimizer": {"device": "cpu", "super_offload": true}', 2),
        "ds-no-effect", 3, 40, "zero_optimization.offload_optimizer.super_offload",
    ),
    "a part of the optimizer at stage 2": (
        zero('"offload_optimizer": {"device": "cpu", "ratio": 0.5}', 2),
        "ds-stage-refuses", 3, 40, "zero_optimization.offload_optimizer.ratio",
    ),
    "offload without ZeRO": (
        zero('"offload_optimizer": {"device": "cpu"}', 0),
        "ds-stage-refuses", 3, 1, "zero_optimization.offload_optimizer",
    ),
    "no gradient norm at stage 3": (
        zero('"compute_grad_norm": false'),
        "ds-stage-refuses", 3, 1, "zero_optimization.compute_grad_norm",
    ),
    "the old stage 1": (
        zero('"legacy_stage1": true', 1),
        "ds-stage-refuses", 3, 1, "zero_optimization.legacy_stage1",
    ),
    "contiguous checkpoints without their number": (
        top('"activation_checkpointing": {"partition_activations": true,\n'
            '"contiguous_memory_optimization": true}'),
        "ds-contiguous-checkpoints", 3, 1, "activation_checkpointing.contiguous_memory_optimization",
    ),
    "contiguous checkpoints of whole activations": (
        top('"activation_checkpointing": {"number_checkpoints": 4, "contiguous_memory_optimization": true}'),
        "ds-contiguous-checkpoints", 2, 55, "activation_checkpointing.contiguous_memory_optimization",
    ),
    "nvme without a path": (
        zero('"offload_param": {"device": "nvme"}'),
        "ds-nvme-path-missing", 3, 29, "zero_optimization.offload_param.device",
    ),
    "buckets beyond every device": (
        zero('"overlap_comm": true, "reduce_bucket_size": 50000000000'),
        "ds-bucket-memory", 3, 45, "zero_optimization.reduce_bucket_size",
    ),
    "a loss scale that may reach 0": (
        top('"fp16": {"enabled": true, "loss_scale": 0, "min_loss_scale": 0}'),
        "ds-wrong-value", 2, 62, "fp16.min_loss_scale",
    ),
    "a window of a fixed loss scale": (
        top('"fp16": {"enabled": true, "loss_scale": 128, "loss_scale_window": 500}'),
        "ds-no-effect", 2, 46, "fp16.loss_scale_window",
    ),
    "16-bit states without 16-bit weights": (
        zero('"overlap_comm": true}, "bf16": {"enabled": true, "bf16_optimizer_states": true'),
        "ds-wrong-value", 3, 75, "bf16.bf16_optimizer_states",
    ),
    "16-bit weights without offload": (
        zero('"overlap_comm": true}, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true'),
        "ds-wrong-value", 3, 83, "fp16.fp16_master_weights_and_grads",
    ),
    "16-bit weights without ZeRO": (
        top('"zero_optimization": {"stage": 0},\n"bf16": {"enabled": true, '
            '"bf16_master_weights_and_grads": true}'),
        "ds-stage-refuses", 3, 60, "bf16.bf16_master_weights_and_grads",
    ),
    "clipping below 0": (top('"gradient_clipping": -1'), "ds-wrong-value", 2, 22, "gradient_clipping"),
    "progress every 0 steps": (top('"steps_per_print": 0'), "ds-wrong-value", 2, 20, "steps_per_print"),
    "clipping without the norm": (
        zero('"compute_grad_norm": false', 2),
        "ds-wrong-value", 3, 22, "zero_optimization.compute_grad_norm",
    ),
    "prescaled gradients that are scattered": (
        top('"zero_optimization": {"stage": 2},\n"prescale_gradients": true'),
        "ds-stage-refuses", 3, 23, "prescale_gradients",
    ),
    "autocast of quantised weights": (
        zero('"zero_quantized_weights": true}, "torch_autocast": {"enabled": true'),
        "ds-wrong-value", 3, 27, "zero_optimization.zero_quantized_weights",
    ),
    "a warm-up of another form": (
        top('"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}'),
        "ds-wrong-value", 2, 61, "scheduler.params.warmup_type",
    ),
    "a warm-up that is longer than the run": (
        top('"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100,\n'
            '"total_num_steps": 10}}'),
        "ds-wrong-value", 3, 20, "scheduler.params.total_num_steps",
    ),
    "no warm-up": (
        top('"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}'),
        "ds-warmup-zero", 2, 66, "scheduler.params.warmup_num_steps",
    ),
    "decay without its end": (
        top('"scheduler": {"type": "WarmupDecayLR", "params": {}}'),
        "ds-total-steps", 2, 23, "scheduler.params"
    ),
    "clipping in the optimizer": (
        top('"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}'),
        "ds-max-grad-norm-param", 2, 43, "optimizer.params.max_grad_norm",
    ),
    "no type of optimizer": (top('"optimizer": {"params": {}}'), "ds-optimizer-type", 2, 1, "optimizer"),
    "no type of scheduler": (top('"scheduler": {}'), "ds-scheduler-type", 2, 1, "scheduler"),
    "fp16 that is not enabled": (top('"fp16": {"loss_scale": 0}'), "ds-not-enabled", 2, 1, "fp16"),
    "bf16 that is not enabled": (top('"bf16": {}'), "ds-not-enabled", 2, 1, "bf16"),
    "SGD under ZeRO": (
        zero('"overlap_comm": true}, "optimizer": {"type": "SGD"', 1),
        "ds-untested-optimizer", 3, 46, "optimizer.type",
    ),
    "checkpointing under the Trainer": (
        zero('"overlap_comm": true}, "gradient_clipping": "auto",\n'
             '"activation_checkpointing": {"partition_activations": true, '
             '"contiguous_memory_optimization": true'),
        "ds-no-effect", 4, 1, "activation_checkpointing",
    ),
    "zero as false under the Trainer": (
        top('"gradient_clipping": "auto", "zero_optimization": false'),
        "ds-wrong-type", 2, 51, "zero_optimization",
    ),
    # values of an optimizer and a scheduler
    "a rate as text": (optimizer("AdamW", '"lr": "1e-4"'), "ds-wrong-type", 3, 7, "optimizer.params.lr"),
    "a rate below 0": (optimizer("SGD", '"lr": -1'), "ds-wrong-value", 3, 7, "optimizer.params.lr"),
    "one beta": (
        optimizer("Adam", '"betas": [0.9]'), "ds-wrong-value", 3, 10, "optimizer.params.betas"
    ),
    "a beta alone": (optimizer("Lion", '"betas": 0.9'), "ds-wrong-type", 3, 10, "optimizer.params.betas"),
    "a beta of 1": (
        optimizer("Adam", '"betas": [0.9, 1.0]'), "ds-wrong-value", 3, 16, "optimizer.params.betas[1]"
    ),
    "a beta as text": (
        optimizer("Adam", '"betas": ["0.9", 0.99]'), "ds-wrong-type", 3, 11, "optimizer.params.betas[0]"
    ),
    "a flag as text": (
        optimizer("AdamW", '"adam_w_mode": "false"'), "ds-wrong-type", 3, 16, "optimizer.params.adam_w_mode"
    ),
    "one eps of Adafactor": (
        optimizer("Adafactor", '"eps": 1e-3'), "ds-wrong-type", 3, 8, "optimizer.params.eps"
    ),
    "steps as text": (
        scheduler("WarmupDecayLR", '"total_num_steps": "1000"'),
        "ds-wrong-type", 3, 20, "scheduler.params.total_num_steps",
    ),
    "half a step": (
        scheduler("WarmupDecayLR", '"total_num_steps": 1000.5'),
        "ds-wrong-value", 3, 20, "scheduler.params.total_num_steps",
    ),
    "steps below 0": (
        scheduler("WarmupCosineLR", '"total_num_steps": -5'),
        "ds-wrong-value", 3, 20, "scheduler.params.total_num_steps",
    ),
    "a share as warm-up": (
        scheduler("WarmupLR", '"warmup_num_steps": 0.1'),
        "ds-wrong-type", 3, 21, "scheduler.params.warmup_num_steps",
    ),
    "100.0 steps": (
        scheduler("WarmupLR", '"warmup_num_steps": 100.0'),
        "ds-wrong-type", 3, 21, "scheduler.params.warmup_num_steps",
    ),
    "cycle as text": (
        scheduler("OneCycle", '"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": "5"'),
        "ds-wrong-type", 3, 64, "scheduler.params.cycle_first_step_size",
    ),
    "a floor above the rate": (
        scheduler("WarmupLR", '"warmup_min_lr": 0.1, "warmup_max_lr": 0.01'),
        "ds-wrong-value", 3, 18, "scheduler.params.warmup_min_lr",
    ),
    "two rates": (
        top('"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},\n'
            '"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}'),
        "ds-rate-replaced", 2, 49, "optimizer.params.lr",
    ),
    "a rate that nobody reads": (
        top('"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},\n'
            '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}'),
        "ds-rate-replaced", 2, 49, "optimizer.params.lr",
    ),
    # "auto"
    "auto that nobody fills": (
        zero('"overlap_comm": "auto"'), "ds-auto-unresolved", 3, 17, "zero_optimization.overlap_comm"
    ),
    "auto without a section": (
        '{"train_micro_batch_size_per_gpu": "auto"}', "ds-no-zero-block", 1, 1, "zero_optimization"
    ),
    # not strict JSON
    "line comment": (f'{{{BASE} // eight\n}}', "ds-json-comments", 1, 24, ""),
    "block comment": (f'{{/* a\nb */ {BASE}}}', "ds-json-comments", 1, 2, ""),
    "trailing comma": (f"{{{BASE},\n}}", "ds-json-comma", 1, 23, ""),
    "duplicate": (top('"train_batch_size": 16'), "ds-duplicate-keys", 2, 1, "train_batch_size"),
    "nested duplicate": (zero('"stage": 2'), "ds-duplicate-keys", 3, 1, "zero_optimization.stage"),
    "True": (top('"wall_clock_breakdown": True'), "ds-json-word", 2, 25, "wall_clock_breakdown"),
    "NaN": (top('"gradient_clipping": NaN'), "ds-json-number", 2, 22, "gradient_clipping"),
    "single quotes": ("{\n 'train_batch_size': 8}", "ds-json-syntax", 2, 2, ""),
    "missing comma": ('{"train_batch_size": 8\n"dump_state": true}', "ds-json-syntax", 2, 1, ""),
    "missing colon": ('{"train_batch_size" 8}', "ds-json-syntax", 1, 21, ""),
    "never ends": ('{"train_batch_size": 8', "ds-json-syntax", 1, 23, ""),
    "template": ('{"train_batch_size": GB_SIZE}', "ds-json-syntax", 1, 22, ""),
    "two objects": ("{}\n{}", "ds-json-syntax", 2, 1, ""),
    "leading zero": ('{"train_batch_size": 08}', "ds-json-syntax", 1, 22, ""),
    "text over two lines": (top('"log_level": "x\ny"'), "ds-json-syntax", 2, 14, ""),
    "bad escape": (top('"log_level": "\\x41"'), "ds-json-syntax", 2, 14, ""),
    "empty": ("", "ds-json-syntax", 1, 1, ""),
    "blank": (" \n ", "ds-json-syntax", 1, 1, ""),
    "a list": ('[{"train_batch_size": 8}]', "ds-not-an-object", 1, 1, ""),
    "null": ("null", "ds-not-an-object", 1, 1, ""),
    "nested too deeply": ("[" * 100_000, "ds-json-syntax", 1, 66, ""),
    "number without end": (top(f'"gradient_clipping": {"1" * 10_000}'), "ds-json-syntax", 2, 22, ""),
    # JSON of another kind
    "model": ('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 9, "bf16": true}',
              "ds-not-a-config", 1, 1, ""),
    "generation": ('{"_from_model_config": true, "eos_token_id": 2, "transformers_version": "5.23.0"}',
                   "ds-not-a-config", 1, 1, ""),
    "tokenizer": ('{"add_bos_token": true, "tokenizer_class": "Llama"}', "ds-not-a-config", 1, 1, ""),
    "adapter": ('{"peft_type": "LORA", "r": 8}', "ds-not-a-config", 1, 1, ""),
    "accelerate": ('{"compute_environment": "LOCAL_MACHINE", "deepspeed_config": {}}',
                   "ds-not-a-config", 1, 1, ""),
    "package": ('{"name": "a", "version": "1.0.0", "scripts": {}}', "ds-not-a-config", 1, 1, ""),
    "arguments": ('{"output_dir": "o", "learning_rate": 1e-4, "num_train_epochs": 3, "bf16": true}',
                  "ds-not-a-config", 1, 1, ""),
    "trainer state": ('{"log_history": [], "global_step": 5}', "ds-not-a-config", 1, 1, ""),
    "below another key": ('{"ds": {"zero_optimization": {"stage": 2}}}', "ds-not-a-config", 1, 1, ""),
    "anything": ('{"compilerOptions": {}, "include": [], "exclude": [], "files": []}',
                 "ds-not-a-config", 1, 1, ""),
    "byte order mark": (f"\ufeff{{{BASE}}}", "ds-json-syntax", 1, 1, ""),
}  # fmt: skip
