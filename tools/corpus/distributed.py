"""Failures of launching: ports, devices, launchers, ranks that wait or are killed."""

from __future__ import annotations

from tools.corpus.capture import MADE, capture, caused, main

GLOO = {"ACCELERATE_USE_CPU": "true"}
TRAIN = """\
import tiny
from transformers import Trainer, TrainingArguments

args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=4, use_cpu=True)
Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()
"""
LISTEN = """\
import socket, time
listener = socket.create_server(("0.0.0.0", 29631))
time.sleep(60)
"""


def _shell(failure: str, variant: str, command: str, **files: str) -> None:
    """Register a command line; `files` are named without their `.py`."""
    name = f"{failure}-{variant}" if variant else failure
    beside = {f"{stem}.py": text for stem, text in {"train": TRAIN, **files}.items()}

    def make() -> None:
        capture(name, failure, command, files=beside, env=GLOO, by="tools/corpus/distributed.py:_shell")

    MADE[name] = make


_LISTENING = "python listen.py & other=$!; sleep 2; {}; code=$?; kill $other; exit $code"
_shell(
    "port-in-use",
    "torchrun",
    _LISTENING.format("python -m torch.distributed.run --nproc_per_node=2 --master_port=29631 train.py"),
    listen=LISTEN,
)
_shell(
    "port-in-use",
    "script",
    _LISTENING.format("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29631 python train.py"),
    listen=LISTEN,
    train="import torch.distributed\n\ntorch.distributed.init_process_group('gloo')\n",
)
_shell(
    "accelerate-flags",
    "exclusive",
    "python -m accelerate.commands.launch --cpu --multi_gpu --num_processes=2 train.py",
)
_shell(
    "accelerate-flags",
    "one-process",
    "python -m accelerate.commands.launch --multi_gpu --num_processes=1 train.py",
)
_shell(
    "include-and-num-gpus",
    "",
    "python -m deepspeed.launcher.runner --include localhost:0 --num_gpus=1 train.py",
)
_shell("include-bad-slot", "", "python -m deepspeed.launcher.runner --include localhost:0,7 train.py")
_shell("no-gpu", "deepspeed", "DS_ACCELERATOR=cuda python -m deepspeed.launcher.runner train.py")
_shell(
    "pdsh-missing",
    "",
    "printf 'node1 slots=1\\nnode2 slots=1\\n' > hosts; "
    "python -m deepspeed.launcher.runner --hostfile hosts --no_ssh_check --master_addr node1 train.py",
)
_shell(
    "hostfile",
    "ssh",
    "printf 'node1 slots=1\\nnode2 slots=1\\n' > hosts; "
    "python -m deepspeed.launcher.runner --hostfile hosts train.py",
)
_shell(
    "hostfile",
    "bad-entry",
    "printf 'node1: slots 1\\n' > hosts; python -m deepspeed.launcher.runner --hostfile hosts train.py",
)
_shell(
    "sigkill-oom",
    "shell",
    "python train.py; exit $?",
    train="import os, signal\n\nos.kill(os.getpid(), signal.SIGKILL)\n",
)


MEET = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
# Two machines as network namespaces, each of which calls itself 127.0.1.1 as a Debian does. Needs root.
_TWO_MACHINES = """\
for n in 1 2; do ip netns add corpus$n; ip -n corpus$n link set lo up; done
ip link add corpusa type veth peer name corpusb
ip link set corpusa netns corpus1 name eth0; ip link set corpusb netns corpus2 name eth0
for n in 1 2; do
  ip -n corpus$n addr add 10.78.0.$n/24 dev eth0; ip -n corpus$n link set eth0 up
  printf '127.0.0.1 localhost\\n127.0.1.1 node%s\\n' $n > hosts$n
  RANK=$((n - 1)) WORLD_SIZE=2 MASTER_ADDR=10.78.0.1 MASTER_PORT=29641 ip netns exec corpus$n unshare --uts \\
    sh -c "mount --bind hosts$n /etc/hosts; hostname node$n; exec timeout 60 python train.py" &
  pids="$pids $!"
done
for pid in $pids; do wait $pid || code=$?; done
for n in 1 2; do ip netns del corpus$n; done
exit $code
"""
_shell("socket-interface", "own-name", _TWO_MACHINES, train=MEET)
_shell(
    "socket-interface",
    "no-such-name",
    "GLOO_SOCKET_IFNAME=ib9 python -m torch.distributed.run --nproc_per_node=2 --master_port=29642 train.py",
    train=MEET,
)


@caused("sigkill-oom", "torchrun", launcher="torchrun", ranks=2, env=GLOO)
def killed_under_torchrun():
    import os
    import signal

    import tiny
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, logging_steps=1)
    Trainer(tiny.model(), args, train_dataset=tiny.rows(64), callbacks=[Kill()]).train()


@caused("sigkill-oom", "accelerate", launcher="accelerate", ranks=2)
def killed_under_accelerate():
    import os
    import signal

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.print("loading the model")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()


@caused("sigkill-oom", "loader")
def killed_loader():
    import os
    import signal

    import tiny
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset):
        def __init__(self):
            self.rows = tiny.rows()

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            if index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.rows[index]

    args = TrainingArguments("out", dataloader_num_workers=2, max_steps=8, use_cpu=True)
    Trainer(tiny.model(), args, train_dataset=Rows()).train()


@caused("sigkill-oom", "allocator")
def host_allocation():
    import resource

    import tiny
    import torch
    from transformers import Trainer, TrainingArguments

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    torch.set_num_threads(1)
    args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=8, use_cpu=True)
    Trainer(tiny.model(vocab_size=4_000_000, hidden_size=512), args, train_dataset=tiny.rows()).train()


@caused("sigkill-oom", "numpy")
def host_array():
    import numpy

    tokens = numpy.zeros((2_000_000_000, 2048), dtype=numpy.int64)
    print(tokens.shape)


if __name__ == "__main__":
    main()
