"""Third held-out set: checkpoints that cannot be written, found or taken up again."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, DOCKER, SRUN, shell
from tests.corpus.make.third_w_base import AUTO, rank


@shell("rng-weights-only", "w3-own-generator", f"python train.py 2>&1 | {CLOCK}")
def rng():
    from pathlib import Path

    import numpy as np
    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    class Reproducible(Trainer):
        """Also keeps the generator of the augmentation."""

        augment = np.random.RandomState(7)

        def _save_rng_state(self, output_dir):
            super()._save_rng_state(output_dir)
            file = Path(output_dir) / "rng_state.pth"
            torch.save({**torch.load(file, weights_only=False), "augment": self.augment}, file)

    def run(steps, **resume):
        args = TrainingArguments(
            "out", use_cpu=True, max_steps=steps, save_steps=2, logging_steps=1, report_to="none"
        )
        Reproducible(tiny.model(), args, train_dataset=tiny.rows()).train(**resume)

    run(2)
    run(4, resume_from_checkpoint=True)


@shell(
    "zero-world-size",
    "w3-fewer-gpus",
    "torchrun --nproc_per_node 2 --master_port 29850 train.py save > first.log 2>&1; "
    f"torchrun --nproc_per_node 1 --master_port 29851 train.py load 2>&1 | {SRUN}",
)
def world_size():
    import sys

    import deepspeed
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    deepspeed.init_distributed("gloo")
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    ids = torch.randint(4, 60, (2, 8))
    if sys.argv[1] == "load":
        engine.load_checkpoint("ckpt", tag="step2")
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint("ckpt", tag="step2")


@shell(
    "zero-stage-change",
    "w3-out-of-memory-plan",
    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29852 "
    "python train.py z2.json > first.log 2>&1; "
    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29853 python train.py z3.json 2>&1",
    files={
        "z2.json": {**AUTO, "zero_optimization": {"stage": 2}},
        "z3.json": {**AUTO, "zero_optimization": {"stage": 3}},
    },
)
def stage_change():
    import sys
    from pathlib import Path

    import tiny
    from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

    resume = Path("out/checkpoint-2").exists()
    args = TrainingArguments(
        "out",
        deepspeed=sys.argv[1],
        use_cpu=True,
        max_steps=4 if resume else 2,
        save_steps=2,
        report_to="none",
    )
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        )
    )
    print("resuming with", sys.argv[1], "from checkpoint-2" if resume else "nothing", flush=True)
    Trainer(model, args, train_dataset=tiny.rows()).train(resume_from_checkpoint=resume)


@shell(
    "save-only-model-resume",
    "w3-sft",
    "python train.py 2>&1 | tail -n 30",
    rank(29854),
    {"z2.json": {**AUTO, "zero_optimization": {"stage": 2}}},
)
def save_only_model_resume():
    import tiny
    from trl import SFTConfig, SFTTrainer

    def trainer(steps):
        args = SFTConfig(
            "sft",
            deepspeed="z2.json",
            use_cpu=True,
            max_steps=steps,
            save_steps=2,
            save_only_model=True,
            max_length=16,
            report_to="none",
        )
        return SFTTrainer(tiny.saved("base"), args=args, train_dataset=tiny.texts())

    trainer(2).train()
    trainer(6).train(resume_from_checkpoint="sft/checkpoint-2")


@shell(
    "save-only-model-best",
    "w3-bert",
    f"python train.py 2>&1 | {DOCKER}",
    rank(29855),
    {"z1.json": {**AUTO, "zero_optimization": {"stage": 1}}},
)
def save_only_model_best():
    import tiny
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    args = TrainingArguments(
        "bert",
        deepspeed="z1.json",
        use_cpu=True,
        save_only_model=True,
        load_best_model_at_end=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    Trainer(model, args, train_dataset=tiny.rows(), eval_dataset=tiny.rows(8)).train()


@shell("no-checkpoint", "w3-t5-wrapped", "python train.py 2>&1")
def no_checkpoint():
    import sys
    import traceback

    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    args = Seq2SeqTrainingArguments("runs/t5-summaries", use_cpu=True, max_steps=4, report_to="none")
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    try:
        Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train(resume_from_checkpoint=True)
    except Exception as error:
        print("\x1b[31m[FATAL]\x1b[0m", "".join(traceback.format_exception_only(error)), file=sys.stderr)
        traceback.print_tb(error.__traceback__, limit=-2)
        sys.exit(1)


@shell(
    "best-strategy",
    "w3-command-line",
    "python train.py --output_dir o --load_best_model_at_end True --eval_strategy steps --eval_steps 50"
    f" --save_strategy epoch 2>&1 | {SRUN}",
)
def best_strategy():
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    print(args.output_dir)


@shell("best-metric", "w3-vit", "python train.py 2>&1 | tail -n 30")
def best_metric():
    import numpy as np
    import torch
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(16)]
    args = TrainingArguments(
        "vit",
        use_cpu=True,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        report_to="none",
        remove_unused_columns=False,
    )
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
        )
    )
    Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())},
    ).train()


@shell("shared-tensors", "w3-save-file", f"python train.py 2>&1 | {CLOCK}")
def shared_tensors():
    import torch
    from accelerate import Accelerator
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(cpu=True)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(3):
        ids = torch.randint(0, 64, (2, 16))
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.3f}")
    save_file(accelerator.unwrap_model(model).state_dict(), "model.safetensors")


@shell(
    "checkpoint-disk",
    "w3-small-volume",
    "mkdir runs; mount -t tmpfs -o size=700k tmpfs runs; python train.py 2>&1; umount runs",
)
def checkpoint_disk():
    import tiny
    from transformers import BloomConfig, BloomForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(
        "runs/bloom", use_cpu=True, max_steps=40, save_steps=5, logging_steps=5, report_to="none"
    )
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2))
    Trainer(model, args, train_dataset=tiny.rows()).train()


@shell(
    "zero3-no-gather",
    "w3-then-load",
    f"python train.py 2>&1 | {CLOCK} | tail -n 40",
    rank(29856),
    {"z3.json": {**AUTO, "zero_optimization": {"stage": 3}}},
)
def no_gather():
    import tiny
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    args = TrainingArguments(
        "gpt2-out", deepspeed="z3.json", use_cpu=True, max_steps=2, save_steps=2, report_to="none"
    )
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    Trainer(model, args, train_dataset=tiny.rows()).train()
    print("testing the checkpoint", flush=True)
    AutoModelForCausalLM.from_pretrained("gpt2-out/checkpoint-2")


if __name__ == "__main__":
    main()
