"""Held-out logs of launchers, checkpoints of several ranks, memory, the hub and the machine.

Collected after the patterns were final, by somebody who had not read them.
"""

from __future__ import annotations

from tools.corpus import capture as captured
from tools.corpus.capture import main

SAMPLE = """
import argparse, sys
import tiny
parser = argparse.ArgumentParser(prog="finetune.py", description="Fine-tune a classifier")
parser.add_argument("--model_name", default="bert")
parser.add_argument("--epochs", type=int, default=1)
sub = parser.add_subparsers(dest="task")
sub.add_parser("classify")
print(parser.parse_args())
"""
STAMPED = "2>&1 | while IFS= read -r line; do printf '%s %s\\n' \"$(date '+%b %d %H:%M:%S')\" \"$line\"; done"
"""What `ts` of moreutils does."""
NUMBERED = "2>&1 | sed -u 's/^/0: /'"
"""What `srun -l` does for task 0."""


def shell(failure: str, variant: str, command: str, **how: object) -> None:
    """Register a shell command as the cause of `failure`."""
    name = f"{failure}-{variant}"
    captured.MADE[name] = lambda: captured.capture(
        name, failure, command, kind="first_held_out", by="tools/corpus/held_out_run.py:shell", **how
    )  # type: ignore[arg-type]


