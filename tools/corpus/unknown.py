"""Failures that are nobody's but the user's, or other software's: they must stay unnamed."""

from __future__ import annotations

from tools.corpus.capture import MADE, Script, capture, main

GLOO = {"ACCELERATE_USE_CPU": "true"}


def unknown(name: str, **how: object):
    """Register a script that fails for a reason of its own."""

    def register(script: Script) -> Script:
        MADE[name] = lambda: capture(name, None, script, kind="unknown", **how)  # type: ignore[arg-type]
        return script

    return register


def _shell(name: str, command: str, **files: str) -> None:
    """Register a command; `files`: stem of a Python file -> its text."""
    beside = {f"{stem}.py": text for stem, text in files.items()}
    MADE[name] = lambda: capture(
        name, None, command, kind="unknown", files=beside, by="tools/corpus/unknown.py:_shell", env=GLOO
    )


@unknown("key-error-in-map")
def key_error():
    import tiny

    tokenizer = tiny.tokenizer()
    print(tiny.texts().map(lambda row: tokenizer(row["prompt"]), num_proc=2))


@unknown("assertion-in-metrics")
def assertion_in_metrics():
    import tiny
    from transformers import Trainer, TrainingArguments

    def metrics(prediction):
        logits, labels = prediction
        assert logits.shape == labels.shape, f"{logits.shape} is not {labels.shape}"
        return {"accuracy": (logits == labels).mean()}

    args = TrainingArguments("out", max_steps=4, eval_strategy="steps", eval_steps=2, use_cpu=True)
    rows = tiny.rows()
    Trainer(tiny.model(), args, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics).train()


@unknown("compute-loss-signature", launcher="torchrun", ranks=2, env=GLOO)
def compute_loss_signature():
    import tiny
    from transformers import Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2

    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=4)
    Weighted(tiny.model(), args, train_dataset=tiny.rows()).train()


@unknown("shape-mismatch")
def shape_mismatch():
    import tiny
    import torch

    model = tiny.model()
    head = torch.nn.Linear(16, 2)
    hidden = model.model(torch.arange(8)[None]).last_hidden_state
    print(head(hidden))


@unknown("zero-division-one-rank", launcher="torchrun", ranks=2, env=GLOO)
def zero_division():
    import tiny
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Throughput(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and not state.is_world_process_zero:
                print(state.global_step / (state.max_steps - 8))

    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, logging_steps=1)
    Trainer(tiny.model(), args, train_dataset=tiny.rows(64), callbacks=[Throughput()]).train()


@unknown("size-mismatch-classifier")
def size_mismatch():
    import tiny
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification(tiny.config(num_labels=5)).save_pretrained("classifier")
    print(LlamaForSequenceClassification.from_pretrained("classifier", num_labels=2))


@unknown("deepspeed-name-error", launcher="deepspeed", ranks=2, launcher_arguments=("--no_local_rank",))
def name_error():
    import os

    print("rank", os.environ["RANK"])
    model = build_model(hidden=32)  # noqa: F821
    print(model)


@unknown("bad-json-rows")
def bad_json():
    from pathlib import Path

    from datasets import load_dataset

    Path("rows.jsonl").write_text('{"text": "a"}\n{"text": \n')
    print(load_dataset("json", data_files="rows.jsonl", split="train"))


@unknown("missing-module")
def missing_module():
    import flash_attn_of_ours

    print(flash_attn_of_ours)


@unknown("logged-and-raised")
def logged_and_raised():
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log = logging.getLogger("sft")
    try:
        log.info("reading config")
        {"lr": 1e-4}["learning_rate"]
    except KeyError as error:
        log.exception("bad config")
        raise ValueError("the config of this run is not complete") from error


@unknown("own-error-about-memory")
def about_memory():
    class Budget(RuntimeError):
        pass

    def check(rows, limit):
        if rows > limit:
            raise Budget(
                f"{rows} rows do not fit in the memory budget of {limit} rows: CUDA is not used here"
            )

    check(5000, 100)


_shell(
    "syntax-error", "python train.py", train="def train(steps):\n    for step in range(steps)\n        pass\n"
)
_shell(
    "arguments",
    "python train.py --lr 1e-4",
    train="import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps', type=int)\n"
    "print(parser.parse_args())\n",
)
_shell("interrupted", "python train.py & sleep 2; kill -INT $!; wait $!", train="import time\n"
       "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
       "for step in range(100):\n    print('step', step, flush=True)\n    time.sleep(0.5)\n")  # fmt: skip
_shell(
    "segmentation-fault",
    "python -X faulthandler train.py; exit $?",
    train="import ctypes\n\nprint('calling the extension', flush=True)\nctypes.string_at(0)\n",
)
_shell(
    "torchrun-exit-3",
    "python -m torch.distributed.run --standalone --nproc_per_node=2 train.py",
    train="import os, sys\n\nif os.environ['RANK'] == '1':\n    print('no licence')\n    sys.exit(3)\n",
)
_shell(
    "terminated",
    "python -m torch.distributed.run --standalone --nproc_per_node=2 train.py & "
    "sleep 10; kill -TERM $!; wait $!",
    train="import time\n\nfor step in range(100):\n    print('step', step, flush=True)\n    time.sleep(1)\n",
)
if __name__ == "__main__":
    main()
