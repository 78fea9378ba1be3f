"""Pictures as tensors, opened and resized when they are asked for: decoded they would fill a disk."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from launcher.errors import Problem, RecipeError


class Pictures(Dataset):
    """Samples of {pixel_values: float tensor (channels, height, width), labels: int}."""

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
                picture = image.convert("RGB")
        except OSError as error:  # it could be read when the data was prepared
            raise RecipeError(Problem("bad-image", f"the picture cannot be read: {error}")) from error
        pixels = self.processor(picture, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": sample["labels"]}


def stack_pictures(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of {pixel_values (batch, channels, height, width), labels (batch)}."""
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }
