"""What `prepare` counts of images, and plans of the same recipe that count it: real processors, no mock."""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

from vision_models import colour_rows, save_base, write_rows

from launcher.commands.prepare import prepare_command
from launcher.inputs.planning_facts import find_images, gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render
from launcher.report.plan_text import plan_text
from launcher.train.trace.run import ANSWERS

pytestmark = pytest.mark.filterwarnings("ignore")
PATCH = 3 * 4 * 4
"""Pixel values of a patch of Gemma 4."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return functools.cache(lambda name: save_base(root / name, name))


@pytest.fixture
def recipe(tmp_path, monkeypatch, base):
    """(name of a family) -> a recipe over 16 rows of it, none of them prepared."""
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    for module in (
        "launcher.models.memory_trace",
        "launcher.inputs.model_trace",
    ):  # in place of an interpreter
        monkeypatch.setattr(f"{module}.ask_child", lambda request, *_: ANSWERS[request["ask"]](request))
    rows = write_rows(tmp_path / "rows", colour_rows(tmp_path / "rows"))

    def write(name: str, **trainer: object) -> Path:
        path = tmp_path / "recipe.yaml"
        given = {
            "task": "image-text-to-text",
            "model": {"name_or_path": str(base(name))},
            "data": {"train": [{"path": str(rows)}], "max_length": 512},
            "trainer": {"max_steps": 2, "per_device_train_batch_size": 2, **trainer},
            "hardware": {"device": "cpu"},
        }
        path.write_text(json.dumps(given))
        return path

    return write


def planned(path: Path, *overrides: str):
    loaded, facts = gather(load_recipe(path, list(overrides)), None)
    return make_plan(loaded, facts)


def prepare(path: Path):
    options = {"on": None, "show": None, "tiny": False, "as_json": True}
    return prepare_command(str(path), overrides=[], **options).data["data"]["splits"]["train"]


def images_line(plan) -> str:
    (line,) = (line for line in plan_text(render(plan)).splitlines() if line.split()[:1] == ["images"])
    return line


def test_a_plan_counts_the_images_of_its_prepared_rows(recipe):
    """Gemma 4 fills each image up to 70 tokens of 3 x 3 patches."""
    path = recipe("gemma4")
    before = planned(path)
    assert before.images is None
    assert before.job.pixels == ()
    assert json.loads(render(before).files["plan.json"])["images"] is None
    assert not any(map(str.isdigit, images_line(before)))

    written = prepare(path)
    plan = planned(path)
    shown = json.loads(render(plan).files["plan.json"])["images"]
    assert shown["samples"] == written["samples"] == 16
    assert shown["tokens_per_sample"] == written["image_tokens"]
    # Three rows without an image, two with two.
    assert shown["images_per_sample"] == {"mean": 0.94, "p50": 1.0, "p95": 2.0, "max": 2}
    assert [int(number) for number in re.findall(r"\d+", images_line(plan))[:4]] == [1, 95, 2, 2]

    image = 70 * 9 * PATCH
    assert plan.job.pixels == (2 * image,) * 2 + (image,) * 11 + (0,) * 3
    assert plan.job.pixels_of_image == image
    # Two micro-batches of the largest samples, not 512 tokens of images in each.
    spared = 2 * 2 * 512 * plan.spec.vision.patches_per_token - (4 + 2) * 70 * 9
    phases = [one.memory.phases["backward"].activations for one in (before, plan)]
    assert phases[0] - phases[1] == 4 * PATCH * spared  # of pixels; the tower is frozen
    assert plan.memory.total < before.memory.total

    # A source of a weight may bring its largest sample twice in a batch.
    loaded, facts = gather(load_recipe(path, ["data.train[0].weight=2"]), None)
    assert facts.images is None  # another recipe: it was not prepared
    assert make_plan(loaded, replace(facts, images=plan.images)).job.pixels == (2 * image,)


@pytest.mark.slow
def test_other_settings_and_other_files_are_not_taken_for_the_prepared_ones(recipe, base, tmp_path):
    path = recipe("gemma3")

    def found(*overrides: str) -> bool:
        return find_images(load_recipe(path, list(overrides)).recipe) is not None

    assert not found()
    written = prepare(path)
    images = find_images(load_recipe(path).recipe)
    image = 3 * 56 * 56
    assert images.pixels == (2 * image,) * 2 + (image,) * 11 + (0,) * 3
    assert images.of_image == image
    assert images.tokens == written["image_tokens"]
    assert found("trainer.learning_rate=1e-5")
    for changed in ("data.max_length=256", "data.loss_on=all", "data.overlong=drop"):
        assert not found(changed), changed
    assert not found("model.image_sizes={do_resize: false}")
    rows = tmp_path / "rows" / "rows.jsonl"
    text, times = rows.read_text(), rows.stat()
    rows.write_text(text + text)
    assert not found()
    rows.write_text(text)
    os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert found()
    beside = Path(base("gemma3")) / "processor_config.json"
    beside.write_text(beside.read_text() + "\n")
    assert not found()


@pytest.mark.slow
def test_a_file_that_joins_a_pattern_of_rows_is_noticed(recipe, tmp_path):
    path = recipe("gemma3")
    said = json.loads(path.read_text())
    said["data"]["train"] = [{"path": str(tmp_path / "rows" / "*.jsonl")}]
    path.write_text(json.dumps(said))
    prepare(path)
    assert find_images(load_recipe(path).recipe).samples == 16
    more = tmp_path / "rows" / "more.jsonl"
    more.write_text((tmp_path / "rows" / "rows.jsonl").read_text())
    assert find_images(load_recipe(path).recipe) is None
    more.unlink()
    assert find_images(load_recipe(path).recipe).samples == 16
    (tmp_path / "rows" / "rows.jsonl").unlink()
    assert find_images(load_recipe(path).recipe) is None
