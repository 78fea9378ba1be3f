"""The recipe of another tool: its keys with their lines, and tables of what becomes of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from launcher.files.safe_files import parse_json
from launcher.importing.arguments import Field, take_argument, take_field
from launcher.importing.conversions import To, as_bool, as_number, is_off, texts
from launcher.importing.reading import Effect, Given, Reading, read_yaml, shown
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.schema import unread_keys
from launcher.recipe.suggestions import close_key
from launcher.tasks import TASKS

Keys = Mapping[str, To | Field]
"""Key there -> what takes it."""


@dataclass(frozen=True, slots=True)
class Left:
    """Keys, or values of keys, without a recipe key, for one reason."""

    effect: Effect | None
    """None: no recipe can be made of it."""
    reason: str
    names: Mapping[str, str]
    """Key -> the values that are meant, `=a|b` or `!=a|b`; empty: all but what is off or the default."""
    hint: str = ""

    def means(self, name: str, value: Any) -> bool:
        """Whether a value of a key with values is one of them."""
        other, _, listed = self.names[name].partition("=")
        said = {str(value).lower(), str(as_bool(value)).lower()}
        return bool(said & set(listed.lower().split("|"))) is not bool(other)


@dataclass(frozen=True, slots=True)
class Tool:
    """The keys of a tool."""

    table: str
    """Its name in tables/ and among the names that tasks have there."""
    name: str
    version: str
    keys: Mapping[str, Any]
    """Key -> its default there; None where that is nothing, or not a plain value."""
    of_unknown: str
    """What the tool does with an unknown key: `ignores it`."""
    lists: Mapping[str, tuple[str, ...]]
    """Keys of the mappings inside: a data set's."""
    left: Mapping[str, tuple[Left, ...]]
    """Section of tables/NAME_dropped.yaml -> its keys."""

    def sections(self, prefix: str) -> dict[str, tuple[Left, ...]]:
        """Sections of `left` by the rest of their name: of `plugin NAME` by NAME."""
        return {
            name.removeprefix(prefix): left for name, left in self.left.items() if name.startswith(prefix)
        }


_NAME = re.compile(r"([^\s=!]+)(!?=\S+)?")
"""`key`, `key=a|b` or `key!=a|b` of tables/NAME_dropped.yaml."""
_MICRO, _ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
_EVALUATED = "per_device_eval_batch_size"
KERNELS = {name: name for name in ("eager", "sdpa", "flash_attention_2", "flex_attention")}


