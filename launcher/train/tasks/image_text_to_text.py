"""Vision-language models: conversations with images, padded, with pixels made when a batch is collated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.rows.class_names import IGNORED
from launcher.train.tasks.task import Evaluated, Shown, TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Data, Encoder
    from launcher.train.job import Job


_REQUIRE_KINDS = ("molmo2",)
"""Models that train with `mm_token_type_ids` alone, without an image too."""


class TrainImageTextToText(TrainTask):
    counts_targets = True
    shifts_labels = True

    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        from launcher.train.data.chat import template_origin
        from launcher.train.data.image_chat import EncodeImageChat
        from launcher.train.data.tokenize import loss_on_of, max_length_of, overlong_of

        loss_on = loss_on_of(job.task, detected.format, job.data.loss_on)
        return EncodeImageChat(
            processing, max_length_of(job), overlong_of(job, detected.format), loss_on,
            loss_on_inserted=bool(job.data.loss_on_inserted), origin=template_origin(job),
        )  # fmt: skip

    def traced_inputs(self, memory: Mapping[str, Any], config: Any, batch: int) -> dict[str, Any]:
        import torch

        inputs = super().traced_inputs(memory, config, batch)
        if config.model_type in _REQUIRE_KINDS:
            inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        return inputs

    def samples(self, job: Job, samples: Any, processing: Any) -> Any:
        return samples

    def collator(self, job: Job, processing: Any) -> Any:
        from launcher.train.data.image_chat import ImageBatches

        return ImageBatches(processing, job.data.pad_to_multiple_of, fill=_needs_images(job))

    def shown(self, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None) -> Shown:
        from launcher.train.data.image_chat import image_pieces

        targets = sample["labels"]
        pieces = image_pieces(processing.tokenizer, sample)
        return pieces, len(targets), len(targets) - targets.count(IGNORED)

    def shown_images(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        from launcher.train.data.image_chat import shown_images

        return shown_images(sample)

    def scores(self, found: Evaluated) -> dict[str, float]:
        from launcher.train.metrics import token_accuracy

        return {"accuracy": token_accuracy(found.predictions, found.targets)}

    def check_batch(self, job: Job, tokenizer: Any, data: Data, micro_batch: int) -> None:
        from launcher.train.data.gate import check_masks, check_targets
        from launcher.train.data.image_chat import check_expansion, files_of

        samples = check_targets(tokenizer.tokenizer, data, micro_batch, first=1)
        check_masks(job, tokenizer.tokenizer, samples, data.formats)
        samples = samples[:micro_batch]  # each image is opened once more
        found = check_expansion(tokenizer, samples)
        images = sum(len(files_of(sample)) for sample in samples)
        total = sum(len(sample["input_ids"]) for sample in samples)
        print(
            f"first batch: {len(samples)} samples, {images} images; {found:,} of {total:,} tokens are images'"
        )


def _needs_images(job: Job) -> bool:
    """Whether each rank's batch must run the tower: ranks share its gradients, or (ZeRO-3) its parameters."""
    from launcher.train.job import copies
    from launcher.train.model.vision import PARTS

    trains = set(PARTS) - set(job.model.freeze or ())
    return copies(job) > 1 and (bool(trains) or job.zero_stage == 3)


TRAIN_TASK = TrainImageTextToText()
