"""Where rows lie, as other tools say it, and what of that a source in `data` can say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from launcher.importing.arguments import as_number
from launcher.importing.reading import Effect, Reading, shown
from launcher.recipe.data_paths import is_glob, is_hub_id, is_package, is_url

BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""What `load_dataset` takes in the place of a name, for files that a recipe names themselves."""
NO_LIMIT = "all rows are used: a recipe has no limit of rows"
_HUB = re.compile(r"(?:https?://huggingface\.co/datasets/|hf://datasets/)([\w.-]+/[\w.-]+)/?$")
_SLICE = re.compile(r"([\w.-]+)\[(.*)\]$")
_ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def source_at(
    reading: Reading, key: str, line: int | None, path: Any, given: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """A source of `data` for an address; None, with the reason in the reading, where it cannot be one.

    key: where the address stands in the file. given: what is said beside it, of name, split and revision.
    """
    asked = {name: str(value) for name, value in (given or {}).items() if value not in (None, "")}
    if not isinstance(path, str) or not path.strip():
        reading.drop(key, path, line, Effect.NEEDED, "expected a path or the name of a data set")
        return None
    path = path.strip()
    hub = _HUB.match(path)
    if hub:
        path = hub[1]
    elif is_url(path):
        reading.drop(
            key,
            path,
            line,
            Effect.NEEDED,
            "rows are not read from an address",
            "download them, and name the file",
        )
        return None
    asked = _whole_split(reading, key, line, asked)
    folder = Path(reading.file).parent
    if is_package(path):
        return {"path": path}
    if is_hub_id(path, folder) and not _is_here(path, folder):
        if asked.get("split") == "train":
            del asked["split"]
        return {"path": path, **asked}
    if not _is_here(path, folder) and _looks_like_name(path):
        beside = "".join(f", {name}: {shown(value)}" for name, value in asked.items() if value != "train")
        hint = f"write data.train: [{{path: organisation/{shown(path)}{beside}}}]"
        reading.drop(key, path, line, Effect.NEEDED, "a data set of the hub needs its full id", hint)
        return None
    return _local(reading, key, line, path, asked)


def evaluation_share(reading: Reading, key: str, line: int | None, value: Any) -> float | None:
    """A share of the training rows to evaluate on; None where it is 0 or cannot be said."""
    size = as_number(value)
    if size is None or size < 0:
        reading.drop(key, value, line, Effect.NEEDED, "expected a share of the rows")
    elif size >= 1:
        reading.drop(key, value, line, Effect.NEEDED, "a number of rows; a recipe says a share of them",
                     "write data.eval: {split: 0.05}")  # fmt: skip
    elif size > 0:
        return float(size)
    reading.know(key)
    return None


def _is_here(path: str, folder: Path) -> bool:
    """Whether it is there, from the file's folder or from here."""
    try:
        return (folder / path).exists() or Path(path).exists()
    except OSError:
        return False


def _looks_like_name(path: str) -> bool:
    """Whether it is a name alone, such as imdb: neither a file's nor a folder's."""
    return "/" not in path and "\\" not in path and not is_glob(path) and not Path(path).suffix


def _whole_split(reading: Reading, key: str, line: int | None, asked: dict[str, str]) -> dict[str, str]:
    """Without the slice of `train[:1%]`, which has no word here."""
    split = asked.get("split", "")
    part = _SLICE.match(split)
    if part:
        reading.drop(
            f"{key} split", split, line, Effect.TRAINING, f"the whole split {part[1]} is read; {NO_LIMIT}"
        )
        return {**asked, "split": part[1]}
    if "+" in split:
        first = split.split("+")[0].strip()
        reading.drop(
            f"{key} split", split, line, Effect.TRAINING, f"only {first} is read: write a source for each"
        )
        return {**asked, "split": first}
    return asked


def _local(
    reading: Reading, key: str, line: int | None, path: str, asked: dict[str, str]
) -> dict[str, Any] | None:
    split = asked.pop("split", "train")
    for name, value in asked.items():
        reading.drop(f"{key} {name}", value, line, Effect.NONE, "only a data set of the hub has it")
    found = _split_in(path, split, Path(reading.file).parent)
    if found is None:
        reason, hint = "which files of the folder are that split", "name them: {path: FILE}"
        reading.drop(key, f"{path}, split {split}", line, Effect.NEEDED, reason, hint)
    return None if found is None else {"path": found}


def _split_in(path: str, split: str, folder: Path) -> str | None:
    """The file or folder of a split below a local path; the path itself where it holds no splits."""
    for base in (folder, Path()):
        root = base / path
        if not root.is_dir():
            continue
        inner = [name for name in (split, *(split + end for end in _ROWS)) if (root / name).exists()]
        if len(inner) == 1:
            return f"{path.rstrip('/')}/{inner[0]}"
        return path if split == "train" else None
    return path if split == "train" else None


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
