"""The recipe of another tool: its keys with their lines, and tables of what becomes of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.facts.safe_files import parse_json
from launcher.importing.arguments import as_bool, as_number, take_adapter, take_field
from launcher.importing.reading import Effect, Place, Reading, shown
from launcher.recipe.suggestions import close_key
from launcher.recipe.yaml_reader import parse_yaml

Convert = Callable[[Any], Any]
"""A value of the other tool -> the recipe's; ValueError says what was expected, None: as if absent."""
Row = tuple[str, str, str]
"""(key there, key of the recipe or empty, note), for a page about coming from that tool."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key whose value stands under one key of a recipe."""

    name: str
    to: str
    convert: Convert | None = None
    """None: as the field of `trainer` or `adapter` that it becomes."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """Keys that no recipe key says, for one reason; they need no word where they are off."""

    effect: Effect | None
    """None: no recipe can be made of it."""
    reason: str
    names: str
    """Parted by spaces."""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """Which keys a tool has."""

    name: str
    version: str
    keys: Mapping[str, Any]
    """Key -> its default there; None where that is nothing, or not a plain value."""
    of_unknown: str
    """What the tool does with a key that it does not know: `ignores it`."""
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the mappings inside: a data set's."""


@dataclass(slots=True)
class Peer:
    """One recipe of another tool, while it is read."""

    tool: Tool
    reading: Reading
    values: dict[str, Any]
    """What the file says; a key with null is as one that is absent, everywhere."""
    lines: Mapping[str, int]
    """Dotted path -> line."""

    def line(self, key: str) -> int | None:
        return self.lines.get(key)

    def get(self, key: str) -> Any:
        """The value of a key, which is then dealt with; None where it is absent."""
        self.reading.know(key)
        return self.values.get(key)

    def listed(self, key: str) -> list[str]:
        """A list of texts, or one text with commas; what is none is dropped."""
        value = self.get(key)
        try:
            return [] if value is None else texts(value) or []
        except ValueError as error:
            self.drop(key, Effect.NEEDED, f"expected {error}")
            return []

    def switch(self, key: str) -> bool:
        """Whether a switch is on."""
        return as_bool(self.get(key)) is True

    def take(self, to: str, value: Any, key: str, *others: str, note: str = "") -> None:
        """A value for a recipe key that the named keys of the file say."""
        given = [name for name in (key, *others) if name in self.values]
        said = ", ".join(f"{name}: {shown(self.values[name])}" for name in given)
        plain = len(given) == 1 and type(value) is type(self.values[key]) and value == self.values[key]
        self.reading.take(to, value, self.line(key), key if plain else said or key, note=note)
        self.reading.know(key, *others)

    def default(self, to: str, value: Any, said: str, note: str = "") -> None:
        """What the tool uses where the file is silent. said: its key, and the value if that is another."""
        said = said if ":" in said else f"{said}: {shown(value)}"
        self.reading.take(to, value, None, said, default=True, note=note)

    def drop(self, key: str, effect: Effect, reason: str, hint: str = "") -> None:
        """A key that no recipe key says."""
        self.reading.drop(key, self.values.get(key), self.line(key), effect, reason, hint)

    def refuse(self, key: str, message: str, hint: str | None = None) -> None:
        """No recipe may be made of this file, for what this key says."""
        self.reading.refuse(key, self.line(key), message, hint)


@cache
def load_tool(table: str, name: str, of_unknown: str) -> Tool:
    """A tool by its shipped list of keys."""
    file = Path(__file__).parent / "tables" / f"{table}.json"
    content = parse_json(file.read_text(encoding="utf-8"))
    lists = {key: tuple(value) for key, value in content.items() if key not in ("version", "keys")}
    return Tool(name, content["version"], content["keys"], of_unknown, lists)


def open_peer(text: str, file: str, tool: Tool, overrides: Mapping[str, Any] | None = None) -> Peer:
    """Read the YAML or JSON. overrides: what a launch line says over the file.

    RecipeError when it is no YAML, or no mapping.
    """
    document = parse_yaml(text, file, last_wins=True)
    wrong = [problem for problem in document.problems if problem.code != "duplicate-key"]
    if wrong:
        raise RecipeError(wrong)
    values = document.data if isinstance(document.data, dict) else {}
    reading = Reading(f"{tool.name} recipe", file)
    for problem in document.problems:
        key = problem.path or ""
        reading.drop(key, "", problem.line, Effect.NONE, f"{problem.message}: the last one counts there")
        reading.seen.discard(key)  # that last one is still to be read
    given = {**values, **(overrides or {})}
    reading.know(*(key for key, value in given.items() if value is None))
    lines = {path: line for path, line in document.lines.items() if path not in (overrides or {})}
    return Peer(tool, reading, {k: v for k, v in given.items() if v is not None}, lines)


def close_peer(peer: Peer, overrides: Iterable[str] = (), place: Place | None = None) -> Reading:
    """The reading, whose overridden keys stand where the launch line does."""
    reading, names = peer.reading, set(overrides)
    if reading.task.ranks_answers:
        _leave_out_of_pairs(reading)
    if names and place is not None:
        for key, taken in reading.taken.items():
            if taken.said.partition(":")[0] in names and not taken.is_default:
                reading.taken[key] = replace(taken, place=place)
        alone = reading.file == place.file  # no recipe beside the line
        reading.dropped[:] = [
            replace(entry, place=place)
            if re.split(r"[:.\[]", entry.key)[0] in names or (alone and entry.place.line is None)
            else entry
            for entry in reading.dropped
        ]
        for name, where in reading.names.items():
            if where.line is None:
                reading.names[name] = place
    return reading


