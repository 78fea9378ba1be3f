"""Whether a plan can resume from a checkpoint of another plan. Pure.

What each setting says for itself (its `Key`, else RESUMES), and what single settings cannot tell: whether the
engine reads the files, the number of ranks, the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.engines import engine_of
from launcher.engines.deepspeed import ADAM
from launcher.engines.engine import RANKS, counted
from launcher.errors import Problem
from launcher.plan.plan import Plan
from launcher.plan.settings import CHOSEN_BEST, FINISHED, LEARNED, MINIMISED, REWARDED, declared_keys
from launcher.plan.stored import StoredPlan
from launcher.recipe.data_paths import is_file
from launcher.recipe.keys import DERIVED, FIX, OF_START, PLACE, REPORTED, ROUNDED, Resume
from launcher.tasks import TASKS

AnyPlan = Plan | StoredPlan

_WEIGHTS = "start a new run from these weights: adapter.path, or model.name_or_path, names the folder"


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that a checkpoint and a plan do not share."""

    setting: str
    old: object
    new: object
    refused: bool
    reason: str
    by: str = ""
    """What sets the new value: `recipes/x.yaml:12`, `--set`."""
    fix: str = FIX

    def problem(self) -> Problem:
        """The refusal, at its line of the recipe where there is one."""
        file, _, line = self.by.rpartition(":")
        at_line = line.isdigit()
        return Problem(
            "resume-differs",
            f"the checkpoint was made with {self.old!r}, the plan now has {self.new!r}: {self.reason}",
            file=file if at_line else None,
            line=int(line) if at_line else None,
            path=self.setting,
            hint=self.fix,
        )

    def line(self) -> str:
        """The message of a difference that is accepted."""
        return f"{self.setting}: {self.old!r} -> {self.new!r}: {self.reason}"


_LOSS = tuple(f"trainer.{name}" for task in TASKS for name in task.loss_arguments)
_PLACE = Resume("refuse", PLACE)
_SAMPLED = Resume("note", "completions are sampled otherwise from here on")
_SCHEDULE = Resume("refuse", "the schedule's state would continue on another curve")

RESUMES: tuple[tuple[tuple[str, ...], Resume], ...] = (
    # length, intervals, reports
    (("trainer.max_steps", "trainer.num_train_epochs"),
     Resume("note", "a schedule that ends with the run has another end: the learning rate jumps here")),
    (("trainer.save_only_model",),
     Resume("free", "the next checkpoints differ, not the one that is read")),
    (("trainer.generation_kwargs",), _SAMPLED),
    (("trainer.logging_*", "trainer.save_*", "trainer.eval_*", "trainer.report_to", "trainer.run_name",
      "trainer.disable_tqdm", "trainer.include_num_input_tokens_seen", "trainer.log_*", "trainer.hub_*",
      "trainer.push_to_hub", "trainer.per_device_eval_batch_size", "trainer.prediction_loss_only",
      "trainer.predict_with_generate", "trainer.generation_*"), REPORTED),
    (("trainer.metric_for_best_model", "trainer.greater_is_better", "trainer.load_best_model_at_end"),
     CHOSEN_BEST),
    # what runs it
    (("launch.*", "fixes.*"), OF_START),
    (("trainer.bf16", "trainer.fp16", "trainer.seed", "trainer.dataloader_*", "trainer.ddp_*",
      "trainer.use_cache", "trainer.remove_unused_columns", "trainer.activation_checkpointing*",
      "trainer.gradient_checkpointing*", "deepspeed.aio.*", "deepspeed.offload_*",
      "trainer.ignore_data_skip"), DERIVED),
    (("trainer.use_cpu", "trainer.use_liger_kernel", "trainer.tf32", "trainer.torch_compile*"), ROUNDED),
    (("trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"),
     Resume("states", "their product with the ranks, the global batch, is what is compared")),
    # what the files are
    (("trainer.accelerator_config",),
     Resume("refuse", "it decides which rows a rank gets, and how the gradients of a step are added up")),
    (("trainer.optim",), Resume("states", "each optimizer has states of its own")),
    (("fsdp.*",), ROUNDED),
    # what is learned
    (("trainer.learning_rate", "trainer.weight_decay", "trainer.adam_*", "trainer.optim_args"),
     Resume("refuse", "the checkpoint brings its own value along, which would silently stay")),
    (("trainer.lr_scheduler_*", "trainer.warmup_*"), _SCHEDULE),
    (("trainer.max_grad_norm",),
     Resume("refuse", "ZeRO brings its own value along, others take the new one")),
    (("adapter.lora_dropout",),
     Resume("note", "the noise changes from here on, the tensors do not")),
    (("adapter.lora_alpha", "adapter.use_rslora"),
     Resume("refuse", "it scales all that the adapter has learned")),
    (("adapter.*", "model.*"),
     Resume("refuse", "the tensors of the checkpoint have other names or shapes")),
    (("embedding.*", "reranker.*"),
     Resume("refuse", "what is minimised, or what is read, would be other")),
    (("trainer.reward_weights",), REWARDED),
    (_LOSS, MINIMISED),
    (("trainer.num_generations", "trainer.max_completion_length"), _PLACE),
    (("trainer.steps_per_generation",),
     Resume("states", "the completions of a generation are compared")),
    (("trainer.temperature", "trainer.top_p", "trainer.top_k", "trainer.min_p",
      "trainer.repetition_penalty"), _SAMPLED),
    (("trainer.use_vllm", "trainer.vllm_*"),
     Resume("note", "completions are written by another program")),
    (("trainer.num_generations_eval",), Resume("note", REPORTED.reason)),
    (("trainer.precompute_ref_log_probs",), ROUNDED),
    (("trainer.data_seed", "trainer.group_by_length", "trainer.train_sampling_strategy"), _PLACE),
    (("data.*",), _PLACE),
    (("*",), LEARNED),
)  # fmt: skip
"""(dotted names, `*` is any text; what a resume does) of the settings whose `Key` does not say it: those of
upstream's classes, and whole sections. The first that names a setting holds. The last one names all: what
nobody thought of must be equal."""
_CONSTANT = ("constant", "constant_with_warmup")
_VERSIONS = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes")
"""Whose versions are compared: what writes and reads a checkpoint, or computes the steps."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a plan can resume from a checkpoint."""

    differences: tuple[Difference, ...]
    conversion: str = ""
    """Why its files have to be converted first, half a sentence; empty where they need not."""

    @property
    def refused(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.refused]

    @property
    def words(self) -> list[str]:
        """What changes from here on, a line each."""
        return [difference.line() for difference in self.differences if not difference.refused]


