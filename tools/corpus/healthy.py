"""Logs of runs that went well, whatever they printed on the way."""

from __future__ import annotations

from tools.corpus.capture import MADE, Script, capture, main

GLOO = {"ACCELERATE_USE_CPU": "true"}


def healthy(name: str, **how: object):
    """Register a script that ends well."""

    def register(script: Script) -> Script:
        MADE[name] = lambda: capture(name, None, script, kind="healthy", **how)  # type: ignore[arg-type]
        return script

    return register


def _shell(name: str, command: str, **files: str) -> None:
    """Register a command of other software; `files`: name with `_` for `.` -> text."""
    beside = {stem.replace("_", "."): text for stem, text in files.items()}
    MADE[name] = lambda: capture(
        name, None, command, kind="healthy", files=beside, by="tools/corpus/healthy.py:_shell", env=GLOO
    )


_QUOTES = """\
# Training notes

If you see `CUDA out of memory. Tried to allocate 2.00 GiB`, lower the batch size. The launcher may end with
`exits with return code = -9`: the host's memory ran out, and the kernel said `Out of memory: Killed process`.
* `RuntimeError: Attempting to unscale FP16 gradients.` -> load the model in float32
* "Asking to pad but the tokenizer does not have a padding token" -> set `pad_token`
* `No space left on device`: remove old checkpoints
> torch.OutOfMemoryError: CUDA out of memory.  (seen on an A10)
"""
_CODE = """\
MESSAGES = {
    "CUDA out of memory. Tried to allocate": "lower the batch size",
    "exits with return code = -9": "more host memory",
    "Watchdog caught collective operation timeout": "raise ddp_timeout",
}


def explain(error):
    if isinstance(error, RuntimeError) and "Attempting to unscale FP16 gradients." in str(error):
        raise ValueError("load the model in float32") from error
    # OSError: [Errno 28] No space left on device
    for message, mend in MESSAGES.items():
        if message in str(error):
            print(f"error: {message}: {mend}")
"""
_CASES = """\
import pytest


@pytest.mark.parametrize("error", ["CUDA out of memory", "No space left on device", "EADDRINUSE"])
def test_error_is_explained(error):
    assert error


def test_killed():
    with pytest.raises(RuntimeError, match="out of memory"):
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
"""
_EXPECTED = """\
import pytest


@pytest.mark.xfail(reason="known: RuntimeError: CUDA out of memory. Tried to allocate 1 GiB")
def test_big():
    raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.skip(reason="OSError: [Errno 28] No space left on device")
def test_disk():
    pass
"""
_WEB = """\
import threading
import urllib.request
from http.server import HTTPServer, SimpleHTTPRequestHandler

server = HTTPServer(("127.0.0.1", 29651), SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for path in ("/", "/train.py", "/error", "/killed.log", "/"):
    try:
        urllib.request.urlopen("http://127.0.0.1:29651" + path)
    except OSError:
        pass
"""
_NGINX = """\
for i in range(12):
    print(f'10.0.0.{i} - - [05/Jan/2026:10:00:{i:02d} +0000] "GET /models?page={i} HTTP/1.1" 200 {512 + i}')
    if i % 4 == 0:
        print(f"2026/01/05 10:00:{i:02d} [error] 31#31: *{i} connect() failed (111: Connection refused) "
              "while connecting to upstream, client: 10.0.0.1, server: _, request: \\"GET / HTTP/1.1\\"")
        print('10.0.0.9 - - [05/Jan/2026:10:00:59 +0000] "POST /api HTTP/1.1" 502 157 "-" "curl/8.5.0"')
"""
_C = """\
#include <stdio.h>
int main(void) { int unused; char *error = "CUDA out of memory"; printf("%d", error); return 0 }
"""
_shell("empty", "true")
_shell("readme-that-quotes", "cat README.md", README_md=_QUOTES)
_shell("code-that-quotes", "cat explain.py", explain_py=_CODE)
_shell("pytest", "python -m pytest -v -p no:cacheprovider test-explain.py; true",
       **{"test-explain_py": _CASES, "conftest_py": "collect_ignore = []\n"})  # fmt: skip
