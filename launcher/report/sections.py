"""What people are shown, as data: sections of rows, tables and notes, described once for every place. Pure.

`text.py` renders them for a terminal, `html/blocks.py` as elements, `markdown.py` for a model card.

A figure is one line of a description: a template such as `"{steps:count}[ of {planned:count} planned]"`,
filled from an object whose values may be missing or of any type. A part in brackets is left out where one of
its values is missing; in backticks is an identifier, a path, or the value of a setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import Any, Literal, cast

from launcher.report import values

Unit = Literal["bytes", "count", "gib", "number", "parameters", "rate", "seconds", "share"]
_TEXTS: Mapping[Unit, Callable[[Any], str]] = {
    "bytes": values.size,
    "count": values.count,
    "gib": values.gibibytes,
    "number": values.figure,
    "parameters": values.parameters,
    "rate": values.rate,
    "seconds": values.duration,
    "share": values.share,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit; a dash where it is missing or no number."""

    value: Any
    unit: Unit = "number"

    def __str__(self) -> str:
        return _TEXTS[self.unit](self.value)


class Code(str):
    """An identifier, a path, a value of a setting."""

    __slots__ = ()


class Part(str):
    """A component of memory, which has a color in charts."""

    __slots__ = ()


Inline = Sequence[str | Figure]
"""Texts and figures that follow each other in one line."""
Cell = str | Figure | Sequence[Inline]
"""A sequence: lines, of which those after the first matter less."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The description of a row: templates of its name, its value, and what is read after it."""

    name: str
    value: str
    note: str = ""
    is_main: bool = False
    """Whether it is among the few that a page begins with."""


MAIN = True
"""Of a fact: it is among these."""


@dataclass(frozen=True, slots=True)
class Row:
    """A name with its value, and a note that is read after it: `11.1 GiB`, `of 24 GiB`."""

    name: str
    value: Inline
    note: Inline = ()
    is_main: bool = False

    @property
    def parts(self) -> Inline:
        goes_on = not self.note or str(self.note[0]).startswith((",", ";"))
        return (*self.value, *([] if goes_on else [" "]), *self.note)


@dataclass(frozen=True, slots=True)
class Rows:
    """Names with their values."""

    rows: Sequence[Row]


