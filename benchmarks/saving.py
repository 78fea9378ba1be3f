"""What a checkpoint costs over the Trainer's own save: hashes, manifest, fsync.

    python benchmarks/saving.py [--hidden 1024] [--repeats 5] [--folder DIR]

Prints JSON: seconds of each save by the plain Trainer and by ours, in turn, of one model with AdamW's states
(12 bytes a parameter), and the ratio of the medians. `flushed`: the plain save and an fsync of all of its
files, without which nothing says that they are on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from launcher.train.checkpoint.disk import sync_tree
from launcher.train.trainers import PlannedTrainer


def trainer(kind: type[Trainer], folder: Path, hidden: int) -> Trainer:
    """A trainer that has made one step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=5,
        num_attention_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    args = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, save_strategy="no", per_device_train_batch_size=1,
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    made = kind(model=LlamaForCausalLM(config), args=args, train_dataset=[row, row])
    made.train()
    return made


def timed(made: Trainer, step: int) -> float:
    """Seconds of one save of step `step`, into a folder of its own."""
    made.state.global_step = step
    started = time.perf_counter()
    made._save_checkpoint(made.model, None)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=asked.folder))
    plain = trainer(Trainer, place / "plain" / "checkpoints", asked.hidden)
    ours = trainer(PlannedTrainer, place / "ours" / "checkpoints", asked.hidden)
    seconds: dict[str, list[float]] = {"plain": [], "flushed": [], "ours": []}
    for step in range(1, asked.repeats + 1):
        os.sync()  # no save pays for the one before
        seconds["plain"].append(timed(plain, step))
        started = time.perf_counter()
        sync_tree(place / "plain" / "checkpoints" / f"checkpoint-{step}")
        seconds["flushed"].append(seconds["plain"][-1] + time.perf_counter() - started)
        os.sync()
        seconds["ours"].append(timed(ours, step))
        for folder in place.glob("*/checkpoints/checkpoint-*"):
            size = sum(file.stat().st_size for file in folder.rglob("*"))
            shutil.rmtree(folder)
    shutil.rmtree(place)
    middle = {name: median(values) for name, values in seconds.items()}
    print(
        json.dumps(
            {
                "bytes": size,
                "cores": os.cpu_count(),
                "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
                "ours_to_plain": round(middle["ours"] / middle["plain"], 3),
                "ours_to_flushed": round(middle["ours"] / middle["flushed"], 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
