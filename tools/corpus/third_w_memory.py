"""Third held-out set: memory that does not suffice, and services that are not there."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import SRUN, shell


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


if __name__ == "__main__":
    main()
