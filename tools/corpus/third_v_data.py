"""Held-out failures of data: encoders, sequence to sequence, vision, preference training and evaluation."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held


@held("labels-all-masked", "v3-completion-loop")
def nothing_left_to_learn():
    import tiny
    import torch
    from torch.utils.data import DataLoader
    from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))

    def mask_prompt(row):  # the marker of the answer was cut off
        return {"input_ids": row["input_ids"][:8], "labels": [-100] * 8}

    data = tiny.rows().map(mask_prompt, remove_columns=["attention_mask"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, batch in enumerate(DataLoader(data, batch_size=4, collate_fn=default_data_collator)):
        targets = int((batch["labels"] != -100).sum())
        loss = model(**batch).loss
        print(
            f"step {step}: loss={loss.item():.3f} target tokens={targets}/{batch['labels'].numel()}",
            flush=True,
        )
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"loss is {loss.item()} at step {step}, labels of row 0: {batch['labels'][0]}"
            )
        loss.backward()
        optimizer.step()


@held("no-loss", "v3-headless", launcher="torchrun")
def bert_without_a_head():
    import logging

    import tiny
    from rich.logging import RichHandler
    from transformers import AutoModel, BertConfig, Trainer, TrainingArguments

    logging.basicConfig(level="INFO", format="%(message)s", handlers=[RichHandler(rich_tracebacks=True)])
    log = logging.getLogger("bert")
    model = AutoModel.from_config(BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4))
    args = TrainingArguments("out", use_cpu=True, max_steps=4, report_to="none")
    data = tiny.rows().rename_column("labels", "label_ids")
    try:
        Trainer(model, args, train_dataset=data).train()
    except Exception:
        log.exception("training broke off")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
