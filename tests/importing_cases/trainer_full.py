"""A plain Trainer script, as the tutorials write it."""

import os

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

MODEL = "bigcode/starcoder"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_API_KEY"] = "0123456789abcdef0123456789abcdef01234567"
common = dict(learning_rate=2 * 1e-5, weight_decay=0.1)


def tokenize(batch):
    return tokenizer(batch["content"], truncation=True, max_length=1024)


def main():
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, use_cache=False)
    rows = load_dataset("bigcode/the-stack-smol", split="train")
    rows = rows.shuffle(seed=1)
    parts = rows.train_test_split(test_size=0.05)
    parts = parts.map(tokenize, batched=True)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 * 8,
        num_train_epochs=1,
        eval_strategy="epoch",
        bf16=True,
        gradient_checkpointing=True,
        hub_token="hf_" + "abcdefghijABCDEFGHIJ0123456789",
        **common,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        data_collator=collator,
    ).train()


if __name__ == "__main__":
    main()
