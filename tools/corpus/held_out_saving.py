"""Held-out logs of saving and resuming: other models and entry points than a plain Trainer on a Llama.

Collected after the patterns were final, by somebody who had not read them.
"""

from __future__ import annotations

from functools import partial

from tools.corpus.capture import caused, main

held_out = partial(caused, kind="first_held_out")


@held_out("shared-tensors", "save-pretrained")
def save_pretrained():
    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    model = tiny.model()
    shared = torch.nn.Parameter(torch.randn(32, 32))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = shared
    args = TrainingArguments("out", use_cpu=True, max_steps=4, save_steps=2, logging_steps=1)
    Trainer(model, args, train_dataset=tiny.rows()).train()


if __name__ == "__main__":
    main()
