"""Trainers whose loss is one of sentence-transformers, around a model of transformers or peft.

The Trainer trains, saves and resumes the plain model. `Embedder` and `Scorer` stand for the
SentenceTransformer and the CrossEncoder that the losses call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, Dataset

from launcher.errors import MachineError, Problem, RecipeError
from launcher.train.trainers import PlannedTrainer, on_device
from launcher.train.upstream.sentence_seams import UnderDDP

if TYPE_CHECKING:
    from pathlib import Path

try:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
    from sentence_transformers.cross_encoder.losses import LambdaLoss
except ImportError as error:
    raise MachineError(
        Problem(
            "sentence-transformers-missing",
            f"tasks embedding and reranker need sentence-transformers, which cannot be imported: {error}",
            path="task",
            hint="pip install 'effilaunch[embedding]'",
        )
    ) from error

IDS, MASK = "_input_ids", "_attention_mask"


class TextRows(Dataset[dict[str, Any]]):
    """Prepared samples {input_ids, lengths, …} as rows of named texts, each a list of token ids, and their
    score where they have one and it is not left out (`scored`)."""

    def __init__(self, samples: Any, columns: Sequence[str], *, scored: bool = True) -> None:
        self.samples, self.columns, self.scored = samples, tuple(columns), scored
        self.column_names = [
            *self.columns,
            *(["score"] if scored and "score" in samples.column_names else []),
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[int(index)]
        row: dict[str, Any] = dict(zip(self.columns, parts(sample), strict=True))
        return row | ({"score": sample["score"]} if self.scored and "score" in sample else {})


def parts(sample: Mapping[str, Any], name: str = "input_ids") -> list[list[int]]:
    """The texts of a prepared sample, which are end to end in a column of it."""
    found, start = [], 0
    for length in sample["lengths"]:
        found.append(list(sample[name][start : start + length]))
        start += length
    return found


class RankBatches:
    """A rank's share of batches in which no text comes twice; all ranks have as many, of equal sizes.

    Where texts are repeated, the last batches of a pass are partial ones, and more than the pass has steps.
    accelerate shares out batches of which only the last may be partial: ranks would get different numbers.
    Rows that no step has are counted at the end of a pass.
    """

    def __init__(self, batches: NoDuplicatesBatchSampler, ranks: int, rank: int) -> None:
        self.batches, self.ranks, self.rank = batches, ranks, rank
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batches), self.ranks)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        rows = len(self.batches.dataset)
        read, alone = bytearray(rows), 0
        found, first = iter(self.batches), list[list[int]]()
        for _ in range(len(self)):
            step = list(islice(found, self.ranks))
            first = first or step[:]
            if not step and not first:  # partial batches are dropped, and all are partial
                message = f"no {self.batch_size} of the {rows} rows have texts that all differ"
                hint = "lower it, or remove trainer.dataloader_drop_last"
                path = "trainer.per_device_train_batch_size"
                raise RecipeError(Problem("no-negatives", message, path=path, hint=hint))
            step += islice(cycle(first), self.ranks - len(step))
            size = min(map(len, step))
            alone += size == 1 < self.batch_size
            for row in (row for batch in step for row in batch[:size]):
                read[row] = 1
            yield step[self.rank][:size]
        left = min(rows, len(self) * self.ranks * self.batch_size) - sum(read)
        if self.rank == 0 and (left > 0 or alone):
            print(
                f"WARNING: epoch {self.epoch + 1}: {max(left, 0)} of {rows} rows are not trained, because no "
                f"micro-batch may have the same text twice; {alone} of {len(self)} micro-batches of each "
                "rank have only one row",
                flush=True,
            )


class Embedder(UnderDDP):
    """What the losses of sentence-transformers call: features of a column to its `sentence_embedding`
    [rows, width]."""

    def __init__(self, after: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.after, self.width = nn.ModuleList(after), width
        self.inner: list[Any] = []
        """The model as the Trainer has wrapped it; in a list, so that it is no part of this module."""
        self.kept: list[torch.Tensor] | None = None
        """Embeddings of an evaluation, in the order in which they were computed."""

    def __getitem__(self, index: int) -> nn.Module:
        return self.after[index]

    def get_embedding_dimension(self) -> int:
        return self.width

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        names = ("input_ids", "attention_mask")
        output = self.inner[0](**{name: features[name] for name in names})
        found = {**features, "token_embeddings": output[0]}
        for module in self.after:
            found = module(found)
        if self.kept is not None:
            self.kept.append(found["sentence_embedding"].detach().float())
        return found


class Scorer(CrossEncoder):
    """What the cross-encoder losses call: numbers of rows of a batch -> {scores: [rows, 1]}."""

    num_labels = 1

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.inner: list[Any] = []
        self.kept: list[torch.Tensor] | None = None
        self.batch: Mapping[str, torch.Tensor] = {}
        """The inputs of all rows of the micro-batch."""
        self.spans: Sequence[Sequence[int]] = ()
        """First and last column, exclusive, of each row's tokens: of the host."""

    @property
    def device(self) -> torch.device:
        return self.batch["input_ids"].device

    def preprocess(self, pairs: Sequence[tuple[int, int]], **_: Any) -> dict[str, torch.Tensor]:
        """The rows of these numbers, without the columns that pad all of them."""
        rows = [row for _, row in pairs]
        start, end = min(self.spans[row][0] for row in rows), max(self.spans[row][1] for row in rows)
        return {name: values[rows, start:end] for name, values in self.batch.items()}

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        scores = self.inner[0](**features).logits
        if self.kept is not None:
            self.kept.append(scores.detach().float())
        return {"scores": scores}


