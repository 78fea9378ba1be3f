"""Second held-out set: DeepSpeed's extensions that can not be built, and offload to a disk."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.second_y_shell import COMPOSE, ONE, TAIL, second

FRESH = "export TORCH_EXTENSIONS_DIR=$HOME/.cache/torch_extensions/py311_cpu; "
NVME = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/home/user/swap"},
        "offload_param": {"device": "cpu"},
    },
}


@second("jit-no-ninja", "trainer", "python=$(command -v python); PATH=/opt/none $python train.py > o 2> e; "
        "cat o e", TAIL, env=ONE, files={"ds.json": {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}})  # fmt: skip
def no_ninja_trainer():
    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=2, report_to="none")
    Trainer(nets.gpt2(), args, train_dataset=tiny.rows()).train()


@second(
    "jit-no-compiler", "slim-image", FRESH + "PATH=$(dirname $(command -v python)) python train.py", COMPOSE
)
def no_compiler():
    import nets
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = nets.t5()
    print("parameters", sum(p.numel() for p in model.parameters()))
    DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True)


@second("jit-stale-lock", "interrupted", FRESH + "mkdir -p $TORCH_EXTENSIONS_DIR/cpu_adam; "
        "touch $TORCH_EXTENSIONS_DIR/cpu_adam/lock; timeout -s INT 45 python train.py")  # fmt: skip
def stale_lock():
    import time

    import nets
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = nets.bloom()
    print(time.strftime("%H:%M:%S"), "model ready, building the optimizer", flush=True)
    DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    print(time.strftime("%H:%M:%S"), "training")


@second("aio-missing", "engine", env=ONE, files={"ds.json": NVME})
def aio_engine():
    import deepspeed
    import nets

    model = nets.opt()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    deepspeed.initialize(model=model, optimizer=optimizer, config="ds.json")


@second("nvme-path-missing", "params", env=ONE, through=TAIL)
def nvme_path_of_params():
    import deepspeed
    import nets

    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = nets.neox()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@second("nvme-path-missing", "optimizer", env=ONE, through=COMPOSE)
def nvme_path_of_optimizer():
    import deepspeed
    import nets

    model = nets.gpt2()
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


if __name__ == "__main__":
    main()
