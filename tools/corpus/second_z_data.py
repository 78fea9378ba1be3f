"""Second held-out logs of failures in the data: models and collators other than those of the tiny Llama."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import DOCKER, SRUN, held, shell

TAIL = "tail -n 30"
"""As people paste a log."""


@shell(
    "pad-token-missing",
    "z2-map-workers",
    f"python prepare.py 2>&1 | cat; python train.py 2>&1 | {TAIL}",
    files={"prepare.py": "print('[prepare] 64 rows, 2 shards')\n"},
)
def pad_in_map():
    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel

    tok = tiny.tokenizer(pad=None)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))

    def encode(batch):
        return tok(batch["text"], truncation=True, padding="max_length", max_length=32)

    if __name__ == "__main__":
        print(f"{model.num_parameters():,} parameters")
        data = tiny.texts(64).map(encode, batched=True, num_proc=2, desc="Tokenizing")
        print(data)


@held("truncation-silent", "z2-gpt2-positions")
def too_long_positions():
    import tiny
    from transformers import (
        DataCollatorForLanguageModeling,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
    )

    tok = tiny.tokenizer()
    tok.model_max_length = 32
    data = tiny.texts(40, length=50).map(lambda row: tok(row["text"]), remove_columns="text")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    args = TrainingArguments("gpt2-clm", use_cpu=True, per_device_train_batch_size=4, max_steps=10)
    Trainer(
        model, args, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tok, mlm=False)
    ).train()


@shell("truncation-silent", "z2-pipeline", "python train.py > out.txt 2> err.txt; cat err.txt out.txt")
def too_long_pipeline():
    import tiny
    from transformers import BertConfig, BertForSequenceClassification, pipeline

    tok = tiny.tokenizer()
    tok.model_max_length = 24
    tok.model_input_names = ["input_ids", "attention_mask"]
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=24,
        )
    )
    classify = pipeline("text-classification", model=model, tokenizer=tok, device="cpu")
    print(classify("w1 w2 w3"))
    for row in tiny.texts(4, length=60):
        print(classify(row["text"]))


@held("labels-all-masked", "z2-trl-completion")
def masked_by_truncation():
    import tiny
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict(
        {
            "prompt": [" ".join(f"w{(i + j) % 60}" for j in range(40)) for i in range(32)],
            "completion": [" w3 w4 w5"] * 32,
        }
    )
    args = SFTConfig(
        "sft",
        use_cpu=True,
        bf16=False,
        max_length=32,
        completion_only_loss=True,
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        report_to="none",
        eval_strategy="steps",
        eval_steps=3,
    )
    SFTTrainer(
        tiny.model(),
        args,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tiny.tokenizer(),
    ).train()


@held("ragged-labels", "z2-token-classification")
def ragged_tags():
    import tiny
    from datasets import Dataset
    from transformers import (
        BertConfig,
        BertForTokenClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    lengths = [5 + i % 7 for i in range(32)]
    data = Dataset.from_dict(
        {
            "input_ids": [[4] * n for n in lengths],
            "attention_mask": [[1] * n for n in lengths],
            "labels": [[1] * n for n in lengths],
        }
    )
    model = BertForTokenClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=3,
        )
    )
    args = TrainingArguments("ner", use_cpu=True, max_steps=4, report_to="none")
    try:
        Trainer(
            model, args, train_dataset=data, data_collator=DataCollatorWithPadding(tiny.tokenizer())
        ).train()
    except ValueError as error:
        raise RuntimeError("NER training failed, see above") from error


@shell(
    "ragged-labels", "z2-default-collator", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {SRUN}"
)
def ragged_seq2seq():
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
        default_data_collator,
    )

    data = Dataset.from_dict(
        {
            "input_ids": [[4, 5, 6, 7]] * 32,
            "labels": [[5] * (3 + i % 4) for i in range(32)],
        }
    )
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    args = Seq2SeqTrainingArguments(
        "t5", use_cpu=True, max_steps=4, report_to="none", per_device_train_batch_size=8
    )
    Seq2SeqTrainer(model, args, train_dataset=data, data_collator=default_data_collator).train()
    dist.destroy_process_group()


@shell("columns-removed", "z2-whisper-docker", f"python train.py 2>&1 | {DOCKER}")
def raw_audio():
    from datasets import Dataset
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    data = Dataset.from_dict({"audio": [[0.0] * 400] * 16, "sentence": ["w1 w2"] * 16})
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )
    args = Seq2SeqTrainingArguments("whisper", use_cpu=True, max_steps=4, report_to="none", disable_tqdm=True)
    Seq2SeqTrainer(model, args, train_dataset=data).train()


@held("no-loss", "z2-bert-headless")
def headless():
    import logging

    from rich.logging import RichHandler
    from transformers import AutoModel, BertConfig, Trainer, TrainingArguments

    logging.basicConfig(level="INFO", format="%(message)s", handlers=[RichHandler()])
    log = logging.getLogger("finetune")
    model = AutoModel.from_config(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    data = [{"input_ids": [4, 5, 6, 7], "attention_mask": [1] * 4} for i in range(16)]
    log.info("training %s", type(model).__name__)
    try:
        Trainer(model, TrainingArguments("bert", use_cpu=True, max_steps=2), train_dataset=data).train()
    except Exception:
        log.exception("training failed")
        raise SystemExit(1) from None


@held("no-loss", "z2-gpt2-no-labels", launcher="torchrun", ranks=2)
def unlabelled():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    data = [{"input_ids": [4, 5, 6, 7], "attention_mask": [1] * 4} for i in range(32)]
    args = TrainingArguments(
        "gpt2", use_cpu=True, max_steps=2, report_to="none", ddp_find_unused_parameters=False
    )
    Trainer(model, args, train_dataset=data).train()


if __name__ == "__main__":
    main()
