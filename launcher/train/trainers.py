"""Trainers that stop and resume at any step, save complete checkpoints, count tokens and read streams."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy
import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, TrainerCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from launcher.rows.class_names import IGNORED
from launcher.train.callbacks import EvaluationCut, Stopping
from launcher.train.checkpoint.pushing import Pusher
from launcher.train.checkpoint.resuming import (
    has_other_layout,
    load_weights,
    place_best,
    restore_callbacks,
    restore_state,
)
from launcher.train.checkpoint.saving import Saver, SaveSkipped
from launcher.train.data.host_counts import hand_over
from launcher.train.engines.engine import TrainEngine
from launcher.train.evaluation import EvaluationBatches, EvaluationLoader, LossSum
from launcher.train.memory_meter import Meter
from launcher.train.model.loss import adds_router_loss
from launcher.train.model.weights import check_missing, read_weights, weight_files
from launcher.train.status import status
from launcher.train.stopping import stop
from launcher.train.upstream.deepspeed_seams import put_back
from launcher.train.upstream.trainer_seams import (
    SeamTrainer,
    columns_removed,
    per_device_batch,
    replaced,
    save_state_dict,
)
from launcher.train.upstream.trl_seams import RowsArePrepared


class EndedBefore(Exception):
    """The evaluation that a stop skipped shows that early stopping ends the run there: no step follows."""


class PlannedTrainer(SeamTrainer):
    """Trainer for samples made by `launcher.train.data`, which can be stopped and resumed at any step."""

    streams = False
    """Whether the training rows are an endless stream, of which each process reads its own share."""
    reports_perplexity = False
    """Whether evaluations report exp(eval_loss)."""
    shared_by = 1
    """Ranks that train on the same rows."""
    evaluated_by = 1
    """Ranks that evaluate the same rows."""
    evaluated: Any = None
    """The loader of the evaluation that runs now, where its rows count once each."""
    rows_are_independent = True
    """Whether the loss is a mean over rows or target tokens: then each weighs the same in all micro-batches
    and ranks."""
    shifts_labels = False
    """Whether a token's label is the next one."""
    collate_eval: Any = None
    """Collator of evaluations; None: as in training."""
    stopping: Stopping | None = None
    """Set by a worker."""
    resumed: Path | None = None
    """The checkpoint that training continues from."""
    owes_evaluation = False
    """Whether the step that training resumes from should have been evaluated, and was not."""
    engine: TrainEngine | None = None
    """Set by a worker."""
    own_loss: Callable[[Any, Any, torch.Tensor], torch.Tensor] | None = None
    """The hook compute_loss: (outputs, labels, items) -> the sum of the items' losses over `items` (0-d)."""
    loss_is_own = False
    """Whether the loss is of `python:`, by that hook or by a Trainer's compute_loss."""
    own_optimizer: Callable[[Any, Any], Any] | None = None
    """The hook optimizer: (model, args) -> optimizer, or (optimizer, scheduler)."""
    meter: Meter | None = None
    """Measures evaluations separately from training."""
    has_signal = True
    """Whether the rows so far gave a gradient; false where nothing was there to learn."""
    largest_batch = 0
    """Tokens of the largest micro-batch so far, padding included; of encoder and decoder the mean."""

    data_collator: Any
    optimizer: Any
    _order: Any = None
    """The sampler or batch sampler whose order depends on the epoch."""
    _uncounted: Any = None
    """This rank's tokens that `num_input_tokens_seen` lacks: an int, or int64, 0-d, on the device."""
    _own_scheduler: Any = None
    """What the hook optimizer returned beside its optimizer."""
    _read = False
    """Whether a batch has been read."""
    _caught_up = False
    """Whether the first step has caught up on an evaluation that a stop skipped."""
    _losses: LossSum | None = None
    """Of the evaluation that runs now."""
    _rows_of_step = (0, 0)
    """Of an evaluation: rows of each rank, and rows of all ranks that count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # First of all callbacks: the others see the restored state.
        kwargs["callbacks"] = [_Resume(self), *(kwargs.get("callbacks") or ())]
        self._drawing: WeakSet[Any] = WeakSet()
        self._loaders: list[tuple[Any, EvaluationLoader]] = []  # whose workers live on
        super().__init__(*args, **kwargs)
        if adds_router_loss(self.model):
            self.model_accepts_loss_kwargs = False  # each micro-batch of each rank would add the whole of it
        self.saver = Saver(Path(self.args.output_dir), self.args.save_total_limit)
        self.pusher = Pusher(Path(self.args.output_dir).parent)
        # The Trainer would remove checkpoints by its own rule, even the last one at the end of training.
        self.args.save_total_limit = None
        # It would append new callbacks, built from the checkpoint's arguments.
        self.args.restore_callback_states_from_checkpoint = False

    # --- resuming ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.resumed = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def read_weights(self, checkpoint: Path) -> bool:
        """Load a complete model's weights; False for an adapter, or an engine with its own states."""
        elsewhere = self.is_deepspeed_enabled or self.is_fsdp_enabled or hasattr(self.model, "peft_config")
        if elsewhere or not weight_files(checkpoint):
            return False
        missing, unexpected = read_weights(self.model, checkpoint)
        check_missing(self.model, missing, checkpoint)
        if unexpected:
            print(f"WARNING: {checkpoint} has weights that the model does not have: {unexpected}")
        return True

    def read_best(self, checkpoint: Path) -> bool:
        if self.stopping is not None and self.stopping.stopped:
            return True  # a stopped run will be resumed from the last weights, not from the best
        if self.is_deepspeed_enabled and self._states_of_others(checkpoint):
            load_weights(self.model, checkpoint)
            return True
        return self.read_weights(checkpoint)

    def _states_of_others(self, checkpoint: Path) -> bool:
        """Whether DeepSpeed cannot load a checkpoint's states in this run; every rank must call it."""
        engine = self.deepspeed
        return engine.load_universal_checkpoint() or has_other_layout(
            checkpoint, engine.zero_optimization_stage()
        )

    def _catch_up(self) -> None:
        """Run the evaluation that a stop skipped, with the weights and random states of its step.

        In the first step: the Trainer reads the random states when it has the first batches. Raises
        EndedBefore if early stopping ends the run with it.
        """
        stop.at_once = True  # the checkpoint that the run resumes from has everything
        self.evaluate_after_step()
        if self.resumed is not None:
            place_best(self, self.resumed)
        if self.control.should_training_stop:
            raise EndedBefore
        stop.at_once = False

    # --- steps ------------------------------------------------------------------------------------

    def run_epoch(self, epoch: int, proceed: Callable[[], None]) -> None:
        ended_before = self.control.should_training_stop and self.state.global_step
        if not ended_before:  # by a callback when training began
            # accelerate and the Trainer look for samplers at fixed depths; one that skips batches is deeper.
            if hasattr(self._order, "set_epoch"):
                self._order.set_epoch(epoch)
            with contextlib.suppress(EndedBefore):
                proceed()
        if self.control.should_training_stop:
            status().enter("finish")  # load the best weights, wait for uploads

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.streams:  # whose loader leaves batches on the host
            inputs = send_to_device(inputs, self.args.device, non_blocking=self.args.dataloader_pin_memory)
        hand_over(inputs)
        if "input_ids" in inputs:
            tokens = inputs["input_ids"].numel()
            if "labels" in inputs and getattr(self.model_config, "is_encoder_decoder", False):
                tokens = -(-(tokens + inputs["labels"].numel()) // 2)
            self.largest_batch = max(self.largest_batch, tokens)
        if not self._caught_up:
            self._caught_up = True
            if self.owes_evaluation:
                self._catch_up()
        return super().training_step(model, inputs, *args, **kwargs)

    @property
    def model_config(self) -> Any:
        """The configuration of the model; None of a module without one."""
        return getattr(self.model, "config", None)

    @property
    def loss_is_scaled_for_ga(self) -> Any:
        """Whether micro-batches already have their share of the step's loss."""
        return True if self._weighs or self.own_loss is not None else super().loss_is_scaled_for_ga

    @property
    def _weighs(self) -> bool:
        """Whether a micro-batch's loss is a mean, to be weighed by what it is a mean of."""
        return self.rows_are_independent and not self.model_accepts_loss_kwargs and self.own_loss is None

    def _items_of_step(self, batches: Sequence[Any]) -> Any:
        """What the loss of a step is a mean of, on all ranks where they share it (0-d)."""
        own = torch.stack([self.loss_items(batch) for batch in batches]).sum().to(self.args.device)
        if not self.args.average_tokens_across_devices:
            return own
        return self.accelerator.gather(own).sum() / self.shared_by

    def loss_items(self, inputs: Any) -> torch.Tensor:
        """What the loss of a batch is a mean of: its target tokens, or its rows (0-d, int64)."""
        labels = inputs.get("labels")
        if labels is None or labels.dim() < 2 or labels.is_floating_point():
            some = next(value for value in inputs.values() if isinstance(value, torch.Tensor))
            return on_device(len(some if labels is None else labels), some)
        if "shift_labels" in inputs:
            labels = inputs["shift_labels"]
        elif self.shifts_labels:
            labels = labels[..., 1:]
        return (labels != IGNORED).sum()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A micro-batch's share of the step's loss, in which each row or target token weighs the same.

        transformers takes the mean of the means of micro-batches and of ranks, unless a model's forward takes
        the number of the step's targets.
        """
        if self.own_loss is not None:
            return self._loss_of_hook(model, inputs, return_outputs, num_items_in_batch)
        if self._losses is not None:  # of an evaluation, in which `prediction_step` weighs the batches
            return self.mean_loss(model, inputs, return_outputs, None)
        if not self._weighs or num_items_in_batch is None:
            return self.mean_loss(model, inputs, return_outputs, num_items_in_batch)
        share = self.loss_items(inputs).to(num_items_in_batch.device) / num_items_in_batch
        if self.args.average_tokens_across_devices:  # gradients are the mean of those of all ranks
            share = share * (self.accelerator.num_processes / self.shared_by)
        found = self.mean_loss(model, inputs, return_outputs, None)
        return (found[0] * share, found[1]) if return_outputs else found * share

    def _loss_of_hook(self, model: Any, inputs: Any, return_outputs: bool, items_of_step: Any) -> Any:
        """The share of a micro-batch as compute_loss has it; in an evaluation the mean of the batch.

        transformers gives its function None in an evaluation, and hands the model the count too.
        """
        assert self.own_loss is not None
        trains = model.training and items_of_step is not None
        items = items_of_step if trains else self.loss_items(inputs)
        outputs = model(**self.without_labels(inputs))
        loss = self.own_loss(outputs, inputs.get("labels"), items)
        if trains and self.args.average_tokens_across_devices:  # gradients are the mean of all ranks
            loss = loss * (self.accelerator.num_processes / self.shared_by)
        return (loss, outputs) if return_outputs else loss

    def without_labels(self, inputs: Any) -> dict[str, Any]:
        """What a model gets of a batch that computes no loss of its own."""
        return {name: value for name, value in inputs.items() if name != "labels"}

    def mean_loss(self, model: Any, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        """The loss of a micro-batch, of a step's count where the model's forward takes one."""
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    def after_step(self, proceed: Callable[[], None]) -> None:
        before = _random_states() if self.control.should_evaluate else None
        try:
            try:
                proceed()
            except EvaluationCut:
                assert self.stopping is not None, "nothing else interrupts an evaluation"
                _set_random_states(before)  # the resumed run repeats the evaluation
                self.stopping.end(self.control)
                proceed()
        except SaveSkipped as skipped:
            # Saving comes last; on_save is not called for a checkpoint that does not exist.
            self.control.should_save = False
            if self.stopping is not None:
                self.stopping.record(self.state.global_step, skipped)

    def save_checkpoint(self, write: Callable[[Path], None]) -> None:
        """The Trainer's own save, written aside, and moved to its place when it is complete."""
        self._gather_counts()
        with status().within("save"):
            final = self.saver.save(self, write)
        if self.is_deepspeed_enabled:
            put_back(self.deepspeed)
        if self.args.push_to_hub and not (self.stopping is not None and self.stopping.stopped):
            self.pusher.checkpoint(self, final)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's own save, of the weights that the engine names where it would copy others."""
        weights = None if self.engine is None else self.engine.weights_to_save(self)
        if weights is None:
            super().save_model(output_dir, _internal_call)
        else:
            save_state_dict(self, Path(output_dir or self.args.output_dir), weights)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `save_model` calls this before the result is in its place; `pusher` pushes it."""

    # --- batches ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        if self.streams:
            return self._stream_loader()
        loader = self._with_own_draws(super().get_train_dataloader())
        batches: Any = getattr(loader, "batch_sampler", None)
        batches = getattr(batches, "batch_sampler", batches)  # inside accelerate's shard for a rank
        if isinstance(getattr(batches, "sampler", None), LengthGroupedSampler):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            batches.sampler = ByLength(batches.sampler, seed)
        if isinstance(batches, BatchRebalanceSampler):
            self._order = batches
        elif isinstance(getattr(batches, "sampler", None), ByLength):
            self._order = batches.sampler
        return loader

    def _stream_loader(self) -> DataLoader[Any]:
        """Without accelerate, which would split each process's share again."""
        return DataLoader(
            self.train_dataset,
            batch_size=per_device_batch(self),
            collate_fn=self._with_status(columns_removed(self, self.data_collator)),
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        return self._evaluation_loader(rows) or self._upstream_loader(
            super().get_eval_dataloader, eval_dataset
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._evaluation_loader(test_dataset) or self._upstream_loader(
            super().get_test_dataloader, test_dataset
        )

    def _upstream_loader(self, make: Callable[[Any], Any], dataset: Any) -> Any:
        with replaced(self, data_collator=self.collate_eval or self.data_collator):
            return self._with_own_draws(make(dataset))

    def _evaluation_loader(self, dataset: Any) -> Any:
        """The loader of an evaluation whose rows count once each; None where upstream's has to do."""
        if dataset is None or not self.rows_are_independent:
            return None
        found = next((loader for known, loader in self._loaders if known is dataset), None)
        if found is not None:
            return found
        args, ranks, rank = self.args, self.accelerator.num_processes, self.accelerator.process_index
        order, copies = range(len(dataset)), self.evaluated_by
        loader = EvaluationLoader(
            dataset,
            device=args.device,
            batch_sampler=EvaluationBatches(order, args.eval_batch_size, ranks // copies, rank // copies),
            collate_fn=columns_removed(self, self.collate_eval or self.data_collator),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
            _non_blocking=self.accelerator.non_blocking,
        )
        if args.dataloader_persistent_workers:
            self._loaders.append((dataset, loader))
        return self._with_own_draws(loader)

    def _with_own_draws(self, loader: Any) -> Any:
        """Set a generator for the seeds of persistent workers.

        Only the first pass draws a seed, in a resumed run at another point: from the global generator that
        would change the next epoch's dropout.
        """
        base = getattr(loader, "base_dataloader", loader)  # accelerate's passes are the base's
        if self.args.dataloader_persistent_workers and base not in self._drawing:
            base.generator = torch.Generator().manual_seed(self.args.seed)
            self._drawing.add(base)
        return loader

    def _with_status(self, collate: Any) -> Any:
        """A resumed stream reads its earlier batches again, perhaps for hours: each one is progress."""
        if self.args.dataloader_num_workers:
            return collate  # called in processes without a status

        def collate_and_report(samples: Any) -> Any:
            if not self._caught_up:
                status().moved()
            return collate(samples)

        return collate_and_report

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        skips = self.streams and self.state.global_step > 0 and not self._read
        self._read = True
        # The first batch of a resumed stream comes after all trained ones.
        with status().within("skip") if skips else contextlib.nullcontext():
            batches, items = super().get_batch_samples(*args, **kwargs)
        for batch in batches:
            self._watch(batch)
        counts = (self._weighs or self.own_loss is not None) and batches
        return batches, self._items_of_step(batches) if counts else items

    def _watch(self, batch: Any) -> None:
        if self.meter is not None:
            self.meter.comes(batch)

    # --- optimizer --------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer of the hook, with its scheduler where it made one, else upstream's."""
        if self.own_optimizer is None or self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        made = self.own_optimizer(self.model, self.args)
        self.optimizer, self._own_scheduler = made if isinstance(made, tuple) else (made, None)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """That of the hook; DeepSpeed's setup forgets what a Trainer has."""
        if self._own_scheduler is not None:
            self.lr_scheduler = self._own_scheduler
        return super().create_scheduler(*args, **kwargs)

    # --- evaluations ------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with status().within("evaluate"):
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                status().show(None)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._watch(inputs)
        if self._losses is None:
            return self.predicted(model, inputs, *args, **kwargs)
        items, self._rows_of_step = self.loss_items(inputs), next(self._steps)
        loss, predictions, targets = self.predicted(model, inputs, *args, **kwargs)
        if loss is not None:
            self._losses.add(loss, items.to(loss.device) * self._counts_here(*self._rows_of_step))
        return loss, predictions, targets

    def _counts_here(self, rows: int, counted: int) -> bool:
        """Whether this rank's rows of a step of an evaluation count; else they are those of another rank."""
        return bool(self.accelerator.process_index // self.evaluated_by * rows < counted)

    def batches_of_evaluation(self) -> Iterator[tuple[Any, bool]]:
        """This rank's batches of the evaluation that runs now, once more, and whether their rows count."""
        assert self.evaluated is not None
        batches = self.evaluated.batch_sampler
        for numbers, step in zip(batches, batches.steps(), strict=True):
            batch = self.evaluated.collate_fn([self.evaluated.dataset[number] for number in numbers])
            status().moved()
            yield send_to_device(batch, self.args.device), self._counts_here(*step)

    def predicted(self, *args: Any, **kwargs: Any) -> Any:
        """(loss, predictions, targets) of a batch of an evaluation."""
        return super().prediction_step(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        own = isinstance(dataloader, EvaluationLoader)
        if own:
            self._losses, self._steps = LossSum(), iter(dataloader.batch_sampler.steps())
            self.evaluated = dataloader
            self.gather_function = self._gather_counted
        try:
            with contextlib.nullcontext() if self.meter is None else self.meter.phase("eval"):
                output = super().evaluation_loop(dataloader, *args, **kwargs)
            prefix = kwargs.get("metric_key_prefix", "eval")
            if own and f"{prefix}_loss" in output.metrics:
                output.metrics[f"{prefix}_loss"] = self._whole_loss()
        finally:
            self._losses = self.evaluated = None
            self.gather_function = self.accelerator.gather_for_metrics
        loss = output.metrics.get(f"{prefix}_loss")
        if self.reports_perplexity and loss is not None:
            output.metrics[f"{prefix}_perplexity"] = perplexity(loss)
        return output

    def _whole_loss(self) -> float:
        """The loss of all rows of the evaluation that runs now, of all ranks."""
        assert self._losses is not None
        both = self._losses.total()
        if self.accelerator.num_processes > 1:
            both = self.accelerator.reduce(both.to(self.args.device))
        return float(both[0] / both[1])

    def _gather_counted(self, found: Any) -> Any:
        """Results [rows, ...] of all ranks, without those of repeated rows and of the copies of a model."""
        rows, counted = self._rows_of_step

        def cut(gathered: Any) -> Any:
            if len(gathered) != rows * self.accelerator.num_processes:
                return gathered  # the loss of a batch, repeated by upstream
            by_rank = gathered.reshape(-1, rows, *gathered.shape[1:])
            return by_rank[:: self.evaluated_by].flatten(0, 1)[:counted]

        return recursively_apply(cut, self.accelerator.gather(found))

    # --- tokens -----------------------------------------------------------------------------------

    def count_tokens(self, inputs: Any) -> None:
        """Count on the device: upstream waits at each micro-batch for the device and for all ranks."""
        if self.args.include_num_input_tokens_seen != "no":
            found = real_tokens(inputs, getattr(self.processing_class, "pad_token_id", None))
            self._uncounted = found if self._uncounted is None else self._uncounted + found

    def _gather_counts(self) -> None:
        """Bring `num_input_tokens_seen` up to date, each token once: ranks may read the same rows.

        Every rank must call it at the same place.
        """
        if self._uncounted is None:
            return
        counts = torch.as_tensor(self._uncounted, device=self.args.device, dtype=torch.int64)
        self._uncounted = None
        total = int(self.accelerator.gather(counts).sum().item())
        self.state.num_input_tokens_seen += total // self.shared_by

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._gather_counts()
        super().log(*args, **kwargs)


class _Resume(TrainerCallback):
    """Restores what upstream does not take from a checkpoint."""

    def __init__(self, trainer: PlannedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        if trainer.resumed is None:
            return
        restore_callbacks([*trainer.callback_handler.callbacks, control], state)
        control.should_training_stop = False  # it is set in the checkpoint of a stop
        restore_state(trainer, trainer.resumed, state.max_steps)
        if state.global_step:
            args.eval_on_start = False  # done when the run began; early stopping would count it again


class ByLength(LengthGroupedSampler):
    """Upstream's, with an order that depends only on the seed and the epoch.

    Upstream draws from the global generator: a run resumed within an epoch would shuffle again, and read some
    rows twice and others never.
    """

    def __init__(self, grouped: LengthGroupedSampler, seed: int) -> None:
        super().__init__(grouped.batch_size, lengths=grouped.lengths, generator=torch.Generator())
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self._seed + self._epoch)
        found: Iterator[int] = super().__iter__()
        return found


class PlannedSeq2SeqTrainer(PlannedTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer whose decoder reads what it should have written so far, also with smoothed labels."""

    def mean_loss(self, model: Any, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        # Upstream takes the labels out of the batch then.
        if self.label_smoother is not None:
            inputs = {**self.without_labels(inputs), "labels": inputs["labels"]}
        return super().mean_loss(model, inputs, return_outputs, num_items_in_batch)

    def predicted(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """With the loss of `python:`; upstream takes the model's own beside generated text."""
        loss, generated, targets = super().predicted(model, inputs, *args, **kwargs)
        writes = self.args.predict_with_generate and generated is not None
        if loss is None or not (self.loss_is_own and writes):
            return loss, generated, targets
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), generated, targets

    def without_labels(self, inputs: Any) -> dict[str, Any]:
        """With what the decoder reads, which the model would make of the labels."""
        found = super().without_labels(inputs)
        if "decoder_input_ids" in found or "labels" not in inputs:
            return found
        base = self.accelerator.unwrap_model(self.model)
        read = base.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
        return {**found, "decoder_input_ids": read}


class PreparedTrainer(RowsArePrepared, PlannedTrainer):
    """Precedes a trainer of trl in the bases: rows are samples already; trained weights keep their dtype."""

    def __init__(self, model: Any, **more: Any) -> None:
        # trl turns trainable weights over a quantised model into bfloat16.
        quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
        before = _trainable_copies(model) if quantised else {}
        super().__init__(model=model, **more)
        # The loss is a mean over a micro-batch, whatever the model's forward takes.
        self.model_accepts_loss_kwargs = False
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.data = before[name].to(parameter.device)

    def predicted(self, *args: Any, **kwargs: Any) -> Any:
        if self._losses is None:
            return super().predicted(*args, **kwargs)
        (rows, counted), gather = self._rows_of_step, self.accelerator.gather
        ranks = self.accelerator.num_processes
        if counted * self.evaluated_by == rows * ranks:
            return super().predicted(*args, **kwargs)

        def gather_counted(found: Any) -> Any:
            """Values for trl's metrics, without those of ranks that have the last row once more."""
            own = counted * self.evaluated_by
            return recursively_apply(lambda each: each[: len(each) * own // ranks], gather(found))

        with replaced(self.accelerator, gather=gather_counted):
            return super().predicted(*args, **kwargs)


def _trainable_copies(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _random_states() -> tuple[Any, ...]:
    """The states of all random generators of a rank, as a checkpoint holds them."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def _set_random_states(states: tuple[Any, ...] | None) -> None:
    if states is None:
        return
    own, of_numpy, of_torch, cuda = states
    random.setstate(own)
    numpy.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def on_device(count: int, like: torch.Tensor) -> torch.Tensor:
    """A count of the host (int64, 0-d) beside a tensor: filled in there, as a copy would be waited for."""
    return torch.full((), count, dtype=torch.int64, device=like.device)


def real_tokens(inputs: Any, pad_token_id: int | None) -> Any:
    """Tokens of a batch without padding: int64, 0-d on the batch's device, or an int."""
    ids = inputs["input_ids"]
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    if "position_ids" in inputs:
        return packed_tokens(inputs, pad_token_id)
    return ids.numel() if pad_token_id is None else (ids != pad_token_id).sum()


def packed_tokens(inputs: Any, pad_token_id: int | None) -> torch.Tensor:
    """Tokens of a batch of packs (int64, 0-d), without padding.

    A padded tail is a document of pad ids alone. Pad ids elsewhere are tokens: the pad token may also end
    every text.
    """
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    if pad_token_id is None:
        return torch.tensor(ids.numel())
    width = ids.shape[1]
    index = torch.arange(width, device=ids.device).expand_as(ids)
    start = index.masked_fill(positions != 0, -1).amax(dim=1, keepdim=True)
    is_tail = ((ids == pad_token_id) | (index < start)).all(dim=1)
    tails = (width - start.squeeze(1)) * is_tail
    return (ids.numel() - tails.sum()).to(torch.int64)


def perplexity(loss: float) -> float:
    """exp(loss), infinite if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
