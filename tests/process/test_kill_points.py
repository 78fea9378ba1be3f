"""Five seeded SIGKILLs in one run of each task, each followed by a resume: it ends as the undisturbed run.

The moments are drawn from all moments of the undisturbed run (tests/killing.py): two within steps, one
within an evaluation, one within a save, one anywhere. Every number of metrics.jsonl but times, and every
weight, is equal bit for bit.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cases

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from engine_runs import weights
from killing import AT, WRITTEN
from library_cases import CASES, make_ground, make_run
from safetensors.torch import load_file

KILLS = 5
SAVED = 2
"""Steps between saves, and between evaluations: one kill for each."""
STEPS = KILLS * SAVED
TRAINER = {
    "max_steps": STEPS, "save_steps": SAVED, "eval_strategy": "steps", "eval_steps": SAVED,
    "save_total_limit": 2,
}  # fmt: skip
PATIENCE = 2
BEST: dict[str, tuple[str, bool]] = {
    "dpo": ("eval_rewards/accuracies", True),
    "kto": ("eval_rewards/margins", False),  # which grow: the first is the best
    "reward": ("eval_accuracy", True),
}
"""Task -> (a metric of trl's, whether more of it is better)."""
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "t5", "vit"))
TIMED = ("runtime", "per_second", "memory", "step_time")


def rows(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.endswith(TIMED)} for row in found]


def drawn(moments: list[list[Any]], seed: str) -> list[list[Any]]:
    """One moment for each interval between saves, in order of time."""
    draw = random.Random(seed)
    phases = ["step", "step", "evaluation", "save", ""]
    draw.shuffle(phases)
    found = []
    for number, phase in enumerate(phases):
        first, last = SAVED * number, SAVED * (number + 1)
        # A save follows the step that it is named by; the interval ends with it.
        within = [
            one for one in moments
            if (first <= one[0] < last if one[1] == "step" else one[0] == last) and phase in ("", one[1])
        ]  # fmt: skip
        found.append(draw.choice(within))
    return found


@pytest.mark.parametrize("name", cases(CASES, "seq2seq-lm"))
def test_killed_five_times_a_run_ends_as_the_undisturbed_one(name, tmp_path, forks):
    case = CASES[name]
    pytest.importorskip(case.package.replace("-", "_"))
    task = case.recipe["task"].replace("-", "_")
    contrast = ("launcher.train.contrast",) if case.package == "sentence-transformers" else ()
    forks.load(f"launcher.train.tasks.{task}", *MODELS, *contrast)  # once, by the process that forks
    make_ground(case, tmp_path)

    def run(out: Path, env: Mapping[str, str], **more: str) -> tuple[int, str]:
        ended = forks.run(out, 0, {**env, **more}, prelude="killing")
        return ended.codes[0], ended.said

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    env = make_run(case, tmp_path, whole, evaluated=True, **TRAINER)
    moments = tmp_path / "moments.json"
    code, said = run(whole, env, **{WRITTEN: str(moments)})
    assert code == 0, said
    points = drawn(json.loads(moments.read_text()), name)

    env = make_run(case, tmp_path, killed, evaluated=True, **TRAINER)
    for point in points:
        code, said = run(killed, env, **{AT: json.dumps(point), "EFFILAUNCH_RESUME": "auto"})
        assert code == -signal.SIGKILL, (point, said)
    code, said = run(killed, env, EFFILAUNCH_RESUME="auto")
    assert code == 0, said
    assert [row["step"] for row in rows(whole) if "loss" in row] == list(range(1, STEPS + 1))
    assert rows(killed) == rows(whole), points
    expected, found = weights(whole), weights(killed)
    assert found.keys() == expected.keys() != set()
    for key, tensor in expected.items():
        assert tensor.equal(found[key]), (key, points)


@pytest.mark.parametrize("name", cases(BEST))
def test_early_stopping_by_a_metric_of_trl_counts_on_after_a_kill(name, tmp_path, forks):
    """The best checkpoint is the result, also of a run that was killed after it."""
    pytest.importorskip("trl")
    metric, is_greater = BEST[name]
    case = replace(CASES[name], recipe={**CASES[name].recipe, "early_stopping": {"patience": PATIENCE}})
    trainer = {
        **TRAINER, "max_steps": 20, "eval_steps": 1, "save_steps": 1, "metric_for_best_model": metric,
        "greater_is_better": is_greater,
    }  # fmt: skip
    make_ground(case, tmp_path)

    def run(out: Path, **more: str) -> int:
        return forks.run(out, 0, {**env, **more}, prelude="killing").codes[0]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    env = make_run(case, tmp_path, whole, evaluated=True, **trainer)
    assert run(whole) == 0
    scores = [row[metric] for row in rows(whole) if metric in row]
    best = scores.index((max if is_greater else min)(scores)) + 1
    assert len(scores) == best + PATIENCE < trainer["max_steps"]
    told = json.loads((whole / "result.json").read_text())
    assert (told["steps"], told["eval"]["step"]) == (best + PATIENCE, best)
    kept = whole / "checkpoints" / f"checkpoint-{best}"
    assert all(
        tensor.equal(load_file(kept / "model.safetensors")[key]) for key, tensor in weights(whole).items()
    )

    env = make_run(case, tmp_path, killed, evaluated=True, **trainer)
    assert run(killed, **{AT: json.dumps([best + 1, "evaluation", 0])}) == -signal.SIGKILL
    assert run(killed, EFFILAUNCH_RESUME="auto") == 0
    assert rows(killed) == rows(whole)
    expected, found = weights(whole), weights(killed)
    assert [key for key, tensor in expected.items() if not tensor.equal(found[key])] == []
