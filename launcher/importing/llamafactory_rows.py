"""LLaMA-Factory's data sets, by its dataset_info.json, as sources of a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.facts.user_files import parse_json
from launcher.importing.found import Effect, shown
from launcher.importing.peer import Peer, is_off
from launcher.importing.row_hooks import Exchange, Ranked, Shape, Turns, take_hooks
from launcher.importing.sources import evaluation_share, source_at

INFO = "dataset_info.json"
_ADDRESSES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_ROLES = {
    "user_tag": ("user", {"human", "user"}),
    "assistant_tag": ("assistant", {"gpt", "chatgpt", "assistant", "model"}),
    "observation_tag": ("tool", {"tool", "observation", "function"}),
    "system_tag": ("system", {"system"}),
}
"""Tag -> (role, words that are read here as that role)."""
_PAIRS = (("from", "value"), ("role", "content"))
_FAR = {
    "ms_hub_url": "on ModelScope alone",
    "om_hub_url": "on Modelers alone",
    "script_url": "made by a script",
    "cloud_file_name": "in a cloud",
}
_UNREAD = ("images", "videos", "audios", "kto_tag")
_LARGEST = 16 * 1024 * 1024


@dataclass(slots=True)
class _Rows:
    """What the data sets came to."""

    stage: str
    shapes: dict[str, Shape] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


def tells_info(data: Any) -> bool:
    """Whether a JSON is a dataset_info.json."""
    if not isinstance(data, Mapping) or not data:
        return False
    return all(
        isinstance(entry, Mapping) and any(name in entry for name in _ADDRESSES) for entry in data.values()
    )


def take_rows(peer: Peer, stage: str, info: tuple[Mapping[str, Any], str] | None) -> None:
    """Take the sources of training and evaluation.

    info: a dataset_info.json that was given as a file of its own, and its name.
    """
    rows = _Rows(stage)
    directory = peer.get("dataset_dir")
    directory = "data" if directory is None else str(directory)
    entries, folder = info or _find_info(peer, directory)
    base = Path(folder).parent if info else Path(folder)
    for key, to in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        names = peer.listed(key)
        found = [_source(peer, key, name, entries, base, directory, rows) for name in names]
        sources = [source for source in found if source is not None]
        if sources:
            peer.reading.take(to, sources, peer.line(key), f"{key}: {shown(peer.values[key])}")
    if "data.train" not in peer.reading.taken:
        peer.reading.needs("data.train", peer.line("dataset"), "no data set could be taken")
    _take_share(peer)
    take_hooks(peer.reading, "dataset", peer.line("dataset"), rows.shapes, rows.plain)


def _find_info(peer: Peer, directory: str) -> tuple[Mapping[str, Any] | None, str]:
    """dataset_info.json beside the recipe, in its dataset_dir, or below a folder above: LLaMA-Factory's."""
    if directory == "ONLINE":
        return {}, ""
    home = Path(peer.reading.file).absolute().parent
    for folder in (
        home / directory,
        *(above / directory for above in home.parents),
        Path(directory).absolute(),
        home,
    ):
        try:
            file = folder / INFO
            if file.is_file() and file.stat().st_size <= _LARGEST:
                data = parse_json(file.read_text(encoding="utf-8"))
                if tells_info(data):
                    return data, str(folder)
        except (OSError, ValueError):
            continue
    return None, ""


def _source(
    peer: Peer,
    key: str,
    name: str,
    entries: Mapping[str, Any] | None,
    base: Path,
    directory: str,
    rows: _Rows,
) -> dict[str, Any] | None:
    line, said = peer.line(key), f"{key}: {name}"
    if directory == "ONLINE":
        entry: Mapping[str, Any] = {"hf_hub_url": name}
    elif entries is None:
        reason = f"where its rows are stands in LLaMA-Factory's {INFO}, which is not here"
        peer.reading.drop(said, name, line, Effect.NEEDED, reason, f"give that {INFO} as a FILE, too")
        return None
    elif name not in entries:
        peer.reading.drop(said, name, line, Effect.NEEDED, f"the {INFO} has no such data set")
        return None
    else:
        entry = {key: value for key, value in entries[name].items() if value is not None}
    source = _address(peer, said, line, entry, base)
    shape = None if source is None else _shape(peer, said, line, entry, rows)
    if source is None or shape is None:
        return None
    form, columns, hook = shape
    if hook is not None:
        rows.shapes[source["path"]] = hook
    else:
        rows.plain.append(source["path"])
    if "num_samples" in entry:
        reason = "all rows are used: a recipe has no limit of rows"
        peer.reading.drop(f"{said} num_samples", entry["num_samples"], line, Effect.TRAINING, reason)
    return {**source, "format": form, **({"columns": columns} if columns else {})}


