"""What becomes of TRL's keys: tables for its reader, and for the page about coming from it."""

from __future__ import annotations

from typing import Any

from launcher.importing.found import Effect
from launcher.importing.llamafactory_tables import revision
from launcher.importing.peer import Key, Left, Row, if_on, switch, text, texts, whole


def multiple(value: Any) -> int | None:
    """A number to fill up to; auto says nothing."""
    return None if value == "auto" else whole(value)


KEYS: tuple[Key, ...] = (
    Key("model_name_or_path", "model.name_or_path", text),
    Key("model_revision", "model.revision", revision),
    Key("trust_remote_code", "model.trust_remote_code", if_on),
    Key("dataset_num_proc", "data.num_proc", whole),
    Key("pad_to_multiple_of", "data.pad_to_multiple_of", multiple),
    Key("dataset_streaming", "data.streaming", if_on, "needs max_steps"),
    Key("streaming", "data.streaming", if_on, "needs max_steps"),
)
LORA_KEYS: tuple[Key, ...] = (
    Key("lora_r", "adapter.r", None, "16 where it is absent"),
    Key("lora_alpha", "adapter.lora_alpha", None, "32 where it is absent"),
    Key("lora_dropout", "adapter.lora_dropout", None, "0.05 where it is absent"),
    Key("lora_target_modules", "adapter.target_modules", None, "peft's own for the model where it is absent"),
    Key("lora_target_parameters", "adapter.target_parameters", texts),
    Key("lora_modules_to_save", "adapter.modules_to_save", texts),
    Key("use_rslora", "adapter.use_rslora", switch),
    Key("use_dora", "adapter.use_dora", switch),
)
"""With use_peft: true."""
HANDLED: tuple[Row, ...] = (
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
    ("packing", "data.packing", ""),
    ("packing_strategy", "data.overlong", "bfd: truncate; bfd_split: split; wrapped is listed"),
    ("padding_free", "data.padding_free", "without packing"),
    ("dataset_text_field", "data.train", "columns, where it is not text"),
    ("completion_only_loss", "data.loss_on", "true: completion; false: all"),
    ("assistant_only_loss", "data.loss_on", "true: assistant; without it chats are learnt whole: all"),
    ("chat_template", "model.chat_template", "the text"),
    ("chat_template_path", "model.chat_template", "a file; of a model's id the text is needed"),
    ("accelerate_config", "sharding", "TRL's own names; a file is read, too"),
    ("num_processes", "hardware", "told, not written"),
    ("num_machines", "hardware", "told, not written"),
    ("env", "launch.env", "what a run does not set itself"),
    ("wandb_project", "launch.env.WANDB_PROJECT", ""),
    ("wandb_entity", "launch.env.WANDB_ENTITY", ""),
    ("beta", "trainer.beta", "the task is dpo; asked for where no other key and no name says dpo"),
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
"""(key, recipe key, note) of what the reader looks at itself. All others are TrainingArguments."""

_SAME = Effect.NONE
_OTHER = Effect.TRAINING
LEFT: tuple[Left, ...] = (
    Left(_SAME, "how 4 bits lie in memory; the planner decides it", "bnb_4bit_quant_storage"),
    Left(_SAME, "evaluation rows are packed as the others", "eval_packing"),
    Left(_SAME, "rows are shuffled anyway", "shuffle_dataset"),
    Left(_SAME, "padding is never learnt", "pad_token"),
    Left(_SAME, "memory only; the planner chooses", "activation_offloading ignore_bias_buffers"),
    Left(_SAME, "the launcher finds ranks and addresses", """machine_rank main_process_ip main_process_port
        rdzv_backend same_network main_training_function"""),
    Left(_SAME, "not part of a run", """callbacks benchmarks hub_model_revision overwrite_hub_revision
        push_to_hub_revision wandb_run_group"""),
    Left(_OTHER, "unless it is the tokenizer's own", "eos_token"),
    Left(_OTHER, "the chat template alone makes the text", "system_prompt"),
    Left(_OTHER, "the loss of the router is the model's own", "router_aux_loss_coef"),
)  # fmt: skip
"""Keys that stay behind."""

PROFILES: dict[str, dict[str, Any]] = {
    "single_gpu": {},
    "multi_gpu": {"sharding.engine": "ddp"},
    "fsdp1": {"sharding.engine": "fsdp"},
    "fsdp2": {"sharding.engine": "fsdp"},
    **{f"zero{stage}": {"sharding.engine": "deepspeed", "sharding.zero_stage": stage} for stage in (1, 2, 3)},
}
"""accelerate_config by name -> what it stands for."""
