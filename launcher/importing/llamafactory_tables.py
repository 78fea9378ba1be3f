"""What becomes of LLaMA-Factory's keys: tables for its reader, and for the page about coming from it."""

from __future__ import annotations

from typing import Any

from launcher.importing.found import Effect
from launcher.importing.peer import Key, Left, Row, if_on, switch, text, texts, tokens, whole


def revision(value: Any) -> str | None:
    """A branch or a commit; main says nothing."""
    name = text(value)
    return None if name == "main" else name


KEYS: tuple[Key, ...] = (
    Key("model_name_or_path", "model.name_or_path", text),
    Key("model_revision", "model.revision", revision),
    Key("cache_dir", "model.cache_dir", text),
    Key("trust_remote_code", "model.trust_remote_code", if_on),
    Key("enable_liger_kernel", "trainer.use_liger_kernel", if_on),
    Key("preprocessing_num_workers", "data.num_proc", whole),
    Key("cutoff_len", "data.max_length", tokens, "2048 where it is absent"),
    Key("streaming", "data.streaming", if_on, "needs max_steps"),
)
LORA_KEYS: tuple[Key, ...] = (
    Key("lora_rank", "adapter.r", None, "8 where it is absent"),
    Key("lora_alpha", "adapter.lora_alpha", None, "twice the rank where it is absent"),
    Key("lora_dropout", "adapter.lora_dropout", None, "0 where it is absent"),
    Key("use_rslora", "adapter.use_rslora", switch),
    Key("use_dora", "adapter.use_dora", switch),
    Key("additional_target", "adapter.modules_to_save", texts),
)
"""With finetuning_type: lora, and no adapter that goes on."""
DPO_KEYS: tuple[Key, ...] = (
    Key("pref_beta", "trainer.beta", None, "0.1 where it is absent"),
    Key("pref_loss", "trainer.loss_type", None, "orpo and simpo are refused"),
    Key("dpo_label_smoothing", "trainer.label_smoothing"),
    Key("ld_alpha", "trainer.ld_alpha"),
)
"""With stage: dpo."""
HANDLED: tuple[Row, ...] = (
    ("stage", "task", "sft and pt are causal-lm, dpo is dpo; all others are refused"),
    ("finetuning_type", "adapter.type", "lora where it is absent; full: none; freeze and oft are refused"),
    ("lora_target", "adapter.target_modules", "all is all-linear, also where it is absent"),
    ("pissa_init", "adapter.init_lora_weights", "pissa_niter_16"),
    ("pissa_iter", "adapter.init_lora_weights", "-1: pissa"),
    ("adapter_name_or_path", "adapter.path", "one of them"),
    ("quantization_bit", "model.quantization", "4: nf4 with double quantisation; 8: int8"),
    ("quantization_type", "model.quantization", ""),
    ("double_quantization", "model.quantization", ""),
    ("quantization_method", "model.quantization", "bnb alone"),
    ("flash_attn", "model.attn_implementation", "fa2, sdpa, disabled: eager; auto says nothing"),
    ("add_tokens", "model.add_tokens", ""),
    ("add_special_tokens", "model.add_tokens", ""),
    ("pure_bf16", "precision", "bf16-true"),
    ("bf16", "precision", "fp32 where neither bf16 nor fp16 is there"),
    ("fp16", "precision", ""),
    ("disable_gradient_checkpointing", "trainer.activation_checkpointing", "false where it is true"),
    ("use_reentrant_gc", "trainer.activation_checkpointing_kwargs", "where it is there"),
    ("packing", "data.packing", "pt packs where it is absent"),
    ("neat_packing", "data.packing", ""),
    ("template", "model.chat_template", "listed: the tokenizer's is used"),
    ("train_on_prompt", "data.loss_on", "all"),
    ("mask_history", "data.loss_on", "completion"),
    ("dataset", "data.train", "by dataset_info.json"),
    ("dataset_dir", "data.train", "where dataset_info.json lies: data where it is absent"),
    ("eval_dataset", "data.eval", ""),
    ("val_size", "data.eval", "a share"),
    ("mix_strategy", "data.train", "concat"),
    ("compute_accuracy", "data.metrics", "accuracy"),
    ("early_stopping_steps", "early_stopping.patience", ""),
    ("disable_shuffling", "trainer.train_sampling_strategy", "sequential"),
    ("do_train", "", "must be true"),
)
"""(key, recipe key, note) of what the reader looks at itself. All others are TrainingArguments."""