class ContrastTrainer(PlannedTrainer):
    """PlannedTrainer with a loss of sentence-transformers."""

    def __init__(
        self, *args: Any, called: Any, loss: nn.Module, unique: bool = False,
        beside: Callable[[Path], None] = lambda folder: None, **more: Any,
    ) -> None:  # fmt: skip
        """called: the model of `loss`. unique: no text comes twice in a micro-batch. beside: writes what
        belongs beside the model's files in a checkpoint."""
        super().__init__(*args, **more)
        self.called, self.loss, self.unique, self.beside = called, loss, unique, beside
        # The loss is a mean over the rows of a micro-batch, whatever the model's forward takes.
        self.model_accepts_loss_kwargs = False

    def get_train_dataloader(self) -> Any:
        if not self.unique:
            return super().get_train_dataloader()
        args = self.args
        rows: Any = self.train_dataset
        batches = NoDuplicatesBatchSampler(
            TextRows(rows.samples, rows.columns, scored=False),  # equal scores are no equal texts
            batch_size=self._train_batch_size,
            drop_last=args.dataloader_drop_last,
            generator=torch.Generator(),
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        accelerator = self.accelerator
        # The order depends on the seed and the epoch alone.
        self._order = RankBatches(batches, accelerator.num_processes, accelerator.process_index)
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self._order,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        placed = prepare_data_loader(
            loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True,
            non_blocking=accelerator.non_blocking,
        )  # fmt: skip
        return self._with_own_draws(placed)

    def mean_loss(self, model: Any, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        self.called.inner[:] = [model]
        loss = self.loss_of(inputs)
        return (loss, {}) if return_outputs else loss

    def loss_of(self, inputs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def targets_of(self, inputs: Mapping[str, Any]) -> Any:
        """What metrics compare with, a tensor or several, whose first dimension is that of the samples."""
        raise NotImplementedError

    def predictions_of(self, kept: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """What metrics read, of all that the model computed in the loss."""
        raise NotImplementedError

    def predicted(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        self.called.kept = None if prediction_loss_only else []
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs).detach().mean()
        kept, self.called.kept = self.called.kept, None
        if kept is None:
            return loss, None, None
        return loss, self.predictions_of(torch.cat(kept), inputs), self.targets_of(inputs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = sum(value.numel() for name, value in inputs.items() if name.endswith("input_ids"))
        self.largest_batch = max(self.largest_batch, tokens)
        return super().training_step(model, inputs, *args, **kwargs)

    def count_tokens(self, inputs: Any) -> None:
        masks = [value.sum() for name, value in inputs.items() if name.endswith("attention_mask")]
        super().count_tokens({"input_ids": None, "attention_mask": torch.stack(masks)})

    def save_checkpoint(self, write: Any) -> None:
        def with_modules(folder: Path) -> None:
            write(folder)
            if self.args.should_save:
                self.beside(folder / f"checkpoint-{self.state.global_step}")

        super().save_checkpoint(with_modules)


class EmbeddingTrainer(ContrastTrainer):
    """The texts of a row are its columns."""

    def __init__(self, *args: Any, columns: Sequence[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self.columns = tuple(columns)

    def loss_of(self, inputs: Mapping[str, Any]) -> Any:
        features = [
            {"input_ids": inputs[name + IDS], "attention_mask": inputs[name + MASK]} for name in self.columns
        ]
        return self.loss(features, inputs.get("score"))

    def predictions_of(self, kept: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Embeddings [rows, columns, width]: the losses compute all rows of one column after the other."""
        return kept.reshape(len(self.columns), -1, kept.shape[-1]).transpose(0, 1).contiguous()

    def targets_of(self, inputs: Mapping[str, Any]) -> Any:
        """Scores [rows], or numbers of the texts [rows, columns]."""
        return inputs["score"] if "score" in inputs else inputs["texts"]


class RerankerTrainer(ContrastTrainer):
    """A row is a query with one document or several; all pairs of a micro-batch are rows of one batch."""

    def loss_of(self, inputs: Mapping[str, Any]) -> Any:
        others = ("counts", "labels", "queries", "spans")
        self.called.spans = inputs["spans"]
        self.called.batch = {name: value for name, value in inputs.items() if name not in others}
        if self.lists:
            counts = inputs["counts"]
            ends = accumulate(counts)
            documents = [[*range(end - count, end)] for count, end in zip(counts, ends, strict=True)]
            return self.loss([documents, documents], list(inputs["labels"].split(counts)))
        numbers = list(range(len(inputs["labels"])))
        return self.loss([numbers, numbers], inputs["labels"])

    def __init__(self, *args: Any, lists: bool, **more: Any) -> None:
        """lists: whether the loss takes a list of documents for each query."""
        super().__init__(*args, **more)
        self.lists = lists

    def loss_items(self, inputs: Any) -> torch.Tensor:
        """Documents; for losses of lists: queries, or pairs of documents that differ in relevance."""
        if not self.lists:
            return on_device(len(inputs["labels"]), inputs["labels"])
        if not isinstance(self.loss, LambdaLoss):  # RankNet's is one, too
            return on_device(len(inputs["counts"]), inputs["labels"])
        labels = _padded(inputs["labels"].float(), inputs["counts"])
        return (labels[:, :, None] > labels[:, None, :]).sum()

    def predictions_of(self, kept: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Scores [rows, most documents], padded with NaN."""
        return _padded(kept.view(-1), inputs["counts"])

    def targets_of(self, inputs: Mapping[str, Any]) -> Any:
        """(labels [rows, most documents], padded with NaN, numbers of the queries [rows])."""
        return _padded(inputs["labels"].float(), inputs["counts"]), inputs["queries"]


def _padded(values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    rows = values.split(counts)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=float("nan"))
