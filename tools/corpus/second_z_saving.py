"""Second held-out logs of failures at saving and resuming, without DeepSpeed."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import DOCKER, SRUN, held, shell

SMALL_DISK = "mkdir -p out && mount -t tmpfs -o size={size} none out"
"""A file system of its own that fills up; in a mount namespace, so that it goes away with the run."""


@held("rng-weights-only", "z2-one-rank", launcher="torchrun", ranks=2)
def rng_of_one_rank():
    import os
    import pathlib

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    data = [{"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7]} for i in range(64)]
    args = TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        ddp_find_unused_parameters=False,
    )
    Trainer(model, args, train_dataset=data).train()
    torch.distributed.barrier()
    if os.environ["RANK"] == "1":  # as a script left it that kept its own state in the file
        state = torch.load("out/checkpoint-2/rng_state_1.pth", weights_only=False)
        state["loader"] = pathlib.PurePosixPath("shards/0007.arrow")
        torch.save(state, "out/checkpoint-2/rng_state_1.pth")
    torch.distributed.barrier()
    Trainer(model, args, train_dataset=data).train(resume_from_checkpoint="out/checkpoint-2")


@shell(
    "no-checkpoint",
    "z2-trl-ranks",
    f"mkdir dpo; torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {SRUN}",
)
def nothing_to_resume_dpo():
    import tiny
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_dict({"prompt": ["w1 w2"] * 16, "chosen": [" w3"] * 16, "rejected": [" w4"] * 16})
    args = DPOConfig("dpo", use_cpu=True, bf16=False, max_steps=2, report_to="none", max_length=32)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    trainer = DPOTrainer(
        tiny.model(), args=args, train_dataset=data, processing_class=tiny.tokenizer(), peft_config=lora
    )
    trainer.train(resume_from_checkpoint=True)


@shell(
    "resume-args-drift",
    "z2-seq2seq-docker",
    f"torchrun --standalone --nproc_per_node=2 train.py 3 > one.log 2>&1; python train.py 5 2>&1 | {DOCKER}",
)
def other_ranks_and_batch():
    import sys

    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )  # fmt: skip
    data = [{"input_ids": [4] * 8, "labels": [5] * 4} for i in range(96)]
    batch = int(sys.argv[1])
    args = Seq2SeqTrainingArguments(
        "t5", use_cpu=True, num_train_epochs=1, save_steps=6, logging_steps=4, report_to="none",
        per_device_train_batch_size=batch, disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    last = "t5/checkpoint-6" if batch == 5 else None
    Seq2SeqTrainer(model, args, train_dataset=data).train(resume_from_checkpoint=last)


@held("best-strategy", "z2-sft-multiple")
def best_multiple():
    import tiny
    from trl import SFTConfig, SFTTrainer

    print("building the config")
    args = SFTConfig(
        "sft",
        use_cpu=True,
        bf16=False,
        eval_strategy="steps",
        eval_steps=200,
        save_steps=500,
        load_best_model_at_end=True,
        report_to="none",
    )
    data = tiny.texts()
    SFTTrainer(
        tiny.model(), args, train_dataset=data, eval_dataset=data, processing_class=tiny.tokenizer()
    ).train()


@held("best-metric", "z2-vit-accuracy")
def missing_metric():
    import torch
    from transformers import (
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
        ViTConfig,
        ViTForImageClassification,
    )

    data = [{"pixel_values": torch.rand(3, 32, 32), "labels": i % 2} for i in range(16)]
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32
        )
    )
    args = TrainingArguments(
        "vit",
        use_cpu=True,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    )
    Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda out: {"acc": float((out.predictions.argmax(-1) == out.label_ids).mean())},
        callbacks=[EarlyStoppingCallback(2)],
    ).train()


@shell(
    "peft-prompt-best", "z2-prefix-ranks", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {SRUN}"
)
def prefix_best():
    import tiny
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    prefix = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16
    )
    model = get_peft_model(tiny.model(), prefix)
    data = tiny.rows()
    args = TrainingArguments(
        "prefix",
        use_cpu=True,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        load_best_model_at_end=True,
        label_names=["labels"],
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    Trainer(model, args, train_dataset=data, eval_dataset=data).train()


@shell(
    "checkpoint-disk",
    "z2-safetensors",
    f"unshare -m bash -c '{SMALL_DISK.format(size='200k')}; python train.py' 2>&1 | tail -n 30",
)
def disk_full_weights():
    from transformers import BloomConfig, BloomForCausalLM, Trainer, TrainingArguments

    model = BloomForCausalLM(BloomConfig(vocab_size=2000, hidden_size=64, n_layer=2, n_head=2))
    data = [{"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7]} for i in range(32)]
    args = TrainingArguments("out", use_cpu=True, max_steps=4, save_steps=2, report_to="none")
    Trainer(model, args, train_dataset=data).train()


@shell(
    "checkpoint-disk",
    "z2-optimizer",
    f"unshare -m bash -c '{SMALL_DISK.format(size='900k')}; python train.py; df -h out' 2>&1",
)
def disk_full_optimizer():
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=2000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    )
    data = [{"input_ids": [4, 5, 6, 7], "label": i % 2} for i in range(64)]
    args = TrainingArguments(
        "out", use_cpu=True, max_steps=4, save_steps=2, report_to="none", logging_steps=1
    )
    Trainer(model, args, train_dataset=data).train()


if __name__ == "__main__":
    main()
