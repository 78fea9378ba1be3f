"""A recipe of axolotl: tables of its keys, and what needs more than one key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from launcher.importing.adapters import (
    FourBits,
    Lora,
    take_four_bits,
    take_kbit_norms,
    take_lora,
    take_quantization,
)
from launcher.importing.arguments import Field, fields, take_fsdp_options
from launcher.importing.axolotl_rows import take_rows
from launcher.importing.conversions import (
    To,
    as_bool,
    as_number,
    if_on,
    is_off,
    label,
    listed,
    on,
    several,
    switch,
    text,
    texts,
    tokens,
    whole,
)
from launcher.importing.key_tables import Keys, Left, Peer, Tool, load_tool, open_peer
from launcher.importing.reading import Effect, Given, Reading, shown
from launcher.importing.rollouts import GENERATION_KEYS, take_rollouts, take_scale
from launcher.tasks import TASKS, task_of_tool, task_with_images, words_of_tool
from launcher.tasks.grpo import KEY


def _elsewhere(value: Any) -> str | None:
    """Where activation_offloading keeps activations."""
    return "cpu" if value in ("legacy", "disk") else on("cpu")(value)


MODEL: Keys = {"base_model": To("model.name_or_path", text, required="")}
STEPS: Keys = {
    "learning_rate": Field("trainer.learning_rate", required=", and axolotl requires it"),
    "micro_batch_size": Field("trainer.per_device_train_batch_size", default=1),
    "gradient_accumulation_steps": Field("trainer.gradient_accumulation_steps", default=1),
}
SAVING: Keys = {"save_total_limit": Field("trainer.save_total_limit", default=4)}
KEYS: Keys = {
    **MODEL,
    "model_revision": To("model.revision", text),
    "revision_of_model": To("model.revision", text),
    "trust_remote_code": To("model.trust_remote_code", if_on),
    "tokens": To("model.add_tokens", texts),
    "resize_token_embeddings_to_32x": To("model.vocab_multiple", on(32), "32"),
    "flash_attention": To("model.attn_implementation", on("flash_attention_2"), "flash_attention_2"),
    "sdp_attention": To("model.attn_implementation", on("sdpa"), "sdpa"),
    "flex_attention": To("model.attn_implementation", on("flex_attention"), "flex_attention"),
    "eager_attention": To("model.attn_implementation", on("eager"), "eager"),
    **STEPS,
    "eval_batch_size": Field("trainer.per_device_eval_batch_size", "micro_batch_size where it is absent"),
    "max_steps": Field("trainer.max_steps", "takes precedence over num_epochs"),
    **SAVING,
    **fields("trainer", """optim_args optim_target_modules weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm neftune_noise_alpha logging_steps logging_nan_inf_filter save_only_model
        load_best_model_at_end metric_for_best_model greater_is_better eval_on_start full_determinism
        ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters dataloader_num_workers
        dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last torch_empty_cache_steps
        torch_compile_backend torch_compile_mode hub_strategy hub_revision"""),
    "noisy_embedding_alpha": Field("trainer.neftune_noise_alpha"),
    "activation_offloading": To("sharding.offload_activations", _elsewhere, "legacy and disk count as true"),
    "tf32": To("trainer.tf32", as_bool, "auto sets nothing"),
    "torch_compile": To("trainer.torch_compile", as_bool, "auto sets nothing"),
    "group_by_length": To("trainer.train_sampling_strategy", on("group_by_length"), "group_by_length"),
    "curriculum_sampling": To("trainer.train_sampling_strategy", on("sequential"), "sequential"),
    "sample_packing_sequentially": To("trainer.train_sampling_strategy", on("sequential"), "sequential"),
    "sequence_len": To("data.max_length", tokens, "512 where it is absent"),
    "dataset_num_proc": To("data.num_proc", whole),
    "dataset_processes": To("data.num_proc", whole),
    "tensor_parallel_size": To("sharding.tp_size", whole),
    "pad_to_multiple_of": To("data.pad_to_multiple_of", whole),
    "wandb_project": To("launch.env.WANDB_PROJECT", label, "and report_to wandb"),
    "wandb_entity": To("launch.env.WANDB_ENTITY", label),
    "wandb_mode": To("launch.env.WANDB_MODE", label),
    "wandb_name": To("trainer.run_name", label),
}  # fmt: skip
"""Each alone is one recipe key."""
LORA = Lora(
    "adapter",
    {
        "lora_r": Field("adapter.r", required=", and axolotl has no default"),
        "lora_alpha": Field("adapter.lora_alpha", required=", and axolotl has no default"),
        "lora_dropout": Field("adapter.lora_dropout", default=0.0),
        **fields("adapter", """target_parameters modules_to_save rank_pattern alpha_pattern fan_in_fan_out
            bias""", "lora_"),
        **fields("adapter", """use_dora use_rslora layer_replication init_lora_weights
            trainable_token_indices ensure_weight_tying layers_to_transform layers_pattern""", "peft_"),
        "peft_autocast_adapter_dtype": To("adapter.autocast_adapter_dtype", switch),
    },
    others=re.compile("lora_(?!on_cpu|model_dir)|peft"),
    unread="no adapter is trained",
    folder="lora_model_dir",
    continued="the adapter in lora_model_dir has its own",
)  # fmt: skip
FOUR_BITS = FourBits("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", is_double=True)
"""Of bnb_config_kwargs."""
SCHEDULE: Keys = {
    "num_epochs": Field("trainer.num_train_epochs", default=1.0),
    "optimizer": Field(
        "trainer.optim", "names of transformers; axolotl's own are listed", "adamw_torch_fused"
    ),
    "lr_scheduler": Field("trainer.lr_scheduler_type", default="cosine"),
}
"""After KEYS, where max_steps leaves them open; a value that is not here has no default in its place."""
DPO_KEYS: Keys = {
    "dpo_beta": Field("trainer.beta"),
    "rl_beta": Field("trainer.beta"),
    **fields("trainer", "label_smoothing loss_type loss_weights ld_alpha use_weighting", "dpo_"),
    **fields("trainer", "precompute_ref_log_probs"),
}
"""With rl: dpo and ipo."""
KTO_KEYS: Keys = {
    "rl_beta": Field("trainer.beta"),
    "kto_desirable_weight": Field("trainer.desirable_weight", "1 where it is absent"),
    "kto_undesirable_weight": Field("trainer.undesirable_weight", "1 where it is absent"),
    **fields("trainer", "precompute_ref_log_probs"),
}
"""With rl: kto."""
TRL_KEYS: Keys = {
    **GENERATION_KEYS,
    "beta": Field("trainer.beta"),
    "use_liger_loss": Field("trainer.use_liger_kernel"),
    "vllm_importance_sampling_cap": Field("trainer.vllm_importance_sampling_clip_max"),
    **fields(
        "trainer",
        """num_iterations epsilon epsilon_high loss_type mask_truncated_completions
        importance_sampling_level multi_objective_aggregation log_completions num_completions_to_print
        off_policy_mask_threshold use_bias_correction_kl vllm_importance_sampling_correction
        vllm_importance_sampling_mode""",
    ),
}
"""Of the section `trl`, with rl: grpo and gdpo."""
SERVER_KEYS: Keys = fields("trainer", "vllm_server_host vllm_server_port vllm_server_timeout")
"""The same with vllm_mode: server."""
_OWN_ROLLOUTS = (
    "use_data_producer",
    "async_prefetch",
    "rollout_func",
    "replay_buffer_size",
    "vllm_lora_sync",
)
"""Keys of `trl` that start a trainer of axolotl's own."""
_MOVED = ("ref_model_mixup_alpha", "ref_model_sync_steps")
TABLES: Keys = {**KEYS, **LORA.keys, **SCHEDULE, **DPO_KEYS, **KTO_KEYS}
"""Every key that alone is one recipe key."""
_BF16 = {"bf16": {"enabled": True}}
_COMPILED = {"compile": {"disable": False, "backend": "inductor"}}
_CPU = {"device": "cpu"}
_ONE = {"stage": 1, "overlap_comm": True}
_TWO = {"stage": 2, "overlap_comm": True, "offload_optimizer": _CPU}
_THREE = {
    "stage": 3, "overlap_comm": True, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0,
}  # fmt: skip
_OFFLOADED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, **_BF16}
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"zero_optimization": _ONE},
    "zero1_torch_compile": {"zero_optimization": _ONE, **_COMPILED},
    "zero2": {"zero_optimization": _TWO},
    "zero2_torch_compile": {"zero_optimization": _TWO, **_COMPILED},
    "zero3": {"zero_optimization": _THREE},
    "zero3_bf16": {"zero_optimization": _THREE, **_BF16},
    "zero3_bf16_cpuoffload_params": {"zero_optimization": {**_THREE, "offload_param": _CPU}, **_OFFLOADED},
    "zero3_bf16_cpuoffload_all": {
        "zero_optimization": {**_THREE, "offload_param": _CPU, "offload_optimizer": _CPU},
        **_OFFLOADED,
    },
}
"""Configs of its folder deepspeed_configs -> what is set there; "auto" and defaults are left out."""
_NOT_LINEAR = ("lm_head", "embed_tokens", "wte")
_KEPT_ELSEWHERE = ("offload", "offload_disk", "unsloth")
"""Values of gradient_checkpointing with which activations are kept in host memory, or on a disk."""
_TRACKERS = {
    "use_wandb": "wandb",
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_trackio": "trackio",
}
_MARKS = ("datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "adapter", "rl")


def is_recipe(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are axolotl's; without a model, two of them."""
    marks = sum(key in data for key in _MARKS)
    return marks > ("base_model" not in data) and "model_name_or_path" not in data


def read(text: str, file: str) -> Reading:
    """Read a recipe of axolotl.

    Raises RecipeError if the file is no YAML; a kind of training that is not here is among the refusals.
    """
    peer = open_peer(text, file, tool())
    peer.fill(MODEL)
    peer.leave(peer.tool.left["values"])
    _take_task(peer)
    _take_images(peer)
    if (as_number(peer.values.get("max_steps", 1)) or 0) <= 0:
        peer.get("max_steps")  # as if absent
        peer.values.pop("max_steps")
    peer.take_keys(KEYS)
    _take_model(peer)
    adapted = _take_adapter(peer)
    _take_bits(peer, adapted)
    _take_precision(peer, adapted)
    take_kbit_norms(peer.reading, f"adapter: {peer.values.get('adapter')}", "axolotl")
    take_rows(peer)
    _take_steps(peer)
    _take_optimizer(peer)
    _take_times(peer)
    _take_sharding(peer)
    _take_trackers(peer)
    _take_plugins(peer)
    peer.leave((*peer.tool.left["keys"], *peer.tool.left["unused"]))
    peer.leave_rest()
    return peer.close()


def tool() -> Tool:
    return load_tool("axolotl", "axolotl", "ignores it")


def _take_task(peer: Peer) -> None:
    kind, of_reward = str(peer.values.get("rl")).lower(), peer.switch("reward_model")
    labels = as_number(peer.get("num_labels"))
    if labels not in (None, 1) or (labels and not of_reward):
        peer.refuse("num_labels", f"is {shown(labels)}: only a reward model has labels here, and it has one")
    named = task_of_tool("axolotl", kind)
    if is_off(peer.values.get("rl")):
        peer.get("rl")
        if of_reward:
            task = next(task for task in TASKS if "reward_model" in task.known_by.get("axolotl", ()))
            peer.take("task", task.name, "reward_model")
            peer.argument("center_rewards_coefficient")
    elif named is not None:
        peer.take("task", named.name, "rl")
        if named.rolls_out:
            _take_rollouts(peer, kind)
        else:
            peer.take_keys(KTO_KEYS if named.labels_answers else DPO_KEYS)
        peer.fill_task()
        if kind == "ipo":
            peer.take("trainer.loss_type", "ipo", "rl")
    elif "rl" not in peer.reading.seen:
        peer.refuse("rl", f"is {shown(kind)}, expected {', '.join(words_of_tool('axolotl'))}")


def _take_rollouts(peer: Peer, kind: str) -> None:
    """The section `trl`: reward functions and sampling. gdpo normalises each reward by itself."""
    if "sequence_len" in peer.values:
        peer.drop("sequence_len", Effect.NONE, f"axolotl does not read it with rl: {kind}")
    inner = peer.section("trl")
    if kind == "gdpo":
        summed = ("trainer.multi_objective_aggregation", "normalize_then_sum")
        peer.reading.take(*summed, peer.given("rl"), said="rl: gdpo")
    for key in [key for key in _OWN_ROLLOUTS if not is_off(inner.get(key))]:
        inner.refuse(key, "starts a trainer of axolotl's own")
    if not take_rollouts(inner):
        peer.needs(KEY, "trl", "trl.reward_funcs is not there, and nothing scores the completions")
    _take_vllm(peer, inner)
    take_scale(inner)
    inner.take_keys(TRL_KEYS)
    if "generation.max_completion_length" not in peer.reading.taken:
        peer.needs("generation.max_completion_length", "trl", "axolotl has no default of it")
    peer.take_keys({"rl_beta": Field("trainer.beta")} if "beta" not in inner.values else {})
    if inner.switch("sync_ref_model"):
        inner.drop("sync_ref_model", Effect.TRAINING, "the reference is the model before training")
    else:
        inner.leave_unread(_MOVED, "without sync_ref_model")
    inner.leave_inner(Effect.TRAINING, "it has no recipe key")


def _take_vllm(peer: Peer, inner: Peer) -> None:
    """The section `vllm`, which is of the server but for two keys."""
    backend = peer.reading.value("generation.backend")
    engine, is_server = peer.section("vllm"), backend == "vllm-server"
    if is_server:
        inner.take_keys(SERVER_KEYS)
    else:
        inner.leave_unread(SERVER_KEYS, "of a server, which nothing asks for")
    if backend == "vllm-colocate":
        inner.argument("vllm_enable_sleep_mode")
        engine.argument("gpu_memory_utilization", to="vllm_gpu_memory_utilization")
        peer.default("trainer.vllm_gpu_memory_utilization", 0.9, "vllm.gpu_memory_utilization")
        engine.argument("tensor_parallel_size", to="vllm_tensor_parallel_size")
    why = "of the server, which is started apart" if is_server else "not read there either"
    engine.leave_inner(Effect.NONE, why)


def _take_images(peer: Peer) -> None:
    """`processor_type`: rows with images. A text is trained on without it, also of a multimodal model."""
    frozen = peer.switch("freeze_mm_modules")
    if is_off(peer.get("processor_type")):
        if frozen:
            reason = "of rows without images the text model alone is loaded"
            peer.drop("freeze_mm_modules", Effect.NONE, reason)
        return
    if "task" in peer.reading.taken:
        peer.refuse("processor_type", "is set, and of preference trainings there is none with images here")
        return
    peer.take("task", task_with_images().name, "processor_type")
    if frozen:
        peer.take("model.freeze", ["vision", "projector"], "freeze_mm_modules")
    else:
        peer.default("model.freeze", [], "freeze_mm_modules: false", "axolotl freezes no part by itself")
    if not peer.switch("skip_prepare_dataset"):
        reason = "axolotl needs true for images; rows are prepared here"
        peer.drop("skip_prepare_dataset", Effect.NONE, reason)


def _take_model(peer: Peer) -> None:
    """Tokenizer, tokens, head and attention kernel."""
    tokenizer = peer.get("tokenizer_config")
    if tokenizer is not None and tokenizer != peer.values.get("base_model"):
        peer.take("model.tokenizer", str(tokenizer), "tokenizer_config")
    if peer.values.get("base_model_config") == peer.values.get("base_model"):
        peer.get("base_model_config")
    tokens = peer.section("special_tokens", " of tokens")
    if added := tokens.listed("additional_special_tokens"):
        known = peer.reading.value("model.add_tokens") or []
        tokens.take("model.add_tokens", [*known, *added], "additional_special_tokens")
    if "pad_token" in tokens.values:
        tokens.drop("pad_token", Effect.NONE, "padding never contributes to the loss")
    tokens.leave_inner(Effect.TRAINING, "unless the tokenizer has it already")
    for key in ("model_type", "type_of_model"):
        head = str(peer.values.get(key, "")).endswith("ForSequenceClassification")
        if head and peer.reading.task.head == "language-model":
            peer.refuse(key, f"is {shown(peer.values[key])}: axolotl trains reward models with it")
    peer.take_kernel("attn_implementation")


def _take_adapter(peer: Peer) -> bool:
    """The adapter; whether there is one."""
    kind = peer.get("adapter")
    if not is_off(kind) and kind not in ("lora", "qlora"):
        peer.refuse("adapter", f"is {shown(kind)}, and of adapters there is only LoRA here")
        return True
    if not take_lora(peer, LORA, is_on=not is_off(kind)):
        return not is_off(kind)
    _take_targets(peer)
    given = peer.get("peft")
    loftq = given.get("loftq_config") if isinstance(given, dict) else None
    if isinstance(loftq, dict) and loftq:
        peer.take("adapter.loftq_config", {"loftq_iter": 1, **loftq}, "peft")
        peer.take("adapter.init_lora_weights", "loftq", "peft")
    elif given:
        peer.drop("peft", Effect.TRAINING, "only its loftq_config is read")
    return True


def _take_targets(peer: Peer) -> None:
    key, given = "lora_target_modules", listed(peer.get("lora_target_modules") or [])
    if peer.switch("lora_target_linear"):
        peer.take("adapter.target_modules", "all-linear", "lora_target_linear")
        if any(str(layer).rpartition(".")[2] in _NOT_LINEAR for layer in given):
            hint = "write adapter.target_modules as a list of all names"
            peer.drop(key, Effect.TRAINING, "all-linear is without the embeddings and the head", hint)
        elif given:
            peer.drop(key, Effect.NONE, "lora_target_linear takes all linear layers")
    elif given:
        Field("adapter.target_modules")(peer.reading, peer.given(key))
    elif "lora_target_parameters" not in peer.values:
        reason = "neither lora_target_modules nor lora_target_linear is there: axolotl would adapt nothing"
        hint = "all-linear is what lora_target_linear means"
        peer.reading.needs("adapter.target_modules", None, reason, hint)


def _take_bits(peer: Peer, adapted: bool) -> None:
    _take_stored(peer)
    four, eight, kind = peer.switch("load_in_4bit"), peer.switch("load_in_8bit"), peer.values.get("adapter")
    if (four or eight) and not adapted:
        message = "is true without an adapter: a quantised model cannot be trained itself"
        peer.refuse("load_in_4bit" if four else "load_in_8bit", message, "set adapter: qlora, or delete it")
    elif kind == "qlora" and not four and "lora_model_dir" not in peer.values:
        peer.refuse("adapter", "is qlora without load_in_4bit: true, which axolotl refuses")
    elif kind == "lora" and four and not eight:
        reason = "axolotl quantises with adapter: qlora only; the model stays as it is"
        peer.drop("load_in_4bit", Effect.NONE, reason, "write model.quantization: nf4 if QLoRA is meant")
    elif eight and kind == "lora":
        take_quantization(peer.reading, "int8", peer.given("load_in_8bit"))
    elif four:
        options = peer.section("bnb_config_kwargs")
        take_four_bits(peer, "load_in_4bit", FOUR_BITS, options)
        options.leave_inner(Effect.TRAINING, "it has no recipe key")


def _take_stored(peer: Peer) -> None:
    """`model_quantization_config`: weights that the checkpoint stores in another form than 16 bits."""
    key, kind = "model_quantization_config", peer.get("model_quantization_config")
    options = peer.section("model_quantization_config_kwargs").values if kind is not None else {}
    if kind is not None and as_bool(options.get("dequantize")):
        reason = "dequantize trains 16-bit weights, which base_model does not hold"
        peer.drop(key, Effect.NEEDED, reason, "write model.name_or_path: a checkpoint with 16-bit weights")
    elif kind is not None:
        peer.refuse(key, f"is {shown(kind)}: only bitsandbytes quantises here")


def _take_precision(peer: Peer, adapted: bool) -> None:
    """bf16 is auto there, and without DeepSpeed the weights themselves are loaded in 16 bits."""
    bf16, fp16 = peer.get("bf16"), peer.switch("fp16")
    brain, half, full = (peer.switch(key) for key in ("bfloat16", "float16", "float32"))
    asked = str("auto" if bf16 is None else bf16).lower()
    wide = as_bool(bf16) is True or brain
    # Norms of a quantised model in 16 bits need a precision that is set.
    is_open = adapted and peer.reading.value("model.quantization") in (None, "none")
    if asked == "full":
        peer.take("precision", "bf16-true", "bf16", note="no autocast there")
    elif wide or (asked == "auto" and not fp16):
        _take_wide(peer, adapted, "auto" if is_open and not wide else "bf16", "bfloat16" if brain else "bf16")
    elif fp16:
        peer.take("precision", "fp16", "fp16")
    elif half:
        peer.take("precision", "fp16-true", "float16")
    else:
        peer.take("precision", "fp32", "float32" if full else "bf16")


def _take_wide(peer: Peer, adapted: bool, precision: str, key: str) -> None:
    by_card = precision == "bf16" and as_bool(peer.values.get(key)) is None
    note = "auto there: where the card has it" if by_card else ""
    peer.decide("precision", precision, key, said=f"{key}: auto", note=note)
    if not adapted and "deepspeed" not in peer.values:
        note = "axolotl loads the weights in 16 bits"
        peer.reading.take("model.dtype", "bfloat16", peer.given(key, "auto"), note=note)


def _take_steps(peer: Peer) -> None:
    """Batches and epochs; max_steps takes precedence over these."""
    micro, batch = as_number(peer.values.get("micro_batch_size", 1)), as_number(peer.get("batch_size"))
    if "gradient_accumulation_steps" in peer.values and batch is not None:
        peer.drop("batch_size", Effect.NONE, "gradient_accumulation_steps is given too, and decides")
    elif batch is not None and micro:
        peer.take("trainer.gradient_accumulation_steps", max(1, int(batch // micro)), "batch_size",
                  note="batch_size // micro_batch_size, as for one process")  # fmt: skip
    peer.fill(STEPS)
    peer.default("trainer.average_tokens_across_devices", False, "average_tokens_across_devices")
    if peer.reading.evaluates:
        size = peer.reading.value("trainer.per_device_train_batch_size")
        peer.default("trainer.per_device_eval_batch_size", size, "eval_batch_size")
    if "trainer.max_steps" in peer.reading.taken and "num_epochs" in peer.values:
        peer.drop("num_epochs", Effect.NONE, "max_steps takes precedence")
    peer.argument("seed")
    peer.take_keys(SCHEDULE)
    peer.fill({name: row for name, row in SCHEDULE.items() if name not in peer.values})


def _take_optimizer(peer: Peer) -> None:
    """The end of the schedule, its warm-up, and activation checkpointing."""
    schedule, ratio = peer.values.get("lr_scheduler"), as_number(peer.get("cosine_min_lr_ratio"))
    plain = schedule in (None, "cosine") and "cosine_constant_lr_ratio" not in peer.values
    if plain and ratio is not None and 0 < ratio < 1:
        peer.take("trainer.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        peer.take("trainer.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "cosine_min_lr_ratio")
    elif "cosine_min_lr_ratio" in peer.values and ratio != 0:
        peer.drop("cosine_min_lr_ratio", Effect.TRAINING, "only of a cosine schedule, without a constant end")
    peer.argument("warmup_steps", "warmup_ratio")
    if not {"warmup_steps", "warmup_ratio"} & peer.values.keys():
        note = "a share of all steps; axolotl stops at 100 steps"
        peer.default("trainer.warmup_steps", 0.03, "warmup_ratio", note)
    if str(peer.get("gradient_checkpointing")).lower() in _KEPT_ELSEWHERE:
        peer.take("trainer.activation_checkpointing", True, "gradient_checkpointing")
        peer.take("sharding.offload_activations", "cpu", "gradient_checkpointing")
    else:
        peer.argument("gradient_checkpointing")
    peer.argument("gradient_checkpointing_kwargs")
    if peer.get("lr_scheduler_kwargs") != {}:
        peer.argument("lr_scheduler_kwargs")


def _take_interval(peer: Peer, kind: str) -> float | None:
    """Take the interval of saves or evaluations; returns evals_per_epoch as a share of all steps."""
    often, share = f"{kind}s_per_epoch", None
    times, epochs = as_number(peer.get(often)), as_number(peer.values.get("num_epochs", 1.0))
    if times and epochs and times > 0 and epochs > 0:
        share = float(f"{1 / (times * epochs):.12g}")
    peer.get(f"{kind}_steps")
    if share is not None and share < 1:
        peer.take(f"trainer.{kind}_steps", share, often, note="a share of all steps")
        peer.take(f"trainer.{kind}_strategy", "steps", often)
    elif f"{kind}_steps" in peer.values:
        peer.argument(f"{kind}_steps")
        peer.take(f"trainer.{kind}_strategy", "steps", f"{kind}_steps")
    peer.argument(f"{kind}_strategy")
    return share


def _take_times(peer: Peer) -> None:
    """The intervals of saves and evaluations, and early stopping."""
    if "evaluation_strategy" in peer.values:
        peer.values.setdefault("eval_strategy", peer.get("evaluation_strategy"))
    _take_interval(peer, "save")
    if not peer.reading.value("data.streaming"):  # a stream has no epochs
        peer.default("trainer.save_strategy", "epoch", "save_strategy")
    peer.fill(SAVING)
    if not peer.reading.evaluates:
        keys = ("eval_strategy", "eval_steps", "evals_per_epoch", "early_stopping_patience")
        peer.leave_unread(keys, "axolotl has no rows to evaluate on either")
        return
    share = _take_interval(peer, "eval")
    if share is not None and share >= 1 and peer.values.get("eval_steps") is None:
        reason = "1 / (evals x epochs) is not below 1: axolotl does not evaluate"
        peer.drop("evals_per_epoch", Effect.NONE, reason)
    note = "axolotl evaluates only at an interval that is set"
    peer.default("trainer.eval_strategy", "no", "eval_strategy", note)
    if peer.reading.value("trainer.eval_strategy") == "no":
        peer.leave_unread(["early_stopping_patience"], "axolotl does not evaluate during the run either")
    else:
        peer.take_patience("early_stopping_patience")


def _take_sharding(peer: Peer) -> None:
    if name := peer.get("deepspeed"):
        peer.argument("deepspeed")
        if config := _shipped(str(name)):
            peer.reading.shipped[str(name)] = config
    key = "fsdp_config" if peer.get("fsdp_config") else "fsdp"
    if peer.get(key):
        peer.take("sharding.engine", "fsdp", key)
    peer.argument("fsdp")
    if key == "fsdp_config":
        take_fsdp_options(peer.reading, peer.given(key))
    peer.get("fsdp_version")
    to = To(
        "sharding.sp_size" if peer.values.get("deepspeed") else "sharding.cp_size",
        several,
        effect=Effect.NONE,
    )
    peer.take_keys(dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"), to))


def _shipped(file: str) -> Mapping[str, Any] | None:
    """The config that a recipe of axolotl names (`deepspeed_configs/zero2.json`), if axolotl ships it."""
    path = PurePath(file)
    known = (path.parent.name, path.suffix) == ("deepspeed_configs", ".json")
    return SHIPPED.get(path.stem) if known else None


def _take_trackers(peer: Peer) -> None:
    used = [tracker for key, tracker in _TRACKERS.items() if peer.switch(key)]
    if "swanlab" in str(peer.values.get("plugins", "")) and peer.switch("use_swanlab"):
        used.append("swanlab")
    off = as_bool(peer.values.get("use_wandb")) is False
    if peer.values.get("wandb_project") and "wandb" not in used and not off:
        used.insert(0, "wandb")
    if used:
        keys = ("wandb_project", *_TRACKERS, "use_swanlab")
        peer.take("trainer.report_to", used, next(key for key in keys if key in peer.values))
    if target := peer.get("hub_model_id"):
        peer.take("trainer.hub_model_id", str(target), "hub_model_id")
        if "trainer.hub_model_id" in peer.reading.taken:  # a variable is none
            peer.take("trainer.push_to_hub", True, "hub_model_id")
            peer.take("trainer.hub_private_repo", True, "hub_model_id", note="always private there")


def _take_plugins(peer: Peer) -> None:
    given = peer.get("plugins")
    named = [str(plugin) for plugin in given] if isinstance(given, list) else []
    kernels = [key for key in peer.values if key.startswith("liger_")]
    peer.reading.know(*kernels)
    if on_keys := [key for key in kernels if as_bool(peer.values[key])]:
        peer.take("trainer.use_liger_kernel", True, on_keys[0], *kernels)
    enabled = {_plugin_of(plugin) for plugin in named}
    for plugin in named:
        if _plugin_of(plugin) in ("liger", "cut_cross_entropy", "swanlab"):
            continue
        if "kd" in plugin.lower().split(".") or "diffusion" in plugin.lower():
            peer.refuse("plugins", f"holds {shown(plugin)}: another kind of training")
        else:
            where = Given("plugins", plugin, peer.line("plugins"))
            peer.reading.drop(where, Effect.TRAINING, "a plugin of axolotl's")
    for plugin, table in peer.tool.sections("plugin ").items():
        unread = f"only axolotl's plugin {plugin} reads it, and plugins does not name that"
        others = [Left(Effect.NONE, unread, entry.names) for entry in table]
        peer.leave(table if plugin in enabled else others)
    foreign = [plugin for plugin in named if not _plugin_of(plugin)]
    known = {*peer.tool.keys, *peer.reading.seen}
    for key in [key for key in peer.values if key not in known] if foreign else ():
        reason = f"no key of axolotl's own: the plugin {shown(foreign[0])} may read it"
        peer.drop(key, Effect.TRAINING, reason)


def _plugin_of(name: str) -> str:
    """`swanlab` of `axolotl.integrations.swanlab.SwanLabPlugin`; empty for a plugin of another package."""
    start, _, rest = name.partition("axolotl.integrations.")
    return rest.partition(".")[0] if not start else ""
