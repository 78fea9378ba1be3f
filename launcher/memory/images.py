"""Memory of the parts that read images, beside the language model's. Pure arithmetic.

How many of a sample's tokens are an image's is not known before the rows are read, so all of them count as
such: an upper bound. Tower and projector run before the language model; a frozen tower keeps nothing for the
backward pass, and its layers are gone when the language model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launcher.facts.model import ModelSpec, Vision
from launcher.memory.job import Components, MemoryJob

PHASE = "images"
"""The moment at which the tower runs."""
_BATCHES = 2
"""Batches of pixels on the device: the one that runs and the next."""


def with_images(phases: Mapping[str, Components], spec: ModelSpec, job: MemoryJob) -> dict[str, Components]:
    """The moments of a step with what a model of images and text holds besides; unchanged for others."""
    vision = spec.vision
    if vision is None:
        return dict(phases)
    rows, length = job.rows
    patches = rows * length * vision.patches_per_token
    pixels = _BATCHES * 4 * patches * vision.patch_values  # float32, as processors make them
    width = 4 if job.precision == "fp32" else 2
    layer = patches * width * _of_layer(vision)
    kept = 0
    if vision.trains_tower:
        kept = vision.layers * (patches * width * vision.hidden if job.checkpointing else layer)
        kept += layer if job.checkpointing else 0
    found = {
        name: parts if name == "step" else replace(parts, activations=parts.activations + pixels + kept)
        for name, parts in phases.items()
    }
    begin = phases["forward"]
    found[PHASE] = replace(begin, activations=pixels + kept, logits=0, temporary=layer)
    return found


def _of_layer(vision: Vision) -> int:
    """Values of a patch that a layer makes and keeps where it is trained (`vision_facts`)."""
    return vision.widths * vision.hidden + vision.inners * vision.inner


def image_note(spec: ModelSpec, job: MemoryJob) -> tuple[str, ...]:
    """What the estimate assumes about images."""
    if spec.vision is None:
        return ()
    share = f"all {job.sequence_length:,} tokens of a sample count as tokens of images, an upper bound"
    filled: tuple[str, ...] = ()
    if job.data_parallel > 1 and (spec.vision.params > spec.vision.frozen or job.zero_stage == 3):
        filled = ("a batch without images gets a black one, so that each rank runs the vision tower",)
    return (
        *filled,
        f"{share}; memory of the vision tower is the closed form's",
    )
