"""Several files as one recipe: who goes before whom, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.importing import accelerate, deepspeed, launch_line, lora_file
from launcher.importing.found import Call, Dropped, Effect, Place, Reading, Taken, shown, without_tokens
from launcher.importing.recognise import Info, info_of, read_call, read_file, read_text, text_of
from launcher.importing.settle import settle

MOST = 20
"""Files of one import."""
# The earlier goes before the later where the tools themselves do it so.
_RANKS = {launch_line.TOOL: 0, accelerate.TOOL: 2, deepspeed.TOOL: 3, lora_file.TOOL: 4}
_ONCE = (launch_line.TOOL, accelerate.TOOL, deepspeed.TOOL, lora_file.TOOL, "")
"""Kinds of which an import has one at most; "" are the recipes."""

_OF_DEEPSPEED = ("trainer.optim", "trainer.lr_scheduler_type")
"""A DeepSpeed config that has these makes them itself: the Trainer does not look at its own arguments."""


@dataclass(slots=True)
class Imported:
    """One recipe out of all files."""

    files: list[str]
    tools: list[str]
    taken: dict[str, Taken]
    dropped: list[Dropped]
    texts: dict[str, str] = field(default_factory=dict)
    """Files to write beside the recipe: suffix of the name -> text."""
    notes: list[str] = field(default_factory=list)
    """What no key holds: the value for --on."""


def import_files(files: Sequence[str]) -> Imported:
    """Read the files and those that they name. RecipeError for what no recipe can be made of."""
    try:
        return _imported(files)
    except RecipeError as error:  # parsers quote what they stumble over
        clean = [
            replace(
                problem,
                message=without_tokens(problem.message),
                hint=problem.hint and without_tokens(problem.hint),
            )
            for problem in error.problems
        ]
        raise RecipeError(clean) from None


def _imported(files: Sequence[str]) -> Imported:
    readings = _read_all(files)
    refusals = _too_many(readings)
    refusals += [problem for reading in readings for problem in reading.refusals]
    if refusals:
        raise RecipeError(refusals)
    return joined(readings)


def joined(readings: Sequence[Reading]) -> Imported:
    """The readings as one. RecipeError with every contradiction."""
    order = sorted(readings, key=lambda reading: _RANKS.get(reading.tool, 1))
    problems: list[Problem] = []
    dropped = [entry for reading in readings for entry in reading.dropped]
    taken: dict[str, Taken] = {}
    for reading in order:
        for key, value in reading.taken.items():
            before = taken.get(key)
            if before is None or (
                before.is_default and not value.is_default and not _firm(before, key, order)
            ):
                taken[key] = value
            elif not value.is_default and not before.is_default and value.value != before.value:
                if reading.tool == deepspeed.TOOL and key in _OF_DEEPSPEED:
                    dropped.append(_overruled(before, value))
                    taken[key] = value
                    continue
                problem = _contradiction(key, before, value, reading, order)
                if problem is not None:
                    problems.append(problem)
                elif _is_weak(key, before):
                    taken[key] = value
                else:
                    dropped.append(_overruled(value, before))
    if problems:
        raise RecipeError(problems)
    made = Imported(
        [reading.file for reading in readings],
        [reading.tool for reading in readings],
        taken,
        dropped,
        {suffix: text for reading in readings for suffix, text in reading.texts.items()},
    )
    profile = next((reading.profile for reading in readings if reading.profile), {})
    settle(made, profile)
    made.dropped[:] = dict.fromkeys(made.dropped)
    return made


def _read_all(files: Sequence[str]) -> list[Reading]:
    """The files given, and those that they name and that are there."""
    info, texts = _apart(files)
    given = list(texts)
    readings = _read_given(texts, info)
    if not readings:
        raise RecipeError(Problem("import-unknown", "LLaMA-Factory's list of data sets alone is no training",
                                  files[0], hint="give the recipe as a FILE too"))  # fmt: skip
    for reading in readings[:]:
        for call in reading.calls:
            readings = _called(readings, reading, call, given, info)
    known = {_resolved(Path(reading.file)) for reading in readings}
    for reading in readings:  # grows while it is gone through
        for config, line in reading.inline:
            deepspeed.take_config(reading, config, lambda path, line=line: line)  # type: ignore[misc]
        for name, place in reading.names.items():
            _take_named(readings, reading, name, place, known, given)
    return readings


def _apart(files: Sequence[str]) -> tuple[Info | None, dict[str, str]]:
    """LLaMA-Factory's list of data sets, where one is given, and the texts of the other files.

    Each file is opened once: what a shell puts in its place (`<(…)`) is there once. RecipeError with all that
    cannot be read.
    """
    info = None
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    for file in dict.fromkeys(files):
        try:
            text = text_of(file)
        except RecipeError as error:
            problems += error.problems
            continue
        found = info_of(text, file)
        if found is None:
            texts[file] = text
        info = info or found
    problems += _unread(texts, info) if problems else []
    if problems:
        raise RecipeError(problems)
    return info, texts


def _unread(texts: Mapping[str, str], info: Info | None) -> list[Problem]:
    """What is wrong with the files that could be opened, beside those that could not."""
    try:
        _read_given(texts, info)
    except RecipeError as error:
        return error.problems
    return []


def _read_given(texts: Mapping[str, str], info: Info | None) -> list[Reading]:
    """A reading each. RecipeError with what is wrong with any of them."""
    readings: list[Reading] = []
    problems: list[Problem] = []
    for file, text in texts.items():
        try:
            readings.append(read_text(text, file, info))
        except RecipeError as error:
            problems += [replace(problem, file=problem.file or file) for problem in error.problems]
    if problems:
        raise RecipeError(problems)
    return readings


def _take_named(
    readings: list[Reading], reading: Reading, name: str, place: Place, known: set[Path], given: Sequence[str]
) -> None:
    """A config that a file names: read where it is there, else needed."""
    found = _find(name, reading.file, given)
    if found is not None:
        if _resolved(found) not in known and len(readings) < MOST:
            known.add(_resolved(found))
            readings.append(read_file(str(found)))
    elif any(other.tool == deepspeed.TOOL for other in readings):
        reading.drop(name, "", place.line, Effect.NONE, "the DeepSpeed config that is given stands for it")
    else:
        reading.drop(name, "", place.line, Effect.NEEDED, "this file is named, and is not there",
                     "give it as a FILE too")  # fmt: skip


def _called(
    readings: list[Reading], reading: Reading, call: Call, given: Sequence[str], info: Info | None
) -> list[Reading]:
    """Read the recipe that a launch line starts, with what the line says over it."""
    found = None if call.file is None else _find(call.file, reading.file, given)
    if call.file is not None and found is None:
        reading.drop(call.file, "", call.line, Effect.NEEDED, "this recipe is named, and is not there",
                     "give it as a FILE too")  # fmt: skip
        return readings
    made = read_call(call, Place(reading.file, call.line), found, info)
    there = None if found is None else _resolved(found)  # what was read of it without the line
    return [*(other for other in readings if _resolved(Path(other.file)) != there), made]


def _find(name: str, file: str, given: Sequence[str]) -> Path | None:
    """A named file: one that is given, of the same name, else beside the one that names it."""
    same = [Path(other) for other in given if Path(other).name == Path(name).name]
    return same[0] if same else _beside(name, file)


def _beside(name: str, file: str) -> Path | None:
    """A named file, beside the one that names it or in the working folder."""
    try:
        for folder in (Path(file).parent, Path()):
            if (folder / name).is_file():
                return folder / name
    except (OSError, ValueError):
        return None
    return None


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path


def _kind(reading: Reading) -> str:
    return reading.tool if reading.tool in _ONCE else ""


def _too_many(readings: Sequence[Reading]) -> list[Problem]:
    """Two of a kind: two trainings, or two configs of the same thing."""
    problems = []
    first: dict[str, Reading] = {}
    for reading in readings:
        before = first.setdefault(_kind(reading), reading)
        if before is not reading:
            message = f"a {reading.tool}, and {before.file} is a {before.tool}: one recipe is of one training"
            problems.append(Problem("import-conflict", message, reading.file, hint="import them one by one"))
    return problems


def _tool_of(place: Place, readings: Sequence[Reading]) -> str:
    return next((reading.tool for reading in readings if reading.file == place.file), "")


def _firm(before: Taken, key: str, readings: Sequence[Reading]) -> bool:
    """Whether a tool sets its default itself, against what accelerate's file says."""
    return key == "precision" and _tool_of(before.place, readings).startswith(("TRL", "axolotl"))


def _is_weak(key: str, before: Taken) -> bool:
    """One process a device is also how DeepSpeed and FSDP begin."""
    return key == "sharding.engine" and before.value == "ddp"


def _contradiction(
    key: str, before: Taken, value: Taken, reading: Reading, readings: Sequence[Reading]
) -> Problem | None:
    """The problem of two values, None where one of the tools goes before the other."""
    first = _tool_of(before.place, readings)
    if key == "sharding.engine" and "ddp" in (before.value, value.value):
        return None
    options = first == launch_line.TOOL and key != "sharding.engine"
    if reading.tool == accelerate.TOOL and (options or key == "precision"):
        return None
    message = (
        f"{before.said} in {before.place} and {value.said} in {value.place} contradict each other "
        f"({key}: {shown(before.value)} or {shown(value.value)})"
    )
    return Problem("import-conflict", message, value.place.file, value.place.line, key,
                   "make them equal, or take one out")  # fmt: skip


def _overruled(value: Taken, before: Taken) -> Dropped:
    name, _, text = value.said.partition(": ")
    reason = f"{before.said} ({before.place}) goes before it"
    return Dropped(value.place, name, text or shown(value.value), Effect.NONE, reason)
