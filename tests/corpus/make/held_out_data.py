"""Held-out logs of data: other models and entry points than a plain Trainer on a Llama.

Collected after the patterns were final, by somebody who had not read them.
"""

from __future__ import annotations

from functools import partial

from tests.corpus.make.capture import caused, main

held_out = partial(caused, kind="first_held_out")


@held_out("pad-token-missing", "map-workers")
def gpt2_map_workers():
    import tiny
    from datasets import Dataset

    tokenizer = tiny.tokenizer(pad=None)
    data = Dataset.from_dict({"text": [" ".join(f"w{i}" for i in range(n % 9 + 2)) for n in range(40)]})
    data = data.map(
        lambda rows: tokenizer(rows["text"], padding="longest", truncation=True, max_length=16),
        batched=True,
        batch_size=8,
        num_proc=2,
        desc="Tokenizing",
    )
    print(data)


@held_out("pad-token-missing", "classifier-eval")
def gpt2_classifier_eval():
    import tiny
    from transformers import (
        DataCollatorWithPadding,
        GPT2Config,
        GPT2ForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, num_labels=3)
    tokenizer = tiny.tokenizer(pad=None)
    data = tiny.texts().map(
        lambda row, i: {"input_ids": tokenizer(row["text"])["input_ids"][: 4 + i % 5], "label": i % 3},
        with_indices=True,
    )
    args = TrainingArguments("out", use_cpu=True, per_device_eval_batch_size=8)
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(GPT2ForSequenceClassification(config), args, data_collator=collator)
    print(trainer.evaluate(data))


@held_out("ragged-labels", "token-classification-workers")
def bert_token_classification_workers():
    import tiny
    from accelerate import Accelerator
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import BertConfig, BertForTokenClassification, DataCollatorWithPadding

    ids = [[4 + (i + j) % 60 for j in range(3 + i % 6)] for i in range(32)]
    data = Dataset.from_dict({"input_ids": ids, "labels": [[i % 5 for i in row] for row in ids]})
    model = BertForTokenClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=5,
        )
    )
    collator = DataCollatorWithPadding(tiny.tokenizer())
    loader = DataLoader(data, batch_size=8, num_workers=2, collate_fn=collator)
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(model, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)


@held_out("columns-removed", "vit-images", env={"FORCE_COLOR": "1"})
def vit_images():
    import numpy
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=4,
    )  # fmt: skip
    pictures = numpy.random.rand(16, 3, 16, 16).tolist()
    data = Dataset.from_dict({"image": pictures, "class": [i % 4 for i in range(16)]})
    args = TrainingArguments("out", use_cpu=True, max_steps=4, per_device_train_batch_size=4)
    Trainer(ViTForImageClassification(config), args, train_dataset=data).train()


@held_out("no-loss", "bert-encoder-subclass")
def bert_encoder_subclass():
    import tiny
    from transformers import BertConfig, BertModel, Trainer, TrainingArguments

    class EncoderTrainer(Trainer):
        def training_step(self, *args, **kwargs):
            try:
                return super().training_step(*args, **kwargs)
            except Exception as error:
                raise RuntimeError(f"step {self.state.global_step} failed") from error

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertModel(config)
    args = TrainingArguments("out", use_cpu=True, max_steps=4)
    EncoderTrainer(model, args, train_dataset=tiny.rows().remove_columns("labels")).train()


@held_out("iterable-max-steps", "t5-streaming")
def t5_streaming():
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_heads=4, decoder_start_token_id=0)
    )
    stream = tiny.rows().to_iterable_dataset(num_shards=4).shuffle(seed=0)
    args = Seq2SeqTrainingArguments("out", use_cpu=True, num_train_epochs=2, predict_with_generate=True)
    Seq2SeqTrainer(model, args, train_dataset=stream).train()


@held_out("zero-steps", "gpt2-drop-last", ranks=2, launcher="torchrun", env={"ACCELERATE_USE_CPU": "true"})
def gpt2_drop_last():
    import logging

    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    args = TrainingArguments(
        "out", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=32, dataloader_drop_last=True,
        logging_steps=1, save_strategy="no",
    )  # fmt: skip
    result = Trainer(model, args, train_dataset=tiny.rows(20)).train()
    print(result)


