"""What two DDP ranks do without the fixes and with them: rank 0 prints JSON by question.

`python fixes_under_ddp.py PORT`, with ACCELERATE_USE_CPU. Every run is one Trainer step of a LoRA model with
activation checkpointing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import peft
import torch
import transformers

KWARGS = {"reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))


def step(searches: bool | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """One step: the error in it, and whether DDP searched for unused parameters."""
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=1, per_device_train_batch_size=1, report_to="none",
        save_strategy="no", disable_tqdm=True, activation_checkpointing=True,
        activation_checkpointing_kwargs=kwargs, ddp_find_unused_parameters=searches,
    )  # fmt: skip
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    trainer = transformers.Trainer(model(), args, train_dataset=rows)
    error = ""
    try:
        trainer.train()
    except RuntimeError as caught:
        error = str(caught)
    return {"error": error, "searched": trainer.model_wrapped.find_unused_parameters}


def ask(rank: int, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    found = {
        f"{name}, search {searches}": step(searches, kwargs)
        for name, kwargs in KWARGS.items()
        for searches in (None, False)
    }
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    # Forked where everything is imported: importing takes longer than all steps.
    assert transformers.Trainer
    torch.multiprocessing.start_processes(ask, args=(sys.argv[1],), nprocs=2, start_method="fork")