Columns = Mapping[str, str | Sequence[str]]
"""Head -> template of its cells; several templates are lines of one cell."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first cells name their rows."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kind: Literal["", "numbers", "stack", "settings stack"] = ""
    """`numbers` are aligned to the right; `stack`: cells are below each other where the page is narrow."""
    heading: str = ""


def filled(template: str, scope: Mapping[str, Any]) -> Inline | None:
    """The texts and figures of a template; None where a value outside of brackets is missing."""
    parts: list[str | Figure] = []
    for kind, inside in _parsed(template):
        if kind == "text":
            parts.append(inside)
        elif kind in ("code", "optional"):
            found = filled(inside, scope)
            if found is None and kind == "code":
                return None
            parts += [Code(line(found or ()))] if kind == "code" else found or ()
        elif (part := _part(values.at(scope, *inside.split(".")), cast(Unit, kind))) is None:
            return None
        else:
            parts.append(part)
    return parts


_PARTS = re.compile(r"`([^`]*)`|\[([^\[\]]*)\]|([^`\[]+)")


@cache
def _parsed(template: str) -> Sequence[tuple[str, str]]:
    """Kind and inside of each part: text, code, optional; or a unit ("" for any value) and a path."""
    found = []
    for code, optional, plain in _PARTS.findall(template):
        if code or optional:
            found.append(("code" if code else "optional", code or optional))
        for text, field, unit, _ in Formatter().parse(plain):
            found += [("text", text)] if text else []
            found += [(unit or "", field)] if field is not None else []
    return found


def _part(value: Any, unit: Unit | Literal[""]) -> str | Figure | None:
    """The value as a figure or as a text; None where it is missing."""
    if unit:
        return Figure(value, unit) if values.is_number(value) else None
    if value in (None, "", [], {}):
        return None
    return value if isinstance(value, str | Figure) else values.shown(value)


def line(parts: Iterable[str | Figure]) -> str:
    """The parts as one text."""
    return "".join(map(str, parts))


def rows_of(facts: Iterable[Fact], scope: Mapping[str, Any]) -> list[Row]:
    """A row for each fact whose value is known."""
    found = []
    for fact in facts:
        name, value = filled(fact.name, scope), filled(fact.value, scope)
        if name is not None and value:
            shown = Code(line(name)) if fact.name.startswith("`") else line(name)
            found.append(Row(shown, value, filled(fact.note, scope) or (), fact.is_main))
    return found


def table_of(
    name: str,
    columns: Columns,
    scopes: Iterable[Mapping[str, Any]],
    kind: Literal["", "numbers", "stack", "settings stack"] = "",
    heading: str = "",
) -> list[Table]:
    """A table with a row for each object, without columns that nothing is in; no table without objects."""
    rows = [[_cell(template, scope) for template in columns.values()] for scope in scopes]
    used = [
        at for at in range(len(columns)) if at == 0 or any(row[at] not in (values.NONE, "") for row in rows)
    ]
    head = [head for at, head in enumerate(columns) if at in used]
    cells = [[row[at] for at in used] for row in rows]
    return [Table(name, head, cells, kind, heading)] if rows else []


def _cell(template: str | Sequence[str], scope: Mapping[str, Any]) -> Cell:
    if not isinstance(template, str):
        return [parts for each in template if (parts := filled(each, scope))] or values.NONE
    parts = filled(template, scope)
    if parts is None:
        return values.NONE
    return parts[0] if len(parts) == 1 else line(parts)


@dataclass(frozen=True, slots=True)
class Notes:
    """Sentences, one below the other."""

    items: Sequence[Inline]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    parts: Inline
    kind: Literal["", "small", "soft", "heading", "bad"] = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines that are not wrapped so that they can be copied: a command, a file, a traceback."""

    name: str
    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Folded:
    """What a page shows on request, and a terminal not at all."""

    summary: str
    block: Block
    note: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks next to each other where the page is wide enough, or about one problem."""

    blocks: Sequence[Block]
    kind: Literal["beside", "card bad"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the data: pieces of text, each with whether it contributes to the loss."""

    name: str
    about: str
    pieces: Sequence[tuple[str, bool]]
    images: Sequence[tuple[str, str]] = ()
    """Data URI of a small image ("" for none), and its description."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Elements of a page that its script fills."""

    markup: str


# --- charts, which are only drawn in pages

Point = tuple[float, float | None]
"""Step and value; None is a gap."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of values, by ascending step."""

    label: str
    points: Sequence[Point]
    marked: bool = False
    """Whether each value gets a dot, as those of evaluations do."""

    @property
    def found(self) -> list[tuple[float, float]]:
        """The points that are no gap."""
        return [(step, value) for step, value in self.points if value is not None]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a step."""

    step: float
    label: str


@dataclass(frozen=True, slots=True)
class Curves:
    """Charts over steps, by column of the metrics."""

    lines: Mapping[str, Sequence[Curve]]
    events: Sequence[Event] = ()


COMPONENTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary", "context", "nccl",
    "activations and the rest", "all parts together",
)  # fmt: skip
"""Parts of a bar in stacking order; the index selects the color."""


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One row of stacked parts."""

    label: str
    parts: Mapping[str, float]
    """Component -> value."""
    text: str = ""
    """Shown after the label; the total if empty."""
    span: tuple[float, float] | None = None
    """The predicted range of the bar's end."""
    measured: float | None = None
    """A mark in the row."""
    limit: float | None = None
    """What this row may reach, where it is not that of all rows."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def end(self) -> float:
        return max(self.total, self.span[1] if self.span else 0.0, self.measured or 0.0, self.limit or 0.0)


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart of stacked bars."""

    title: str
    bars: Sequence[StackedBar]
    unit: str = "bytes"
    limit: tuple[str, float] | None = None
    """Name and value of a line through all rows, as `mark`."""
    mark: tuple[str, float] | None = None
    legend: bool = False
    """Whether the colors are explained."""
    heading: str = ""


Tone = Literal["", "good", "bad", "warning"]
Block = Rows | Table | Notes | Text | Listing | Folded | Group | Sample | Controls | Curves | Bars


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page."""

    id: str
    title: str
    blocks: Sequence[Block]
    summary: str = ""
    """After the title in a terminal; a page has it in its first numbers."""
    tone: Tone = ""


def notes_of(items: Iterable[Inline | None]) -> list[Notes]:
    """The notes that are known as a block, none without any."""
    found = [item for item in items if item]
    return [Notes(found)] if found else []
