"""Run directories for reports: a real plan, and beside it the files that a run leaves, written by hand."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.cli import main

GIB = 2**30
RECIPE = """
model: {config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
  num_attention_heads: 4, vocab_size: 512}, tokenizer: unused}
data: {train: [{path: rows.jsonl, format: prompt-completion}]}
precision: fp32
global_batch_size: 4
trainer: {max_steps: 40, learning_rate: 1.0e-3, logging_steps: 1}
hardware: {num_nodes: 1, devices_per_node: 2, device: A100-80GB}
"""
SAMPLE = {
    "file": "/data/rows.jsonl",
    "line": 7,
    "tokens": 9,
    "targets": 4,
    "pieces": [["Question: what is 2 + 2?\n", False], ["It is_4.", True]],
}


@functools.cache
def planned(recipe: str = RECIPE) -> Mapping[str, str]:
    """Name -> text of the files that a dry run of the recipe writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.yaml"
        path.write_text(recipe, encoding="utf-8")
        assert main(["run", str(path), "--dry-run", "--output-dir", f"{folder}/run"]) == 0
        files = [file for file in (Path(folder) / "run").iterdir() if file.is_file()]
        return {file.name: file.read_text("utf-8") for file in files}


def write_run(folder: Path, **files: Any) -> Path:
    """A never started run; files: name without suffix -> what its JSON holds, or rows of its JSON lines."""
    folder.mkdir(parents=True)
    for name, text in planned().items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "logs").mkdir()
    (folder / "checkpoints").mkdir()
    for name, content in files.items():
        if isinstance(content, list):
            lines = "".join(json.dumps(row) + "\n" for row in content)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_finished(folder: Path, **files: Any) -> Path:
    """A run that ended well, with all that one leaves."""
    every = {"result": result(), "metrics": metrics(), "data": data(), **files}
    run = write_run(folder, **every)
    (run / "logs" / "rank-0.log").write_text("{'loss': '1.0'}\n", encoding="utf-8")
    (run / "COMPLETED").touch()
    return run


def metrics(steps: int = 40, *, level: float = 1.0) -> list[dict[str, Any]]:
    """One row a step, an evaluation every tenth."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = level * (0.5 + math.exp(-step / 10) + 0.05 * math.sin(step * 2.3))
        rows.append({
            "step": step, "loss": loss, "learning_rate": 1e-3 * (1 - step / (steps + 1)), "grad_norm": 0.4,
            "tokens": step * 512, "tokens_per_second": 900.0 + step % 7, "memory": 3 * GIB,
        })  # fmt: skip
        if step % 10 == 0:
            rows.append({"step": step, "eval_loss": loss * 1.1, "eval_runtime": 0.5})
    return rows


def result(**changes: Any) -> dict[str, Any]:
    def pair(predicted: float | None, measured: float | None) -> dict[str, Any]:
        return {"predicted": predicted, "measured": measured}

    found = {
        "loss": {"first": 1.4, "last": 0.52}, "eval": {"eval_loss": 0.57, "eval_runtime": 0.5}, "steps": 40,
        "train_seconds": 90.0, "seconds": 95.0, "tokens": 20480, "tokens_per_second": 227.6,
        "adaptations": [], "restarts": [], "output": "model",
        "memory": {
            **pair(4 * GIB, int(3.8 * GIB)), "method": "cuda-reserved", "allocated": 3 * GIB,
            "load": pair(GIB, GIB), "eval": pair(2 * GIB, int(1.9 * GIB)), "save": pair(GIB, None),
            "host": pair(5 * GIB, 4 * GIB), "device_bytes": 80 * GIB, "steps": 40,
            "components": {"weights": pair(GIB, GIB), "gradients": pair(GIB, GIB),
                           "optimizer": pair(GIB, 2**20), "context": pair(0, 2**19)},
            "tokens": {"planned": 2048, "largest": 1024},
        },
    }  # fmt: skip
    return {**found, **changes}


def data(samples: Sequence[Mapping[str, Any]] = (SAMPLE, SAMPLE, SAMPLE)) -> dict[str, Any]:
    return {
        "splits": {"train": {
            "samples": 90,
            "sources": [{"path": "rows.jsonl", "format": "prompt-completion", "rows": 100, "unused": ["id"]}],
            "counts": {"read": 100, "kept": 90, "truncated": 3, "split": 0, "dropped": {"empty": 10},
                       "tokens": 9000, "tokens_lost": 100, "targets": 4000},
            "lengths": {"mean": 98.9, "p50": 90.0, "p95": 200.0, "max": 256},
        }},
        "samples": list(samples),
    }  # fmt: skip


def read_page(path: Path) -> str:
    """A page as it is read: without the places where an identifier may be broken."""
    return path.read_text("utf-8").replace("<wbr/>", "")
