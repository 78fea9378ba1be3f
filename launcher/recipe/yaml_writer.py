"""Write recipes as YAML: `recipe_text` for people, with comments; `snapshot` for jobs, with every value."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import yaml

from launcher.machine.hardware import Hardware
from launcher.recipe.env import with_references
from launcher.recipe.loading import LoadedRecipe
from launcher.recipe.yaml_reader import parse_yaml

WIDTH = 110
_COMMENTS_AT = 37
_CLOSE = ("precision", "sharding", "global_batch_size")
"""Keys without blank lines between them."""
_BLOCKS = ("model", "data", "trainer", "launch")
"""Sections that are always written with one key per line."""
_OLD_BOOLEANS = ("y", "n", "yes", "no", "on", "off")
"""Strings here, but booleans in YAML 1.1: quoted."""


def recipe_text(
    data: Mapping[str, Any], notes: Mapping[str, str] | None = None, head: Sequence[str] = ()
) -> str:
    """Nested values as YAML in their order, equal when read back.

    notes: dotted path (`data.train[0].format`) -> the reason for the value, its comment.
    head: lines of the comment at the top, without `#`.
    """
    notes = notes or {}
    lines = [f"# {line}".rstrip() for line in head]
    before: str | None = None
    for key, value in data.items():
        if lines and not (key in _CLOSE and before in _CLOSE):
            lines.append("")
        lines += _entry(key, value, key, notes, 0)
        before = key
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, path: str, notes: Mapping[str, str], indent: int) -> Iterator[str]:
    """The lines of one key."""
    start = f"{' ' * indent}{flow(str(key))}:"
    inside = (f"{path}.", f"{path}[")
    has_notes = any(name.startswith(inside) for name in notes)
    if isinstance(value, str) and (block := _block_text(value, indent + 2)) is not None:
        yield from _noted(f"{start} {block[0]}", notes.get(path), indent)
        yield from block[1:]
        return
    listed = isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    long = isinstance(value, Mapping) and bool(value) and (has_notes or path in _BLOCKS)
    line = f"{start} {flow(value)}"
    if len(line) > WIDTH and isinstance(value, Mapping) and value:
        long = True
    if len(line) > WIDTH and isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield from (start, *(f"{' ' * indent}  - {flow(item)}" for item in value))
        return
    if not (listed or long):
        yield from _noted(line, notes.get(path), indent)
        return
    yield from _noted(start, notes.get(path), indent)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entry(name, item, f"{path}.{name}", notes, indent + 2)
        return
    for number, item in enumerate(value):
        yield from _item(item, f"{path}[{number}]", notes, indent + 2)


def _item(item: Mapping[str, Any], path: str, notes: Mapping[str, str], indent: int) -> Iterator[str]:
    """The lines of one mapping of a list, with the dash before its first key."""
    lines = [
        line for key, value in item.items() for line in _entry(key, value, f"{path}.{key}", notes, indent + 2)
    ]
    first = next((n for n, line in enumerate(lines) if not line.lstrip().startswith("#")), 0)
    for number, line in enumerate(lines):
        yield f"{' ' * indent}- {line[indent + 2 :]}" if number == first else line
    if not lines:
        yield f"{' ' * indent}- {{}}"


def _noted(line: str, note: str | None, indent: int) -> Iterator[str]:
    """The line with its comment after it, or above it where that would be too long."""
    if not note:
        yield line
        return
    note = " ".join(note.split())
    after = f"{line:{_COMMENTS_AT - 2}}  # {note}"
    if len(after) <= WIDTH:
        yield after
        return
    margin = f"{' ' * indent}# "
    yield from textwrap.wrap(
        note, WIDTH, initial_indent=margin, subsequent_indent=margin,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    yield line


def _block_text(value: str, indent: int) -> list[str] | None:
    """A multi-line string as a block scalar; None for one line, or where it would not round-trip."""
    if "\n" not in value:
        return None
    lines = [f"{' ' * indent}{line}" if line else "" for line in value.split("\n")]
    made = ["|-", *lines]
    read = parse_yaml("key: " + "\n".join(made), "").data
    return made if read == {"key": value} else None


def flow(value: Any) -> str:
    """A value on one line, equal when read back."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str):
        # Plain where it round-trips alone, as a key and inside brackets.
        places = value, f"{{{value}: [{value}]}}"
        same = [parse_yaml(text, "").data for text in places] == [value, {value: [value]}]
        if same and value.lower() not in _OLD_BOOLEANS:
            return value
        return f'"{"".join(map(_letter, value))}"'
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value)


def _letter(letter: str) -> str:
    """A character between double quotes. Unlike JSON, YAML has no surrogate pairs."""
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"


def _number(value: float) -> str:
    """`2.0e-4` rather than `0.0002`."""
    text = repr(value)
    mantissa, mark, exponent = text.partition("e")
    if not mark and 0 < abs(value) < 1e-3:
        mantissa, mark, exponent = f"{Decimal(text):e}".partition("e")  # unrounded
    if not mark:
        return text
    made = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}"
    return made if float(made) == value else text


_HEAD = """\
# {recipe}
# as it was when its job was submitted, with what it extends and overrides; later edits do not change this.
"""


class _Dumper(yaml.SafeDumper):
    """Quotes every string, so that all YAML readers agree on what is a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(dumper: _Dumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _quoted)


def snapshot(loaded: LoadedRecipe, hardware: Hardware) -> str:
    """A loaded recipe merged into one YAML file. hardware: what it is planned for, also by --on.

    Paths are absolute; `${ENV:NAME}` is resolved where the job reads the recipe.
    """
    data: dict[str, Any] = with_references(loaded.recipe.model_dump(exclude_unset=True), "", loaded.kept)
    data["hardware"] = {key: getattr(hardware, key) for key in ("num_nodes", "devices_per_node", "device")}
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    name = str(loaded.path.absolute())
    return _HEAD.format(recipe=name if name.isprintable() else ascii(name)) + text
