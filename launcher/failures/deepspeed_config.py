"""Known failures of DeepSpeed configs: keys and values that are wrong in the file itself."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

_RENDERED = Place("worker", "launcher.render.ds_config:render_ds_config")
"""The plan's own ds_config.json cannot have it."""

DEEPSPEED_CONFIG = (
    Failure(
        id="ds-typo-toplevel",
        title="a top-level key that DeepSpeed does not know",
        cause="DeepSpeed looks up the top-level keys that it knows and never reads the others: "
        "`zero_optimisation` or `gradient_cliping` do nothing, silently.",
        mend="correct the key (`effilaunch lint` suggests one)",
        source="deepspeed/runtime/config.py",
        places=(Place("lint", "ds-typo-toplevel"), _RENDERED),
    ),
    Failure(
        id="ds-typo-nested",
        title="an unknown key inside a DeepSpeed block",
        cause="The blocks that DeepSpeed checks (zero_optimization, offload_*, fp16, bf16) refuse it at "
        "start-up; in activation_checkpointing, aio, optimizer.params and scheduler it does nothing, "
        "silently.",
        mend="correct or remove the key (`effilaunch lint` suggests one)",
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
        mend="delete the block (`effilaunch lint --fix` does)",
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
        mend="rename the block to `bf16`",
        source="accelerate/utils/dataclasses.py set_mixed_precision; deepspeed/runtime/precision_config.py",
        places=(Place("lint", "ds-bfloat16-alias"), _RENDERED, Place("diagnose")),
        patterns=(r"`bfloat16\.enabled` not found in kwargs",),
    ),
    Failure(
        id="ds-clip-default",
        title="max_grad_norm does not reach DeepSpeed",
        cause="Without gradient_clipping in its config DeepSpeed clips by its own default, which changed "
        "from 0 to 1.0; only `auto` copies the Trainer's max_grad_norm.",
        mend="write gradient_clipping, 0.0 for none; the plan always does",
        source="deepspeed/runtime/constants.py; deepspeedai/DeepSpeed#8068",
        places=(_RENDERED, Place("lint", "ds-clip-default")),
    ),
    Failure(
        id="ds-batch-mismatch",
        title="batch sizes that do not multiply",
        cause="train_batch_size is not micro-batch x accumulation x ranks.",
        mend="leave train_batch_size out; `global_batch_size` decides the others",
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
        mend="remove the scheduler block: the Trainer makes the schedule (`trainer.lr_scheduler_type`)",
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
        mend='write "auto" in the DeepSpeed config and the value in the recipe',
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
        mend="write the value, or remove the key",
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
        mend="write integers: reduce_bucket_size h x h, stage3_prefetch_bucket_size 0.9 x h x h, "
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
        mend="write a whole number (5e8 without quotes is one)",
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
        mend="remove comments and trailing commas (`effilaunch lint --fix` does)",
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
        mend="keep one of the two",
        source="deepspeed/runtime/config_utils.py dict_raise_error_on_duplicate_keys",
        places=(Place("lint", "ds-duplicate-keys"), _RENDERED, Place("diagnose")),
        patterns=(r"Duplicate keys in DeepSpeed config",),
    ),
    Failure(
        id="ds-no-zero-block",
        title="a DeepSpeed config without zero_optimization",
        cause="accelerate wants the block, also where ZeRO is not used.",
        mend='add `"zero_optimization": {"stage": 0}`',
        source="accelerate/utils/dataclasses.py DeepSpeedPlugin",
        places=(Place("lint", "ds-no-zero-block"), _RENDERED, Place("diagnose")),
        patterns=(r"Please specify the ZeRO optimization config in the DeepSpeed config",),
    ),
    Failure(
        id="ds-scheduler-overrides",
        title="the DeepSpeed config replaces the learning-rate schedule",
        cause="A scheduler block wins over lr_scheduler_type, without a word.",
        mend="remove the block and set `trainer.lr_scheduler_type` and `trainer.warmup_steps`",
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
        mend="remove the scheduler block: the Trainer makes the schedule",
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
        mend="remove it there and set `trainer.max_grad_norm`",
        source="deepspeed/runtime/engine.py",
        places=(Place("lint", "ds-max-grad-norm-param"), _RENDERED, Place("diagnose")),
        patterns=(r"'max_grad_norm' is not supported as an optimizer parameter",),
    ),
    Failure(
        id="ds-comm-dtype",
        title="a communication dtype that DeepSpeed does not know",
        cause="communication_data_type knows fp16, bf16 and fp32, in these spellings only.",
        mend="write one of them, or remove the key",
        source="deepspeed/runtime/config.py",
        places=(Place("lint", "ds-comm-dtype"), _RENDERED, Place("diagnose")),
        patterns=(r"Invalid communication_data_type",),
    ),
)
