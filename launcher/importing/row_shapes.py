"""Rows of other tools' own formats: what a hook makes of them, and the file of hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from string import Formatter
from typing import Any, ClassVar


class Shape:
    """What a hook makes of a row."""

    __slots__ = ()
    NEEDED: ClassVar[tuple[str, ...]] = ()
    """Fields with columns that a row must have."""
    HOOK: ClassVar[str]
    """Lines of Python; before the bar the field for which a line is there, with ! the one without which."""

    def columns(self) -> tuple[str, ...]:
        """Columns that a row must have."""
        return tuple(column for field in self.NEEDED if (column := getattr(self, field)))

    def parts(self) -> dict[str, Any]:
        """Values for the template: the fields, and what several of them make."""
        of: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        others = f", 'label': row[{of['label']!r}]" if of.get("label") else ""
        others += f", 'tools': row.get({of['tools']!r})" if of.get("tools") else ""
        images = " or ".join(f"row.get({name!r})" for name in of.get("images", ()))
        others += f", 'images': {images}" if images else ""
        asked = [of[name] for name in ("prompt", "query") if of.get(name)]
        return {**of, "asked": asked, "others": others, "words": dict(of.get("roles", ()))}

    def lines(self) -> list[str]:
        """The lines that make a canonical row of `row`."""
        values, made = self.parts(), []
        for line in self.HOOK.strip("\n").split("\n"):
            name, _, code = line.partition("| ")
            name, absent = name.strip(" !"), "!" in name
            if not name or bool(values[name]) is not absent:
                made += code.format(**values).split("\n")
        return made


@dataclass(frozen=True, slots=True)
class Prompt(Shape):
    """Columns that a pattern makes a prompt of; the output contributes to the loss."""

    turn: str
    """With {instruction} and {input}."""
    turn_alone: str
    """With {instruction}, where a row has no input."""
    system_format: str = "{system}"
    system: str = ""
    """Before each prompt that has an input."""
    system_alone: str = ""
    system_column: str = ""
    """Column of the system's text, where rows have their own."""
    instruction: str = "instruction"
    given: str = "input"
    output: str = "output"
    NEEDED = ("instruction", "output")
    HOOK = """
 given        | given = row.get({given!r})
!given        | given = None
              | system = {system!r} if given else {system_alone!r}
 system_column| system = row.get({system_column!r}, system)
              | prompt = {system_format!r}.format(system=system) if system else ''
              | turn = {turn!r} if given else {turn_alone!r}
              | prompt += turn.format(instruction=row[{instruction!r}], input=given)
              | return {{'prompt': prompt, 'completion': row[{output!r}]}}
"""


@dataclass(frozen=True, slots=True)
class Exchange(Shape):
    """Columns that become one exchange of messages, with the turns before it."""

    prompt: str
    response: str
    query: str = ""
    """A column whose text follows the prompt's on a line of its own."""
    history: str = ""
    """A column of pairs: asked, answered."""
    system: str = ""
    tools: str = ""
    images: tuple[str, ...] = ()
    """Columns of images; a row has one of them, or none."""
    label: str = ""
    """A column that says whether the answer is good."""
    NEEDED = ("prompt", "response", "label")
    HOOK = """
        | messages = []
 system | if row.get({system!r}):
 system |     messages.append({{'role': 'system', 'content': row[{system!r}]}})
 history| for asked, answered in row.get({history!r}) or []:
 history|     messages.append({{'role': 'user', 'content': asked}})
 history|     messages.append({{'role': 'assistant', 'content': answered}})
        | asked = [row[name] for name in {asked!r} if row.get(name)]
        | messages.append({{'role': 'user', 'content': '\\n'.join(asked)}})
        | messages.append({{'role': 'assistant', 'content': row[{response!r}]}})
        | return {{'messages': messages{others}}}
"""


