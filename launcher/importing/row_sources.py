"""Addresses of rows in other tools' files as sources of `data`, and hooks for rows of their own formats."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from launcher.importing.conversions import as_number
from launcher.importing.reading import EVALUATED, Effect, Given, Reading, shown
from launcher.recipe.data_paths import is_glob, is_hub_id, is_package, is_url

BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""What `load_dataset` takes in the place of a name, for files that a recipe names themselves."""
NO_LIMIT = "all rows are used: a recipe has no limit of rows"
_LONGEST = 1_000_000
"""Bytes of the first row that are looked at."""
_HUB = re.compile(r"(?:https?://huggingface\.co/datasets/|hf://datasets/)([\w.-]+/[\w.-]+)/?$")
_SLICE = re.compile(r"([\w.-]+)\[(.*)\]$")
_ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def source_at(
    reading: Reading, given: Given, *, name: Any = None, split: Any = None, revision: Any = None
) -> dict[str, Any] | None:
    """A source of `data` for an address; None, with the reason in the reading, where it cannot be one.

    name, split, revision: those of load_dataset, where the file sets them.
    """
    beside = {"name": name, "revision": revision, "split": split}
    asked = {key: str(value) for key, value in beside.items() if value not in (None, "")}
    if not isinstance(given.value, str) or not given.value.strip():
        reading.drop(given, Effect.NEEDED, "expected a path or the name of a data set")
        return None
    if reading.leaves_open("", given):
        return None
    path = given.value.strip()
    hub = _HUB.match(path)
    if hub:
        path = hub[1]
    given = Given(given.name, path, given.line)
    if is_url(path) and not hub:
        reading.drop(
            given, Effect.NEEDED, "rows are not read from an address", "download them, and name the file"
        )
        return None
    _cut_split(reading, given, asked)
    folder = Path(reading.file).parent
    if is_package(path):
        return {"path": path}
    if is_hub_id(path, folder) and not _is_here(path, folder):
        if asked.get("split") == "train":
            del asked["split"]
        return {"path": path, **asked}
    if not _is_here(path, folder) and _looks_like_name(path):
        more = "".join(f", {key}: {shown(value)}" for key, value in asked.items() if value != "train")
        hint = f"write data.train: [{{path: organisation/{shown(path)}{more}}}]"
        reading.drop(given, Effect.NEEDED, "a data set of the hub needs its full id", hint)
        return None
    return _local(reading, given, asked)


def take_share(reading: Reading, given: Given) -> None:
    """Take a share of the training rows to evaluate on; a number of rows must be set as their share."""
    size = as_number(given.value)
    reading.know(given.name)
    if size is None or size < 0:
        reason = f"{given.name}: {shown(given.value)} is no share of the rows"
        reading.needs(EVALUATED, given.line, reason, "write data.eval: {split: SHARE}")
    elif size >= 1:
        reason = f"{given.name}: {shown(given.value)} is a number of rows; a recipe has a share of them"
        hint = f"write data.eval: {{split: SHARE}}, which is {shown(given.value)} / all rows"
        reading.needs(EVALUATED, given.line, reason, hint)
    elif size > 0:
        reading.take(EVALUATED, {"split": float(size)}, given, note="other rows of the same number")


def _is_here(path: str, folder: Path) -> bool:
    """Whether it is there, from the file's folder or from here."""
    try:
        return (folder / path).exists() or Path(path).exists()
    except OSError:
        return False


def _looks_like_name(path: str) -> bool:
    """Whether it is a name alone, such as imdb: neither a file's nor a folder's."""
    return "/" not in path and "\\" not in path and not is_glob(path) and not Path(path).suffix


def _cut_split(reading: Reading, given: Given, asked: dict[str, str]) -> None:
    """Leave one complete split of `train[:1%]` and of `a+b`."""
    split = asked.get("split", "")
    part = _SLICE.match(split)
    first = part[1] if part else split.split("+")[0].strip()
    if part or "+" in split:
        asked["split"] = first
        reason = f"the complete split {first} is read; {NO_LIMIT}"
        reason = reason if part else f"only {first} is read: write a source for each"
        reading.drop(Given(f"{given.name} split", split, given.line), Effect.TRAINING, reason)


def _local(reading: Reading, given: Given, asked: dict[str, str]) -> dict[str, Any] | None:
    split = asked.pop("split", "train")
    for name, value in asked.items():
        other = Given(f"{given.name} {name}", value, given.line)
        reading.drop(other, Effect.NONE, "only a data set of the hub has it")
    found = _split_in(given.value, split, Path(reading.file).parent)
    if found is None:
        reason, hint = "which files of the folder are that split", "name them: {path: FILE}"
        other = Given(given.name, f"{given.value}, split {split}", given.line)
        reading.drop(other, Effect.NEEDED, reason, hint)
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


def first_row(path: str, reading: Reading) -> dict[str, Any] | None:
    """The first row of a .jsonl that is here, or of a .json with a list or with rows in lines."""
    for base in (Path(reading.file).parent, Path()):
        file = base / path
        try:
            if file.suffix in (".jsonl", ".json") and file.is_file():
                with file.open("rb") as rows:
                    text = rows.read(_LONGEST).decode("utf-8-sig", "ignore").strip()
                first = text.removeprefix("[").lstrip()
                row, end = json.JSONDecoder().raw_decode(first)
                alone = file.suffix == ".json" and end == len(text)  # an object that may hold the rows
                return row if isinstance(row, dict) and not alone else None
        except (OSError, ValueError, RecursionError):
            return None
    return None


