"""Vision-language models on two ranks, one of them without an image in its batch: engines train the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launched import effilaunch, losses

pytest.importorskip("torch")
pytest.importorskip("PIL")
pytestmark = pytest.mark.usefixtures("warm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from vision_models import chat, colour_rows, save_base, write_rows  # noqa: E402

RECIPE = """\
task: image-text-to-text
model: {{name_or_path: model, freeze: []}}
data: {{train: [{{path: rows.jsonl, format: image-chat}}], max_length: 256}}
precision: fp32
global_batch_size: 2
sharding: {sharding}
trainer: {{max_steps: 3, learning_rate: 1.0e-3, logging_steps: 1, per_device_train_batch_size: 1,
          activation_checkpointing: true, save_strategy: "no", ddp_timeout: 120}}
hardware: {{num_nodes: 1, devices_per_node: 2, device: cpu}}
"""
ENGINES = {"ddp": "{engine: ddp}", "zero3": "{engine: deepspeed, zero_stage: 3}"}


def test_ranks_without_images_do_not_wait_for_those_with_them(tmp_path):
    """Of the first eight rows, in the order of the sampler, some steps have an image on one rank alone."""
    save_base(tmp_path / "model", "qwen3_vl")
    rows = colour_rows(tmp_path, 16)
    rows[1::2] = [{"messages": chat("Which colour has grass?", answer="green")}] * 8
    write_rows(tmp_path, rows)
    found = {}
    for name, sharding in ENGINES.items():
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(sharding=sharding))
        effilaunch("run", tmp_path / f"{name}.yaml", "--output-dir", tmp_path / name)
        found[name] = losses(tmp_path / name)
    assert found["zero3"] == pytest.approx(found["ddp"], rel=1e-4)
    assert found["ddp"][3] < found["ddp"][1]
