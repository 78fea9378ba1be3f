"""Failures of memory that a machine without a GPU can have."""

from __future__ import annotations

from tests.corpus.make.capture import caused, main


@caused("auto-batch-eval-oom")
def auto_batch_eval():
    import resource
    from pathlib import Path

    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    args = TrainingArguments(
        "out", per_device_train_batch_size=2, per_device_eval_batch_size=4096, auto_find_batch_size=True,
        max_steps=4, eval_strategy="steps", eval_steps=2, logging_steps=1, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = tiny.model(vocab_size=50_000)
    trainer = Trainer(model, args, train_dataset=tiny.rows(), eval_dataset=tiny.rows(4096, 60))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30),) * 2)
    trainer.train()


if __name__ == "__main__":
    main()