def leave_columns(path: str, reading: Reading, read: Collection[str]) -> dict[str, None]:
    """`columns` that leave out what the other tool does not read of rows that are here: texts and lists.

    A recipe's rows with such columns are refused otherwise, because something of them would be lost.
    """
    row = first_row(path, reading) or {}
    held = {name for name, value in row.items() if value and isinstance(value, str | list | dict | bool)}
    return {name: None for name in row if name in held and name not in read}


SUFFIX = "_hooks.py"
"""Ending of the file's name, after the recipe's name."""


@dataclass(frozen=True, slots=True)
class Prompt:
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

    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.response, *([self.label] if self.label else []))

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
            _returned(self.tools, self.images, self.label),
        ]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Columns of text that become an exchange of messages with two answers."""

    prompt: str
    chosen: str
    rejected: str
    query: str = ""
    system: str = ""
    """A column of the system's text."""

    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.chosen, self.rejected)

    def lines(self) -> list[str]:
        asked = [name for name in (self.prompt, self.query) if name]
        before = [
            f"if row.get({self.system!r}):",
            f"    prompt.insert(0, {{'role': 'system', 'content': row[{self.system!r}]}})",
        ]
        return [
            f"asked = '\\n'.join(row[name] for name in {asked!r} if row.get(name))",
            "prompt = [{'role': 'user', 'content': asked}]",
            *(before if self.system else []),
            "return {",
            "    'prompt': prompt,",
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
    images: tuple[str, ...] = ()
    """Columns of images; a row has one of them, or none."""
    label: str = ""
    """A column that says whether the answer is good."""

    def columns(self) -> tuple[str, ...]:
        return (self.column, *([self.label] if self.label else []))

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
            _returned(self.tools, self.images, self.label),
        ]


@dataclass(frozen=True, slots=True)
class Answers:
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

    def columns(self) -> tuple[str, ...]:
        return (*dict.fromkeys((self.prompt, *(column for _, column in self.answers))),)

    def lines(self) -> list[str]:
        turn = "" if self.within is None else f"[{self.within}]['content']"
        first = "[0]['content']" if self.prompt in dict(self.answers).values() else ""
        asked = [f"prompt = {self.turn!r}.format(prompt=row[{self.prompt!r}]{first})"]
        if self.system:
            asked += [
                f"if row.get({self.system_column!r}):",
                f"    prompt = {self.system!r}.format(system=row[{self.system_column!r}]) + prompt",
            ]
        said = [
            f"    {name!r}: {self.answer!r}.format(answer=row[{column!r}]{turn}),"
            for name, column in self.answers
        ]
        label = [f"    'label': row[{self.label!r}],"] if self.label else []
        return [*asked, "return {", "    'prompt': prompt,", *said, *label, "}"]


Shape = Prompt | Exchange | Ranked | Turns | Answers


def _returned(tools: str, images: Sequence[str], label: str) -> str:
    more = f", 'label': row[{label!r}]" if label else ""
    more += f", 'tools': row.get({tools!r})" if tools else ""
    more += f", 'images': {' or '.join(f'row.get({name!r})' for name in images)}" if images else ""
    return f"return {{'messages': messages{more}}}"


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


def _clashing(shapes: Mapping[str, Shape]) -> tuple[str, str] | None:
    """Two sources (by their path) with the same columns and different shapes."""
    seen: list[tuple[str, Shape]] = []
    for path, shape in shapes.items():
        for other, before in seen:
            columns = set(shape.columns()), set(before.columns())
            if shape != before and (columns[0] <= columns[1] or columns[1] <= columns[0]):
                return other, path
        seen.append((path, shape))
    return None


@dataclass(slots=True)
class Sources:
    """Sources of `data` with the shapes of their rows, while a file is read."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """Path of a source -> what the hook makes of its rows."""
    plain: list[str] = field(default_factory=list)
    """Paths of sources without a hook."""
    formats: list[str] = field(default_factory=list)

    def add(self, path: str, form: str, hook: Shape | None) -> None:
        """Note the format of a source, and its hook."""
        self.formats.append(form)
        if hook is not None:
            self.shapes[path] = hook
        else:
            self.plain.append(path)

    def take_hooks(self, reading: Reading, key: str, line: int | None) -> None:
        """Write the file of hooks and name it in `python`; key: where the file names the sources."""
        if not self.shapes:
            return
        pair = _clashing(self.shapes)
        if pair is not None:
            both = f"rows of {shown(pair[0])} and of {shown(pair[1])}"
            reason = f"{both} have the same columns and different prompts"
            reading.needs("python", line, reason, "write a format_row that distinguishes them")
            return
        each = list(dict.fromkeys(self.shapes.values()))
        reading.texts[SUFFIX] = hooks_text(reading.tool.removesuffix(" recipe"), each)
        note = f"makes of a row what {reading.tool.partition(' ')[0]} makes of it"
        reading.take("python", SUFFIX, Given(key, None, line), said=key, note=note)
        if self.plain:
            columns = " or ".join(" and ".join(shape.columns()) for shape in each)
            reason = f"format_row gets all rows: it also changes those here that have {columns}"
            hint = "look with `effilaunch prepare RECIPE --show 3`"
            reading.drop(Given(key, ", ".join(self.plain), line), Effect.TRAINING, reason, hint)


def _plain(origin: str) -> str:
    return "".join(c for c in origin if c.isalnum() or c in " .,:_-/")
