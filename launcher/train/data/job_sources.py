"""The sources of a job: the format of the rows, and a digest of what the source holds."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.safe_files import read_json, write_json
from launcher.machine.probe import cache_root
from launcher.recipe.data_paths import is_loaded_hub_id
from launcher.recipe.reward_columns import unread
from launcher.rows import conll
from launcher.rows.class_names import declared, of_features, of_labels, with_names
from launcher.rows.files import data_suffix, read_as
from launcher.rows.recognise import PEEK, LaterRows, detect
from launcher.rows.remote import name_of
from launcher.rows.sources import Detected, Row, iter_rows, source_files
from launcher.rows.unread import unread_columns
from launcher.tasks import TASKS
from launcher.tasks.rows import TEXT
from launcher.tasks.sequence_classification import REGRESSION
from launcher.train.data.encoded import Counts
from launcher.train.data.hub_rows import hub_features, hub_rows
from launcher.train.data.made_up import tiny_rows
from launcher.train.data.store import content_key, file_digest
from launcher.train.hooks import Hooks
from launcher.train.job import Job
from launcher.train.tasks import train_task

_OF_TRL = {fmt for task in TASKS if "trl" in task.prepared_by for fmt in task.formats}
"""Formats whose samples trl makes."""
_LINES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the plan."""

    settings: Mapping[str, Any]
    place: str
    """Where the recipe names it: `data.train[0]`."""
    detected: Detected
    digest: str = "stream"
    """Of the files' contents; of id and commit for a data set of the hub."""
    files: tuple[str, ...] = ()
    """Names of its files, as rows give them."""
    unused: tuple[str, ...] = ()
    """Columns that the format does not read."""
    lines: int | None = None
    """Line feeds of its files: about the rows of line formats; None where unknown."""
    classes: tuple[str, ...] = ()
    """Names of whole-number labels, by number, that the data set declares."""

    @property
    def key(self) -> list[Any]:
        """What of the source decides its samples."""
        found = self.detected
        classes = [list(self.classes)] if self.classes else []
        return [self.digest, found.format, dict(found.columns), sorted(found.left_out), *classes]

    def later(self, job: Job) -> LaterRows:
        """What reads its rows, from the first one on."""
        return LaterRows(self.detected, job.task.name, job.reward)

    def form(self, job: Job, row: Row, hooks: Hooks, later: LaterRows) -> Row | None:
        """A raw row in the canonical shape; None for one that the user's `format_row` leaves out."""
        hooked = after_hook(job, row, hooks)
        if hooked is None:
            return None
        formed = later.read(hooked)
        return with_names(formed, self.classes) if self.classes else formed

    def rows(self, job: Job, hooks: Hooks, counts: Counts | None = None) -> Iterator[Row]:
        """Canonical rows; those that `format_row` drops are counted."""
        counts = counts or Counts()
        later = self.later(job)
        for row in raw_rows(job, self.settings):
            counts.read += 1
            formed = self.form(job, row, hooks, later)
            if formed is None:
                counts.dropped["format_row"] += 1
            else:
                yield formed
        if counts.read < self.settings.get("first", inf):  # else the column may have other values below
            later.end()


def raw_rows(job: Job, settings: Mapping[str, Any]) -> Iterator[Row]:
    """Rows as the source holds them; those of a rehearsal are made up."""
    if job.tiny:
        made_up = tiny_rows(settings, job.task.name, job.data.loss_on)
        rehearsed = train_task(job.task.name).rehearsed
        return (replace(row, values=rehearsed(job, row.values)) for row in made_up)
    read = hub_rows if is_loaded_hub_id(settings["path"]) else iter_rows
    return read(settings, job.model.cache_dir)


def after_hook(job: Job, row: Row, hooks: Hooks) -> Row | None:
    """The row that `format_row` makes of a row, None where it leaves it out.

    Not called for the rows of a rehearsal, which have the format that the source would have after it.
    """
    if job.tiny or hooks.format_row is None:
        return row
    values = hooks.format_row(row.values, row.file, row.number)
    return None if values is None else Row(values, row.file, row.number)


def recognise(job: Job, name: str, hooks: Hooks, *, digest: bool = True) -> list[Source]:
    """The sources of `data.NAME` (train, eval), each with the format of its first rows.

    digest: False for rows that are streamed, whose contents are not cached. RecipeError when one holds
    no rows or rows of no known format; MachineError when the hub is out of reach and was never asked.
    """
    sources = []
    given = job.data.train if name == "train" else job.data.eval
    for index, settings in enumerate(given if isinstance(given, list) else []):
        place = f"data.{name}[{index}]"
        if job.tiny:
            source = _detect(job, {**settings, "columns": {}}, place, hooks)
            sources.append(replace(source, digest="tiny", files=(str(settings["path"]),)))
        elif not digest:
            sources.append(_detect(job, settings, place, hooks))
        elif files := source_files(settings):
            sources.append(_digested(job, _detect(job, settings, place, hooks), files))
        else:
            sources.append(_from_hub(job, settings, place, hooks))
    return sources


