"""Splits of data files by their names, as the hub's `datasets` library recognises them.

The rules are those of `datasets.data_files`, written again because planning runs without that package;
tests/contract/test_file_splits.py compares them. Of several kinds of files that library reads the one of most
files and leaves the others out in silence: here notes such as README.txt are left out and shown, and other
mixtures are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.recipe.suggestions import listed
from launcher.recipe.yaml_writer import flow
from launcher.rows.files import rows_kind, rows_name

ALL = "all"
"""`split` of a source whose files are all read."""
TRAIN = "train"
_KEYWORDS = {
    TRAIN: "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
_EDGE = "[-._ 0-9]"
_IN_FOLDER = {
    split: re.compile(rf"(?:^|{_EDGE})(?:{words})(?:{_EDGE}|$)") for split, words in _KEYWORDS.items()
}
_IN_NAME = {split: re.compile(rf"(?:^|{_EDGE})(?:{words}){_EDGE}") for split, words in _KEYWORDS.items()}
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NOTES = re.compile("(?:change-?log|citation|copying|licen[cs]e|notice|read-?me)(?:[-._ ].*)?", re.IGNORECASE)
"""Stems of text files about the data."""
_SHOWN = 8

Splits = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of a source that are read, and those that are left."""

    names: Sequence[str]
    split: str | None = None
    """None: nothing was to be chosen, all are read."""
    others: Splits = field(default_factory=dict)
    """Split -> its files; `""`: those of no split."""
    notes: Sequence[str] = ()
    """Text files about the data, such as README.txt."""


def splits_of(names: Sequence[str]) -> Splits:
    """Split -> its files, which may be in several; empty where no name tells a split.

    names: paths from the source's folder on, with `/`.
    """
    shards: dict[str, list[str]] = {}
    for name in names:
        if shard := _SHARD.fullmatch(name):
            shards.setdefault(shard[1], []).append(name)
    if shards:
        order = [
            *(split for split in _KEYWORDS if split in shards),
            *sorted(shards.keys() - _KEYWORDS.keys()),
        ]
        return {split: shards[split] for split in order}
    for patterns, parts in ((_IN_FOLDER, _folders), (_IN_NAME, _file)):
        found = {
            split: [name for name in names if any(pattern.search(part) for part in parts(name))]
            for split, pattern in patterns.items()
        }
        if any(found.values()):
            return {split: members for split, members in found.items() if members}
    return {}


def _folders(name: str) -> Iterable[str]:
    return name.split("/")[:-1]


def _file(name: str) -> Iterable[str]:
    return name.split("/")[-1:]


def choose(names: Sequence[str], asked: str, path: str, *, is_pattern: bool) -> SplitFiles:
    """The files of the split that is asked for.

    path: the source, for errors. is_pattern: a pattern named the files, so one whose names have no other
    split says what is meant. RecipeError where no file has that split, where a file has two, where two files
    seem to hold the same rows, and where files are of several kinds.
    """
    found = splits_of(names)
    alike = is_pattern and len(set(map(tuple, found.values()))) == 1
    if asked == ALL or (asked == TRAIN and (not found or alike)):
        chosen = SplitFiles(names)
    elif asked in found:
        chosen = _chosen(names, asked, path, found)
    else:
        raise _no_split(asked, path, found)
    _refuse_copies(chosen.names, path)
    return _of_one_kind(chosen, path)


def _chosen(names: Sequence[str], asked: str, path: str, found: Splits) -> SplitFiles:
    for split, members in found.items():
        if split != asked and (both := set(members) & set(found[asked])):
            message = f"{listed(sorted(both), _SHOWN)}: the name tells split {asked} and split {split}"
            hint = f"rename it, or name the files as sources; `split: {ALL}` reads every file of {path}"
            raise RecipeError(Problem("data-split", message, file=path, hint=hint))
    told = {name for members in found.values() for name in members}
    others = {split: members for split, members in found.items() if split != asked}
    left = [name for name in names if name not in told]
    return SplitFiles(found[asked], asked, others | ({"": left} if left else {}))


def _no_split(asked: str, path: str, found: Splits) -> RecipeError:
    if found:
        message = f"no file is of split {asked}; the names tell {_shown(found)}"
        hint = f"set `split: {next(iter(found))}`, or `split: {ALL}` for every file"
    else:
        message = f"no file is of split {asked}: no name tells a split"
        hint = "name the files of the split as `path`, or remove `split`"
    return RecipeError(Problem("data-split", message, file=path, hint=hint))


def _of_one_kind(chosen: SplitFiles, path: str) -> SplitFiles:
    kinds: dict[str, list[str]] = {}
    notes = []
    for name in chosen.names:
        kind = rows_kind(Path(name))
        if kind == "text" and _NOTES.fullmatch(rows_name(Path(name).name)):
            notes.append(name)
        else:
            kinds.setdefault(kind, []).append(name)
    if not kinds:
        return chosen
    if len(kinds) > 1:
        held = "; ".join(f"{kind} ({listed(names, _SHOWN)})" for kind, names in kinds.items())
        hint = "name the files that hold rows as sources, each kind by a pattern of its own"
        raise RecipeError(
            Problem("data-kinds", f"holds files of several kinds: {held}", file=path, hint=hint)
        )
    return replace(chosen, names=next(iter(kinds.values())), notes=notes)


def _refuse_copies(names: Sequence[str], path: str) -> None:
    known: dict[str, str] = {}
    for name in names:
        first = known.setdefault(rows_name(name), name)
        if first != name:
            message = f"holds {first} and {name}: the same rows twice?"
            hint = "remove one of them, or name the files to read as sources"
            raise RecipeError(Problem("data-twice", message, file=path, hint=hint))


def split_lines(path: str, chosen: SplitFiles, *, offer: bool) -> list[str]:
    """For people: the files that are read, and those that are left, by split.

    offer: with how to evaluate on one of the others.
    """
    lines = [f"{chosen.split or 'all'} of {path}: {listed(chosen.names, _SHOWN)}"]
    if chosen.others:
        lines.append(f"not read: {_shown(chosen.others)}")
    if chosen.notes:
        lines.append(f"not read: notes ({listed(chosen.notes, _SHOWN)})")
    splits = [split for split in chosen.others if split]
    if offer and splits:
        source = flow([{"path": path, "split": splits[0]}])
        lines.append(f"to evaluate on split {splits[0]}: `data: {{eval: {source}}}`")
    return lines


def _shown(splits: Splits) -> str:
    return "; ".join(
        f"{f'split {split}' if split else 'no split'} ({listed(names, _SHOWN)})"
        for split, names in splits.items()
    )
