"""What becomes of axolotl's keys: tables for its reader, and for the page about coming from it."""

from __future__ import annotations

from launcher.importing.found import Effect
from launcher.importing.peer import Key, Left, Row, if_on, switch, text, texts, tokens, whole
from launcher.importing.row_hooks import Prompt

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