_shell(
    "pytest-failing",
    "python -m pytest -p no:cacheprovider test-train.py; true",
    **{"test-train_py": "def test_message():\n    message = 'CUDA out of memory. Tried to allocate 2 GiB'\n"
       "    assert message.startswith('torch')\n"},
)  # fmt: skip
_shell(
    "pytest-xfail",
    "python -m pytest -v -rA --xfail-tb -p no:cacheprovider test-train.py; true",
    **{"test-train_py": _EXPECTED},
)
_shell(
    "diff-of-logs",
    "diff old.log new.log; true",
    **{
        "old_log": "starting\nRuntimeError: CUDA error: device-side assert triggered\n{'loss': 2.5}\n",
        "new_log": "starting\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "{'loss': 2.4}\n",
    },
)
_shell("numbered-readme", "nl README.md; cat -n explain.py", README_md=_QUOTES, explain_py=_CODE)
_shell("libraries", "ldd --version; python -c 'import torch; print(torch.__config__.show())'")
_shell(
    "json", "python -c 'import tiny; print(tiny.config(finetuning_task=\"error: killed\").to_json_string())'"
)
_shell("pip-satisfied", "python -m pip install --no-index torch transformers accelerate")
_shell("pip-not-found", "python -m pip install --no-index no-such-package-of-ours; true")
_shell("compiler", "gcc -Wall main.c -o main; true", main_c=_C)
_shell("web-server", "python serve.py; true", serve_py=_WEB)
_shell("nginx", "python nginx.py", nginx_py=_NGINX)
_shell(
    "git",
    "git init -q . && git -c user.name=u -c user.email=u@example.org commit -q --allow-empty "
    "-m 'fix: RuntimeError: CUDA out of memory in eval' && git log && git status",
)
_shell(
    "unittest",
    "python -m unittest -v case",
    **{
        "case_py": "import unittest\n\n\nclass Failures(unittest.TestCase):\n"
        "    def test_error(self):\n        self.assertTrue(True)\n"
    },
)
_shell(
    "shell-trace",
    "set -x; for i in 1 2 3; do echo step $i; done; ls missing || echo failed, going on; exit 0",
)
_shell("plan", "python -m launcher.cli plan smoke --on cpu; python -m launcher.cli fixes | head -40")


@healthy("trainer")
def trainer():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", per_device_train_batch_size=4, max_steps=12, logging_steps=2, use_cpu=True
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("evaluation-early-stopping")
def evaluation():
    import tiny
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    args = TrainingArguments(
        "out", max_steps=12, eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1, use_cpu=True,
        load_best_model_at_end=True, metric_for_best_model="accuracy", learning_rate=0.0001,
    )  # fmt: skip
    rows = tiny.rows(16)
    run = Trainer(
        tiny.model(), args, train_dataset=rows, eval_dataset=rows, callbacks=[EarlyStoppingCallback(2)],
        compute_metrics=lambda prediction: {"accuracy": (prediction[0].argmax(-1) == prediction[1]).mean()},
    )  # fmt: skip
    print(run.train())
    print(run.evaluate())


@healthy("resume-with-other-arguments")
def resume():
    import logging

    import tiny
    from transformers import Trainer, TrainingArguments

    logging.basicConfig(level=logging.INFO)

    def run(steps, **more):
        args = TrainingArguments("out", max_steps=steps, logging_steps=1, use_cpu=True, save_steps=4, **more)
        return Trainer(tiny.model(), args, train_dataset=tiny.rows(64))

    run(4, per_device_train_batch_size=2).train()
    run(8, per_device_train_batch_size=4).train(resume_from_checkpoint=True)


