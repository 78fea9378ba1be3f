"""What becomes of axolotl's keys: tables for its reader, and for the page about coming from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.importing.arguments import (
    as_bool,
    as_number,
    take_adapter,
    take_argument,
    take_field,
    take_fsdp_options,
    take_quantization,
)
from launcher.importing.key_tables import (
    Key,
    Left,
    Peer,
    Row,
    Tool,
    close_peer,
    if_on,
    is_off,
    leave_keys,
    leave_rest,
    load_tool,
    open_peer,
    rows_of,
    switch,
    take_keys,
    text,
    texts,
    tokens,
    whole,
)
from launcher.importing.reading import Effect, Place, Reading, shown
from launcher.importing.row_sources import (
    BUILDERS,
    Prompt,
    Shape,
    Turns,
    evaluation_share,
    source_at,
    take_hooks,
    unknown_fields,
)
from launcher.tasks import task_of_tool

KEYS: tuple[Key, ...] = (
    Key("base_model", "model.name_or_path", text),
    Key("model_revision", "model.revision", text),
    Key("revision_of_model", "model.revision", text),
    Key("trust_remote_code", "model.trust_remote_code", if_on),
    Key("tokens", "model.add_tokens", texts),
    Key("lora_r", "adapter.r"),
    Key("lora_alpha", "adapter.lora_alpha"),
    Key("lora_dropout", "adapter.lora_dropout", note="0 where it is absent"),
    Key("lora_target_parameters", "adapter.target_parameters"),
    Key("lora_modules_to_save", "adapter.modules_to_save"),
    Key("lora_rank_pattern", "adapter.rank_pattern"),
    Key("lora_alpha_pattern", "adapter.alpha_pattern"),
    Key("lora_fan_in_fan_out", "adapter.fan_in_fan_out"),
    Key("lora_bias", "adapter.bias"),
    Key("peft_use_dora", "adapter.use_dora"),
    Key("peft_use_rslora", "adapter.use_rslora"),
    Key("peft_layer_replication", "adapter.layer_replication"),
    Key("peft_init_lora_weights", "adapter.init_lora_weights"),
    Key("peft_trainable_token_indices", "adapter.trainable_token_indices"),
    Key("peft_ensure_weight_tying", "adapter.ensure_weight_tying"),
    Key("peft_layers_to_transform", "adapter.layers_to_transform"),
    Key("peft_layers_pattern", "adapter.layers_pattern"),
    Key("peft_autocast_adapter_dtype", "adapter.autocast_adapter_dtype", switch),
    Key("micro_batch_size", "trainer.per_device_train_batch_size", note="1 where it is absent"),
    Key("eval_batch_size", "trainer.per_device_eval_batch_size", note="micro_batch_size where it is absent"),
    Key("max_steps", "trainer.max_steps", note="wins over num_epochs"),
    Key("learning_rate", "trainer.learning_rate"),
    Key("optim_args", "trainer.optim_args"),
    Key("optim_target_modules", "trainer.optim_target_modules"),
    Key("weight_decay", "trainer.weight_decay"),
    Key("adam_beta1", "trainer.adam_beta1"),
    Key("adam_beta2", "trainer.adam_beta2"),
    Key("adam_epsilon", "trainer.adam_epsilon"),
    Key("max_grad_norm", "trainer.max_grad_norm"),
    Key("neftune_noise_alpha", "trainer.neftune_noise_alpha"),
    Key("noisy_embedding_alpha", "trainer.neftune_noise_alpha"),
    Key("logging_steps", "trainer.logging_steps"),
    Key("logging_nan_inf_filter", "trainer.logging_nan_inf_filter"),
    Key("save_total_limit", "trainer.save_total_limit", note="4 where it is absent"),
    Key("save_only_model", "trainer.save_only_model"),
    Key("load_best_model_at_end", "trainer.load_best_model_at_end"),
    Key("metric_for_best_model", "trainer.metric_for_best_model"),
    Key("greater_is_better", "trainer.greater_is_better"),
    Key("eval_on_start", "trainer.eval_on_start"),
    Key("full_determinism", "trainer.full_determinism"),
    Key("ddp_timeout", "trainer.ddp_timeout"),
    Key("ddp_bucket_cap_mb", "trainer.ddp_bucket_cap_mb"),
    Key("ddp_broadcast_buffers", "trainer.ddp_broadcast_buffers"),
    Key("ddp_find_unused_parameters", "trainer.ddp_find_unused_parameters"),
    Key("dataloader_num_workers", "trainer.dataloader_num_workers"),
    Key("dataloader_pin_memory", "trainer.dataloader_pin_memory"),
    Key("dataloader_prefetch_factor", "trainer.dataloader_prefetch_factor"),
    Key("dataloader_drop_last", "trainer.dataloader_drop_last"),
    Key("torch_empty_cache_steps", "trainer.torch_empty_cache_steps"),
    Key("torch_compile_backend", "trainer.torch_compile_backend"),
    Key("torch_compile_mode", "trainer.torch_compile_mode"),
    Key("hub_strategy", "trainer.hub_strategy"),
    Key("hub_revision", "trainer.hub_revision"),
    Key("sequence_len", "data.max_length", tokens, "512 where it is absent"),
    Key("dataset_num_proc", "data.num_proc", whole),
    Key("dataset_processes", "data.num_proc", whole),
    Key("tensor_parallel_size", "sharding.tp_size", whole),
    Key("pad_to_multiple_of", "data.pad_to_multiple_of", whole),
)
"""Taken value for value; trainer and adapter fields are checked as such."""

DPO_KEYS: tuple[Key, ...] = (
    Key("dpo_beta", "trainer.beta"),
    Key("rl_beta", "trainer.beta"),
    Key("dpo_label_smoothing", "trainer.label_smoothing"),
    Key("dpo_loss_type", "trainer.loss_type"),
    Key("dpo_loss_weights", "trainer.loss_weights"),
    Key("dpo_ld_alpha", "trainer.ld_alpha"),
    Key("dpo_use_weighting", "trainer.use_weighting"),
    Key("precompute_ref_log_probs", "trainer.precompute_ref_log_probs"),
)
"""With rl: dpo and ipo."""

HANDLED: tuple[Row, ...] = (
    ("rl", "task", "dpo; ipo is dpo with loss_type ipo; all others are refused"),
    ("tokenizer_config", "model.tokenizer", "where it is not base_model"),
    ("special_tokens", "model.add_tokens", "additional_special_tokens; others are listed"),
    ("resize_token_embeddings_to_32x", "model.vocab_multiple", "32"),
    ("bf16", "precision", "auto where it is absent; with all parameters trained also model.dtype: bfloat16"),
    ("bfloat16", "precision", "as bf16"),
    ("fp16", "precision", "fp16"),
    ("float16", "precision", "fp16-true, where bf16 is false"),
    ("float32", "precision", "fp32"),
    ("tf32", "trainer.tf32", "auto says nothing"),
    ("adapter", "adapter.type", "lora and qlora"),
    ("lora_target_linear", "adapter.target_modules", "all-linear"),
    ("lora_target_modules", "adapter.target_modules", "literally; beside lora_target_linear without effect"),
    ("lora_model_dir", "adapter.path", ""),
    ("peft", "adapter.loftq_config", "loftq_config alone"),
    ("load_in_4bit", "model.quantization", "nf4 with double quantisation, with adapter: qlora only"),
    ("load_in_8bit", "model.quantization", "int8, with an adapter"),
    ("bnb_config_kwargs", "model.quantization", "quant type and double quantisation"),
    ("flash_attention", "model.attn_implementation", "flash_attention_2"),
    ("sdp_attention", "model.attn_implementation", "sdpa"),
    ("flex_attention", "model.attn_implementation", "flex_attention"),
    ("eager_attention", "model.attn_implementation", "eager"),
    ("attn_implementation", "model.attn_implementation", ""),
    ("gradient_accumulation_steps", "trainer.gradient_accumulation_steps", "1 where it is absent"),
    ("batch_size", "trainer.gradient_accumulation_steps", "batch_size // micro_batch_size"),
    ("num_epochs", "trainer.num_train_epochs", "1 where it is absent"),
    ("optimizer", "trainer.optim", "names of transformers; axolotl's own are listed"),
    ("lr_scheduler", "trainer.lr_scheduler_type", "cosine where it is absent"),
    ("lr_scheduler_kwargs", "trainer.lr_scheduler_kwargs", ""),
    ("cosine_min_lr_ratio", "trainer.lr_scheduler_kwargs", "cosine_with_min_lr, min_lr_rate"),
    ("warmup_steps", "trainer.warmup_steps", "0.03 where neither is there"),
    ("warmup_ratio", "trainer.warmup_steps", "below 1: a share"),
    ("gradient_checkpointing", "trainer.activation_checkpointing", "offload counts as true"),
    ("gradient_checkpointing_kwargs", "trainer.activation_checkpointing_kwargs", ""),
    ("seed", "seed", ""),
    ("group_by_length", "trainer.train_sampling_strategy", "group_by_length"),
    ("curriculum_sampling", "trainer.train_sampling_strategy", "sequential"),
    ("sample_packing_sequentially", "trainer.train_sampling_strategy", "sequential"),
    ("eval_strategy", "trainer.eval_strategy", "no where rows are there and nothing is named"),
    ("eval_steps", "trainer.eval_steps", ""),
    ("evals_per_epoch", "trainer.eval_steps", "1 / (n x epochs), a share of all steps"),
    ("save_strategy", "trainer.save_strategy", "epoch where nothing is named"),
    ("save_steps", "trainer.save_steps", ""),
    ("saves_per_epoch", "trainer.save_steps", "1 / (n x epochs), a share of all steps"),
    ("early_stopping_patience", "early_stopping.patience", ""),
    ("torch_compile", "trainer.torch_compile", "auto says nothing"),
    ("deepspeed", "sharding", "the file is read, too"),
    ("fsdp_config", "sharding.engine", "fsdp; offload is listed; with a quantised model the planner chooses"),
    ("fsdp", "sharding.engine", "fsdp"),
    ("context_parallel_size", "sharding", "sp_size with DeepSpeed, else cp_size"),
    ("sequence_parallel_degree", "sharding", "as context_parallel_size"),
    ("wandb_project", "launch.env.WANDB_PROJECT", "and report_to wandb"),
    ("wandb_entity", "launch.env.WANDB_ENTITY", ""),
    ("wandb_mode", "launch.env.WANDB_MODE", ""),
    ("wandb_name", "trainer.run_name", ""),
    ("use_wandb", "trainer.report_to", "wandb"),
    ("use_tensorboard", "trainer.report_to", "tensorboard"),
    ("use_mlflow", "trainer.report_to", "mlflow"),
    ("use_comet", "trainer.report_to", "comet_ml"),
    ("use_trackio", "trainer.report_to", "trackio"),
    ("hub_model_id", "trainer.hub_model_id", "with push_to_hub and a private repository"),
    (
        "excess_length_strategy",
        "data.overlong",
        "drop where it is absent; split for completion rows; preference rows are cut",
    ),
    ("sample_packing", "data.packing", ""),
    ("batch_flattening", "data.padding_free", ""),
    ("train_on_inputs", "data.loss_on", "all"),
    ("val_set_size", "data.eval", "a share"),
    ("test_datasets", "data.eval", ""),
    ("datasets", "data.train", "see types of rows"),
    (
        "pretraining_dataset",
        "data.train",
        "the first; text, streamed, packed where sample_packing or pretraining_sample_concatenation is true",
    ),
    ("streaming", "data.streaming", ""),
    ("chat_template", "model.chat_template", "listed: the tokenizer's is used"),
    ("chat_template_jinja", "model.chat_template", "with chat_template: jinja"),
    ("use_swanlab", "trainer.report_to", "swanlab, where plugins names its plugin"),
    ("plugins", "trainer.use_liger_kernel", "liger; others are listed"),
)
"""(key, recipe key, note) of what the reader looks at itself."""

_SAME = Effect.NONE
_OTHER = Effect.TRAINING
_KERNEL = "speed and memory only; the planner chooses"
LEFT: tuple[Left, ...] = (
    Left(_SAME, "read from the model", """model_type type_of_model tokenizer_type tokenizer_use_fast
        tokenizer_legacy is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
        is_qwen_derived_model tokenizer_save_jinja_files tokenizer_use_mistral_common"""),
    Left(_SAME, "`run --output-dir` decides it", "output_dir save_safetensors save_first_step"),
    Left(_SAME, "`run --resume` decides it", "resume_from_checkpoint auto_resume_from_checkpoints"),
    Left(_SAME, "prepared data is kept by `prepare`", """dataset_prepared_path dataset_keep_in_memory
        num_dataset_shards_to_save push_dataset_to_hub is_preprocess preprocess_iterable
        hf_use_auth_token"""),
    Left(_SAME, "the launcher sets it", """local_rank world_size ddp device device_map max_memory
        gpu_memory_limit use_ray ray_run_name ray_num_workers resources_per_worker accelerator_config
        dp_shard_size dp_replicate_size low_cpu_mem_usage"""),
    Left(_SAME, _KERNEL, """flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum
        fused_attn_kernel experts_implementation use_kernels lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp
        tiled_mlp_num_shards tiled_mlp_use_original_mlp cut_cross_entropy cut_cross_entropy_accum_c_fp32
        cut_cross_entropy_c_grad_chunk_size activation_offloading layer_offloading selective_checkpointing
        ple_cpu_offload deepcompile flex_attn_compile_kwargs large_head_attention flash_attn_d512
        sdpa_varlen gemma4_hybrid_attn_impl fa_varlen_kwargs_in_collator torch_compile_regional
        torch_compile_options heads_k_stride ring_attn_func qlora_sharded_model_loading lora_on_cpu gc_steps
        gc_collect_steps xformers_attention sage_attention dpo_use_liger_kernel dpo_padding_free
        dpo_use_logits_to_keep nvfp4_merge_aware experimental_skip_move_to_device"""),
    Left(_SAME, "samples are laid out by the planner", """pad_to_sequence_len eval_sample_packing
        sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method
        sample_packing_eff_est multipack_real_batches pretrain_multipack_buffer_size
        streaming_multipack_buffer_size total_num_tokens total_supervised_tokens"""),
    Left(_SAME, "not part of a run: `report`, `eval` and `generate` do it", """eval_table_size
        eval_max_new_tokens eval_table_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval
        bench_dataset bench_split generate_samples num_generation_samples generation_max_new_tokens
        generation_temperature generation_top_p generation_top_k generation_prompt_ratio
        generation_do_sample dpo_generate_during_eval gradio_title gradio_share gradio_server_name
        gradio_server_port gradio_max_new_tokens gradio_temperature vllm export"""),
    Left(_SAME, "a run stops by itself on a loss of NaN", "loss_watchdog_threshold loss_watchdog_patience"),
    Left(_SAME, "for looking at the tool", """debug strict profiler_steps profiler_steps_start
        sync_profiler_steps sync_profiler_start_step include_tokens_per_second include_tkps use_otel_metrics
        otel_metrics_host otel_metrics_port axolotl_config_path dynamic_checkpoint"""),
    Left(_SAME, "set it in the environment of the tracker", """wandb_run_id wandb_watch wandb_log_model
        mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts comet_workspace
        comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config
        trackio_project_name trackio_run_name trackio_space_id"""),
    Left(_SAME, "part of `merge`", "merge_lora merge_method"),
    Left(_SAME, "a run's rows have no other columns", "remove_unused_columns"),
    Left(_SAME, "write `on_oom: adapt` for a run that goes on with less", "auto_find_batch_size"),
    Left(_OTHER, "another training, which nothing here does", """unfrozen_parameters lisa_n_layers
        lisa_step_interval lisa_layers_attribute use_pose pose_split_on_token_ids pose_max_context_len
        pose_num_chunks scaling_softmax scaling_softmax_factor scaling_softmax_bias use_eaft eaft_alpha
        eaft_k use_dft balance_labels label_balance_window_optim_steps trainer_cls freeze_mm_modules
        fix_untrained_tokens lora_fp32_gradients fp32_norms fp32_norm_classes llama4_linearized_experts
        dpo_norm_loss rpo_alpha s2_attention"""),
    Left(_OTHER, "one rate for all parameters here", """loraplus_lr_ratio loraplus_lr_embedding embedding_lr
        embedding_lr_scale lr_groups"""),
    Left(_OTHER, "no schedule here does it", """cosine_constant_lr_ratio jagged_restart_steps
        jagged_restart_warmup_steps jagged_restart_anneal_steps lr_quadratic_warmup lr_div_factor"""),
    Left(_OTHER, "of an optimizer that is not here", """adam_beta3 adam_epsilon2 dion_lr dion_momentum
        dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale
        qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold
        qgalore_gamma_proj qgalore_queue_size torchdistx_path"""),
    Left(_OTHER, "the model is trained as its checkpoint describes it", """base_model_config cls_model_config
        overrides_of_model_config overrides_of_model_kwargs model_config model_kwargs rope_scaling
        added_tokens_overrides shrink_embeddings mean_resizing_embeddings embeddings_skip_upcast
        """),
    Left(_OTHER, "all rows are used: a recipe has no limit of rows", """dataset_shard_num dataset_shard_idx
        dataset_exact_deduplication min_sample_len max_prompt_len"""),
    Left(_OTHER, "data.max_length is for both", "eval_sequence_len"),
    Left(_OTHER, "the chat template alone makes the text", """default_system_message eot_tokens
        chat_template_kwargs role_boundaries"""),
    Left(_OTHER, "sources are laid one after another, then shuffled", "shuffle_before_merging_datasets"),
    Left(None, "a model that sees or hears is not trained here", """processor_type processor_kwargs
        image_size image_resize_algorithm"""),
    Left(None, "no task here is that", """reward_model process_reward_model num_labels diffusion_lm ebft
        center_rewards_coefficient"""),
    Left(None, "another kind of adapter", "relora use_onebitllms"),
    Left(None, "only bitsandbytes quantises here", """gptq qat quantization quantize_moe_experts
        model_quantization_config"""),
    Left(None, "8-bit floats are not trained here", "fp8 fp8_config fp8_enable_fsdp_float8_all_gather"),
    Left(None, "rows must be text", "skip_prepare_dataset"),
    Left(None, "it starts at random", "reinit_weights", "write model.config in place of model.name_or_path"),
)  # fmt: skip
"""Keys that stay behind."""

SHARING: tuple[Left, ...] = (
    Left(_SAME, "of a kind of training that this file does not ask for", """trl orpo_alpha simpo_gamma
        cpo_alpha kto_desirable_weight kto_undesirable_weight dpo_beta rl_beta dpo_label_smoothing
        dpo_loss_type dpo_loss_weights dpo_ld_alpha dpo_use_weighting precompute_ref_log_probs"""),
    Left(_SAME, "without relora and mixlora", """relora_prune_ratio relora_prune_method relora_cpu_offload
        mixlora_num_experts mixlora_top_k mixlora_router_aux_loss_coef mixlora_router_init_range
        mixlora_jitter_noise mixlora_expert_lora_r mixlora_expert_lora_alpha mixlora_expert_lora_dropout"""),
    Left(_SAME, "nothing is quantised with it", """bnb_config_kwargs nf4_backend
        model_quantization_config_kwargs"""),
)  # fmt: skip
"""What belongs to something that the file does not ask for; after everything else was looked at."""

PLUGIN_KEYS: dict[str, tuple[Left, ...]] = {
    "swanlab": (
        Left(_SAME, "the tracker, where its project is set", "use_swanlab"),
        Left(_SAME, "not carried over: set it in the environment of the tracker", """swanlab_project
            swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_api_key
            swanlab_log_model swanlab_web_host swanlab_api_host swanlab_lark_webhook_url swanlab_lark_secret
            swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer"""),
    ),
    "kernels": (
        Left(_SAME, _KERNEL, """expert_backend moe_grouped_backend moe_dequant_chunk_size use_scattermoe
            use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels dsv4_shared_mlp_lora_kernel
            nvfp4_merge_aware_start_step"""),
        Left(_OTHER, "not carried over: other numbers than those of the weights' own type", """moe_bnb_fast
            nonexpert_quantization dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel dsv4_bf16_all
            dsv4_fp4_grouped_mode gemma4_fp8_nonexpert gemma4_nf4_nonexpert"""),
    ),
    "expert_parallel": (
        Left(_SAME, "not carried over: where the experts lie", """expert_parallel_size expert_parallel_backend
            expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
            expert_parallel_fallback_on_unsupported"""),
        Left(_OTHER, "not carried over: tokens over it are dropped", "expert_parallel_token_capacity"),
    ),
    "densemixer": (Left(_OTHER, "not carried over", "dense_mixer"),),
    "grokfast": (Left(_OTHER, "not carried over", "grokfast_alpha grokfast_lamb"),),
    "spectrum": (Left(_OTHER, "not carried over: it freezes layers", """spectrum_top_fraction
        spectrum_model_name"""),),
    "mora": (Left(_OTHER, "not carried over: another kind of adapter", "mora"),),
    "llm_compressor": (Left(_OTHER, "not carried over: it compresses the model", "llmcompressor"),),
    "hatchery": (Left(_OTHER, "not carried over: it trains on a service", "hatchery"),),
    "lm_eval": (Left(_SAME, "not carried over: it measures after the training", """lm_eval_tasks
        lm_eval_batch_size lm_eval_post_train lm_eval_model"""),),
    "kd": (Left(_OTHER, "not carried over", """kd_trainer kd_ce_alpha kd_alpha kd_temperature
        kd_temperature_min kd_beta kd_normalize_topk kd_online_server_base_url kd_online_topk
        kd_online_server kd_online_timeout"""),),
    "diffusion": (Left(_OTHER, "not carried over", "diffusion"),),
    "nemo_gym": (Left(_OTHER, "not carried over", """nemo_gym_enabled nemo_gym_dir nemo_gym_auto_clone
        nemo_gym_config_paths nemo_gym_head_port nemo_gym_server_timeout nemo_gym_verify_timeout
        nemo_gym_run_timeout nemo_gym_datasets nemo_gym_auto_start nemo_gym_model_name nemo_gym_multi_turn
        nemo_gym_max_turns"""),),
}  # fmt: skip
"""Keys that a plugin of axolotl's reads, by the plugin's name; they are in no schema but its own."""

DATASET_LEFT: tuple[Left, ...] = (
    Left(_SAME, "how the rows are read, not which", "ds_type preprocess_shards trust_remote_code"),
    Left(_OTHER, "all rows are used: a recipe has no limit of rows", "shards shards_idx"),
    Left(_OTHER, "what is learnt is said for all rows", """message_field_training
        message_field_training_detail"""),
    Left(_OTHER, "messages are rendered as the rows have them", """drop_system_message split_thinking
        field_thinking template_thinking_key conversation field_human field_model input_format
        input_transform"""),
    Left(_OTHER, "another kind of training", "logprobs_field temperature"),
)  # fmt: skip
"""Keys of a data set that stay behind."""

OWN_OPTIMIZERS = (
    "optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw", "adamc", "came_pytorch",
    "muon", "muon_8bit", "dion", "sinkgd", "polora", "scao", "flash_adamw", "flash_adam", "flash_sgd",
    "flash_sgdw", "flash_lion", "q_galore_adamw8bit",
)  # fmt: skip
OWN_SCHEDULES = ("one_cycle", "rex")
REFUSED_TRAINING = ("kto", "orpo", "simpo", "grpo", "gdpo", "ebft", "cpo", "ppo", "bco")

_ALPACA = "Below is an instruction that describes a task"
_WRITE = "Write a response that appropriately completes the request."
_GIVEN = f"{_ALPACA}, paired with an input that provides further context. {_WRITE}"
_ALONE = f"{_ALPACA}. {_WRITE}"
_INSTRUCT = (
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
)
_CHAT = ("USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:")
_CHATML = (
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
)
_PHI = (
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
)
_ORCA = (
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
)
_ML_SYSTEM = "<|im_start|>system\n{system}<|im_end|>\n"
_OF_ORCA = {"system_column": "system_prompt", "instruction": "question", "given": "", "output": "response"}

TYPES: dict[str, Prompt] = {
    "alpaca": Prompt(*_INSTRUCT, "{system}\n\n", _GIVEN, _ALONE),
    "alpaca:instruct": Prompt(*_INSTRUCT, "{system}\n\n", _GIVEN, _ALONE),
    "alpaca:chat": Prompt(*_CHAT, "SYSTEM: {system}\n", _GIVEN, _ALONE),
    "alpaca:chatml": Prompt(*_CHATML, _ML_SYSTEM, _GIVEN, _ALONE),
    "alpaca:phi": Prompt(*_PHI, "<|system|>\n{system}<|end|>\n", _GIVEN, _ALONE),
    "alpaca_instruct": Prompt(*_INSTRUCT, "{system}\n\n", _GIVEN, _ALONE),
    "alpaca_instruct.load_no_prompt": Prompt(*_INSTRUCT),
    "alpaca_chat": Prompt(*_CHAT, "SYSTEM: {system}\n", _GIVEN, _ALONE),
    "alpaca_w_system": Prompt(*_CHAT, "SYSTEM: {system}\n", system_column="system"),
    "alpaca_w_system.load_chat": Prompt(*_CHAT, "SYSTEM: {system}\n", system_column="system"),
    "alpaca_w_system.load_instruct": Prompt(*_INSTRUCT, "{system}\n\n", system_column="system"),
    "alpaca_w_system.load_open_orca": Prompt(*_ORCA, "### System:\n{system}\n", **_OF_ORCA),
    "alpaca_w_system.load_open_orca_chatml": Prompt(*_CHATML, _ML_SYSTEM, **_OF_ORCA),
}
"""Types of rows whose prompt is a pattern: done by a hook."""
ROW_TYPES: tuple[Row, ...] = (
    ("chat_template", "format: chat", "the template of the tokenizer"),
    ("sharegpt", "format: chat", "axolotl itself no longer reads it"),
    ("completion", "format: text", "field becomes columns"),
    *((name, "format: prompt-completion", "with a format_row that makes the same prompt") for name in TYPES),
    ("a mapping with format and field_…", "format: prompt-completion", "with a format_row of its patterns"),
)


def take_long_pairs(peer: Peer, given: str | None) -> None:
    """Pairs that are longer than sequence_len: their answers are cut here, whatever the strategy is there."""
    said, line = "excess_length_strategy", peer.line("excess_length_strategy")
    peer.reading.take("data.overlong", "truncate", line, f"{said}: {given or 'drop'}")
    if given != "truncate":
        there = "stops at" if given == "raise" else "leaves out"
        reason = f"axolotl {there} pairs longer than sequence_len; here their answers are cut at the end"
        peer.reading.drop(said, given or "drop", line, Effect.TRAINING, reason)


def first_pretraining(peer: Peer, given: Any) -> list[Any]:
    """The entry of a pretraining_dataset that axolotl reads; the others are listed."""
    entries = given if isinstance(given, list) else [given]
    for index, entry in list(enumerate(entries))[1:]:
        line = peer.line(f"pretraining_dataset[{index}]") or peer.line("pretraining_dataset")
        reason = "axolotl reads the first pretraining_dataset alone"
        peer.reading.drop(f"pretraining_dataset[{index}]", entry, line, Effect.NONE, reason)
    return entries[:1]


def take_packs(peer: Peer) -> None:
    """Texts of a pretraining_dataset: pieces in packs, texts joined one after another, or each for itself."""
    packed, joined = peer.switch("sample_packing"), peer.switch("pretraining_sample_concatenation")
    apart = as_bool(peer.get("pretrain_multipack_attn")) is not False
    if packed:
        peer.take("data.packing", True, "sample_packing")
    elif joined:
        peer.take("data.packing", True, "pretraining_sample_concatenation")
    if (packed and not apart) or (joined and not packed):
        key = "pretrain_multipack_attn" if packed else "pretraining_sample_concatenation"
        peer.drop(key, Effect.TRAINING, "documents of a pack see each other there; here none sees another")
    if packed:
        peer.default(
            "data.overlong", "split", "sample_packing: true", "there the pieces overlap by 256 tokens"
        )
    else:
        note = "axolotl splits texts with sample_packing: true only"
        peer.default("data.overlong", "truncate", "sample_packing: false", note)


def list_streamed(peer: Peer) -> None:
    """Streamed and packed, axolotl reads the first of several data sets."""
    given = peer.values.get("datasets")
    if peer.switch("sample_packing") and isinstance(given, list) and len(given) > 1:
        reason = "with streaming and sample_packing axolotl reads the first data set alone; here all are read"
        peer.reading.drop("datasets[1]", "{…}", peer.line("datasets"), Effect.TRAINING, reason)


_PAIRS = (("role", "content"), ("from", "value"))
_WORDS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Words for roles that are read here as what they are there."""


