"""What transformers' examples do by themselves: a model that starts at random, rows held out, targets cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.importing.found import Effect, Reading, shown
from launcher.importing.programs import Program

CONFIGURATIONS = ("config_name", "model_type", "config_overrides")
"""Flags that describe a model, beside the one that names its weights."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a launch line."""

    name: str
    """Without its dashes, `-` as `_`."""
    value: Any
    """A text; several as a list; True without one."""
    line: int
    open: bool = False
    """Whether the value is only known when the line is run."""


def take_start(reading: Reading, flags: Sequence[Flag], program: Program, line: int) -> None:
    """What names a configuration: of a model that starts at random where no weights are named."""
    given = {flag.name: flag for flag in flags if flag.name in CONFIGURATIONS and not flag.open}
    trained = "model_name_or_path" in reading.seen or "model.name_or_path" in program.defaults
    for name, flag in given.items():
        if trained and name == "model_type":
            reading.know(name)
        elif trained:
            reading.drop(f"--{name}", flag.value, flag.line, Effect.TRAINING,
                         "the model is trained as its checkpoint describes it")  # fmt: skip
    if not trained and given:
        said = " ".join(f"--{flag.name} {shown(flag.value)}" for flag in given.values())
        reading.know(*given)
        reason = f"{said} without --model_name_or_path: the model starts at random"
        reading.needs("model.config", line, reason, "write model.config, not model.name_or_path")


def list_silent(reading: Reading, flags: Sequence[Flag], program: Program, line: int) -> None:
    """List defaults that change the training and have no recipe key."""
    given = {flag.name: flag for flag in flags}
    if "max_target_length" in program.flags.split() and "max_target_length" not in given:
        reason = "targets are cut at this length there; here data.max_length cuts them and the inputs"
        reading.drop("max_target_length", 128, line, Effect.TRAINING, reason)
    held_out = {"validation_file", "validation_split_percentage"} & given.keys()
    if program.name == "run_clm.py" and "train_file" in given and not held_out:
        reason = "run_clm.py holds 5 % of the rows out; here all are trained on"
        reading.drop("validation_split_percentage", 5, given["train_file"].line, Effect.TRAINING, reason,
                     "write data.eval: {split: 0.05}")  # fmt: skip
