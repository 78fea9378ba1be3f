"""The first run on one GPU: every way through the trainer once, in under nine minutes.

python benchmarks/gpu_first.py                 all parts, and records/gpu_first_<device>.json
python benchmarks/gpu_first.py --only NAME …   these parts
python benchmarks/gpu_first.py --cpu           the same commands on CPU processes, with narrow models
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gpu_parts import LLAMA_1B, LLAMA_8B, LORA, QWEN, Bench, Missed, Part, figures, script

BUDGET_S = 540.0

SYNCS = '''
"""Writes the frames of ours in which the device is waited for, from the third step on."""
import traceback, warnings
from pathlib import Path
import torch
from transformers import TrainerCallback

FILE = Path(__file__).with_name("syncs.txt")


def written(message, *_, **__):
    if "synchroniz" in str(message):
        stack = traceback.extract_stack()
        ours = [f"{one.filename}:{one.lineno}" for one in stack if "/launcher/" in one.filename]
        with FILE.open("a") as stream:
            stream.write(f"{ours[-1] if ours else 'not ours'}\\n")


class Watched(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2 and torch.cuda.is_available():
            warnings.simplefilter("always")
            warnings.showwarning = written
            torch.cuda.set_sync_debug_mode("warn")

    def on_optimizer_step(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")  # what follows is once per step: logging, saving


def callbacks():
    return [Watched()]
'''

BALLAST = '''
"""Memory runs out once, in the third step of one rank: the device is filled, or too much is asked for."""
import os
from pathlib import Path
import torch
from transformers import TrainerCallback

DONE = Path(__file__).with_name("filled")
step, held = [0], []


class Steps(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        step[0] = state.global_step


def fill(module, arguments):
    mine = int(os.environ.get("RANK", 0)) == FILLED_RANK
    if not (mine and isinstance(module, torch.nn.Embedding) and step[0] >= 2) or DONE.exists():
        return
    DONE.touch()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        held.append(torch.empty(torch.cuda.mem_get_info()[0] - 2**26, dtype=torch.uint8, device="cuda"))
    else:
        torch.empty(2**50, dtype=torch.uint8)


torch.nn.modules.module.register_module_forward_pre_hook(fill)


def callbacks():
    return [Steps()]
'''


def machine(bench: Bench) -> dict[str, Any]:
    found = bench.command("doctor")
    smi = [] if bench.on_cpu else ["nvidia-smi", "-q"]
    said = subprocess.run(smi, capture_output=True, text=True, check=False).stdout if smi else ""
    return {"checks": found["checks"], "nvidia_smi": said.splitlines()[:40]}


def lora(bench: Bench) -> dict[str, Any]:
    """What the plan chooses (compiled blocks, varlen, chunked loss) beside none of it."""
    fast = bench.recipe("lora", LLAMA_1B, hooks=SYNCS, **LORA)
    plain = bench.recipe(
        "lora-plain", LLAMA_1B, **LORA,
        model={"loss": "full", "compile_blocks": False, "attn_implementation": "eager"},
    )  # fmt: skip
    found = bench.alike({"planned": bench.run(fast), "plain": bench.run(plain)})
    syncs = fast.with_name("syncs.txt")
    lines = syncs.read_text(encoding="utf-8").splitlines() if syncs.is_file() else []
    found["syncs"] = {line: lines.count(line) for line in sorted({*lines})}
    if ours := [line for line in found["syncs"] if line != "not ours"]:
        raise Missed(f"the host waits for the device in each micro-batch, in {', '.join(ours)}: {found}")
    return found


def engines(bench: Bench) -> dict[str, Any]:
    """0.6B under every engine: the same losses."""
    ways: dict[str, dict[str, Any]] = {
        "ddp": {"engine": "ddp"},
        "zero0": {"engine": "deepspeed", "zero_stage": 0},
        "zero2": {"engine": "deepspeed", "zero_stage": 2},
        "zero3": {"engine": "deepspeed", "zero_stage": 3},
        "offload": {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu"},
    }
    given: dict[str, Any] = {"length": 1024, "precision": "bf16"}
    return bench.alike({
        name: bench.run(bench.recipe(f"engine-{name}", QWEN, sharding=sharding, **given))
        for name, sharding in ways.items()
    })  # fmt: skip


def quantised(bench: Bench) -> dict[str, Any]:
    """Stopped and resumed over a base of 4 and of 8 bits."""
    return {
        bits: bench.drill(
            bench.recipe(f"drill-{bits}", LLAMA_1B, length=512, **LORA, model={"quantization": bits}),
            1, "terminate",
        )
        for bits in ("nf4", "int8")
    }  # fmt: skip


def stopped(bench: Bench) -> dict[str, Any]:
    """SIGTERM and SIGKILL, and the resumed run's losses."""
    recipe = bench.recipe("stopped", QWEN, length=512, precision="bf16-true")
    return bench.drill(recipe, 1, "terminate,kill-all")


