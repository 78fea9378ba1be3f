"""Whether a plan can resume from a checkpoint of another plan. Pure.

One table of rules over the settings, and what single settings cannot tell: whether the engine reads the
files, the number of ranks, the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.engines import engine_of
from launcher.engines.deepspeed import ADAM
from launcher.engines.engine import RANKS, counted
from launcher.errors import Problem
from launcher.plan.plan import Plan
from launcher.plan.stored import StoredPlan
from launcher.recipe.data_paths import is_file
from launcher.tasks import TASKS
from launcher.tasks.grpo import KEY

Verdict = Literal["equal", "word", "free", "states", "samples"]
"""Must be equal · may differ, with a message · may differ · depends on the files of the checkpoint · on the
prepared samples, and must be equal where rows are streamed."""

AnyPlan = Plan | StoredPlan

FIX = "restore the value, or start a new run in another --output-dir"
_FINISHED = "finish the run with effilaunch 0.2.0, or start a new one in another --output-dir"
_WEIGHTS = "start a new run from these weights: adapter.path, or model.name_or_path, names the folder"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a difference of some settings means for a run that is resumed."""

    settings: tuple[str, ...]
    """Dotted names; `*` is any text."""
    verdict: Verdict
    reason: str
    fix: str = FIX


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


_FOLLOWS = "follows from the settings that are compared, and is in no checkpoint"
_REPORTS = "changes what is reported, not what is learned"
_KEPT = "the checkpoint brings its own value along, which would silently stay"
_SHAPE = "the tensors of the checkpoint have other names or shapes"
_LOSS = tuple(f"trainer.{name}" for task in TASKS for name in task.loss_arguments)
_LEARNT = "it decides what was learned so far"
_PLACE = "the place in the data that the checkpoint names would be another one"
_SAMPLED = "completions are sampled otherwise from here on"
_NUMBERS = "the numbers are rounded differently from here on"

