"""The result of reading one file: values for recipe keys, and dropped keys, with their places."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.redaction import hide_tokens
from launcher.files.secrets import is_written_secret, looks_secret, names_secret
from launcher.recipe.yaml_reader import YamlDocument, parse_yaml
from launcher.tasks import DEFAULT_TASK, task_named
from launcher.tasks.task import Task

EVALUATED = "data.eval"
_VARIABLE = re.compile(r"\$\{\w[^}]*\}|\$[A-Z_][A-Z0-9_]*\b|\{\{[^}]*\}\}")
"""Of a shell, of OmegaConf and of a template: none of the tools replaces them."""
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
    if isinstance(value, list):
        return any(is_secret(key, item) for item in value)
    name = key.rpartition(".")[2].replace("-", "_")
    return is_written_secret(name, str(value)) or looks_secret(str(value))


def shown(value: object) -> str:
    """A value for a message: as YAML has it where that is short."""
    if value is True or value is False:
        return str(value).lower()
    return "null" if value is None else _shortened(without_tokens(str(value)))


class Effect(Enum):
    """The consequence of a dropped key; the value is printed."""

    NONE = "no effect"
    """The training stays the same: paths, caches, kernels that only save memory."""
    TRAINING = "changes the training"
    """The other tool would have trained differently, and there is no recipe key for it."""
    NEEDED = "must be set in the recipe"
    """A recipe needs it, and the file does not set it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a file."""

    file: str
    line: int | None = None
    """From 1; None for the complete file."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


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

    def __str__(self) -> str:
        key = f"{self.key}: {self.value}" if self.value else self.key
        return f"{key} - {self.reason}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True, slots=True)
class Taken:
    """A value for a recipe key."""

    value: Any
    place: Place
    said: str
    """The key as the other tool spells it, with the value where that is not the same."""
    is_default: bool = False
    """Whether it is the other tool's default, which the file does not set."""
    note: str = ""
    """For a comment in the recipe."""

    def dropped(self, effect: Effect, reason: str, hint: str = "") -> Dropped:
        """The report of this value, where it is not used after all."""
        name, _, text = self.said.partition(": ")
        return Dropped(self.place, name, text or shown(self.value), effect, reason, hint)


@dataclass(frozen=True, slots=True)
class Given:
    """One key of a file."""

    name: str
    """As the other tool spells it; the dotted path of a key inside a mapping."""
    value: Any
    line: int | None = None

    def inner(self, name: str, value: Any) -> Given:
        """A key of the mapping that this one holds."""
        return Given(f"{self.name}.{name}", value, self.line)


