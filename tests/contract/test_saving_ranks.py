"""Saves of two ranks: killed in the middle, cut off by the disk, left out by one rank's word."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked import Ended, Forks
from plans import TINY_LLAMA, write_run, zero_config

from launcher.facts.checkpoint import (
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


@pytest.mark.parametrize("engine", ["zero3", pytest.param("zero2", marks=pytest.mark.slow)])
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


def test_one_rank_without_room_leaves_the_save_out_on_all(tmp_path, forks):
    run = Run(forks, tmp_path / "run", "zero2")
    ended = run.start(TEST_NO_ROOM="1")
    assert set(ended.codes) == {0}, ended.said
    told = json.loads((run.folder / "result.json").read_text())["checkpoints"]
    assert (told["saved"], [row["step"] for row in told["skipped"]]) == (2, [4])
    assert run.whole() == [6]
    assert "WARNING: checkpoint-4 is not saved" in (run.folder / "logs" / "rank-0.log").read_text()
