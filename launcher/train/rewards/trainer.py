"""trl's GRPOTrainer with our rewards: it resumes within a generation and counts what the rewards were.

Importing this module imports trl. MachineError when that fails.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, RunFailed
from launcher.files.checkpoint import read_manifest
from launcher.tasks.grpo import GRPO, KEY
from launcher.train.job import Job, rank
from launcher.train.rewards.calls import for_trl, load_rewards
from launcher.train.rewards.rollouts import FILE, KEPT, Rollouts, samples, show_first
from launcher.train.status import status
from launcher.train.tasks.pairs import importing_trl
from launcher.train.tasks.reference import ReferenceTrainer, make_reference
from launcher.train.upstream.trl_seams import RolloutSeams, reference_from

with importing_trl(GRPO.name):
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import RepeatSampler

__all__ = ["GRPOConfig", "make_trainer"]

STATE = "rollouts_{}.pt"
"""In a checkpoint, for each rank: where it is within a generation."""


class PreparedGrpoTrainer(RolloutSeams, ReferenceTrainer, GRPOTrainer):
    """GRPOTrainer that resumes within a generation and counts what the rewards were."""

    def __init__(self, model: Any, *, run_dir: Path, **more: Any) -> None:
        self.rollouts = Rollouts()
        self._run_dir, self._begun = run_dir, 0.0
        self._counted: Any = None
        self._made_again = False
        """Whether the next generation takes the place of one that was counted."""
        super().__init__(model=model, **more)

    # --- resuming ---------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            self._continue_rollouts(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _continue_rollouts(self, checkpoint: Path) -> None:
        """Take up the generation of a checkpoint; other ranks than it had generate its rest again.

        RunFailed, on every rank, where a rank's file is missing.
        """
        manifest, ranks = read_manifest(checkpoint), self.accelerator.num_processes
        written_by = ranks if manifest is None else manifest.world_size
        files = [checkpoint / STATE.format(number) for number in range(written_by)]
        missing = next((file.name for file in files if not file.is_file()), None)
        if missing is not None:
            message = f"it has no {missing}, so the place within its generation is unknown"
            hint = "resume from another checkpoint, or start a new run from its weights"
            raise RunFailed(Problem("no-rollout-state", message, file=str(checkpoint), hint=hint))
        file = files[min(rank(), written_by - 1)]  # counts and steps are the same in all of them
        device = self.args.device
        place = "cpu" if device.type == "cpu" else device  # accelerate names a rank's CPU cpu:0
        state = torch.load(file, map_location=place, weights_only=True)
        self.rollouts = Rollouts(**state["rollouts"])
        is_there = self.set_rollout_state(state)
        self._counted, self._made_again = self.buffered, not is_there
        if not is_there and rank() == 0:
            print(
                f"{checkpoint} is within a generation of {written_by} ranks with micro-batches of "
                f"{state['micro']}, now there are {ranks} with {self.args.per_device_train_batch_size}: "
                "the rest of it is generated again",
                flush=True,
            )

    def save_checkpoint(self, write: Any) -> None:
        def with_state(folder: Path) -> None:
            write(folder)
            state = {**self.rollout_state(), "rollouts": self.rollouts.saved()}
            torch.save(state, folder / f"checkpoint-{self.state.global_step}" / STATE.format(rank()))

        super().save_checkpoint(with_state)

    # --- steps ------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        batches: Any = getattr(loader, "batch_sampler", None)
        batches = getattr(batches, "batch_sampler", batches)  # inside accelerate's shard for a rank
        if isinstance(getattr(batches, "sampler", None), RepeatSampler):
            self._order = batches.sampler = ByEpoch(batches.sampler)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begun = time.monotonic()
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            self.largest_batch = max(self.largest_batch, tokens)
        if self.model.training and self.buffered is not self._counted:
            seconds = time.monotonic() - self._begun
            self.rollouts.seconds += seconds
            status().takes_at_least(seconds)
            self._count()
        if self.meter is not None:
            self.meter.comes(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _count(self) -> None:
        """Count the rewards of a new generation, and show those of the first."""
        self._counted = self.buffered
        if self._made_again:
            self._made_again = False
            return
        own = sum(len(batch["completion_ids"]) for batch in self.buffered or ())
        count, log = own * self.accelerator.num_processes, self.rollout_log
        rewards = {name: list(values)[-count:] for name, values in log["rewards"].items()}
        first = self.rollouts.generations == 0
        step = self.state.global_step
        quiet = self.rollouts.add(rewards, list(log["advantages"])[-count:], self.num_generations, step)
        if quiet and rank() == 0:
            print(f"WARNING: step {step}: {quiet}", flush=True)
        weights = self.reward_weights.tolist()
        totals = [
            sum(w * v for w, v in zip(weights, values, strict=True) if v == v)
            for values in zip(*rewards.values(), strict=True)
        ]
        self.rollouts.mean(sum(totals) / len(totals))
        if first and rank() == 0:
            show_first(self._run_dir, samples(log, min(count, KEPT), self.state.global_step + 1))
            for warning in self.rollouts.warnings:
                print(f"WARNING: first step: {warning}", flush=True)

    def _watch(self, batch: Any) -> None:
        """Nothing: batches are rows, whose tensors `compute_loss` has."""

    def count_tokens(self, inputs: Any) -> None:
        """Nothing: trl counts prompts and completions as it generates them."""

    @property
    def has_signal(self) -> bool:  # type: ignore[override]
        """Without an advantage that differs from 0, the gradient is 0 in all weights."""
        return self.rollouts.groups > self.rollouts.groups_without_signal

    @property
    def without_signal(self) -> Problem:
        """The end of a run in which `has_signal` stayed false."""
        message = "in no step did the rewards of a prompt's completions differ: nothing was learned"
        hint = f"{self._run_dir / FILE} has the first completions with their rewards: use easier prompts, a "
        hint += "reward with more than two values, or more `generation.num_generations`"
        return Problem("no-signal", message, path=KEY, hint=hint)

    @property
    def notes(self) -> dict[str, Any]:
        """`rollouts` of result.json."""
        return {"rollouts": self.rollouts.to_json()}


class ByEpoch(RepeatSampler):
    """trl's sampler with an order that depends only on the seed and the epoch: the one that trl would draw.

    trl's generator goes on from epoch to epoch: a run resumed in a later one would begin with the first.
    """

    def __init__(self, sampler: Any) -> None:
        self.__dict__.update(sampler.__dict__)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self._epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def make_trainer(job: Job, model: Any, processing: Any, common: dict[str, Any]) -> Any:
    """The Trainer of a plan. common: arguments of every Trainer; trl has its own collator and metrics."""
    theirs = ("data_collator", "compute_metrics")
    taken = {name: value for name, value in common.items() if name not in theirs}
    functions = [for_trl(reward) for reward in load_rewards(job.reward)]
    keep = job.adapter.path is not None
    with reference_from(GRPOTrainer, lambda: make_reference(job, common["args"], model, processing)):
        return PreparedGrpoTrainer(
            **taken, reward_funcs=functions, run_dir=job.run_dir, keep_initial_adapter=keep
        )