_SAME = Effect.NONE
_OTHER = Effect.TRAINING
LEFT: tuple[Left, ...] = (
    Left(_SAME, "read from the model", "use_fast_tokenizer resize_vocab init_special_tokens"),
    Left(_SAME, "`run --output-dir` decides it", "output_dir overwrite_output_dir adapter_folder"),
    Left(_SAME, "prepared data is kept by `prepare`", """overwrite_cache preprocessing_batch_size
        data_shared_file_system"""),
    Left(_SAME, "10,000 rows are shuffled at a time here", "buffer_size"),
    Left(_SAME, "speed and memory only; the planner chooses", """low_cpu_mem_usage offload_folder use_kv_cache
        use_unsloth use_unsloth_gc use_v1_kernels device_map quantization_device_map use_kt kt_weight_path
        kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size
        compute_dtype block_diag_attn model_max_length"""),
    Left(_SAME, "not part of a run: `generate`, `merge` and `eval` do it", """infer_backend infer_dtype
        export_dir export_size export_device export_quantization_bit export_quantization_dataset
        export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id
        vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen
        sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend eval_num_beams do_sample
        temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
        skip_special_tokens predict_with_generate generation_max_length generation_num_beams
        generation_config"""),
    Left(_SAME, "`report` draws the curves", "plot_loss print_param_status"),
    Left(_SAME, "tokens per second are always reported", "include_effective_tokens_per_second"),
    Left(_SAME, "the launcher sets it", "ray_num_workers ray_init_kwargs master_addr master_port"),
    Left(_SAME, "for looking at the tool", """enable_torch_profiler profiler_output_dir profiler_wait_steps
        profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes
        profiler_profile_memory profiler_with_stack profile_modules"""),
    Left(_SAME, "no tracker here is SwanLab", """use_swanlab swanlab_project swanlab_workspace
        swanlab_run_name swanlab_mode swanlab_logdir swanlab_lark_webhook_url"""),
    Left(_SAME, "of a model that sees or hears", """freeze_vision_tower freeze_multi_modal_projector
        freeze_language_model image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches
        video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate
        media_dir"""),
    Left(_SAME, "each evaluation is over all rows", "eval_on_each_dataset"),
    Left(_SAME, "the adapter is saved as peft has it", "pissa_convert"),
    Left(_SAME, "of an adapter that is not LoRA", "module_dropout oft_rank oft_block_size oft_target"),
    Left(_SAME, "of a kind of training that this file does not ask for", """pref_bco_weight kto_chosen_weight
        kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
        ppo_whiten_rewards reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
        freeze_trainable_layers freeze_trainable_modules freeze_extra_modules loraplus_lr_embedding
        galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise
        apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
        apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
        badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose asft_alpha eaft_alpha
        hyper_parallel_args fp8_backend fp8_enable_fsdp_float8_all_gather"""),
    Left(_OTHER, "all rows are used: a recipe has no limit of rows", "max_samples"),
    Left(_OTHER, "sources are laid one after another; `weight` of a source says how often", """mix_strategy
        interleave_probs"""),
    Left(_OTHER, "one rate for all parameters here", "loraplus_lr_ratio"),
    Left(_OTHER, "the model is trained as its checkpoint describes it", """rope_scaling shift_attn
        moe_aux_loss_coef upcast_layernorm upcast_lmhead_output new_special_tokens_config
        split_special_tokens"""),
    Left(_OTHER, "the chat template alone makes the text", "default_system tool_format preserve_thinking"),
    Left(_OTHER, "an adapter goes on, none is laid over it", "create_new_adapter"),
    Left(_OTHER, "the reference is the model before training", """ref_model ref_model_adapters
        ref_model_quantization_bit"""),
    Left(_OTHER, "the loss of the supervised answer is not added", "pref_ftx"),
    Left(_OTHER, "padding never contributes to the loss here", "ignore_pad_token_for_loss"),
    Left(_OTHER, "an optimizer of its own, which is not here", """use_galore use_apollo use_badam
        use_adam_mini use_muon"""),
    Left(_OTHER, "a loss of its own, which is not here", "use_dft_loss use_asft_loss use_eaft_loss"),
    Left(None, "another kind of training", """use_llama_pro use_mca use_hyper_parallel mixture_of_depths"""),
    Left(None, "8-bit floats are not trained here", "fp8"),
    Left(None, "it starts at random", "train_from_scratch",
         "write model.config in place of model.name_or_path"),
    Left(None, "rows that are tokens already are not read", "tokenized_path"),
)  # fmt: skip
"""Keys that stay behind."""
OPTIONS: tuple[tuple[str, str], ...] = (
    ("use_galore", """galore_target galore_rank galore_update_interval galore_scale galore_proj_type
        galore_layerwise"""),
    ("use_apollo", """apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj
        apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front"""),
    ("use_badam", """badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio
        badam_mask_mode badam_verbose"""),
    ("use_asft_loss", "asft_alpha"),
    ("use_eaft_loss", "eaft_alpha"),
    ("loraplus_lr_ratio", "loraplus_lr_embedding"),
)  # fmt: skip
"""A key of LEFT that changes the training, and the keys that are read with it alone."""
SECRETS = ("hf_hub_token", "ms_hub_token", "om_hub_token", "swanlab_api_key", "swanlab_lark_secret")
