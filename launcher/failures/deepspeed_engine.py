"""Known failures of DeepSpeed's engine under the Trainer: optimizers, offload, stages, what is saved."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

DEEPSPEED_ENGINE = (
    Failure(
        id="ds-optimizer-block",
        title="an optimizer block that needs a compiler",
        cause="With `optimizer` in its config DeepSpeed takes its own FusedAdam, which is compiled at the "
        "start of the run and needs nvcc; without it torch's fused AdamW is used.",
        mend="remove the optimizer block and set `trainer.optim`",
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
        mend="use `trainer.optim: adamw_torch` with offload, or `sharding.offload_optimizer: none`",
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
        mend="use `trainer.optim: adamw_torch` with offload, or `sharding.offload_optimizer: none`",
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
        mend="set `sharding.zero_stage: 3`, or drop offload_param",
        source="deepspeed/runtime/zero/config.py",
        places=(Place("fix", "offload-param-stage"), Place("lint", "ds-stage2-offload-param")),
        changes={"sharding.offload_param": "none"},
    ),
    Failure(
        id="ds-bucket-memory",
        title="communication buckets that fill the GPU",
        cause="Buckets default to 500 million values, and overlap_comm keeps several of them: gigabytes that "
        "no estimate of weights and states shows.",
        mend="set reduce_bucket_size and allgather_bucket_size to 2e8 or less; the plan sizes them by device",
        source="deepspeed/runtime/zero/config.py; transformers' DeepSpeed guide",
        places=(Place("worker", "launcher.plan.job:base_job"), Place("lint", "ds-bucket-memory")),
    ),
    Failure(
        id="ds-fsdp-both",
        title="FSDP and DeepSpeed at once",
        cause="Both engines were asked for; the Trainer takes one.",
        mend="say `sharding.engine` and nothing else",
        source="transformers/trainer.py",
        places=(Place("refusal", "owned-key"), Place("diagnose")),
        patterns=(r"Using --fsdp xxx together with --deepspeed is not possible",),
    ),
    Failure(
        id="ds-accelerate-fields",
        title="DeepSpeed settings in accelerate's configuration too",
        cause="accelerate's file, or ACCELERATE_DEEPSPEED_* variables, name settings that the DeepSpeed "
        "config file decides.",
        mend="remove them from accelerate's configuration (~/.cache/huggingface/accelerate) and environment",
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
        mend="make TrainingArguments first and keep them alive",
        source="transformers/integrations/deepspeed.py HfTrainerDeepSpeedConfig",
        places=(Place("fix", "zero3-args-before-model"), Place("worker", "launcher.train.worker:train")),
    ),
    Failure(
        id="zero3-no-gather",
        title="no weights in a ZeRO-3 checkpoint",
        cause="stage3_gather_16bit_weights_on_model_save is false by default, so a full fine-tune saves "
        "DeepSpeed's shards and no model.safetensors, and a script that saves an adapter by itself writes "
        "empty tensors.",
        mend="set it to true, as the plan does; zero_to_fp32.py in the checkpoint recovers the weights",
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
        mend="let all ranks call the same modules in each step, update DeepSpeed, or train with "
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
        mend="drop `trainer.auto_find_batch_size`: the plan finds the micro-batch",
        source="transformers/trainer.py",
        places=(Place("fix", "auto-find-batch-size"), Place("diagnose")),
        patterns=(r"`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3",),
        changes={"trainer.auto_find_batch_size": None},
    ),
    Failure(
        id="ds-eval-only",
        title="evaluation alone under ZeRO 1 or 2",
        cause="Without training, DeepSpeed has something to do at stage 3 only.",
        mend="evaluate without DeepSpeed: `sharding.engine: ddp`",
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
        mend="gather it (deepspeed.zero.GatheredParameters, FSDP.summon_full_params), call the wrapped "
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
        mend="name `sharding.nvme_path`, a folder on a local disk, or offload to cpu",
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
