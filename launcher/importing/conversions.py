"""One key of another tool -> a recipe key: values converted, or the reason why it is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.importing.reading import Effect, Given, Reading, shown

_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
Convert = Callable[[Any], Any]
"""A value there -> the recipe's; None: it sets nothing. ValueError: what was expected; or `Refused`."""
Taker = Callable[[Reading, Given], None]
"""Takes, drops or refuses one key."""


class Refused(Exception):
    """No recipe can be made of this value: the message after the key, and a hint."""


@dataclass(frozen=True, slots=True)
class To:
    """A key whose converted value is the value of one recipe key."""

    key: str
    convert: Convert
    note: str = ""
    """For the page about coming from that tool."""
    comment: str = ""
    """For the recipe."""
    effect: Effect = Effect.NEEDED
    """Of a value that cannot be converted."""
    default: Any = None
    """The tool's own, for `Peer.fill`."""
    required: str | None = None
    """Why a recipe needs the key, for `Peer.fill`: the end of a sentence about the file."""

    def __call__(self, reading: Reading, given: Given) -> None:
        try:
            value = self.convert(given.value)
        except Refused as error:
            reading.refuse(given, *error.args)
        except ValueError as error:
            hint = f"write `{self.key}`" if self.effect is Effect.NEEDED else ""
            reading.drop(given, self.effect, f"expected {error}", hint)
        else:
            reading.know(given.name)
            if value is not None:
                reading.take(self.key, value, given, note=self.comment)


@dataclass(frozen=True, slots=True)
class Drop:
    """A key that is dropped for one reason."""

    effect: Effect
    reason: str
    hint: str = ""
    when: bool | None = None
    """Of a switch: the value that is reported; the other one is the default here, too."""

    def __call__(self, reading: Reading, given: Given) -> None:
        if self.when is None or as_bool(given.value) is self.when:
            reading.drop(given, self.effect, self.reason, self.hint)
        else:
            reading.know(given.name)


def ignore(reading: Reading, given: Given) -> None:
    """A key that needs no report."""
    reading.know(given.name)


def take_nvme(reading: Reading, given: Given) -> None:
    """The folder of an offload to nvme: one holds all that is offloaded."""
    if reading.value("sharding.nvme_path") not in (None, given.value):
        reading.drop(given, Effect.NONE, "one folder holds all that is offloaded to nvme")
    elif str(given.value).lower() == "none":
        reading.know(given.name)
    else:
        reading.take("sharding.nvme_path", given.value, given)


def as_bool(value: Any) -> bool | None:
    """A switch, also as the text of a flag or of YAML 1.1; None where it is none."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def as_number(value: Any) -> int | float | None:
    """A number, also as text such as 2e-5; None where it is none, nor finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    if isinstance(value, int):
        return value
    return int(number) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else number


def is_off(value: Any) -> bool:
    """Whether a value means that something is not used."""
    return value in (None, False, 0, "", [], {}) or str(value).strip().lower() in (
        "false",
        "no",
        "off",
        "none",
    )


def listed(value: Any) -> list[Any]:
    """A list, or one value as a list."""
    return value if isinstance(value, list) else [value]


def dtype_name(value: Any) -> str | None:
    """float32, bfloat16, float16 or auto from text, `torch.bfloat16` or a short form; None for others."""
    text = str(value).rpartition(".")[2].strip().lower()
    text = _DTYPES.get(text, text)
    return text if text in ("float32", "bfloat16", "float16", "auto") else None


def text(value: Any) -> str:
    """A text, not empty."""
    if isinstance(value, bool | dict | list) or not str(value).strip():
        raise ValueError("a text")
    return str(value)


def label(value: Any) -> str | None:
    """A text; an empty one sets nothing."""
    return str(value) if value else None


def revision(value: Any) -> str | None:
    """A branch or a commit; main is the default here, too."""
    branch = text(value)
    return None if branch == "main" else branch


@dataclass(frozen=True, slots=True)
class Number:
    """A number, also as text or as 8.0."""

    expected: str
    least: float = float("-inf")
    most: float = float("inf")
    kind: type[int] | type[float] | None = int
    """float: a real number; None: as it is."""
    unset: tuple[Any, ...] = ()
    """Values that set nothing."""

    def __call__(self, value: Any) -> Any:
        number = as_number(value)
        if value in self.unset or number in self.unset:
            return None
        fits = number is not None and self.least <= number <= self.most
        if number is None or not fits or (self.kind is int and number != int(number)):
            raise ValueError(self.expected)
        return number if self.kind is None else self.kind(number)


whole = Number("a whole number from 1", 1)
count = Number("a number from 1", 1, unset=(-1,))
"""Of nodes, processes or the like."""
number = Number("a number", kind=None, unset=("auto",))
real = Number("a number", kind=float, unset=("auto",))
stage = Number("a stage from 0 to 3", 0, 3)
"""Of ZeRO."""


def tokens(value: Any) -> int:
    """A length in tokens."""
    length: int = whole(value)
    if not 8 <= length <= 1_000_000_000:
        raise ValueError("a number of tokens from 8")
    return length


def several(value: Any) -> int | None:
    """A number of devices that share something; one alone sets nothing."""
    size = as_number(value)
    if size is None:
        raise ValueError("a number of devices")
    return int(size) if size > 1 else None


def choice(values: Mapping[str, Any], message: str, hint: str | None = None) -> Convert:
    """One of the names, also as the end of a dotted one; others are refused with the message."""

    def convert(value: Any) -> Any:
        name = str(value).rpartition(".")[2].lower()
        if name not in values:
            raise Refused(f"is {shown(value)}{message}", hint)
        return values[name]

    return convert


def offload(value: Any) -> str | None:
    """Where ZeRO offloads to."""
    if value in ("cpu", "nvme"):
        return str(value)
    if str(value).lower() not in ("none", "false"):
        raise ValueError("none, cpu or nvme")
    return None


def switch(value: Any) -> bool:
    """A switch, also as YAML 1.1 spells it."""
    found = as_bool(value)
    if found is None:
        raise ValueError("true or false")
    return found


def on(value: Any) -> Convert:
    """A switch whose true means `value`, and whose false sets nothing."""
    return lambda given: value if as_bool(given) else None


def if_on(value: Any) -> bool | None:
    """A switch that sets nothing where it is off."""
    return switch(value) or None


def texts(value: Any) -> list[str] | None:
    """A list of texts as they are, or one text with commas and blanks; None where it is empty."""
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list) or any(isinstance(item, dict | list) for item in items):
        raise ValueError("a list of texts")
    return [str(item) for item in items if str(item)] or None