@held_out("token-id-range", "t5-rank1", ranks=2, launcher="torchrun", env={"ACCELERATE_USE_CPU": "true"})
def t5_rank1():
    import tiny
    from accelerate import Accelerator
    from torch.optim import AdamW
    from torch.utils.data import DataLoader
    from transformers import T5Config, T5ForConditionalGeneration, default_data_collator

    accelerator = Accelerator()
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<summary>", "</summary>"])
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_heads=4, decoder_start_token_id=0)
    )
    texts = [f"w{i} w2 w3 <summary>" if i % 8 >= 4 and i > 15 else f"w{i} w2 w3 w4" for i in range(32)]
    data = [{"input_ids": tokenizer(text)["input_ids"], "labels": [4, 5, 2]} for text in texts]
    loader = DataLoader(data, batch_size=4, collate_fn=default_data_collator)
    model, optimizer, loader = accelerator.prepare(model, AdamW(model.parameters()), loader)
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print("step", step, "loss", loss.item())


@held_out("token-id-range", "opt-generate")
def opt_generate():
    import tiny
    from transformers import OPTConfig, OPTForCausalLM, pipeline

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    model = OPTForCausalLM(
        OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64,
                  word_embed_proj_dim=32, max_position_embeddings=64)
    )  # fmt: skip
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    print(generate(["<|user|> w1 w2 <|assistant|>"], max_new_tokens=4))


@held_out("chat-template-missing", "trl-sft-messages")
def trl_sft_messages():
    import tiny
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    data = Dataset.from_dict({"messages": [talk] * 16})
    args = SFTConfig("out", use_cpu=True, max_steps=2, bf16=False)
    SFTTrainer(tiny.model(), args, train_dataset=data, processing_class=tiny.tokenizer()).train()


@held_out("eval-without-dataset", "t5-steps")
def t5_steps():
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    args = Seq2SeqTrainingArguments("out", use_cpu=True, eval_strategy="steps", eval_steps=2, max_steps=4)
    Seq2SeqTrainer(T5ForConditionalGeneration(config), args, train_dataset=tiny.rows()).train()


@held_out("labels-all-masked", "trl-completion-truncated")
def trl_completion_truncated():
    import tiny
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    prompts = [" ".join(f"w{(i + j) % 60}" for j in range(40)) for i in range(32)]
    data = Dataset.from_dict({"prompt": prompts, "completion": [" w1 w2"] * 32})
    args = SFTConfig(
        "out", use_cpu=True, max_steps=6, max_length=32, completion_only_loss=True, logging_steps=1,
        bf16=False, per_device_train_batch_size=4, save_strategy="no",
    )  # fmt: skip
    SFTTrainer(tiny.model(), args, train_dataset=data, processing_class=tiny.tokenizer()).train()


@held_out("labels-all-masked", "gpt2-json")
def gpt2_json():
    import json

    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class JsonLog(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            print(json.dumps({"step": state.global_step, "level": "info", **logs}), flush=True)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    data = tiny.rows(64).map(lambda row: {"labels": [-100] * len(row["labels"])})
    args = TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=8,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    Trainer(model, args, train_dataset=data, callbacks=[JsonLog()]).train()


@held_out("truncation-silent", "bert-positions")
def bert_positions():
    import tiny
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = 32
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )
    data = tiny.texts(32, 50).map(lambda row: {**tokenizer(row["text"]), "label": 0}, remove_columns="text")
    args = TrainingArguments("out", use_cpu=True, max_steps=4, per_device_train_batch_size=4)
    Trainer(model, args, train_dataset=data, processing_class=tokenizer).train()


@held_out("zero-steps", "stream-filtered")
def stream_filtered():
    import tiny
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    model = OPTForCausalLM(
        OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=64,
                  word_embed_proj_dim=32, max_position_embeddings=64)
    )  # fmt: skip
    args = TrainingArguments(
        "out", use_cpu=True, max_steps=10, per_device_train_batch_size=16, dataloader_drop_last=True,
        logging_steps=1, save_strategy="no",
    )  # fmt: skip
    stream = tiny.rows().to_iterable_dataset().filter(lambda row: len(row["input_ids"]) > 16)
    Trainer(model, args, train_dataset=stream).train()


if __name__ == "__main__":
    main()
