"""Private methods of trl's trainers. Importing this module imports no trl."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any


class RowsArePrepared:
    """Mixin before a trainer of trl: rows are samples already, and no telemetry is sent."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """Nothing is sent."""


_EXTREMES: Mapping[str, Callable[[list[float]], float]] = {"min_reward": min, "max_reward": max}
"""Metrics of trl that are no means."""


class WholeMetrics:
    """Mixin before a trainer of trl: its metrics are means over the rows or tokens of the steps that are
    logged together, or of an evaluation.

    trl takes the mean of micro-batches, whatever they hold.
    """

    accelerator: Any
    model: Any
    _metrics: dict[str, dict[str, list[float]]]

    def __init__(self, *args: Any, **more: Any) -> None:
        self._counts: dict[str, list[tuple[list[str], Any]]] = {"train": [], "eval": []}
        super().__init__(*args, **more)

    def metric_counts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the metrics of a batch are means of (0-d, int64): by name, and `rows` for all others."""
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        import torch

        counts = self.metric_counts(inputs)
        found = self.accelerator.gather_for_metrics(torch.stack([*counts.values()])[None]).sum(0)
        self._counts["train" if self.model.training else "eval"].append(([*counts], found))
        return super().compute_loss(model, inputs, *args, **more)  # type: ignore[misc]

    def log(self, *args: Any, **more: Any) -> None:
        mode = "train" if self.model.training else "eval"
        steps = [dict(zip(names, found.tolist(), strict=True)) for names, found in self._counts[mode]]
        self._counts[mode].clear()
        if steps:
            _weigh(self._metrics[mode], steps)
        super().log(*args, **more)  # type: ignore[misc]


def _weigh(metrics: dict[str, list[float]], steps: Sequence[Mapping[str, int]]) -> None:
    """steps: what the metrics of each micro-batch are means of, by name."""
    for name, values in metrics.items():
        counts = [step.get(name, step["rows"]) for step in steps]
        if len(values) != len(counts):  # KTOTrainer has no value of a micro-batch without the side
            counts = [count for count in counts if count]
        if name in _EXTREMES:
            values[:] = [_EXTREMES[name](values)]
        elif len(values) == len(counts) and any(counts):
            pairs = zip(values, counts, strict=True)
            values[:] = [sum(value * count for value, count in pairs if count) / sum(counts)]
    good, bad = (metrics.get(f"rewards/{side}") for side in ("chosen", "rejected"))
    if good and bad:
        metrics["rewards/margins"] = [good[0] - bad[0]]