TORCHRUN = "python -m torch.distributed.run"
RUNNER = "python -m deepspeed.launcher.runner"
TAKEN = (
    "python -c 'import socket, time; s = socket.create_server((\"0.0.0.0\", 29871)); time.sleep(60)' & "
    "holder=$!; sleep 1; "
)
shell(
    "port-in-use", "torchrun-srun",
    TAKEN + f"{TORCHRUN} --nproc_per_node=2 --master_port=29871 sample.py {NUMBERED}; kill $holder",
    files={"sample.py": SAMPLE},
)  # fmt: skip
shell(
    "port-in-use", "deepspeed-engine",
    TAKEN + f"{RUNNER} --num_accelerators=1 --master_port=29871 train.py; kill $holder",
    files={"train.py": "import deepspeed\ndeepspeed.init_distributed()\nprint('ready')\n"},
)  # fmt: skip
shell(
    "include-and-num-gpus", "stamped",
    f"python -m deepspeed.launcher.runner --include localhost:0,1 --num_gpus 2 sample.py {STAMPED}",
    files={"sample.py": SAMPLE},
)  # fmt: skip
shell(
    "include-bad-slot", "hostfile",
    "python -m deepspeed.launcher.runner --hostfile hosts --include 'localhost:0,6' sample.py --epochs 3",
    files={"sample.py": SAMPLE, "hosts": "localhost slots=4\n"},
)  # fmt: skip
shell(
    "no-gpu", "login-node", "python -m deepspeed.launcher.runner sample.py --model_name vit",
    files={"sample.py": SAMPLE}, env={"DS_ACCELERATOR": "cuda"},
)  # fmt: skip
shell(
    "hostfile", "bad-entry", "python -m deepspeed.launcher.runner --hostfile=hosts sample.py",
    files={"sample.py": SAMPLE, "hosts": "# two nodes\nworker-0 slots=4\nworker-1: 4\n"},
)  # fmt: skip
shell(
    "hostfile", "no-ssh", f"python -m deepspeed.launcher.runner --hostfile=hosts sample.py {STAMPED}",
    files={"sample.py": SAMPLE, "hosts": "127.0.0.1 slots=2\nworker-1 slots=2\n"},
)  # fmt: skip
shell(
    "pdsh-missing", "no-ssh-check",
    "python -m deepspeed.launcher.runner --hostfile=hosts --master_addr=127.0.0.1 --no_ssh_check sample.py",
    files={"sample.py": SAMPLE, "hosts": "127.0.0.1 slots=2\nworker-1 slots=2\n"},
)  # fmt: skip
shell(
    "accelerate-flags", "cpu-and-multi",
    "python -m accelerate.commands.launch --cpu --multi_gpu --num_processes 2 sample.py",
    files={"sample.py": SAMPLE},
)  # fmt: skip
shell(
    "accelerate-flags", "one-process",
    f"FORCE_COLOR=1 python -m accelerate.commands.launch --multi_gpu --num_processes=1 sample.py {NUMBERED}",
    files={"sample.py": SAMPLE},
)  # fmt: skip
shell(
    "local-rank-arg", "subcommand",
    "python -m deepspeed.launcher.runner --num_accelerators=2 --master_port=29883 sample.py --epochs 2",
    files={"sample.py": SAMPLE},
)  # fmt: skip
shell(
    "sigkill-oom", "worker",
    "python -m torch.distributed.run --standalone --nproc_per_node=2 train.py",
    files={
        "train.py": "import os, signal, time, logging\nimport tiny\n"
        "logging.basicConfig(level=logging.INFO, format='%(asctime)s %(message)s')\n"
        "log = logging.getLogger(); rank = os.environ['RANK']\n"
        "model = tiny.model(); log.info('rank %s loaded the model', rank)\n"
        "if rank == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    },
)  # fmt: skip


BY_HAND = """
import sys
import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

action, stage = sys.argv[1], int(sys.argv[2])
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
config = {
    "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage == 1},
}
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
if action == "resume":
    engine.load_checkpoint("saved")
for step in range(2):
    ids = torch.randint(0, 64, (2, 8))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    print("step", step, loss.item(), flush=True)
engine.save_checkpoint("saved", tag="latest-run")
"""
DEEPSPEED = RUNNER + " --no_local_rank --master_port=2988{0} --num_accelerators={1} hand.py {2}"
shell(
    "zero-world-size", "by-hand",
    DEEPSPEED.format(4, 2, "train 2") + " > first.log 2>&1; " + DEEPSPEED.format(5, 1, "resume 2"),
    files={"hand.py": BY_HAND},
)  # fmt: skip
shell(
    "zero-stage-change", "by-hand",
    DEEPSPEED.format(4, 2, "train 2") + " > first.log 2>&1; " + DEEPSPEED.format(5, 2, "resume 3"),
    files={"hand.py": BY_HAND},
)  # fmt: skip
RESUME = """
import sys
import tiny
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

config = OPTConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64,
    word_embed_proj_dim=32, max_position_embeddings=64,
)
model = OPTForCausalLM(config)
best = "best" in sys.argv
args = TrainingArguments(
    "out", deepspeed="ds.json", use_cpu=True, per_device_train_batch_size=2, max_steps=4, save_steps=2,
    logging_steps=1, save_only_model=True, load_best_model_at_end=best, eval_steps=2,
    eval_strategy="steps" if best else "no",
)
trainer = Trainer(model, args, train_dataset=tiny.rows(), eval_dataset=tiny.rows(8))
try:
    trainer.train(resume_from_checkpoint="resume" in sys.argv)
except Exception as error:
    raise SystemExit(f"training stopped: {type(error).__name__}: {error}") from error
"""
DS_JSON = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_optimization": {"stage": 2},
}  # fmt: skip
TRAINED = "python -m torch.distributed.run --standalone --nproc_per_node=1 train.py"
shell(
    "save-only-model-resume", "opt-torchrun", f"{TRAINED} > first.log 2>&1; {TRAINED} resume",
    files={"train.py": RESUME, "ds.json": DS_JSON},
)  # fmt: skip
shell(
    "save-only-model-best", "opt-srun", f"{TRAINED} best {NUMBERED}",
    files={"train.py": RESUME, "ds.json": DS_JSON},
)  # fmt: skip
SMALL_DISK = "unshare -rm bash -c 'mkdir out && mount -t tmpfs -o size={size} disk out && python train.py'"
shell(
    "checkpoint-disk", "accelerate-state", SMALL_DISK.format(size="300k"),
    files={
        "train.py": "import tiny, torch\nfrom accelerate import Accelerator\nfrom torch.optim import AdamW\n"
        "accelerator = Accelerator(cpu=True)\nmodel = tiny.model(hidden_size=64)\n"
        "model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))\n"
        "ids = torch.arange(4, 12)[None]\nfor step in range(4):\n"
        "    accelerator.backward(model(input_ids=ids, labels=ids).loss)\n    optimizer.step()\n"
        "    accelerator.save_state(f'out/step_{step}')\n    print('saved', step, flush=True)\n"
    },
)  # fmt: skip
shell(
    "checkpoint-disk", "trainer-second", SMALL_DISK.format(size="900k"),
    files={
        "train.py": "import tiny\nfrom transformers import Trainer, TrainingArguments\n"
        "args = TrainingArguments('out', use_cpu=True, max_steps=12, save_steps=2, logging_steps=1)\n"
        "Trainer(tiny.model(hidden_size=64), args, train_dataset=tiny.rows()).train()\n"
    },
)  # fmt: skip


if __name__ == "__main__":
    main()
