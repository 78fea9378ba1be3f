"""Third held-out set: two more, of prompt learning and of DeepSpeed's buckets."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import shell
from tools.corpus.third_w_base import rank


@shell("ds-bucket-memory", "w3-default-buckets", "python train.py 2>&1", rank(29860))
def bucket_memory():
    import resource
    from pathlib import Path

    import deepspeed
    import torch
    from transformers import OPTConfig, OPTForCausalLM

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
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500000000,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (3000 << 20), resource.RLIM_INFINITY))
    print(
        "bucket of",
        engine.zero_reduce_bucket_size(),
        "elements, overlap",
        engine.zero_overlap_comm(),
        flush=True,
    )
    ids = torch.randint(4, 60, (2, 8))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    print("step done", loss.item())


if __name__ == "__main__":
    main()
