"""Ranks that share a copy on real GPUs: what no CPU can run. Needs two CUDA devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_runs import column, make_ground, recipe

if not find_spec("torch"):  # not imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
KINDS: dict[str, dict[str, Any]] = {
    "context": {"engine": "fsdp", "cp_size": 2},
    "sequence": {"engine": "deepspeed", "zero_stage": 2, "sp_size": 2},
    "tensor": {"engine": "deepspeed", "zero_stage": 1, "tp_size": 2},
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return make_ground(tmp_path_factory.mktemp("ground"))


def ran(said: dict[str, Any], ground: Path, folder: Path, devices: str) -> Path:
    folder.mkdir()
    for path in ground.iterdir():
        (folder / path.name).symlink_to(path)
    written = {key: value for key, value in recipe(said).items() if key != "python"}
    (folder / "r.yaml").write_text(yaml.safe_dump(written))
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "run", str(folder / "r.yaml"),
         "--output-dir", str(folder / "out"), "--json"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": devices},
    )  # fmt: skip
    assert done.returncode == 0, json.loads(done.stdout)["errors"]
    return folder / "out"


@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_learn_what_one_learns(kind, ground, tmp_path):
    weights_alone = {"trainer": {"save_only_model": True}}
    one = ran({**weights_alone, "sharding": {"engine": "ddp"}}, ground, tmp_path / "one", "0")
    two = ran({**weights_alone, "sharding": KINDS[kind]}, ground, tmp_path / "two", "0,1")
    assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=1e-3)
    assert column(two, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=1e-2)


def test_sequence_parallel_flash_attention_learns_what_one_gpu_learns(ground, tmp_path):
    if not find_spec("flash_attn"):
        pytest.skip("needs flash_attn")
    model = {"name_or_path": "model", "tokenizer": "tokenizer", "attn_implementation": "flash_attention_2"}
    said = {"precision": "bf16", "model": model}  # the kernel takes 16 bits alone
    one = ran({**said, "sharding": {"engine": "ddp"}}, ground, tmp_path / "one", "0")
    two = ran({**said, "sharding": KINDS["sequence"]}, ground, tmp_path / "two", "0,1")
    assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=3e-2)
