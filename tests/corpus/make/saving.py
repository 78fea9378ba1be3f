"""Failures of checkpoints: saving them, and going on from them."""

from __future__ import annotations

from tests.corpus.make.capture import MADE, capture, caused, main

GLOO = {"ACCELERATE_USE_CPU": "true"}
ZERO = """\
import os
import sys

import tiny
from transformers import Trainer, TrainingArguments

stage, steps, resume, options = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume", sys.argv[4:]
zero = {
    "zero_optimization": {"stage": int(stage)},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
args = TrainingArguments(
    "out", deepspeed=zero, per_device_train_batch_size=2, max_steps=steps, save_steps=2, logging_steps=1,
    use_cpu=True, save_only_model="weights" in options, load_best_model_at_end="best" in options,
    eval_strategy="steps", eval_steps=2, disable_tqdm=True,
)
trainer = Trainer(tiny.model(), args, train_dataset=tiny.rows(), eval_dataset=tiny.rows(4))
trainer.train(resume_from_checkpoint=resume)
"""
_RUN = (
    "python -m deepspeed.launcher.runner --num_accelerators={ranks} --master_port=29661 --no_local_rank "
    "train.py {arguments}"
)
_QUIET = " > first.log 2>&1; "


def _zero(failure: str, first: str, then: str = "") -> None:
    """Register one or two ZeRO runs, each `ranks arguments`; the log is that of the last."""
    runs = [
        _RUN.format(ranks=run.partition(" ")[0], arguments=run.partition(" ")[2])
        for run in (first, then)
        if run
    ]

    def make() -> None:
        capture(
            failure,
            failure,
            _QUIET.join(runs),
            files={"train.py": ZERO},
            by="make/saving.py:_zero",
            limit=900,
        )

    MADE[failure] = make


_zero("zero-world-size", "2 2 2 new", "1 2 4 resume")
_zero("zero-stage-change", "2 2 2 new", "2 3 4 resume")
_zero("save-only-model-resume", "1 2 2 new weights", "1 2 4 resume")
_zero("save-only-model-best", "1 2 2 new weights best")


@caused("rng-weights-only")
def rng_weights_only():
    from pathlib import Path

    import numpy
    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    def trainer(steps):
        args = TrainingArguments("out", max_steps=steps, save_steps=2, use_cpu=True, disable_tqdm=True)
        return Trainer(tiny.model(), args, train_dataset=tiny.rows())

    trainer(2).train()
    path = Path("out/checkpoint-2/rng_state.pth")
    states = torch.load(path, weights_only=False)
    states["generator"] = numpy.random.default_rng(0)  # as an older run of ours kept it
    torch.save(states, path)
    trainer(4).train(resume_from_checkpoint=True)


@caused("rng-weights-only", "optimizer", launcher="torchrun", ranks=2, env=GLOO)
def optimizer_weights_only():
    import argparse
    import os
    from pathlib import Path

    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    def trainer(steps):
        args = TrainingArguments("out", max_steps=steps, save_steps=2, disable_tqdm=True)
        return Trainer(tiny.model(), args, train_dataset=tiny.rows())

    trainer(2).train()
    if os.environ["RANK"] == "0":
        path = Path("out/checkpoint-2/optimizer.pt")
        states = torch.load(path)
        states["arguments"] = argparse.Namespace(lr=1e-4)
        torch.save(states, path)
    torch.distributed.barrier()
    trainer(4).train(resume_from_checkpoint="out/checkpoint-2")


@caused("no-checkpoint")
def no_checkpoint():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", max_steps=4, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train(resume_from_checkpoint=True)


@caused("no-checkpoint", "path")
def no_checkpoint_at_path():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", max_steps=4, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train(resume_from_checkpoint="out/checkpoint-500")


@caused("best-strategy")
def best_strategy():
    from transformers import TrainingArguments

    print(TrainingArguments("out", load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps"))


@caused("best-strategy", "multiple", launcher="torchrun", ranks=2, env=GLOO)
def best_strategy_multiple():
    from transformers import TrainingArguments

    print(
        TrainingArguments(
            "out", load_best_model_at_end=True, eval_strategy="steps", eval_steps=100,
            save_strategy="steps", save_steps=150,
        )
    )  # fmt: skip


@caused("best-metric")
def best_metric():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", max_steps=4, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="accuracy", use_cpu=True, per_device_train_batch_size=4,
    )  # fmt: skip
    Trainer(tiny.model(), args, train_dataset=tiny.rows(), eval_dataset=tiny.rows(8)).train()


@caused("shared-tensors")
def shared_tensors():
    import tiny
    from transformers import Trainer, TrainingArguments

    model = tiny.model()
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight  # one projection for both layers
    args = TrainingArguments("out", max_steps=2, save_steps=2, use_cpu=True, disable_tqdm=True)
    Trainer(model, args, train_dataset=tiny.rows()).train()


@caused("shared-tensors", "state-dict")
def shared_tensors_save_file():
    import tiny
    from safetensors.torch import save_file

    model = tiny.model(tie_word_embeddings=True)
    save_file(model.state_dict(), "model.safetensors")


_DISK = "mkdir out; mount -t tmpfs -o size={size} tmpfs out; python train.py; code=$?; umount out; exit $code"
_SAVE = """\
import tiny
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, save_steps=2, use_cpu=True)
Trainer(tiny.model(vocab_size=20000), args, train_dataset=tiny.rows()).train()
"""
_LOGS = """\
import logging

handlers = [logging.FileHandler("out/train.log"), logging.StreamHandler()]
logging.basicConfig(level=logging.INFO, handlers=handlers)
log = logging.getLogger("data")
import tiny

rows = tiny.texts(20000, 60)
log.info("writing %d rows", len(rows))
with open("out/rows.jsonl", "w") as file:
    for row in rows:
        file.write(row["text"] + "\\n")
"""


def _disk(variant: str, size: str, script: str) -> None:
    """Register a script that writes into `out`, a disk of that size."""
    name = f"checkpoint-disk-{variant}"

    def make() -> None:
        command = _DISK.format(size=size)
        capture(name, "checkpoint-disk", command, files={"train.py": script}, by="make/saving.py:_disk")

    MADE[name] = make


_disk("weights", "3m", _SAVE)
_disk("optimizer", "12m", _SAVE)
_disk("rows", "1m", _LOGS)


if __name__ == "__main__":
    main()
