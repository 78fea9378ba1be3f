"""Held-out failures of adapters and activation checkpointing, on many families of models."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held


@held("kbit-fp32-upcast", "v3-cpu-limit")
def upcast_does_not_fit():
    import os
    import resource
    from pathlib import Path

    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=250880, hidden_size=1024, n_layer=1, n_head=4)
    torch.set_default_dtype(torch.float16)
    model = BloomForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    gib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (pages + 600 * 2**20,) * 2)  # what is left of the container
    print(f"loaded in {model.dtype}: {gib:.2f} GiB of weights, 0.59 GiB free", flush=True)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    print("prepared")


@held("lora-bad-values", "v3-task")
def wrong_task():
    import json

    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    recipe = json.loads(
        '{"r": 8, "lora_alpha": 16, "target_modules": ["query"], "task_type": "SEQUENCE_CLS"}'
    )
    model = BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=4))
    get_peft_model(model, LoraConfig(**recipe)).print_trainable_parameters()


if __name__ == "__main__":
    main()
