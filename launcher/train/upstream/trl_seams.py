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


def whole_evaluation(trainer: Any, rows: Sequence[int]) -> None:
    """Give trl's metrics of an evaluation that runs step by step the value of all its rows.

    trl takes the mean of the steps, of whatever size. rows: of each step.
    """
    if trainer.model.training or not rows:
        return
    for name, values in trainer._metrics["eval"].items():
        if len(values) == len(rows):
            extreme = {"min_reward": min, "max_reward": max}.get(name)
            weighed = sum(value * count for value, count in zip(values, rows, strict=True)) / sum(rows)
            values[:] = [extreme(values) if extreme else weighed]


class PairsOnce(RowsArePrepared):
    """RowsArePrepared for KTOTrainer: neighbours are KL pairs where probabilities are computed only once."""

    def _prepare_dataset(self, dataset: Any, processing: Any, args: Any, name: str) -> Any:
        if not (self.precompute_ref_logps and self.calculate_KL):  # type: ignore[attr-defined]
            return dataset
        from accelerate import PartialState

        state = PartialState()
        # The first process, of all and then of each node, writes what the others find.
        with state.main_process_first(), state.local_main_process_first():
            return dataset.map(_with_pairs, batched=True, batch_size=args.per_device_train_batch_size)


def _with_pairs(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    answers = samples["completion_ids"]
    return {**samples, "KL_completion_ids": answers[-1:] + answers[:-1]}


class SidesByRows:
    """Mixin before KTOTrainer: metrics of good and of bad answers are means over the answers of that side.

    trl takes the mean of micro-batches, each with another number of either side, and margins only of those
    that have both.
    """

    accelerator: Any
    model: Any
    _metrics: dict[str, dict[str, list[float]]]

    def __init__(self, *args: Any, **more: Any) -> None:
        self._sides: dict[str, list[Any]] = {"train": [], "eval": []}
        super().__init__(*args, **more)

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        import torch

        good, tokens = inputs["label"].bool(), inputs["completion_mask"][:, 1:].sum(1)
        counts = torch.stack([good.sum(), (~good).sum(), (tokens * good).sum(), (tokens * ~good).sum()])
        found = self.accelerator.gather_for_metrics(counts[None]).sum(0)
        self._sides["train" if self.model.training else "eval"].append(found)
        return super().compute_loss(model, inputs, *args, **more)  # type: ignore[misc]

    def log(self, *args: Any, **more: Any) -> None:
        mode = "train" if self.model.training else "eval"
        if self._sides[mode]:
            _weigh_sides(self._metrics[mode], [step.tolist() for step in self._sides[mode]])
            self._sides[mode].clear()
        super().log(*args, **more)  # type: ignore[misc]


def _weigh_sides(metrics: dict[str, list[float]], counts: Sequence[Sequence[int]]) -> None:
    """counts: good and bad rows, and target tokens of good and of bad ones, of each micro-batch."""
    good, bad, good_tokens, bad_tokens = zip(*counts, strict=True)
    weights = {"entropy": [sum(step[2:]) for step in counts]}
    for side, rows, tokens in (("chosen", good, good_tokens), ("rejected", bad, bad_tokens)):
        # trl has no value of a micro-batch without the side.
        weights |= {f"{name}/{side}": [*filter(None, rows)] for name in ("rewards", "logps")}
        weights[f"logits/{side}"] = [*filter(None, tokens)]
    for name, each in weights.items():
        if sum(each):
            values = zip(metrics[name], each, strict=True)
            metrics[name] = [sum(value * count for value, count in values) / sum(each)]
    if sum(good) and sum(bad):
        metrics["rewards/margins"] = [metrics["rewards/chosen"][0] - metrics["rewards/rejected"][0]]


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
