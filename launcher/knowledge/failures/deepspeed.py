"""Known failures of DeepSpeed configs: keys and values that are wrong in the file itself."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

_RENDERED = Place("worker", "launcher.render.ds_config:render_ds_config")
"""The plan's own ds_config.json cannot have it."""

DEEPSPEED_CONFIG = (
    Failure(
        id="ds-typo-toplevel",
        title="a top-level key that DeepSpeed does not know",
        cause="DeepSpeed looks up the top-level keys that it knows and never reads the others: "
        "`zero_optimisation` or `gradient_cliping` do nothing, silently.",
        fix="correct the key (`effilaunch lint` suggests one)",
        source="deepspeed/runtime/config.py",
        places=(Place("lint", "ds-typo-toplevel"), _RENDERED),
    ),
    Failure(
        id="ds-typo-nested",
        title="an unknown key inside a DeepSpeed block",
        cause="The blocks that DeepSpeed checks (zero_optimization, offload_*, fp16, bf16) refuse it at "
        "start-up; in activation_checkpointing, aio, optimizer.params and scheduler it does nothing, "
        "silently.",
        fix="correct or remove the key (`effilaunch lint` suggests one)",
        source="deepspeed/runtime/config_utils.py DeepSpeedConfigModel",
        places=(Place("lint", "ds-typo-nested"), _RENDERED, Place("diagnose")),
        patterns=(
            r"(?s)validation errors? for (?:DeepSpeed\w+|TP\w*Config|ZenFlowConfig|\w*Monitor\w*)\b"
            r".{0,4000}?(?:Extra inputs are|extra fields) not permitted",
        ),
    ),
    Failure(
        id="ds-removed-key",
        title="a DeepSpeed feature that was removed",
        cause="DeepSpeed refuses the keys of removed features, even with enabled: false.",
        fix="delete the block (`effilaunch lint --fix` does)",
        source="deepspeed/runtime/config.py _REMOVED_TOP_LEVEL_CONFIG_KEYS; deepspeedai/DeepSpeed#8489",
        versions="deepspeed>=0.19",
        places=(Place("lint", "ds-removed-key"), _RENDERED, Place("diagnose")),
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
        cause="accelerate adds its own `bf16: {enabled: false}`, which wins over the old spelling: the run "
        'is in fp32 without a word. With "auto" it stops.',
        fix="rename the block to `bf16`",
        source="accelerate/utils/dataclasses.py set_mixed_precision; deepspeed/runtime/precision_config.py",
        places=(Place("lint", "ds-bfloat16-alias"), _RENDERED, Place("diagnose")),
        patterns=(r"`bfloat16\.enabled` not found in kwargs",),
    ),
    Failure(
        id="ds-clip-default",
        title="max_grad_norm does not reach DeepSpeed",
        cause="Without gradient_clipping in its config DeepSpeed clips by its own default, which changed "
        "from 0 to 1.0; only `auto` copies the Trainer's max_grad_norm.",
        fix="write gradient_clipping, 0.0 for none; the plan always does",
        source="deepspeed/runtime/constants.py; deepspeedai/DeepSpeed#8068",
        places=(_RENDERED, Place("lint", "ds-clip-default")),
    ),
    Failure(
        id="ds-batch-mismatch",
        title="batch sizes that do not multiply",
        cause="train_batch_size is not micro-batch x accumulation x ranks.",
        fix="leave train_batch_size out; `global_batch_size` decides the others",
        source="deepspeed/runtime/config.py",
        places=(
            Place("lint", "ds-batch-mismatch"),
            Place("refusal", "profile-conflict"),
            _RENDERED,
            Place("diagnose"),
        ),
        patterns=(r"Check batch related parameters\. train_batch_size is not equal",),
    ),
    Failure(
        id="ds-warmup-zero",
        title="a DeepSpeed scheduler without warm-up",
        cause="DeepSpeed's schedulers refuse warmup_num_steps 0; accelerate writes 1, which then differs "
        "from what the Trainer says.",
        fix="remove the scheduler block: the Trainer makes the schedule (`trainer.lr_scheduler_type`)",
        source="deepspeed/runtime/lr_schedules.py; accelerate/accelerator.py _prepare_deepspeed",
        versions="deepspeed>=0.19.6",
        places=(
            Place("lint", "ds-warmup-zero"),
            Place("refusal", "profile-scheduler"),
            _RENDERED,
            Place("diagnose"),
        ),
        patterns=(
            r"warmup_num_steps must be a positive integer",
            r"(?s)DeepSpeed config values that mismatch TrainingArguments.{0,2000}?warmup_num_steps=0 vs hf",
        ),
    ),
    Failure(
        id="ds-hf-mismatch",
        title="the DeepSpeed config and the Trainer disagree",
        cause="A value stands in both the DeepSpeed config and TrainingArguments, and they differ.",
        fix='write "auto" in the DeepSpeed config and the value in the recipe',
        source="transformers/integrations/deepspeed.py trainer_config_finalize",
        places=(
            Place("refusal", "profile-conflict"),
            Place("lint", "ds-hf-mismatch"),
            _RENDERED,
            Place("diagnose"),
        ),
        patterns=(
            r"(?s)Please correct the following DeepSpeed config values that mismatch TrainingArguments"
            r"(?!.{0,2000}?warmup_num_steps=0 vs hf)",
        ),
    ),
    Failure(
        id="ds-auto-unresolved",
        title='"auto" that nobody fills in',
        cause='Only the Trainer replaces "auto", and only in keys that it knows; elsewhere it stops the run '
        "or is dropped for DeepSpeed's default. Batch sizes in quotes stop it in the same way.",
        fix="write the value, or remove the key",
        source="deepspeed/runtime/config_utils.py; accelerate/utils/dataclasses.py fill_match",
        places=(Place("lint", "ds-auto-unresolved"), _RENDERED, Place("diagnose")),
        patterns=(
            r"`(?!bfloat16\.)[\w.]+` not found in kwargs\. Please specify",
            r"(?s)TypeError: [^\n]*'str'[^\n]*\n.{0,800}?deepspeed/runtime/config\.py, line \d+, "
            r"in _(?:set_batch_related_parameters|batch_assertion|configure_train_batch_size)\b",
        ),
    ),
    Failure(
        id="ds-hidden-size",
        title='"auto" sizes of a model without hidden_size',
        cause='The bucket sizes that are "auto" are computed from the model\'s hidden_size, which this '
        "configuration does not have at its top.",
        fix="write integers: reduce_bucket_size h x h, stage3_prefetch_bucket_size 0.9 x h x h, "
        "stage3_param_persistence_threshold 10 x h; the plan does",
        source="transformers/integrations/deepspeed.py; accelerate/accelerator.py _prepare_deepspeed",
        places=(_RENDERED, Place("diagnose")),
        patterns=(
            r"has neither `hidden_size` nor `hidden_sizes` entry",
            r"Can find neither `model\.config\.hidden_size` nor `model\.config\.hidden_sizes`",
        ),
    ),
    Failure(
        id="ds-float-bucket",
        title="a DeepSpeed size that is no whole number",
        cause='Bucket sizes are integers: 0.9 x h x h is not one, and neither is the text "5e8".',
        fix="write a whole number (5e8 without quotes is one)",
        source="deepspeed/runtime/zero/config.py",
        places=(Place("lint", "ds-float-bucket"), _RENDERED, Place("diagnose")),
        patterns=(
            r"(?s)validation errors? for DeepSpeed\w+.{0,4000}?"
            r"(?:got a number with a fractional part|unable to parse string as an integer|"
            r"value is not a valid integer)",
        ),
    ),
    Failure(
        id="ds-json-comments",
        title="comments in a DeepSpeed config",
        cause="DeepSpeed itself reads comments and trailing commas, accelerate and transformers read strict "
        "JSON and stop.",
        fix="remove comments and trailing commas (`effilaunch lint --fix` does)",
        source="accelerate/utils/deepspeed.py HfDeepSpeedConfig",
        places=(
            Place("lint", "ds-json-comments"),
            Place("refusal", "profile-unreadable"),
            _RENDERED,
            Place("diagnose"),
        ),
        patterns=(
            r"(?s)JSONDecodeError: (?:Expecting property name enclosed in double quotes|"
            r"Illegal trailing comma)[^\n]*\n.{0,4000}?"
            r"(?:accelerate/utils/deepspeed|deepspeed/runtime/config)\.py, line \d+, in __init__",
        ),
    ),
    Failure(
        id="ds-duplicate-keys",
        title="a key twice in the DeepSpeed config",
        cause="DeepSpeed refuses a JSON object that names a key twice.",
        fix="keep one of the two",
        source="deepspeed/runtime/config_utils.py dict_raise_error_on_duplicate_keys",
        places=(Place("lint", "ds-duplicate-keys"), _RENDERED, Place("diagnose")),
        patterns=(r"Duplicate keys in DeepSpeed config",),
    ),
    Failure(
        id="ds-no-zero-block",
        title="a DeepSpeed config without zero_optimization",
        cause="accelerate wants the block, also where ZeRO is not used.",
        fix='add `"zero_optimization": {"stage": 0}`',
        source="accelerate/utils/dataclasses.py DeepSpeedPlugin",
        places=(Place("lint", "ds-no-zero-block"), _RENDERED, Place("diagnose")),
        patterns=(r"Please specify the ZeRO optimization config in the DeepSpeed config",),
    ),
    Failure(
        id="ds-scheduler-overrides",
        title="the DeepSpeed config replaces the learning-rate schedule",
        cause="A scheduler block wins over lr_scheduler_type, without a word.",
        fix="remove the block and set `trainer.lr_scheduler_type` and `trainer.warmup_steps`",
        source="transformers/integrations/deepspeed.py deepspeed_optim_sched",
        places=(
            Place("lint", "ds-scheduler-overrides"),
            Place("refusal", "profile-scheduler"),
            _RENDERED,
        ),
    ),
    Failure(
        id="ds-total-steps",
        title="a DeepSpeed scheduler without its number of steps",
        cause="WarmupDecayLR and WarmupCosineLR need total_num_steps, which the scheduler block leaves out.",
        fix="remove the scheduler block: the Trainer makes the schedule",
        source="deepspeed/runtime/lr_schedules.py",
        places=(
            Place("lint", "ds-total-steps"),
            Place("refusal", "profile-scheduler"),
            _RENDERED,
            Place("diagnose"),
        ),
        patterns=(r"missing 1 required positional argument: 'total_num_steps'",),
    ),
    Failure(
        id="ds-max-grad-norm-param",
        title="max_grad_norm under optimizer.params",
        cause="DeepSpeed's optimizers do not take it; gradient_clipping does that.",
        fix="remove it there and set `trainer.max_grad_norm`",
        source="deepspeed/runtime/engine.py",
        places=(Place("lint", "ds-max-grad-norm-param"), _RENDERED, Place("diagnose")),
        patterns=(r"'max_grad_norm' is not supported as an optimizer parameter",),
    ),
    Failure(
        id="ds-comm-dtype",
        title="a communication dtype that DeepSpeed does not know",
        cause="communication_data_type knows fp16, bf16 and fp32, in these spellings only.",
        fix="write one of them, or remove the key",
        source="deepspeed/runtime/config.py",
        places=(Place("lint", "ds-comm-dtype"), _RENDERED, Place("diagnose")),
        patterns=(r"Invalid communication_data_type",),
    ),
)


