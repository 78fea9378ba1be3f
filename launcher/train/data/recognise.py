"""A source of the plan, recognised: the format of its rows, and a digest of what it holds."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.facts.probe import cache_root
from launcher.facts.safe_files import read_json, write_json
from launcher.train.data.counts import Counts
from launcher.train.data.detection import PEEK
from launcher.train.data.formats import Detected, canonical, detect
from launcher.train.data.sources import Row, bad_row, iter_rows, source_files
from launcher.train.data.store import content_key, file_digest
from launcher.train.data.unread import refuse_lost, unread_columns
from launcher.train.hooks import Hooks
from launcher.train.job import Job

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
    """Line feeds of its files: about the rows of line formats; None where nothing can be said."""

    def form(self, job: Job, row: Row, hooks: Hooks) -> Row | None:
        """A raw row in the canonical shape; None for one that the user's `format_row` leaves out."""
        hooked = after_hook(job, row, hooks)
        if hooked is None:
            return None
        found = self.detected
        refuse_lost(hooked, found.format, found.columns, found.left_out, job.task.name)
        try:
            return canonical(hooked, found)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            message = f"the row cannot be read: {type(error).__name__}: {error}"
            raise bad_row(row, message, "mend or remove the row") from error

    def rows(self, job: Job, hooks: Hooks, counts: Counts | None = None) -> Iterator[Row]:
        """Canonical rows; those that `format_row` drops are counted."""
        counts = counts or Counts()
        for row in raw_rows(job, self.settings):
            counts.read += 1
            formed = self.form(job, row, hooks)
            if formed is None:
                counts.drop("format_row", 1)
            else:
                yield formed


def raw_rows(job: Job, settings: Mapping[str, Any]) -> Iterator[Row]:
    """Rows as the source holds them; those of a rehearsal are made up."""
    if job.tiny:
        from launcher.train.tiny import tiny_rows

        return iter(tiny_rows(settings, job.task.name, job.data.loss_on))
    return iter_rows(settings, job.model.cache_dir)


def after_hook(job: Job, row: Row, hooks: Hooks) -> Row | None:
    """The row that `format_row` makes of a row, None where it leaves it out.

    A rehearsal's rows have the format that the source would have after it, so they go past it.
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
    detected = detect(rows, settings["format"], settings["columns"], job.task.name, path)
    require_packages(detected)
    return Source(settings, place, detected, unused=unread_columns(rows, detected))


def require_packages(detected: Detected) -> None:
    """MachineError where a package is missing that encodes rows of this format."""
    if detected.format == "preference" and importlib.util.find_spec("trl") is None:
        hint = "pip install 'effilaunch[dpo]'"
        raise MachineError(Problem("package-missing", "preference rows need the package trl", hint=hint))


def _digested(job: Job, source: Source, files: list[Path]) -> Source:
    """With the digest of the files, in one pass over them.

    Samples of pictures hold their paths, and their labels may be folder names, so there the place of a
    file counts as well as its content. Elsewhere moved files are found again.
    """
    pictures = not job.task.reads_tokens
    digests, lines = [], 0
    for file in files:
        content, count = file_digest(file)
        digests.append(f"{file.absolute() if pictures else ''}:{content}")
        lines += count
    plain = all(file.suffix in _LINES for file in files)
    names = tuple(str(file) for file in files)
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
            detected = Detected(known["format"], known["columns"], frozenset(known.get("left_out", ())))
            return Source(settings, place, detected, known["digest"], (name,), tuple(known["unused"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # no note, a damaged one, or one of another user: as if the hub had never been asked
        raise
    digest = f"hub:{name}:{settings['name']}:{settings['split']}:{_commit(settings)}"
    known = {"format": source.detected.format, "columns": dict(source.detected.columns)}
    known |= {"left_out": sorted(source.detected.left_out)}
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
    except Exception:  # offline, private, unreachable: reading the rows has said so in its own words
        return revision
