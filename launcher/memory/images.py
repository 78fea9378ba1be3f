"""Memory of the parts that read images, beside the language model's. Pure arithmetic.

How many images a batch has is known once the rows are prepared: those of the largest samples count. Before,
all tokens count as tokens of images, an upper bound. Tower and projector run before the language model; a
frozen tower keeps nothing for the backward pass, and its layers are gone when the language model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launcher.memory.job import Components, MemoryJob
from launcher.models.model import ModelSpec, Vision

PHASE = "images"
"""The moment at which the tower runs."""


def with_images(phases: Mapping[str, Components], spec: ModelSpec, job: MemoryJob) -> dict[str, Components]:
    """The moments of a step with what a model of images and text holds besides; unchanged for others."""
    vision = spec.vision
    if vision is None:
        return dict(phases)
    patches, of_image = _patches(vision, job)
    # All micro-batches of a step, as the Trainer fetches them at once (get_batch_samples), and the next one.
    fetched = job.rows[0] * ((job.accumulation or 1) + 1)
    pixels = 4 * _pixels(vision, job, fetched)  # float32, as processors make them
    width = 4 if job.precision == "fp32" else 2
    layer = patches * width * (vision.widths * vision.hidden + vision.inners * vision.inner)
    if vision.masked:  # in bool until sdpa makes it of the values' dtype
        layer += patches * width * of_image
    kept = patches * width * vision.projector // vision.patches_per_token
    if vision.trains_tower:
        kept += vision.layers * (patches * width * vision.hidden if job.checkpointing else layer)
    found = {
        name: parts if name == "step" else replace(parts, activations=parts.activations + pixels + kept)
        for name, parts in phases.items()
    }
    begin = replace(phases["forward"], activations=pixels + kept, logits=0, temporary=layer)
    if vision.trains_tower:
        # The tower's backward pass follows the language model's, whose gradients exist by then.
        flow = patches * width * (2 * vision.hidden + vision.inners * vision.inner // 2)
        begin = replace(
            begin,
            activations=pixels + kept + (layer if job.checkpointing else 0),
            gradients=begin.gradients + _language_share(phases, vision, job),
            temporary=flow,
        )
    found[PHASE] = begin
    return found


def _pixels(vision: Vision, job: MemoryJob, rows: int) -> int:
    """Pixel values of `rows` samples: the largest prepared ones, else as if all tokens were of images."""
    if not knows_images(vision, job):
        return rows * job.rows[1] * vision.patches_per_token * vision.patch_values
    largest = job.pixels[:rows]
    return sum(largest) + (rows - len(largest)) * largest[-1]


def _patches(vision: Vision, job: MemoryJob) -> tuple[int, int]:
    """Patches of a micro-batch, and of an image."""
    rows, length = job.rows
    if not knows_images(vision, job):
        return rows * length * vision.patches_per_token, length * vision.patches_per_token
    pixels = _pixels(vision, job, rows)
    return -(-pixels // vision.patch_values), -(-job.pixels_of_image // vision.patch_values)


def knows_images(vision: Vision, job: MemoryJob) -> bool:
    """Whether the rows were prepared, and the pixels that they hold can be counted as patches."""
    return bool(job.pixels and vision.patch_values)


def _language_share(phases: Mapping[str, Components], vision: Vision, job: MemoryJob) -> int:
    """Bytes of gradients that the language model leaves, beyond those that are there from the start."""
    fresh = max(parts.gradients for parts in phases.values()) - phases["forward"].gradients
    tower = (vision.params - vision.frozen) / max(job.trainable_params, 1)
    return int(fresh * max(0.0, 1 - tower))


def image_note(spec: ModelSpec, job: MemoryJob) -> tuple[str, ...]:
    """What the estimate assumes about images."""
    if spec.vision is None:
        return ()
    share = f"all {job.sequence_length:,} tokens of a sample count as tokens of images, an upper bound"
    if knows_images(spec.vision, job):
        share = "the images of the largest batch that the prepared rows can make are counted"
    filled: tuple[str, ...] = ()
    if job.data_parallel > 1 and (spec.vision.params > spec.vision.frozen or job.zero_stage == 3):
        filled = ("a batch without images gets a black one, so that each rank runs the vision tower",)
    return (
        *filled,
        f"{share}; memory of the vision tower is the closed form's",
    )
