"""One rank that trains plain parameters under an engine and writes the bytes of tensors that are alive.

Arguments: rank, world size, port, shapes as JSON, cases as JSON, file for the result of rank 0.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def alive() -> int:
    """Bytes of all storages of this process, gradients included.

    The least of three looks: a thread of gloo drops a finished collective's tensors when its turn comes.
    """
    found = []
    for _ in range(3):
        found.append(seen())
        time.sleep(0.1)
    return min(found)


def seen() -> int:
    import torch

    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if not isinstance(found, torch.Tensor):
            continue
        grad = found.grad if found.is_leaf else None
        for tensor in (found, grad):
            local = getattr(tensor, "_local_tensor", tensor)
            if local is not None and local.device.type == "cpu":
                storage = local.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def make_model(shapes: list[tuple[int, int]]) -> Any:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(rows, columns))

        def forward(self, x: Any) -> Any:
            return x + (self.weight * self.weight).sum() * 1e-6

    return torch.nn.Sequential(*(Layer(*shape) for shape in shapes))


def deepspeed_case(case: dict[str, Any], shapes: list[tuple[int, int]]) -> int:
    import deepspeed
    import torch

    config = case["config"]
    model = make_model(shapes)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    at_step: list[int] = []
    if case["at"] == "call":
        optimizer.register_step_pre_hook(lambda *_: at_step.append(alive()))
    elif case["at"] == "joined":
        flatten = engine.optimizer.flatten

        def looked_at(tensors: Any) -> Any:
            joined = flatten(tensors)
            at_step.append(alive())
            return joined

        engine.optimizer.flatten = looked_at
    x = torch.zeros(1, dtype=torch.bfloat16 if "bf16" in config else torch.float32)
    steps = config["gradient_accumulation_steps"]
    for step in range(2):
        for _ in range(steps if step == 0 else case["micro_batches"]):
            engine.backward(engine(x).sum())
            if step == 1:
                held = alive()
            engine.step()
    engine.destroy()
    return at_step[-1] if at_step else held


def torch_case(case: dict[str, Any], shapes: list[tuple[int, int]]) -> int:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = make_model(shapes)
    if case["engine"] == "fsdp":
        policy = MixedPrecisionPolicy(*[torch.bfloat16] * 3) if case["mixed"] else MixedPrecisionPolicy()
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(2):
        if case["engine"] == "fsdp":
            # The second step stops where its first micro-batch is not reduced yet.
            waits = step == 1 and case["micro_batches"] > 1 and not case["reduces_each"]
            model.set_requires_gradient_sync(not waits)
        for _ in range(case["micro_batches"] if case["reduces_each"] else 1):
            model(torch.zeros(1)).sum().backward()
        held = alive()
        optimizer.step()
        optimizer.zero_grad()
    return held


def main() -> None:
    rank, world, port, shapes, cases, out = sys.argv[1:]
    os.environ |= {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    import deepspeed
    import torch

    from launcher.train.worker import leave

    torch.set_num_threads(1)
    # The shared-memory collectives would be compiled first, which takes longer than all cases.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    # What the imports made is looked at no more: it holds no tensors, and there is much of it.
    gc.freeze()
    held = {}
    for name, case in json.loads(cases).items():
        before = alive()
        run = deepspeed_case if case["engine"] == "deepspeed" else torch_case
        held[name] = run(case, json.loads(shapes)) - before
    if rank == "0":
        Path(out).write_text(json.dumps(held), encoding="utf-8")
    leave(0)


if __name__ == "__main__":
    main()
