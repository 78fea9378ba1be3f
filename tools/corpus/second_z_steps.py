"""Second held-out logs: counts of steps, ids outside the vocabulary, templates, evaluation without data."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, SRUN, held, shell


@shell("iterable-max-steps", "z2-trl-clock", f"accelerate launch --cpu train.py 2>&1 | {CLOCK}")
def sft_stream():
    import warnings

    import tiny
    from trl import SFTConfig, SFTTrainer

    for name in ("w0", "w1", "w2"):
        warnings.warn(f"the word {name} is rare in the corpus", stacklevel=1)
    args = SFTConfig(
        "sft-stream", use_cpu=True, bf16=False, max_length=32, num_train_epochs=1, report_to="none"
    )
    data = tiny.texts(64).to_iterable_dataset()
    SFTTrainer(tiny.model(), args, train_dataset=data, processing_class=tiny.tokenizer()).train()


@shell(
    "max-steps-wins",
    "z2-ranks-tail",
    f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {SRUN} | tail -n 30",
)
def steps_over_epochs_in_ranks():
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    data = [{"input_ids": [4, 5, 6, 7], "label": i % 2} for i in range(640)]
    args = TrainingArguments(
        "bert", use_cpu=True, num_train_epochs=3, max_steps=10, log_level="info", logging_steps=5,
        report_to="none", disable_tqdm=True, save_strategy="no", ddp_find_unused_parameters=False,
    )  # fmt: skip
    Trainer(model, args, train_dataset=data).train()


@held("zero-steps", "z2-drop-last", launcher="torchrun", ranks=2)
def fewer_rows_than_batch():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    data = [{"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7]} for i in range(10)]
    args = TrainingArguments(
        "gpt2",
        use_cpu=True,
        max_steps=50,
        per_device_train_batch_size=16,
        dataloader_drop_last=True,
        report_to="none",
        save_strategy="no",
        ddp_find_unused_parameters=False,
    )
    Trainer(model, args, train_dataset=data).train()


@held("zero-steps", "z2-empty-stream")
def empty_stream():
    from datasets import IterableDataset
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    def rows():
        for i in range(50):
            if i > 60:  # the filter leaves nothing
                yield {"input_ids": [4] * 8, "labels": [4] * 8}

    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    )
    args = TrainingArguments("opt", use_cpu=True, max_steps=100, report_to="none", save_strategy="no")
    Trainer(model, args, train_dataset=IterableDataset.from_generator(rows)).train()


@held("token-id-range", "z2-neox-added", launcher="torchrun", ranks=2)
def added_token():
    import tiny
    from transformers import DataCollatorForLanguageModeling, GPTNeoXConfig, GPTNeoXForCausalLM, Trainer
    from transformers import TrainingArguments as Arguments

    tok = tiny.tokenizer()
    added = tok.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    print("added", added, "tokens, tokenizer now", len(tok))
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    data = tiny.texts(32).map(
        lambda row: tok("<|user|> " + row["text"] + " <|assistant|> w1"), remove_columns="text"
    )
    args = Arguments("neox-chat", use_cpu=True, max_steps=4, report_to="none", disable_tqdm=True)
    Trainer(
        model, args, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tok, mlm=False)
    ).train()


@shell("chat-template-missing", "z2-pipeline", "python -X dev train.py 2>&1 | tail -n 22")
def chat_in_pipeline():
    import tiny
    from transformers import pipeline

    generate = pipeline("text-generation", model=tiny.model(), tokenizer=tiny.tokenizer(), device="cpu")
    print(
        generate(
            [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1 w2"}], max_new_tokens=4
        )
    )


@held("eval-without-dataset", "z2-seq2seq")
def eval_epoch():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    data = [{"input_ids": [4] * 8, "labels": [5] * 4} for i in range(16)]
    args = Seq2SeqTrainingArguments("t5", use_cpu=True, eval_strategy="epoch", predict_with_generate=True)
    try:
        trainer = Seq2SeqTrainer(model, args, train_dataset=data)
    except ValueError as error:
        raise SystemExit(f"could not build the trainer: {type(error).__name__}: {error}") from error
    trainer.train()


@held("eval-without-dataset", "z2-evaluate-call", launcher="accelerate")
def evaluate_nothing():
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    data = [{"input_ids": [4, 5, 6, 7], "label": i % 2} for i in range(32)]
    args = TrainingArguments(
        "bert", use_cpu=True, max_steps=2, report_to="none", save_strategy="no", logging_steps=1
    )
    trainer = Trainer(model, args, train_dataset=data)
    print(trainer.train().metrics)
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
