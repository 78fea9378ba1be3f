"""A training script with HfArgumentParser, as many are: launch.sh starts it."""

from dataclasses import dataclass, field

import transformers
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="gpt2")


@dataclass
class DataArguments:
    train_file: str = field(default=None)
    my_own_flag: int = field(default=0)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    weight_decay: float = field(default=0.1)
    model_max_length: int = field(default=512)


def main():
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, model_max_length=training_args.model_max_length
    )
    rows = load_dataset("json", data_files=data_args.train_file, split="train")

    def tokenize(row):
        return tokenizer(row["text"], truncation=True)

    rows = rows.map(tokenize, batched=True)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model=model, args=training_args, train_dataset=rows, data_collator=collator).train()


if __name__ == "__main__":
    main()
