"""One job as axolotl, LLaMA-Factory and TRL are told it for the comparison of speeds: all read alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import sides  # noqa: E402  (benchmarks is no package)
from peers.work import Work  # noqa: E402

from launcher.importing import axolotl, llamafactory, trl  # noqa: E402
from launcher.importing.reading import Effect, Reading  # noqa: E402

OURS = (
    "model.name_or_path",
    "adapter.r",
    "adapter.lora_alpha",
    "adapter.lora_dropout",
    "adapter.target_modules",
    "data.max_length",
    "trainer.max_steps",
    "trainer.learning_rate",
    "trainer.lr_scheduler_type",
    "trainer.logging_steps",
    "trainer.save_strategy",
    "trainer.train_sampling_strategy",
)


def of_axolotl(command: list[str]) -> Reading:
    assert axolotl.is_recipe(json.loads(Path(command[-1]).read_text()))
    return axolotl.read(Path(command[-1]).read_text(), command[-1])


def of_llamafactory(command: list[str]) -> Reading:
    assert llamafactory.is_recipe(json.loads(Path(command[-1]).read_text()))
    return llamafactory.read(Path(command[-1]).read_text(), command[-1])


def of_trl(command: list[str]) -> Reading:
    flags = command[command.index("trl.scripts.sft") + 1 :]
    values = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    return trl.read(json.dumps(values), "sft.yaml")


READERS: dict[str, Callable[[list[str]], Reading]] = {
    "axolotl": of_axolotl,
    "llamafactory": of_llamafactory,
    "trl": of_trl,
}


@pytest.fixture
def work(tmp_path: Path) -> Work:
    (tmp_path / "model").mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 64)
    return Work("job", tmp_path / "model", rows, (2,) * 64, 256, 16, 4, 3, gpu=True)


def read(name: str, work: Work, folder: Path) -> Reading:
    side = next(side for side in sides.SIDES if side.name == name)
    folder.mkdir()
    return READERS[name](side.tell(work, folder, Path("python")))


def value(recipe: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return recipe[section][name]


@pytest.mark.parametrize("name", READERS)
def test_the_job_is_read_as_the_recipe_of_the_same_job(name: str, work: Work, tmp_path: Path) -> None:
    reading = read(name, work, tmp_path / name)
    recipe = sides._recipe(work)
    assert {key: reading.value(key) for key in OURS} == {key: value(recipe, key) for key in OURS}
    size = reading.value("trainer.per_device_train_batch_size")
    assert size * reading.value("trainer.gradient_accumulation_steps") == work.samples
    assert reading.value("precision") == "bf16"
    (source,) = reading.value("data.train")
    assert (tmp_path / name / source["path"]).resolve() == work.rows
    assert source.get("format", "text") == "text"
    assert reading.value("data.loss_on") in (None, "all")
    assert reading.value("data.packing") in (None, False)
    assert reading.value("data.eval") is None
    assert not reading.refusals
    assert {entry.effect for entry in reading.dropped} <= {Effect.NONE}


def test_only_what_each_tool_does_by_itself_differs(work: Work, tmp_path: Path) -> None:
    taken = {name: read(name, work, tmp_path / name).taken for name in READERS}
    said = {
        name: {key for key, found in readings.items() if not found.is_default}
        for name, readings in taken.items()
    }
    shared = set.intersection(*said.values())
    assert set(OURS) <= shared
    for key in shared - {"data.train", "model.name_or_path"}:
        values = [taken[name][key].value for name in READERS]
        assert all(one == values[0] for one in values), (key, values)
