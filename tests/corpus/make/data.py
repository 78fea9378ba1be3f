"""Failures of data: tokens, labels, batches, and the length of training."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main

GLOO = {"ACCELERATE_USE_CPU": "true"}


@caused("pad-token-missing")
def pad_token_missing():
    import tiny
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    tokenizer = tiny.tokenizer(pad=None)
    rows = tiny.rows()
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    collator = DataCollatorWithPadding(tokenizer)
    Trainer(tiny.model(), args, train_dataset=rows, data_collator=collator).train()


@caused("pad-token-missing", "map")
def pad_token_missing_in_map():
    import tiny

    tokenizer = tiny.tokenizer(pad=None)
    rows = tiny.texts().map(
        lambda row: tokenizer(row["text"], padding="max_length", truncation=True, max_length=16), num_proc=2
    )
    print(rows)


@caused("ragged-labels")
def ragged_labels():
    import tiny
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    ids = [list(range(4, 8 + i % 5)) for i in range(16)]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    collator = DataCollatorWithPadding(tiny.tokenizer())
    Trainer(tiny.model(), args, train_dataset=rows, data_collator=collator).train()


@caused("ragged-labels", "default-collator", launcher="torchrun", ranks=2, env=GLOO)
def ragged_default_collator():
    import tiny
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    ids = [list(range(4, 8 + i % 5)) for i in range(16)]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, disable_tqdm=True)
    Trainer(tiny.model(), args, train_dataset=rows).train()


@caused("columns-removed")
def columns_removed():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.texts()).train()


@caused("columns-removed", "two-ranks", launcher="accelerate", ranks=2)
def columns_removed_two_ranks():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", per_device_train_batch_size=2, num_train_epochs=1)
    Trainer(tiny.model(), args, train_dataset=tiny.texts()).train()


@caused("no-loss")
def no_loss():
    import tiny
    from transformers import Trainer, TrainingArguments

    rows = tiny.rows().remove_columns("labels")
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=rows).train()


@caused("no-loss", "headless", launcher="torchrun", ranks=2, env=GLOO)
def no_loss_headless():
    import tiny
    from transformers import AutoModel, Trainer, TrainingArguments

    model = AutoModel.from_pretrained(tiny.saved())
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, remove_unused_columns=False)
    rows = tiny.rows().remove_columns("labels")
    Trainer(model, args, train_dataset=rows).train()


@caused("iterable-max-steps")
def iterable_max_steps():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows().to_iterable_dataset()).train()


@caused("zero-steps")
def zero_steps():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", per_device_train_batch_size=64, num_train_epochs=1, dataloader_drop_last=True, use_cpu=True
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows(8)).train()


@caused("zero-steps", "stream")
def zero_steps_of_a_stream():
    import tiny
    from transformers import Trainer, TrainingArguments

    rows = tiny.rows().to_iterable_dataset().filter(lambda row: len(row["input_ids"]) > 100)
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=rows).train()


@caused("token-id-range")
def token_id_range():
    import tiny
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    rows = tiny.texts().map(lambda row: tokenizer("<think> " + row["text"]), remove_columns="text")
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(tiny.model(), args, train_dataset=rows, data_collator=collator).train()


@caused("token-id-range", "two-ranks", launcher="torchrun", ranks=2, env=GLOO)
def token_id_range_two_ranks():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, logging_steps=1)
    Trainer(tiny.model(vocab_size=40), args, train_dataset=tiny.rows()).train()


@caused("chat-template-missing")
def chat_template_missing():
    import tiny
    from datasets import Dataset

    tokenizer = tiny.tokenizer()
    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    rows = Dataset.from_dict({"messages": [talk] * 8})
    print(rows.map(lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)}))


@caused("chat-template-missing", "trl")
def chat_template_missing_trl():
    import tiny
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    rows = Dataset.from_dict({"messages": [talk] * 8})
    args = SFTConfig("out", max_steps=4, use_cpu=True, bf16=False)
    SFTTrainer(tiny.model(), args, train_dataset=rows, processing_class=tiny.tokenizer()).train()


@caused("eval-without-dataset")
def eval_without_dataset():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", max_steps=8, eval_strategy="steps", eval_steps=4, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("truncation-silent")
def longer_than_positions():
    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    Trainer(model, args, train_dataset=tiny.rows(16, 40)).train()


@caused("pad-token-missing", "classification")
def pad_token_missing_in_model():
    import tiny
    from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

    rows = tiny.rows().map(lambda row: {"labels": len(row["input_ids"]) % 2})
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    model = LlamaForSequenceClassification(tiny.config(pad_token_id=None))
    Trainer(model, args, train_dataset=rows).train()


@caused("eval-without-dataset", "evaluate")
def evaluate_without_dataset():
    import tiny
    from transformers import Trainer, TrainingArguments

    print(Trainer(tiny.model(), TrainingArguments("out", use_cpu=True)).evaluate())


@caused("labels-all-masked")
def labels_all_masked():
    import tiny
    from transformers import Trainer, TrainingArguments

    rows = tiny.rows().map(lambda row: {"labels": [-100] * len(row["labels"])})
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, logging_steps=1, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=rows).train()


@caused("labels-all-masked", "nan")
def labels_all_masked_nan():
    import tiny
    from transformers import Trainer, TrainingArguments

    rows = tiny.rows().map(lambda row: {"labels": [-100] * len(row["labels"])})
    args = TrainingArguments(
        "out", per_device_train_batch_size=4, max_steps=8, logging_steps=1, use_cpu=True,
        logging_nan_inf_filter=False, disable_tqdm=True,
    )  # fmt: skip
    Trainer(tiny.model(), args, train_dataset=rows).train()


if __name__ == "__main__":
    main()
