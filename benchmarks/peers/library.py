"""A small fine-tune with the Trainer of the library that owns a task, as its documentation writes it.

    python library.py TASK JOB.json          the job as tasks.py writes it

Activation checkpointing and mixed precision, which trl turns on by itself, are off in fp32.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Given = Mapping[str, Any]


def common(job: Given) -> dict[str, Any]:
    """Arguments of every Trainer."""
    half = job["precision"] == "bf16"
    return {
        **job["arguments"], "output_dir": job["output"], "use_cpu": not torch.cuda.is_available(),
        "bf16": half, "gradient_checkpointing": False,
    }  # fmt: skip


def parts(job: Given, model: Any, task_type: str) -> dict[str, Any]:
    """What the Trainers of trl take besides their arguments."""
    return {
        "model": model.from_pretrained(
            job["model"], dtype="auto" if job["precision"] == "bf16" else "float32"
        ),
        "train_dataset": load_dataset("json", data_files=job["rows"], split="train"),
        "processing_class": AutoTokenizer.from_pretrained(job["model"]),
        "peft_config": LoraConfig(task_type=task_type, **job["lora"]),
    }


def dpo(job: Given) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**common(job), max_length=job["max_length"])
    return DPOTrainer(args=args, **parts(job, AutoModelForCausalLM, "CAUSAL_LM"))


def reward(job: Given) -> Any:
    from trl import RewardConfig, RewardTrainer

    # The tokenizer's own pad is EOS: the model would read the token before the end of a row.
    args = RewardConfig(**common(job), max_length=job["max_length"], pad_token="<|endoftext|>")
    return RewardTrainer(args=args, **parts(job, AutoModelForSequenceClassification, "SEQ_CLS"))


def grpo(job: Given) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def has_letter(completions: list[str], **_: Any) -> list[float]:
        return [float(re.search(job["pattern"], text) is not None) for text in completions]

    args = GRPOConfig(**common(job), **job["generation"])
    return GRPOTrainer(reward_funcs=has_letter, args=args, **parts(job, AutoModelForCausalLM, "CAUSAL_LM"))


def embedding(job: Given) -> Any:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling

    body = Transformer(
        job["model"],
        max_seq_length=job["max_length"],
        model_kwargs={"dtype": "float32"},
        # Without it each text is a message in the chat template, which this tokenizer happens to have.
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    size = body.get_embedding_dimension()
    model = SentenceTransformer(modules=[body, Pooling(size, "lasttoken"), Normalize()])
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**common(job), batch_sampler="no_duplicates"),
        train_dataset=load_dataset("json", data_files=job["rows"], split="train"),
        loss=MultipleNegativesRankingLoss(model),
    )


def main() -> None:
    task, file = sys.argv[1:]
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    makers = {"dpo": dpo, "reward": reward, "grpo": grpo, "embedding": embedding}
    trainer = makers[task](job)
    trainer.train()
    trainer.save_model(job["output"])


if __name__ == "__main__":
    main()