def _leave_out_of_pairs(reading: Reading) -> None:
    """What a recipe says of rows of text, and not of preference rows."""
    for name in ("packing", "padding_free", "streaming", "loss_on", "pad_to_multiple_of", "metrics"):
        taken = reading.taken.pop(f"data.{name}", None)
        if taken is not None and not taken.is_default:
            reason = "preference rows are read before the training, and padded"
            key, _, value = taken.said.partition(": ")
            reading.drop(key, value or taken.value, taken.place.line, Effect.NONE, reason)


def take_keys(peer: Peer, keys: Iterable[Key]) -> None:
    """Take every key of the table that the file has."""
    for key in keys:
        if key.name not in peer.values or key.name in peer.reading.seen:
            continue
        value = peer.values[key.name]
        if key.convert is None:
            _take_checked(peer, key, value)
            continue
        try:
            converted = key.convert(value)
        except ValueError as error:
            peer.drop(key.name, Effect.NEEDED, f"expected {error}", f"write `{key.to}`")
            continue
        peer.reading.know(key.name)
        if converted is not None:
            peer.take(key.to, converted, key.name)


def _take_checked(peer: Peer, key: Key, value: Any) -> None:
    """A value that the field of the trainer or the adapter checks."""
    section, _, name = key.to.partition(".")
    if section == "adapter":
        take_adapter(peer.reading, name, value, peer.line(key.name), key.name)
    else:
        take_field(peer.reading, key.name, value, peer.line(key.name), name)


def leave_keys(peer: Peer, table: Iterable[Left]) -> None:
    """Drop every key of the table that the file has, with its reason; what is off needs no word."""
    for entry in table:
        for name in entry.names.split():
            if name not in peer.values or name in peer.reading.seen:
                continue
            if _says_nothing(peer, name):
                peer.reading.know(name)
            elif entry.effect is None:
                peer.refuse(name, f"is {shown(peer.values[name])}: {entry.reason}", entry.hint or None)
            else:
                peer.drop(name, entry.effect, entry.reason, entry.hint)


def leave_rest(peer: Peer, known_elsewhere: Iterable[str] = ()) -> None:
    """Drop what no table names: keys that the tool has, and keys that nobody knows."""
    names = {*peer.tool.keys, *known_elsewhere}
    for name in list(peer.values):
        if name in peer.reading.seen:
            continue
        if name in peer.tool.keys:
            if _says_nothing(peer, name):
                peer.reading.know(name)
            else:
                peer.drop(name, Effect.TRAINING, f"{peer.tool.name}'s own; no recipe key says it")
            continue
        near = close_key(name, names)
        reason = f"no key of {peer.tool.name} {peer.tool.version}, which {peer.tool.of_unknown}"
        # Where the tool refuses it, the file was for another version, in which it may have said something.
        effect = Effect.NONE if peer.tool.of_unknown == "ignores it" else Effect.TRAINING
        peer.drop(name, effect, reason, f"did you mean {near}?" if near else "")


def is_off(value: Any) -> bool:
    """Whether a value says that something is not used."""
    return value in (None, False, 0, "", [], {}) or str(value).strip().lower() in (
        "false",
        "no",
        "off",
        "none",
    )


def _says_nothing(peer: Peer, name: str) -> bool:
    """Whether a key has its default, or is off where nothing else is the default."""
    default = peer.tool.keys.get(name)
    if is_off(peer.values[name]):
        return default is None or is_off(default)
    return default is not None and type(default) is type(peer.values[name]) and default == peer.values[name]


def text(value: Any) -> str:
    """A text, not empty."""
    if isinstance(value, bool | dict | list) or not str(value).strip():
        raise ValueError("a text")
    return str(value)


def whole(value: Any) -> int:
    """A whole number from 1, also as text or as 8.0."""
    number = as_number(value)
    if number is None or number < 1 or number != int(number):
        raise ValueError("a whole number from 1")
    return int(number)


def tokens(value: Any) -> int:
    """A length in tokens."""
    length = whole(value)
    if not 8 <= length <= 1_000_000_000:
        raise ValueError("a number of tokens from 8")
    return length


def number(value: Any) -> int | float:
    """A number, also as text such as 2e-5."""
    found = as_number(value)
    if found is None:
        raise ValueError("a number")
    return found


def share(value: Any) -> float:
    """A number from 0 to 1, as a dropout is."""
    found = as_number(value)
    if found is None or not 0 <= found <= 1:
        raise ValueError("a number from 0 to 1")
    return float(found)


def switch(value: Any) -> bool:
    """A switch, as YAML 1.1 spells it, too."""
    found = as_bool(value)
    if found is None:
        raise ValueError("true or false")
    return found


def if_on(value: Any) -> bool | None:
    """A switch that says nothing where it is off."""
    return switch(value) or None


def texts(value: Any) -> list[str] | None:
    """A list of texts, or one text with commas; None where it is empty."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or any(isinstance(item, dict | list) for item in items):
        raise ValueError("a list of texts")
    return [str(item).strip() for item in items if str(item).strip()] or None


def rows_of(keys: Iterable[Key], handled: Iterable[Row], left: Iterable[Left]) -> list[Row]:
    """The table of a page: what is taken, then what is not."""
    rows = [(key.name, key.to, key.note) for key in keys]
    rows += list(handled)
    for entry in left:
        word = "refused" if entry.effect is None else entry.effect.value
        rows += [(name, "", f"{word}: {entry.reason}") for name in entry.names.split()]
    return rows
