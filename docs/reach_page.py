"""docs/reach.md: what can be trained on which machine, as the planner says.

    python docs/reach_page.py      writes it, in minutes

Each cell is a row of `effilaunch estimate MODEL --on MACHINE`, and each longest context is a plan's answer.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from launcher.cli import main as effilaunch

PAGE = Path(__file__).resolve().with_name("reach.md")
MACHINES = (
    "1xRTX2080Ti-11GB", "1xRTX4070-12GB", "1xRTX4080-16GB", "1xRTX4090-24GB", "1xRTX5090-32GB",
    "1xL40S-48GB", "1xH100-80GB", "1xH200-141GB", "2xRTX4090-24GB", "4xRTX4090-24GB", "8xRTX4090-24GB",
    "8xH100-80GB",
)  # fmt: skip
MODELS = (
    "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
)  # fmt: skip
"""Of the shipped ones, from small to large."""
KINDS = {"all weights": "full", "LoRA": "LoRA", "QLoRA": "nf4 LoRA"}
"""Column -> how the names of its strategies begin."""
MOST_HOST = 1024 * 2**30
"""Bytes of a node's memory that a strategy may take."""
CONTEXTS = {"8B": "meta-llama/Llama-3.1-8B", "70B": "meta-llama/Llama-3.1-70B"}
LONGEST = 131_072
"""Tokens: the positions of these models."""
GIB = 2**30
TEXT = """# What can I train on this?

The largest of {count} shipped models, from Qwen3-0.6B to Llama-3.1-405B, that fits each machine at
{length:,} tokens and one sample at a time, as the planner predicts it: **nothing on this page was
measured**. Each cell has the strategy of `effilaunch estimate MODEL --on MACHINE` that needs the
least host memory, and in brackets the GiB of each device and of the host of a node. `in host memory`:
states are offloaded, to at most 1 TiB, so check what your machine has. An NVMe disk reaches further.

{table}

The longest samples of LoRA over a 4-bit base, one at a time, in steps of 64 tokens. `fsdp`: with
`sharding: {{engine: fsdp, offload_param: cpu, offload_activations: cpu}}`, however much host memory
that takes.

{contexts}

Plan yours: `effilaunch plan RECIPE --on MACHINE` says what would fit where something does not, and so does
[the planner page](plan-page.md) in a browser. [How memory is predicted](memory.md);
[how weights, states and samples are shared](parallelism.md).
"""


def answer(*words: str) -> dict[str, Any]:
    """What a command prints with `--json`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        effilaunch([*words, "--json"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def fitting(model: str, machine: str, kind: str, *, offloaded: bool) -> dict[str, Any] | None:
    """The row of `estimate` with the least host memory, of those that fit; None without one."""
    rows = [
        row
        for row in answer("estimate", model, "--on", machine)["rows"]
        if row["strategy"].startswith(KINDS[kind])
        and row["memory"]["fits"]
        and "SGD" not in row["strategy"]
        and not row["memory"]["host"]["nvme"]
        and row["memory"]["host_bytes"] <= MOST_HOST
        and offloaded == bool(row["memory"]["host"]["offloaded"])
    ]
    return min(rows, key=lambda row: row["memory"]["host_bytes"], default=None)


def cell(machine: str, kind: str, *, offloaded: bool) -> str:
    """The largest model that fits, with its strategy."""
    for model in reversed(MODELS):
        if (row := fitting(model, machine, kind, offloaded=offloaded)) is not None:
            strategy = row["strategy"].removeprefix(KINDS[kind]).removeprefix(" r16").lstrip(", ")
            needed = max(row["memory"][name] for name in ("expected", "save_peak", "eval_peak", "load_peak"))
            host = row["memory"]["host_bytes"] / GIB
            return f"{model.rpartition('/')[2]}: {strategy} ({needed / GIB:.1f}, host {host:.0f})"
    return "none"


def longest(model: str, machine: str, *, offloaded: bool) -> str:
    """Tokens of the longest sample that fits."""
    moved = "{engine: fsdp, offload_param: cpu, offload_activations: cpu}"
    sharding = moved if offloaded else "{engine: ddp}"
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "r.yaml"
        recipe.write_text(
            f"model: {{name_or_path: {model}, quantization: nf4}}\nadapter: {{type: lora, r: 16}}\n"
            f"data: {{train: [{{path: rows.jsonl}}], max_length: {LONGEST}}}\n"
            f"sharding: {sharding}\n"
            "trainer: {max_steps: 1, per_device_train_batch_size: 1, activation_checkpointing: true}\n"
        )
        plan = answer("plan", str(recipe), "--on", machine)
    if "memory" not in plan:  # refused: FSDP2 trains no fp16
        return "none"
    if plan["memory"]["fits"]:
        return f"{LONGEST:,}"
    lengths = [one["change"].get("data.max_length") for one in plan["would_fit"]]
    return next((f"{length:,}" for length in lengths if length), "none")


def table(title: str, columns: list[str], rows: dict[str, list[str]]) -> str:
    lines = [f"| {' | '.join([title, *columns])} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())])


def page() -> str:
    kinds = [(kind, offloaded) for offloaded in (False, True) for kind in KINDS]
    columns = [f"{kind}, in host memory" if offloaded else kind for kind, offloaded in kinds]
    cells = {
        machine: [cell(machine, kind, offloaded=offloaded) for kind, offloaded in kinds]
        for machine in MACHINES
    }
    ways = [(size, offloaded) for size in CONTEXTS for offloaded in (False, True)]
    tokens = {
        machine: [longest(CONTEXTS[size], machine, offloaded=offloaded) for size, offloaded in ways]
        for machine in MACHINES
    }
    titles = [f"{size}, fsdp" if offloaded else size for size, offloaded in ways]
    return TEXT.format(
        count=len(MODELS),
        length=2048,
        table=table("machine", columns, cells),
        contexts=table("machine", titles, tokens),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