@dataclass(slots=True)
class _Found:
    """What the data sets came to."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """Path of a source -> what the hook makes of its rows."""
    plain: list[str] = field(default_factory=list)
    """Paths of sources without a hook."""
    formats: list[str] = field(default_factory=list)
    template: tuple[str, Any, int | None] | None = None
    """(key, name, line) of the chat template of the first data set of chats that names one."""


@dataclass(slots=True)
class _Entry:
    """One data set."""

    peer: Peer
    at: str
    """Its dotted path: datasets[0]."""
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        self.peer.reading.know(f"{self.at}.{key}")
        return self.values.get(key)

    def line(self, key: str = "") -> int | None:
        return self.peer.line(f"{self.at}.{key}") or self.peer.line(self.at)

    def drop(self, key: str, effect: Effect, reason: str, hint: str = "") -> None:
        self.peer.reading.drop(f"{self.at}.{key}", self.values.get(key), self.line(key), effect, reason, hint)


def take_rows(peer: Peer) -> bool:
    """Take sources, lengths and what is learnt; whether there are rows to evaluate on."""
    found = _Found()
    streamed = _take_pretraining(peer, found)
    entries = peer.get("datasets")
    if streamed and entries is not None:
        peer.drop("datasets", Effect.NONE, "axolotl reads pretraining_dataset alone")
    elif entries is not None:
        sources = _sources(peer, "datasets", entries, "train", found)
        if sources:
            peer.reading.take("data.train", sources, peer.line("datasets"), "datasets")
    if peer.reading.value("data.train") is None:
        peer.reading.needs("data.train", peer.line("datasets"), "no data set could be taken")
    has_eval = _take_eval(peer, found)
    take_hooks(peer.reading, "datasets", peer.line("datasets"), found.shapes, found.plain)
    _take_template(peer, found)
    _take_lengths(peer, found, streamed)
    if peer.switch("train_on_inputs") and set(found.formats) - {"text"}:
        peer.take("data.loss_on", "all", "train_on_inputs")
    if as_bool(peer.get("shuffle_merged_datasets")) is False and not peer.switch("curriculum_sampling"):
        reason = "rows are shuffled; write trainer.train_sampling_strategy: sequential for their own order"
        peer.drop("shuffle_merged_datasets", Effect.TRAINING, reason)
    return has_eval


def _take_pretraining(peer: Peer, found: _Found) -> bool:
    """`pretraining_dataset`: texts that are streamed and packed."""
    given = peer.get("pretraining_dataset")
    if given is None or is_off(given):
        if peer.switch("streaming"):
            peer.take("data.streaming", True, "streaming")
            list_streamed(peer)
        return False
    sources = []
    for index, one in enumerate(first_pretraining(peer, given)):
        values = one if isinstance(one, dict) else {"path": one}
        at = f"pretraining_dataset[{index}]" if isinstance(given, list) else "pretraining_dataset"
        entry = _Entry(peer, at, values)
        source = _address(entry, "train")
        column = entry.get("text_column") or "text"
        entry.get("type")
        if entry.get("skip"):
            entry.drop("skip", Effect.TRAINING, "all rows are read")
        _leave(entry, peer.tool.lists["pretraining"])
        if source is not None:
            sources.append(
                {**source, "format": "text", **({"columns": {"text": column}} if column != "text" else {})}
            )
            found.formats.append("text")
    if sources:
        peer.take("data.train", sources, "pretraining_dataset")
    peer.get("streaming")
    peer.take("data.streaming", True, "pretraining_dataset")
    take_packs(peer)
    if "trainer.max_steps" not in peer.reading.taken:
        peer.reading.needs(
            "trainer.max_steps", peer.line("pretraining_dataset"), "rows that are streamed have no end"
        )
    return True


def _sources(peer: Peer, key: str, entries: Any, split: str, found: _Found) -> list[dict[str, Any]]:
    sources = []
    for index, values in enumerate(entries if isinstance(entries, list) else [entries]):
        at = f"{key}[{index}]" if isinstance(entries, list) else key
        if not isinstance(values, dict):
            peer.reading.drop(
                at, values, peer.line(at), Effect.NEEDED, "expected a mapping with path and type"
            )
            continue
        entry = _Entry(peer, at, {name: value for name, value in values.items() if value is not None})
        source = _address(entry, split)
        shape = _rows(entry, found)
        _leave(entry, peer.tool.lists["dataset"])
        if source is None or shape is None:
            continue
        columns, form, hook = shape
        names = entry.get("name")
        for name in names if isinstance(names, list) else [names]:
            one = {**source, "format": form, **({"columns": columns} if columns else {})}
            sources.append({**one, "name": str(name)} if name is not None and "name" in source else one)
        found.formats.append(form)
        if hook is not None:
            found.shapes[source["path"]] = hook
        else:
            found.plain.append(source["path"])
    return sources


def _address(entry: _Entry, split: str) -> dict[str, Any] | None:
    """Where the rows of a data set lie."""
    path, files = entry.get("path"), entry.get("data_files")
    line = entry.line("path")
    if files:
        names = files if isinstance(files, list) else [files]
        if len(names) != 1 or not isinstance(names[0], str):
            entry.drop("data_files", Effect.NEEDED, "one file for one source", "write a source for each file")
            return None
        if path in BUILDERS or path is None:
            path = names[0]
        elif isinstance(path, str) and _is_folder(entry, path):
            path = f"{path.rstrip('/')}/{names[0]}"
        else:
            entry.drop("data_files", Effect.NEEDED, "no file of a data set of the hub can be named",
                       "download it, and name the file")  # fmt: skip
            return None
    name = entry.get("name")
    given = {"name": name[0] if isinstance(name, list) and name else name, "revision": entry.get("revision")}
    given["split"] = entry.get("split") or split
    source = source_at(entry.peer.reading, f"{entry.at}.path", line, path, given)
    if source is None:
        return None
    if str(entry.values.get("ds_type")) in (*source["path"].split("."), entry.values.get("path"), "json"):
        entry.get("ds_type")  # as the files are called
    weight = as_number(entry.get("weight"))
    if weight is not None and weight != 1 and split == "train" and weight > 0:
        source["weight"] = float(weight)
    return source


def _is_folder(entry: _Entry, path: str) -> bool:
    return (Path(entry.peer.reading.file).parent / path).is_dir() or Path(path).is_dir()


def _rows(entry: _Entry, found: _Found) -> tuple[dict[str, str], str, Shape | None] | None:
    """(columns, format, hook) of a data set; None, with the reason in the reading, where it has none."""
    kind = entry.get("type")
    if entry.peer.reading.task.ranks_answers:
        return _pairs(entry, kind)
    if isinstance(kind, dict):
        prompt = _own_prompt(entry, kind)
        return None if prompt is None else ({}, "prompt-completion", prompt)
    if kind is None:
        entry.peer.reading.refuse(
            f"{entry.at}.type", entry.line(), "is not there: its rows would be tokens already"
        )
        return None
    name = str(kind)
    if name.removesuffix(".load") in TYPES:
        return {}, "prompt-completion", TYPES[name.removesuffix(".load")]
    if name == "completion":
        column = entry.get("field") or "text"
        return ({"text": str(column)} if column != "text" else {}), "text", None
    if (
        name in ("chat_template", "chat_template.default")
        or name.partition(":")[0].partition(".")[0] == "sharegpt"
    ):
        return _chat(entry, name, found)
    hint = "write a format_row that makes prompt and completion, and name its file in `python`"
    entry.drop("type", Effect.NEEDED, "its prompt is axolotl's own code", hint)
    return None


def _chat(entry: _Entry, kind: str, found: _Found) -> tuple[dict[str, str], str, Shape | None]:
    old = kind.startswith("sharegpt")
    column = str(entry.get("field_messages") or ("conversations" if old else "messages"))
    properties = entry.get("message_property_mappings")
    properties = properties if isinstance(properties, dict) else {}
    words = [
        str(properties.get(name) or entry.get(f"message_field_{name}") or fallback)
        for name, fallback in zip(("role", "content"), _PAIRS[1 if old else 0], strict=True)
    ]
    if old:
        entry.drop("type", Effect.NONE, "axolotl 0.21 reads such rows as chat_template")
    for name in set(properties) - {"role", "content"}:
        entry.peer.reading.drop(f"{entry.at}.message_property_mappings.{name}", properties[name],
                                entry.line("message_property_mappings"), Effect.TRAINING,
                                "only role and content are renamed")  # fmt: skip
    _template_of(entry, found)
    _masks(entry)
    own = _own_roles(entry)
    tools = str(entry.get("field_tools") or "tools")
    if (words[0], words[1]) not in _PAIRS or not own.items() <= _WORDS.items():
        hook = Turns(
            column,
            words[0],
            words[1],
            tuple((own or _WORDS).items()),
            tools=tools if tools != "tools" else "",
        )
        return {}, "chat", hook
    columns = {"messages": column} if column != "messages" else {}
    return columns | ({"tools": tools} if tools != "tools" else {}), "chat", None


def _own_roles(entry: _Entry) -> dict[str, str]:
    """The rows' words for roles, each with its role."""
    roles = entry.get("roles")
    pairs = roles.items() if isinstance(roles, dict) else ()
    return {str(word): str(role) for role, several in pairs for word in _listed(several)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _template_of(entry: _Entry, found: _Found) -> None:
    """The template that a data set names goes before the recipe's."""
    name, text = entry.get("chat_template"), entry.get("chat_template_jinja")
    if name is None and text is None:
        return
    given = text if name in (None, "jinja") and text is not None else name
    key = "chat_template_jinja" if given is text else "chat_template"
    if found.template is None:
        found.template = (f"{entry.at}.{key}", given, entry.line(key))
    elif found.template[1] != given:
        entry.drop(key, Effect.TRAINING, "one chat template is for all rows")


def _masks(entry: _Entry) -> None:
    learnt = entry.get("roles_to_train")
    if learnt is not None and [_WORDS.get(str(role)) for role in _listed(learnt)] != ["assistant"]:
        entry.drop("roles_to_train", Effect.TRAINING, "the assistant's turns alone are learnt, or with "
                   "data.loss_on: all everything")  # fmt: skip
    for key in ("train_on_eos", "train_on_eot"):
        value = entry.get(key)
        if value not in (None, "turn"):
            entry.drop(key, Effect.TRAINING, "the end of each turn of the assistant is learnt")


def _pairs(entry: _Entry, kind: Any) -> tuple[dict[str, str], str, Shape | None] | None:
    if str(kind) not in ("chat_template", "chat_template.default"):
        entry.drop("type", Effect.NEEDED, "its prompt is axolotl's own code",
                   "write a format_row that makes prompt, chosen and rejected")  # fmt: skip
        return None
    properties = entry.get("message_property_mappings")
    other = {
        "roles": not _own_roles(entry).items() <= _WORDS.items(),
        "message_property_mappings": isinstance(properties, dict)
        and any(name != str(column) for name, column in properties.items()),
    }
    for key in (key for key, found in other.items() if found):
        entry.drop(key, Effect.NEEDED, "other names of roles in preference rows",
                   "write a format_row that renames them")  # fmt: skip
    columns = {"prompt": str(entry.get("field_messages") or "messages")}
    columns["chosen"] = str(entry.get("field_chosen") or "chosen")
    columns["rejected"] = str(entry.get("field_rejected") or "rejected")
    return {name: column for name, column in columns.items() if name != column}, "preference", None


def _own_prompt(entry: _Entry, kind: dict[str, Any]) -> Prompt | None:
    """`type: {format: "...", field_instruction: ...}`."""
    said = {str(name): value for name, value in kind.items() if value is not None}
    turn = str(said.get("format", "{instruction} {input} "))
    alone, outer = (
        str(said.get("no_input_format", "{instruction} ")),
        str(said.get("system_format", "{system}")),
    )
    for pattern, names in ((turn, ("instruction", "input")), (alone, ("instruction",)), (outer, ("system",))):
        if unknown_fields(pattern, names) != []:
            reason = f"the braces of {shown(pattern)} are not {' and '.join(names)} alone"
            entry.drop("type", Effect.NEEDED, reason, "write a format_row")
            return None
    for name in set(said) - set(entry.peer.tool.lists["prompt"]):
        entry.peer.reading.drop(f"{entry.at}.type.{name}", said[name], entry.line("type"), Effect.NONE,
                                "no key of a prompt's pattern")  # fmt: skip
    fixed = str(said.get("system_prompt", ""))
    return Prompt(
        turn, alone, outer, fixed, fixed, str(said.get("field_system", "system")),
        str(said.get("field_instruction", "instruction")), str(said.get("field_input", "input")),
        str(said.get("field_output", "output")),
    )  # fmt: skip


def _leave(entry: _Entry, known: tuple[str, ...]) -> None:
    """What else a data set says."""
    for key, value in entry.values.items():
        if f"{entry.at}.{key}" in entry.peer.reading.seen:
            continue
        if key not in known:
            entry.drop(key, Effect.NONE, f"no key of a data set of axolotl {entry.peer.tool.version}")
        elif value is None or is_off(value):
            entry.get(key)
        else:
            left = next((left for left in DATASET_LEFT if key in left.names.split()), None)
            entry.drop(key, left.effect or Effect.TRAINING if left else Effect.TRAINING,
                       left.reason if left else "axolotl's own; no recipe key says it")  # fmt: skip


def _take_eval(peer: Peer, found: _Found) -> bool:
    tests, size = peer.get("test_datasets"), peer.get("val_set_size")
    if tests:
        rows = _sources(peer, "test_datasets", tests, "test", found)
        if rows:
            peer.take("data.eval", rows, "test_datasets")
        if size is not None and not is_off(size):
            peer.drop("val_set_size", Effect.NONE, "test_datasets are given, too")
        return bool(rows)
    if size is None:
        return False
    share = evaluation_share(peer.reading, "val_set_size", peer.line("val_set_size"), size)
    if share is not None:
        peer.take("data.eval", {"split": share}, "val_set_size", note="other rows of the same number")
    return share is not None


def _take_template(peer: Peer, found: _Found) -> None:
    name, text = peer.get("chat_template"), peer.get("chat_template_jinja")
    key, given, line = "chat_template", name, peer.line("chat_template")
    if name in (None, "jinja") and text is not None:
        key, given, line = "chat_template_jinja", text, peer.line("chat_template_jinja")
    if found.template is not None:
        if given is not None and given != found.template[1]:
            peer.drop(key, Effect.NONE, "the data set's own goes before it")
        key, given, line = found.template
    if given is None or given == "tokenizer_default":
        return
    if not {"chat", "preference"} & set(found.formats):
        peer.reading.drop(key, given, line, Effect.NONE, "no rows are made with it")
    elif key.endswith("jinja"):
        peer.reading.texts["_template.jinja"] = str(given)
        peer.reading.take("model.chat_template", "_template.jinja", line, key)
    else:
        peer.reading.drop(key, given, line, Effect.TRAINING, "axolotl's own text of that template; the "
                          "tokenizer's is used", "look with `effilaunch prepare RECIPE --show 1`, or set "
                          "model.chat_template")  # fmt: skip


def _take_lengths(peer: Peer, found: _Found, streamed: bool) -> None:
    if "data.max_length" not in peer.reading.taken and "sequence_len" not in peer.values:
        peer.default("data.max_length", 512, "sequence_len")
    given = peer.get("excess_length_strategy")
    if given not in (None, "truncate", "drop", "raise"):
        peer.drop("excess_length_strategy", Effect.NEEDED, "expected truncate, drop or raise")
        given = None
    strategy = "truncate" if given == "truncate" else "drop"
    if peer.reading.task.ranks_answers:
        take_long_pairs(peer, given)
    elif set(found.formats) == {"text"} and peer.reading.value("data.overlong") is None:
        peer.default("data.overlong", "split", "type: completion", "texts are cut into pieces there, too")
    elif set(found.formats) != {"text"}:
        if "text" in found.formats:
            peer.reading.needs("data.overlong", peer.line("datasets"), "axolotl cuts texts into pieces and "
                               "drops long rows of the others; one word is for all rows here")  # fmt: skip
        peer.reading.take("data.overlong", strategy, peer.line("excess_length_strategy"),
                          f"excess_length_strategy: {given or 'drop'}", default=given is None)  # fmt: skip
    if given == "raise" and not peer.reading.task.ranks_answers:
        peer.drop("excess_length_strategy", Effect.TRAINING, "long rows are dropped, and counted")
    if peer.switch("sample_packing") and not streamed:
        peer.take("data.packing", True, "sample_packing")
    if peer.switch("batch_flattening") and not peer.reading.value("data.packing"):
        peer.take("data.padding_free", True, "batch_flattening")


_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
_NOT_LINEAR = ("lm_head", "embed_tokens", "wte")


def take_model(peer: Peer) -> None:
    tokenizer = peer.get("tokenizer_config")
    if tokenizer is not None and tokenizer != peer.values.get("base_model"):
        peer.take("model.tokenizer", str(tokenizer), "tokenizer_config")
    if peer.values.get("base_model_config") == peer.values.get("base_model"):
        peer.get("base_model_config")
    if peer.switch("resize_token_embeddings_to_32x"):
        peer.take("model.vocab_multiple", 32, "resize_token_embeddings_to_32x")
    _take_special_tokens(peer)
    for key in ("model_type", "type_of_model"):
        if str(peer.values.get(key, "")).endswith("ForSequenceClassification"):
            peer.refuse(key, f"is {shown(peer.values[key])}: axolotl trains reward models with it")
    kernel = peer.get("attn_implementation")
    for key, name in _ATTENTION.items():
        if peer.switch(key):
            peer.take("model.attn_implementation", name, key)
    if kernel in _KERNELS:
        peer.take("model.attn_implementation", kernel, "attn_implementation")
    elif kernel is not None:
        peer.drop("attn_implementation", Effect.NONE, "a kernel that is not here; the planner chooses one")


def _take_special_tokens(peer: Peer) -> None:
    tokens = peer.get("special_tokens")
    if tokens is None:
        return
    if not isinstance(tokens, dict):
        peer.drop("special_tokens", Effect.NEEDED, "expected a mapping of tokens")
        return
    for name, value in tokens.items():
        key, line = f"special_tokens.{name}", peer.line(f"special_tokens.{name}")
        if value is None:
            peer.reading.know(key)
        elif name == "additional_special_tokens":
            _add_tokens(peer, key, value, line)
        elif name == "pad_token":
            peer.reading.drop(key, value, line, Effect.NONE, "padding is never learnt")
        else:
            peer.reading.drop(key, value, line, Effect.TRAINING, "unless the tokenizer has it already")


def _add_tokens(peer: Peer, key: str, value: object, line: int | None) -> None:
    known = peer.reading.value("model.add_tokens") or []
    try:
        peer.reading.take("model.add_tokens", [*known, *(texts(value) or [])], line, key)
    except ValueError as error:
        peer.reading.drop(key, value, line, Effect.NEEDED, f"expected {error}")


def take_lora(peer: Peer) -> bool:
    """The adapter; whether there is one."""
    kind = peer.get("adapter")
    if kind is None or is_off(kind):
        _forget_adapter(peer)
        return False
    if kind not in ("lora", "qlora"):
        peer.refuse("adapter", f"is {shown(kind)}, and of adapters there is only LoRA here")
        return True
    peer.take("adapter.type", "lora", "adapter")
    folder = peer.get("lora_model_dir")
    if folder is not None:
        _forget_adapter(peer)
        peer.take("adapter.type", "lora", "adapter")
        peer.take("adapter.path", str(folder), "lora_model_dir")
        return True
    _take_targets(peer)
    _take_peft(peer)
    peer.default("adapter.lora_dropout", 0.0, "lora_dropout")
    for key in ("lora_r", "lora_alpha"):
        if key not in peer.values:
            field = "r" if key == "lora_r" else key
            peer.reading.needs(f"adapter.{field}", None, f"{key} is not there, and axolotl has no default")
    return True


def _forget_adapter(peer: Peer) -> None:
    """Fields of an adapter that is not made: they are without effect there, too."""
    for to in [key for key in peer.reading.taken if key.startswith("adapter.")]:
        del peer.reading.taken[to]
    why = (
        "the adapter in lora_model_dir has its own"
        if "lora_model_dir" in peer.values
        else "no adapter is trained"
    )
    for name in peer.values:
        of_adapter = name.startswith(("lora_", "peft")) and name not in ("lora_model_dir", "lora_on_cpu")
        if of_adapter and not is_off(peer.values[name]):
            peer.drop(name, Effect.NONE, why)
        elif of_adapter:
            peer.get(name)


def _take_targets(peer: Peer) -> None:
    names = peer.get("lora_target_modules")
    if peer.switch("lora_target_linear"):
        peer.take("adapter.target_modules", "all-linear", "lora_target_linear")
        given = names if isinstance(names, list) else [names] if names else []
        beyond = [name for name in given if str(name).rpartition(".")[2] in _NOT_LINEAR]
        if beyond:
            reason = "all-linear is without the embeddings and the head"
            hint = "write adapter.target_modules as a list of all names"
            peer.drop("lora_target_modules", Effect.TRAINING, reason, hint)
        elif given:
            peer.drop("lora_target_modules", Effect.NONE, "lora_target_linear takes all linear layers")
    elif names:
        take_adapter(peer.reading, "target_modules", names, peer.line("lora_target_modules"),
                     "lora_target_modules")  # fmt: skip
    elif "lora_target_parameters" not in peer.values:
        peer.reading.needs("adapter.target_modules", None, "neither lora_target_modules nor "
                           "lora_target_linear is there: axolotl would adapt nothing",
                           "all-linear is what lora_target_linear means")  # fmt: skip


def _take_peft(peer: Peer) -> None:
    """`peft: {loftq_config: {loftq_bits: 4}}`."""
    given = peer.get("peft")
    loftq = given.get("loftq_config") if isinstance(given, dict) else None
    if isinstance(loftq, dict) and loftq:
        config = {"loftq_iter": 1, **loftq}
        peer.take("adapter.loftq_config", config, "peft")
        peer.take("adapter.init_lora_weights", "loftq", "peft")
    elif given:
        peer.drop("peft", Effect.TRAINING, "only its loftq_config is read")


def take_bits(peer: Peer, adapted: bool) -> None:
    four, eight, kind = peer.switch("load_in_4bit"), peer.switch("load_in_8bit"), peer.values.get("adapter")
    backend = peer.get("nf4_backend")
    if backend not in (None, "bitsandbytes"):
        peer.refuse("nf4_backend", f"is {shown(backend)}: only bitsandbytes quantises here")
    if (four or eight) and not adapted:
        key = "load_in_4bit" if four else "load_in_8bit"
        peer.refuse(key, "is true without an adapter: a quantised model cannot be trained itself",
                    "set adapter: qlora, or take it away")  # fmt: skip
    elif kind == "qlora" and not four and "lora_model_dir" not in peer.values:
        peer.refuse("adapter", "is qlora without load_in_4bit: true, which axolotl refuses")
    elif kind == "lora" and four and not eight:
        reason = "axolotl quantises with adapter: qlora only; the model stays as it is"
        peer.drop("load_in_4bit", Effect.NONE, reason, "write model.quantization: nf4 if QLoRA is meant")
    elif eight and kind == "lora":
        take_quantization(peer.reading, "int8", peer.line("load_in_8bit"), "load_in_8bit: true")
    elif four:
        _take_four_bits(peer)


def _take_four_bits(peer: Peer) -> None:
    options = peer.get("bnb_config_kwargs")
    options = options if isinstance(options, dict) else {}
    kind = str(options.get("bnb_4bit_quant_type", "nf4"))
    if kind not in ("nf4", "fp4"):
        peer.drop("bnb_config_kwargs", Effect.NEEDED, "expected the type nf4 or fp4")
        return
    double = as_bool(options.get("bnb_4bit_use_double_quant", True))
    take_quantization(
        peer.reading, kind, peer.line("load_in_4bit"), "load_in_4bit: true", double_quant=double
    )
    for name in options:
        if name not in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
            peer.reading.drop(f"bnb_config_kwargs.{name}", options[name], peer.line("bnb_config_kwargs"),
                              Effect.TRAINING, "no recipe key says it")  # fmt: skip


def take_precision(peer: Peer, adapted: bool) -> None:
    """bf16 is auto there, and without DeepSpeed the weights themselves are loaded in 16 bits."""
    bf16, fp16 = peer.get("bf16"), peer.switch("fp16")
    brain, half, full = (peer.switch(key) for key in ("bfloat16", "float16", "float32"))
    asked = str("auto" if bf16 is None else bf16).lower()
    wide = as_bool(bf16) is True or brain
    if asked == "full":
        peer.take("precision", "bf16-true", "bf16", note="no autocast there")
    elif wide or (asked == "auto" and not fp16):
        _take_wide(peer, adapted, "bf16" if wide or not adapted else "auto", "bfloat16" if brain else "bf16")
    elif fp16:
        peer.take("precision", "fp16", "fp16")
    elif half:
        peer.take("precision", "fp16-true", "float16")
    elif full:
        peer.take("precision", "fp32", "float32")
    else:
        peer.take("precision", "fp32", "bf16")
    tf32 = peer.get("tf32")
    if as_bool(tf32) is not None:
        take_field(peer.reading, "tf32", tf32, peer.line("tf32"))


def _take_wide(peer: Peer, adapted: bool, precision: str, key: str) -> None:
    by_default = key not in peer.values
    note = (
        "auto there: where the card has it"
        if precision == "bf16" and as_bool(peer.values.get(key)) is None
        else ""
    )
    if by_default:
        peer.default("precision", precision, "bf16: auto" if key == "bf16" else key, note)
    else:
        peer.take("precision", precision, key, note=note)
    if not adapted and "deepspeed" not in peer.values:
        said = f"{key}: {shown(peer.values.get(key, 'auto'))}"
        note = "axolotl loads the weights in 16 bits"
        peer.reading.take("model.dtype", "bfloat16", peer.line(key), said, note=note)


def take_steps(peer: Peer) -> None:
    micro, given = as_number(peer.values.get("micro_batch_size", 1)), peer.get("gradient_accumulation_steps")
    peer.default("trainer.per_device_train_batch_size", 1, "micro_batch_size")
    batch = as_number(peer.get("batch_size"))
    if given is not None:
        take_field(
            peer.reading, "gradient_accumulation_steps", given, peer.line("gradient_accumulation_steps")
        )
        if batch is not None:
            peer.drop("batch_size", Effect.NONE, "gradient_accumulation_steps is given too, and decides")
    elif batch is not None and micro:
        peer.take("trainer.gradient_accumulation_steps", max(1, int(batch // micro)), "batch_size",
                  note="batch_size // micro_batch_size, as for one process")  # fmt: skip
    peer.default("trainer.gradient_accumulation_steps", 1, "gradient_accumulation_steps")
    peer.default("trainer.average_tokens_across_devices", False, "average_tokens_across_devices")
    size = peer.reading.value("trainer.per_device_train_batch_size")
    if peer.reading.value("data.eval") is not None:
        peer.default("trainer.per_device_eval_batch_size", size, "eval_batch_size")
    epochs = peer.get("num_epochs")
    if epochs is not None and "trainer.max_steps" in peer.reading.taken:
        peer.drop("num_epochs", Effect.NONE, "max_steps goes before it")
    elif epochs is not None:
        take_field(peer.reading, "num_epochs", epochs, peer.line("num_epochs"), "num_train_epochs")
    elif "trainer.max_steps" not in peer.reading.taken:
        peer.default("trainer.num_train_epochs", 1.0, "num_epochs")
    seed = peer.get("seed")
    if seed is not None:
        take_argument(peer.reading, "seed", seed, peer.line("seed"))
    told = any(entry.key == "learning_rate" for entry in peer.reading.dropped)
    if "trainer.learning_rate" not in peer.reading.taken and not told:
        peer.reading.needs("trainer.learning_rate", None, "learning_rate is not there, and axolotl wants it")


def take_optimizer(peer: Peer) -> None:
    name = peer.get("optimizer")
    if name is None:
        peer.default("trainer.optim", "adamw_torch_fused", "optimizer")
    elif str(name) in OWN_OPTIMIZERS:
        peer.drop(
            "optimizer", Effect.TRAINING, "axolotl's own optimizer, which is not here", "write trainer.optim"
        )
    else:
        take_field(peer.reading, "optimizer", name, peer.line("optimizer"), "optim")
    _take_schedule(peer)
    _take_warmup(peer)
    value = peer.get("gradient_checkpointing")
    if isinstance(value, str) and value.lower() in ("offload", "offload_disk"):
        peer.take("trainer.activation_checkpointing", True, "gradient_checkpointing",
                  note="where it is kept does not matter")  # fmt: skip
    elif value is not None:
        take_argument(peer.reading, "gradient_checkpointing", value, peer.line("gradient_checkpointing"))
    for key in ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
        options = peer.get(key)
        if options is not None and not (key == "lr_scheduler_kwargs" and options == {}):
            take_argument(peer.reading, key, options, peer.line(key))
    compiled = peer.get("torch_compile")
    if as_bool(compiled) is not None:
        take_field(peer.reading, "torch_compile", compiled, peer.line("torch_compile"))
    for key, sampling in (("group_by_length", "group_by_length"), ("curriculum_sampling", "sequential"),
                          ("sample_packing_sequentially", "sequential")):  # fmt: skip
        if peer.switch(key):
            peer.take("trainer.train_sampling_strategy", sampling, key)


def _take_schedule(peer: Peer) -> None:
    name, low = peer.get("lr_scheduler"), peer.get("cosine_min_lr_ratio")
    if str(name) in OWN_SCHEDULES:
        peer.drop("lr_scheduler", Effect.TRAINING, "axolotl's own schedule, which is not here",
                  "write trainer.lr_scheduler_type")  # fmt: skip
    elif name is not None:
        take_field(peer.reading, "lr_scheduler", name, peer.line("lr_scheduler"), "lr_scheduler_type")
    else:
        peer.default("trainer.lr_scheduler_type", "cosine", "lr_scheduler")
    if low is None:
        return
    ratio = as_number(low)
    if str(name or "cosine") == "cosine" and ratio is not None and 0 < ratio < 1 and (
        "cosine_constant_lr_ratio" not in peer.values
    ):  # fmt: skip
        peer.take("trainer.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        peer.take("trainer.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "cosine_min_lr_ratio")
    elif ratio != 0:
        peer.drop("cosine_min_lr_ratio", Effect.TRAINING, "only of a cosine schedule, without a constant end")


def _take_warmup(peer: Peer) -> None:
    """Without a word axolotl warms up for 3 % of the steps, and for 100 at most."""
    for key in ("warmup_steps", "warmup_ratio"):
        value = peer.get(key)
        if value is not None:
            take_argument(peer.reading, key, value, peer.line(key))
    if not any(key in peer.values for key in ("warmup_steps", "warmup_ratio")):
        peer.default("trainer.warmup_steps", 0.03, "warmup_ratio",
                     "a share of all steps; axolotl stops at 100 steps")  # fmt: skip


def _per_epoch(peer: Peer, key: str) -> float | None:
    """`evals_per_epoch` as a share of all steps; None where there is none, 1 or more: then nothing is set."""
    times, epochs = as_number(peer.get(key)), as_number(peer.values.get("num_epochs", 1.0))
    if not times or not epochs or times < 0 or epochs < 0:
        return None
    return float(f"{1 / (times * epochs):.12g}")


def _take_interval(peer: Peer, kind: str) -> float | None:
    """Take when it is saved (`save`) or evaluated (`eval`); the share of all steps that is asked for."""
    often, share = f"{kind}s_per_epoch", _per_epoch(peer, f"{kind}s_per_epoch")
    strategy, steps = peer.get(f"{kind}_strategy"), peer.get(f"{kind}_steps")
    if share is not None and share < 1:
        peer.take(f"trainer.{kind}_steps", share, often, note="a share of all steps")
        peer.take(f"trainer.{kind}_strategy", "steps", often)
    elif steps is not None:
        take_field(peer.reading, f"{kind}_steps", steps, peer.line(f"{kind}_steps"))
        peer.take(f"trainer.{kind}_strategy", "steps", f"{kind}_steps")
    if strategy is not None:
        take_argument(peer.reading, f"{kind}_strategy", strategy, peer.line(f"{kind}_strategy"))
    return share


def take_times(peer: Peer, has_eval: bool) -> None:
    """When it is saved and evaluated, and when it stops for that."""
    if "evaluation_strategy" in peer.values:
        peer.values.setdefault("eval_strategy", peer.get("evaluation_strategy"))
    _take_saves(peer)
    names = ("eval_strategy", "eval_steps", "evals_per_epoch", "early_stopping_patience")
    given = [key for key in names if peer.get(key) is not None and not is_off(peer.values[key])]
    if has_eval:
        _take_evaluations(peer)
        return
    for key in given:
        peer.drop(key, Effect.NONE, "there are no rows to evaluate on, there neither")


def _take_evaluations(peer: Peer) -> None:
    share = _take_interval(peer, "eval")
    if share is not None and share >= 1 and peer.values.get("eval_steps") is None:
        reason = "1 / (evals x epochs) is not below 1: axolotl does not evaluate"
        peer.drop("evals_per_epoch", Effect.NONE, reason)
    peer.default("trainer.eval_strategy", "no", "eval_strategy", "axolotl evaluates only when told how often")
    patience = as_number(peer.get("early_stopping_patience"))
    if patience is not None and peer.reading.value("trainer.eval_strategy") == "no":
        reason = "nothing is evaluated during the run, there neither"
        peer.drop("early_stopping_patience", Effect.NONE, reason)
    elif patience is not None and patience >= 1:
        peer.take("early_stopping.patience", int(patience), "early_stopping_patience")


def _take_saves(peer: Peer) -> None:
    _take_interval(peer, "save")
    if not peer.reading.value("data.streaming"):  # a stream has no epochs
        peer.default("trainer.save_strategy", "epoch", "save_strategy")
    peer.default("trainer.save_total_limit", 4, "save_total_limit")


_MARKS = ("datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "adapter", "rl")
_TRACKERS = {
    "use_wandb": "wandb",
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_trackio": "trackio",
}


def tells(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are axolotl's."""
    return "base_model" in data and any(key in data for key in _MARKS)


def mapping_rows() -> list[Row]:
    """(key of axolotl, key of a recipe, note), for a page."""
    of_plugins = [entry for table in PLUGIN_KEYS.values() for entry in table]
    return rows_of((*KEYS, *DPO_KEYS), HANDLED, (*LEFT, *of_plugins))


def row_types() -> list[Row]:
    """(`type` of a data set, what it becomes, note), for a page."""
    return list(ROW_TYPES)


def read(
    text: str, file: str, overrides: Mapping[str, Any] | None = None, place: Place | None = None
) -> Reading:
    """Read a recipe of axolotl.

    overrides: what the launch line at `place` says over the file. RecipeError when the file is no YAML; a
    kind of training that is not here is among the reading's refusals.
    """
    peer = open_peer(text, file, _tool(), overrides)
    if "base_model" not in peer.values:
        peer.reading.needs("model.name_or_path", None, "base_model is not there")
    _take_task(peer)
    if (as_number(peer.values.get("max_steps", 1)) or 0) <= 0:
        peer.get("max_steps")  # as if absent
        peer.values.pop("max_steps")
    take_keys(peer, KEYS)
    take_model(peer)
    adapted = take_lora(peer)
    take_bits(peer, adapted)
    take_precision(peer, adapted)
    has_eval = take_rows(peer)
    take_steps(peer)
    take_optimizer(peer)
    take_times(peer, has_eval)
    _take_sharding(peer)
    _take_trackers(peer)
    _take_plugins(peer)
    leave_keys(peer, (*LEFT, *SHARING))
    leave_rest(peer)
    return close_peer(peer, overrides or (), place)


def _tool() -> Tool:
    return load_tool("axolotl", "axolotl", "ignores it")


def _take_task(peer: Peer) -> None:
    kind = peer.get("rl")
    name = str(kind).lower()
    if kind is None or is_off(kind):
        return
    task = task_of_tool("axolotl", name)
    if task is not None:
        peer.take("task", task.name, "rl")
        take_keys(peer, DPO_KEYS)
        if name == "ipo":
            peer.take("trainer.loss_type", "ipo", "rl")
    else:
        what = f"is {shown(kind)}, and of preference trainings there is only dpo here"
        if name not in REFUSED_TRAINING:
            what = f"is {shown(kind)}, expected dpo or ipo"
        peer.refuse("rl", what)


def _take_sharding(peer: Peer) -> None:
    config = peer.get("deepspeed")
    if config:
        take_argument(peer.reading, "deepspeed", config, peer.line("deepspeed"))
    version = peer.get("fsdp_version")
    options, words = peer.get("fsdp_config"), peer.get("fsdp")
    if options or words:
        peer.take("sharding.engine", "fsdp", "fsdp_config" if options else "fsdp")
        if words:
            take_argument(peer.reading, "fsdp", words, peer.line("fsdp"))
        if options:
            take_fsdp_options(peer.reading, "fsdp_config", options, peer.line("fsdp_config"))
    elif version is not None:
        peer.reading.know("fsdp_version")
    if "fsdp_final_state_dict_type" in peer.values:
        peer.drop("fsdp_final_state_dict_type", Effect.NONE, "whole weights are saved")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        size = as_number(peer.get(key))
        if size is not None and size > 1:
            to = "sharding.sp_size" if config else "sharding.cp_size"
            peer.take(to, int(size), key)


def _take_trackers(peer: Peer) -> None:
    used = [name for key, name in _TRACKERS.items() if peer.switch(key)]
    if "swanlab" in str(peer.values.get("plugins", "")) and peer.switch("use_swanlab"):
        used.append("swanlab")
    project = peer.get("wandb_project")
    if project and "wandb" not in used and as_bool(peer.values.get("use_wandb")) is not False:
        used.insert(0, "wandb")
    if used:
        first = next(
            (key for key in ("wandb_project", *_TRACKERS, "use_swanlab") if key in peer.values),
            "wandb_project",
        )
        peer.take("trainer.report_to", used, first)
    for key in ("wandb_project", "wandb_entity", "wandb_mode"):
        value = peer.get(key)
        if value is not None and value != "":
            peer.take(f"launch.env.{key.upper()}", str(value), key)
    if peer.get("wandb_name"):
        peer.take("trainer.run_name", str(peer.values["wandb_name"]), "wandb_name")
    target = peer.get("hub_model_id")
    if target:
        peer.take("trainer.hub_model_id", str(target), "hub_model_id")
        peer.take("trainer.push_to_hub", True, "hub_model_id")
        peer.take("trainer.hub_private_repo", True, "hub_model_id", note="always private there")


def _take_plugins(peer: Peer) -> None:
    plugins = peer.get("plugins")
    named = [str(name) for name in plugins] if isinstance(plugins, list) else []
    kernels = [key for key in peer.values if key.startswith("liger_")]
    for key in kernels:
        peer.get(key)
    if any(as_bool(peer.values[key]) for key in kernels):
        key = next(key for key in kernels if as_bool(peer.values[key]))
        peer.take("trainer.use_liger_kernel", True, key, *kernels)
    for name in named:
        plain = name.lower()
        line = peer.line("plugins")
        if _plugin_of(name) in ("liger", "cut_cross_entropy", "swanlab"):
            continue
        if "kd" in plain.split(".") or "diffusion" in plain:
            peer.refuse("plugins", f"holds {shown(name)}: another kind of training")
        else:
            peer.reading.drop("plugins", name, line, Effect.TRAINING, "a plugin of axolotl's")
    _take_plugin_keys(peer, {_plugin_of(name) for name in named})
    _leave_to_plugins(peer, [name for name in named if not _plugin_of(name)])


def _plugin_of(name: str) -> str:
    """`swanlab` of `axolotl.integrations.swanlab.SwanLabPlugin`; empty for one of somebody else's."""
    start, _, rest = name.partition("axolotl.integrations.")
    return rest.partition(".")[0] if not start else ""


def _take_plugin_keys(peer: Peer, on: set[str]) -> None:
    """Keys of axolotl's own plugins, which are read where `plugins` names them."""
    for plugin, table in PLUGIN_KEYS.items():
        if plugin in on:
            leave_keys(peer, table)
        else:
            reason = f"only axolotl's plugin {plugin} reads it, and plugins does not name that"
            leave_keys(peer, [Left(Effect.NONE, reason, entry.names) for entry in table])


def _leave_to_plugins(peer: Peer, others: list[str]) -> None:
    """With a plugin of somebody else's, a key that axolotl has not is that plugin's."""
    known = {*peer.tool.keys, *peer.reading.seen}
    for key in [key for key in peer.values if key not in known] if others else ():
        reason = f"no key of axolotl's own: the plugin {shown(others[0])} may read it"
        peer.drop(key, Effect.TRAINING, reason)
