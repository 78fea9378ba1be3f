"""Known failures of DeepSpeed configs: keys and values that are wrong in the file itself."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

_RENDERED = "worker launcher.engines.deepspeed_config:render_ds_config"
"""The plan's own ds_config.json cannot have it."""

DEEPSPEED_CONFIG = (
    Failure(
        id="ds-typo-toplevel",
        title="unknown top-level key in the DeepSpeed config",
        cause="DeepSpeed reads only the top-level keys that it knows; others, such as `zero_optimisation`, "
        "are ignored silently.",
        fix="correct the key (`effilaunch lint` suggests one)",
        source="deepspeed/runtime/config.py",
        places=("lint ds-typo-toplevel", _RENDERED),
    ),
    Failure(
        id="ds-typo-nested",
        title="unknown key in a DeepSpeed section",
        cause="The validated sections (zero_optimization, offload_*, fp16, bf16) refuse an unknown key at "
        "start-up; activation_checkpointing, aio, optimizer.params and scheduler ignore it silently.",
        fix="correct or remove the key (`effilaunch lint` suggests one)",
        source="deepspeed/runtime/config_utils.py DeepSpeedConfigModel",
        places=("lint ds-typo-nested", _RENDERED),
        patterns=(
            r"(?s)validation errors? for (?:DeepSpeed\w+|TP\w*Config|ZenFlowConfig|\w*Monitor\w*)\b"
            r".{0,4000}?(?:Extra inputs are|extra fields) not permitted",
        ),
    ),
    Failure(
        id="ds-removed-key",
        title="removed DeepSpeed feature",
        cause="DeepSpeed refuses the keys of removed features, even with enabled: false.",
        fix="delete the section (`effilaunch lint --fix` does)",
        source="deepspeed/runtime/config.py _REMOVED_TOP_LEVEL_CONFIG_KEYS; deepspeedai/DeepSpeed#8489",
        versions="deepspeed>=0.19",
        places=("lint ds-removed-key", _RENDERED),
        patterns=(
            r"(?:Nebula checkpointing|DeepSpeed compression library|Apex AMP integration|'quantize_training'"
            r"|torch\.nn\.Embedding gradients|Mixture-of-Quantization \(MoQ\)|DeepSpeed Sparse Attention"
            r"|Elastic training|Graph harvesting|Legacy top-level 'curriculum_learning'"
            r"|Progressive Layer Dropping|MiCS ZeRO-3 sharding|LoCo-Zero\+\+) has been removed",
        ),
    ),
    Failure(
        id="ds-bfloat16-alias",
        title="`bfloat16` instead of `bf16` in the DeepSpeed config",
        cause="accelerate adds `bf16: {enabled: false}`, which overrides the old spelling: the run is "
        'silently in fp32. With "auto" it stops.',
        fix="rename the section to `bf16`",
        source="accelerate/utils/dataclasses.py set_mixed_precision; deepspeed/runtime/precision_config.py",
        places=("lint ds-bfloat16-alias", _RENDERED),
        patterns=(r"`bfloat16\.enabled` not found in kwargs",),
    ),
    Failure(
        id="ds-clip-default",
        title="max_grad_norm does not reach DeepSpeed",
        cause="Without gradient_clipping, DeepSpeed uses its own default, which changed from 0 to 1.0. Only "
        '"auto" copies the Trainer\'s max_grad_norm.',
        fix="set gradient_clipping (0.0 for none); the plan always does",
        source="deepspeed/runtime/constants.py; deepspeedai/DeepSpeed#8068",
        places=(_RENDERED, "lint ds-clip-default"),
    ),
    Failure(
        id="ds-batch-mismatch",
        title="inconsistent batch sizes",
        cause="train_batch_size is not micro-batch x accumulation x ranks.",
        fix="remove train_batch_size; `global_batch_size` in the recipe determines the rest",
        source="deepspeed/runtime/config.py",
        places=("lint ds-batch-mismatch", "refusal profile-conflict", _RENDERED),
        patterns=(r"Check batch related parameters\. train_batch_size is not equal",),
    ),
    Failure(
        id="ds-warmup-zero",
        title="DeepSpeed scheduler with warmup_num_steps 0",
        cause="DeepSpeed's schedulers refuse 0; accelerate writes 1, which then differs from the Trainer's "
        "value.",
        fix="remove the scheduler section: the Trainer creates the schedule (`trainer.lr_scheduler_type`)",
        source="deepspeed/runtime/lr_schedules.py; accelerate/accelerator.py _prepare_deepspeed",
        versions="deepspeed>=0.19.6",
        places=("lint ds-warmup-zero", "refusal profile-scheduler", _RENDERED),
        patterns=(
            r"warmup_num_steps must be a positive integer",
            r"(?s)DeepSpeed config values that mismatch TrainingArguments.{0,2000}?warmup_num_steps=0 vs hf",
        ),
    ),
    Failure(
        id="ds-hf-mismatch",
        title="DeepSpeed config and TrainingArguments disagree",
        cause="A value is set in both the DeepSpeed config and TrainingArguments, and they differ.",
        fix='write "auto" in the DeepSpeed config and set the value in the recipe',
        source="transformers/integrations/deepspeed.py trainer_config_finalize",
        places=("refusal profile-conflict", "lint ds-hf-mismatch", _RENDERED),
        patterns=(
            r"(?s)Please correct the following DeepSpeed config values that mismatch TrainingArguments"
            r"(?!.{0,2000}?warmup_num_steps=0 vs hf)",
        ),
    ),
    Failure(
        id="ds-auto-unresolved",
        title='"auto" is not replaced',
        cause='Only the Trainer replaces "auto", and only in keys that it knows. Elsewhere it raises an '
        "error or falls back to DeepSpeed's default. Batch sizes in quotes fail in the same way.",
        fix="write a value, or remove the key",
        source="deepspeed/runtime/config_utils.py; accelerate/utils/dataclasses.py fill_match",
        places=("lint ds-auto-unresolved", _RENDERED),
        patterns=(
            r"`(?!bfloat16\.)[\w.]+` not found in kwargs\. Please specify",
            r"(?s)TypeError: [^\n]*'str'[^\n]*\n.{0,800}?deepspeed/runtime/config\.py, line \d+, "
            r"in _(?:set_batch_related_parameters|batch_assertion|configure_train_batch_size)\b",
        ),
    ),
    Failure(
        id="ds-hidden-size",
        title='"auto" bucket sizes need hidden_size',
        cause='"auto" bucket sizes are computed from the model\'s hidden_size, which is missing at the top '
        "level of its configuration.",
        fix="write integers: reduce_bucket_size h x h, stage3_prefetch_bucket_size 0.9 x h x h, "
        "stage3_param_persistence_threshold 10 x h; the plan does",
        source="transformers/integrations/deepspeed.py; accelerate/accelerator.py _prepare_deepspeed",
        places=(_RENDERED,),
        patterns=(
            r"has neither `hidden_size` nor `hidden_sizes` entry",
            r"Can find neither `model\.config\.hidden_size` nor `model\.config\.hidden_sizes`",
        ),
    ),
    Failure(
        id="ds-float-bucket",
        title="non-integer size in the DeepSpeed config",
        cause='Bucket sizes are integers; 0.9 x h x h and the string "5e8" are not.',
        fix="write an integer (5e8 without quotes is accepted)",
        source="deepspeed/runtime/zero/config.py",
        places=("lint ds-float-bucket", _RENDERED),
        patterns=(
            r"(?s)validation errors? for DeepSpeed\w+.{0,4000}?"
            r"(?:got a number with a fractional part|unable to parse string as an integer|"
            r"value is not a valid integer)",
        ),
    ),
    Failure(
        id="ds-json-comments",
        title="comments in the DeepSpeed config",
        cause="DeepSpeed reads comments and trailing commas; accelerate and transformers read strict JSON "
        "and fail.",
        fix="remove comments and trailing commas (`effilaunch lint --fix` does)",
        source="accelerate/utils/deepspeed.py HfDeepSpeedConfig",
        places=("lint ds-json-comments", "refusal profile-unreadable", _RENDERED),
        patterns=(
            r"(?s)JSONDecodeError: (?:Expecting property name enclosed in double quotes|"
            r"Illegal trailing comma)[^\n]*\n.{0,4000}?"
            r"(?:accelerate/utils/deepspeed|deepspeed/runtime/config)\.py, line \d+, in __init__",
        ),
    ),
    Failure(
        id="ds-duplicate-keys",
        title="duplicate key in the DeepSpeed config",
        cause="DeepSpeed refuses a JSON object with duplicate keys.",
        fix="keep one of them",
        source="deepspeed/runtime/config_utils.py dict_raise_error_on_duplicate_keys",
        places=("lint ds-duplicate-keys", _RENDERED),
        patterns=(r"Duplicate keys in DeepSpeed config",),
    ),
    Failure(
        id="ds-no-zero-block",
        title="DeepSpeed config without zero_optimization",
        cause="accelerate requires the section even without ZeRO.",
        fix='add `"zero_optimization": {"stage": 0}`',
        source="accelerate/utils/dataclasses.py DeepSpeedPlugin",
        places=("lint ds-no-zero-block", _RENDERED),
        patterns=(r"Please specify the ZeRO optimization config in the DeepSpeed config",),
    ),
    Failure(
        id="ds-scheduler-overrides",
        title="the DeepSpeed config overrides the learning-rate schedule",
        cause="A scheduler section silently overrides lr_scheduler_type.",
        fix="remove the section and set `trainer.lr_scheduler_type` and `trainer.warmup_steps`",
        source="transformers/integrations/deepspeed.py deepspeed_optim_sched",
        places=("lint ds-scheduler-overrides", "refusal profile-scheduler", _RENDERED),
    ),
    Failure(
        id="ds-total-steps",
        title="DeepSpeed scheduler without total_num_steps",
        cause="WarmupDecayLR and WarmupCosineLR require total_num_steps.",
        fix="remove the scheduler section: the Trainer creates the schedule",
        source="deepspeed/runtime/lr_schedules.py",
        places=("lint ds-total-steps", "refusal profile-scheduler", _RENDERED),
        patterns=(r"missing 1 required positional argument: 'total_num_steps'",),
    ),
    Failure(
        id="ds-max-grad-norm-param",
        title="max_grad_norm in optimizer.params",
        cause="DeepSpeed's optimizers do not accept it; gradient_clipping is the key.",
        fix="remove it and set `trainer.max_grad_norm`",
        source="deepspeed/runtime/engine.py",
        places=("lint ds-max-grad-norm-param", _RENDERED),
        patterns=(r"'max_grad_norm' is not supported as an optimizer parameter",),
    ),
    Failure(
        id="ds-comm-dtype",
        title="unknown communication_data_type",
        cause="communication_data_type accepts only the spellings fp16, bf16 and fp32.",
        fix="use one of them, or remove the key",
        source="deepspeed/runtime/config.py",
        places=("lint ds-comm-dtype", _RENDERED),
        patterns=(r"Invalid communication_data_type",),
    ),
)