@healthy("torchrun-two-ranks", launcher="torchrun", ranks=2, env=GLOO)
def torchrun():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, logging_steps=1)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("accelerate-loop", launcher="accelerate", ranks=2)
def accelerate_loop():
    import tiny
    import torch
    from accelerate import Accelerator
    from accelerate.logging import get_logger
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    log = get_logger("train")
    rows = tiny.rows(64).with_format("torch")
    model = tiny.model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-3), DataLoader(rows, batch_size=4)
    )
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        log.warning("step %d loss %.3f", step, loss.item(), main_process_only=False)
    accelerator.end_training()


@healthy("deepspeed-zero2", launcher="deepspeed", ranks=2, launcher_arguments=("--no_local_rank",))
def zero2():
    import tiny
    from transformers import Trainer, TrainingArguments

    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    args = TrainingArguments(
        "out",
        deepspeed=zero,
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        save_steps=3,
        use_cpu=True,
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("deepspeed-zero3", launcher="deepspeed", ranks=1, launcher_arguments=("--no_local_rank",))
def zero3():
    import tiny
    from transformers import Trainer, TrainingArguments

    zero = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    args = TrainingArguments(
        "out",
        deepspeed=zero,
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        save_steps=3,
        use_cpu=True,
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("trl-sft")
def trl_sft():
    import tiny
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig("out", max_steps=6, use_cpu=True, bf16=False, logging_steps=1, max_length=16)
    SFTTrainer(tiny.model(), args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()


@healthy("trl-dpo")
def trl_dpo():
    import tiny
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_dict({"prompt": ["w1 w2"] * 16, "chosen": ["w3 w4"] * 16, "rejected": ["w5 w6"] * 16})
    args = DPOConfig(
        "out", max_steps=4, use_cpu=True, bf16=False, logging_steps=1, per_device_train_batch_size=4
    )
    DPOTrainer(tiny.saved(), args=args, train_dataset=rows, processing_class=tiny.tokenizer()).train()


@healthy("lora-bnb-4bit")
def lora_4bit():
    import tiny
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=quantized)
    model = get_peft_model(
        prepare_model_for_kbit_training(model), LoraConfig(target_modules=["q_proj", "oops"])
    )
    model.print_trainable_parameters()
    args = TrainingArguments("out", max_steps=4, logging_steps=1, use_cpu=True)
    Trainer(model, args, train_dataset=tiny.rows()).train()


@healthy("wandb-offline", env={"WANDB_MODE": "offline", "WANDB_DISABLED": "true"})
def wandb_offline():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", max_steps=6, logging_steps=1, report_to="wandb", use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("caught-exception-goes-on")
def caught():
    import logging

    import tiny
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Upload(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                try:
                    raise OSError(28, "No space left on device", "/mnt/backup/metrics.json")
                except OSError:
                    logging.exception("backup failed, going on")

    args = TrainingArguments("out", max_steps=8, logging_steps=1, use_cpu=True, disable_tqdm=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows(64), callbacks=[Upload()]).train()


@healthy("auto-find-batch-size")
def auto_batch():
    import resource
    from pathlib import Path

    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    args = TrainingArguments(
        "out",
        per_device_train_batch_size=128,
        auto_find_batch_size=True,
        max_steps=4,
        logging_steps=1,
        use_cpu=True,
    )
    run = Trainer(tiny.model(vocab_size=20_000), args, train_dataset=tiny.rows(128, 60))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    run.train()


@healthy("loader-workers-fork", env={"TOKENIZERS_PARALLELISM": ""})
def workers():
    import os

    os.environ.pop("TOKENIZERS_PARALLELISM")
    import tiny
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer = tiny.tokenizer()
    rows = tiny.texts(64).map(lambda batch: tokenizer(batch["text"]), batched=True, remove_columns="text")
    args = TrainingArguments("out", max_steps=6, logging_steps=1, use_cpu=True, dataloader_num_workers=2)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(tiny.model(), args, train_dataset=rows, data_collator=collator).train()


@healthy("half-loaded-weights")
def half_loaded():
    import tiny
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_info()
    model = AutoModelForSequenceClassification.from_pretrained(tiny.saved(), num_labels=3)
    print(model.generation_config if hasattr(model, "generation_config") else model.config.model_type)


@healthy("generation")
def generation():
    import tiny
    import torch

    model = tiny.model()
    ids = torch.tensor([[1, 5, 6, 7]])
    print(model.generate(ids, max_new_tokens=80, do_sample=False, temperature=0.3, top_p=0.9))
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = 4
    print(tokenizer("w1 w2 w3 w4 w5 w6 w7"))


@healthy("converges-to-zero")
def converges():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", max_steps=150, logging_steps=5, use_cpu=True, learning_rate=0.02, lr_scheduler_type="constant",
        disable_tqdm=True, per_device_train_batch_size=1,
    )  # fmt: skip
    Trainer(tiny.model(), args, train_dataset=tiny.rows(1)).train()


@healthy("falls-back-to-new-names")
def falls_back():
    import tiny
    from transformers import Trainer, TrainingArguments

    try:
        args = TrainingArguments("out", evaluation_strategy="steps")
    except TypeError as error:
        print(f"older name refused: {error}")
        args = TrainingArguments("out", eval_strategy="no", max_steps=4, logging_steps=1, use_cpu=True)
    try:
        trainer = Trainer(model=tiny.model(), args=args, train_dataset=tiny.rows(), tokenizer=None)
    except TypeError as error:
        print(f"TypeError: {error}")
        trainer = Trainer(model=tiny.model(), args=args, train_dataset=tiny.rows())
    trainer.train()


@healthy("evaluate-only")
def evaluate_only():
    import tiny
    from transformers import Trainer, TrainingArguments

    run = Trainer(tiny.model(), TrainingArguments("out", use_cpu=True), eval_dataset=tiny.rows())
    run.log_metrics("eval", run.evaluate())
    print(run.predict(tiny.rows(4)).metrics)


@healthy("map-with-processes")
def map_processes():
    import tiny

    tokenizer = tiny.tokenizer()
    rows = tiny.texts(2000).map(lambda row: tokenizer(row["text"]), num_proc=2, desc="tokenising")
    print(rows.filter(lambda row: len(row["input_ids"]) > 3).train_test_split(0.1))


@healthy("prints-its-rows")
def prints_rows():
    import tiny
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    answer = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "    main()\n"
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    talk = Dataset.from_dict({"question": ["Why does my training stop?"], "answer": [answer]})
    print(talk[0]["question"])
    print(talk[0]["answer"])
    args = TrainingArguments("out", max_steps=6, logging_steps=1, use_cpu=True, disable_tqdm=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("noise-of-a-library")
def noise():
    import logging
    import sys
    import warnings

    import tiny
    from transformers import Trainer, TrainingArguments

    logging.basicConfig(
        level=logging.DEBUG, stream=sys.stdout, format="%(asctime)s [%(levelname)s] %(name)s: %(message)s"
    )
    logging.getLogger("fs").error("retry 1 of 5: Connection reset by peer")
    logging.getLogger("fs").error("retry 2 of 5: timed out")
    warnings.warn("this path is slow", RuntimeWarning, stacklevel=1)
    warnings.warn("CUDA initialization: Found no NVIDIA driver on your system.", UserWarning, stacklevel=1)
    args = TrainingArguments("out", max_steps=4, logging_steps=1, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@healthy("plain-torch-loop")
def plain_loop():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(40):
        loss = (model(torch.randn(16, 8)) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} | loss {loss.item():.4f} | errors 0 | failed 0")
    print("done")


@healthy("exit-after-handled-failure")
def handled():
    import traceback

    for attempt in range(3):
        try:
            if attempt < 2:
                raise ConnectionError("the store did not answer")
            print("connected at attempt", attempt)
        except ConnectionError:
            traceback.print_exc()
    for step in range(5):
        print({"loss": 3.0 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": step / 5})
    print({"train_runtime": 1.5, "train_loss": 2.8})


if __name__ == "__main__":
    main()
