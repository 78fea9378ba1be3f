"""docs/cluster.md, followed literally: its recipe, its job script, and each of its commands, in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster.conftest import losses

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
TRIED = ["sbatch", "srun", "salloc", "effilaunch"]


def test_the_page_shows_every_way_of_starting():
    assert {line.split()[0] for line in COMMANDS} == set(TRIED)
    (script,) = blocks("bash")
    assert len(script.splitlines()) == 10


def test_every_command_of_the_page_does_what_it_says(cluster, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "rows.jsonl"):
        (tmp_path / name).symlink_to(base / name)
    (recipe,), (script,) = blocks("yaml"), blocks("bash")
    (tmp_path / "tune.yaml").write_text(recipe)
    (tmp_path / "job.sh").write_text(script)
    said = {}
    for line in COMMANDS:
        done = cluster.run("bash", "-c", line, timeout=280, cwd=tmp_path)
        said[line] = done.stdout + done.stderr
    runs = tmp_path / "runs"
    for name in ("tune", "device", "salloc", "submitted"):
        result = json.loads((runs / name / "result.json").read_text())
        assert (name, result["steps"]) == (name, 6)
        assert sorted(losses(runs / name)) == [1, 2, 3, 4, 5, 6]
    # Two nodes of one process each are the same run, however it was started.
    assert losses(runs / "tune") == losses(runs / "salloc") == losses(runs / "submitted")
    _check_ranks(runs / "device", 4)
    _check_ranks(runs / "salloc", 2)
    (sweep,) = [text for line, text in said.items() if "--sweep" in line]
    assert re.search(r"^ +0 +0\.001 +\d\.\d{4} +\d+ +done$", sweep, flags=re.MULTILINE)
    assert re.search(r"^ +1 +0\.0001 +\d\.\d{4} +\d+ +done$", sweep, flags=re.MULTILINE)
    assert f"lowest loss: {runs}/sweep/0-learning_rate=0.001" in sweep
    cancelled = json.loads((runs / "long" / "submit.json").read_text())["jobs"]["run"]
    cluster.wait_state(cancelled, "CANCELLED")


def _check_ranks(run_dir: Path, ranks: int) -> None:
    """Every rank was there once, and the batch was shared among all."""
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["batch"]["data_parallel"] == ranks
    assert plan["ds_config"]["zero_optimization"]["stage"] == 2
    statuses = [json.loads((run_dir / f"logs/status-rank-{r}.json").read_text()) for r in range(ranks)]
    assert [status["code"] for status in statuses] == [0] * ranks
    assert len({status["pid"] for status in statuses}) == ranks
