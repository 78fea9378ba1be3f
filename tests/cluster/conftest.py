"""One Slurm for all tests of this folder, and the ground that its jobs stand on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.slurm import Cluster, NoSlurm, install
from grounds import SLOW_STEPS, make_base

RECIPE = """\
model: {{name_or_path: ./model}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
precision: fp32
python: hooks.py
sharding: {{engine: {engine}}}
trainer: {{max_steps: {steps}, save_steps: 4, logging_steps: 1, per_device_train_batch_size: 1,
          learning_rate: 1.0e-3, lr_scheduler_type: constant, report_to: none}}
{more}"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The daemons. Where they cannot be had, all tests here are skipped, and say why."""
    made = Cluster()
    try:
        install()
        made.start()
    except NoSlurm as error:
        made.stop()
        pytest.skip(f"NO SLURM, so nothing of it was tested: {error}")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """model/, rows.jsonl and hooks.py, whose steps take STEP_S seconds."""
    folder = make_base(tmp_path_factory.mktemp("ground"))
    (folder / "hooks.py").write_text(SLOW_STEPS)
    return folder


@pytest.fixture
def recipe(base, request):
    """Writes a recipe beside the model and returns its path."""

    def write(more: str = "", *, engine: str = "ddp", steps: int = 6) -> Path:
        path = base / f"{request.node.name.partition('[')[0]}.yaml"
        path.write_text(RECIPE.format(engine=engine, steps=steps, more=more))
        return path

    return write


@pytest.fixture(autouse=True)
def on_the_cluster(cluster, monkeypatch):
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss as it was logged last."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