def adapted(bench: Bench) -> dict[str, Any]:
    return memory_ran_out(bench, 1, 0)


def memory_ran_out(bench: Bench, ranks: int, on_rank: int) -> dict[str, Any]:
    """`on_oom: adapt`: the same losses with half the micro-batch, from the last checkpoint on."""
    given: dict[str, Any] = {
        **LORA, "length": 512,
        "trainer": {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2},
    }  # fmt: skip
    hooks = BALLAST.replace("FILLED_RANK", str(on_rank))
    full = bench.recipe("filled", QWEN, batch=4 * ranks, hooks=hooks, on_oom="adapt", **given)
    same = bench.recipe("not-filled", QWEN, batch=4 * ranks, **given)
    runs = {"undisturbed": bench.run(same, ranks), "adapted": bench.run(full, ranks)}
    found = bench.alike(runs)
    result = json.loads((runs["adapted"] / "result.json").read_text(encoding="utf-8"))
    found["adaptations"] = result["adaptations"]
    if len(result["adaptations"]) != 1:
        raise Missed(f"expected one adaptation, found {result['adaptations']}")
    return found


def qlora(bench: Bench) -> dict[str, Any]:
    """8B over a base of 4 bits."""
    recipe = bench.recipe("qlora", LLAMA_8B, batch=4, **LORA, model={"quantization": "nf4"},
                          trainer={"max_steps": 20})  # fmt: skip
    return bench.alike({"nf4": bench.run(recipe)})


def grpo(bench: Bench) -> dict[str, Any]:
    recipe = bench.recipe(
        "grpo", QWEN, rows="prompt", length=256, batch=16, **LORA, task="grpo",
        trainer={"max_steps": 4, "learning_rate": 1e-4},
        # Half of random completions, whatever their length: without a difference nothing is learned.
        reward=[{"function": "regular_expression", "arguments": {"pattern": r"^\W*[a-mA-M]"}}],
        generation={"num_generations": 8, "max_completion_length": 8 if bench.on_cpu else 128},
    )  # fmt: skip
    return figures(bench.run(recipe))


def results(bench: Bench) -> dict[str, Any]:
    """What is done with a result: evaluate, generate, merge."""
    recipe = bench.recipe("results", LLAMA_1B, length=512, **LORA,
                          trainer={"max_steps": 2, "learning_rate": 1e-4})  # fmt: skip
    out = bench.run(recipe)
    held_out = recipe.with_name("rows.jsonl")
    evaluated = bench.command("eval", out, "--data", held_out, env=bench.gpus(0, 1))
    said = bench.command("generate", out, "table green", "--max-new-tokens", "8", env=bench.gpus(0, 1))
    merged = bench.command("merge", out, env=bench.gpus(0, 1))
    return {name: {key: value for key, value in one.items() if key != "said"}
            for name, one in (("eval", evaluated), ("generate", said), ("merge", merged))}  # fmt: skip


PARTS = (
    Part("machine", machine, ("nvidia-smi",)),
    Part("lora", lora, ("compiled blocks", "varlen", "torch.cuda.set_sync_debug_mode")),
    Part("engines", engines, ("bfloat16 products of a GPU",)),
    Part("quantised", quantised, ("bitsandbytes' CUDA kernels",)),
    Part("stopped", stopped),
    Part("adapted", adapted, ("a full device: a CPU's allocation is refused instead",)),
    Part("qlora", qlora, ("bitsandbytes' CUDA kernels",)),
    Part("grpo", grpo),
    Part("results", results),
)

if __name__ == "__main__":
    sys.exit(script(str(__doc__), "gpu_first", PARTS, BUDGET_S, cpu_ranks=1))
