"""Offload to NVMe with the real DeepSpeed on CPU: what it learns, writes, leaves, and cannot go on from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from grounds import make_base
from launched import effilaunch, losses

from launcher.execute.leftovers import LOCK, swap_files

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

# The first of these runs compiles async_io, once: 13 files, on a busy machine 11 minutes.
pytestmark = [pytest.mark.slow(share=24), pytest.mark.timeout(1800), pytest.mark.usefixtures("warm")]

STEPS = 4
RECIPE = """\
model: {{name_or_path: model}}
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
sharding: {sharding}
global_batch_size: 8
trainer: {{max_steps: {steps}, learning_rate: 1.0e-3, logging_steps: 1, save_steps: 2,
          per_device_train_batch_size: 4}}
python: hooks.py
"""
# Every parameter goes to the disk, as those of a large model do.
PARAM = {"device": "nvme", "nvme_path": "/replaced/by/the/recipe", "max_in_cpu": 0}
PROFILE = {"zero_optimization": {"stage": 3, "offload_param": PARAM}}
STATES = "{offload_optimizer: nvme, nvme_path: swap disk}"
BOTH = "{config: profile.json, offload_optimizer: nvme, nvme_path: swap disk}"
HOOKS = """
import json
from pathlib import Path

from transformers import TrainerCallback


class Files(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        folder = Path(__file__).parent / "swap disk"
        if state.is_world_process_zero and folder.is_dir():
            found = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*.swp")}
            (folder.parent / "seen.json").write_text(json.dumps(found))


def callbacks():
    return [Files()]
"""
BUFFER = """
import json, os, sys
import torch, deepspeed

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": sys.argv[2]}
deepspeed.init_distributed(dist_backend="gloo")
config = json.loads(sys.argv[1])
with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
    torch.nn.Linear(512, 1024, bias=False)
print("made")
"""


def libaio() -> bool:
    return Path("/usr/include/libaio.h").is_file()


@pytest.fixture(scope="module", autouse=True)
def aio() -> None:
    """libaio's headers, installed where this may be done; the tests are skipped elsewhere."""
    if not libaio() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "libaio-dev"], capture_output=True, check=False)
    if not libaio():
        pytest.skip("no libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL): NVMe offload was NOT run")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model of 5.8 million parameters, whose matrices are large enough for files of their own."""
    return make_base(tmp_path_factory.mktemp("base"), hidden_size=512)


def launched(
    folder: Path, base: Path, *arguments: str, sharding: str = STATES, expect: int = 0, on: str = "cpu"
) -> dict:
    """The JSON of `effilaunch run`."""
    folder.mkdir(exist_ok=True)
    for name in ("model", "rows.jsonl"):
        if not (folder / name).exists():
            (folder / name).symlink_to(base / name)
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    (folder / "r.yaml").write_text(RECIPE.format(steps=STEPS, sharding=sharding))
    given = ("--on", on, "--output-dir", folder / "out", *arguments)
    return effilaunch("run", folder / "r.yaml", *given, expect=expect)


@pytest.fixture(scope="module")
def in_memory(base, warm_module, tmp_path_factory) -> dict[int, float]:
    """The losses of ZeRO-3 with everything in memory."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    launched(folder, base, sharding="{zero_stage: 3}")
    return losses(folder / "out")


@pytest.fixture(scope="module")
def on_disk(base, warm_module, tmp_path_factory) -> Path:
    """A finished run of one process with its optimizer's states on a disk."""
    folder = tmp_path_factory.mktemp("disk") / "run"
    launched(folder, base)
    return folder


def check_learnt_from_disk(folder: Path, expected: dict[int, float], *kinds: str, ranks: int) -> None:
    """The same losses; every tensor in files while it ran, as many bytes as planned; none left."""
    assert set(losses(folder / "out")) == set(range(1, STEPS + 1))
    # Another kernel of Adam: DeepSpeed's, on the CPU. Measured: equal to 7 digits after six steps.
    assert losses(folder / "out") == pytest.approx(expected, rel=2e-5)
    plan = json.loads((folder / "out" / "plan.json").read_text())
    seen = json.loads((folder / "seen.json").read_text())
    each = [f"rank{rank}" for rank in range(ranks)]
    assert {Path(name).parts[1:3] for name in seen} == {(kind, rank) for kind in kinds for rank in each}
    names = {Path(name).name.partition("-")[0] for name in seen if "/optimizer/" in name}
    assert {"exp_avg", "exp_avg_sq"} <= names
    planned = plan["memory"]["host"]["nvme"]
    # What is smaller than one request stays in memory: norms, and here some gradients.
    assert 0.85 * planned < sum(seen.values()) <= planned
    assert swap_files(folder / "swap disk") == {}
    assert [path.name for path in (folder / "swap disk").iterdir()] == [LOCK]


def test_one_process_learns_from_a_disk_what_it_learns_in_memory(on_disk, in_memory):
    check_learnt_from_disk(on_disk, in_memory, "optimizer", ranks=1)


def test_two_ranks_do_the_same_with_their_parameters_there_too(base, tmp_path, in_memory):
    """With DeepSpeed's own stage3_max_reuse_distance it stops here: Not enough buffers 0 for swapping 1."""
    launched(tmp_path / "run", base, sharding=BOTH, on="2xcpu")
    check_learnt_from_disk(tmp_path / "run", in_memory, "optimizer", "float32params", ranks=2)


def test_its_checkpoint_is_refused_because_deepspeed_would_begin_anew(on_disk, base):
    """Read without this word, the losses after it differ from the third digit on."""
    checkpoint = on_disk / "out" / "checkpoints" / "checkpoint-2"
    assert list(checkpoint.glob("global_step2/offloaded_tensors/rank*/exp_avg-*.swp"))
    again = on_disk.with_name("again")
    shutil.copytree(on_disk, again, symlinks=True)
    shutil.rmtree(again / "out" / "checkpoints" / f"checkpoint-{STEPS}")
    (again / "out" / "COMPLETED").unlink()
    data = launched(again, base, "--resume", "auto", expect=2)
    said = json.dumps(data)
    assert "NVMe" in said, said
    assert "model.name_or_path" in said, "the way out: its weights are whole"


def buffered(folder: Path, size: int, port: int) -> subprocess.CompletedProcess[str]:
    """A matrix of 512 x 1024 values made under ZeRO-3 with buffers of `size` values on a disk."""
    offload = {"device": "nvme", "nvme_path": str(folder), "buffer_size": size, "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": offload},
    }
    return subprocess.run(
        [sys.executable, "-c", BUFFER, json.dumps(config), str(port)],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip


def test_deepspeed_stops_at_a_buffer_that_is_smaller_than_a_parameter(tmp_path, base):
    """What the plan's size is for: the smallest that works, but for the rounding."""
    from launcher.engines.deepspeed_nvme import param_buffer_values
    from launcher.machine.probe import free_port
    from launcher.models.model import read_model_spec

    config = json.loads((base / "model" / "config.json").read_text())
    planned = param_buffer_values(read_model_spec("tiny", config, "folder"), 1)
    assert planned == 512 * 1024
    small = buffered(tmp_path, planned - 1, free_port())
    assert small.returncode != 0
    assert "AssertionError: More elements 524288 than buffer size 524287" in small.stderr
    right = buffered(tmp_path, planned, free_port())
    assert "made" in right.stdout, right.stderr[-3000:]
