"""What a reader found in one file: values under recipe keys, and what it could not take, with the places."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from launcher.errors import Problem
from launcher.facts.redaction import hide_tokens, is_written_secret, looks_secret, names_secret
from launcher.tasks import DEFAULT_TASK, task_named
from launcher.tasks.task import Task

LONGEST = 100
"""Characters of a value that are shown."""
KEEP_OUT = "a secret: set it in the environment; no file of a run may hold it"


def without_tokens(text: str) -> str:
    """The text without what looks like a token, on one line."""
    text = hide_tokens(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def is_secret(key: str, value: object) -> bool:
    """Whether a key holds a token or a password, by its name or by the look of the value."""
    if isinstance(value, bool | int | float) or value is None:
        return False
    if isinstance(value, dict):
        return any(looks_secret(str(name)) or is_secret(str(name), item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return any(is_secret(key, item) for item in value)
    name = key.rpartition(".")[2].replace("-", "_")
    return is_written_secret(name, str(value)) or looks_secret(str(value))


def shown(value: object) -> str:
    """A value for a message: as YAML has it where that is short."""
    if value is True or value is False:
        return str(value).lower()
    return "null" if value is None else _shortened(without_tokens(str(value)))


class Effect(Enum):
    """What it means that something was not taken; the value is the word that is printed."""

    NONE = "no effect"
    """What is learnt stays the same: paths, caches, kernels that only save memory."""
    TRAINING = "changes the training"
    """The other tool would have learnt something else, and no recipe key says it."""
    NEEDED = "must be set in the recipe"
    """A recipe needs it, and the file does not say it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands."""

    file: str
    line: int | None = None
    """From 1; None where the file as a whole is meant."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A value for a recipe key."""

    value: Any
    place: Place
    said: str
    """The key as the other tool spells it, with the value where that is not the same."""
    is_default: bool = False
    """Whether the file does not say it and it is what the other tool would have used."""
    note: str = ""
    """For a comment in the recipe; empty where there is nothing to tell."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was not taken."""

    place: Place
    key: str
    """As the other tool spells it."""
    value: str
    """As it is shown; empty for a secret."""
    effect: Effect
    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A launch line's recipe of another tool, and what the line says over it."""

    tool: str
    """"axolotl recipe" …, as in `Reading.tool`."""
    file: str | None
    """None where everything is on the line."""
    overrides: dict[str, Any]
    line: int
    word: str
    """What trl is to do: sft, dpo; empty for others."""


@dataclass(slots=True)
class Reading:
    """One file, read."""

    tool: str
    """"axolotl", "DeepSpeed config" …: for messages."""
    file: str
    taken: dict[str, Taken] = field(default_factory=dict)
    """Dotted recipe key -> its value. Lists of data sources stand whole under data.train and data.eval."""
    dropped: list[Dropped] = field(default_factory=list)
    names: dict[str, Place] = field(default_factory=dict)
    """Other files that this one names and that belong to the import (a DeepSpeed config) -> where."""
    refusals: list[Problem] = field(default_factory=list)
    """Why no recipe may be made of it at all: another kind of training, or what contradicts itself."""
    seen: set[str] = field(default_factory=set)
    """Every key that was taken, dropped or known, in the other tool's spelling."""
    calls: list[Call] = field(default_factory=list)
    """Recipes that a launch line starts."""
    inline: list[tuple[dict[str, Any], int | None]] = field(default_factory=list)
    """DeepSpeed configs that stand within the file, with their lines."""
    profile: dict[str, Any] = field(default_factory=dict)
    """What a DeepSpeed config says beyond the recipe's keys: it is kept as a base profile."""
    texts: dict[str, str] = field(default_factory=dict)
    """Files to write beside the recipe (hooks, a chat template): suffix of the name -> text. The recipe's
    value for such a key is the suffix; the name is put before it when the recipe is written."""

    def take(
        self, key: str, value: Any, line: int | None, said: str, *, default: bool = False, note: str = ""
    ) -> None:
        """A value for a recipe key; what the file says itself goes before the tool's default.

        said: `key` or `key: value`, as the other tool spells it. A secret is dropped instead.
        """
        name = said.partition(":")[0].strip()
        if default and key in self.taken:
            return
        if looks_secret(key) or is_secret(name, value) or is_secret(key, value):
            self.drop(name, value, line, Effect.NONE, KEEP_OUT)
            return
        if not default:
            self.seen.add(name)
        self.taken[key] = Taken(value, Place(self.file, line), said, default, note)

    def drop(
        self, key: str, value: object, line: int | None, effect: Effect, reason: str, hint: str = ""
    ) -> None:
        """Something that no recipe key says. The value of a secret is not kept."""
        self.seen.add(key)
        switch = str(value).lower() in ("true", "false")  # --append_concat_token False
        hidden = is_secret(key, value) or (names_secret(key) and not switch)
        text = "" if hidden else shown(value)
        said = KEEP_OUT if hidden else without_tokens(reason)
        entry = Dropped(Place(self.file, line), shown(key), text, effect, said, without_tokens(hint))
        self.dropped.append(entry)

    def know(self, *keys: str) -> None:
        """Keys that need no word: null, or what a run does anyway."""
        self.seen.update(keys)

    def refuse(
        self, key: str, line: int | None, message: str, hint: str | None = None, code: str = "import-refused"
    ) -> None:
        """No recipe may be made of this file; `message` continues after the key."""
        self.seen.add(key)
        self.refusals.append(Problem(code, message, self.file, line, shown(key) or None, hint))

    def needs(self, what: str, line: int | None, reason: str, hint: str = "") -> None:
        """Something that a recipe needs and that the file does not say; `what`: the recipe's key."""
        self.drop(what, "", line, Effect.NEEDED, reason, hint)

    def name_file(self, file: str, line: int | None) -> None:
        """Another file that belongs to the import."""
        if not looks_secret(file):
            self.names[file] = Place(self.file, line)

    @property
    def task(self) -> Task:
        """The task as far as it was taken; else the one that a recipe has by default."""
        return task_named(self.value("task") or DEFAULT_TASK)

    def value(self, key: str) -> Any:
        """The value taken for a recipe key, None where there is none."""
        return self.taken[key].value if key in self.taken else None
