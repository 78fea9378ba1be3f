"""Held-out logs of data: other models and entry points than a plain Trainer on a Llama.

Collected after the patterns were final, by somebody who had not read them.
"""

from __future__ import annotations

from functools import partial

from tools.corpus.capture import caused, main

held_out = partial(caused, kind="first_held_out")


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


if __name__ == "__main__":
    main()