def compare_plans(old: AnyPlan, new: AnyPlan, ranks: int) -> Resumption:
    """old: the plan of the checkpoint; ranks: processes that wrote it; new: the plan that resumes from it."""
    states, conversion = _states(old, new, ranks)
    both = [*compare_settings(old, new), *states, *_order(old, new, ranks)]
    return Resumption(tuple(sorted(both, key=lambda difference: not difference.refused)), conversion)


def resume_of(setting: str) -> Resume:
    """What a resume does with another value of a setting."""
    key = declared_keys().get(setting)
    if key is not None and key.resume is not None:
        return key.resume
    return next(resume for names, resume in RESUMES if any(_names(name, setting) for name in names))


def _names(pattern: str, setting: str) -> bool:
    head, star, tail = pattern.partition("*")
    return setting.startswith(head) and setting.endswith(tail) if star else setting == pattern


def compare_settings(old: AnyPlan, new: AnyPlan) -> list[Difference]:
    """The differences that a setting alone decides, refused ones first."""
    found = []
    for setting in sorted({*old.names, *new.names}):
        before, after = old.at(setting), new.at(setting)
        rule = resume_of(setting)
        if before == after or rule.verdict in ("free", "states"):
            continue
        if rule.verdict == "samples" and not new.data.streaming:
            continue
        if isinstance(old, StoredPlan) and isinstance(new, StoredPlan) and old.has_value_of(new, setting):
            written = old.written(setting), new.written(setting)
            found.append(Difference(setting, *written, False, "the value is the same", new.by(setting)))
            continue
        reason = rule.reason
        if setting in ("trainer.max_steps", "trainer.num_train_epochs") and not _stretched(new):
            reason = "the run ends at another step than it was started for"
        refused = rule.verdict in ("refuse", "samples")
        found.append(Difference(setting, before, after, refused, reason, new.by(setting), rule.fix))
    return sorted(found, key=lambda difference: not difference.refused)


def _stretched(plan: AnyPlan) -> bool:
    """Whether the learning rate depends on the number of all steps."""
    trainer = plan.trainer
    return trainer.lr_scheduler_type not in _CONSTANT or 0 < (trainer.warmup_steps or 0) < 1


def _states(old: AnyPlan, new: AnyPlan, ranks: int) -> tuple[list[Difference], str]:
    """Differences about the engine's files, and why these must be converted."""
    if old.trainer.save_only_model:
        weights = "the checkpoint holds weights alone"
        return [_refuse(old, new, "trainer.save_only_model", weights, _WEIGHTS)], ""
    found = _optimizer(old, new)
    engine = engine_of(new)
    if engine is not engine_of(old):
        reason = f"neither reads the files of the other; {_ways_out(old)}"
        return [*found, _refuse(old, new, "sharding.engine", reason)], ""
    reading = engine.reads(old, new, ranks, new.ranks)
    if reading.is_lost:
        return [_refuse(old, new, reading.refused, reading.reason, _WEIGHTS)], ""
    if reading.refused:
        reason = f"{reading.reason}; {_ways_out(old)}"
        one = reading.refused == RANKS
        refused = _ranks(new, ranks, True, reason) if one else _refuse(old, new, reading.refused, reason)
        return [*found, refused], ""
    if new.ranks != ranks:
        all_new = reading.conversion or 1 in (ranks, new.ranks)
        where = "every rank" if all_new else "ranks that were not there"
        reason = f"random states of dropout start afresh on {where}; the global batch and its rows stay"
        found.append(_ranks(new, ranks, False, reason))
    return found, reading.conversion