RULES: tuple[Rule, ...] = (
    # length, intervals, reports
    Rule(
        ("trainer.max_steps", "trainer.num_train_epochs"),
        "word",
        "a schedule that ends with the run has another end: the learning rate jumps here",
    ),
    Rule(("trainer.save_only_model",), "free", "the next checkpoints differ, not the one that is read"),
    Rule(("trainer.generation_kwargs",), "word", _SAMPLED),
    Rule(
        (
            "trainer.logging_*", "trainer.save_*", "trainer.eval_*", "trainer.report_to", "trainer.run_name",
            "trainer.disable_tqdm", "trainer.include_num_input_tokens_seen", "trainer.log_*", "trainer.hub_*",
            "trainer.push_to_hub", "trainer.per_device_eval_batch_size", "trainer.prediction_loss_only",
            "trainer.predict_with_generate", "trainer.generation_*", "data.max_truncated",
            "data.max_dropped",
        ),
        "free",
        _REPORTS,
    ),
    Rule(("data.metrics", "python.file"), "word", "evaluations before and after may not be comparable"),
    Rule(
        ("early_stopping.*", "trainer.metric_for_best_model", "trainer.greater_is_better",
         "trainer.load_best_model_at_end"),
        "word",
        "the best checkpoint so far was chosen by the old value",
    ),
    # what runs it
    Rule(("on_oom", "launch.*", "fixes.*"), "free", "who starts the run, not what it learns"),
    Rule(
        ("runtime.stop_seconds", "runtime.mirror", "runtime.training_arguments_first", "model.device_map",
         "model.enable_input_require_grads", "trainer.bf16", "trainer.fp16", "trainer.seed",
         "trainer.dataloader_*", "trainer.ddp_*", "trainer.use_cache", "trainer.remove_unused_columns",
         "trainer.activation_checkpointing*", "trainer.gradient_checkpointing*", "deepspeed.*_bucket_size",
         "deepspeed.overlap_comm", "deepspeed.aio.*", "deepspeed.offload_*", "sharding.nvme_path",
         "model.cache_dir", "model.trust_remote_code", "data.num_proc", "trainer.ignore_data_skip"),
        "free",
        _FOLLOWS,
    ),
    Rule(
        ("trainer.use_cpu", "model.attn_implementation", "trainer.use_liger_kernel", "trainer.tf32",
         "trainer.torch_compile*", "model.compile_blocks", "model.loss", "model.kbit_norms",
         "adapter.cast_input_dtype_enabled", "data.padding_free", "data.pad_to_multiple_of",
         "deepspeed.profile"),
        "word",
        _NUMBERS,
    ),
    Rule(
        ("trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"),
        "states",
        "their product with the ranks, the global batch, is what is compared",
    ),
    # what the files are
    Rule(
        ("sharding.engine", "sharding.zero_stage", "sharding.offload_optimizer", "sharding.offload_param"),
        "states",
        "each engine writes files of its own",
    ),
    Rule(
        ("trainer.accelerator_config",),
        "equal",
        "it decides which rows a rank gets, and how the gradients of a step are added up",
    ),
    Rule(
        ("sharding.tp_size", "sharding.sp_size", "sharding.cp_size"),
        "equal",
        "each rank has written the states of its own part of the model",
    ),
    Rule(("trainer.optim",), "states", "each optimizer has states of its own"),
    Rule(("fsdp.state_dict_type",), "equal", "the weights and states are in files of another kind"),
    Rule(("fsdp.*",), "word", _NUMBERS),
    # what is learned
    Rule(
        ("runtime.loss_over",),
        "equal",
        "up to 0.2.0 micro-batches of different sizes weighed the same, and each added the whole auxiliary "
        "loss of the routers",
        _FINISHED,
    ),
    Rule(("global_batch_size",), "equal", "steps, schedule and the place in the data are counted in batches"),
    Rule(
        ("trainer.learning_rate", "trainer.weight_decay", "trainer.adam_*", "trainer.optim_args"),
        "equal",
        _KEPT,
    ),
    Rule(
        ("trainer.lr_scheduler_*", "trainer.warmup_*"),
        "equal",
        "the schedule's state would continue on another curve",
    ),
    Rule(("trainer.max_grad_norm",), "equal", "ZeRO brings its own value along, others take the new one"),
    Rule(("adapter.lora_dropout",), "word", "the noise changes from here on, the tensors do not"),
    Rule(("adapter.lora_alpha", "adapter.use_rslora"), "equal", "it scales all that the adapter has learned"),
    Rule(("adapter.autocast_adapter_dtype",), "equal", "its weights and states are of another type"),
    Rule(("adapter.*",), "equal", _SHAPE),
    Rule(
        ("model.quantization", "model.prepare_for_kbit"),
        "equal",
        "what is trained was learned on other frozen weights",
    ),
    Rule(("precision", "model.dtype", "runtime.autocast"), "equal", "weights and states are of another type"),
    Rule(("model.*",), "equal", _SHAPE),
    Rule(("embedding.mini_batch_size",), "word", _NUMBERS),
    Rule(("embedding.*", "reranker.*"), "equal", "what is minimised, or what is read, would be other"),
    Rule(("task", "tiny"), "equal", _LEARNT),
    Rule((KEY, "trainer.reward_weights"), "equal", "what is rewarded would be other"),
    Rule(("python.hooks", *_LOSS), "equal", "what is minimised would be other"),
    Rule(("trainer.num_generations", "trainer.max_completion_length"), "equal", _PLACE),
    Rule(("trainer.steps_per_generation",), "states", "the completions of a generation are compared"),
    Rule(("trainer.temperature", "trainer.top_p", "trainer.top_k", "trainer.min_p",
          "trainer.repetition_penalty"), "word", _SAMPLED),
    Rule(("trainer.use_vllm", "trainer.vllm_*"), "word", "completions are written by another program"),
    Rule(("trainer.num_generations_eval",), "word", _REPORTS),
    Rule(("trainer.precompute_ref_log_probs",), "word", _NUMBERS),
    Rule(("seed", "trainer.data_seed", "trainer.group_by_length", "trainer.train_sampling_strategy"),
         "equal", _PLACE),
    Rule(("data.loss_on_inserted", "data.special_tokens_in_text"), "samples", _PLACE),
    Rule(("data.*",), "equal", _PLACE),
    Rule(("*",), "equal", _LEARNT),
)  # fmt: skip
"""The first rule that names a setting holds. The last one names all: what nobody thought of must be equal."""
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


def rule_of(setting: str) -> Rule:
    """The rule of a setting."""
    return next(rule for rule in RULES if any(_names(pattern, setting) for pattern in rule.settings))


def _names(pattern: str, setting: str) -> bool:
    head, star, tail = pattern.partition("*")
    return setting.startswith(head) and setting.endswith(tail) if star else setting == pattern


def compare_settings(old: AnyPlan, new: AnyPlan) -> list[Difference]:
    """The differences that the table alone decides, refused ones first."""
    found = []
    for setting in sorted({*old.names, *new.names}):
        before, after = old.at(setting), new.at(setting)
        rule = rule_of(setting)
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
        refused = rule.verdict in ("equal", "samples")
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
            found.append(_refuse(old, new, "data.train", reason, _FINISHED))
    found += _negatives(old, new, ranks)
    before, after = _completions(old, ranks), _completions(new, new.ranks)
    if before != after:
        reason = f"a generation had {before} completions and would have {after}: {_PLACE}"
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
    reason = f"the rows, their order of preparation or the tokenizer have changed: {_PLACE}"
    fix = f"bring the old files back, finish the run with {plan.finished_by}, or start a new run in another "
    fix += "--output-dir"
    return [Difference("data", old[:12], new[:12], True, reason, fix=fix)]