DEEPSPEED_ENGINE = (
    Failure(
        id="ds-optimizer-block",
        title="optimizer section that needs a compiler",
        cause="With `optimizer` in its config, DeepSpeed builds FusedAdam at start-up, which needs nvcc. "
        "Without it, torch's fused AdamW is used.",
        fix="remove the optimizer section and set `trainer.optim`",
        source="deepspeed/runtime/engine.py _configure_basic_optimizer",
        places=("worker launcher.engines.deepspeed_config:render_ds_config", "lint ds-optimizer-block"),
    ),
    Failure(
        id="ds-offload-optimizer-swap",
        title="offload replaces the optimizer",
        cause="With optimizer offload, accelerate replaces the optimizer by DeepSpeedCPUAdam: Adafactor's "
        "settings crash it, and 8-bit AdamW becomes plain Adam.",
        fix="use `trainer.optim: adamw_torch` with offload, or `sharding.offload_optimizer: none`",
        source="accelerate/utils/deepspeed.py map_pytorch_optim_to_deepspeed",
        versions="accelerate>=0.25",
        places=("fix offload-needs-adamw", "lint ds-offload-optimizer-swap"),
        patterns=(r"adam_update\(\): incompatible function arguments",),
        changes={"trainer.optim": "adamw_torch"},
    ),
    Failure(
        id="ds-offload-client-optim",
        title="offload with an unsupported optimizer",
        cause="ZeRO-Offload refuses a client optimizer unless zero_force_ds_cpu_optimizer is false.",
        fix="use `trainer.optim: adamw_torch` with offload, or `sharding.offload_optimizer: none`",
        source="deepspeed/runtime/engine.py _configure_optimizer",
        places=("fix offload-needs-adamw",),
        patterns=(r"You are using ZeRO-Offload with a client provided optimizer",),
        changes={"trainer.optim": "adamw_torch"},
    ),
    Failure(
        id="ds-stage2-offload-param",
        title="offload_param below stage 3",
        cause="Only stage 3 offloads parameters; stages 0 to 2 ignore the section.",
        fix="set `sharding.zero_stage: 3`, or remove offload_param",
        source="deepspeed/runtime/zero/config.py",
        places=("fix offload-param-stage", "lint ds-stage2-offload-param"),
        changes={"sharding.offload_param": "none"},
    ),
    Failure(
        id="ds-bucket-memory",
        title="communication buckets fill the GPU",
        cause="Buckets default to 500 million elements, and overlap_comm keeps several of them: gigabytes "
        "beyond weights and optimizer states.",
        fix="set reduce_bucket_size and allgather_bucket_size to 2e8 or less; the plan sizes them by device",
        source="deepspeed/runtime/zero/config.py; transformers' DeepSpeed guide",
        places=("worker launcher.planner.job:base_job", "lint ds-bucket-memory"),
    ),
    Failure(
        id="ds-fsdp-both",
        title="FSDP and DeepSpeed are both enabled",
        cause="The Trainer supports one engine at a time.",
        fix="set only `sharding.engine`",
        source="transformers/trainer.py",
        places=("refusal owned-key",),
        patterns=(r"Using --fsdp xxx together with --deepspeed is not possible",),
    ),
    Failure(
        id="ds-accelerate-fields",
        title="DeepSpeed settings in accelerate's configuration",
        cause="accelerate's config file or ACCELERATE_DEEPSPEED_* variables set values that belong to the "
        "DeepSpeed config file.",
        fix="remove them from accelerate's configuration (~/.cache/huggingface/accelerate) and the "
        "environment",
        source="accelerate/utils/dataclasses.py _deepspeed_config_checks",
        places=("worker launcher.render.command:render_accelerate_config",),
        patterns=(r"When using `deepspeed_config_file`, the following accelerate config variables",),
    ),
    Failure(
        id="zero3-model-before-args",
        title="model loaded before TrainingArguments under ZeRO-3",
        cause="TrainingArguments registers the ZeRO-3 config that makes from_pretrained partition during "
        "loading. If it is created later, every rank silently holds the whole model.",
        fix="create TrainingArguments first and keep a reference to it",
        source="transformers/integrations/deepspeed.py HfTrainerDeepSpeedConfig",
        places=("fix zero3-args-before-model", "worker launcher.train.worker:train"),
    ),
    Failure(
        id="zero3-no-gather",
        title="ZeRO-3 checkpoint without model weights",
        cause="stage3_gather_16bit_weights_on_model_save is false by default: a full fine-tune saves "
        "DeepSpeed shards and no model.safetensors, and a script that saves an adapter itself writes empty "
        "tensors.",
        fix="set it to true, as the plan does; zero_to_fp32.py in the checkpoint recovers the weights",
        source="transformers/trainer.py save_model",
        places=("worker launcher.engines.deepspeed_config:_zero", "lint ds-zero3-no-gather"),
        patterns=(
            r"Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save`",
            r"copying a param with shape torch\.Size\(\[0\]\) from checkpoint",
        ),
        signs=(r"stage3_gather_16bit_weights_on_model_save=false",),
    ),
    Failure(
        id="zero3-fetch-order",
        title="ZeRO-3 parameter fetch order changed",
        cause="ZeRO-3 prefetches parameters in the order of an earlier step. A pass that used other modules "
        "or ended early leaves fetches in flight: mixture-of-experts, generation or evaluation between "
        "steps, a module that only some ranks call.",
        fix="call the same modules on all ranks in each step, update DeepSpeed, or set sharding.zero_stage: "
        "2",
        source="deepspeed/runtime/zero/partitioned_param_coordinator.py; deepspeedai/DeepSpeed#3068; "
        "OpenRLHF/OpenRLHF#312",
        patterns=(
            r"still have inflight params",
            r"^(?:AssertionError: )?\{'id': \d+, 'status': '(?:INFLIGHT|NOT_AVAILABLE|AVAILABLE)', 'numel'",
            r"disagreement between rank ?0 and rank ?\d+: rank",
        ),
        changes={"sharding.zero_stage": 2},
    ),
    Failure(
        id="zero3-auto-batch",
        title="auto_find_batch_size under ZeRO-3",
        cause="The Trainer refuses it at stage 3; at other stages it changes the global batch size.",
        fix="remove `trainer.auto_find_batch_size`: the plan chooses the micro-batch",
        source="transformers/trainer.py",
        places=("fix auto-find-batch-size",),
        patterns=(r"`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3",),
        changes={"trainer.auto_find_batch_size": None},
    ),
    Failure(
        id="ds-eval-only",
        title="evaluation only under ZeRO-1 or ZeRO-2",
        cause="DeepSpeed inference requires stage 3.",
        fix="evaluate without DeepSpeed: `sharding.engine: ddp`",
        source="transformers/integrations/deepspeed.py deepspeed_init",
        places=("worker launcher.train.worker:train",),
        patterns=(r"ZeRO inference only makes sense with ZeRO Stage 3",),
        changes={"sharding.engine": "ddp"},
    ),
    Failure(
        id="sharded-weight-empty",
        title="a sharded weight was used outside its module",
        cause="Under ZeRO-3 and FSDP a parameter is empty or flattened except while its module runs. Code "
        "that uses it elsewhere (a head, a tied embedding, a submodule called directly, load_state_dict) "
        "gets an empty tensor.",
        fix="gather it (deepspeed.zero.GatheredParameters, FSDP.summon_full_params), call only the wrapped "
        "model, or set sharding.zero_stage: 2",
        source="deepspeed/runtime/zero/partition_parameters.py",
        patterns=(
            r"'weight' must be 2-D",
            r"weight should have at least three dimensions",
            r"size mismatch, got input \(\d+\), mat \(\d+x\d+\), vec \(0\)",
            r"the shape in current model is torch\.Size\(\[0\]\)",
        ),
        changes={"sharding.zero_stage": 2},
    ),
    Failure(
        id="nvme-path-missing",
        title="NVMe offload without a path",
        cause="Offload to nvme needs nvme_path. DeepSpeed accepts the config without it and fails later.",
        fix="set `sharding.nvme_path` to a folder on a local disk, or offload to cpu",
        source="deepspeed/runtime/zero/partition_parameters.py",
        places=("refusal nvme-path-missing", "lint ds-nvme-path-missing", "doctor nvme"),
        patterns=(
            r'"nvme_path" in DeepSpeed Config cannot be None',
            r"(?s)not NoneType\n.*\bin _configure_tensor_swapping\b",
        ),
        changes={"sharding.offload_optimizer": "cpu", "sharding.offload_param": "none"},
    ),
)


