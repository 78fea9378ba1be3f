"""A file of hooks whose format_row makes of a row what the other tool makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from launcher.importing.found import Effect, Reading, shown

SUFFIX = "_hooks.py"
"""What the file's name ends with; the recipe's name stands before it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Columns that a pattern makes a prompt of; the output is what is learnt."""

    turn: str
    """With {instruction} and {input}."""
    turn_alone: str
    """With {instruction}, where a row has no input."""
    system_format: str = "{system}"
    system: str = ""
    """Stands before each prompt that has an input."""
    system_alone: str = ""
    system_column: str = ""
    """Column of the system's text, where rows have their own."""
    instruction: str = "instruction"
    given: str = "input"
    output: str = "output"

    def columns(self) -> tuple[str, ...]:
        return (self.instruction, self.output)

    def lines(self) -> list[str]:
        return [
            f"given = row.get({self.given!r})" if self.given else "given = None",
            f"system = {self.system!r} if given else {self.system_alone!r}",
            *([f"system = row.get({self.system_column!r}, system)"] if self.system_column else []),
            f"prompt = {self.system_format!r}.format(system=system) if system else ''",
            f"turn = {self.turn!r} if given else {self.turn_alone!r}",
            f"prompt += turn.format(instruction=row[{self.instruction!r}], input=given)",
            f"return {{'prompt': prompt, 'completion': row[{self.output!r}]}}",
        ]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Columns that become one exchange of messages, with what went before it."""

    prompt: str
    response: str
    query: str = ""
    """A column whose text follows the prompt's on a line of its own."""
    history: str = ""
    """A column of pairs: asked, answered."""
    system: str = ""
    tools: str = ""

    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.response)

    def lines(self) -> list[str]:
        before = []
        if self.system:
            before += [
                f"if row.get({self.system!r}):",
                f"    messages.append({{'role': 'system', 'content': row[{self.system!r}]}})",
            ]
        if self.history:
            before += [
                f"for asked, answered in row.get({self.history!r}) or []:",
                "    messages.append({'role': 'user', 'content': asked})",
                "    messages.append({'role': 'assistant', 'content': answered})",
            ]
        asked = [name for name in (self.prompt, self.query) if name]
        return [
            "messages = []",
            *before,
            f"asked = [row[name] for name in {asked!r} if row.get(name)]",
            "messages.append({'role': 'user', 'content': '\\n'.join(asked)})",
            f"messages.append({{'role': 'assistant', 'content': row[{self.response!r}]}})",
            _returned(self.tools),
        ]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Columns of text that become an exchange of messages with two answers."""

    prompt: str
    chosen: str
    rejected: str
    query: str = ""

    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.chosen, self.rejected)

    def lines(self) -> list[str]:
        asked = [name for name in (self.prompt, self.query) if name]
        return [
            f"asked = '\\n'.join(row[name] for name in {asked!r} if row.get(name))",
            "return {",
            "    'prompt': [{'role': 'user', 'content': asked}],",
            f"    'chosen': [{{'role': 'assistant', 'content': row[{self.chosen!r}]}}],",
            f"    'rejected': [{{'role': 'assistant', 'content': row[{self.rejected!r}]}}],",
            "}",
        ]


@dataclass(frozen=True, slots=True)
class Turns:
    """A column of turns with names of their own for role and content."""

    column: str
    role: str
    content: str
    roles: tuple[tuple[str, str], ...]
    """(word in the rows, role)."""
    system: str = ""
    """A column whose text comes before the turns, where these have no system turn."""
    tools: str = ""

    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def lines(self) -> list[str]:
        first = [
            f"if row.get({self.system!r}) and messages[:1] and messages[0]['role'] != 'system':",
            f"    messages.insert(0, {{'role': 'system', 'content': row[{self.system!r}]}})",
        ]
        return [
            f"roles = {dict(self.roles)!r}",
            "messages = [",
            f"    {{'role': turn[{self.role!r}], 'content': turn[{self.content!r}]}}",
            f"    for turn in row[{self.column!r}]",
            "]",
            "for message in messages:",
            "    message['role'] = roles.get(message['role'], message['role'])",
            *(first if self.system else []),
            _returned(self.tools),
        ]


Shape = Prompt | Exchange | Ranked | Turns


def _returned(tools: str) -> str:
    return f"return {{'messages': messages, 'tools': row.get({tools!r})}}" if tools else (
        "return {'messages': messages}"
    )  # fmt: skip


def unknown_fields(pattern: str, known: Sequence[str]) -> list[str] | None:
    """Names in the braces of a pattern that are none of `known`; None when its braces do not match."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(pattern) if name is not None]
    except ValueError:
        return None
    return [name for name in names if name not in known]


def hooks_text(origin: str, shapes: Sequence[Shape]) -> str:
    """The file. A row is shaped by the first of the shapes whose columns it has; others stay as they are.

    origin: where the patterns come from, for the first line.
    """
    parts = [f'"""Rows as {_plain(origin)} makes prompts of them."""\n\n\ndef format_row(row):']
    for shape in shapes:
        test = " and ".join(f"{name!r} in row" for name in dict.fromkeys(shape.columns()))
        parts.append(f"    if {test}:")
        parts += [f"        {line}" for line in shape.lines()]
    return "\n".join([*parts, "    return row"]) + "\n"


def clashing(shapes: Mapping[str, Shape]) -> tuple[str, str] | None:
    """Two sources (by their path) whose rows no column tells apart, and that are shaped differently."""
    seen: list[tuple[str, Shape]] = []
    for path, shape in shapes.items():
        for other, before in seen:
            columns = set(shape.columns()), set(before.columns())
            if shape != before and (columns[0] <= columns[1] or columns[1] <= columns[0]):
                return other, path
        seen.append((path, shape))
    return None


def take_hooks(
    reading: Reading, key: str, line: int | None, shapes: Mapping[str, Shape], plain: Sequence[str]
) -> None:
    """Write the file for sources (path -> shape) and name it in `python`.

    key: where the sources stand in the file. plain: paths of sources without a shape.
    """
    if not shapes:
        return
    pair = clashing(shapes)
    if pair is not None:
        reason = (
            f"rows of {shown(pair[0])} and of {shown(pair[1])} have the same columns and different prompts"
        )
        reading.needs("python", line, reason, "write a format_row that tells them apart")
        return
    each = list(dict.fromkeys(shapes.values()))
    reading.texts[SUFFIX] = hooks_text(reading.tool.removesuffix(" recipe"), each)
    note = f"makes of a row what {reading.tool.partition(' ')[0]} makes of it"
    reading.take("python", SUFFIX, line, key, note=note)
    if plain:
        columns = " or ".join(" and ".join(shape.columns()) for shape in each)
        reason = f"format_row sees all rows: it changes those here that have {columns}, too"
        hint = "look with `effilaunch prepare RECIPE --show 3`"
        reading.drop(key, ", ".join(plain), line, Effect.TRAINING, reason, hint)


def _plain(origin: str) -> str:
    return "".join(c for c in origin if c.isalnum() or c in " .,:_-/")
