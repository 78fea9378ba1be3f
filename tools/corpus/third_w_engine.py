"""Third held-out set: DeepSpeed's own engine, built by hand around other models."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import SRUN, shell
from tools.corpus.third_w_base import rank


@shell("ds-offload-client-optim", "w3-sgd", f"python train.py 2>&1 | {SRUN}", rank(29827))
def client_optim():
    import deepspeed
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


if __name__ == "__main__":
    main()
