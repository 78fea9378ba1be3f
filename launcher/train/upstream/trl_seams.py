"""Private methods of trl's trainers. Importing this module imports no trl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


class RowsArePrepared:
    """Mixin before a trainer of trl: rows are samples already, and no telemetry is sent."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """Nothing is sent."""


def preference_samples(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, max_length: int
) -> list[dict[str, Any]]:
    """Rows {prompt, chosen, rejected, …} as DPOTrainer prepares them, without a trainer.

    A stream, so that no batch leaves a cache file or a progress bar. Other columns are kept.
    """
    from datasets import IterableDataset
    from trl import DPOConfig, DPOTrainer

    if not rows:
        return []
    settings = SimpleNamespace(max_length=max_length, truncation_mode=DPOConfig.truncation_mode)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    holder = SimpleNamespace(_tokenizer=tokenizer)
    return list(DPOTrainer._prepare_dataset(holder, stream, tokenizer, settings, "train"))
