"""Pictures: what is cached is where they lie and what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

from PIL import Image
from plans import write_run

from launcher.errors import RecipeError
from launcher.train.data.build import build_data
from launcher.train.job import read_job
from launcher.train.model.processing import load_processing
from launcher.train.prepare import prepare_run

TINY_VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 64, "image_size": 32, "patch_size": 8,
}  # fmt: skip


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    numbers = iter(range(100))

    def make(*paths: Path):
        settings = {
            "task": "image-classification",
            "tiny": False,
            "model.config": TINY_VIT,
            "data.train": [
                {"path": str(path), "format": "auto", "columns": {}, "weight": 1.0} for path in paths
            ],
        }
        return read_job(write_run(tmp_path / f"run-{next(numbers)}", settings))

    return make


def paint(path: Path, colour: str, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 24), colour).convert(mode).save(path)
    return path


def labels_of(found) -> list[str]:
    prepare_run(found)
    data = build_data(found, load_processing(found))
    return [data.labels[data.train[i]["labels"]] for i in range(len(data.train))]


def test_a_moved_picture_has_the_label_of_its_new_folder(job, tmp_path):
    for label, colour in (("a", "red"), ("b", "blue")):
        for number in range(2):
            paint(tmp_path / "pictures" / label / f"{number}-{label}.png", colour)
    assert labels_of(job(tmp_path / "pictures")) == ["a", "a", "b", "b"]
    (tmp_path / "pictures/a/1-a.png").rename(tmp_path / "pictures/b/1-a.png")
    assert labels_of(job(tmp_path / "pictures")) == ["a", "b", "b", "b"]


def test_equal_row_files_in_two_folders_mean_two_sets_of_pictures(job, tmp_path):
    rows = [{"image": "1.png", "label": "x"}, {"image": "2.png", "label": "y"}]
    pixels = []
    for folder, colour in (("one", "red"), ("two", "blue")):
        for number in (1, 2):
            paint(tmp_path / folder / f"{number}.png", colour)
        file = tmp_path / folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = job(file)
        prepare_run(found)
        pixels.append(build_data(found, load_processing(found)).train[0]["pixel_values"])
    assert not pixels[0].equal(pixels[1])


def test_paths_and_bytes_go_together(job, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for label in ("a", "b"):
        paint(tmp_path / "pictures" / label / "1.png", "red")
    content = paint(tmp_path / "grey.png", "white", "L").read_bytes()
    table = pa.table({"image": [{"bytes": content, "path": None}], "label": ["b"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    found = job(tmp_path / "pictures", tmp_path / "rows.parquet")
    assert labels_of(found) == ["a", "b", "b"]
    data = build_data(found, load_processing(found))
    batch = data.collate([data.train[i] for i in range(3)])
    assert tuple(batch["pixel_values"].shape) == (3, 3, 32, 32)


def test_a_broken_picture_is_named_before_and_during_the_run(job, tmp_path):
    for label in ("a", "b"):
        paint(tmp_path / "pictures" / label / "1.png", "red")
    found = job(tmp_path / "pictures")
    prepare_run(found)
    (tmp_path / "pictures/a/1.png").write_bytes(b"no picture")
    data = build_data(found, load_processing(found))
    with pytest.raises(RecipeError, match="cannot be read"):
        data.train[0]
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(tmp_path / "pictures"))
    assert caught.value.problems[0].file == str(tmp_path / "pictures/a/1.png")


def test_a_failure_leaves_nothing_in_the_cache(job, tmp_path):
    paint(tmp_path / "pictures" / "only" / "1.png", "red")
    with pytest.raises(RecipeError, match="class"):
        prepare_run(job(tmp_path / "pictures"))
    assert not list((tmp_path / "cache" / "data").iterdir())
