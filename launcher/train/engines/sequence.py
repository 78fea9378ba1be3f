"""The Trainer where ranks share each sample's tokens (DeepSpeed's Ulysses).

transformers 5.23 has it too, with three faults that are avoided here (each is shown by
tests/contract/test_sequence_parallel.py):

- Its loss is the mean over all shards, computed on each rank from gathered losses: backward, each rank's part
  comes back once from every rank. DeepSpeed's stages 0 to 2 add the ranks of a copy up, so that gradients are
  `sp_size` times too large; stage 3 takes their mean. Clipping and Adam hide it (integrations/deepspeed.py
  deepspeed_sp_compute_loss; runtime/zero/stage_1_and_2.py; stage3.py __avg_scatter_grads, which knows no
  sequence_parallel_size).
- The mean is of one micro-batch: with accumulation a token of a short sample weighs more than one of a long.
- Its adapter of the data loader has no data set, so that a run cannot be resumed within an epoch.

Here every rank of a copy reads the same sample, and takes its part of the tokens after the loader. Each
rank's loss is the sum over its own labels, by the number of all labels of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from launcher.rows.class_names import IGNORED
from launcher.train.data.host_counts import as_one_document
from launcher.train.trainers import PlannedTrainer
from launcher.train.upstream.deepspeed_seams import give_whole_samples, rank_in_copy, rows_shared_by
from launcher.train.upstream.trainer_seams import per_device_batch


class SequenceTrainer(PlannedTrainer):
    """PlannedTrainer whose ranks have a part of each sample's tokens while they train.

    Evaluations are not split: each rank evaluates complete samples of its own.
    """

    _whole = False
    """Whether ranks have rows of their own now, or the length of the loader is asked for, in which upstream
    sees an adapter that gives out each batch in parts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # the labels of a step are counted, as compute_loss needs it
        give_whole_samples(self.accelerator)
        self._parts = self.accelerator.parallelism_config.sp_size
        self.shared_by = self._parts

    def get_train_dataloader(self) -> Any:
        with rows_shared_by(self.accelerator, self._parts, self.args.device.type):
            return super().get_train_dataloader()

    def get_sp_size(self) -> int:
        return 1 if self._whole else super().get_sp_size()

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Steps and epochs follow from the loader as it is."""
        self._whole = True
        try:
            return super().set_initial_training_values(*args, **kwargs)
        finally:
            self._whole = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._whole = True
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._whole = False

    def get_total_train_batch_size(self, args: Any) -> int:
        ranks = args.world_size // self._parts
        return int(per_device_batch(self) * args.gradient_accumulation_steps * ranks)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss as it is reported: the Trainer takes the mean over all ranks, each of which has a part."""
        own = super().training_step(*args, **kwargs) / self._averaged_over()
        return own * self.accelerator.num_processes

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This rank's part of the step's loss, times the ranks over which ZeRO takes the mean."""
        if self._whole:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        part = part_of(inputs, rank_in_copy(), self._parts)
        outputs = model(**part, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss * self._averaged_over()
        return (loss, outputs) if return_outputs else loss

    def _averaged_over(self) -> int:
        """Ranks over which ZeRO takes the mean of gradients: the copies, at stage 3 all ranks."""
        ranks = int(self.accelerator.num_processes)
        return ranks if self.deepspeed.zero_optimization_stage() == 3 else ranks // self._parts


def part_of(inputs: Mapping[str, torch.Tensor], rank: int, parts: int) -> dict[str, torch.Tensor]:
    """One rank's part of a batch [rows, tokens]: tokens, their positions, the labels shifted by one.

    Rows are padded on the right, where causal attention makes no difference: there is no mask. ValueError
    where the tokens do not divide.
    """
    ids = inputs["input_ids"]
    rows, width = ids.shape
    if width % parts:
        raise ValueError(f"a batch of {width} tokens cannot be divided among {parts} ranks")
    positions = torch.arange(width, device=ids.device).expand(rows, width)
    behind = torch.nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:]
    own = slice(rank * width // parts, (rank + 1) * width // parts)
    labels = behind[:, own].contiguous()
    return {
        "input_ids": ids[:, own].contiguous(),
        "position_ids": as_one_document(positions[:, own].contiguous()),
        "labels": labels,
        "shift_labels": labels,
    }
