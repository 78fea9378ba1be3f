"""A class for each image. Images are opened when they are asked for: decoded they would fill a disk."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.rows.formats import label_id
from launcher.rows.images import ImageFile, open_image, thumbnail
from launcher.rows.sources import Row
from launcher.train.data.encoded import EncodedBatch
from launcher.train.tasks.task import Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Encoder
    from launcher.train.job import Job


class TrainImageClassification(TrainTask):
    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        assert labels is not None, "classification knows its labels before it encodes"
        return ImageEncoder(labels)

    def samples(self, job: Job, samples: Any, processing: Any) -> Any:
        return Images(samples, processing)

    def collator(self, job: Job, processing: Any) -> Any:
        return stack_images

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        assert labels is not None, "every image has a label"
        return [(f"{sample['image_path'] or 'an image'} -> {labels[sample['labels']]}", True)], 0, 1

    def shown_images(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        file = ImageFile(sample["image_path"], sample["image_bytes"])
        size = list(open_image(file).size)
        return [{"name": file.name, "size": size, "thumbnail": thumbnail(file)}]

    def traced_inputs(self, memory: Mapping[str, Any], config: Any, batch: int) -> dict[str, Any]:
        import torch

        height, width = _pair(config.image_size)
        pixels = torch.zeros(batch, config.num_channels, height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


class ImageEncoder:
    """Images stay what they are (a path, or the file's bytes) beside the id of their label.

    Each is opened once here, so that a broken one is found before a device is taken.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = labels

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        paths: list[str | None] = []
        contents: list[bytes | None] = []
        for row in rows:
            path, content = image_of(row)
            paths.append(path)
            contents.append(content)
        columns: dict[str, list[Any]] = {
            "image_path": paths,
            "image_bytes": contents,
            "labels": [label_id(row, row.values["label"], self.labels) for row in rows],
        }
        return EncodedBatch(columns=columns, kept=len(rows), rows=list(range(len(rows))))


def image_of(row: Row) -> tuple[str | None, bytes | None]:
    """(path, None) or (None, bytes) of a row's image; RecipeError when it is none."""
    from PIL import Image

    value = row.values["image"]
    try:
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
            image.load()  # all of it: a file that is cut off opens well
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel, which RGB clips")
    except (OSError, SyntaxError, ValueError, AttributeError, TypeError) as error:
        message = f"the image cannot be read: {error}"
        raise RecipeError(
            Problem("bad-image", message, file=row.file, line=row.number, hint="fix or remove the row")
        ) from error
    return (None, value) if isinstance(value, bytes) else (value, None)


class Images:
    """A map-style dataset of {pixel_values: float tensor (channels, height, width), labels: int}."""

    def __init__(self, samples: Any, processor: Any) -> None:
        self.samples, self.processor = samples, processor

    def __len__(self) -> int:
        return int(self.samples.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        sample = self.samples[index]
        source = sample["image_path"] or io.BytesIO(sample["image_bytes"])
        try:
            with Image.open(source) as image:
                image_rgb = image.convert("RGB")
        except OSError as error:  # it could be read when the data was prepared
            raise RecipeError(Problem("bad-image", f"the image cannot be read: {error}")) from error
        pixels = self.processor(image_rgb, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": sample["labels"]}


def stack_images(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of {pixel_values (batch, channels, height, width), labels (batch)}."""
    import torch

    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


TRAIN_TASK = TrainImageClassification()
