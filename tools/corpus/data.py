"""Failures of data: tokens, labels, batches, and the length of training."""

from __future__ import annotations

from tools.corpus.capture import caused, main


@caused("zero-steps")
def zero_steps():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", per_device_train_batch_size=64, num_train_epochs=1, dataloader_drop_last=True, use_cpu=True
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows(8)).train()


@caused("pad-token-missing", "classification")
def pad_token_missing_in_model():
    import tiny
    from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

    rows = tiny.rows().map(lambda row: {"labels": len(row["input_ids"]) % 2})
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    model = LlamaForSequenceClassification(tiny.config(pad_token_id=None))
    Trainer(model, args, train_dataset=rows).train()


if __name__ == "__main__":
    main()
