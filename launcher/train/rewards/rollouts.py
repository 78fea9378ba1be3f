"""What the rewards of a run were: samples of the first step, and functions without a signal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.files.redaction import hide_in, hider, secret_values
from launcher.train.rewards.shipped import text_of

FILE = "completions.jsonl"
"""In the run directory: completions of the untrained model with their rewards."""
KEPT = 32
"""Completions of the first step in that file."""
PRINTED = 3
CHARACTERS = 2000
QUIET_STEPS = 20
"""Steps without a signal from which on a warning is printed."""


@dataclass(slots=True)
class Rollouts:
    """Counts over the generations of training; `rollouts` of result.json, and saved in checkpoints."""

    generations: int = 0
    completions: int = 0
    groups: int = 0
    """Prompts with their completions."""
    groups_without_signal: int = 0
    """Of which all completions have the same reward, so that no advantage differs from 0."""
    seconds: float = 0.0
    """Spent generating and scoring, since the last start."""
    first: float | None = None
    """Mean reward of the first generation."""
    last: float | None = None
    lowest: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    """Of each function."""
    unscored: dict[str, int] = field(default_factory=dict)
    """Completions for which a function gave None."""
    signal_step: int = 0
    """The last step before which a group had a signal, or a warning said that none has."""

    def add(
        self, rewards: Mapping[str, Sequence[float]], advantages: Sequence[float], group: int, step: int = 0
    ) -> str | None:
        """One generation: values of each function and advantages by completion; NaN: it gave None.

        step: steps done before it. A warning where no group had a signal for QUIET_STEPS, once in as many.
        """
        self.generations += 1
        self.completions += len(advantages)
        for start in range(0, len(advantages), group):
            self.groups += 1
            self.groups_without_signal += not any(advantages[start : start + group])
        for name, values in rewards.items():
            real = [value for value in values if value == value]
            self.unscored[name] = self.unscored.get(name, 0) + len(values) - len(real)
            if real:
                self.lowest[name] = min(self.lowest.get(name, real[0]), *real)
                self.highest[name] = max(self.highest.get(name, real[0]), *real)
        quiet = 0 if any(advantages) else step - self.signal_step
        if 0 < quiet < QUIET_STEPS:
            return None
        self.signal_step = step
        return f"the rewards differed in no group of the last {quiet} steps" if quiet else None

    def mean(self, value: float) -> None:
        """The mean reward of the last generation."""
        self.first, self.last = value if self.first is None else self.first, value

    @property
    def constant(self) -> dict[str, float]:
        """Function -> the value that it gave all completions."""
        return {name: low for name, low in self.lowest.items() if low == self.highest[name]}

    @property
    def warnings(self) -> list[str]:
        found = [
            f"the reward function {name} gave {value:g} to all {self.completions} completions: "
            "it teaches nothing"
            for name, value in self.constant.items()
        ]
        found += [
            f"the reward function {name} gave None to all {count} completions"
            for name, count in self.unscored.items()
            if count == self.completions
        ]
        if self.groups and self.groups_without_signal == self.groups:
            found.append(
                f"in all {self.groups} groups the completions of a prompt have the same reward: no group has "
                "a signal"
            )
        return found

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps: the arguments of this class."""
        return {**asdict(self), "seconds": 0.0}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "constant": self.constant, "warnings": self.warnings}


def samples(log: Mapping[str, Any], count: int, step: int) -> list[dict[str, Any]]:
    """The last `count` entries of trl's log as {step, prompt, completion, rewards, advantage}."""
    hide = hider(secret_values(os.environ))
    found = []
    for index in range(-count, 0):
        rewards = {name: _number(values[index]) for name, values in log["rewards"].items()}
        prompt = log["prompt"][index]
        entry = {
            "step": step,
            "prompt": prompt if isinstance(prompt, str) else prompt[-1].get("content"),
            "completion": text_of(log["completion"][index])[:CHARACTERS],
            "rewards": rewards,
            "advantage": _number(log["advantages"][index]),
        }
        found.append(hide_in(entry, hide))
    return found


def _number(value: float) -> float | None:
    return value if value == value else None


def show_first(run_dir: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write completions of the untrained model into the run directory, and print some."""
    lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in found[:KEPT])
    (run_dir / FILE).write_text(lines, encoding="utf-8")
    print(f"completions of the untrained model, with their rewards (all of them: {run_dir / FILE}):")
    for entry in found[:PRINTED]:
        given = ", ".join(f"{name} {_shown(value)}" for name, value in entry["rewards"].items())
        print(f"  prompt: {_short(entry['prompt'])}\n  completion: {_short(entry['completion'])}\n  {given}")


def _shown(value: float | None) -> str:
    return "None" if value is None else f"{value:.4g}"


def _short(text: Any) -> str:
    shown = " ".join(str(text).split())
    return shown if len(shown) <= 200 else f"{shown[:200]} …"
