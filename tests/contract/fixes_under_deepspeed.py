"""What DeepSpeed does without the fixes and with them, in one process of its own: prints JSON by question.

`python fixes_under_deepspeed.py MODEL_DIR`. ZeRO-3 changes the state of the whole interpreter.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from functools import partial
from typing import Any

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = str(probe.getsockname()[1])
os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": PORT,
}

import deepspeed
import torch
import transformers
from accelerate.state import AcceleratorState
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.utils import groups

from launcher.train.worker import set_timeouts

# One rank shares no memory with others: nothing is compiled for it. (deepspeed.comm.torch is torch itself.)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

BATCHES = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
TIMEOUT_S = 1234


def load(**more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **more)


def said(call: Any) -> str:
    """The error that a call ends in; empty without one."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def seconds(group: Any) -> float:
    """How long the collectives of a group wait."""
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def waits() -> dict[str, float]:
    """Of the Trainer's group, and of the one that ZeRO makes for itself."""
    groups._WORLD_GROUP = None
    return {"trainer": seconds(torch.distributed.group.WORLD), "zero": seconds(groups._clone_world_group())}


def head(model: Any) -> int:
    return int(model.lm_head.weight.numel())


def under_zero3() -> dict[str, Any]:
    found: dict[str, Any] = {"model_first": head(load())}
    config = {**BATCHES, "zero_optimization": {"stage": 3}}
    args = transformers.TrainingArguments(
        "unused", use_cpu=True, deepspeed=config, ddp_timeout=TIMEOUT_S, report_to="none",
        save_only_model=True, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch",
    )  # fmt: skip
    deepspeed.init_distributed(dist_backend="gloo")
    found["timeout_s"] = waits()
    set_timeouts(types.SimpleNamespace(trainer=types.SimpleNamespace(ddp_timeout=TIMEOUT_S)))
    found["timeout_s"]["zero, told"] = waits()["zero"]
    model = load()
    found["arguments_first"] = head(model)
    found["device_map"] = said(lambda: load(device_map={"": "cpu"}))
    four_bits = load(quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True))
    found["four_bits"] = {"whole": head(four_bits), "partitioned": hasattr(four_bits.lm_head.weight, "ds_id")}
    rows = [{"input_ids": [1], "labels": [1]}]
    for name, value in (
        ("save_only_model", True),
        ("save_only_model", False),
        ("auto_find_batch_size", True),
    ):
        setattr(args, name, value)
        AcceleratorState._reset_state()
        found[f"{name}={value}"] = said(
            lambda: transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows)
        )
    return found


def engine(zero: dict[str, Any], **config: Any) -> Any:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {**BATCHES, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def offloaded() -> dict[str, Any]:
    cpu = {"device": "cpu"}
    stage2, stage3 = (engine({"stage": stage, "offload_param": cpu}) for stage in (2, 3))
    stage0, stage1 = (engine({"stage": stage, "offload_optimizer": cpu}) for stage in (0, 1))
    return {
        "parameters": {
            "stage 2": bool(getattr(stage2.optimizer, "offload_param", False)),
            "stage 3": bool(getattr(stage3.optimizer, "offload_param", False)),
        },
        "optimizer": {
            "stage 0": bool(getattr(stage0.optimizer, "cpu_offload", False)),
            "stage 1": bool(getattr(stage1.optimizer, "cpu_offload", False)),
        },
    }


def one_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()


def over_partitions() -> dict[str, str]:
    """The first step of optimizers over two groups of parameters, as the Trainer makes them, at a stage."""
    found = {}
    for name, stage in (("Adagrad", 0), ("Adagrad", 1), ("Adagrad", 3), ("RMSprop", 1), ("RMSprop", 3)):
        model = torch.nn.Linear(8, 8)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = getattr(torch.optim, name)(groups)
        config = {**BATCHES, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        made = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        found[f"{name} {stage}"] = said(partial(one_step, made))
    return found


def swapped() -> dict[str, Any]:
    """The optimizer that accelerate puts in place of the recipe's; DeepSpeed's own needs no compiler here."""
    import bitsandbytes.optim as bnb
    import deepspeed.ops.adam
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    made: dict[str, Any] = {}

    class DeepSpeedCPUAdam(torch.optim.SGD):
        def __init__(self, groups: Any, **settings: Any) -> None:
            made["adamw_mode"] = settings["adamw_mode"]
            super().__init__([group["params"][0] for group in groups], lr=1.0)

    deepspeed.ops.adam.DeepSpeedCPUAdam = DeepSpeedCPUAdam
    weights = [torch.nn.Parameter(torch.ones(4, 4))]
    found = {}
    for name, optimizer in {
        "adamw": torch.optim.AdamW(weights),
        "adafactor": transformers.Adafactor(weights),
        "adamw 8-bit": bnb.AdamW8bit(weights),
    }.items():
        swapped = map_pytorch_optim_to_deepspeed(optimizer)
        found[name] = {"class": type(swapped).__name__, **made}
    for name, optimizer in {"adagrad": torch.optim.Adagrad(weights), "lion": bnb.Lion32bit(weights)}.items():
        found[name] = said(partial(map_pytorch_optim_to_deepspeed, optimizer))
    return found


def fp16_by_capability() -> dict[str, str]:
    """DeepSpeed's own check with devices that are told to it: none is here."""
    here = get_accelerator()
    torch.cuda.is_available = lambda: True
    here.is_fp16_supported = CUDA_Accelerator().is_fp16_supported
    found = {}
    for capability in ((6, 1), (7, 0)):
        torch.cuda.get_device_capability = lambda *_, told=capability: told
        found[str(capability[0])] = said(lambda: engine({"stage": 0}, fp16={"enabled": True}))
    return found


if __name__ == "__main__":
    found = {
        **under_zero3(),
        "swapped": swapped(),
        "offloaded": offloaded(),
        "over_partitions": over_partitions(),
    }
    found["fp16"] = fp16_by_capability()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