DEEPSPEED_ENGINE = (
    Failure(
        id="ds-optimizer-block",
        title="an optimizer block that needs a compiler",
        cause="With `optimizer` in its config DeepSpeed takes its own FusedAdam, which is compiled at the "
        "start of the run and needs nvcc; without it torch's fused AdamW is used.",
        fix="remove the optimizer block and set `trainer.optim`",
        source="deepspeed/runtime/engine.py _configure_basic_optimizer",
        places=(
            Place("worker", "launcher.render.ds_config:render_ds_config"),
            Place("lint", "ds-optimizer-block"),
        ),
    ),
    Failure(
        id="ds-offload-optimizer-swap",
        title="offload replaces the optimizer",
        cause="accelerate swaps the optimizer for DeepSpeedCPUAdam when its states are offloaded: "
        "Adafactor's settings crash it, 8-bit AdamW becomes plain Adam.",
        fix="use `trainer.optim: adamw_torch` with offload, or `sharding.offload_optimizer: none`",
        source="accelerate/utils/deepspeed.py map_pytorch_optim_to_deepspeed",
        versions="accelerate>=0.25",
        places=(
            Place("fix", "offload-needs-adamw"),
            Place("lint", "ds-offload-optimizer-swap"),
            Place("diagnose"),
        ),
        patterns=(r"adam_update\(\): incompatible function arguments",),
        changes={"trainer.optim": "adamw_torch"},
    ),
    Failure(
        id="ds-offload-client-optim",
        title="offload with an optimizer that DeepSpeed does not know",
        cause="ZeRO-Offload refuses an optimizer of yours unless zero_force_ds_cpu_optimizer is false.",
        fix="use `trainer.optim: adamw_torch` with offload, or `sharding.offload_optimizer: none`",
        source="deepspeed/runtime/engine.py _configure_optimizer",
        places=(Place("fix", "offload-needs-adamw"), Place("diagnose")),
        patterns=(r"You are using ZeRO-Offload with a client provided optimizer",),
        changes={"trainer.optim": "adamw_torch"},
    ),
    Failure(
        id="ds-stage2-offload-param",
        title="offload_param below stage 3",
        cause="Parameters are offloaded at stage 3 only; at stages 0 to 2 the block is accepted and does "
        "nothing.",
        fix="set `sharding.zero_stage: 3`, or drop offload_param",
        source="deepspeed/runtime/zero/config.py",
        places=(Place("fix", "offload-param-stage"), Place("lint", "ds-stage2-offload-param")),
        changes={"sharding.offload_param": "none"},
    ),
    Failure(
        id="ds-bucket-memory",
        title="communication buckets that fill the GPU",
        cause="Buckets default to 500 million values, and overlap_comm keeps several of them: gigabytes that "
        "no estimate of weights and states shows.",
        fix="set reduce_bucket_size and allgather_bucket_size to 2e8 or less; the plan sizes them by device",
        source="deepspeed/runtime/zero/config.py; transformers' DeepSpeed guide",
        places=(Place("worker", "launcher.plan.job:base_job"), Place("lint", "ds-bucket-memory")),
    ),
    Failure(
        id="ds-fsdp-both",
        title="FSDP and DeepSpeed at once",
        cause="Both engines were asked for; the Trainer takes one.",
        fix="say `sharding.engine` and nothing else",
        source="transformers/trainer.py",
        places=(Place("refusal", "owned-key"), Place("diagnose")),
        patterns=(r"Using --fsdp xxx together with --deepspeed is not possible",),
    ),
    Failure(
        id="ds-accelerate-fields",
        title="DeepSpeed settings in accelerate's configuration too",
        cause="accelerate's file, or ACCELERATE_DEEPSPEED_* variables, name settings that the DeepSpeed "
        "config file decides.",
        fix="remove them from accelerate's configuration (~/.cache/huggingface/accelerate) and environment",
        source="accelerate/utils/dataclasses.py _deepspeed_config_checks",
        places=(
            Place("worker", "launcher.render.command:render_accelerate_config"),
            Place("diagnose"),
        ),
        patterns=(r"When using `deepspeed_config_file`, the following accelerate config variables",),
    ),
    Failure(
        id="zero3-model-before-args",
        title="the model was loaded before TrainingArguments",
        cause="TrainingArguments registers the ZeRO-3 config that makes from_pretrained partition while it "
        "loads; built later, every rank holds the whole model, silently.",
        fix="make TrainingArguments first and keep them alive",
        source="transformers/integrations/deepspeed.py HfTrainerDeepSpeedConfig",
        places=(Place("fix", "zero3-args-before-model"), Place("worker", "launcher.train.worker:train")),
    ),
    Failure(
        id="zero3-no-gather",
        title="no weights in a ZeRO-3 checkpoint",
        cause="stage3_gather_16bit_weights_on_model_save is false by default, so a full fine-tune saves "
        "DeepSpeed's shards and no model.safetensors, and a script that saves an adapter by itself writes "
        "empty tensors.",
        fix="set it to true, as the plan does; zero_to_fp32.py in the checkpoint recovers the weights",
        source="transformers/trainer.py save_model",
        places=(
            Place("worker", "launcher.render.ds_config:_zero"),
            Place("lint", "ds-zero3-no-gather"),
            Place("diagnose"),
        ),
        patterns=(
            r"Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save`",
            r"copying a param with shape torch\.Size\(\[0\]\) from checkpoint",
        ),
        signs=(r"stage3_gather_16bit_weights_on_model_save=false",),
    ),
    Failure(
        id="zero3-fetch-order",
        title="ZeRO-3 lost track of a sharded weight",
        cause="ZeRO-3 fetches weights in the order of an earlier step. A pass that took other modules, or "
        "ended early, leaves some in flight: experts of a mixture, generation or evaluation between steps, "
        "a module that only some ranks call.",
        fix="let all ranks call the same modules in each step, update DeepSpeed, or train with "
        "sharding.zero_stage: 2",
        source="deepspeed/runtime/zero/partitioned_param_coordinator.py; deepspeedai/DeepSpeed#3068; "
        "OpenRLHF/OpenRLHF#312",
        places=(Place("diagnose"),),
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
        cause="The Trainer refuses it at stage 3; elsewhere it changes the global batch.",
        fix="drop `trainer.auto_find_batch_size`: the plan finds the micro-batch",
        source="transformers/trainer.py",
        places=(Place("fix", "auto-find-batch-size"), Place("diagnose")),
        patterns=(r"`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3",),
        changes={"trainer.auto_find_batch_size": None},
    ),
    Failure(
        id="ds-eval-only",
        title="evaluation alone under ZeRO 1 or 2",
        cause="Without training, DeepSpeed has something to do at stage 3 only.",
        fix="evaluate without DeepSpeed: `sharding.engine: ddp`",
        source="transformers/integrations/deepspeed.py deepspeed_init",
        places=(Place("worker", "launcher.train.worker:train"), Place("diagnose")),
        patterns=(r"ZeRO inference only makes sense with ZeRO Stage 3",),
        changes={"sharding.engine": "ddp"},
    ),
    Failure(
        id="sharded-weight-empty",
        title="a sharded weight was used as if it were whole",
        cause="Under ZeRO-3 and FSDP a parameter is empty or flat but while its own module runs. Code "
        "that uses the weight elsewhere (a head, a tied embedding, a part called by itself, a load into "
        "the model) meets nothing.",
        fix="gather it (deepspeed.zero.GatheredParameters, FSDP.summon_full_params), call the wrapped "
        "model alone, or use sharding.zero_stage: 2",
        source="deepspeed/runtime/zero/partition_parameters.py",
        places=(Place("diagnose"),),
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
        cause="offload to nvme needs nvme_path; DeepSpeed accepts the config without it and stops later.",
        fix="name `sharding.nvme_path`, a folder on a local disk, or offload to cpu",
        source="deepspeed/runtime/zero/partition_parameters.py",
        places=(
            Place("refusal", "nvme-path-missing"),
            Place("lint", "ds-nvme-path-missing"),
            Place("doctor", "nvme"),
            Place("diagnose"),
        ),
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
        title="no CUDA toolkit to compile an extension with",
        cause="A CUDA extension (FusedAdam and others) is compiled at the start of the run, and nvcc is not "
        "there or CUDA_HOME does not point at it.",
        fix="remove the optimizer block of the DeepSpeed config, which asks for it, or install the CUDA "
        "toolkit of torch's version and set CUDA_HOME",
        source="deepspeed/ops/op_builder/builder.py; torch/utils/cpp_extension.py",
        places=(Place("doctor", "nvcc"), Place("lint", "ds-optimizer-block"), Place("diagnose")),
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
        cause="torch builds extensions with ninja; the one of a virtual environment is found only where its "
        "bin folder is on the PATH.",
        fix="pip install ninja, and start the run from the activated environment",
        source="deepspeed/ops/op_builder/builder.py jit_load; torch/utils/cpp_extension.py",
        places=(Place("doctor", "ninja"), Place("diagnose")),
        patterns=(r"op due to ninja not being installed", r"Ninja is required to load C\+\+ extensions"),
    ),
    Failure(
        id="jit-no-compiler",
        title="an extension did not compile",
        cause="CPU offload compiles cpu_adam when it is first used, which needs a C++ compiler with C++17; "
        "CUDA extensions need nvcc too.",
        fix="install g++ (the lines above the error name what is missing), or drop the offload",
        source="deepspeed/ops/op_builder/builder.py; deepspeedai/DeepSpeed#889",
        places=(Place("doctor", "compiler"), Place("diagnose")),
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
        title="a CUDA toolkit of another version than torch's",
        cause="The nvcc that is found is of another version than the one torch was compiled with, and the "
        "two are not known to work together.",
        fix="install the toolkit of torch's CUDA version; with the same major version DS_SKIP_CUDA_CHECK=1 "
        "under `launch.env` accepts it",
        source="deepspeed/ops/op_builder/builder.py assert_no_cuda_mismatch; deepspeedai/DeepSpeed#3223",
        places=(Place("doctor", "nvcc"), Place("diagnose")),
        patterns=(
            r"Installed CUDA version \S+ does not match the version torch was compiled with [\d.]+,",
            r"The detected CUDA version \(\S+\) mismatches the version that was used to compile",
        ),
    ),
    Failure(
        id="jit-stale-lock",
        title="a build lock that a killed run left",
        cause="torch waits for the lock file in its extension folder without a message, also when the build "
        "that made it is dead: the run hangs where the optimizer is made.",
        fix="nothing: a run removes such locks before it starts, and `effilaunch doctor` shows them",
        source="torch/utils/file_baton.py; huggingface/transformers#26015; deepspeedai/DeepSpeed#4285",
        places=(
            Place("worker", "launcher.execute.leftovers:remove_stale_locks"),
            Place("doctor", "build-locks"),
            Place("diagnose"),
        ),
        # Where somebody interrupted the wait.
        patterns=(r"(?s)\n  File \S*torch/utils/file_baton\.py, line \d+, in wait\b",),
    ),
    Failure(
        id="prebuilt-op-mismatch",
        title="DeepSpeed was built for another torch",
        cause="Its extensions were compiled at installation, and torch or CUDA were changed since.",
        fix="reinstall DeepSpeed: pip install --force-reinstall --no-cache-dir deepspeed",
        source="deepspeed/ops/op_builder/builder.py validate_torch_version",
        places=(Place("doctor", "deepspeed-ops"), Place("diagnose")),
        patterns=(r"DeepSpeed ops were compiled and installed with a different version",),
    ),
    Failure(
        id="aio-missing",
        title="NVMe offload without libaio",
        cause="DeepSpeed's async_io extension needs the headers of libaio.",
        fix="install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or offload to cpu",
        source="deepspeed/ops/op_builder/async_io.py",
        places=(
            Place("worker", "launcher.commands.swapping:check_nvme"),
            Place("doctor", "libaio"),
            Place("diagnose"),
        ),
        patterns=(r"Unable to JIT load the async_io op due to it not being compatible",),
        changes={"sharding.offload_optimizer": "cpu", "sharding.offload_param": "none"},
    ),
)
