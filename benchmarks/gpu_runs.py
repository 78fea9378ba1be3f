"""Whole runs of recipes on one GPU: measured memory beside the plan's, tokens a second, losses.

    python benchmarks/gpu_runs.py                    all, and records/gpu_runs_<device>.json
    python benchmarks/gpu_runs.py --only NAME …      these runs; the others stay as recorded
    python benchmarks/gpu_runs.py --jobs 6           several at a time, where memory suffices; no seconds
    python benchmarks/gpu_runs.py --rehearse         the same code on a CPU, with narrow models; no record

Models have their published sizes and random weights, rows are as long as they may be: nothing is downloaded.
Each run is an `effilaunch run` of a recipe that leaves everything else to the plan; its calibration file is
its own, so that no run changes the plan of another.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu
from gpu import Device
from grids import rows_of
from peers.work import smollm2
from runner import Room, entries_of, in_process, parser_of

from launcher.facts.probe import shipped_model_config
from launcher.planner.narrow import narrow_config

ABOUT = "Runs of recipes on one GPU beside their plans; made by benchmarks/gpu_runs.py."
ROWS, STEPS = 256, 8


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe."""

    name: str
    model: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the row sets."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    rows: str = "text"
    """Kind of the rows."""
    length: int = 2048
    batch: int = 2
    needs: tuple[str, ...] = ()
    """Packages without which the run is skipped."""


RUNS: tuple[Run, ...] = rows_of("gpu_runs", kind=Run)


def write_rows(kind: str, length: int, path: Path) -> None:
    """Random words of one token each, rows of about `length` tokens (prompts of grpo: 64)."""
    draw = random.Random(0)
    words = ["table", "green", "river", "seven", "walk", "letter", "open", "under", "paper", "stone"]

    def text(count: int) -> str:
        return " ".join(draw.choice(words) for _ in range(count))

    def row(number: int) -> dict[str, Any]:
        return {
            "text": lambda: {"text": text(length - 2)},
            "preference": lambda: {"prompt": text(16), "chosen": f" {text(length - 24)}",
                                   "rejected": f" {text(length - 24)}"},
            "unpaired": lambda: {"prompt": text(16), "completion": f" {text(length - 24)}",
                                 "label": bool(number % 2)},
            "prompt": lambda: {"prompt": text(64)},
            "pair": lambda: {"anchor": text(length - 4), "positive": text(length - 4)},
            "classes": lambda: {"text": text(length - 4), "label": "ab"[number % 2]},
            "relevance": lambda: {"query": text(length // 2), "document": text(length // 2 - 8),
                                  "score": number % 2},
        }[kind]()  # fmt: skip

    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{json.dumps(row(number))}\n" for number in range(ROWS))


def make_model(name: str, folder: Path, tokenizer: Path, device: Device) -> dict[str, Any]:
    """A folder with random weights of the published size, in bfloat16, and the tokenizer; made once."""
    target = folder / name.rsplit("/", 1)[-1]
    if (target / "tokenizer_config.json").is_file():
        return {}
    import torch
    import transformers

    config = shipped_model_config(name)
    assert config is not None, name
    if device.rehearsal:
        config = narrow_config(config) | {"vocab_size": 49_152}
    transformers.set_seed(0)
    kind = transformers.AutoModel if config["model_type"] == "bert" else transformers.AutoModelForCausalLM
    with torch.device(device.torch_name):
        model = kind.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
    return {}


def recipe_of(run: Run, model: Path, rows: Path, device: Device) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        **run.recipe,
        "model": {"name_or_path": str(model), **run.recipe.get("model", {})},
        "data": {"train": [{"path": str(rows)}], "max_length": run.length, "max_dropped": 1.0},
        "trainer": {"max_steps": STEPS, "learning_rate": 1e-5, "logging_steps": 1, "save_strategy": "no",
                    **run.trainer},
    }  # fmt: skip
    recipe.setdefault("global_batch_size", run.batch)
    if device.rehearsal:
        recipe["hardware"] = {"device": "cpu", "devices_per_node": 1, "num_nodes": 1}
        recipe["precision"] = "fp32"
    if run.rows == "text":
        recipe["data"]["train"][0]["format"] = "text"
    return recipe


def portable(recipe: dict[str, Any], run: Run) -> dict[str, Any]:
    """The recipe without this machine's paths, as memory_accuracy.py plans it again."""
    sources = [{**source, "path": "random"} for source in recipe["data"]["train"]]
    model, data = {**recipe["model"], "name_or_path": run.model}, {**recipe["data"], "train": sources}
    return {**recipe, "model": model, "data": data}