class KlTerms(RowsArePrepared):
    """RowsArePrepared for KTOTrainer: an evaluation has one KL term, of all its rows.

    trl has one of each batch. Neighbours are the pairs of an evaluation, and of training where probabilities
    are computed only once.
    """

    accelerator: Any
    calculate_KL: bool
    batches_of_evaluation: Callable[[], Iterator[tuple[Mapping[str, Any], bool]]]
    evaluated: Any
    """The loader of the evaluation that runs now; None in training."""
    _kl_means: list[Any]
    """Of the last evaluation: mean log-probability of its KL pairs, and that of the reference."""

    def _prepare_dataset(self, dataset: Any, processing: Any, args: Any, name: str) -> Any:
        if not self.calculate_KL or "KL_completion_ids" in dataset.column_names:
            return dataset
        if name != "train":
            return dataset.add_column("KL_completion_ids", _rotated(dataset["completion_ids"][:]))
        if not self.precompute_ref_logps:  # type: ignore[attr-defined]
            return dataset
        from accelerate import PartialState

        state = PartialState()
        # The first process, of all and then of each node, writes what the others find.
        with state.main_process_first(), state.local_main_process_first():
            return dataset.map(_with_pairs, batched=True, batch_size=args.per_device_train_batch_size)

    def evaluation_loop(self, *args: Any, **more: Any) -> Any:
        self._kl_means = [None, None]
        return super().evaluation_loop(*args, **more)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        from launcher.train.upstream.trainer_seams import replaced

        lose: Callable[..., Any] = super().compute_loss  # type: ignore[misc]
        if self.evaluated is None or not self.calculate_KL:
            return lose(model, inputs, *args, **more)
        if "ref_KL_logps" in inputs:
            inputs = {**inputs, "ref_KL_logps": self._kl_mean(1, lambda batch: batch["ref_KL_logps"])}
        compute: Callable[..., Any] = self._compute_kl_logps  # type: ignore[attr-defined]
        numbers = iter((0, 1))  # it is called for the model, then for the reference with its weights in place

        def of_all_rows(model: Any, _: Any) -> Any:
            return self._kl_mean(next(numbers), lambda batch: compute(model, batch))

        with replaced(self, _compute_kl_logps=of_all_rows):
            return lose(model, inputs, *args, **more)

    def _kl_mean(self, number: int, values: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Mean over all rows of the evaluation (0-d) of values that each batch has for its rows."""
        import torch

        if self._kl_means[number] is None:
            total: Any = 0
            for batch, counts in self.batches_of_evaluation():
                found = values(batch).float()
                total = total + torch.stack((found.sum(), torch.ones_like(found).sum())) * counts
            total = self.accelerator.reduce(total)
            self._kl_means[number] = total[0] / total[1]
        return self._kl_means[number]


def _rotated(answers: list[Any]) -> list[Any]:
    """The answer of the row before each row, as in trl."""
    return answers[-1:] + answers[:-1]


def _with_pairs(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**samples, "KL_completion_ids": _rotated(samples["completion_ids"])}


def preference_samples(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, max_length: int
) -> list[dict[str, Any]]:
    """Rows {prompt, chosen, rejected, …} as DPOTrainer prepares them, without a trainer.

    A stream, so that no batch leaves a cache file or a progress bar. Other columns are kept.
    """
    from trl import DPOConfig, DPOTrainer

    settings = SimpleNamespace(max_length=max_length, truncation_mode=DPOConfig.truncation_mode)
    return _prepared(DPOTrainer, rows, tokenizer, settings)


def labelled_samples(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, max_length: int
) -> list[dict[str, Any]]:
    """Rows {prompt, completion, label, …} as KTOTrainer prepares them, without the pairs of its KL term."""
    from trl import KTOTrainer

    return _prepared(KTOTrainer, rows, tokenizer, SimpleNamespace(max_length=max_length))


def _prepared(trainer: Any, rows: Sequence[Mapping[str, Any]], tokenizer: Any, settings: Any) -> list[Any]:
    from datasets import IterableDataset

    if not rows:
        return []
    stream = IterableDataset.from_generator(lambda: iter(rows))
    holder = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    return list(trainer._prepare_dataset(holder, stream, tokenizer, settings, "train"))


class RolloutSeams:
    """Mixin before GRPOTrainer: public names for what it holds of its generations."""

    accelerator: Any
    args: Any

    @property
    def rollout_log(self) -> Mapping[str, Any]:
        """The last completions of all ranks: prompt, completion, advantages, and rewards by function."""
        log: Mapping[str, Any] = self._logs  # type: ignore[attr-defined]
        return log

    @property
    def buffered(self) -> list[dict[str, Any]] | None:
        """The micro-batches of this rank's last generation: a new list for each generation."""
        found: list[dict[str, Any]] | None = self._buffered_inputs
        return found

    def rollout_state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue within a generation, of this rank."""
        step, every = self._step, self.args.steps_per_generation * self.num_iterations  # type: ignore[attr-defined]
        return {
            "step": step,
            "micro": self.args.per_device_train_batch_size,
            "ranks": self.accelerator.num_processes,
            "buffered": self._buffered_inputs if step % every else None,
            "metrics": dict(self._metrics["train"]),  # type: ignore[attr-defined]
        }

    def set_rollout_state(self, state: Mapping[str, Any]) -> bool:
        """Continue from what `rollout_state` gave, also with micro-batches of another size.

        Whether the generation that it was in is there: other ranks, or another number of completions, must
        generate the rest of it again.
        """
        micro, ranks = self.args.per_device_train_batch_size, self.accelerator.num_processes
        self._step = state["step"] * state["micro"] * state["ranks"] // (micro * ranks)
        buffered, parts = state["buffered"], self.args.steps_per_generation
        is_there = buffered is None or (
            state["ranks"] == ranks and len(buffered) * state["micro"] == micro * parts
        )
        if buffered is not None and len(buffered) != parts and is_there:
            buffered = _in_parts(buffered, parts)
        self._buffered_inputs = buffered if is_there else None
        for name, values in state["metrics"].items():
            self._metrics["train"][name] = list(values)  # type: ignore[attr-defined]
        return is_there


def _in_parts(batches: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """The completions of some micro-batches in the same order, as `count` micro-batches."""
    import torch
    from trl.trainer.utils import split_tensor_dict

    whole: dict[str, Any] = dict(batches[0])  # one number of the whole generation is in each of them
    for name, value in whole.items():
        values = [batch[name] for batch in batches]
        if isinstance(value, list):
            whole[name] = [item for one in values for item in one]
        elif value is not None and value.ndim:
            whole[name] = torch.cat(values)
    parts: list[dict[str, Any]] = split_tensor_dict(whole, count)
    return parts


@contextlib.contextmanager
def reference_from(trainer: type, make: Callable[[], Any]) -> Iterator[None]:
    """Within this, a trainer of trl gets a reference that it was not given from `make`: it would load it by
    the model's name."""
    module: Any = sys.modules[trainer.__module__]
    before = module.create_model_from_path
    module.create_model_from_path = lambda *_, **__: make()
    try:
        yield
    finally:
        module.create_model_from_path = before
