"""Call reward functions with a time limit; errors name the function, its line and the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError, RunFailed
from launcher.machine.time_limit import TooSlow, time_limit
from launcher.recipe.reward_rules import split_function
from launcher.tasks.grpo import SHIPPED_REWARDS
from launcher.train.hooks import error_line, error_text, import_file
from launcher.train.rewards.shipped import SHIPPED

ROW = "row_of_data"
"""The one column that trl sees beside the prompt: {place: `FILE:NUMBER`, columns: what functions get}. trl
leaves `completion` out and takes `images` for its own; so it must not see the names of the columns."""
ALONE_S = 5.0
"""Seconds for one row alone, when the row is looked for that a call hangs at."""
LOOKED_AT = 64
"""Rows that are called alone at most."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A function of `reward:`."""

    name: str
    """`numeric_answer`, or the function's name in its file; unique."""
    path: str
    """`reward[0].function`."""
    file: str | None
    weight: float
    time_limit: float
    function: Callable[..., Any]


def load_rewards(entries: Sequence[Mapping[str, Any]]) -> list[RewardCall]:
    """The functions of a plan. RecipeError where a file cannot be imported or lacks a function."""
    found: list[RewardCall] = []
    for index, entry in enumerate(entries):
        path, given = f"reward[{index}].function", entry["function"]
        file: str | None = None
        name = given
        function: Any = SHIPPED.get(given)
        if function is None:
            file, name = split_function(given)
            function = getattr(import_file(Path(file), path), name, None)
            if not callable(function):
                message = f"the file has no function {name}"
                raise RecipeError(Problem("reward-missing", message, file, path=path))
        taken = [one.name for one in found if one.name.partition("#")[0] == name]
        unique = f"{name}#{len(taken) + 1}" if taken else name
        call = partial(_with, function, {**SHIPPED_REWARDS.get(given, {}), **entry["arguments"]})
        found.append(RewardCall(unique, path, file, entry["weight"], entry["time_limit"], call))
    return found


def _with(function: Callable[..., Any], arguments: Mapping[str, Any], /, **given: Any) -> Any:
    """The function's values; its own arguments come before columns of the same name."""
    return function(**{**given, **arguments})


def for_trl(reward: RewardCall) -> Callable[..., list[float | None]]:
    """The function as GRPOTrainer calls it; RunFailed where it fails."""

    def scored(prompts: Any, completions: Any, completion_ids: Any, **given: Any) -> list[float | None]:
        rows = given.pop(ROW)
        columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]} | given
        places = [row["place"] for row in rows]
        return values_of(reward, places, prompts, completions, completion_ids, columns, RunFailed)

    scored.__name__ = reward.name
    return scored


def values_of(
    reward: RewardCall, places: Sequence[str], prompts: Sequence[Any], completions: Sequence[Any],
    completion_ids: Sequence[Any], columns: Mapping[str, Any], kind: type[EffilaunchError],
) -> list[float | None]:  # fmt: skip
    """One number or None for each completion. `kind` of error, with function and row, for anything else.

    columns: name -> one value a row, or what all rows share (trl's `trainer_state`, `log_extra`).
    """

    def call(rows: slice, limit: float) -> list[float | None]:
        own = {name: value[rows] if isinstance(value, list) else value for name, value in columns.items()}
        with time_limit(limit):
            returned = reward.function(
                prompts=prompts[rows], completions=completions[rows],
                completion_ids=completion_ids[rows], **own,
            )  # fmt: skip
            return _numbers(returned, places[rows])

    try:
        return call(slice(0, len(completions)), reward.time_limit)
    except (Exception, SystemExit, TooSlow) as error:
        row = _row_of(error, places, call)
        raise _explained(reward, error, row, kind) from error


class BadValue(Exception):
    """What a function returned is no reward."""

    def __init__(self, message: str, row: str | None = None) -> None:
        super().__init__(message)
        self.row = row


def _numbers(returned: Any, places: Sequence[str]) -> list[float | None]:
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        raise BadValue(f"returned {type(returned).__name__}, expected a list of numbers")
    values = list(returned)
    if len(values) != len(places):
        raise BadValue(f"returned {len(values)} values for {len(places)} completions")
    found: list[float | None] = []
    for value, place in zip(values, places, strict=True):
        if value is None:
            found.append(None)
            continue
        if isinstance(value, str | bytes):
            raise BadValue(f"returned text ({type(value).__name__}), expected a number or None", place)
        try:
            number = float(value)
        except (TypeError, ValueError):
            message = f"returned {type(value).__name__}, expected a number or None"
            raise BadValue(message, place) from None
        if not math.isfinite(number):
            raise BadValue(f"returned {number}; None leaves a completion out", place)
        found.append(number)
    return found


def _row_of(error: BaseException, places: Sequence[str], call: Callable[..., Any]) -> str | None:
    """The row that an error is about, by calling the function for each row alone."""
    if isinstance(error, BadValue) and error.row is not None:
        return error.row
    for index, place in enumerate(places[:LOOKED_AT]):
        try:
            call(slice(index, index + 1), ALONE_S)
        except (Exception, SystemExit, TooSlow) as found:
            if type(found) is type(error):
                return place
    return None


def _explained(
    reward: RewardCall, error: BaseException, row: str | None, kind: type[EffilaunchError]
) -> EffilaunchError:
    where = f" for the row {row}" if row is not None else " for a batch, and for none of its rows alone"
    line = None if reward.file is None else error_line(error, Path(reward.file))
    hint = None
    if isinstance(error, TooSlow):
        code, what = "reward-hangs", f"took longer than {reward.time_limit:g} s"
        hint = "make it faster, or raise `time_limit` of the entry"
    elif isinstance(error, BadValue):
        code, what = "reward-value", str(error)
    else:
        code, what = "reward-failed", f"raised {error_text(error)}"
    message = f"the reward function {reward.name} {what}{where}"
    return kind(Problem(code, message, reward.file, line, reward.path, hint))
