"""Third held-out set: memory that does not suffice, and services that are not there."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, DOCKER, SRUN, shell


@shell("auto-batch-eval-oom", "w3-memory-limit", "python train.py 2>&1 | tail -n 40")
def auto_batch_eval():
    import resource
    from pathlib import Path

    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=30000, n_positions=64))
    args = TrainingArguments(
        "out",
        use_cpu=True,
        auto_find_batch_size=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=512,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=tiny.rows(32, 32), eval_dataset=tiny.rows(512, 32))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (900 << 20), resource.RLIM_INFINITY))
    trainer.train()


@shell("eval-oom", "w3-predictions", f"python train.py 2>&1 | {DOCKER}")
def eval_oom():
    import resource
    from pathlib import Path

    import tiny
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=20000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    args = TrainingArguments("out", use_cpu=True, per_device_eval_batch_size=4, report_to="none")
    trainer = Trainer(
        model, args, eval_dataset=tiny.rows(400, 32), compute_metrics=lambda p: {"size": p.predictions.size}
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (900 << 20), resource.RLIM_INFINITY))
    print(trainer.evaluate())


@shell("logits-oom", "w3-opt-bf16", f"python train.py 2>&1 | {SRUN}")
def logits_oom():
    import resource
    from pathlib import Path

    import torch
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=50272,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=32,
            max_position_embeddings=1024,
        )
    ).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    short = torch.randint(0, 50000, (1, 32))
    model(input_ids=short, labels=short).loss.backward()
    optimizer.step()
    print("warm-up step done")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (1000 << 20), resource.RLIM_INFINITY))
    ids = torch.randint(0, 50000, (6, 1024))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()


@shell("wandb-login", "w3-plain-loop", f"python train.py 2>&1 | {CLOCK}")
def wandb_login():
    import tiny
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    model = BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    args = TrainingArguments("bert", use_cpu=True, max_steps=4, report_to="wandb", run_name="bert-tiny-3")
    Trainer(model, args, train_dataset=tiny.rows()).train()


@shell("report-to-unknown", "w3-dpo", "python train.py 2>&1 | tail -n 12")
def report_to():
    import tiny
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    folder = tiny.saved("policy")
    rows = {"prompt": ["w1 w2"] * 8, "chosen": [" w3 w4"] * 8, "rejected": [" w5 w6"] * 8}
    args = DPOConfig("dpo", use_cpu=True, max_steps=2, report_to="weights_and_biases")
    DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        args=args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    ).train()


@shell("hub-unreachable", "w3-pipeline", "python train.py 2>&1")
def hub_unreachable():
    import sys

    from transformers import pipeline

    class NoModel(Exception):
        pass

    try:
        ask = pipeline(
            "summarization" if "--sum" in sys.argv else "text-classification", model="acme-lab/reviews-bert"
        )
    except OSError as error:
        raise NoModel("the classifier could not be loaded") from error
    print(ask("fine"))


@shell("hub-bad-path", "w3-whisper-folder", f"python train.py 2>&1 | {SRUN}")
def hub_bad_path():
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained("./runs/whisper/checkpoint-4000")
    print(model.config.d_model)


if __name__ == "__main__":
    main()
