"""Third held-out set: runs that the launchers end, or that end in a launcher's hands."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, DOCKER, SRUN, shell

COMPOSE = "while IFS= read -r l; do printf 'trainer-1  | %s\\n' \"$l\"; done"
"""As `docker compose up` writes the lines of a service."""


@shell(
    "port-in-use",
    "w3-second-job",
    "python -m http.server 29840 --bind 0.0.0.0 > /dev/null 2>&1 & other=$!; sleep 2; "
    f"torchrun --nproc_per_node 1 --master_addr localhost --master_port 29840 train.py 2>&1 "
    f"| {COMPOSE}; kill $other",
)
def port_in_use():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("rank", dist.get_rank())


@shell(
    "include-and-num-gpus",
    "w3-both",
    f"deepspeed --master_port 29841 --include localhost:0,1 --num_gpus 2 train.py "
    f"--deepspeed ds.json 2>&1 | {COMPOSE}",
)
def include_and_num():
    print("never started")


@shell(
    "include-bad-slot",
    "w3-clock",
    f"deepspeed --master_port 29842 --include localhost:4,5 train.py --epochs 3 2>&1 | {CLOCK}",
)
def bad_slot():
    print("never started")


@shell(
    "no-gpu",
    "w3-docker",
    f"deepspeed --master_port 29843 train.py 2>&1 | {DOCKER}",
    {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""},
)
def no_gpu():
    print("never started")


@shell(
    "local-rank-arg",
    "w3-click-less",
    f"deepspeed --num_accelerators 1 --master_port 29844 train.py --model bert-tiny --epochs 3 2>&1 | {SRUN}",
)
def local_rank_arg():
    import argparse
    import logging

    logging.basicConfig(level="INFO", format="%(asctime)s | %(levelname)s | %(message)s")
    parser = argparse.ArgumentParser(description="fine-tune a classifier")
    parser.add_argument("--model", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--deepspeed_config", default="ds.json")
    logging.getLogger("finetune").info("reading arguments")
    args = parser.parse_args()
    print(args)


@shell(
    "plain-python-deepspeed",
    "w3-reward",
    "python train.py > out.log 2> err.log; cat err.log out.log",
    files={"z2.json": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}},
)
def plain_python():
    import tiny
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    print("loading the pairs")
    pairs = Dataset.from_dict({"chosen": ["w1 w2 w3"] * 8, "rejected": ["w1 w2 w4"] * 8})
    folder = tiny.saved("reward-base")
    args = RewardConfig("rm", deepspeed="z2.json", use_cpu=True, max_steps=2, report_to="none")
    RewardTrainer(folder, args=args, train_dataset=pairs).train()


@shell(
    "accelerate-flags",
    "w3-two-kinds",
    "accelerate launch --multi_gpu --use_fsdp --num_processes 2 --main_process_port 29845 "
    "train.py --bf16 2>&1",
)
def accelerate_flags():
    print("never started")


@shell(
    "pdsh-missing",
    "w3-two-nodes",
    f"deepspeed --hostfile hosts --no_ssh_check --master_port 29846 --master_addr 10.0.0.11 "
    f"train.py 2>&1 | {CLOCK}",
    files={"hosts": "10.0.0.11 slots=8\n10.0.0.12 slots=8\n"},
)
def pdsh():
    print("never started")


@shell(
    "hostfile",
    "w3-colon",
    f"deepspeed --hostfile hosts.txt --master_port 29847 train.py 2>&1 | {SRUN}",
    files={"hosts.txt": "# two machines of the lab\nnode1: 4\nnode2: 4\n"},
)
def bad_hostfile():
    print("never started")


@shell("notebook-cuda-init", "w3-accelerator-first", "python train.py 2>&1", {"ACCELERATE_USE_CPU": "1"})
def notebook_first():
    import torch
    from accelerate import Accelerator, notebook_launcher

    accelerator = Accelerator()
    print("device of the first cell:", accelerator.device)

    def train():
        model = torch.nn.Linear(4, 4)
        return accelerator.prepare(model)

    notebook_launcher(train, num_processes=2, use_port="29848")


if __name__ == "__main__":
    main()
