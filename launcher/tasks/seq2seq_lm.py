"""Encoder-decoder language models: translation, summarisation, and other text to text."""

from __future__ import annotations

from launcher.tasks.rows import INSTRUCTION, PROMPT_COMPLETION
from launcher.tasks.task import ArgumentTable, Task


class Seq2SeqLM(Task):
    name = "seq2seq-lm"
    loss_unit = "targets"
    aliases = ("seq2seq", "seq-to-seq", "text2text-generation", "translation", "summarization")
    row_formats = (PROMPT_COMPLETION, INSTRUCTION)
    architectures = ("encoder-decoder",)
    model_class = "AutoModelForSeq2SeqLM"
    head = "language-model"
    peft_task = "SEQ_2_SEQ_LM"
    casts_logits = False  # T5 leaves its logits in the dtype of the model
    argument_table = ArgumentTable(
        "seq2seq_arguments", "transformers", "training_args_seq2seq.py", "Seq2SeqTrainingArguments"
    )
    owned_arguments = {
        "sortish_sampler": "remove it: transformers does not read it; `train_sampling_strategy` is read",
    }
    metrics = ("perplexity", "exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL")
    metric_packages = {
        **dict.fromkeys(("bleu", "chrf"), ("sacrebleu", "sacrebleu")),
        **dict.fromkeys(("rouge1", "rouge2", "rougeL"), ("rouge_score", "rouge-score")),
    }
    generated_metrics = metrics[1:]
    keeps_token_predictions = True
    generates = True
    goals = {"instructions": ("instruction", "prompt-completion")}
    first_rates = {"full": 1e-4}
