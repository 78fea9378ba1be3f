"""Second held-out logs of DeepSpeed checkpoints that another run cannot continue."""

from __future__ import annotations

from typing import Any

from tools.corpus.capture import main
from tools.corpus.ds_scripts import AUTO
from tools.corpus.held_out_shell import CLOCK, DOCKER, SRUN, held, shell


def _zero(stage: int, **more: object) -> dict[str, Any]:
    return {"ds.json": {**AUTO, "zero_optimization": {"stage": stage}, **more}}


STAGES = {"ds2.json": _zero(2)["ds.json"], "ds3.json": _zero(3)["ds.json"]}


@shell(
    "zero-world-size",
    "z2-trainer-docker",
    files=_zero(2),
    command=(
        "torchrun --standalone --nproc_per_node=1 train.py > first.txt 2>&1; tail -n 3 first.txt; "
        f"torchrun --standalone --nproc_per_node=2 train.py last 2>&1 | {DOCKER}"
    ),
)
def more_ranks_trainer():
    import sys

    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    args = TrainingArguments(
        "out",
        deepspeed="ds.json",
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    data = [{"input_ids": [4, 5, 6, 7], "label": i % 2} for i in range(64)]
    last = "out/checkpoint-2" if len(sys.argv) > 1 else None
    Trainer(model, args, train_dataset=data).train(resume_from_checkpoint=last)


@shell(
    "zero-stage-change",
    "z2-two-to-three",
    files=STAGES,
    command=(
        "deepspeed --num_accelerators 2 train.py ds2.json > first.log 2>&1; "
        f"deepspeed --num_accelerators 2 train.py ds3.json 2>&1 | {CLOCK}"
    ),
)
def stage_up():
    import sys
    from pathlib import Path

    import tiny
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    config = next(name for name in sys.argv if name.endswith(".json"))
    args = TrainingArguments(
        "out",
        deepspeed=config,
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
    )
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
    last = "out/checkpoint-2" if Path("out/checkpoint-2").exists() and "3" in config else None
    Trainer(model, args, train_dataset=tiny.rows()).train(resume_from_checkpoint=last)


@shell(
    "save-only-model-resume",
    "z2-bert-srun",
    files=_zero(2),
    command=(
        "torchrun --standalone --nproc_per_node=2 train.py > first.log 2>&1; "
        f"torchrun --standalone --nproc_per_node=2 train.py again 2>&1 | {SRUN} | tail -n 60"
    ),
)
def only_model_saved():
    import sys

    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    args = TrainingArguments(
        "out",
        deepspeed="ds.json",
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
        save_only_model=True,
    )
    data = [{"input_ids": [4, 5, 6, 7], "label": i % 2} for i in range(64)]
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    last = "out/checkpoint-2" if "again" in sys.argv else None
    Trainer(model, args, train_dataset=data).train(resume_from_checkpoint=last)


@shell(
    "save-only-model-resume",
    "z2-t5-deepspeed",
    files=_zero(3),
    command=(
        "deepspeed --num_accelerators 2 train.py 2>&1; deepspeed --num_accelerators 2 train.py again 2>&1"
    ),
)
def only_model_saved_t5():
    import sys

    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    args = Seq2SeqTrainingArguments(
        "out",
        deepspeed="ds.json",
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
        save_only_model=True,
    )
    data = [{"input_ids": [4] * 8, "labels": [5] * 4} for i in range(32)]
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    Seq2SeqTrainer(model, args, train_dataset=data).train(resume_from_checkpoint="again" in sys.argv)


@held("save-only-model-best", "z2-torchrun", launcher="torchrun", ranks=2, files=_zero(2))
def only_model_best():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    args = Seq2SeqTrainingArguments(
        "out",
        deepspeed="ds.json",
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
        save_only_model=True,
        report_to="none",
    )
    data = [{"input_ids": [4] * 8, "labels": [5] * 4} for i in range(32)]
    Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data).train()


@shell(
    "save-only-model-best",
    "z2-sft-accelerate",
    files=_zero(3),
    command="accelerate launch --num_processes=1 --num_machines=1 train.py 2>&1 | tail -n 12",
)
def only_model_best_sft():
    import os

    import tiny
    from trl import SFTConfig, SFTTrainer

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    args = SFTConfig(
        "sft",
        use_cpu=True,
        bf16=False,
        deepspeed="ds.json",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        save_only_model=True,
        max_length=32,
        report_to="none",
    )
    data = tiny.texts()
    SFTTrainer(
        tiny.model(), args, train_dataset=data, eval_dataset=data, processing_class=tiny.tokenizer()
    ).train()


if __name__ == "__main__":
    main()
