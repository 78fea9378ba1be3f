"""The loss of an evaluation is that of its rows: the same for each evaluation batch and number of ranks.

transformers alone gives another one for each (test_token_counts.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from engine_runs import prepared
from forked import Forks
from grounds import write_rows

pytest.importorskip("torch")

from library_cases import CASES as LIBRARY
from library_cases import INDEPENDENT, LENGTH, make_ground

from launcher.train.evaluation import EvaluationBatches

ROWS = 5
"""Of the evaluation: no whole number of batches, and a last step in which two of three ranks have a row."""
SECONDS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
CASES = {**INDEPENDENT, "kto": LIBRARY["kto"]}


def evaluated(name: str, folder: Path, forks: Forks, world: int, batch: int) -> dict[str, Any]:
    """Metrics of the first evaluation, before the first step."""
    case, ground = CASES[name], folder / "ground"
    if not ground.exists():
        ground.mkdir(parents=True)
        make_ground(case, ground)
        write_rows(ground / "eval.jsonl", case.rows[:ROWS])
    said = {
        "model": {"name_or_path": "model"},
        "precision": "fp32",
        "python": "hooks.py",
        "global_batch_size": 6,
        **case.recipe,
        "data": {
            "train": [{"path": "rows.jsonl"}], "eval": [{"path": "eval.jsonl"}], "max_length": LENGTH,
            **case.recipe.get("data", {}),
        },
        "trainer": {
            **case.recipe.get("trainer", {}), "max_steps": 1, "per_device_eval_batch_size": batch,
            "eval_on_start": True, "eval_strategy": "no", "save_strategy": "no", "report_to": "none",
        },
    }  # fmt: skip
    said["data"] = {key: value for key, value in said["data"].items() if value is not None}
    out, env = prepared(said, ground, folder / f"{world}-{batch}", forks, world)
    ended = forks.run(out, world, env)
    assert set(ended.codes) == {0}, ended.said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return next(row for row in rows if "eval_loss" in row)


@pytest.mark.parametrize("name", cases(CASES, "seq2seq-lm"))
def test_an_evaluation_has_one_loss(name, tmp_path, forks):
    whole = evaluated(name, tmp_path, forks, 0, 8)
    for world, batch in ((0, 3), (3, 2)):
        found = evaluated(name, tmp_path, forks, world, batch)
        scores = {
            key: value for key, value in found.items() if key.startswith("eval_") and key not in SECONDS
        }
        expected = {key: whole[key] for key in scores}
        assert scores == pytest.approx(expected, rel=2e-5, abs=1e-6), (world, batch)


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (3, 1), (1, 2), (2, 2), (3, 4), (8, 5)])
def test_every_row_counts_once_in_steps_of_equal_batches(size, ranks):
    for rows in range(1, 2 * size * ranks + 2):
        order = range(100, 100 + rows)
        batches = [EvaluationBatches(order, size, ranks, rank) for rank in range(ranks)]
        steps = list(zip(*batches, strict=True))
        assert len(batches[0]) == len(steps) <= -(-rows // (size * ranks)) + 1
        counted: list[int] = []
        for (each, together), step in zip(batches[0].steps(), steps, strict=True):
            assert {len(batch) for batch in step} == {each}
            assert 1 <= each <= size
            counted += [row for batch in step for row in batch][:together]
        assert counted == list(order)
