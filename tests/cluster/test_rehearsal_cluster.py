"""`doctor --rehearse` inside a Slurm step: a task a node, whose launcher starts the ranks; a task a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rehearsals import recipe as small_recipe
from rehearsals import rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("step", "hardware"),
    [
        pytest.param(("-N2", "-n2", "--ntasks-per-node=1"), "2x1xcpu", id="one-a-node"),
        pytest.param(("-N1", "-n2"), "2xcpu", id="one-a-rank"),
    ],
)
def test_a_rehearsal_by_srun(cluster, tmp_path, step, hardware):
    out = tmp_path / "out"
    words = ["effilaunch", "doctor", str(small_recipe(tmp_path)), "--rehearse", "--on", hardware]
    done = cluster.run(
        "srun", *step, *words, "--seconds", "2", "--output-dir", str(out), env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.count("the rehearsal of ") == 1, "one of the tasks leads, and tells"
    found = rows({"checks": json.loads((out / "result.json").read_text())["verdicts"]})
    assert found["rehearsal-start"]["found"].startswith("2 ranks by torchrun, together after ")
    assert found["rehearsal-all-reduce"]["status"] == found["rehearsal-save"]["status"] == "ok"
    nodes = json.loads((out / "logs" / "nodes.json").read_text())["nodes"]
    assert [node["member"] for node in nodes] == [0, 1], "one job of both tasks"
    assert list((out / "checkpoints").iterdir()) == []
