"""Trainers that also count packed tokens, read streams, and report perplexity."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from launcher.train.agreeing import Stoppable
from launcher.train.best_weights import load_weights, written_otherwise
from launcher.train.going_on import go_on, place_best, restore_callbacks
from launcher.train.memory_meter import Meter
from launcher.train.pushing import Pusher
from launcher.train.saving import Saver, SaveSkipped
from launcher.train.sharing import put_back
from launcher.train.status import status
from launcher.train.weight_names import check_missing, read_weights, weight_files


class PlannedTrainer(Stoppable):
    """Trainer for samples made by `launcher.train.data`."""

    streams = False
    """Whether the training rows are an endless stream, of which each process reads a share of its own."""
    reports_perplexity = False
    """Whether evaluations report exp(eval_loss)."""

    shared_by = 1
    """Ranks that train on the same rows."""
    evaluated_by = 1
    """Ranks that evaluate the same rows, each all of them."""

    data_collator: Any
    collate_eval: Any = None
    """Samples to a batch of an evaluation; None: as in training."""

    _sampler: Any = None
    _uncounted: Any = None
    """This rank's tokens that `num_input_tokens_seen` lacks: an int, or int64, 0-d, on the device."""
    resumed: Path | None = None
    """The checkpoint that training goes on from."""
    meter: Meter | None = None
    """Measures evaluations apart from training."""
    largest_batch = 0
    """Tokens of the largest micro-batch so far, padding included; with a decoder, the mean of both sides."""
    _read = False
    """Whether a batch has been read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saver = Saver(Path(self.args.output_dir), self.args.save_total_limit)
        self.pusher = Pusher(Path(self.args.output_dir).parent)
        # The Trainer would remove checkpoints by its own rule, at the end of training even the last one.
        self.args.save_total_limit = None

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> Any:
        found = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        if checkpoint is not None:
            self.resumed = Path(checkpoint)
            go_on(self, self.resumed, max_steps)
        return found

    def _load_callback_state(self) -> None:
        restore_callbacks([*self.callback_handler.callbacks, self.control], self.state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._read_by_name(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if self.is_deepspeed_enabled and self._states_of_others(best):
            load_weights(self.model, best)
        elif not self._read_by_name(best):
            super()._load_best_model()

    def _states_of_others(self, checkpoint: Path) -> bool:
        """Whether DeepSpeed could not read a checkpoint's states in this run; every rank must call it."""
        engine = self.deepspeed
        return engine.load_universal_checkpoint() or written_otherwise(
            checkpoint, engine.zero_optimization_stage()
        )

    def _read_by_name(self, checkpoint: Path) -> bool:
        """Read a whole model's weights; False where they are an adapter, or the engine has its own states."""
        cut = self.is_deepspeed_enabled or self.is_fsdp_enabled or hasattr(self.model, "peft_config")
        if cut or not weight_files(checkpoint):
            return False
        missing, unexpected = read_weights(self.model, checkpoint)
        check_missing(self.model, missing, checkpoint)
        super()._issue_warnings_after_load(_IncompatibleKeys([], unexpected))
        return True

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Upstream only warns of weights that were not there."""
        check_missing(self.model, load_result.missing_keys, self.resumed)
        super()._issue_warnings_after_load(load_result)

    def _place_best(self) -> None:
        if self.resumed is not None:
            place_best(self, self.resumed)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The Trainer's own save, written aside, and moved to its place when it is whole."""
        self._count_tokens()
        with status().within("save"):
            final = self.saver.save(self, lambda: super(PlannedTrainer, self)._save_checkpoint(model, trial))
        if self.is_deepspeed_enabled:
            put_back(self.deepspeed)
        if self.args.push_to_hub and not (self.stopping is not None and self.stopping.stopped):
            self.pusher.checkpoint(self, final)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Saving is the last thing that this does; no callback hears of a checkpoint that there is not."""
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except SaveSkipped as skipped:
            self.control.should_save = False
            if self.stopping is not None:
                self.stopping.record(self.state.global_step, skipped)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.saver.aside) if self.saver.writing else str(super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: it is not whole yet. `pusher` sends what is."""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        """Nothing either: what calls this is `save_model`, before the result is in its place."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = ByLength(sampler, seed)
        self._sampler = sampler
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """accelerate and the Trainer look for samplers at known depths; one that skips batches is deeper."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """A stream goes past accelerate, which would deal each process's share out once more."""
        if not self.streams:
            return super().get_train_dataloader()
        return DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self._telling(
                self._get_collator_with_removed_columns(self.data_collator, description="training")
            ),
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        in_training = self.data_collator
        if self.collate_eval is not None and not kwargs.get("is_training"):
            self.data_collator = self.collate_eval
        try:
            loader = super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = in_training
        if self.args.dataloader_persistent_workers:
            # Its first pass alone draws a seed for the workers, in a run that goes on at another place: from
            # the generator of everything, what is dropped in the next epoch would be something else.
            own = torch.Generator().manual_seed(self.args.seed)
            getattr(loader, "base_dataloader", loader).generator = own  # accelerate's passes are the base's
        return loader

    def _telling(self, collate: Any) -> Any:
        """A resumed stream reads again what it gave, perhaps for hours: each batch of that is progress."""
        if self.args.dataloader_num_workers:
            return collate  # it is called in processes that have no status

        def told(samples: Any) -> Any:
            if not self._looked_back:
                status().moved()
            return collate(samples)

        return told

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "input_ids" in inputs:
            tokens = inputs["input_ids"].numel()
            if getattr(self.model.config, "is_encoder_decoder", False):
                tokens = -(-(tokens + inputs["labels"].numel()) // 2)
            self.largest_batch = max(self.largest_batch, tokens)
        return super().training_step(model, inputs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        skips = self.streams and self.state.global_step > 0 and not self._read
        self._read = True
        # The first batch of a stream that goes on comes behind all that were trained.
        with status().within("skip") if skips else contextlib.nullcontext():
            batches, items = super().get_batch_samples(*args, **kwargs)
        for batch in batches:
            self._watch(batch)
        return batches, items

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._watch(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _watch(self, batch: Any) -> None:
        if self.meter is not None:
            self.meter.comes(batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.evaluated_by > 1:
            self.gather_function = self._gather_once
        with contextlib.nullcontext() if self.meter is None else self.meter.phase("eval"):
            output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        loss = output.metrics.get(f"{prefix}_loss")
        if self.reports_perplexity and loss is not None:
            output.metrics[f"{prefix}_perplexity"] = perplexity(loss)
        return output

    def _gather_once(self, found: Any) -> Any:
        """Results [rows, ...] of all copies, without those of rows that fill the last batch of the copies up.

        Upstream's would take each rank's for those of other rows, and leave out real ones at the end.
        """
        gathered = self.accelerator.gather(found)
        by_rank = gathered.reshape(-1, *found.shape)
        own = by_rank[:: self.evaluated_by].flatten(0, 1)
        state = self.accelerator.gradient_state
        return own[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else own

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Noted where the tokens are: upstream waits at each micro-batch for the device and for all ranks."""
        if self.args.include_num_input_tokens_seen != "no":
            found = real_tokens(inputs, getattr(self.processing_class, "pad_token_id", None))
            if self.args.device.type == "cpu":
                found = int(found)  # nothing is waited for there
            self._uncounted = found if self._uncounted is None else self._uncounted + found

    def _count_tokens(self) -> None:
        """Bring `num_input_tokens_seen` up to date, each token once: ranks may read the same rows.

        Every rank must call it at the same place.
        """
        if self._uncounted is None:
            return
        noted = torch.as_tensor(self._uncounted, device=self.args.device, dtype=torch.int64)
        self._uncounted = None
        total = int(self.accelerator.gather(noted).sum().item())
        self.state.num_input_tokens_seen += total // self.shared_by

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._count_tokens()
        super().log(*args, **kwargs)


class ByLength(LengthGroupedSampler):
    """Upstream's, whose order depends on the seed and the epoch alone.

    That one draws from the generator of everything: a run that goes on within an epoch would shuffle anew,
    and read some rows twice and others never.
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
    """Seq2SeqTrainer that leaves out of its metrics the rows repeated to fill the last batch."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)


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

    A padded tail is a document of its own that holds pad ids alone. Pad ids elsewhere are tokens: the pad
    token may also end every text.
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
    """exp(loss), infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
