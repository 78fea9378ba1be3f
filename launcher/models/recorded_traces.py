"""Recorded answers of the tracing process: the shipped recipes' in the package, a user's in their cache.

A record is one line of JSON. Its digest is of what was asked, of what the answer depends on besides, and of
the answer, so that a record that is stale or was edited by hand is not used. A shipped one depends on the
modules of launcher/train/trace/ (`make traces` renews it), a user's on all of launcher/train/.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.files.safe_files import LARGEST_CONFIG, parse_json, read_text, write_text
from launcher.files.shipped import facts_file
from launcher.machine.probe import cache_root
from launcher.machine.software import installed_version

TRAIN = Path(__file__).parents[1] / "train"
TRACER = TRAIN / "trace"
SHIPPED = facts_file("traces.jsonl")
LINES = ("gradients", "activations", "logits", "temporary")
"""Of a moment: bytes as a constant and a factor of the micro-batch."""
_PACKAGES = ("torch", "transformers", "peft")


def recorded(
    asked: Mapping[str, Any], python: str, ask: Callable[[], dict[str, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    """The recorded answer to `asked`, else that of `ask`, which is kept in the user's cache.

    asked: what decides the answer. python: the interpreter that answers; of another one than this, versions
    are not known, and nothing is recorded. say: told of a record that cannot be read.
    """
    if python != sys.executable:
        return ask()
    own = cache_root() / "traces" / f"{digest(asked, None, surroundings(TRAIN))}.jsonl"
    for path, around in ((own, surroundings(TRAIN)), (SHIPPED, surroundings(TRACER))):
        for record in _records(path, say):
            if record["digest"] == digest(asked, record["answer"], around):
                return unpacked(record["answer"])
    answer = packed(ask())
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        write_text(own, line_of(str(asked["ask"]), asked, answer, surroundings(TRAIN)))
    except OSError as error:
        say(f"{own}: the trace is not kept for the next plan: {error.strerror}")
    return unpacked(answer)


def _records(path: Path, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Records of a file that can be read, if there is one."""
    if not path.is_file():
        return
    try:
        yield from read_records(path)
    except (OSError, ValueError) as error:
        say(f"{error}; the model is traced again")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Objects with `case`, `digest` and `answer`. Raises OSError; ValueError with the line that has none."""
    found = []
    for number, line in enumerate(read_text(path, LARGEST_CONFIG).splitlines(), 1):
        try:
            record = parse_json(line)
            if not isinstance(record["case"], str) or not isinstance(record["digest"], str):
                raise TypeError(record)
            unpacked(record["answer"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: no record of a trace ({type(error).__name__})") from None
        found.append(record)
    return found


def line_of(case: str, asked: Mapping[str, Any], answer: Mapping[str, Any], around: str) -> str:
    """The line of a record; answer: packed."""
    record = {"case": case, "digest": digest(asked, answer, around), "answer": answer}
    return json.dumps(record, separators=(",", ":")) + "\n"


def digest(asked: Mapping[str, Any], answer: Mapping[str, Any] | None, around: str) -> str:
    """answer: packed."""
    text = json.dumps([around, asked, answer], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def surroundings(folder: Path) -> str:
    """Digest of what every answer depends on: versions, and the modules below `folder`.

    Lines that say where a module of ours lies are left out: a move is no change.
    """
    versions = {name: installed_version(name) for name in _PACKAGES}
    found = hashlib.sha256(json.dumps(versions).encode())
    for module in sorted(folder.rglob("*.py")):
        lines = module.read_bytes().splitlines(keepends=True)
        code = b"".join(line for line in lines if not line.lstrip().startswith(b"from launcher."))
        found.update(str(module.relative_to(folder)).encode() + b"\0" + code + b"\0")
    return found.hexdigest()


def packed(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer as it is recorded: a moment as a row, without the allocations that were replayed."""
    if "moments" not in answer:
        return dict(answer)

    def short(value: float) -> float:
        return int(value) if value == int(value) else value

    moments = [
        [one["segment"], *(short(value) for line in LINES for value in one[line])]
        for one in answer["moments"]
    ]
    states = {name: short(value) for name, value in answer["states"].items()}
    kept = {name: value for name, value in answer.items() if name != "replays"}
    return {**kept, "moments": moments, "states": states}


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a record."""
    if "moments" not in record:
        return dict(record)
    moments = [
        {"segment": segment} | {line: values[2 * i : 2 * i + 2] for i, line in enumerate(LINES)}
        for segment, *values in record["moments"]
    ]
    return {**record, "moments": moments}