def done(run: Run, model: Path, folder: Path, device: Device, room: Room, seconds: bool) -> dict[str, Any]:
    """The entry of one run, which has ended."""
    if reason := gpu.obstacle(run.needs, device, math.inf):
        return {"name": run.name, "skipped": reason}
    own = folder / run.name
    own.mkdir()
    write_rows(run.rows, run.length, own / "rows.jsonl")
    recipe = recipe_of(run, model, own / "rows.jsonl", device)
    (own / "recipe.yaml").write_text(json.dumps(recipe, indent=1), encoding="utf-8")  # JSON is YAML, too
    planned = answered(own, "plan")
    entry: dict[str, Any] = {"name": run.name, "recipe": portable(recipe, run), "status": planned["status"]}
    if planned["status"]:
        return entry | {"error": planned["said"]}
    with room.of(math.inf if seconds else planned["answer"]["memory"]["needed"]):
        started = time.monotonic()
        ran = answered(own, "run", "--output-dir", str(own / "out"))
        entry |= {"status": ran["status"], "wall_s": round(time.monotonic() - started, 1)}
    return entry | ({"error": ran["said"]} if ran["status"] else found_in(own / "out", seconds))


def answered(own: Path, command: str, *options: str) -> dict[str, Any]:
    """What a command on the recipe says: `status`, its JSON in `answer`, and `said`, its problems."""
    ended = subprocess.run(
        [sys.executable, "-m", "launcher.cli", command, str(own / "recipe.yaml"), "--json", *options],
        capture_output=True, text=True, check=False, cwd=own,
        env={**os.environ, "EFFILAUNCH_CACHE": str(own / "cache")},
    )  # fmt: skip
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        return {"status": ended.returncode or 1, "said": (ended.stdout + ended.stderr)[-2000:]}
    said = "; ".join(f"{one['code']}: {one['message']}" for one in answer.get("errors", ()))
    return {"status": ended.returncode, "answer": answer, "said": said}


def found_in(out: Path, seconds: bool) -> dict[str, Any]:
    """Of a run directory: settings that the plan chose, bytes planned and measured, losses and speed."""
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    rows = list(map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
    memory = plan["memory"]
    entry = {
        "batch": plan["batch"],
        "settings": {name: one.get("value", one) if isinstance(one, dict) else one
                     for name, one in plan["settings"].items()},
        "planned": {name: memory[name] for name in ("expected", "low", "high", "needed", "phase", "method")},
        "measured": result["memory"],
        "losses": [row["loss"] for row in rows if "loss" in row],
        "warnings": len(plan["warnings"]),
        **({"rollouts": result["rollouts"]} if "rollouts" in result else {}),
    }  # fmt: skip
    if seconds:
        steps = [row for row in rows if "tokens_per_second" in row]
        tokens = [after["tokens"] - before["tokens"] for before, after in pairwise([{"tokens": 0}, *steps])]
        entry["step_s"] = [n / row["tokens_per_second"] for n, row in zip(tokens, steps, strict=True) if n]
        entry["tokens_per_second"] = result["tokens_per_second"]
        entry["planned_s"] = plan["time"]["seconds_per_step"]
    return entry


def line_of(entry: Mapping[str, Any]) -> str:
    if "measured" not in entry:
        return f"{entry['name']:<26} {entry.get('skipped') or entry['error'][-300:]}"
    measured, planned = entry["measured"]["measured"], entry["planned"]["expected"]
    share = f"{planned / measured - 1:>+8.1%}" if measured else ""
    inside = "" if entry["planned"]["low"] <= measured <= entry["planned"]["high"] else "  outside the range"
    return (f"{entry['name']:<26}{planned / 1e9:>9.3f} GB planned{measured / 1e9:>9.3f} measured{share}"
            f"  loss {entry['losses'][0]:.3f} {entry['losses'][-1]:.3f}{inside}")  # fmt: skip


def sweep(runs: Sequence[Run], device: Device, folder: Path, jobs: int, room: Room) -> list[dict[str, Any]]:
    """An entry for every run, in their order."""
    tokenizer = smollm2()
    for name in dict.fromkeys(run.model for run in runs):
        in_process(make_model, 300.0, name, folder, tokenizer, device)

    def one(run: Run) -> dict[str, Any]:
        return done(run, folder / run.model.rsplit("/", 1)[-1], folder, device, room, jobs == 1)

    return entries_of(runs, one, line_of, jobs)


def main() -> int:
    options = parser_of(__doc__, "jobs", "room", "rehearse", "out", rows=RUNS).parse_args()

    def measured(runs: Sequence[Run], device: Device) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            if device.rehearsal:
                runs = [replace(run, length=min(run.length, 256), batch=min(run.batch, 4)) for run in runs]
            return sweep(runs, device, Path(folder), options.jobs, gpu.room_of(device, options.room))

    found = gpu.run_command(options, "gpu_runs", RUNS, measured, ABOUT)
    if found is None:
        return 4
    return int(any("error" in entry for entry in found[1]))


if __name__ == "__main__":
    sys.exit(main())
