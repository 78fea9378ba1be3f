"""`task: own` under several ranks: killed and resumed, the recipes of recipes/own/ end as undisturbed runs.

Planning reads and traces what the hooks make in children, which are forks here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import KILL, KILL_HOOKS, Forks
from test_docs import ROOT, named_files

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from engine_runs import column, result, weights

from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import bind
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import Bundle, render

RECIPES = ROOT / "recipes" / "own"
PAGE = "line"
"""The recipe of docs/tasks/own.md, whose model is none of transformers."""
NAMES = [*sorted(path.stem for path in RECIPES.glob("*.yaml")), PAGE]
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
}
UNTRACED = ("wav2vec2",)
"""Whose loss (CTC) reads values."""
STEPS = 4
GATE = ("question_answering", "zero2")
"""The quick one."""
CASES = [
    pytest.param(name, engine, marks=() if (name, engine) == GATE else pytest.mark.slow)
    for name in NAMES
    for engine in ENGINES
]


def planned(name: str, engine: str, folder: Path) -> Bundle:
    """The recipe with few steps, each with an accumulation of two, over two ranks."""
    if name == PAGE:
        files = named_files(ROOT / "docs" / "tasks" / "own.md")
        hooks, recipe = files["hooks.py"], files["line.yaml"]
    else:
        hooks, recipe = ((RECIPES / f"{name}.{kind}").read_text() for kind in ("py", "yaml"))
    said = yaml.safe_load(recipe)
    said |= {"sharding": ENGINES[engine], "global_batch_size": 16, "python": "hooks.py"}
    said["trainer"] |= {
        "max_steps": STEPS, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": 4,
    }  # fmt: skip
    # The recipe's own hooks, and one that kills a rank.
    (folder / "hooks.py").write_text(hooks + KILL_HOOKS)
    (folder / "r.yaml").write_text(yaml.safe_dump(said))
    plan = make_plan(*gather(load_recipe(folder / "r.yaml"), "2xcpu"))
    assert (plan.memory.method == "trace") is (name not in UNTRACED), plan.spec.uncounted
    assert plan.memory.fits is (None if name in UNTRACED else True)
    assert sum("num_items_in_batch" in warning for warning in plan.warnings) == 1
    return render(plan)


def started(bundle: Bundle, out: Path, forks: Forks) -> Mapping[str, str]:
    """The environment of the ranks of a run directory that was written."""
    write_run_dir(bundle, out, resume=False)
    _, _, env = bind(bundle, {"run_dir": str(out), "devices": ""})
    assert forks.run(out, 0, env, module="prepare").codes == (0,)
    return env


def logged(out: Path) -> list[dict[str, float]]:
    """Losses and metrics of training and of evaluations, by step, without times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("runtime", "per_second", "memory", "step_time")
    return [{key: row[key] for key in row if not key.endswith(timed)} for row in rows]


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_killed_and_resumed_a_run_of_hooks_ends_as_the_undisturbed_one(name, engine, tmp_path, warm):
    bundle = planned(name, engine, tmp_path)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    env = started(bundle, straight, warm)
    ended = warm.run(straight, 2, env)
    assert ended.codes == (0, 0), ended.said
    env = started(bundle, killed, warm)
    ended = warm.run(killed, 2, {**env, KILL: "3"})
    assert -9 in ended.codes, ended.said
    ended = warm.run(killed, 2, {**env, "EFFILAUNCH_RESUME": "auto"})
    assert ended.codes == (0, 0), ended.said
    assert "resuming from" in (killed / "logs" / "rank-1.log").read_text()

    assert len(set(column(straight, "loss"))) == STEPS
    assert len(column(straight, "eval_loss")) == 2
    assert logged(killed) == logged(straight)
    expected, found = weights(straight), weights(killed)
    assert found.keys() == expected.keys() != set()
    assert [key for key in expected if not found[key].equal(expected[key])] == []
    assert result(killed)["resumed_at"] == 2
