"""Causal language models: pre-training on text, and fine-tuning on instructions and conversations."""

from __future__ import annotations

from launcher.tasks.rows import CHAT, INSTRUCTION, PROMPT_COMPLETION, TEXT, TOKEN_IDS
from launcher.tasks.task import Task


class CausalLM(Task):
    name = "causal-lm"
    loss_unit = "targets"
    counted_by_trainer = True
    aliases = (
        "sft", "clm", "lm", "llm", "causal", "causallm", "text-generation", "pretrain", "pretraining", "pt",
    )  # fmt: skip
    row_formats = (TEXT, INSTRUCTION, PROMPT_COMPLETION, CHAT, TOKEN_IDS)
    learns = {
        "text": ("all",),
        "instruction": ("completion", "all"),
        "prompt-completion": ("completion", "all"),
        "chat": ("assistant", "completion", "all"),
        "token-ids": (),
    }
    overlong = {}
    model_class = "AutoModelForCausalLM"
    head = "language-model"
    head_in_checkpoint = True
    peft_task = "CAUSAL_LM"
    gguf = True
    causal_loss = True
    flattens = True
    tensor_parallel = True
    metrics = ("perplexity", "accuracy")
    keeps_token_predictions = True
    known_as = {"trl": ("sft",), "llamafactory": ("sft", "pt")}
    tool_defaults = {"trl": {"trainer.learning_rate": 2e-5}}
    goals = {
        "instructions": ("instruction", "prompt-completion"),
        "chat": ("chat",),
        "text": ("text",),
    }
    first_metrics = {"text": ("perplexity",)}
    pipeline = "text-generation"
