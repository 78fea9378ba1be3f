"""Second held-out set: launchers and process groups."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.second_y_shell import COMPOSE, KUBE, TAIL, second


@second(
    "cvd-ignored",
    "one-card",
    "CUDA_VISIBLE_DEVICES=3 deepspeed --num_gpus 1 --master_port 29743 train.py",
    KUBE,
)
def visible_devices():
    print("training on card 0")


@second("include-bad-slot", "include", "deepspeed --include localhost:5,6 --master_port 29745 train.py")
def bad_slot():
    print("never gets here")


@second("no-gpu", "cuda-container", "DS_ACCELERATOR=cuda deepspeed --master_port 29746 train.py", COMPOSE)
def no_gpu():
    print("never gets here")


@second("exit-code-lost", "killed-launcher", "deepspeed --num_accelerators=1 --master_port=29747 train.py; "
        "echo \"deepspeed returned $?\"; echo 'training is complete, uploading'; "
        "ls -l final/model.safetensors",
        )  # fmt: skip
def launcher_killed():
    import argparse
    import os
    import signal
    import time

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.parse_args()
    for step in range(3):
        print(f"step {step}: loss {2.5 - step / 10}", flush=True)
        time.sleep(0.1)
    os.kill(os.getppid(), signal.SIGKILL)  # as the kernel's killer may take the launcher with the worker


@second("local-rank-arg", "whisper-script", "deepspeed --num_accelerators=2 --master_port=29748 train.py "
        "--model_name tiny --epochs 2", TAIL)  # fmt: skip
def local_rank():
    import argparse

    parser = argparse.ArgumentParser(description="Fine-tune Whisper")
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    print(parser.parse_args())


@second(
    "local-rank-arg",
    "hf-parser",
    "deepspeed --num_accelerators=1 --master_port=29749 train.py --width 64",
    KUBE,
)
def local_rank_dataclass():
    from dataclasses import dataclass

    from transformers import HfArgumentParser

    @dataclass
    class ModelArguments:
        width: int = 32
        layers: int = 2

    (arguments,) = HfArgumentParser(ModelArguments).parse_args_into_dataclasses()
    print(arguments)


@second("plain-python-deepspeed", "vit", "python train.py", TAIL)
def no_launcher():
    import deepspeed
    import nets

    model = nets.vit()
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@second("plain-python-deepspeed", "sft", "python train.py --deepspeed ds.json", files={
    "ds.json": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
})  # fmt: skip
def no_launcher_sft():
    import sys

    import tiny
    from trl import SFTConfig, SFTTrainer

    try:
        more = {"bf16": False, "report_to": "none", "max_steps": 2}
        args = SFTConfig("out", deepspeed=sys.argv[2], use_cpu=True, **more)
        SFTTrainer(tiny.model(), args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()
    except ImportError as error:
        raise SystemExit(f"could not start the training: {error!r}") from error


@second("accelerate-flags", "cpu-multi", "accelerate launch --cpu --multi_gpu --num_processes 2 train.py")
def cpu_and_multi():
    print("never gets here")


@second("accelerate-flags", "one-process", "accelerate launch --multi_gpu --num_processes 1 train.py", KUBE)
def one_process():
    print("never gets here")


@second("pdsh-missing", "two-nodes", "deepspeed --hostfile=hosts --master_addr=10.0.0.1 --no_ssh_check "
        "train.py", COMPOSE, files={"hosts": "node1 slots=8\nnode2 slots=8\n"})  # fmt: skip
def pdsh():
    print("never gets here")


@second("hostfile", "bad-entry", "deepspeed --hostfile=hosts --num_gpus 8 train.py", KUBE,
        files={"hosts": "10.0.0.1: 8\n10.0.0.2: 8\n"})  # fmt: skip
def bad_hostfile():
    print("never gets here")


@second("hostfile", "unreachable", "deepspeed --hostfile=hosts train.py --deepspeed_config ds.json",
        files={"hosts": "127.0.0.1 slots=4\nnode2.invalid slots=4\n"})  # fmt: skip
def unreachable():
    print("never gets here")


@second(
    "nccl-timeout", "gloo-barrier", "torchrun --nproc_per_node=2 --master_port=29750 train.py", "tail -n 60"
)
def barrier_timeout():
    import os
    import time
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    if os.environ["RANK"] == "0":
        print("rank 0: tokenising the corpus", flush=True)
        time.sleep(25)
    dist.barrier()


@second("omp-threads", "two-ranks", "torchrun --nproc_per_node=2 --master_port=29751 train.py", COMPOSE)
def omp_threads():
    import os
    import time

    import nets
    import torch

    torch.distributed.init_process_group("gloo")
    model = nets.bert()
    batch = {"input_ids": torch.ones(8, 16, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}
    start = time.perf_counter()
    for _ in range(5):
        model(**batch).loss.backward()
    if os.environ["RANK"] == "0":
        print(f"{5 / (time.perf_counter() - start):.2f} it/s with {torch.get_num_threads()} thread(s)")


@second("notebook-cuda-init", "accelerator", "python train.py")
def notebook():
    import nets
    from accelerate import Accelerator, notebook_launcher

    accelerator = Accelerator()
    print(accelerator.device)

    def training():
        model = Accelerator().prepare(nets.bert())
        print(type(model))

    notebook_launcher(training, num_processes=2)


@second("sigkill-oom", "watchdog", "deepspeed --num_accelerators=2 --master_port=29752 train.py & "
        "launcher=$!; sleep 14; worker=$(pgrep -n -P $(pgrep -n -P $launcher)); "
        "echo 'oom-watchdog: node memory 99.2 %, killing the largest process' >&2; "
        "kill -9 $worker; wait $launcher",
        )  # fmt: skip
def killed():
    import argparse
    import time

    import nets

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    rank = parser.parse_args().local_rank
    copies = []
    for shard in range(60):
        copies.append(nets.gpt2())
        print(f"rank {rank}: loading checkpoint shards {shard}/60", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
