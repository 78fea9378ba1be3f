"""Failures of checkpoints: saving them, and going on from them."""

from __future__ import annotations

from tools.corpus.capture import MADE, capture, caused, main

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
            by="tools/corpus/saving.py:_zero",
            limit=900,
        )

    MADE[failure] = make


_zero("zero-world-size", "2 2 2 new", "1 2 4 resume")
_zero("zero-stage-change", "2 2 2 new", "2 3 4 resume")
_zero("save-only-model-resume", "1 2 2 new weights", "1 2 4 resume")
_zero("save-only-model-best", "1 2 2 new weights best")


@caused("no-checkpoint", "path")
def no_checkpoint_at_path():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", max_steps=4, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train(resume_from_checkpoint="out/checkpoint-500")


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
        capture(
            name, "checkpoint-disk", command, files={"train.py": script}, by="tools/corpus/saving.py:_disk"
        )

    MADE[name] = make


_disk("weights", "3m", _SAVE)
_disk("optimizer", "12m", _SAVE)
_disk("rows", "1m", _LOGS)


if __name__ == "__main__":
    main()
