"""Pictures as tensors, opened and resized when they are asked for: decoded they would fill a disk."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset


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
        with Image.open(source) as image:
            pixels = self.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": sample["labels"]}


def stack_pictures(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of {pixel_values (batch, channels, height, width), labels (batch)}."""
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }
