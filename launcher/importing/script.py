"""A hand-written training script: what its calls write out. It is read, and never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.importing.adapter import PEFT_DEFAULTS
from launcher.importing.arguments import (
    NEEDED_FIELDS,
    TRANSFORMERS_DEFAULTS,
    field_values,
    fill_defaults,
    take_argument,
)
from launcher.importing.environment import take_env
from launcher.importing.flags import DECIDES, OWN, Flag, take_flag, take_training_argument, tell_length
from launcher.importing.found import Effect, Reading
from launcher.importing.keywords import keywords_of, plain
from launcher.importing.script_arguments import ARGUMENTS, OTHERS, Declared
from launcher.importing.script_lengths import take_lengths
from launcher.importing.script_model import take_adapters, take_models
from launcher.importing.script_rows import TRAINERS, take_rows, trainers_of
from launcher.importing.sft import DPO_DEFAULTS, SFT_DEFAULTS, fill_sft, take_sft
from launcher.importing.syntax import Function, last_name, parsed, text_of
from launcher.importing.values import Source, Unresolved

TOOL = "training script"
_OF_TRAINER = {
    "compute_metrics": (
        Effect.NONE,
        "move it into a hooks.py beside the recipe, as compute_metrics(prediction)",
    ),
    "callbacks": (Effect.TRAINING, "move them into a hooks.py beside the recipe, as callbacks()"),
    "optimizers": (Effect.TRAINING, "write trainer.optim and trainer.lr_scheduler_type"),
    "optimizer_cls_and_kwargs": (Effect.TRAINING, "write trainer.optim"),
    "model_init": (Effect.TRAINING, ""),
    "preprocess_logits_for_metrics": (Effect.NONE, ""),
    "compute_loss_func": (Effect.TRAINING, ""),
}
_SILENT = ("model", "args", "train_dataset", "eval_dataset", "tokenizer", "processing_class", "peft_config",
           "data_collator", "formatting_func", "ref_model")  # fmt: skip


@dataclass(slots=True)
class CommandLine:
    """The arguments that a launch line gives to the script."""

    declared: Declared
    file: str
    """Where the line stands."""
    fields: list[Flag]
    """Flags of TrainingArguments."""
    own: dict[str, Any]
    """Attribute -> value of the script's own arguments; None: known only when the line is run."""
    flags: dict[str, Flag]
    """Attribute -> the flag that gives it."""

    def values(self) -> dict[str, Any]:
        """Attribute -> value, of the script's own arguments and of TrainingArguments."""
        fields: dict[str, Any] = {}
        if self.declared.arguments:
            told = {flag.name: flag.value for flag in self.fields if not flag.open}
            changed = self.declared.changed.keys() - told.keys()
            fields = {k: v for k, v in field_values(told).items() if k not in changed}
            fields |= {flag.name: None for flag in self.fields if flag.open}
        return {**fields, **self.own}


def tells(tree: ast.Module) -> bool:
    """Whether a parsed Python file makes arguments of a Trainer, or of another trainer of trl."""
    source = Source(tree)
    return any(True for _ in source.calls_of(*ARGUMENTS, *OTHERS))


def trains(tree: ast.Module, declared: Declared) -> bool:
    """Whether a script that a launch line starts trains with a Trainer that can be read."""
    source = Source(tree)
    return tells(tree) or (bool(declared.arguments) and any(source.calls_of(*trainers_of(source))))


def read(text: str, file: str, line: CommandLine | None = None) -> Reading:
    """Read a script that `tells`, or one that `trains` with the arguments of its launch line."""
    tree = parsed(text)
    source = Source(tree) if line is None else Source(tree, line.values(), line.declared.entry)
    reading = Reading(TOOL, file)
    _refuse_others(reading, source)
    calls = list(source.calls_of(*ARGUMENTS))
    from_line = line is not None and bool(line.declared.arguments)
    if len(calls) + from_line > 1:
        lines = ", ".join(str(call.lineno) for call, _ in calls)
        message = f"is made {len(calls) + from_line} times (lines {lines}): one recipe is of one training"
        reading.refuse("TrainingArguments", calls[-1][0].lineno, message, "give a script with one of them")
        return reading
    if not calls and not from_line:
        return reading
    kind = source.name_of(calls[0][0].func) if calls else line.declared.arguments if line else ""
    if kind == "DPOConfig":
        reading.take("task", "dpo", calls[0][0].lineno if calls else None, kind)
    take_models(reading, source)
    for call, scope in calls:
        _take_arguments(reading, source, call, scope, kind)
    if line is not None:
        _take_fields(reading, source, line, kind)
    _take_rest_of(reading, source, kind)
    if line is not None:
        _leave_own(reading, source, line)
    return reading


def _take_rest_of(reading: Reading, source: Source, kind: str) -> None:
    """Everything beside the model and the arguments, and the defaults of both."""
    _take_trainer(reading, source)
    if take_adapters(reading, source):
        fill_defaults(reading, PEFT_DEFAULTS)
    take_rows(reading, source)
    _take_stopping(reading, source)
    _take_rest(reading, source)
    if kind in ("SFTConfig", "DPOConfig"):
        fill_sft(reading, kind)
        fill_defaults(reading, SFT_DEFAULTS if kind == "SFTConfig" else DPO_DEFAULTS, logging_steps=10)
    else:
        fill_defaults(reading, TRANSFORMERS_DEFAULTS)
        take_lengths(reading, source)
        tell_length(reading)
        if any(source.calls_of("SFTTrainer")):
            fill_sft(reading, "SFTConfig")


def _take_fields(reading: Reading, source: Source, line: CommandLine, kind: str) -> None:
    """Flags of TrainingArguments, and the defaults of them that the script's own class has."""
    with reading.standing_in(line.file):
        for flag in line.fields:
            take_flag(reading, flag, lambda flag: _take_field(reading, flag, kind))
    told = {flag.name for flag in line.fields}
    for name, (owner, node) in line.declared.changed.items():
        if name in told:
            continue
        try:
            value = plain(source.value(node, None).value)
        except Unresolved:
            _leave_open(reading, name, node)
            continue
        _take_one(reading, name, value, node.lineno, kind)
        _note(reading, name, f"default of {owner}", node.lineno)


def _take_field(reading: Reading, flag: Flag, kind: str) -> bool:
    trl = kind in ("SFTConfig", "DPOConfig")
    return (trl and take_sft(reading, flag.name, flag.value, flag.line)) or take_training_argument(
        reading, flag
    )


def _take_one(reading: Reading, name: str, value: Any, line: int, kind: str) -> None:
    """One keyword of TrainingArguments(…)."""
    if kind in ("SFTConfig", "DPOConfig") and take_sft(reading, name, value, line):
        return
    if not take_argument(reading, name, value, line):
        reading.drop(name, value, line, Effect.TRAINING, f"no field of {kind} that is known here")


def _leave_own(reading: Reading, source: Source, line: CommandLine) -> None:
    """List the arguments of the line that nothing of what was read uses."""
    with reading.standing_in(line.file):
        for name, flag in line.flags.items():
            if name not in source.used:
                reason = DECIDES if name in source.deciding else OWN
                reading.drop(f"--{flag.name}", flag.value, flag.line, Effect.TRAINING, reason)


def _refuse_others(reading: Reading, source: Source) -> None:
    for call, _ in source.calls_of(*OTHERS):
        reading.refuse(last_name(call.func), call.lineno, "is of a training that is not here",
                       "SFTConfig, DPOConfig and TrainingArguments are read")  # fmt: skip
    for call, _ in source.calls_of("Accelerator", "initialize"):
        if "deepspeed" in text_of(call.func) or last_name(call.func) == "Accelerator":
            reading.drop(text_of(call.func), "", call.lineno, Effect.TRAINING,
                         "a training loop of the script's own beside the Trainer's")  # fmt: skip


def _take_arguments(
    reading: Reading, source: Source, call: ast.Call, scope: Function | None, kind: str
) -> None:
    for name, (value, node) in keywords_of(reading, source, call, scope).items():
        line = node.lineno
        if value is None and _auto_precision(name, node):
            reading.take("precision", "auto", line, f"{name}: {text_of(node)}",
                         note="bf16 where the card has it, as the script asks")  # fmt: skip
            continue
        if value is None:
            _leave_open(reading, name, node)
            continue
        _take_one(reading, name, plain(value.value), line, kind)
        _note(reading, name, value.note, line)


def _note(reading: Reading, name: str, note: str, line: int) -> None:
    """Mark what was taken from a default that callers may change: a launch line goes before it."""
    if not note:
        return
    for key, taken in reading.taken.items():
        if taken.said.partition(":")[0] == name and taken.place.line == line:
            reading.taken[key] = type(taken)(taken.value, taken.place, taken.said, True, note)


def _auto_precision(name: str, node: ast.expr) -> bool:
    """`bf16=is_bf16_supported(), fp16=not is_bf16_supported()`, which is what precision auto does."""
    return name in ("bf16", "fp16") and re.search("(bf|bfloat)16_supported", text_of(node)) is not None


def _leave_open(reading: Reading, name: str, node: ast.expr) -> None:
    needed = name in NEEDED_FIELDS
    effect = Effect.NEEDED if needed else Effect.TRAINING
    if name in ("output_dir", "logging_dir", "run_name", "report_to", "hub_token", "disable_tqdm"):
        effect = Effect.NONE
    reading.drop(name, text_of(node), node.lineno, effect, "computed at run time",
                 _hint(name) if needed else "")  # fmt: skip


def _hint(name: str) -> str:
    return "write precision" if name in ("bf16", "fp16") else f"write trainer.{name}"


def _take_trainer(reading: Reading, source: Source) -> None:
    """Keywords of the Trainer itself."""
    for call, scope in source.calls_of(*trainers_of(source)):
        kind = trainers_of(source)[source.name_of(call.func)]
        for name, (value, node) in keywords_of(reading, source, call, scope).items():
            held = None if value is None else plain(value.value)
            if name in _OF_TRAINER:
                _drop_function(reading, name, node)
            elif name in _SILENT or (isinstance(node, ast.Constant) and node.value is None):
                reading.know(name)
            elif value is None or not _of_trl(reading, kind, name, held, node.lineno):
                reading.drop(name, text_of(node), node.lineno, Effect.TRAINING, f"an argument of {kind}")
    _drop_own_trainers(reading, source)


def _of_trl(reading: Reading, kind: str, name: str, value: Any, line: int) -> bool:
    """What earlier versions of trl took as arguments of their trainers."""
    if kind == "SFTTrainer":
        return take_sft(reading, name, value, line)
    return kind == "DPOTrainer" and take_argument(reading, name, value, line)


def _drop_own_trainers(reading: Reading, source: Source) -> None:
    """Classes that are a Trainer with methods of their own."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [source.name_of(base) for base in node.bases]
        if any(base in TRAINERS for base in bases):
            methods = [part for part in node.body if isinstance(part, Function) and part.name != "__init__"]
            for method in methods:
                reading.drop(f"{node.name}.{method.name}", "", method.lineno, Effect.TRAINING,
                             "a method of the script's own Trainer")  # fmt: skip


def _drop_function(reading: Reading, name: str, node: ast.expr) -> None:
    effect, hint = _OF_TRAINER[name]
    is_none = isinstance(node, ast.Constant) and node.value is None
    if is_none or (name == "callbacks" and _only_stopping(node)):
        reading.know(name)
    else:
        reading.drop(name, text_of(node), node.lineno, effect, "a function of the script's own", hint)


def _only_stopping(node: ast.expr) -> bool:
    return isinstance(node, ast.List) and all(
        isinstance(item, ast.Call) and last_name(item.func) == "EarlyStoppingCallback" for item in node.elts
    )


def _take_stopping(reading: Reading, source: Source) -> None:
    for call, scope in source.calls_of("EarlyStoppingCallback"):
        found = keywords_of(reading, source, call, scope)
        fields: Mapping[str, str] = {
            "early_stopping_patience": "patience", "early_stopping_threshold": "threshold",
        }  # fmt: skip
        given = dict(zip(fields, call.args, strict=False))
        reading.take("early_stopping.patience", 1, call.lineno, "early_stopping_patience: 1", default=True)
        for name, ours in fields.items():
            value, node = found.get(name, (None, given.get(name)))
            if node is None:
                continue
            try:
                value = value or source.value(node, scope)
            except Unresolved:
                _leave_open(reading, name, node)
                continue
            held = float(value.value) if ours == "threshold" else value.value
            reading.take(f"early_stopping.{ours}", held, call.lineno, name)


def _take_rest(reading: Reading, source: Source) -> None:
    """Seeds, variables of the environment, and calls that stand for a field."""
    for call, scope in source.calls_of("set_seed"):
        if "seed" not in reading.taken and call.args:
            try:
                take_argument(reading, "seed", source.value(call.args[0], scope).value, call.lineno)
            except Unresolved:
                _leave_open(reading, "seed", call.args[0])
    for call, _ in source.calls_of("gradient_checkpointing_enable"):
        if "trainer.activation_checkpointing" not in reading.taken:
            take_argument(reading, "gradient_checkpointing", True, call.lineno)
    for call, _ in source.calls_of("train_on_responses_only"):
        reading.drop("train_on_responses_only", "", call.lineno, Effect.TRAINING, "what is learnt of a row",
                     "write data: {loss_on: assistant} for rows of messages")  # fmt: skip
    for call, _ in source.calls_of("compile"):
        if text_of(call.func) == "torch.compile":
            take_argument(reading, "torch_compile", True, call.lineno)
    for statement in ast.walk(source.tree):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            _take_variable(reading, source, statement)


def _take_variable(reading: Reading, source: Source, statement: ast.Assign) -> None:
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript) or text_of(target.value) not in ("os.environ", "environ"):
        return
    try:
        name = source.value(target.slice, None).value
    except Unresolved:
        return
    try:
        value = source.value(statement.value, None).value
    except Unresolved:
        reading.drop(str(name), text_of(statement.value), statement.lineno, Effect.NONE,
                     "known only when the script runs")  # fmt: skip
        return
    take_env(reading, str(name), value, statement.lineno)