@dataclass(slots=True)
class Peer:
    """A recipe of another tool, or a mapping inside it, while it is read."""

    tool: Tool
    reading: Reading
    values: dict[str, Any]
    """A key with null is as one that is absent, everywhere."""
    lines: Mapping[str, int]
    """Dotted path -> line."""
    at: str = ""
    """Dotted path of the mapping, with a dot at its end: `datasets[0].`."""

    def line(self, key: str) -> int | None:
        """The line of a key; of the mapping where the key is absent."""
        return self.lines.get(self.at + key) or self.lines.get(self.at.removesuffix("."))

    def given(self, key: str, fallback: Any = None) -> Given:
        """A key with its value (`fallback` where it is absent) and line."""
        return Given(self.at + key, self.values.get(key, fallback), self.line(key))

    def get(self, key: str) -> Any:
        """The value of a key, which is then dealt with; None where it is absent."""
        self.reading.know(self.at + key)
        return self.values.get(key)

    def inside(self, at: str, values: Mapping[str, Any]) -> Peer:
        """A mapping of this recipe; at: its dotted path."""
        known = {name: value for name, value in values.items() if value is not None}
        return Peer(self.tool, self.reading, known, self.lines, f"{self.at}{at}.")

    def entries(self, key: str, expected: str) -> list[Peer]:
        """The mappings of a list, or the one mapping; other items are dropped as not `expected`."""
        given, found = self.get(key), []
        several = isinstance(given, list)
        for index, entry in enumerate(given if several else [] if given is None else [given]):
            at = f"{key}[{index}]" if several else key
            if isinstance(entry, dict):
                found.append(self.inside(at, entry))
            else:
                where = Given(self.at + at, entry, self.line(at))
                self.reading.drop(where, Effect.NEEDED, f"expected a mapping with {expected}")
        return found

    def listed(self, key: str) -> list[str]:
        """A list of texts, or one text with commas; what is none is dropped."""
        value = self.get(key)
        try:
            return [] if value is None else texts(value) or []
        except ValueError as error:
            self.drop(key, Effect.NEEDED, f"expected {error}")
            return []

    def section(self, key: str, of: str = "") -> Peer:
        """The mapping of a key, also as a text of JSON; what is none is dropped. of: what it holds."""
        value = self.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = parse_json(value)
        if not isinstance(value, dict | None):
            self.drop(key, Effect.NEEDED, f"expected a mapping{of}")
        return self.inside(key, value if isinstance(value, dict) else {})

    def switch(self, key: str) -> bool:
        """Whether a switch is on; what is none is dropped."""
        is_new = self.at + key not in self.reading.seen
        value = self.get(key)
        if is_new and as_bool(value) is None and not is_off(value):
            self.drop(key, Effect.TRAINING, "expected true or false")
        return as_bool(value) is True

    def take(self, to: str, value: Any, key: str, *others: str, note: str = "") -> None:
        """A value for a recipe key, from the named keys of the file."""
        several = [name for name in (key, *others) if name in self.values]
        said = ", ".join(f"{name}: {shown(self.values[name])}" for name in several)
        said = said if len(several) > 1 else "" if several else key
        self.reading.take(to, value, self.given(key), said=said, note=note)
        self.reading.know(*(self.at + name for name in (key, *others)))

    def default(self, to: str, value: Any, said: str, note: str = "") -> None:
        """A default of the tool, where the file sets nothing."""
        self.reading.default(to, value, said, note)

    def decide(self, to: str, value: Any, *keys: str, said: str = "", note: str = "") -> None:
        """A value from the named keys of the file, or the tool's default where it has none of them."""
        if given := [key for key in keys if key in self.values]:
            self.take(to, value, *given, note=note)
        else:
            self.default(to, value, said or keys[0], note)

    def fill_task(self, beta: str = "beta") -> None:
        """The tool's defaults of the task; beta: the key of `trainer.beta`."""
        for to, value in self.reading.task.tool_defaults.get(self.tool.table, {}).items():
            name = to.rpartition(".")[2]
            self.default(to, value, beta if name == "beta" else name)

    def take_patience(self, key: str) -> None:
        """Evaluations without a better one before the run stops."""
        patience = as_number(self.get(key))
        if patience is not None and patience >= 1:
            self.take("early_stopping.patience", int(patience), key)
        elif patience is None and key in self.values:
            self.drop(key, Effect.TRAINING, "expected a number of evaluations")

    def leave_out_long(self, key: str, longest: int, there: str) -> None:
        """Pairs of answers over a length (`longest` where the file has none), which the tool cuts."""
        reason = f"{there}; here they are left out, because a cut answer has another reward"
        self.reading.take("data.overlong", "drop", self.given(key, longest), said=key)
        self.reading.drop(self.given(key, longest), Effect.TRAINING, reason)

    def take_template(self, given: Given) -> None:
        """A chat template as text: a file next to the recipe."""
        self.reading.texts["_template.jinja"] = str(given.value)
        self.reading.take("model.chat_template", "_template.jinja", given, said=given.name)

    def argument(self, *keys: str, to: str = "") -> None:
        """Keys that are fields of TrainingArguments, or one that is called `to` there."""
        for key in keys:
            if self.get(key) is not None and (to or self.at):
                take_field(self.reading, self.given(key), to or key)
            elif key in self.values:
                take_argument(self.reading, self.given(key))

    def drop(self, key: str, effect: Effect, reason: str, hint: str = "") -> None:
        """A key without a recipe key."""
        self.reading.drop(self.given(key), effect, reason, hint)

    def refuse(self, key: str, message: str, hint: str | None = None) -> None:
        """No recipe can be made of this file, for this key."""
        self.reading.refuse(self.given(key), message, hint)

    def needs(self, to: str, key: str, reason: str, hint: str = "") -> None:
        """A recipe key without a value in the file; key: where it would be."""
        self.reading.needs(to, self.line(key), reason, hint)

    def take_kernel(self, key: str, names: Mapping[str, str] = KERNELS) -> None:
        """An attention kernel; names: there -> here."""
        value = self.get(key)
        if str(value) in names:
            self.take("model.attn_implementation", names[str(value)], key)
        elif value is not None:
            self.drop(key, Effect.NONE, "a kernel that is not here; the planner chooses one")

    def take_keys(self, keys: Keys) -> None:
        """Take every key of the table that the file has."""
        for name, taker in keys.items():
            if name in self.values and self.at + name not in self.reading.seen:
                taker(self.reading, self.given(name))

    def fill(self, keys: Keys) -> None:
        """The tool's defaults of a table where the file sets nothing, and what a recipe needs of the file."""
        for name, row in keys.items():
            if row.required is not None and name not in self.values:
                self.reading.needs(row.key, None, f"{name} is not there{row.required}")
            if row.default is not None:
                self.default(row.key, row.default, name)

    def take_arguments(self, task: str, others: Iterable[str] = ()) -> None:
        """Take what is left of TrainingArguments; fields that only other tasks have are not among them."""
        own = {*trainer_fields(task), *others}
        foreign = {name for other in TASKS for name in trainer_fields(other.name)} - own
        for name in list(self.values):
            if name not in self.reading.seen and name not in foreign:
                take_argument(self.reading, self.given(name))

    def leave(self, table: Iterable[Left]) -> None:
        """Drop every key of the table that the file has, with its reason."""
        for entry in table:
            for name, values in entry.names.items():
                if name not in self.values or self.at + name in self.reading.seen:
                    continue
                if values and not entry.means(name, self.values[name]):
                    continue
                if not values and self._sets_nothing(name):
                    self.reading.know(self.at + name)
                elif entry.effect is None:
                    self.refuse(name, f"is {shown(self.values[name])}: {entry.reason}", entry.hint or None)
                else:
                    self.drop(name, entry.effect, entry.reason, entry.hint)

    def leave_unread(self, names: Iterable[str], reason: str) -> None:
        """Keys that the tool does not read either: dropped unless they are off."""
        for name in names:
            if name in self.values and is_off(self.get(name)) is False:
                self.drop(name, Effect.NONE, reason)

    def leave_inner(self, effect: Effect, reason: str, *known: str) -> None:
        """What is left of a mapping inside: dropped unless it is off; `known` needs no report."""
        for name, value in self.values.items():
            if self.at + name in self.reading.seen or name in known or is_off(value):
                self.get(name)
            else:
                self.drop(name, effect, reason)

    def leave_rest(self, known_elsewhere: Iterable[str] = ()) -> None:
        """Drop what no table has: keys of the tool, and unknown keys."""
        names = {*self.tool.keys, *known_elsewhere}
        for name in [name for name in self.values if name not in self.reading.seen]:
            if name not in self.tool.keys:
                near = close_key(name, names)
                reason = f"no key of {self.tool.name} {self.tool.version}, which {self.tool.of_unknown}"
                # A key that the tool refuses may have had an effect in the version that the file is for.
                effect = Effect.NONE if self.tool.of_unknown == "ignores it" else Effect.TRAINING
                self.drop(name, effect, reason, f"did you mean {near}?" if near else "")
            elif self._sets_nothing(name):
                self.reading.know(name)
            else:
                self.drop(name, Effect.TRAINING, f"{self.tool.name}'s own; it has no recipe key")

    def _sets_nothing(self, name: str) -> bool:
        """Whether a key has its default, or is off where nothing else is the default."""
        default, value = None if self.at else self.tool.keys.get(name), self.values[name]
        if is_off(value):
            return default is None or is_off(default)
        return default is not None and type(default) is type(value) and default == value

    def close(self) -> Reading:
        """The reading, without what its task does not read."""
        reading = self.reading
        self._raise_batches()
        if not reading.task.learns:
            reason = "samples of this task are prepared before the training, and padded"
            names = ("packing", "padding_free", "streaming", "loss_on", "pad_to_multiple_of", "metrics")
            self._leave_out(dict.fromkeys(names, reason))
        elif reading.task.sees_images:
            found = ((path.partition("."), key) for path, key in unread_keys(reading.task))
            unread = {name: key.unread for (section, _, name), key in found if section == "data"}
            self._leave_out(unread, "packing")
        return reading

    def _raise_batches(self) -> None:
        """Micro-batches that the task's loss cannot have become larger, with less accumulation."""
        reading = self.reading
        trainer = {key.removeprefix("trainer."): taken.value for key, taken in reading.taken.items()}
        least, why = reading.task.least_batch(trainer)
        size, steps = (trainer.get(name) for name in (_MICRO, _ACCUMULATED))
        if isinstance(size, int) and 0 < size < least:
            taken, times = reading.taken[f"trainer.{_MICRO}"], -(-least // size)
            steps = steps if isinstance(steps, int) else 1
            if steps % times:
                reading.needs(f"trainer.{_MICRO}", taken.place.line, f"at least {least}: {why}")
                del reading.taken[f"trainer.{_MICRO}"]
            else:
                reading.dropped.append(taken.dropped(Effect.TRAINING, f"{size * times} here: {why}"))
                for name, value in ((_MICRO, size * times), (_ACCUMULATED, steps // times)):
                    before = reading.taken.get(f"trainer.{name}", taken)
                    reading.taken[f"trainer.{name}"] = replace(before, value=value)
        evaluated = reading.taken.get(f"trainer.{_EVALUATED}")
        if evaluated is not None and isinstance(evaluated.value, int) and 0 < evaluated.value < least:
            reading.taken[f"trainer.{_EVALUATED}"] = replace(evaluated, value=least)

    def _leave_out(self, unread: Mapping[str, str], changing: str = "") -> None:
        """Drop keys of `data` that the task does not read (key -> why); only `changing` alters the run."""
        for name, reason in unread.items():
            taken = self.reading.taken.pop(f"data.{name}", None)
            if taken is not None and not taken.is_default:
                effect = Effect.TRAINING if name == changing else Effect.NONE
                self.reading.dropped.append(taken.dropped(effect, reason))


@cache
def load_tool(table: str, name: str, of_unknown: str) -> Tool:
    """A tool by its shipped tables: the generated one of its keys, and that of the dropped ones."""
    folder = Path(__file__).parent / "tables"
    content = parse_json((folder / f"{table}.json").read_text(encoding="utf-8"))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    dropped = yaml.load((folder / f"{table}_dropped.yaml").read_text(encoding="utf-8"), loader)
    lists = {key: tuple(value) for key, value in content.items() if key not in ("version", "keys")}
    left = {section: tuple(_left(effects)) for section, effects in dropped.items()}
    return Tool(table, name, content["version"], content["keys"], of_unknown, lists, left)


def _left(effects: Mapping[str, Mapping[str, str]]) -> Iterator[Left]:
    for effect, reasons in effects.items():
        for reason, names in reasons.items():
            text, _, hint = reason.partition(" | ")
            each: dict[str, str] = {}
            for name, values in _NAME.findall(names):  # a key again: more values of it
                each[name] = f"{each[name]}|{values.lstrip('!=')}" if name in each else values
            yield Left(None if effect == "refused" else Effect(effect), text, each, hint)


def open_peer(text: str, file: str, tool: Tool) -> Peer:
    """Read the YAML or JSON. Raises RecipeError if it is no YAML."""
    reading, document = read_yaml(text, file, f"{tool.name} recipe")
    values = document.data if isinstance(document.data, dict) else {}
    reading.know(*(key for key, value in values.items() if value is None))
    known = {key: value for key, value in values.items() if value is not None}
    return Peer(tool, reading, known, document.lines)
