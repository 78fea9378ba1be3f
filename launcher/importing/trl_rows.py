"""TRL's data sets, in its own and its users' older spellings, as sources of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.facts.user_files import parse_json
from launcher.importing.arguments import as_bool, as_number
from launcher.importing.found import Effect, shown
from launcher.importing.peer import Peer
from launcher.importing.sources import BUILDERS, evaluation_share, source_at

_LONGEST = 1_000_000
"""Bytes of the first row that are looked at."""
_TURNS = ("messages", "conversations")


def take_rows(peer: Peer) -> None:
    """Take the sources, and which of their tokens are learnt."""
    peer.reading.know("dataset_splits")
    sources = [*_named(peer), *_listed(peer), *_mixed(peer)]
    pairs = peer.reading.task.ranks_answers
    column = peer.get("dataset_text_field")
    if column not in (None, "text") and not pairs:
        for source in sources:
            source |= {"format": "text", "columns": {"text": str(column)}}
    if sources:
        key = next(
            key
            for key in ("dataset_name", "datasets", "dataset_mixture", "dataset_mixer")
            if key in peer.values
        )
        peer.reading.take("data.train", sources, peer.line(key), key)
    else:
        peer.reading.needs("data.train", None, "no data set could be taken")
    size = peer.get("test_split_size")
    if size is not None:
        _share(peer, "test_split_size", size, peer.line("test_split_size"))
    if not pairs:
        _take_loss(peer, sources)


def _named(peer: Peer) -> list[dict[str, Any]]:
    """`dataset_name` with its splits."""
    name, line = peer.get("dataset_name"), peer.line("dataset_name")
    config, configs = peer.get("dataset_config"), peer.get("dataset_configs")
    split, test = peer.get("dataset_train_split") or "train", peer.get("dataset_test_split")
    if name is None:
        return []
    several = configs if isinstance(configs, list) and configs else [config]
    found = [
        source_at(peer.reading, "dataset_name", line, name, {"name": one, "split": split}) for one in several
    ]
    evaluated = peer.reading.value("trainer.eval_strategy") not in (None, "no")
    if evaluated and "test_split_size" not in peer.values:
        given = {"name": several[0], "split": test or "test"}
        rows = source_at(peer.reading, "dataset_test_split", line, name, given)
        if rows is not None:
            said = f"dataset_test_split: {test or 'test'}"
            peer.reading.take("data.eval", [rows], peer.line("dataset_test_split") or line, said)
            peer.reading.know("dataset_test_split")
    return [source for source in found if source is not None]


def _listed(peer: Peer) -> list[dict[str, Any]]:
    """`datasets: [{path, name, split, data_files, fraction}]`."""
    entries = peer.get("datasets")
    sources = []
    for index, entry in enumerate(
        entries if isinstance(entries, list) else [] if entries is None else [entries]
    ):
        at = f"datasets[{index}]"
        if not isinstance(entry, dict):
            peer.reading.drop(at, entry, peer.line(at), Effect.NEEDED, "expected a mapping with a path")
            continue
        source = _one(peer, at, {key: value for key, value in entry.items() if value is not None})
        if source is not None:
            sources.append(source)
    return sources


def _one(peer: Peer, at: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    path, files = entry.get("path"), entry.get("data_files")
    line = peer.line(f"{at}.path") or peer.line(at)
    for key, value in entry.items():
        place = peer.line(f"{at}.{key}")
        if key == "fraction":
            reason = "a share of the mixture, of first rows; `weight` of a source is how often it is seen"
            peer.reading.drop(f"{at}.fraction", value, place, Effect.TRAINING, reason)
        elif key == "columns":
            _list_columns(peer, at, value)
        elif key not in ("path", "name", "split", "data_files"):
            peer.reading.drop(f"{at}.{key}", value, place, Effect.NEEDED, "no key of a source says it")
    if files is not None:
        if path not in BUILDERS or not isinstance(files, str):
            reason, hint = "no file of a data set of the hub can be named", "download it, and name the file"
            peer.reading.drop(f"{at}.data_files", files, line, Effect.NEEDED, reason, hint)
            return None
        path = files
    return source_at(
        peer.reading, f"{at}.path", line, path, {"name": entry.get("name"), "split": entry.get("split")}
    )


def _list_columns(peer: Peer, at: str, columns: Any) -> None:
    """Columns that are kept: only those of a chat template's variables would change a row."""
    if columns is None:
        return
    varied = isinstance(columns, list) and "chat_template_kwargs" in columns
    effect = Effect.TRAINING if varied else Effect.NONE
    reason = (
        "a chat template's variables are not read from rows"
        if varied
        else "columns that are not needed are not read"
    )
    peer.reading.drop(f"{at}.columns", columns, peer.line(f"{at}.columns") or peer.line(at), effect, reason)


