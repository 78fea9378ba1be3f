"""A fine-tune by hand, as one writes it for the Hugging Face Trainer: LoRA, padded batches.

    python plain.py MODEL ROWS.jsonl OUTPUT --max-length 512 --batch 4 --accumulation 1 --steps 10 \\
        --precision fp32
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("output")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    options = parser.parse_args()
    half = options.precision == "bf16"
    set_seed(42)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = load_dataset("json", data_files=options.rows, split="train")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text + tokenizer.eos_token for text in batch["text"]]
        ids = tokenizer(texts, truncation=True, max_length=options.max_length)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names)

    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16 if half else torch.float32, attn_implementation="sdpa"
    )
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    trainer = Trainer(
        model=get_peft_model(model, lora),
        args=TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=half,
            use_cpu=not torch.cuda.is_available(),
            train_sampling_strategy="sequential",
        ),
        train_dataset=encoded,
        # DataCollatorForLanguageModeling would leave the end-of-text token unlearnt, which pads here.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    trainer.save_model(options.output)


if __name__ == "__main__":
    main()
