"""Whether a plan can go on from a checkpoint of another plan: one table of rules over the settings. Pure.

What the rules of single settings cannot say (the files of an engine, the number of ranks) is in
`launcher.planner.resumed_states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import Problem
from launcher.tasks import TASKS

Verdict = Literal["equal", "word", "free", "states", "samples"]
"""Must be equal · may differ, with a message · may differ · judged by who can read the checkpoint's files ·
judged by the prepared samples, must be equal where rows are streamed."""

MEND = "restore the value, or start a new run in another --output-dir"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a difference of some settings means for a run that goes on."""

    settings: tuple[str, ...]
    """Dotted names; one that ends with `*` stands for all that begin like it."""
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that a checkpoint and a plan do not share."""

    setting: str
    old: Any
    new: Any
    refused: bool
    reason: str
    by: str = ""
    """Who says the new value: `recipes/x.yaml:12`, `--set`."""
    mend: str = MEND

    def problem(self) -> Problem:
        """The refusal, at its line of the recipe where there is one."""
        file, _, line = self.by.rpartition(":")
        at_line = line.isdigit()
        return Problem(
            "resume-differs",
            f"{self.sentence()}: {self.reason}",
            file=file if at_line else None,
            line=int(line) if at_line else None,
            path=self.setting,
            hint=self.mend,
        )

    def sentence(self) -> str:
        """Old and new value."""
        return f"the checkpoint was made with {self.old!r}, the plan now says {self.new!r}"

    def word(self) -> str:
        """One line for a difference that is accepted."""
        return f"{self.setting}: {self.old!r} -> {self.new!r}: {self.reason}"


_FOLLOWS = "follows from the settings that are compared, and is in no checkpoint"
_REPORTS = "changes what is reported, not what is learnt"
_KEPT = "the checkpoint brings its own value along, which would stay without a word"
_SHAPE = "the tensors of the checkpoint have other names or shapes"
_LOSS = tuple(f"trainer.{name}" for task in TASKS for name in task.loss_arguments)
_LEARNT = "it decides what was learnt up to here"
_PLACE = "the place in the data that the checkpoint names would be another one"
_NUMBERS = "the numbers go on from here with other roundings"

RULES: tuple[Rule, ...] = (
    # how long, how often, who is told
    Rule(
        ("trainer.max_steps", "trainer.num_train_epochs"),
        "word",
        "a schedule that ends with the run has another end: the learning rate makes a jump here",
    ),
    Rule(("trainer.save_only_model",), "free", "the next checkpoints differ, not the one that is read"),
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
        ("runtime.stop_seconds", "runtime.training_arguments_first", "model.device_map",
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
         "trainer.torch_compile*", "model.compile_blocks", "model.loss", "adapter.cast_input_dtype_enabled",
         "data.padding_free", "data.pad_to_multiple_of", "deepspeed.profile"),
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
    Rule(("fsdp.state_dict_type",), "equal", "the weights and states lie in files of another kind"),
    Rule(("fsdp.*",), "word", _NUMBERS),
    # what is learnt
    Rule(("global_batch_size",), "equal", "steps, schedule and the place in the data are counted in batches"),
    Rule(
        ("trainer.learning_rate", "trainer.weight_decay", "trainer.adam_*", "trainer.optim_args"),
        "equal",
        _KEPT,
    ),
    Rule(
        ("trainer.lr_scheduler_*", "trainer.warmup_*"),
        "equal",
        "the schedule's state would go on under another curve",
    ),
    Rule(("trainer.max_grad_norm",), "equal", "ZeRO brings its own value along, others take the new one"),
    Rule(("adapter.lora_dropout",), "word", "the noise changes from here on, the tensors do not"),
    Rule(("adapter.lora_alpha", "adapter.use_rslora"), "equal", "it scales all that the adapter has learnt"),
    Rule(("adapter.autocast_adapter_dtype",), "equal", "its weights and states are of another type"),
    Rule(("adapter.*",), "equal", _SHAPE),
    Rule(
        ("model.quantization", "model.prepare_for_kbit"),
        "equal",
        "what is trained was learnt on other frozen weights",
    ),
    Rule(("precision", "model.dtype", "runtime.autocast"), "equal", "weights and states are of another type"),
    Rule(("model.*",), "equal", _SHAPE),
    Rule(("task", "tiny"), "equal", _LEARNT),
    Rule(("python.hooks", *_LOSS), "equal", "what is minimised would be other"),
    Rule(("seed", "trainer.data_seed", "trainer.group_by_length", "trainer.train_sampling_strategy"),
         "equal", _PLACE),
    Rule(("data.loss_on_inserted",), "samples", _PLACE),
    Rule(("data.*",), "equal", _PLACE),
    Rule(("*",), "equal", _LEARNT),
)  # fmt: skip
"""The first rule that names a setting holds. The last one names all: what nobody thought of must be equal."""

BEFORE: Mapping[str, Any] = {
    "sharding.tp_size": 1,
    "sharding.sp_size": 1,
    "sharding.cp_size": 1,
    "trainer.use_liger_kernel": False,
    "model.loss": "full",
    "model.compile_blocks": False,
    "model.vocab_multiple": None,
    "adapter.cast_input_dtype_enabled": True,
    "adapter.autocast_adapter_dtype": True,
    "data.loss_on_inserted": True,
    "data.max_dropped": 1.0,
}
"""What plans did that were written before there was such a setting; the worker reads them so, too."""
_CONSTANT = ("constant", "constant_with_warmup")
_VERSIONS = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes")
"""Whose versions are compared: what writes and reads a checkpoint, or computes the steps."""


def rule_of(setting: str) -> Rule:
    """The rule that judges a setting."""
    return next(rule for rule in RULES if any(_names(pattern, setting) for pattern in rule.settings))


def _names(pattern: str, setting: str) -> bool:
    head, star, tail = pattern.partition("*")
    return setting.startswith(head) and setting.endswith(tail) if star else setting == pattern


def compare_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The differences of two plans (plan.json) that the table alone can judge, refused ones first."""
    found = []
    for setting in sorted(old["settings"].keys() | new["settings"].keys()):
        before, after = value_of(old, setting), value_of(new, setting)
        rule = rule_of(setting)
        prepared = rule.verdict == "samples" and not value_of(new, "data.streaming")
        if before == after or prepared or rule.verdict in ("free", "states"):
            continue
        by = str(new["settings"].get(setting, {}).get("by", ""))
        reason = rule.reason
        if setting in ("trainer.max_steps", "trainer.num_train_epochs") and not _stretched(new):
            reason = "the run ends at another step than it was started for"
        found.append(Difference(setting, before, after, rule.verdict in ("equal", "samples"), reason, by))
    return sorted(found, key=lambda difference: not difference.refused)


def value_of(plan: Mapping[str, Any], setting: str) -> Any:
    """The value of a setting of plan.json; where it has none, that of older versions, or None."""
    found = plan["settings"].get(setting)
    return BEFORE.get(setting) if found is None else found["value"]


def _stretched(plan: Mapping[str, Any]) -> bool:
    """Whether the learning rate depends on the number of all steps."""
    warmup = value_of(plan, "trainer.warmup_steps") or 0
    return value_of(plan, "trainer.lr_scheduler_type") not in _CONSTANT or 0 < warmup < 1


def compare_versions(old: Mapping[str, str], new: Mapping[str, str]) -> list[Difference]:
    """Other versions of what wrote the checkpoint. None of them is known to fail, so each is a word."""
    reason = (
        "checkpoints of that version were not tested with this one; the numbers may differ in the last digits"
    )
    return [
        Difference(f"version of {name}", old[name], new[name], False, reason)
        for name in _VERSIONS
        if name in old and name in new and old[name] != new[name]
    ]


def compare_data(old: str | None, new: str | None) -> list[Difference]:
    """The prepared data's keys; None for data that is streamed, which nobody can compare."""
    if old is None or new is None or old == new:
        return []
    reason = f"the rows, their order of preparation or the tokenizer have changed: {_PLACE}"
    mend = "bring the old files back, or start a new run in another --output-dir"
    return [Difference("data", old[:12], new[:12], True, reason, mend=mend)]