DEEPSPEED_BUILD = (
    Failure(
        id="jit-no-nvcc",
        title="no CUDA toolkit to build an extension",
        cause="A CUDA extension (such as FusedAdam) is compiled at start-up, and nvcc is missing or "
        "CUDA_HOME does not point to it.",
        fix="remove the optimizer section of the DeepSpeed config, which requires it, or install the CUDA "
        "toolkit of torch's version and set CUDA_HOME",
        source="deepspeed/ops/op_builder/builder.py; torch/utils/cpp_extension.py",
        places=("doctor nvcc", "lint ds-optimizer-block"),
        patterns=(
            # DeepSpeed prints the first two as warnings too, for extensions that nobody asks for.
            r"(?m)^(?!.*compatibility check failed).*CUDA_HOME does not exist, unable to compile CUDA op",
            r"(?m)^(?!.*compatibility check failed).*Unable to run \S*nvcc\S*, unable to compile CUDA op",
            r"CUDA_HOME environment variable is not set\. Please set it to your CUDA install root",
            r"No such file or directory: '?\S*/bin/nvcc",
            r"\bnvcc: (?:command )?not found",
        ),
    ),
    Failure(
        id="jit-no-ninja",
        title="ninja is not on the PATH",
        cause="torch builds extensions with ninja. The ninja of a virtual environment is found only if its "
        "bin folder is on the PATH.",
        fix="pip install ninja, and start the run from the activated environment",
        source="deepspeed/ops/op_builder/builder.py jit_load; torch/utils/cpp_extension.py",
        places=("doctor ninja",),
        patterns=(r"op due to ninja not being installed", r"Ninja is required to load C\+\+ extensions"),
    ),
    Failure(
        id="jit-no-compiler",
        title="an extension failed to compile",
        cause="CPU offload compiles cpu_adam on first use, which needs a C++17 compiler; CUDA extensions "
        "also need nvcc.",
        fix="install g++ (the lines above the error show what is missing), or disable offload",
        source="deepspeed/ops/op_builder/builder.py; deepspeedai/DeepSpeed#889",
        places=("doctor compiler",),
        patterns=(
            r"Error building extension '(?:cpu_\w+|deepspeed_\w+|fused_\w+|utils|async_io|pin_memory"
            r"|(?:stochastic_)?transformer\w*|\w*quantizer|random_ltd|inference_\w+|ragged_\w+|evoformer\w*)'",
            # The build failed on another rank, or before.
            r"torch_extensions/\S+\.so: cannot open shared object file",
            r"error: #error -- unsupported GNU version",
            r"/ld: cannot find -l(?:curand|cuda|cudart|cublas)\b",
            r"CalledProcessError: Command '\['which', '(?:c|g)\+\+'\]' returned non-zero",
            # torch asks the compiler for its version before it compiles.
            r"(?s)^\S*(?:CalledProcessError|FileNotFoundError): .{0,4000}?torch/utils/cpp_extension\.py, "
            r"line \d+, in (?:check_compiler_ok_for_platform|get_compiler_abi_compatibility_and_version)\b",
        ),
        changes={"sharding.offload_optimizer": "none"},
    ),
    Failure(
        id="jit-cuda-mismatch",
        title="the CUDA toolkit does not match torch",
        cause="nvcc and torch's CUDA version differ and are not known to be compatible.",
        fix="install the toolkit of torch's CUDA version; within a major version, DS_SKIP_CUDA_CHECK=1 under "
        "`launch.env` skips the check",
        source="deepspeed/ops/op_builder/builder.py assert_no_cuda_mismatch; deepspeedai/DeepSpeed#3223",
        places=("doctor nvcc",),
        patterns=(
            r"Installed CUDA version \S+ does not match the version torch was compiled with [\d.]+,",
            r"The detected CUDA version \(\S+\) mismatches the version that was used to compile",
        ),
    ),
    Failure(
        id="jit-stale-lock",
        title="build lock of a killed run",
        cause="torch silently waits for the lock file in its extension folder, even if the building process "
        "is dead: the run hangs when the optimizer is created.",
        fix="nothing to do: a run removes such locks at start-up, and `effilaunch doctor` lists them",
        source="torch/utils/file_baton.py; huggingface/transformers#26015; deepspeedai/DeepSpeed#4285",
        places=("worker launcher.execute.leftovers:remove_stale_locks", "doctor build-locks"),
        # Where somebody interrupted the wait.
        patterns=(r"(?s)\n  File \S*torch/utils/file_baton\.py, line \d+, in wait\b",),
    ),
    Failure(
        id="prebuilt-op-mismatch",
        title="DeepSpeed was built for another torch",
        cause="Its extensions were compiled at installation, and torch or CUDA has changed since.",
        fix="reinstall DeepSpeed: pip install --force-reinstall --no-cache-dir deepspeed",
        source="deepspeed/ops/op_builder/builder.py validate_torch_version",
        places=("doctor deepspeed-ops",),
        patterns=(r"DeepSpeed ops were compiled and installed with a different version",),
    ),
    Failure(
        id="aio-missing",
        title="NVMe offload without libaio",
        cause="DeepSpeed's async_io extension needs the libaio headers.",
        fix="install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or offload to cpu",
        source="deepspeed/ops/op_builder/async_io.py",
        places=("worker launcher.doctor.start_checks:check_nvme", "doctor libaio"),
        patterns=(r"Unable to JIT load the async_io op due to it not being compatible",),
        changes={"sharding.offload_optimizer": "cpu", "sharding.offload_param": "none"},
    ),
)
