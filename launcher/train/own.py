"""What the hooks of `task: own` make: the model, the datasets, and the batches."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy
import torch
from accelerate.utils import find_batch_size
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from launcher.errors import Problem, RecipeError
from launcher.train.data.encoded import Data
from launcher.train.hooks import load_hooks
from launcher.train.job import Job
from launcher.train.model.models import check_recomputes, check_shared, load_config


def own_config(job: Job) -> Any:
    """The transformers configuration of the recipe's model, for `make_model`; None where it names none."""
    if job.model.name_or_path is None and job.model.config is None:
        return None
    return load_config(job)


def own_model(job: Job) -> Any:
    """The module that `make_model` returns, its weights in the dtype of the plan.

    RecipeError where it cannot recompute its layers as planned, or cannot be saved.
    """
    hooks = load_hooks(job)
    assert hooks.make_model is not None, "a plan of this task has it"
    model = hooks.make_model(own_config(job))
    if hooks.prepare_model is not None:
        model = hooks.prepare_model(model)
    wanted = getattr(torch, job.model.dtype)
    found = {p.dtype for p in model.parameters() if p.is_floating_point()} - {wanted}
    if found:
        kinds = ", ".join(sorted(str(one).removeprefix("torch.") for one in found))
        print(
            f"NOTE: make_model returned weights in {kinds}; precision decides their dtype: {job.model.dtype}"
        )
        model = model.to(wanted)
    check_recomputes(job, model)
    check_shared(job, model)
    return model


def own_data(job: Job, processing: Any) -> Data:
    """The datasets of `make_datasets` and the collator of `data_collator`.

    RecipeError for a dataset without rows, an endless one without `trainer.max_steps`, and an evaluation that
    is not there or has no end.
    """
    hooks = load_hooks(job)
    assert hooks.make_datasets is not None, "a plan of this task has it"
    assert hooks.data_collator is not None, "a plan of this task has it"
    train, evaluation = hooks.make_datasets()
    check_rows(job, train, "training")
    if evaluation is not None:
        check_rows(job, evaluation, "evaluation")
    counts = {"train": _length(train) or 0, "eval": _length(evaluation) or 0}
    collate = SeededCollator(hooks.data_collator(processing))
    return Data(_seeded(job, train), _seeded(job, evaluation), collate, None, counts)


def own_processing(job: Job) -> Any:
    """The tokenizer or processor that is saved with the result; None without the hook."""
    make = load_hooks(job).processing
    return None if make is None else make()


def check_rows(job: Job, dataset: Any, name: str) -> None:
    """RecipeError if a dataset is empty, or has no length where one is needed."""
    count, file = _length(dataset), str(job.python.file)
    if count == 0:
        message = f"the {name} dataset of make_datasets is empty"
        raise RecipeError(
            Problem("no-rows", message, file=file, path="python", hint="return at least one row")
        )
    if count is not None:
        return
    if name != "training":
        message = "the evaluation dataset of make_datasets has no length: an evaluation must end"
        hint = "return a dataset with a length, or None"
        raise RecipeError(Problem("endless-rows", message, file=file, path="python", hint=hint))
    if (job.trainer.max_steps or 0) <= 0:
        message = "the training dataset of make_datasets has no length, and nothing ends the run"
        hint = "set `trainer: {max_steps: 1000}`, or return a dataset with a length"
        raise RecipeError(Problem("endless-rows", message, file=file, path="trainer.max_steps", hint=hint))


class SeededRows(Dataset[Any]):
    """A dataset with a length, whose rows are made with random numbers of their batch.

    The Trainer fetches a batch before the one that is trained, so random numbers of augmentations and masks
    that came from the process's generators would be others in a resumed run.
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._rows[number]

    def __getitems__(self, numbers: Sequence[int]) -> SeededBatch:
        batch = SeededBatch()
        batch.seed = zlib.crc32(repr((self._seed, list(numbers))).encode())
        with _drawing_from(batch.seed):
            batch.extend(self._rows[number] for number in numbers)
        return batch


class SeededBatch(list[Any]):
    """The samples of a batch, and the seed of what its collator draws."""

    seed = 0


class SeededCollator:
    """The collator of the hooks, whose random numbers are those of the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        if not isinstance(samples, SeededBatch):
            return self._collate(samples)
        with _drawing_from(samples.seed + 1):
            return self._collate(list(samples))


def _seeded(job: Job, rows: Any) -> Any:
    """The dataset as it is trained; one without a length draws from the process's generators."""
    return rows if _length(rows) is None else SeededRows(rows, job.seed)


@contextlib.contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Random numbers within this are those of the seed; the generators continue as before after it."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


def weighing_batches(trainer: type) -> type:
    """The class of Trainer for batches of any kind, in which a micro-batch counts by its rows.

    It counts by its labels where the model's forward, or the hook compute_loss, takes their number.
    """

    class BatchesOfHooks(trainer):
        model_accepts_loss_kwargs: bool

        def loss_items(self, inputs: Any) -> torch.Tensor:
            labels = inputs.get("labels")
            if self._counts_labels and torch.is_tensor(labels) and labels.dim() > 1:
                return super().loss_items(inputs)
            return torch.full((), _rows(inputs), dtype=torch.int64, device=self.args.device)

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(model, DistributedDataParallel) and self.accelerator.num_processes > 1:
                for statistic in _running_statistics(model):
                    torch.distributed.broadcast(statistic, 0)
            return super().training_step(model, *args, **kwargs)

        @property
        def _counts_labels(self) -> bool:
            return bool(self.model_accepts_loss_kwargs or self.own_loss is not None)

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, items = super().get_batch_samples(*args, **kwargs)
            if items is None and batches and self.model_accepts_loss_kwargs:
                # Without labels that can be counted, its loss is the mean of a micro-batch.
                self.model_accepts_loss_kwargs = False
                items = self._items_of_step(batches)
            return batches, items

    return BatchesOfHooks


def _running_statistics(model: Any) -> Iterator[torch.Tensor]:
    """Buffers of batch norms: DDP alone hands those of rank 0, which a checkpoint has, to all ranks."""
    for module in model.modules():
        if isinstance(module, BatchNorm1d | BatchNorm2d | BatchNorm3d | SyncBatchNorm):
            yield from module.buffers(recurse=False)


def _rows(inputs: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor; else of the first tensor inside."""
    for value in inputs.values():
        if torch.is_tensor(value) and value.dim():
            return len(value)
    return int(find_batch_size(inputs) or 1)


def _length(dataset: Any) -> int | None:
    """Rows of a dataset; None for one without an end, or without a dataset."""
    if dataset is None or not isinstance(dataset, Sized):
        return None
    return len(dataset)
