"""A prelude for ranks: sequence parallelism as transformers has it, with its own loss and its own loader."""

from __future__ import annotations

from typing import Any

from launcher.train.data.host_counts import KEY
from launcher.train.engines import sequence
from launcher.train.trainers import PlannedTrainer


class WithPositions:
    """A collator that also gives the positions, which upstream's adapter asks for.

    Without the counts of the host: they are of the labels of whole rows, and the adapter gives out parts of
    them under another name.
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, samples: Any) -> Any:
        import torch

        batch = dict(self.plain(samples))
        batch.pop(KEY)
        rows, width = batch["input_ids"].shape
        batch["position_ids"] = torch.arange(width).expand(rows, width).contiguous()
        return batch


class UpstreamTrainer(PlannedTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "data_collator": WithPositions(kwargs["data_collator"])})


sequence.SequenceTrainer = UpstreamTrainer  # type: ignore[assignment,misc]