def _address(
    peer: Peer, said: str, line: int | None, entry: Mapping[str, Any], base: Path
) -> dict[str, Any] | None:
    """LLaMA-Factory's own order: the hub's address, then a script, then a file."""
    reading = peer.reading
    if "hf_hub_url" in entry:
        given = {"name": entry.get("subset"), "split": entry.get("split", "train")}
        if "folder" in entry:
            reason, hint = "a folder inside a data set of the hub", "download it, and name the folder"
            reading.drop(f"{said} folder", entry["folder"], line, Effect.NEEDED, reason, hint)
            return None
        return source_at(reading, said, line, entry["hf_hub_url"], given)
    for key, where in _FAR.items():
        if key in entry:
            reason = f"its rows are {where}: download them"
            reading.drop(said, entry[key], line, Effect.NEEDED, reason, "and name the file in data.train")
            return None
    file = entry.get("file_name")
    if not isinstance(file, str):
        reading.drop(said, file, line, Effect.NEEDED, "the data set has no address")
        return None
    home = Path(reading.file).absolute().parent
    return source_at(reading, said, line, os.path.relpath(base.absolute() / file, home))


def _shape(
    peer: Peer, said: str, line: int | None, entry: Mapping[str, Any], rows: _Rows
) -> tuple[str, dict[str, str], Shape | None] | None:
    """(format, columns, hook); columns that are given take the defaults of all others away."""
    columns = entry.get("columns")
    columns = {str(k): str(v) for k, v in columns.items() if v} if isinstance(columns, Mapping) else _COLUMNS
    tags = entry.get("tags")
    tags = {**_TAGS, **tags} if isinstance(tags, Mapping) else _TAGS
    unread = [name for name in _UNREAD if name in columns]
    if unread:
        peer.reading.refuse(said, line, f"has {', '.join(unread)}, which no task here learns")
        return None
    ranking, formatting = bool(entry.get("ranking")), str(entry.get("formatting", "alpaca"))
    if ranking != peer.reading.task.ranks_answers:
        what = (
            "ranks answers, which stage: dpo learns" if ranking else "has no ranking, which stage: dpo needs"
        )
        peer.reading.refuse(said, line, what)
        return None
    if formatting == "alpaca":
        return _alpaca(peer, said, line, columns, rows)
    if formatting not in ("sharegpt", "openai") or "messages" not in columns:
        peer.reading.drop(
            said, formatting, line, Effect.NEEDED, "expected messages in a column of the data set"
        )
        return None
    if rows.stage == "pt":
        reason = "of messages stage: pt takes the first alone"
        peer.reading.drop(said, formatting, line, Effect.NEEDED, reason, "write a format_row")
        return None
    return _messages(peer, said, line, columns, tags, ranking)


def _alpaca(
    peer: Peer, said: str, line: int | None, columns: Mapping[str, str], rows: _Rows
) -> tuple[str, dict[str, str], Shape | None] | None:
    prompt = columns.get("prompt")
    if prompt is None:
        peer.reading.drop(said, "", line, Effect.NEEDED, "its columns name no prompt")
    elif rows.stage == "pt":
        return "text", {} if prompt == "text" else {"text": prompt}, None
    elif peer.reading.task.ranks_answers:
        if "chosen" in columns and "rejected" in columns:
            return (
                "preference",
                {},
                Ranked(prompt, columns["chosen"], columns["rejected"], columns.get("query", "")),
            )
        peer.reading.drop(said, "", line, Effect.NEEDED, "its columns name no chosen and rejected")
    elif "response" not in columns:
        peer.reading.drop(said, "", line, Effect.NEEDED, "its columns name no response")
    else:
        names = (columns.get(name, "") for name in ("query", "history", "system", "tools"))
        return "chat", {}, Exchange(prompt, columns["response"], *names)
    return None


def _messages(
    peer: Peer,
    said: str,
    line: int | None,
    columns: Mapping[str, str],
    tags: Mapping[str, str],
    ranking: bool,
) -> tuple[str, dict[str, str], Shape | None] | None:
    pair = (str(tags["role_tag"]), str(tags["content_tag"]))
    plain = pair in _PAIRS and all(str(tags[tag]) in words for tag, (_, words) in _ROLES.items())
    if pair == ("role", "content"):  # there these words are for templates to know
        plain = str(tags["user_tag"]) in ("user", "human") and str(tags["assistant_tag"]) in (
            "assistant",
            "gpt",
        )
    if ranking:
        if not plain or "chosen" not in columns or "rejected" not in columns or "system" in columns:
            peer.reading.drop(said, "", line, Effect.NEEDED, "ranked answers with names of their own",
                              "write a format_row that makes prompt, chosen and rejected")  # fmt: skip
            return None
        names = {"prompt": columns["messages"], "chosen": columns["chosen"], "rejected": columns["rejected"]}
        return "preference", {field: column for field, column in names.items() if field != column}, None
    if plain and "system" not in columns:
        names = {
            "messages": columns["messages"],
            **({"tools": columns["tools"]} if "tools" in columns else {}),
        }
        return "chat", {field: column for field, column in names.items() if field != column}, None
    roles = tuple((str(tags[tag]), role) for tag, (role, _) in _ROLES.items())
    hook = Turns(
        columns["messages"], pair[0], pair[1], roles, columns.get("system", ""), columns.get("tools", "")
    )
    return "chat", {}, hook


def _take_share(peer: Peer) -> None:
    size = peer.get("val_size")
    if size is None or is_off(size):
        return
    if "data.eval" in peer.reading.taken:
        peer.drop("val_size", Effect.NONE, "eval_dataset is given, too")
        return
    share = evaluation_share(peer.reading, "val_size", peer.line("val_size"), size)
    if share is not None:
        peer.take("data.eval", {"split": share}, "val_size", note="other rows of the same number")