def _mixed(peer: Peer) -> list[dict[str, Any]]:
    """What open-r1 and the alignment handbook call a mixture, and what the handbook called a mixer."""
    sources = []
    mixture = peer.get("dataset_mixture")
    inner = mixture.get("datasets") if isinstance(mixture, dict) else None
    for index, entry in enumerate(inner if isinstance(inner, list) else []):
        at = f"dataset_mixture.datasets[{index}]"
        if not isinstance(entry, dict):
            peer.reading.drop(at, entry, peer.line(at), Effect.NEEDED, "expected a mapping with an id")
            continue
        line = peer.line(f"{at}.id") or peer.line(at)
        given = {"name": entry.get("config"), "split": entry.get("split")}
        source = source_at(peer.reading, f"{at}.id", line, entry.get("id"), given)
        if source is not None:
            sources.append(source | _weight(entry.get("weight")))
        _list_columns(peer, at, entry.get("columns"))
        for key in entry.keys() - {"id", "config", "split", "columns", "weight"}:
            peer.reading.drop(f"{at}.{key}", entry[key], line, Effect.NEEDED, "no key of a source says it")
    if mixture is not None and not isinstance(inner, list):
        peer.drop("dataset_mixture", Effect.NEEDED, "expected a mapping with datasets")
    elif isinstance(mixture, dict):
        size = mixture.get("test_split_size")
        if size is not None:
            _share(
                peer, "dataset_mixture.test_split_size", size, peer.line("dataset_mixture.test_split_size")
            )
        if "seed" in mixture:
            reason = "rows are shuffled and split by the recipe's seed"
            peer.reading.drop("dataset_mixture.seed", mixture["seed"], peer.line("dataset_mixture.seed"),
                              Effect.NONE, reason)  # fmt: skip
        for key in mixture.keys() - {"datasets", "test_split_size", "seed"}:
            line = peer.line(f"dataset_mixture.{key}")
            peer.reading.drop(
                f"dataset_mixture.{key}", mixture[key], line, Effect.NEEDED, "no recipe key says it"
            )
    return [*sources, *_mixer(peer)]


def _mixer(peer: Peer) -> list[dict[str, Any]]:
    mixer, splits = peer.get("dataset_mixer"), peer.get("dataset_splits")
    if mixer is None:
        return []
    if not isinstance(mixer, dict):
        peer.drop("dataset_mixer", Effect.NEEDED, "expected a mapping of ids to shares")
        return []
    names = [str(split) for split in splits] if isinstance(splits, list) and splits else ["train"]
    sources, tests = [], []
    for path, share in mixer.items():
        line = peer.line(f"dataset_mixer.{path}") or peer.line("dataset_mixer")
        for split in names:
            source = source_at(peer.reading, f"dataset_mixer.{path}", line, path, {"split": split})
            if source is None:
                break
            if "test" in split:
                tests.append(source)
            else:
                sources.append(source | _weight(share))
    if tests:
        peer.take("data.eval", tests, "dataset_splits")
    return sources


def _weight(share: Any) -> dict[str, float]:
    number = as_number(share)
    return {} if number is None or number <= 0 or number == 1 else {"weight": float(number)}


def _share(peer: Peer, key: str, size: Any, line: int | None) -> None:
    share = evaluation_share(peer.reading, key, line, size)
    if share is not None:
        note = "other rows of the same number"
        peer.reading.take("data.eval", {"split": share}, line, f"{key}: {shown(size)}", note=note)


def _take_loss(peer: Peer, sources: list[dict[str, Any]]) -> None:
    """In rows of messages TRL learns every token, but with assistant_only_loss."""
    assistant, completion = (
        as_bool(peer.get("assistant_only_loss")),
        as_bool(peer.get("completion_only_loss")),
    )
    if assistant:
        peer.take("data.loss_on", "assistant", "assistant_only_loss")
        return
    if completion is not None:
        peer.take("data.loss_on", "completion" if completion else "all", "completion_only_loss")
        return
    kinds = {_kind(peer, source) for source in sources}
    note = "TRL learns whole conversations without assistant_only_loss"
    if kinds == {"chat"}:
        peer.default("data.loss_on", "all", "assistant_only_loss: false", note)
    elif kinds & {"chat", ""}:
        hint = "write all for rows of messages, and nothing for others"
        peer.reading.needs(
            "data.loss_on", peer.line("dataset_name"), note + "; what these rows are is not known", hint
        )


def _kind(peer: Peer, source: Mapping[str, Any]) -> str:
    """chat, other, or nothing where the rows are not here: by their columns."""
    if source.get("format") == "text":
        return "other"
    kept = _kept_columns(peer).get(source["path"])
    if kept:
        return "chat" if set(_TURNS) & kept else "other"
    columns = _first_row(source["path"], Path(peer.reading.file).parent)
    if columns is None:
        return ""
    return "chat" if set(_TURNS) & columns else "other"


def _kept_columns(peer: Peer) -> dict[str, set[str]]:
    """Path of a data set -> the columns that the file says are kept of it."""
    mixture = peer.values.get("dataset_mixture")
    lists = [peer.values.get("datasets"), mixture.get("datasets") if isinstance(mixture, dict) else None]
    entries = [entry for several in lists if isinstance(several, list) for entry in several]
    return {
        str(entry.get("id") or entry.get("path")): set(map(str, entry["columns"]))
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("columns"), list)
    }


def _first_row(path: str, folder: Path) -> set[str] | None:
    """Columns of the first row of a .jsonl that is here."""
    for base in (folder, Path()):
        file = base / path
        try:
            if file.suffix == ".jsonl" and file.is_file():
                with file.open("rb") as lines:
                    row = parse_json(lines.readline(_LONGEST))
                return set(row) if isinstance(row, dict) else None
        except (OSError, ValueError):
            return None
    return None
