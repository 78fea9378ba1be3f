"""Whether a message contributes to the loss: one flag a message, whatever the row calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.facts.safe_files import parse_json
from launcher.train.data.sources import Row, bad_row

TRAIN = "train"
"""The key under which a canonical message holds its flag; absent where the row says nothing."""

_LEARNS = frozenset({
    "train", "training", "trainable", "train_on_turn", "learn", "loss", "loss_weight", "loss_scale",
    "loss_mask", "step_loss_mask", "weight",
})  # fmt: skip
"""Keys of which 1 or true means that the message is learned: OpenAI, axolotl, ms-swift, LLaMA-Factory,
xtuner, slime, tinker."""
_WEIGHTS = frozenset({"weight", "loss_weight", "loss_scale"})
_LEAVES_OUT = frozenset({"masked"})
"""Keys of which true means that it is not: torchtune."""
_PARTS = frozenset({
    "mask", "masks", "masked", "masking", "loss", "weight", "weights", "train", "training", "trainable",
    "learn",
})  # fmt: skip
OF_ROWS = ("message_loss_mask", "loss_mask", "train_mask", "mask", "loss_weight", "train", "weight")
"""Columns beside the messages that say which of them contribute to the loss."""
_WRITE = 'write "train": true (it contributes to the loss) or "train": false (it does not) into the message'
_HUMAN = ("human", "user")


def train_flag(row: Row, place: str, item: Mapping[str, Any]) -> bool | None:
    """What a raw message says about its loss; None where it says nothing.

    RecipeError for a key whose meaning is not known, for weights other than 0 and 1, and for two keys that
    contradict each other.
    """
    found: dict[str, bool] = {}
    for key, value in item.items():
        if value is None or not is_mask_key(key):
            continue
        name = key.lower()
        if name not in _LEARNS and name not in _LEAVES_OUT:
            raise bad_row(row, f"{place} has {key}, which cannot be used as a mask here", _WRITE)
        flag = _flag(value)
        if flag is None:
            message = f"{place}.{key} is {value!r}; only 0, 1, true and false can be used"
            raise bad_row(row, message, _WRITE)
        found[key] = flag is (name in _LEARNS)
    if len(set(found.values())) > 1:
        raise bad_row(row, f"{place}: {' and '.join(found)} contradict each other", _WRITE)
    return next(iter(found.values()), None)


def is_mask_key(key: Any) -> bool:
    """Whether a key of a message is about the loss: `loss`, `train_detail`, `trainOnTurn`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key)).lower().split("_")
    return not _PARTS.isdisjoint(words)


def row_flags(row: Row) -> list[bool | None] | None:
    """The flags that a column beside the messages gives them; None where there is no such column.

    RecipeError for one that cannot be used.
    """
    given = {key: _parsed(row.values[key]) for key in OF_ROWS if row.values.get(key) is not None}
    given = {key: value for key, value in given.items() if not _says_nothing(key, value)}
    if not given:
        return None
    names = ", ".join(f"{key}: null" for key in given)
    hint = f"`columns: {{{names}}}` trains without it, or {_WRITE}"
    if len(given) > 1:
        raise bad_row(row, f"the columns {' and '.join(given)} both mask messages", hint)
    key, value = next(iter(given.items()))
    flags = [_flag(one) for one in value] if isinstance(value, list | tuple) else [None]
    if key in ("mask", "weight") or None in flags:
        message = f"column {key} holds {str(value)[:80]}, which cannot be used as a mask of the messages"
        raise bad_row(row, message, hint)
    return list(flags)


def masks_row(value: Any, column: str = "") -> bool:
    """Whether a column of a mask's name leaves something out: a false flag, a list of numbers up to 1, or a
    weight below 1 (`loss` with such a value is a measured one)."""
    value = _parsed(value)
    if column.lower() in _WEIGHTS and _is_weight(value) and value < 1:
        return True
    if isinstance(value, list | tuple):
        return any(one != 1 for one in value) and all(map(_is_weight, value))
    return _flag(value) is False


def refuse_masks(row: Row, sides: Mapping[str, Any]) -> None:
    """Take the flags out of a preference row's messages; RecipeError where an answer is not to be learned."""
    flags = row_flags(row)
    for name, messages in sides.items():
        masked = [message.pop(TRAIN, None) for message in messages if isinstance(message, dict)]
        if flags is not None or (name != "prompt" and False in masked):
            what = f"a message of {name} is masked" if flags is None else "a column masks messages"
            raise bad_row(
                row,
                f"{what}, and preference tuning learns whole answers",
                "remove the mask, or delete the row",
            )


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a column changes nothing: every message is learned, or, as NeMo says it, the user is masked.

    `train` and `weight` that are neither a flag nor a list are data of another kind.
    """
    if key == "mask" and isinstance(value, str) and value.lower() in _HUMAN:
        return True
    if key in ("train", "weight") and _flag(value) is None and not isinstance(value, list | tuple):
        return key == "train" or isinstance(value, str)
    return key != "mask" and _flag(value) is True


def _parsed(value: Any) -> Any:
    """A flag, number or list that is text, as in CSV files: `False`, `0`, `[0, 1]`. Others as they are."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.lower())
    except ValueError:
        return value


def _is_weight(value: Any) -> bool:
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def _flag(value: Any) -> bool | None:
    """0 and 1 in their spellings as a flag; None for everything else."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def merged_flag(row: Row, place: str, flags: Sequence[bool | None]) -> bool | None:
    """The flag of messages that make one turn; RecipeError where they differ."""
    if len({flag is not False for flag in flags}) > 1:
        message = f"{place} continues the assistant's turn before it, of which only a part is to be learned"
        raise bad_row(row, message, "give all messages of the turn the same mask")
    return next((flag for flag in flags if flag is not None), None)