@dataclass(slots=True)
class Reading:
    """What was found in one file."""

    tool: str
    """"axolotl recipe", "DeepSpeed config" …: for messages."""
    file: str
    taken: dict[str, Taken] = field(default_factory=dict)
    """Dotted recipe key -> its value. data.train and data.eval hold complete lists."""
    dropped: list[Dropped] = field(default_factory=list)
    names: dict[str, Place] = field(default_factory=dict)
    """Other files that this one names and that belong to the import (a DeepSpeed config) -> where."""
    shipped: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of these, DeepSpeed configs that the tool ships -> what they set, for where the file is not there."""
    refusals: list[Problem] = field(default_factory=list)
    """Why no recipe can be made of the file: another kind of training, or a contradiction."""
    seen: set[str] = field(default_factory=set)
    """Every key that was taken, dropped or known, in the other tool's spelling."""
    inline: list[tuple[dict[str, Any], int | None]] = field(default_factory=list)
    """DeepSpeed configs inside the file, with their lines."""
    profile: dict[str, Any] = field(default_factory=dict)
    """Keys of a DeepSpeed config without a recipe key: they become a base profile."""
    texts: dict[str, str] = field(default_factory=dict)
    """Files to write next to the recipe (hooks, a chat template): suffix of the name -> text. The recipe's
    value for such a key is the suffix; the recipe's name is put before it when it is written."""

    def take(self, to: str, value: Any, given: Given, *, said: str = "", note: str = "") -> None:
        """A value of the file for a recipe key. said: key and value there, where `given` is not that.

        A secret is dropped instead.
        """
        if self.leaves_open(to, replace(given, value=value)):
            return
        same = type(value) is type(given.value) and value == given.value
        said = said or (given.name if same else f"{given.name}: {shown(given.value)}")
        name = said.partition(":")[0].strip()
        if self._put(to, Taken(value, Place(self.file, given.line), said, note=note), name):
            self.seen.add(name)

    def leaves_open(self, to: str, given: Given) -> bool:
        """Whether a value holds a variable that no tool fills in: it must be set, where it matters.

        to: the recipe's key; empty for a part of one.
        """
        if not isinstance(given.value, str) or _VARIABLE.search(given.value) is None:
            return False
        reason = "holds a variable, whose value is not in the file"
        if to.startswith(("launch.", "trainer.run_name", "trainer.hub_")):
            self.drop(given, Effect.NONE, reason)
        elif not to:
            self.drop(given, Effect.NEEDED, reason, "write its value")
        else:
            self.know(given.name)
            said = f"{shown(given.name)}: {shown(given.value)} {reason}"
            self.needs(to, given.line, said, "write its value")
        return True

    def default(self, to: str, value: Any, said: str, note: str = "", line: int | None = None) -> None:
        """A default of the other tool, where the file sets nothing. said: its key, or `key: value`."""
        said = said if ":" in said else f"{said}: {shown(value)}"
        counted = to == "trainer.num_train_epochs" and "trainer.max_steps" in self.taken
        if to not in self.taken and not counted:
            self._put(to, Taken(value, Place(self.file, line), said, True, note), said.partition(":")[0])

    def _put(self, to: str, taken: Taken, name: str) -> bool:
        if looks_secret(to) or is_secret(name, taken.value) or is_secret(to, taken.value):
            self.drop(Given(name, taken.value, taken.place.line), Effect.NONE, KEEP_OUT)
            return False
        self.taken[to] = taken
        return True

    def drop(self, given: Given, effect: Effect, reason: str, hint: str = "") -> None:
        """Something that has no recipe key. The value of a secret is not kept."""
        self.seen.add(given.name)
        switch = str(given.value).lower() in ("true", "false")  # append_concat_token: false
        hidden = is_secret(given.name, given.value) or (names_secret(given.name) and not switch)
        text = "" if hidden else shown(given.value)
        said = KEEP_OUT if hidden else without_tokens(reason)
        place = Place(self.file, given.line)
        self.dropped.append(Dropped(place, shown(given.name), text, effect, said, without_tokens(hint)))

    def know(self, *keys: str) -> None:
        """Keys that need no report: null, or what a run does anyway."""
        self.seen.update(keys)

    def refuse(
        self, given: Given, message: str, hint: str | None = None, code: str = "import-refused"
    ) -> None:
        """No recipe can be made of this file; `message` continues after the key."""
        self.seen.add(given.name)
        path = shown(given.name) or None
        self.refusals.append(Problem(code, message, self.file, given.line, path, hint))

    def needs(self, what: str, line: int | None, reason: str, hint: str = "") -> None:
        """Something that a recipe needs and the file does not set; `what`: the recipe's key."""
        self.drop(Given(what, "", line), Effect.NEEDED, reason, hint)

    def name_file(self, file: str, line: int | None) -> None:
        """Another file that belongs to the import."""
        if not looks_secret(file):
            self.names[file] = Place(self.file, line)

    @property
    def task(self) -> Task:
        """The task taken so far; else a recipe's default."""
        return task_named(self.value("task") or DEFAULT_TASK)

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on, which may still have to be set."""
        return EVALUATED in self.taken or any(entry.key == EVALUATED for entry in self.dropped)

    def value(self, key: str) -> Any:
        """The value taken for a recipe key, None where there is none."""
        return self.taken[key].value if key in self.taken else None


def read_yaml(text: str, file: str, tool: str) -> tuple[Reading, YamlDocument]:
    """A new reading of a YAML whose later keys win, as in PyYAML. Raises RecipeError if it is no YAML."""
    document = parse_yaml(text, file, last_wins=True)
    twice = [problem for problem in document.problems if problem.code == "duplicate-key"]
    if len(twice) < len(document.problems):
        raise RecipeError([problem for problem in document.problems if problem not in twice])
    reading = Reading(tool, file)
    for problem in twice:
        given = Given(problem.path or "", "", problem.line)
        reading.drop(given, Effect.NONE, f"{problem.message}: the last one counts there")
        reading.seen.discard(given.name)  # that last one is still to be read
    return reading, document
