"""Held-out logs: ZeRO-3, offload and what does not go together with them.

Each function is a script of its own, see capture.py. Run: python -m tools.corpus.held_out_zero [name…]
"""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, shell

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ZERO3 = {**AUTO, "zero_optimization": {"stage": 3}}


@shell(
    "zero3-no-gather", "gpt2", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {CLOCK}",
    files={"z3.json": ZERO3},
)  # fmt: skip
def zero3_no_gather():
    from pathlib import Path

    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    args = TrainingArguments(
        "out", deepspeed="z3.json", use_cpu=True, per_device_train_batch_size=2, max_steps=3, logging_steps=1,
        learning_rate=1e-3, save_strategy="no", report_to="none",
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32))
    trainer = Trainer(gpt2, args, train_dataset=tiny.rows())
    trainer.train()
    trainer.save_model("final")
    GPT2LMHeadModel.from_pretrained("final")
    print(sorted(path.name for path in Path("final").iterdir()))


@shell(
    "jit-no-nvcc",
    "fused-lamb",
    "TORCH_CUDA_ARCH_LIST=8.0 DS_ACCELERATOR=cuda CUDA_HOME= python train.py 2>&1",
)
def no_nvcc():
    import torch
    from deepspeed.ops.lamb import FusedLamb

    FusedLamb(torch.nn.Linear(4, 4).parameters(), lr=1e-3)


if __name__ == "__main__":
    main()
