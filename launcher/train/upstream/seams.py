"""The private parts of other projects that launcher.train depends on, as data; imports none of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seam:
    """One private part of upstream."""

    module: str
    """The module whose source was read."""
    name: str
    """Qualified name of the function or class in it; empty: the whole file."""
    read: tuple[str, int]
    """(version of the package, line of `name`, else of the first text of `relies`)."""
    used_in: str
    """Our module, below launcher/train."""
    kind: str
    """override: a method is replaced; call: it is called or read; patch: an attribute of upstream is set;
    context: it calls our code, and the order of its steps matters."""
    reason: str
    relies: tuple[str, ...] = ()
    """Pieces of upstream's code, with single spaces, that we count on."""


_TRAINER = "transformers.trainer"
_SEAM_TRAINER = "upstream/trainer_seams.py"
_MODELS = "upstream/model_seams.py"
_EXPERTS = "upstream/expert_seams.py"
_TORCH = "upstream/torch_seams.py"
_DEEPSPEED = "upstream/deepspeed_seams.py"
_FSDP = "upstream/fsdp_seams.py"

SEAMS = (
    # --- transformers.Trainer: overridden ---------------------------------------------------------
    Seam(
        _TRAINER, "Trainer._maybe_log_save_evaluate", ("5.23.0", 2230), _SEAM_TRAINER, "override",
        "A stop cuts an evaluation short, and a checkpoint without room is left out: callbacks can neither "
        "end an evaluation nor keep on_save from being called.",
        ("if self.control.should_evaluate:", "metrics = self._evaluate(trial, ignore_keys_for_eval)",
         "self._save_checkpoint(model, trial) self.control = self.callback_handler.on_save("),
    ),
    Seam(
        _TRAINER, "Trainer.evaluation_loop", ("5.23.0", 2896), "trainers.py", "context",
        "Weighs the batches of an evaluation alike, and cuts what is gathered; gather_function is read anew.",
        ("losses = self.gather_function(losses.repeat(batch_size))",
         "self.gather_function = self.accelerator.gather_for_metrics"),
    ),
    Seam(
        _TRAINER, "Trainer._run_epoch", ("5.23.0", 1819), _SEAM_TRAINER, "override",
        "A resumed run that had ended trains no step: upstream looks at should_training_stop only after one. "
        "The order of a sampler below SkipBatchSampler is set for the epoch.",
        ("train_dataloader.set_epoch(epoch)", "skip_first_batches(train_dataloader",
         "batch_samples, num_items_in_batch = self.get_batch_samples(",
         "tr_loss_step = self.training_step(model, inputs, num_items_in_batch)"),
    ),
    Seam(
        _TRAINER, "Trainer._inner_training_loop", ("5.23.0", 1583), _SEAM_TRAINER, "context",
        "_run_epoch gets the epoch by keyword; state is restored before on_train_begin, and eval_on_start is "
        "read after it.",
        ("self._run_epoch( model=model, epoch=epoch,",
         "self.control = self.callback_handler.on_train_begin(args, self.state, self.control) "
         "if args.eval_on_start:"),
    ),
    Seam(
        _TRAINER, "Trainer._init_training_state", ("5.23.0", 1678), _SEAM_TRAINER, "context",
        "Restores the state alone where restore_callback_states_from_checkpoint is off; trainers.py restores "
        "the rest in on_train_begin.",
        ("TrainerState.load_from_json(", "self._load_callback_state()"),
    ),
    Seam(
        _TRAINER, "Trainer._save_checkpoint", ("5.23.0", 3355), _SEAM_TRAINER, "override",
        "A checkpoint is written aside, hashed and moved to its place when it is whole; no callback is "
        "around the writing. It goes to args.output_dir, and is pushed in the middle where args.push_to_hub "
        "is set.",
        ("run_dir = self._get_output_dir(trial=trial)", "self.save_model(output_dir, _internal_call=True)",
         "if self.args.push_to_hub: self._push_from_checkpoint(output_dir)"),
    ),
    Seam(
        _TRAINER, "Trainer._get_output_dir", ("5.23.0", 3336), _SEAM_TRAINER, "context",
        "Is args.output_dir outside of a hyperparameter search.",
        ("else: run_dir = self.args.output_dir return run_dir",),
    ),
    Seam(
        _TRAINER, "Trainer._load_from_checkpoint", ("5.23.0", 3602), _SEAM_TRAINER, "override",
        "Weights are saved under other names than the modules have; upstream would only warn of those that "
        "it does not find, and train on with the initial ones.",
        ("load_result = model.load_state_dict(state_dict, False)",),
    ),
    Seam(
        _TRAINER, "Trainer._load_best_model", ("5.23.0", 3735), _SEAM_TRAINER, "override",
        "As _load_from_checkpoint; a stopped run keeps its last weights; DeepSpeed refuses states that other "
        "ranks wrote.",
        ("deepspeed_load_checkpoint(", "load_result = model.load_state_dict(state_dict, False)"),
    ),
    Seam(
        _TRAINER, "Trainer._finalize_training", ("5.23.0", 1993), _SEAM_TRAINER, "context",
        "Loads the best weights before on_train_end.",
        ("if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None: "
         "self._load_best_model()",),
    ),
    Seam(
        _TRAINER, "Trainer._track_num_input_tokens", ("5.23.0", 2709), _SEAM_TRAINER, "override",
        "Upstream gathers from all ranks at each micro-batch, and counts rows twice that ranks share. `log` "
        "reports the count only where include_num_input_tokens_seen is set, so it cannot be turned off.",
        ("self.state.num_input_tokens_seen += self.accelerator.gather(input_tokens).sum().item()",),
    ),
    Seam(
        _TRAINER, "Trainer._get_grad_norm", ("5.23.0", 2781), "optim_in_backward.py", "context",
        "Asks accelerate for the norm of gradients that sharding.optim_in_backward has used and freed.",
        ('grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))',),
    ),
    # --- transformers.Trainer: called -------------------------------------------------------------
    Seam(
        _TRAINER, "Trainer._evaluate", ("5.23.0", 3294), _SEAM_TRAINER, "call",
        "An evaluation that a stop left out is made up for, with the step of ReduceLROnPlateau.",
        ("metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)", "self.lr_scheduler.step("),
    ),
    Seam(
        _TRAINER, "Trainer._determine_best_metric", ("5.23.0", 3424), _SEAM_TRAINER, "call",
        "The same for the best metric so far.",
        ("self.state.best_metric = metric_value", "self.state.best_global_step = self.state.global_step"),
    ),
    Seam(
        _TRAINER, "Trainer._get_collator_with_removed_columns", ("5.23.0", 1230), _SEAM_TRAINER, "call",
        "The loader of a stream, which accelerate would divide among the ranks again, collates as upstream.",
        ("RemoveColumnsCollator(",),
    ),
    Seam(
        _TRAINER, "", ("5.23.0", 627), _SEAM_TRAINER, "call",
        "The micro-batch, with auto_find_batch_size the one that was found.",
        ("_train_batch_size", "self._train_batch_size = args.train_batch_size"),
    ),
    Seam(
        _TRAINER, "Trainer._save", ("5.23.0", 4131), _SEAM_TRAINER, "call",
        "FSDP's shards are gathered here; save_model takes no state dict.",
        ("self.model.save_pretrained(output_dir, state_dict=state_dict",),
    ),
    Seam(
        "transformers.trainer_pt_utils", "LengthGroupedSampler", ("5.23.0", 519), "trainers.py", "patch",
        "Draws its order from the global generator, which a resumed run has at another place: the loader's "
        "sampler is replaced by one with a generator of its own.",
        ("indices = get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator)",),
    ),
    # --- transformers: models ---------------------------------------------------------------------
    Seam(
        "transformers.modeling_utils", "", ("5.23.0", 1105), _MODELS, "call",
        "The classes of a model's repeated layers, for compilation and FSDP.", ("_no_split_modules",),
    ),
    Seam(
        "transformers.modeling_utils", "", ("5.23.0", 1122), _MODELS, "call",
        "Weights that a save leaves out are not missing from a checkpoint.", ("_keys_to_ignore_on_save",),
    ),
    Seam(
        "transformers.modeling_utils", "", ("5.23.0", 3227), _MODELS, "patch",
        "Inputs of checkpointed layers go to host memory ahead of their use; `offload` of "
        "activation_checkpointing_enable has the computation wait for each copy.",
        ("_gradient_checkpointing_func",
         'setattr(module, "_gradient_checkpointing_func", gradient_checkpointing_func)'),
    ),
    Seam(
        "transformers.modeling_layers", "GradientCheckpointingLayer", ("5.23.0", 54), _MODELS, "context",
        "Passes the layer's input by position, and nothing else that a checkpoint would keep.",
        ("return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)",),
    ),
    Seam(
        "transformers.integrations.peft", "", ("5.23.0", 76), _MODELS, "call",
        "An adapter's folder given as a model is refused.", ("_hf_peft_config_loaded",),
    ),
    Seam(
        "transformers.core_model_loading", "", ("5.23.0", 1877), _MODELS, "patch",
        "A merge over a checkpoint that is stored in 4 or 8 bits: the conversions that read it have no "
        "reverse, and a save raises NotImplementedError. A text model read from a checkpoint for text and "
        "images would be saved under that checkpoint's names.",
        ("_weight_conversions", 'weight_conversions = getattr(model, "_weight_conversions", None)'),
    ),
    Seam(
        "transformers.integrations.sdpa_attention", "use_gqa_in_sdpa", ("5.23.0", 43), _MODELS, "patch",
        "Leaves grouped keys to torch on every GPU; those without a kernel for them compute plain attention.",
        ("return attention_mask is None and key.shape[-1] == value.shape[-1] <= 256",),
    ),
    Seam(
        "transformers.modeling_utils", "", ("5.23.0", 1125), _MODELS, "call",
        "Whether a model has scaled dot product attention.", ("_supports_sdpa",),
    ),
    Seam(
        "transformers.configuration_utils", "", ("5.23.0", 493), _MODELS, "call",
        "A merged model is read back with the attention that it was loaded with, and make_model makes one "
        "with the plan's.", ("_attn_implementation",),
    ),
    Seam(
        "transformers.integrations.moe", "_grouped_mm", ("5.23.0", 355), _MODELS, "patch",
        "Grouped products of fake tensors are refused for all but bfloat16, and the fallback keeps more.",
        ("grouped_mm(input.to(weight.dtype), weight, offs=offs)",),
    ),
    Seam(
        "transformers.masking_utils", "find_packed_sequence_indices", ("5.23.0", 750), _MODELS, "patch",
        "Reads the values of positions: the host waits for the device, and fake tensors do not have any.",
        ("packed_sequence_mask = (position_diff != 1).cumsum(-1)",
         "(packed_sequence_mask[:, -1] == 0).all()"),
    ),
    Seam(
        "transformers.quantizers.auto", "", ("5.23.0", 77), _EXPERTS, "patch",
        "Which quantizer from_pretrained takes, for the time of a load.",
        ("AUTO_QUANTIZER_MAPPING", '"bitsandbytes_4bit": Bnb4BitHfQuantizer'),
    ),
    Seam(
        "transformers.core_model_loading", "convert_and_load_state_dict_in_model", ("5.23.0", 1606), _EXPERTS,
        "context", "A parameter is read, merged from its experts and quantised before the next one is read.",
        ("hf_quantizer.param_needs_quantization(model, renamed_key)",
         "mapping.quantization_operation = hf_quantizer.get_quantize_ops()",
         "or has_on_the_fly_quantization ): thread_pool = None"),
    ),
    Seam(
        "transformers.masking_utils", "", ("5.23.0", 72), _MODELS, "call",
        "Which tokens a mask shows follows from the functions that it is made of, without reading it.",
        ("causal_mask_function", "return and_mask", "return or_mask"),
    ),
    # --- trl --------------------------------------------------------------------------------------
    Seam(
        "trl.trainer.base_trainer", "_BaseTrainer._send_telemetry", ("1.16.0", 82), "upstream/trl_seams.py",
        "override", "No run sends telemetry; the environment variable counts only before the first import.",
    ),
    Seam(
        "trl.trainer.dpo_trainer", "DPOTrainer._prepare_dataset", ("1.16.0", 1036), "upstream/trl_seams.py",
        "override", "Rows are prepared before the ranks start, by this same method without a trainer.",
        ("self._tokenizer", "args.max_length"),
    ),
    Seam(
        "trl.trainer.dpo_trainer", "DPOTrainer.log", ("1.16.0", 1699), "upstream/trl_seams.py", "context",
        "Takes the mean of micro-batches, of whatever size, as RewardTrainer and KTOTrainer do.",
        ("metrics = {key: sum(val) / len(val) for key, val in self._metrics[mode].items()}",),
    ),
    Seam(
        "trl.trainer.dpo_trainer", "DPOTrainer.__init__", ("1.16.0", 513), "upstream/trl_seams.py",
        "patch", "Loads the model a second time as the reference: which a loss without one never reads, and "
        "under FSDP, before log-probabilities are computed, by a name that a random, a GGUF or a local model "
        "does not have. create_model_from_path of the module is replaced meanwhile.",
        ("self.ref_model = create_model_from_path(ref_model_path", "if self.ref_model is not None:",
         "(args.precompute_ref_log_probs and not self.is_fsdp_enabled)"),
    ),
    Seam(
        "trl.trainer.kto_trainer", "KTOTrainer.__init__", ("1.16.0", 567), "upstream/trl_seams.py",
        "patch", "Loads the reference under FSDP as DPOTrainer does.",
        ("self.ref_model = create_model_from_path(ref_model_path",
         "(args.precompute_ref_log_probs and not self.is_fsdp_enabled)"),
    ),
    Seam(
        "trl.trainer.kto_trainer", "KTOTrainer._prepare_dataset", ("1.16.0", 1044), "upstream/trl_seams.py",
        "override", "Rows are prepared before the ranks start, by this same method without a trainer; KL "
        "pairs are made of each batch, or of neighbours where their log-probabilities are computed once.",
        ("self._tokenizer", "args.max_length", "if self.calculate_KL:",
         '= [examples["completion_ids"][-1]] + examples["completion_ids"][:-1]'),
    ),
    Seam(
        "trl.trainer.kto_trainer", "KTOTrainer._compute_loss", ("1.16.0", 1370), "upstream/trl_seams.py",
        "patch", "A side has its means of a micro-batch, which are weighed by its rows or tokens. The KL "
        "term is that of a batch: in evaluations `_compute_kl_logps` gives the means of all batches instead.",
        ("KL_logps = self._compute_kl_logps(model, batch)", 'ref_KL_logps = batch["ref_KL_logps"]',
         "ref_KL_logps = self._compute_kl_logps(self.ref_model, batch)",
         "kl = (KL_logps - ref_KL_logps).mean().detach()",
         "if total_chosen_tokens > 0:", "if all_num_chosen > 0:", "if all_num_rejected > 0:",
         'self._metrics[mode]["logps/rejected"].append(',
         'mode = "train" if self.model.training else "eval"'),
    ),
    Seam(
        "trl.trainer.reward_trainer", "RewardTrainer._prepare_dataset", ("1.16.0", 649),
        "upstream/trl_seams.py", "override", "Rows are prepared before the ranks start.",
    ),
    Seam(
        "trl.trainer.grpo_trainer", "GRPOTrainer._generate_and_score_completions", ("1.16.0", 2324),
        "upstream/trl_seams.py", "call",
        "`_logs` holds the completions and rewards of all ranks, each generation after the one before.",
        ('self._logs["prompt"].extend(gather_object(prompts))',
         'self._logs["rewards"][name].extend(rewards_per_func[:, i].tolist())',
         'self._logs["advantages"].extend(all_process_advantages.tolist())'),
    ),
    Seam(
        "trl.trainer.grpo_trainer", "GRPOTrainer._prepare_inputs", ("1.16.0", 1522),
        "upstream/trl_seams.py", "context",
        "One generation serves several steps: `_step` and `_buffered_inputs` are in no checkpoint of trl, so "
        "ours have them.",
        ("generate_every = self.args.steps_per_generation * self.num_iterations",
         "if self._step % generate_every == 0 or self._buffered_inputs is None:",
         "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]"),
    ),
    Seam(
        "trl.trainer.grpo_trainer", "GRPOTrainer.__init__", ("1.16.0", 302),
        "upstream/trl_seams.py", "patch",
        "Loads the reference model by the name in the policy's configuration, which a random, a GGUF or a "
        "local model does not have: create_model_from_path of the module is replaced meanwhile.",
        ("self.ref_model = create_model_from_path(get_config_model_id(self.model.config)",
         'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}'),
    ),
    # --- peft -------------------------------------------------------------------------------------
    Seam(
        "peft.utils.transformers_weight_conversion", "convert_peft_adapter_state_dict_for_transformers",
        ("0.21.2", 536), _MODELS, "patch",
        "Renames the weights of an adapter as those of a checkpoint, also where they have the model's names. "
        "peft/utils/save_and_load.py imports it when an adapter is loaded.",
        ("model: torch.nn.Module, peft_config, adapter_state_dict: dict[str, torch.Tensor], "
         'adapter_name: str = "default", )',),
    ),
    Seam(
        "peft.tuners.tuners_utils", "BaseTunerLayer._cast_input_dtype", ("0.21.2", 2215), _MODELS, "patch",
        "Casts, and so copies, each input before autocast would; its public switch also turns the cast off "
        "where no autocast is.",
    ),
    Seam(
        "peft.tuners.lora.layer", "ParamWrapper", ("0.21.2", 2335), _EXPERTS, "context",
        "Over a parametrised parameter it registers a second parametrization in torch's cache, which then "
        "holds the inner of two adapted parameters without its adapter; merge adds to a temporary tensor.",
        ("with self._activate_lora(self.active_adapters):", "def get_param(self):",
         "with nn.utils.parametrize.cached():"),
    ),
    # --- DeepSpeed, and accelerate around it ------------------------------------------------------
    Seam(
        "deepspeed.runtime.engine", "DeepSpeedEngine._commit_decoupled_checkpoint", ("0.19.8", 4968),
        _DEEPSPEED, "call", "A background writer is waited for before a checkpoint is hashed.",
    ),
    Seam(
        "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer._update_model_bit16_weights",
        ("0.19.8", 889), _DEEPSPEED, "call",
        "After a save with AutoTP parameters are copies beside ZeRO's buffers until the next step.",
    ),
    Seam(
        "deepspeed.utils.groups", "_get_sequence_parallel_rank", ("0.19.8", 876), _DEEPSPEED, "call",
        "Which part of a sample's tokens this rank takes.",
    ),
    Seam(
        "accelerate.accelerator", "Accelerator.deepspeed_ulysses_dl_adapter", ("1.15.0", 2497), _DEEPSPEED,
        "patch", "Its loader has no data set, so that a run cannot be resumed within an epoch.",
    ),
    Seam(
        "accelerate.accelerator", "", ("1.15.0", 2172), _DEEPSPEED, "patch",
        "Ranks of a dimension `tp` of this mesh get the same rows.", ("ds_device_mesh",),
    ),
    # --- FSDP2 over CPU processes -------------------------------------------------------------------
    Seam(
        "accelerate.state", "AcceleratorState.__init__", ("1.15.0", 901), _FSDP, "context",
        "Looks at an FSDP plugin for ranks with devices alone: `_shared_state` of PartialState is set.",
        ("self.__dict__.update(PartialState._shared_state)", "DistributedType.MULTI_GPU,",
         "self.distributed_type = DistributedType.FSDP"),
    ),
    Seam(
        "accelerate.utils.fsdp_utils", "fsdp2_prepare_model", ("1.15.0", 751), _FSDP, "context",
        "Imports fully_shard when it shards, which gets a mesh of CPU ranks: torch's own choice is the kind "
        "of device that it was built for.",
        ("from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard",
         "fully_shard(module, **fsdp2_kwargs)"),
    ),
    # --- torch ------------------------------------------------------------------------------------
    Seam(
        "torch.utils._python_dispatch", "TorchDispatchMode", ("2.13.0", 72), _TORCH, "call",
        "Memory is followed operation by operation; there is no public name.",
    ),
    Seam(
        "torch.utils._pytree", "tree_leaves", ("2.13.0", 1521), _TORCH, "call",
        "The tensors of an operation's result; torch.utils.pytree needs another package for it.",
    ),
    Seam(
        "torch._subclasses.fake_tensor", "FakeTensorMode", ("2.13.0", 1432), _TORCH, "call",
        "A step is traced without memory.", ("allow_non_fake_inputs",),
    ),
    Seam(
        "torch.amp.autocast_mode", "autocast.__exit__", ("2.13.0", 343), _TORCH, "patch",
        "The casts that it kept are freed in their order, so that two traces of a step are alike.",
        ("torch.clear_autocast_cache()",),
    ),
    Seam(
        "torch.storage", "", ("2.13.0", 42), _TORCH, "call",
        "Identifies a storage; data_ptr() is 0 for fake ones and ambiguous for empty ones.", ("_cdata",),
    ),
    Seam(
        "torch.autograd.graph", "", ("2.13.0", 741), _TORCH, "call",
        "Whether a layer has changed its input while that was copied to the host.", ("tensor._version",),
    ),
    Seam(
        "torch.distributed.tensor._api", "", ("2.13.0", 26), _TORCH, "call",
        "to_local() is an operation of its own, which the memory meter would count.", ("_local_tensor",),
    ),
    Seam(
        "torch.library", "_scoped_library", ("2.13.0", 671), _TORCH, "patch",
        "CUDA's autocast rules hold for the time of a trace; torch.library.Library has no end.",
    ),
    Seam(
        "torch._dynamo.config", "", ("2.13.0", 133), _TORCH, "patch",
        "A layer that cannot be compiled trains as it is.", ("suppress_errors",),
    ),
    Seam(
        "torch._compile", "_disable_dynamo", ("2.13.0", 17), _TORCH, "call",
        "torch.compiler.disable imports the compiler at once, which takes seconds.",
    ),
    Seam(
        "torch.cuda", "", ("2.13.0", 1183), _TORCH, "call",
        "get_arch_list() is empty without a driver.", ("_cuda_getArchFlags",),
    ),
    Seam(
        "torch.distributed.distributed_c10d", "", ("2.13.0", 56), _TORCH, "patch",
        "Groups that libraries make without a timeout get trainer.ddp_timeout.",
        ("default_pg_timeout", "return default_pg_timeout", "return default_pg_nccl_timeout"),
    ),
    # --- sentence-transformers ----------------------------------------------------------------------
    Seam(
        "sentence_transformers.base.losses.gradcache", "_backward_hook", ("6.2.0", 316),
        "upstream/sentence_seams.py", "context",
        "Cached losses reduce gradients once for a micro-batch where the model, or what it calls "
        "`_orig_mod`, is DDP.",
        ('getattr(loss_obj.model, "_orig_mod", loss_obj.model)',),
    ),
    # --- tqdm -------------------------------------------------------------------------------------
    Seam(
        "tqdm.std", "tqdm.display", ("4.70.1", 1471), "progress.py", "patch",
        "Bars of all libraries write to the status of the rank and not into its log.",
    ),
)  # fmt: skip
"""Not in the list: public methods that are replaced on one instance (`forward` and `loss_function` in
loss.py, `save_pretrained` in processing.py, `optimizer.step` in deepspeed_seams.py), and the classes of a
traced model's layers (trace/kernels.py)."""