def _optimizer(old: AnyPlan, new: AnyPlan) -> list[Difference]:
    before, after = old.trainer.optim, new.trainer.optim
    if before == after:
        return []
    if before in ADAM and after in ADAM:
        reason = "the same states, updated by another kernel: the numbers differ in the last digits"
        return [Difference("trainer.optim", before, after, False, reason)]
    return [_refuse(old, new, "trainer.optim", "one optimizer cannot use the states of another")]


def _order(old: AnyPlan, new: AnyPlan, ranks: int) -> list[Difference]:
    """What else would read rows twice, or not at all."""
    found = []
    if new.data.streaming:
        if (old.trainer.dataloader_num_workers or 0) != (new.trainer.dataloader_num_workers or 0):
            found.append(_refuse(old, new, "trainer.dataloader_num_workers", _STREAM))
        if new.ranks != ranks:
            found.append(_ranks(new, ranks, True, _STREAM))
        old_version = isinstance(old, StoredPlan) and old.is_of_0_2_0
        if old_version and not all(is_file(source["path"]) for source in new.data.train):
            reason = "up to 0.2.0 all files of a folder or pattern were read, whatever split their names tell"
            found.append(_refuse(old, new, "data.train", reason, FINISHED))
    found += _negatives(old, new, ranks)
    before, after = _completions(old, ranks), _completions(new, new.ranks)
    if before != after:
        reason = f"a generation had {before} completions and would have {after}: {PLACE}"
        fix = "set it so that a generation has as many as before"
        found.append(_refuse(old, new, "trainer.steps_per_generation", reason, fix))
    others = new.trainer.others
    by_length = others.get("group_by_length") or others.get("train_sampling_strategy") == "group_by_length"
    if by_length and old.samples_of_rank != new.samples_of_rank:
        reason = "rows are grouped by length within the batches of a rank: their order would be another one"
        found.append(_refuse(old, new, "trainer.per_device_train_batch_size", reason))
    return found


def _negatives(old: AnyPlan, new: AnyPlan, ranks: int) -> list[Difference]:
    """What decides how many samples are compared with each other, where the loss does that."""
    micro = "trainer.per_device_train_batch_size"
    if old.settings.task != new.settings.task or not new.task.compares(new):
        return []
    found = []
    if old.at(micro) != new.at(micro):
        reason = (
            "the samples of a micro-batch are compared with each other: another number learns something else"
        )
        found.append(_refuse(old, new, micro, reason))
    if new.ranks != ranks and new.task.compares_texts and new.embedding.gather_across_devices:
        reason = "with embedding.gather_across_devices the samples of all ranks are each other's negatives"
        found.append(_ranks(new, ranks, True, reason))
    return found


def _completions(plan: AnyPlan, ranks: int) -> int | None:
    """Completions of one generation; None where the model writes none."""
    if plan.trainer.others.get("num_generations") is None:
        return None
    steps, own = plan.trainer.others.get("steps_per_generation"), plan.samples_of_rank
    if isinstance(steps, int):
        own = own * steps // (plan.trainer.gradient_accumulation_steps or 1)
    return ranks * own


_STREAM = (
    "each rank and each of its dataloader workers streams a share of its own: with others, some rows come "
    "twice and some never"
)


def _refuse(old: AnyPlan, new: AnyPlan, setting: str, reason: str, fix: str = FIX) -> Difference:
    return Difference(setting, old.at(setting), new.at(setting), True, reason, new.by(setting), fix)


def _ranks(new: AnyPlan, ranks: int, refused: bool, reason: str) -> Difference:
    fix = f"run it on {counted(ranks)} (--on), or start a new run in another --output-dir"
    return Difference(RANKS, ranks, new.ranks, refused, reason, fix=fix)


def _ways_out(old: AnyPlan) -> str:
    """Back to what it was, or on from the weights alone."""
    keys = ("sharding.engine", "sharding.zero_stage", "sharding.offload_optimizer")
    given = ", ".join(f"{key}: {old.at(key)}" for key in keys if old.at(key) is not None)
    weights = "adapter.path" if old.has_adapter else "model.name_or_path"
    return f"resume with {given}, or begin a new run from the checkpoint's weights with {weights}"


def compare_versions(old: Mapping[str, str], new: Mapping[str, str]) -> list[Difference]:
    """Other versions of what wrote the checkpoint. None of them is known to fail, so none is refused."""
    reason = (
        "checkpoints of that version were not tested with this one; the numbers may differ in the last digits"
    )
    return [
        Difference(f"version of {name}", old[name], new[name], False, reason)
        for name in _VERSIONS
        if name in old and name in new and old[name] != new[name]
    ]


def compare_data(old: str | None, new: str | None, plan: StoredPlan) -> list[Difference]:
    """The keys of the prepared data; None for a stream, which has none. plan: of the run that has `old`."""
    if old is None or new is None or old == new:
        return []
    reason = f"the rows, their order of preparation or the tokenizer have changed: {PLACE}"
    fix = f"bring the old files back, finish the run with {plan.finished_by}, or start a new run in another "
    fix += "--output-dir"
    return [Difference("data", old[:12], new[:12], True, reason, fix=fix)]