@dataclass(frozen=True, slots=True)
class Ranked(Shape):
    """Columns of text that become an exchange of messages with two answers."""

    prompt: str
    chosen: str
    rejected: str
    query: str = ""
    system: str = ""
    """A column of the system's text."""
    NEEDED = ("prompt", "chosen", "rejected")
    HOOK = """
       | asked = '\\n'.join(row[name] for name in {asked!r} if row.get(name))
       | prompt = [{{'role': 'user', 'content': asked}}]
 system| if row.get({system!r}):
 system|     prompt.insert(0, {{'role': 'system', 'content': row[{system!r}]}})
       | return {{
       |     'prompt': prompt,
       |     'chosen': [{{'role': 'assistant', 'content': row[{chosen!r}]}}],
       |     'rejected': [{{'role': 'assistant', 'content': row[{rejected!r}]}}],
       | }}
"""


@dataclass(frozen=True, slots=True)
class Turns(Shape):
    """A column of turns with names of their own for role and content."""

    column: str
    role: str
    content: str
    roles: tuple[tuple[str, str], ...]
    """(word in the rows, role)."""
    system: str = ""
    """A column whose text comes before the turns, where these have no system turn."""
    tools: str = ""
    images: tuple[str, ...] = ()
    """Columns of images; a row has one of them, or none."""
    label: str = ""
    """A column that says whether the answer is good."""
    NEEDED = ("column", "label")
    HOOK = """
       | roles = {words}
       | messages = [
       |     {{'role': turn[{role!r}], 'content': turn[{content!r}]}}
       |     for turn in row[{column!r}]
       | ]
       | for message in messages:
       |     message['role'] = roles.get(message['role'], message['role'])
 system| if row.get({system!r}) and messages[:1] and messages[0]['role'] != 'system':
 system|     messages.insert(0, {{'role': 'system', 'content': row[{system!r}]}})
       | return {{'messages': messages{others}}}
"""


@dataclass(frozen=True, slots=True)
class Answers(Shape):
    """Columns of text that patterns make a prompt and its answers of; other columns stay."""

    turn: str
    """With {prompt}."""
    system: str
    """Before it, with {system}; of rows that have a system text."""
    answer: str
    """With {answer}."""
    prompt: str
    """The column; with `within`: that of a conversation."""
    answers: tuple[tuple[str, str], ...]
    """(field, column)."""
    system_column: str = "system"
    within: int | None = None
    """The turn of an answer's column that is the answer; None: the column is a text."""
    label: str = ""
    """A column that says whether the answer is good; it is called label afterwards."""
    HOOK = """
       | prompt = {turn!r}.format(prompt=row[{prompt!r}]{first})
 system| if row.get({system_column!r}):
 system|     prompt = {system!r}.format(system=row[{system_column!r}]) + prompt
       | return {{
       |     'prompt': prompt,
       | {answered}
 label |     'label': row[{label!r}],
       | }}
"""

    def columns(self) -> tuple[str, ...]:
        return (*dict.fromkeys((self.prompt, *(column for _, column in self.answers))),)

    def parts(self) -> dict[str, Any]:
        turn = "" if self.within is None else f"[{self.within}]['content']"
        said = (
            f"    {name!r}: {self.answer!r}.format(answer=row[{column!r}]{turn}),"
            for name, column in self.answers
        )
        first = "[0]['content']" if self.prompt in dict(self.answers).values() else ""
        return {**asdict(self), "answered": "\n".join(said), "first": first}


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
    named = "".join(c for c in origin if c.isalnum() or c in " .,:_-/")
    parts = [f'"""Rows as {named} makes prompts of them."""\n\n\ndef format_row(row):']
    for shape in shapes:
        test = " and ".join(f"{name!r} in row" for name in dict.fromkeys(shape.columns()))
        parts.append(f"    if {test}:")
        parts += [f"        {line}" for line in shape.lines()]
    return "\n".join([*parts, "    return row"]) + "\n"
