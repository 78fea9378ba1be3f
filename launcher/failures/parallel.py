"""Known failures of ranks that share a copy: tensor, sequence, context and pipeline parallelism."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

_ENGINE = Place("refusal", "parallel-engine")
_HEADS = Place("refusal", "parallel-heads")
_CONFLICT = Place("refusal", "parallel-conflict")
_TRAINER = Place("worker", "launcher.train.tasks.task:trainer_class")

PARALLEL = (
    Failure(
        id="sequence-parallel-gradients",
        title="gradients of sequence parallelism are too large",
        cause="transformers computes the loss of Ulysses on every rank from all ranks' losses. Backward each "
        "part comes back once from every rank, and DeepSpeed's stages 0 to 2 add the ranks up: gradients are "
        "sp_size times too large, which clipping and Adam hide. No error tells of it.",
        mend="`effilaunch run` computes each rank's part of the loss itself; elsewhere divide the loss by "
        "sp_size below ZeRO-3",
        source="transformers/integrations/deepspeed.py deepspeed_sp_compute_loss; "
        "deepspeed/runtime/zero/stage_1_and_2.py average_tensor",
        versions="transformers>=5",
        places=(_TRAINER,),
    ),
    Failure(
        id="sequence-parallel-positions",
        title="sequence parallelism without positions",
        cause="Ranks that share a sample's tokens gather their positions to mask what lies ahead; a batch "
        "without position_ids would be taken for packed documents.",
        mend="let the collator give position_ids, or start with `effilaunch run`, which does",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter, forward",
        places=(Place("worker", "launcher.train.sequence:part_of"), Place("diagnose")),
        patterns=(r"Ulysses SP requires `?position_ids`? in every",),
    ),
    Failure(
        id="sequence-not-divisible",
        title="a sample that the ranks cannot divide",
        cause="Each of the ranks that share a sample takes as many of its tokens.",
        mend="use a data.max_length that sp_size divides; shorter samples are padded to such a length",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter.refill",
        places=(Place("refusal", "parallel-length"), Place("diagnose")),
        patterns=(r"batch's seqlen=\d+ isn't divisible by sp-size=\d+",),
    ),
    Failure(
        id="heads-not-divisible",
        title="attention heads that the ranks cannot divide",
        cause="Ranks that share a layer, or swap tokens for heads, need the same number of heads each.",
        mend="use a sharding.tp_size or sharding.sp_size that divides the heads and the key-value heads",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF; "
        "transformers/distributed/tensor_parallel.py",
        places=(_HEADS, Place("diagnose")),
        patterns=(r"[Aa]ttention head count \d+ is not divisible by SP size \d+",),
    ),
    Failure(
        id="tensor-parallel-no-model",
        title="AutoTP saves no model",
        cause="accelerate puts AutoTP's parts together only where the config says "
        "stage3_gather_16bit_weights_on_model_save, whatever its stage; else the Trainer saves DeepSpeed's "
        "states in place of model.safetensors.",
        mend="write the key into zero_optimization, as `effilaunch run` does",
        source="accelerate/accelerator.py get_state_dict; transformers/trainer.py save_model",
        places=(Place("worker", "launcher.render.ds_config:render_ds_config"),),
    ),
    Failure(
        id="tensor-parallel-resume",
        title="checkpoints of a model that transformers has cut",
        cause="The states of an optimizer over cut weights are not saved, so the Trainer refuses to write "
        "checkpoints that a run could go on from.",
        mend="use sharding.engine: deepspeed, whose AutoTP can, or trainer.save_only_model: true",
        source="transformers/trainer.py __init__ (is_distributed_loading_by_transformers)",
        versions="transformers>=5",
        places=(_ENGINE, Place("diagnose")),
        patterns=(r"Resuming is not supported for models sharded at load time",),
    ),
    Failure(
        id="tensor-parallel-plan",
        title="a model without a tensor-parallel plan",
        cause="transformers cuts a model by the plan in its configuration class, and this one has none.",
        mend="drop sharding.tp_size: ZeRO-3 and engine fsdp share the weights of any model",
        source="transformers/distributed/mixin.py _resolve_parallel_plans",
        places=(Place("refusal", "parallel-model"), Place("diagnose")),
        patterns=(r"`tp_size=\d+` was requested, but `\w+` has no `tp_plan`",),
    ),
    Failure(
        id="tensor-parallel-adapter",
        title="an adapter over weights that are cut",
        cause="peft makes the adapter's matrices whole, beside layers that return a part: shapes differ in "
        "the first forward pass with transformers' own cut, and AutoTP does not find the layers.",
        mend="train the adapter under ZeRO-3 or engine fsdp, which share the frozen base among the ranks",
        source="peft/tuners/lora/layer.py Linear.forward; deepspeed/module_inject/auto_tp.py",
        places=(_CONFLICT,),
    ),
    Failure(
        id="tensor-parallel-copies",
        title="copies of a model that transformers has cut",
        cause="accelerate combines tensor and context parallelism with sharded copies alone, not with DDP.",
        mend="use sharding.engine: deepspeed for copies, or as many ranks for a copy as there are devices",
        source="accelerate/parallelism_config.py __post_init__",
        places=(_ENGINE, Place("diagnose")),
        patterns=(r"Tensor/Context parallelism \(tp/cp_size > 1\) cannot be used with pure data",),
    ),
    Failure(
        id="parallelism-combined",
        title="context and sequence parallelism at once",
        cause="Both give a rank a part of each sample's tokens.",
        mend="keep sharding.sp_size (deepspeed) or sharding.cp_size (fsdp)",
        source="accelerate/parallelism_config.py __post_init__",
        places=(Place("refusal", "parallel-combination"), Place("diagnose")),
        patterns=(r"Context Parallelism \(CP\) and Sequence Parallelism \(SP\) are mutually exclusive",),
    ),
    Failure(
        id="parallelism-processes",
        title="ranks that accelerate cannot share out",
        cause="The product of all parallel sizes is not the number of processes, or the processes run on "
        "CPUs, over which accelerate sets up neither tensor nor context parallelism.",
        mend="let the sizes divide the devices; on a CPU use sharding.engine: deepspeed",
        source="accelerate/parallelism_config.py _validate_accelerator",
        places=(
            Place("refusal", "parallel-devices"), Place("refusal", "engine-mismatch"), Place("diagnose"),
        ),
        patterns=(
            r"ParallelismConfig total_size \(\d+\) does not match num_processes",
            r"ParallelismConfig is only compatible DistributedType",
        ),
    ),
    Failure(
        id="context-parallel-attention",
        title="context parallelism with another attention",
        cause="torch's ring attention takes the place of SDPA's kernels on GPUs; no other attention and no "
        "CPU has one.",
        mend="use model.attn_implementation: sdpa on GPUs, or sharding.sp_size",
        source="transformers/trainer.py _prepare_context_parallel_inputs; "
        "torch/distributed/tensor/experimental/_context_parallel",
        places=(_ENGINE, _CONFLICT, Place("diagnose")),
        patterns=(
            r"Context parallelism is supported only with SDPA attention",
            r"Operator aten\._scaled_dot_product_flash_attention_for_cpu\.default does not have a sharding "
            r"strategy",
        ),
    ),
    Failure(
        id="tensor-parallel-data",
        title="ranks of one copy read different rows",
        cause="Ranks that share a layer compute the same rows, and AutoTP looks at the first batch.",
        mend="let the ranks of a copy read the same rows, as `effilaunch run` does",
        source="deepspeed/runtime/engine.py check_dataloader_inputs_same_across_ranks",
        places=(Place("worker", "launcher.train.sharing:copies"), _CONFLICT, Place("diagnose")),
        patterns=(r"Data inconsistency within the TP group",),
    ),
    Failure(
        id="pipeline-parallel",
        title="pipeline parallelism asked for",
        cause="DeepSpeed's pipeline needs a model of its own kind (PipelineModule), which no model of "
        "transformers is; its block in a config changes nothing else.",
        mend="use sharding.tp_size, sharding.zero_stage: 3 or engine fsdp",
        source="deepspeed/runtime/pipe/module.py; deepspeed/__init__.py initialize",
        places=(Place("refusal", "profile-parallel"), Place("refusal", "unsupported")),
    ),
    Failure(
        id="one-bit-optimizer",
        title="1-bit Adam, 0/1 Adam and 1-bit LAMB",
        cause="DeepSpeed has removed them; releases that had them refused them with ZeRO-2 and 3.",
        mend="use AdamW: ZeRO shares its states out",
        source="deepspeed/runtime/engine.py _configure_basic_optimizer",
        places=(Place("lint", "ds-optimizer-type"),),
    ),
)  # fmt: skip