def _detect(job: Job, settings: Mapping[str, Any], place: str, hooks: Hooks) -> Source:
    hooked = (after_hook(job, row, hooks) for row in raw_rows(job, settings))
    rows = list(itertools.islice((row for row in hooked if row is not None), PEEK))
    path = str(settings["path"])
    if not rows:
        raise RecipeError(Problem("no-rows", "holds no rows", file=path, path=f"{place}.path"))
    detected = detect(rows, settings["format"], settings["columns"], job.task.name, path, job.reward)
    require_packages(detected)
    unused = unread(unread_columns(rows, detected), job.reward)
    return Source(settings, place, detected, unused=unused, classes=_classes(job, settings, detected, hooks))


def _classes(job: Job, settings: Mapping[str, Any], detected: Detected, hooks: Hooks) -> tuple[str, ...]:
    """Names that the data set declares for its labels; none after a hook, whose numbers may be others."""
    is_score = job.data.problem_type == REGRESSION
    if job.tiny or not job.task.classifies or is_score or hooks.format_row is not None:
        return ()
    if is_loaded_hub_id(settings["path"]):
        names = of_features(hub_features(settings, job.model.cache_dir))
    else:
        names = declared(settings)
    return of_labels(names, detected.columns)


def require_packages(detected: Detected) -> None:
    """MachineError where a package is missing that encodes rows of this format."""
    if detected.format in _OF_TRL and importlib.util.find_spec("trl") is None:
        hint = "pip install 'effilaunch[dpo]'"
        raise MachineError(
            Problem("package-missing", f"{detected.format} rows need the package trl", hint=hint)
        )


def _digested(job: Job, source: Source, files: list[Path]) -> Source:
    """With the digest of the files, in one pass over them.

    Samples of images hold their paths, and their labels may be folder names, so there the path of a
    file counts as well as its content. Elsewhere moved files are found again.
    """
    images = job.task.sees_images or not job.task.reads_tokens
    digests, lines = [], 0
    for file in files:
        content, count = file_digest(file) if "first" not in source.settings else ("", 0)
        # Of CoNLL files, numbers of words were once read as words.
        form = "numbered" if data_suffix(file) in conll.SUFFIXES else read_as(source.settings) or ""
        digests.append(f"{form}{file.absolute() if images else ''}:{content}")
        lines += count
    plain = all(file.suffix in _LINES for file in files)
    names = tuple(map(name_of, files))
    return replace(source, digest=";".join(digests), files=names, lines=lines if plain else None)


def _from_hub(job: Job, settings: Mapping[str, Any], place: str, hooks: Hooks) -> Source:
    """A data set of the hub: what was found when it was asked last serves a machine that cannot ask.

    So a job without a network finds what `prepare` left where there was one.
    """
    asked = {name: settings[name] for name in ("path", "name", "split", "revision", "format", "columns")}
    note = cache_root() / "hub" / f"{content_key({**asked, 'hooks': hooks.digest})}.json"
    name = str(settings["path"])
    try:
        source = _detect(job, settings, place, hooks)
    except MachineError:
        try:
            known = read_json(note)
            left_out, unused = frozenset(known.get("left_out", ())), tuple(known["unused"])
            judged = None if settings["format"] == TEXT.name else frozenset(unused)
            detected = Detected(known["format"], known["columns"], left_out, judged)
            classes = tuple(known.get("classes", ()))
            return Source(settings, place, detected, known["digest"], (name,), unused, classes=classes)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # no note, a damaged one, or one of another user: as if the hub had never been asked
        raise
    digest = f"hub:{name}:{settings['name']}:{settings['split']}:{_commit(settings)}"
    known = {"format": source.detected.format, "columns": dict(source.detected.columns)}
    known |= {"left_out": sorted(source.detected.left_out), "classes": list(source.classes)}
    with contextlib.suppress(OSError):  # only a machine without a network misses it
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {**known, "digest": digest, "unused": list(source.unused)})
    return replace(source, digest=digest, files=(name,))


def _commit(settings: Mapping[str, Any]) -> str | None:
    """The commit of a data set of the hub; the revision as given where that cannot be asked."""
    from huggingface_hub import HfApi

    revision: str | None = settings["revision"]
    try:
        return str(HfApi().dataset_info(settings["path"], revision=revision, timeout=10).sha)
    except Exception:  # offline, private, unreachable: reading the rows has reported it
        return revision
