"""Every shipped recipe trains: `run RECIPE --tiny` through the command line, on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from cases import cases
from launched import effilaunch

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
STEPS = 4
USUAL = ("qwen3_8b_lora", "bert_large_ner", "qwen3_8b_dpo", "bge_base_embedding_24gb")
ROWS = 64
"""Generated rows of each source."""


def parents(path: Path) -> list[dict]:
    """The recipe's mapping, then those of the files that it extends."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [data, *(parents(path.parent / data["extends"]) if "extends" in data else ())]


def section(path: Path, name: str):
    """A section of the recipe, or of the nearest parent that has it."""
    return next((data[name] for data in parents(path) if name in data), None)


@pytest.mark.parametrize("recipe", cases({path.stem: path for path in RECIPES}, *USUAL, named=True))
def test_a_shipped_recipe_trains(recipe, tmp_path, monkeypatch):
    if section(recipe, "task") in ("dpo", "reward", "kto", "grpo"):
        pytest.importorskip("trl")
    if section(recipe, "task") in ("embedding", "reranker"):
        pytest.importorskip("sentence_transformers")
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    given = ("--tiny", "--output-dir", out)
    result = effilaunch("run", recipe, *given, CUDA_VISIBLE_DEVICES="")["result"]
    assert (out / "COMPLETED").is_file()
    assert (out / "recipe.yaml").read_text(encoding="utf-8") == recipe.read_text(encoding="utf-8")
    assert json.loads((out / "result.json").read_text(encoding="utf-8")) == result
    assert result["steps"] == STEPS
    signed = section(recipe, "task") == "grpo"  # advantages of both signs
    assert all(math.isfinite(loss) and (loss > 0 or signed) for loss in result["loss"].values())

    trained = "adapter" if section(recipe, "adapter") else "model"
    weights = "adapter_model.safetensors" if trained == "adapter" else "model.safetensors"
    assert (out / trained / weights).stat().st_size > 0
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(json.loads(line)["step"] for line in lines) == STEPS
    check_rows(section(recipe, "data"), result["rows"])
    assert (out / "recipe.yaml").read_text(encoding="utf-8") == recipe.read_text(encoding="utf-8")


def check_rows(data: dict, rows: dict) -> None:
    """Every row that was read is kept or dropped, and every source was read."""
    dropped = rows["dropped"] if isinstance(rows["dropped"], int) else sum(rows["dropped"].values())
    assert rows["read"] == rows["kept"] + dropped
    assert rows["train"] > 0
    if data.get("streaming"):  # counted as far as the steps went
        assert rows["read"] > 0
        return
    held_out = data.get("eval")
    sources = len(data["train"]) + (len(held_out) if isinstance(held_out, list) else 0)
    assert rows["read"] == ROWS * sources
    assert rows["eval"] > 0 if held_out else rows["eval"] == 0
