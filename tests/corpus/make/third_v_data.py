"""Held-out failures of data: encoders, sequence to sequence, vision, preference training and evaluation."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import SRUN, held, shell


@held("pad-token-missing", "v3-workers")
def collate_in_a_worker():
    import tiny
    from torch.utils.data import DataLoader
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = tiny.tokenizer(pad=None)
    model = BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4))
    lines = [" ".join(f"w{j}" for j in range(3 + i % 5)) for i in range(16)]

    def collate(batch):
        return tokenizer(batch, padding=True, return_tensors="pt")

    for batch in DataLoader(lines, batch_size=4, num_workers=2, collate_fn=collate):
        print(model(**batch).logits.shape)


@shell("truncation-silent", "v3-bert-long", "python train.py > log.txt 2>&1; tail -n 60 log.txt; exit 1")
def bert_reads_a_long_document():
    import tiny
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = 64
    config = BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    model = BertForSequenceClassification(config).eval()
    documents = [" ".join(f"w{j % 60}" for j in range(n)) for n in (20, 63, 180)]
    with torch.no_grad():
        for number, document in enumerate(documents):
            batch = tokenizer(document, return_tensors="pt")
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            print("document", number, model(**inputs).logits.argmax().item(), flush=True)


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


@held("ragged-labels", "v3-t5-padding")
def t5_pads_inputs_only():
    import tiny
    from datasets import Dataset
    from transformers import (
        DataCollatorWithPadding,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )  # fmt: skip

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    rows = [{"input_ids": [4] * (3 + i % 4), "labels": [5] * (2 + i % 6)} for i in range(32)]
    args = Seq2SeqTrainingArguments("out", use_cpu=True, max_steps=4, report_to="none", disable_tqdm=True)
    trainer = Seq2SeqTrainer(
        T5ForConditionalGeneration(config), args, train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
    )  # fmt: skip
    trainer.train()


@shell("columns-removed", "v3-vit-srun", "python train.py 2>&1 | " + SRUN)
def vit_gets_file_names():
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    files = Dataset.from_dict({"image_file": [f"cat_{i}.png" for i in range(8)], "folder": ["cats"] * 8})
    args = TrainingArguments("out", use_cpu=True, max_steps=4, report_to="none")
    Trainer(ViTForImageClassification(config), args, train_dataset=files).train()


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


@held("iterable-max-steps", "v3-streaming")
def stream_without_end():
    import tiny
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    stream = tiny.rows().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)
    args = TrainingArguments("out", use_cpu=True, num_train_epochs=3, report_to="none")
    try:
        Trainer(OPTForCausalLM(config), args, train_dataset=stream).train()
    except ValueError as error:
        raise RuntimeError("stage pretrain failed") from error


@held("zero-steps", "v3-drop-last")
def too_few_rows():
    import tiny
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

    class Logged(Trainer):
        def log(self, logs, *args, **kwargs):
            print("log:", logs)
            super().log(logs, *args, **kwargs)

    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    args = TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=100,
        per_device_train_batch_size=8,
        dataloader_drop_last=True,
        report_to="none",
    )
    trainer = Logged(GPTNeoXForCausalLM(config), args, train_dataset=tiny.rows(5))
    result = trainer.train()
    print("finished after", result.global_step, "steps of 100")


@held("token-id-range", "v3-t5-added")
def t5_with_new_words():
    import tiny
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = tiny.tokenizer()
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    added = tokenizer.add_tokens(["<sum>", "</sum>"])
    rows = model.get_input_embeddings().num_embeddings
    print(f"added {added} tokens: tokenizer {len(tokenizer)}, embeddings {rows}")
    batch = tokenizer(["<sum> w1 w2 w3 </sum>", "w5 w6 w7 w8 w9"], return_tensors="pt")
    for epoch in range(2):
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        loss.backward()
        print(epoch, torch.exp(loss).item())


@held("chat-template-missing", "v3-dpo")
def preferences_without_template():
    import tiny
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def turn(role, words):
        return [{"role": role, "content": words}]

    rows = [
        {
            "prompt": turn("user", "w1 w2"),
            "chosen": turn("assistant", "w3"),
            "rejected": turn("assistant", "w4"),
        }
        for _ in range(8)
    ]
    args = DPOConfig("dpo", use_cpu=True, bf16=False, max_steps=2, report_to="none")
    DPOTrainer(
        tiny.saved(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
    ).train()


@held("eval-without-dataset", "v3-best")
def evaluates_nothing():
    import tiny
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    class Masked(Trainer):
        """Writes what it was given."""

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    args = TrainingArguments(
        "bert-mlm", use_cpu=True, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        num_train_epochs=1, report_to="none",
    )  # fmt: skip
    data = tiny.rows().remove_columns(["labels"])
    tokenizer = tiny.tokenizer()
    tokenizer.mask_token = "w59"
    print(f"{len(data)} rows to train on, validation split: None")
    Masked(
        BertForMaskedLM(config), args, DataCollatorForLanguageModeling(tokenizer), train_dataset=data
    ).train()


if __name__ == "__main__":
    main()
