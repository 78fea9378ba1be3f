"""Memory of the parts that read images, on values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import JOB_1B, LLAMA_1B

from launcher.memory.images import image_note, knows_images, with_images
from launcher.memory.job import Components
from launcher.models.model import Vision
from launcher.plan.settings import deciding_images
from launcher.rows import prepared_images
from launcher.rows.prepared_images import PreparedImages

TOWER = Vision(
    params=3_000, frozen=3_000, trains_tower=False, hidden=10, inner=40, layers=5, widths=8, inners=2,
    patch_values=100, patches_per_token=4,
)  # fmt: skip
SPEC = replace(LLAMA_1B, vision=TOWER)
JOB = replace(JOB_1B, micro_batch=2, sequence_length=50, precision="fp32", trainable_params=10_000)
PHASES = {
    "forward": Components(weights=7, activations=1_000, logits=500),
    "backward": Components(weights=7, activations=900, gradients=600, logits=700),
    "step": Components(weights=7, gradients=40_000),
}
LAYER = 8 * 10 + 2 * 40
"""Values of a patch."""


def found(job, **vision):
    return with_images(PHASES, replace(SPEC, vision=replace(TOWER, **vision)), job)


def test_unread_rows_count_all_tokens_as_tokens_of_images() -> None:
    patches = 2 * 50 * 4
    parts = found(JOB)
    assert parts["forward"].activations == 1_000 + 2 * 4 * 100 * patches  # two batches of pixels
    assert parts["step"] == PHASES["step"]
    assert parts["images"] == Components(
        weights=7, activations=2 * 4 * 100 * patches, temporary=4 * LAYER * patches
    )
    assert not knows_images(TOWER, JOB)


@pytest.mark.parametrize(
    ("rows", "pixels", "two"),
    [
        (1, 900, 900 + 700),
        (2, 900 + 700, 1_900 + 300),
        (3, 1_900, 1_900 + 3 * 300),
        (5, 2_500, 1_900 + 7 * 300),
    ],
)
def test_prepared_rows_count_the_largest_batch_that_they_make(rows: int, pixels: int, two: int) -> None:
    """One runs, and the next is there; `two`: pixels of both."""
    job = replace(JOB, micro_batch=rows, pixels=(900, 700, 300), pixels_of_image=400)
    parts = found(job)
    assert parts["images"].activations == 4 * two
    assert parts["images"].temporary == 4 * LAYER * pixels // 100
    assert knows_images(TOWER, job)
    assert image_note(SPEC, job) != image_note(SPEC, JOB), "a plan says which of the two it counts"


def test_the_pixels_of_all_micro_batches_of_a_step_are_there_at_once() -> None:
    """The Trainer fetches them together; of Qwen3-VL with eight, 38 % of the measured peak were these."""
    one, eight = (found(replace(JOB, accumulation=count)) for count in (1, 8))
    batch = 4 * 100 * 2 * 50 * 4
    assert eight["backward"].activations - one["backward"].activations == 7 * batch
    assert eight["images"].temporary == one["images"].temporary
    read = found(replace(JOB, accumulation=2, pixels=(900, 700, 300), pixels_of_image=400))
    assert read["images"].activations == 4 * (900 + 700 + 4 * 300)


def test_one_source_of_a_weight_repeats_its_largest() -> None:
    assert found(replace(JOB, pixels=(900,)))["images"].activations == 2 * 4 * 1_800


TRAINED = {"trains_tower": True, "frozen": 0}
READ = replace(JOB, pixels=(1_000,), pixels_of_image=500)
"""20 patches; images of 5."""


def test_a_trained_tower_keeps_every_layer() -> None:
    parts = found(READ, **TRAINED)
    kept = 8_000 * 2 + 5 * 4 * LAYER * 20
    assert parts["backward"].activations == 900 + kept
    last = parts["images"]
    assert last.activations == kept
    assert last.temporary == 4 * 20 * (2 * 10 + 40)
    assert last.gradients == 40_000 * (10_000 - 3_000) // 10_000  # the language model's
    assert last.logits == 0


def test_with_checkpointing_one_layer_is_there_when_the_language_model_is_not() -> None:
    parts = found(replace(READ, checkpointing=True), **TRAINED)
    kept = 8_000 * 2 + 5 * 4 * 10 * 20
    assert parts["backward"].activations == 900 + kept
    assert parts["images"].activations == kept + 4 * LAYER * 20


def test_masks_between_patches_and_projectors() -> None:
    plain, masked = found(READ, **TRAINED), found(READ, **TRAINED, masked=True)
    # For each of 20 patches the 5 of its image, in every layer.
    assert masked["forward"].activations - plain["forward"].activations == 5 * 4 * 20 * 5
    projected = found(READ, **TRAINED, projector=12)
    assert projected["forward"].activations - plain["forward"].activations == 4 * 20 * 12 // 4


def test_pixels_of_unknown_patches_keep_the_bound() -> None:
    assert found(READ, patch_values=0)["images"].temporary == 4 * LAYER * 2 * 50 * 4


SETTINGS = {name: None for name in deciding_images()}
IMAGES = PreparedImages(3, {"p50": 4.0}, {"p50": 1.0}, (900, 700, 300), 400)


def test_what_is_kept_is_found_until_a_file_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    files = [str(rows)]
    prepared_images.keep(SETTINGS, files, "5.23", IMAGES)
    assert prepared_images.find(SETTINGS, files, "5.23") == IMAGES
    assert prepared_images.find(SETTINGS, files, "5.24") is None
    assert prepared_images.find(SETTINGS, [*files, str(tmp_path / "more.jsonl")], "5.23") is None
    assert prepared_images.find(SETTINGS, [], "5.23") is None
    assert prepared_images.find({**SETTINGS, "data.max_length": 8}, files, "5.23") is None
    rows.write_text("{}\n{}\n")
    assert prepared_images.find(SETTINGS, files, "5.23") is None
    rows.unlink()
    assert prepared_images.find(SETTINGS, files, "5.23") is None


@pytest.mark.parametrize("name", ["model.name_or_path", "model.tokenizer"])
@pytest.mark.parametrize("file", ["processor_config.json", "tokenizer.json", "chat_template.jinja"])
def test_files_beside_a_model_and_a_tokenizer_count(name: str, file: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "model"
    rows.write_text("{}\n")
    folder.mkdir()
    settings = {**SETTINGS, name: str(folder)}
    prepared_images.keep(settings, [str(rows)], "5.23", IMAGES)
    assert prepared_images.find(settings, [str(rows)], "5.23") == IMAGES
    (folder / file).write_text("{}")
    assert prepared_images.find(settings, [str(rows)], "5.23") is None
    prepared_images.keep(settings, [str(rows)], "5.23", IMAGES)
    (folder / file).write_text("{ }")
    assert prepared_images.find(settings, [str(rows)], "5.23") is None


def test_rows_that_are_no_files_are_not_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    for files in ([], ["organisation/rows"]):
        prepared_images.keep(SETTINGS, files, "5.23", IMAGES)
        assert prepared_images.find(SETTINGS, files, "5.23") is None


def test_a_damaged_file_is_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    prepared_images.keep(SETTINGS, [str(rows)], "5.23", IMAGES)
    (written,) = (tmp_path / "cache" / "prepared-images").iterdir()
    for text in ("", "[]", "{}", '{"schema_version": 1, "files": {}, "images": {"samples": 1}}'):
        written.write_text(text)
        assert prepared_images.find(SETTINGS, [str(rows)], "5.23") is None
