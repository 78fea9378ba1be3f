"""The first run on several GPUs of one machine: engines, 4-bit bases, faults and two nodes, in 20 minutes.

python benchmarks/gpu_eight.py                 all parts, and records/gpu_eight_<device>.json
python benchmarks/gpu_eight.py --only NAME …   these parts
python benchmarks/gpu_eight.py --cpu           the same commands on two CPU processes, with narrow models
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

from gpu_first import memory_ran_out
from gpu_parts import LLAMA_8B, LORA, QWEN, STEPS, Bench, Missed, Part, script

BUDGET_S = 1200.0
DDP: dict[str, Any] = {"engine": "ddp"}
FSDP: dict[str, Any] = {"engine": "fsdp"}


def zero(stage: int) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage}


def rehearsal(bench: Bench) -> dict[str, Any]:
    """All-reduce, links and a save by the processes of a run."""
    recipe = bench.recipe("rehearsal", QWEN, sharding=zero(2))
    found = bench.command("doctor", recipe, *bench.on(bench.ranks), "--rehearse", "--seconds", "5",
                          "--output-dir", recipe.with_name("out"))  # fmt: skip
    return {"checks": found["checks"]}


def engines(bench: Bench) -> dict[str, Any]:
    """One device, and all under each engine: the same losses; peak and context of each rank."""
    ways = {"one": DDP, "ddp": DDP, "zero2": zero(2), "zero3": zero(3), "fsdp": FSDP}
    runs = {}
    for name, sharding in ways.items():
        recipe = bench.recipe(f"engine-{name}", QWEN, length=1024, batch=2 * bench.ranks, sharding=sharding)
        runs[name] = bench.run(recipe, 1 if name == "one" else bench.ranks)
    return bench.alike(runs)


def lora(bench: Bench) -> dict[str, Any]:
    """8B with an adapter, saved twice: DDP beside ZeRO without stages."""
    saved = {"save_strategy": "steps", "save_steps": STEPS // 2}
    return bench.alike({
        name: bench.run(
            bench.recipe(f"lora-{name}", LLAMA_8B, batch=bench.ranks, sharding=way, trainer=saved, **LORA),
            bench.ranks,
        )
        for name, way in {"ddp": DDP, "zero0": zero(0)}.items()
    })  # fmt: skip


def quantised(bench: Bench) -> dict[str, Any]:
    """8B over a base of 4 bits, whole on each device and sharded."""
    return bench.alike({
        name: bench.run(
            bench.recipe(f"nf4-{name}", LLAMA_8B, batch=bench.ranks, sharding=way, **LORA,
                         model={"quantization": "nf4"}),
            bench.ranks,
        )
        for name, way in {"ddp": DDP, "fsdp": FSDP}.items()
    })  # fmt: skip


def faults(bench: Bench) -> dict[str, Any]:
    """A stop, and a rank that is killed."""
    recipe = bench.recipe("faults", QWEN, length=512, batch=bench.ranks, sharding=zero(2))
    return bench.drill(recipe, bench.ranks, "terminate,kill-rank")


def one_rank_full(bench: Bench) -> dict[str, Any]:
    return memory_ran_out(bench, bench.ranks, bench.ranks - 1)


def fewer(bench: Bench) -> dict[str, Any]:
    """Stopped on all devices, resumed on half of them: the losses of one that was not."""
    half = max(1, bench.ranks // 2)
    saved = {"save_strategy": "steps", "save_steps": 2}  # after each of which the ranks agree about a stop
    given: dict[str, Any] = {"length": 512, "batch": 2 * bench.ranks, "sharding": zero(2), "trainer": saved}
    whole = bench.run(bench.recipe("whole", QWEN, **given), bench.ranks)
    recipe = bench.recipe("fewer", QWEN, **given)
    stop = json.dumps({"fault": "terminate", "step": STEPS // 2})
    bench.run(recipe, bench.ranks, expect=130, env={"EFFILAUNCH_DRILL": stop})
    return bench.alike({"whole": whole, "fewer": bench.run(recipe, half, "--resume", "auto")})


def nodes(bench: Bench) -> dict[str, Any]:
    """Two nodes of half the devices each, on this machine: the losses of one node with all."""
    half = max(1, bench.ranks // 2)
    given: dict[str, Any] = {"length": 512, "batch": 2 * bench.ranks, "sharding": DDP}
    one = bench.run(bench.recipe("one-node", QWEN, **given), bench.ranks)
    recipe = bench.recipe("two-nodes", QWEN, **given)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    device = "cpu" if bench.on_cpu else "auto"
    words = [
        ("run", recipe, "--output-dir", recipe.with_name("out"), "--node-rank", str(number),
         "--master-addr", f"127.0.0.1:{port}", "--set", "hardware.num_nodes=2",
         "--set", f"hardware.devices_per_node={half}", "--set", f"hardware.device={device}")
        for number in (0, 1)
    ]  # fmt: skip
    started = [bench.begin(*words[number], env=bench.gpus(half * number, half)) for number in (0, 1)]
    missed = []
    for process, said in zip(started, words, strict=True):
        try:
            bench.end(process, *said)
        except Missed as error:  # the other one is waited for, too
            missed.append(error)
    if missed:
        raise missed[0]
    return bench.alike({"one": one, "two": recipe.with_name("out")})


PARTS = (
    Part("rehearsal", rehearsal, ("NCCL",)),
    Part("engines", engines, ("NCCL", "peak and context of a device")),
    Part("lora", lora, ("NCCL", "8B")),
    Part("quantised", quantised, ("bitsandbytes' CUDA kernels",)),
    Part("faults", faults),
    Part("one-rank-full", one_rank_full, ("a full device: a CPU's allocation is refused instead",)),
    Part("fewer", fewer),
    Part("nodes", nodes, ("NCCL between two sets of devices",)),
)

if __name__ == "__main__":
    sys.exit(script(str(__doc__), "gpu_eight", PARTS, BUDGET_S, cpu_ranks=2))
