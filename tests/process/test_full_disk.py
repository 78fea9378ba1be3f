"""A real small disk that fills up: foreseen, a save is left out; unforeseen, the run ends and goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from grounds import tokenizer_of_1024_words, write_rows
from launched import effilaunch

from launcher.files.checkpoint import complete_checkpoints, defect

if not (find_spec("torch") and find_spec("tokenizers")):
    pytest.skip("the training stack is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("warm")
DISK = 64 * 2**20
# Fills the disk but for LEFT bytes: before the save of step 4, or when its weights are written and its
# optimizer is not. The filler goes before step 6 where it is foreseen. Or, besides that, nothing can be
# written from then on, not even the error; or the disk fills when the result is there and result.json is not.
# Or the run directory is removed, moved, or another folder takes its name, before step 4.
HOOKS = """
import os
import shutil
from pathlib import Path

import torch
from transformers import TrainerCallback

from launcher.train import outcome

disk = Path(DISK)
filler = disk / "filler"
MOMENT, LEFT = "MOMENT_", LEFT_
save, rmtree, write_json = torch.save, shutil.rmtree, outcome.write_json


def fill():
    with filler.open("ab", buffering=0) as file:
        while (free := shutil.disk_usage(disk).free - LEFT) > 0:
            file.write(bytes(min(free, 2**20)))


def saving(what, where, *more, **named):
    if MOMENT in ("within", "for good") and "checkpoint-4" in str(where) and "optimizer" in str(where):
        fill()
    return save(what, where, *more, **named)


def removed(path, *more, **named):
    # What is removed makes no room: somebody else takes it.
    done = rmtree(path, *more, **named)
    if str(path).endswith(".saving") and filler.exists():
        fill()
    return done


def writing(path, value):
    if path.name == "result.json":
        fill()
    return write_json(path, value)


class Fill(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if MOMENT == "before" and state.global_step == 3:
            fill()
        if MOMENT == "before" and state.global_step == 5:
            filler.unlink()
        if MOMENT in ("removed", "moved", "replaced") and state.global_step == 3:
            out = disk / "out"
            shutil.rmtree(out) if MOMENT == "removed" else out.rename(disk / "elsewhere")
            if MOMENT == "replaced":
                out.mkdir()
                (out / "environment.json").write_text("{}")


def callbacks():
    torch.save = saving
    if MOMENT == "for good":
        shutil.rmtree = removed
    if MOMENT == "at the end":
        outcome.write_json = writing
    return [Fill()]
"""
RECIPE = """\
model: {config: {model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
        num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64,
        bos_token_id: 1, eos_token_id: 2, pad_token_id: 0}, tokenizer: tokenizer}
data: {train: [{path: rows.jsonl}], max_length: 32}
global_batch_size: 8
trainer: {max_steps: 6, save_steps: 2, save_total_limit: 1, per_device_train_batch_size: 8}
python: hooks.py
"""


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A filesystem of DISK bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "effilaunch-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no filesystem can be mounted here, so none can be filled: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def recipe(tmp_path) -> Path:
    tokenizer_of_1024_words().save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3} w7 w8"} for i in range(64)]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path / "r.yaml"


def run(recipe: Path, disk: Path, *more: str, moment: str, left: int, expect: int = 0) -> dict:
    where = f"Path({str(disk)!r})"
    text = HOOKS.replace("MOMENT_", moment).replace("LEFT_", str(left)).replace("Path(DISK)", where)
    (recipe.parent / "hooks.py").write_text(text)
    given = ("--on", "cpu", "--output-dir", disk / "out", *more)
    return effilaunch("run", recipe, *given, expect=expect)


def whole(disk: Path) -> list[int]:
    found = complete_checkpoints(disk / "out" / "checkpoints")
    assert all(defect(path, hashes=True) is None for path in found.values())
    return list(found)


def test_a_full_disk_that_is_foreseen_costs_one_save(recipe, disk):
    """As much is left as the weights and one of the optimizer's two moments take."""
    done = run(recipe, disk, moment="before", left=2**20 + 2**19)
    told = done["result"]["checkpoints"]
    assert (told["saved"], [row["step"] for row in told["skipped"]]) == (2, [4])
    assert "WARNING: checkpoint-4 is not saved: it takes" in done["said"]
    assert "the last complete one is checkpoint-2" in done["said"]
    assert whole(disk) == [6]


@pytest.mark.slow
def test_a_full_disk_that_is_not_foreseen_ends_the_run_which_then_goes_on(recipe, disk):
    done = run(recipe, disk, moment="within", left=0, expect=5)
    (problem,) = done["errors"]
    assert problem["code"] == "checkpoint-disk"
    assert "checkpoint-4" in problem["message"]
    assert str(disk / "out" / "checkpoints") == problem["file"]
    assert whole(disk) == [2]
    assert [path.name for path in (disk / "out" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert not (disk / "out" / "model").exists()
    (disk / "filler").unlink()
    done = run(recipe, disk, "--resume", "auto", moment="never", left=0)
    assert done["result"]["steps"] == 6
    assert whole(disk) == [6]
    rows = [json.loads(line) for line in (disk / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 6]


@pytest.mark.slow
def test_a_disk_that_takes_no_error_either_is_told_all_the_same(recipe, disk):
    """The rank can write neither its error nor its status."""
    done = run(recipe, disk, moment="for good", left=0, expect=5)
    (problem,) = done["errors"]
    assert problem["code"] == "checkpoint-disk", problem
    assert "checkpoint-4" in problem["message"]
    assert "checkpoint-2 is complete" in problem["message"]
    assert not list((disk / "out" / "logs").glob("error-*"))
    assert "effilaunch-report" not in done["said"]
    assert whole(disk) == [2]


@pytest.mark.slow
def test_a_disk_without_room_for_the_results_numbers_is_told(recipe, disk):
    done = run(recipe, disk, moment="at the end", left=0, expect=5)
    (problem,) = done["errors"]
    assert (problem["code"], problem["file"]) == ("checkpoint-disk", str(disk / "out"))
    assert "result.json" in problem["message"]
    assert not (disk / "out" / "COMPLETED").exists()


@pytest.mark.parametrize(
    "moment",
    ["moved", *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("removed", "replaced"))],
)
def test_a_run_directory_that_goes_while_the_run_trains_ends_it(recipe, disk, moment):
    done = run(recipe, disk, moment=moment, left=0, expect=5)
    (problem,) = done["errors"]
    assert problem["code"] == "checkpoint-unwritable", problem
    assert "the run directory is no longer there" in problem["message"]
    left = {"removed": [], "moved": ["elsewhere"], "replaced": ["elsewhere", "out"]}[moment]
    assert sorted(path.name for path in disk.iterdir()) == left, "nothing is written in its place"
    if moment == "replaced":
        assert [path.name for path in (disk / "out").iterdir()] == ["environment.json"]
