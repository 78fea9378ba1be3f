"""Saves of two ranks: killed in the middle, cut off by the disk, left out by one rank's word."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from forked import Ended, Forks
from plans import LORA, TINY_LLAMA, write_run, zero_config

from launcher.files.checkpoint import (
    complete_checkpoints,
    defect,
    incomplete_checkpoints,
    read_manifest,
)

if not (find_spec("torch") and find_spec("deepspeed")):  # neither is imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

# On rank 0 alone the disk shows no room at step 4.
HOOKS = """
import os

from launcher.train.checkpoint import saving
from transformers import TrainerCallback

real = saving.free_bytes
step = [0]


def little(folder):
    return 1000 if step[0] == 4 and os.environ["RANK"] == "0" else real(folder)


class Step(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        step[0] = state.global_step


def callbacks():
    if os.environ.get("TEST_NO_ROOM"):
        saving.free_bytes = little
    return [Step()]
"""
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "ddp": ({}, None),
    "zero2": ({"sharding.engine": "deepspeed", "sharding.zero_stage": 2}, zero_config(2)),
    "zero3": ({"sharding.engine": "deepspeed", "sharding.zero_stage": 3}, zero_config(3)),
}
BASE: dict[str, Any] = {
    "model.config": TINY_LLAMA,
    "trainer.max_steps": 6,
    "trainer.save_strategy": "steps",
    "trainer.save_steps": 2,
    "trainer.save_total_limit": 1,
    "python.hooks": ["callbacks"],
}


class Run:
    """A run directory and how its two ranks are started."""

    def __init__(self, forks: Forks, folder: Path, engine: str) -> None:
        more, ds_config = ENGINES[engine]
        (folder.parent / "hooks.py").write_text(HOOKS)
        said = {**BASE, **more, "python.file": str(folder.parent / "hooks.py")}
        self.forks, self.folder = forks, write_run(folder, said, ds_config)
        self.checkpoints = folder / "checkpoints"
        self.env = {} if ds_config else {"ACCELERATE_USE_CPU": "true"}
        assert forks.run(folder, 0, {}, module="prepare").codes == (0,)

    def start(self, **env: str) -> Ended:
        return self.forks.run(self.folder, 2, {**self.env, **env})

    def drill(self, fault: str) -> Ended:
        return self.start(EFFILAUNCH_DRILL=json.dumps({"fault": fault, "step": 4}))

    def whole(self) -> list[int]:
        """Steps of the checkpoints that are whole by their hashes, and of two ranks; none is less."""
        found = complete_checkpoints(self.checkpoints)
        for path in found.values():
            assert defect(path, hashes=True) is None
            assert read_manifest(path).world_size == 2
        return list(found)

    def resume(self) -> str:
        """Go on to the end; what rank 0 said."""
        ended = self.start(EFFILAUNCH_RESUME="auto")
        assert set(ended.codes) == {0}, ended.said
        assert self.whole() == [6]
        assert incomplete_checkpoints(self.checkpoints) == {}
        assert [path.name for path in self.checkpoints.iterdir()] == ["checkpoint-6"]
        return (self.folder / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("engine", cases(("zero3", "zero2"), "zero3"))
def test_ranks_killed_in_a_save_leave_the_earlier_checkpoint_whole(engine, tmp_path, forks):
    run = Run(forks, tmp_path / "run", engine)
    assert run.drill("kill-save").codes == (-9, -9)
    assert run.whole() == [2], "with a limit of one: it goes when the next is whole, not before"
    (half,) = incomplete_checkpoints(run.checkpoints)
    assert half == run.checkpoints / ".saving" / "checkpoint-4"
    assert list(half.glob("global_step4/*optim_states.pt")), "it was killed in the middle of the save"
    said = run.resume()
    assert f"{half} is skipped: " in said
    assert f"resuming from {run.checkpoints / 'checkpoint-2'}" in said


@pytest.mark.parametrize(
    "engine", ["zero2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero3"))]
)
def test_a_disk_that_gives_out_on_one_rank_ends_all_and_costs_no_checkpoint(engine, tmp_path, forks):
    run = Run(forks, tmp_path / "run", engine)
    ended = run.drill("disk-full")
    assert ended.codes[0] == 5, ended.said
    told = json.loads((run.folder / "logs" / "error-rank-0.json").read_text())
    assert told["problems"][0]["code"] == "checkpoint-disk"
    assert "checkpoint-4 could not be written" in told["problems"][0]["message"]
    assert run.whole() == [2]
    run.resume()


@pytest.mark.slow
def test_one_rank_without_room_leaves_the_save_out_on_all(tmp_path, forks):
    run = Run(forks, tmp_path / "run", "zero2")
    ended = run.start(TEST_NO_ROOM="1")
    assert set(ended.codes) == {0}, ended.said
    told = json.loads((run.folder / "result.json").read_text())["checkpoints"]
    assert (told["saved"], [row["step"] for row in told["skipped"]]) == (2, [4])
    assert run.whole() == [6]
    assert "WARNING: checkpoint-4 is not saved" in (run.folder / "logs" / "rank-0.log").read_text()


# Bytes that a rank's save of the weights copies, counted as torch does it.
COPIES = """
import json
import os
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.train.trainers import PlannedTrainer

COPIED = ("aten::clone", "aten::_to_copy", "aten::copy_")
real = PlannedTrainer.save_model


class Counted(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func._schema.name in COPIED:
            self.bytes += made.numel() * made.element_size()
        return made


def save_model(self, folder=None, _internal_call=False):
    with Counted() as counted:
        real(self, folder, _internal_call)
    moment = "checkpoint" if _internal_call else "result"
    out = Path(os.environ["TEST_COPIES"]) / f"{moment}-{os.environ['RANK']}"
    out.write_text(json.dumps(counted.bytes))


def callbacks():
    PlannedTrainer.save_model = save_model
    return []
"""
ADAPTER_BYTES = 4 * 8 * 2 * ((64 + 64) + (64 + 32) + (128 + 64))
"""Of `LORA` on the layers of `TINY_LLAMA`, whose base has 14 times as many."""


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
def test_a_save_of_an_adapter_copies_what_was_trained_on_rank_0_alone(stage, tmp_path, forks):
    said = {
        **BASE,
        "adapter": LORA,
        "trainer.max_steps": 2,
        "sharding.engine": "deepspeed",
        "sharding.zero_stage": stage,
        "python.file": str(tmp_path / "hooks.py"),
    }
    (tmp_path / "hooks.py").write_text(COPIES)
    run = write_run(tmp_path / "run", said, zero_config(stage))
    assert forks.run(run, 0, {}, module="prepare").codes == (0,)
    ended = forks.run(run, 2, {"TEST_COPIES": str(tmp_path)})
    assert set(ended.codes) == {0}, ended.said
    for moment in ("checkpoint", "result"):
        copied = [json.loads((tmp_path / f"{moment}-{rank}").read_text()) for rank in (0, 1)]
        if stage < 3:
            assert copied == [ADAPTER_BYTES, 0], moment
    saved = (run / "adapter" / "adapter_model.safetensors").stat().st_size
    assert ADAPTER_BYTES < saved < 1.2 * ADAPTER_BYTES
