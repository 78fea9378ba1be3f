"""The tables of the pages about coming from another tool: what `import` makes of its keys."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.engines.deepspeed_config import flatten
from launcher.files.safe_files import parse_json
from launcher.importing import accelerate, axolotl, axolotl_rows, deepspeed, llamafactory, trl
from launcher.importing.arguments import Field
from launcher.importing.conversions import To
from launcher.importing.key_tables import Keys, Left
from launcher.importing.reading import Reading, shown

Row = tuple[str, str, str]
"""(key there, key of the recipe or empty, note)."""

_AXOLOTL: tuple[Row, ...] = (
    ("trl", "generation", "with rl: grpo: sampling, reward_funcs to reward, the rest to trainer"),
    ("vllm", "trainer", "with vllm_mode: colocate, its share of the memory and tensor_parallel_size"),
    (
        "rl",
        "task",
        "dpo, kto, grpo; gdpo: grpo with normalize_then_sum; ipo: dpo with loss_type ipo; others are refused",
    ),
    ("reward_model", "task", "true: reward, with rows of type bradley_terry.chat_template"),
    ("num_labels", "task", "1, with reward_model"),
    ("center_rewards_coefficient", "trainer.center_rewards_coefficient", "with reward_model"),
    ("tokenizer_config", "model.tokenizer", "where it is not base_model"),
    ("special_tokens", "model.add_tokens", "additional_special_tokens; others are listed"),
    (
        "bf16",
        "precision",
        "auto where absent; bf16 with a quantised base or all parameters (these: model.dtype: bfloat16)",
    ),
    ("bfloat16", "precision", "as bf16"),
    ("fp16", "precision", "fp16"),
    ("float16", "precision", "fp16-true, where bf16 is false"),
    ("float32", "precision", "fp32"),
    ("adapter", "adapter.type", "lora and qlora"),
    ("lora_target_linear", "adapter.target_modules", "all-linear"),
    ("lora_target_modules", "adapter.target_modules", "literally; beside lora_target_linear without effect"),
    ("lora_model_dir", "adapter.path", ""),
    ("peft", "adapter.loftq_config", "loftq_config alone"),
    ("load_in_4bit", "model.quantization", "nf4 with double quantisation, with adapter: qlora only"),
    ("load_in_8bit", "model.quantization", "int8, with an adapter"),
    ("bnb_config_kwargs", "model.quantization", "quant type and double quantisation"),
    ("model_quantization_config", "model.name_or_path", "with dequantize a 16-bit checkpoint must be named"),
    ("model_quantization_config_kwargs", "model.name_or_path", "dequantize alone"),
    ("attn_implementation", "model.attn_implementation", ""),
    ("batch_size", "trainer.gradient_accumulation_steps", "batch_size // micro_batch_size"),
    ("lr_scheduler_kwargs", "trainer.lr_scheduler_kwargs", ""),
    ("cosine_min_lr_ratio", "trainer.lr_scheduler_kwargs", "cosine_with_min_lr, min_lr_rate"),
    ("warmup_steps", "trainer.warmup_steps", "0.03 where neither is there"),
    ("warmup_ratio", "trainer.warmup_steps", "below 1: a share"),
    (
        "gradient_checkpointing",
        "trainer.activation_checkpointing",
        "true with offload, offload_disk and unsloth",
    ),
    ("gradient_checkpointing", "sharding.offload_activations", "cpu with offload, offload_disk and unsloth"),
    ("activation_offloading", "sharding.offload_activations", "cpu where it is not false"),
    ("gradient_checkpointing_kwargs", "trainer.activation_checkpointing_kwargs", ""),
    ("seed", "seed", ""),
    ("eval_strategy", "trainer.eval_strategy", "no where rows are there and nothing is named"),
    ("eval_steps", "trainer.eval_steps", ""),
    ("evals_per_epoch", "trainer.eval_steps", "1 / (n x epochs), a share of all steps"),
    ("save_strategy", "trainer.save_strategy", "epoch where nothing is named"),
    ("save_steps", "trainer.save_steps", ""),
    ("saves_per_epoch", "trainer.save_steps", "1 / (n x epochs), a share of all steps"),
    ("early_stopping_patience", "early_stopping.patience", ""),
    ("deepspeed", "sharding", "the file is read, too; axolotl's deepspeed_configs/ are known"),
    ("fsdp_config", "sharding.engine", "fsdp; offload is listed; with a quantised model the planner chooses"),
    ("fsdp", "sharding.engine", "fsdp"),
    ("context_parallel_size", "sharding", "sp_size with DeepSpeed, else cp_size"),
    ("sequence_parallel_degree", "sharding", "as context_parallel_size"),
    ("use_wandb", "trainer.report_to", "wandb"),
    ("use_tensorboard", "trainer.report_to", "tensorboard"),
    ("use_mlflow", "trainer.report_to", "mlflow"),
    ("use_comet", "trainer.report_to", "comet_ml"),
    ("use_trackio", "trainer.report_to", "trackio"),
    ("hub_model_id", "trainer.hub_model_id", "with push_to_hub and a private repository"),
    ("skip_prepare_dataset", "data.overlong", "with rl; of texts it is refused"),
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
    ("processor_type", "task", "image-text-to-text; rows are image-chat, of type chat_template alone"),
    ("freeze_mm_modules", "model.freeze", "with processor_type: vision and projector; absent: none"),
)
_LLAMAFACTORY: tuple[Row, ...] = (
    ("stage", "task", "sft and pt are causal-lm, dpo is dpo, kto is kto, rm is reward; ppo is refused"),
    ("finetuning_type", "adapter.type", "lora where it is absent; full: none; freeze and oft are refused"),
    ("lora_target", "adapter.target_modules", "all is all-linear, also where it is absent"),
    ("pissa_init", "adapter.init_lora_weights", "pissa"),
    ("pissa_iter", "adapter.init_lora_weights", "pissa, the exact part that more iterations approach"),
    ("adapter_name_or_path", "adapter.path", "one of them"),
    ("quantization_bit", "model.quantization", "4: nf4 with double quantisation; 8: int8"),
    ("quantization_type", "model.quantization", ""),
    ("double_quantization", "model.quantization", ""),
    ("quantization_method", "model.quantization", "bnb alone"),
    ("flash_attn", "model.attn_implementation", "fa2, sdpa, disabled: eager; auto says nothing"),
    ("add_tokens", "model.add_tokens", ""),
    ("add_special_tokens", "model.add_tokens", ""),
    ("new_special_tokens", "model.add_tokens", "the earlier name of add_special_tokens"),
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
    ("do_train", "", "must be true"),
    ("freeze_vision_tower", "model.freeze", "with rows that have images: vision, also where it is absent"),
    ("freeze_multi_modal_projector", "model.freeze", "as freeze_vision_tower: projector"),
    (
        "image_max_pixels",
        "model.image_sizes",
        "of Qwen-VL: max_pixels, 589824 where it is absent; else listed",
    ),
    ("image_min_pixels", "model.image_sizes", "of Qwen-VL: min_pixels; else listed"),
    ("image_do_pan_and_scan", "model.image_sizes", "do_pan_and_scan"),
    ("crop_to_patches", "model.image_sizes", ""),
    ("freeze_language_model", "", "true is refused"),
    ("media_dir", "", "paths of images start from the folder of the data file"),
)
_TRL: tuple[Row, ...] = (
    ("reward_funcs", "reward", "a module's function, or trl's own: a file that imports them is written"),
    ("reward_weights", "reward", "weight of each function"),
    ("use_vllm", "generation.backend", "vllm-colocate or, with vllm_mode: server, vllm-server"),
    ("vllm_mode", "generation.backend", ""),
    ("scale_rewards", "trainer.scale_rewards", "true: group, false: none"),
    ("generation_batch_size", "", "listed: the number of ranks is not known"),
    ("dtype", "model.dtype", "float32 where it is absent; of a quantised model its compute_dtype"),
    ("torch_dtype", "model.dtype", "as dtype"),
    ("attn_implementation", "model.attn_implementation", "kernels of the hub are listed"),
    ("model_init_kwargs", "model", "dtype, attn_implementation, revision; others are listed"),
    ("use_peft", "adapter.type", "without it the lora_ keys are without effect"),
    ("lora_task_type", "task", "CAUSAL_LM alone"),
    ("load_in_4bit", "model.quantization", "no double quantisation where use_bnb_nested_quant is absent"),
    ("load_in_8bit", "model.quantization", "int8"),
    ("bnb_4bit_quant_type", "model.quantization", "nf4 where it is absent"),
    ("use_bnb_nested_quant", "model.quantization", ""),
    ("max_length", "data.max_length", "1024 where it is absent"),
    ("max_seq_length", "data.max_length", "the older name"),
    ("truncation_mode", "data.overlong", "keep_start: truncate"),
    ("activation_offloading", "sharding.offload_activations", "cpu where it is true"),
    ("packing", "data.packing", ""),
    ("packing_strategy", "data.overlong", "bfd: truncate; bfd_split: split; wrapped is listed"),
    ("padding_free", "data.padding_free", "without packing"),
    ("dataset_text_field", "data.train", "columns, where it is not text"),
    ("completion_only_loss", "data.loss_on", "true: completion; false: all"),
    (
        "assistant_only_loss",
        "data.loss_on",
        "true: assistant; without it all tokens of a chat are targets: all",
    ),
    ("chat_template", "model.chat_template", "the text"),
    ("chat_template_path", "model.chat_template", "a file; of a model's id the text is needed"),
    ("accelerate_config", "sharding", "TRL's own names; a file is read, too"),
    ("env", "launch.env", "what a run does not set itself"),
    ("beta", "trainer.beta", "dpo, kto or grpo, by another key or a name; else asked for"),
    ("bf16", "precision", "true where neither bf16 nor fp16 is there"),
    ("dataset_name", "data.train", "the full id of a data set, or a path"),
    ("dataset_config", "data.train", "name"),
    ("dataset_configs", "data.train", "a source for each"),
    ("dataset_train_split", "data.train", "split"),
    ("dataset_test_split", "data.eval", "where eval_strategy is not no"),
    ("datasets", "data.train", "a source for each"),
    ("dataset_mixture", "data.train", "a source for each"),
    ("dataset_mixer", "data.train", "a source for each, by dataset_splits"),
    ("dataset_splits", "data.train", "train… is trained on, test… evaluated"),
    ("test_split_size", "data.eval", "a share"),
)
HANDLED = {"axolotl": _AXOLOTL, "llamafactory": _LLAMAFACTORY, "trl": _TRL}
"""Keys that a reader handles in code."""
ROW_TYPES: tuple[Row, ...] = (
    ("chat_template", "format: chat", "the template of the tokenizer"),
    ("sharegpt", "format: chat", "axolotl itself refuses it now"),
    ("completion", "format: text", "field becomes columns"),
    *(
        (name, "format: prompt-completion", "with a format_row that makes the same prompt")
        for name in axolotl_rows.TYPES
    ),
    *(
        (name, "format: preference", "with rl: dpo or ipo (kto: unpaired-preference, where it has the type)")
        for name in axolotl_rows.PAIRS
    ),
    *(
        (name, "format: unpaired-preference", "with rl: kto; a format_row makes the same prompt and answer")
        for name in axolotl_rows.LABELLED
        if name not in axolotl_rows.PAIRS
    ),
    *(
        (name, "format: preference", "with reward_model; a format_row makes the messages")
        for name in axolotl_rows.RANKED
    ),
    ("a mapping with format and field_…", "format: prompt-completion", "with a format_row of its patterns"),
)  # fmt: skip
"""(`type` of a data set of axolotl, what it becomes, note)."""

# An example of each key; the rows are what the readers make of them, so that no page can say another thing.
_DEEPSPEED = (
    '{"zero_optimization": {"stage": 3}}',
    '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}}}',
    '{"bf16": {"enabled": true}}',
    '{"fp16": {"enabled": true}}',
    '{"train_micro_batch_size_per_gpu": 4}',
    '{"gradient_accumulation_steps": 8}',
    '{"train_batch_size": 256}',
    '{"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}',
    '{"optimizer": {"type": "AdamW", "params": '
    '{"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}}',
    '{"optimizer": {"type": "Lamb", "params": {"lr": 1e-5}}}',
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-5}}}',
    '{"scheduler": {"type": "WarmupDecayLR", "params": '
    '{"total_num_steps": 1000, "warmup_type": "linear", "warmup_num_steps": 100}}}',
    '{"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear", "warmup_num_steps": 100}}}',
    '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 500000000}}',
    '{"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}',
    '{"sequence_parallel_size": 2, "zero_optimization": {"stage": 1}}',
    '{"activation_checkpointing": {"cpu_checkpointing": true}, "zero_optimization": {"stage": 1}}',
    '{"curriculum_learning": {"enabled": true}, "zero_optimization": {"stage": 1}}',
)
_ACCELERATE = (
    "distributed_type: MULTI_GPU",
    "distributed_type: DEEPSPEED",
    "distributed_type: FSDP",
    "distributed_type: MEGATRON_LM",
    "distributed_type: MULTI_GPU\nmixed_precision: bf16",
    "distributed_type: MULTI_GPU\nnum_processes: 8",
    "distributed_type: MULTI_GPU\nnum_machines: 2",
    "distributed_type: 'NO'\nuse_cpu: true",
    "distributed_type: MULTI_GPU\ngpu_ids: 0,1",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_optimizer_device: cpu}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: cpu}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: 4}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 1.0}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_hostfile: hosts}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_state_dict_type: SHARDED_STATE_DICT}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_cpu_ram_efficient_loading: true}",
    "distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_tp_size: 2}",
    "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR}",
)
_SPLIT = {"hardware.total": "hardware.devices_per_node"}
_OF_THE_REST = ("data.max_length", "data.loss_on", "adapter.target_modules")
"""What an example leaves open that is for something else."""


def mapping_rows(tool: str) -> list[Row]:
    """The rows of one of TOOLS, in the order of its page."""
    return TOOLS[tool]()


def _axolotl_rows() -> list[Row]:
    tool = axolotl.tool()
    of_plugins = [entry for table in tool.sections("plugin ").values() for entry in table]
    return _rows_of(axolotl.TABLES, "axolotl", (*tool.left["keys"], *of_plugins))


def _llamafactory_rows() -> list[Row]:
    return _rows_of(llamafactory.TABLES, "llamafactory", llamafactory.tool().left["keys"])


def _trl_rows() -> list[Row]:
    return _rows_of(trl.TABLES, "trl", trl.tool().left["keys"])


def _rows_of(keys: Keys, tool: str, left: Iterable[Left]) -> list[Row]:
    """What is taken, then what is not."""
    rows = [(name, row.key.replace("hardware.total", "hardware"), _note(row)) for name, row in keys.items()]
    rows += HANDLED[tool]
    for entry in left:
        effect = "refused" if entry.effect is None else entry.effect.value
        rows += [(name, "", f"{effect}: {entry.reason}") for name in entry.names]
    return rows


def _note(row: To | Field) -> str:
    default = "" if row.default is None else f"{shown(row.default).removesuffix('.0')} where it is absent"
    return row.note or default


def _rows(said: str, reading: Reading, base: set[str]) -> list[Row]:
    """What a reading says of one example, less what the rest of the example is for."""
    taken = [
        (said, _SPLIT.get(key, key), shown(value.value) if not isinstance(value.value, dict | list) else "")
        for key, value in reading.taken.items()
        if (key == "task" or not value.is_default) and key not in base
    ]
    refused = [(said, "", f"refused: {problem.message}") for problem in reading.refusals]
    dropped = [(said, "", f"{entry.effect.value}: {entry.reason}") for entry in reading.dropped
               if entry.key not in _OF_THE_REST]  # fmt: skip
    return refused or [*taken, *dropped]


def _deepspeed_rows() -> list[Row]:
    rows: list[Row] = []
    for text in _DEEPSPEED:
        reading = deepspeed.read(text, "ds.json")
        told = {key.rpartition(".")[2] for key in flatten(parse_json(text))}
        for key, value in reading.taken.items():
            name = value.said.partition(":")[0].partition(",")[0]
            if not value.is_default and name.rpartition(".")[2] in told:
                rows.append((value.said, key, ""))
        rows += [(entry.key, "", f"{entry.effect.value}: {entry.reason}") for entry in reading.dropped]
        rows += [(str(problem.path), "", f"refused: {problem.message}") for problem in reading.refusals]
    return list(dict.fromkeys(rows))


def _accelerate_rows() -> list[Row]:
    rows: list[Row] = []
    for text in _ACCELERATE:
        first, _, last = text.partition("\n")
        base = {"sharding.engine"} if last else set()
        rows += _rows(last or first, accelerate.read(text, "accelerate.yaml"), base)
    return list(dict.fromkeys(rows))


TOOLS = {
    "axolotl": _axolotl_rows,
    "llamafactory": _llamafactory_rows,
    "trl": _trl_rows,
    "deepspeed": _deepspeed_rows,
    "accelerate": _accelerate_rows,
}
