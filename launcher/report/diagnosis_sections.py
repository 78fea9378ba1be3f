"""A diagnosis: failure, cause, fix, recipe lines, then the traceback; and its text for a terminal. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.errors import printable
from launcher.knowledge.diagnose.findings import Diagnosis, Edit
from launcher.report.sections import Block, Code, Group, Listing, Text
from launcher.report.text import block_lines

_OUTER, _INNER = 2, 6
"""Calls shown of a long traceback: outermost and innermost."""


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """All findings, one part each."""
    found = diagnosis.to_json()
    parts = ["\n".join([title, *block_lines(blocks)]) + "\n" for title, blocks in failures(found)]
    if parts:
        return "\n".join(parts)
    lines = ["no failure found" if diagnosis.succeeded else "no known error, and no sign of success"]
    lines += ["  the last lines:"] if diagnosis.last_lines else []
    lines += [f"    {printable(line)}" for line in diagnosis.last_lines]
    for noticed in found["noticed"]:
        place = Text(["in ", _place(noticed)])
        lines += [
            "",
            f"noticed {noticed['id']}: {noticed['title']}",
            *block_lines([*_advice(noticed), place]),
        ]
    if diagnosis.unfinished:
        lines += [
            "",
            f"the run in {printable(diagnosis.unfinished)} has no result: it is still running, was stopped "
            "or killed together with `effilaunch run`, or the disk was full",
        ]
    return "\n".join(lines) + "\n"


def failure_cards(diagnosis: Mapping[str, Any]) -> list[Group]:
    """The failures of `diagnose --json` for a page."""
    return [Group([Text([title], "heading"), *blocks], "card bad") for title, blocks in failures(diagnosis)]


def failures(diagnosis: Mapping[str, Any]) -> Iterator[tuple[str, list[Block]]]:
    """Title, and cause, fix, changes of the recipe and traceback of each failure, the known ones first."""
    for found in (*diagnosis.get("findings", ()), *diagnosis.get("unknown", ())):
        ranks = whose(found["ranks"], found["first_rank"], diagnosis.get("ranks", 1))
        is_known = "id" in found
        title = f"{found['id']}: {found['title']}" if is_known else "unknown failure"
        blocks = [*_advice(found), *_changes(found)] if is_known else []
        yield title + (f" ({ranks})" if ranks else ""), [*blocks, *_errors(found)]


def _advice(found: Mapping[str, Any]) -> list[Block]:
    advice = [Text(["cause: ", found["cause"]]), Text(["fix: ", found["mend"]])]
    if missing := found.get("missing_ranks"):
        advice.append(Text([f"without an error: {whose(missing, None, 0)}; read what it printed last"]))
    if meant := found.get("did_you_mean"):
        advice.append(Text(["did you mean ", Code(meant), "?"]))
    return [*advice]


def _changes(found: Mapping[str, Any]) -> list[Block]:
    edits = [f"  {edit_text(Edit(**edit))}" for edit in found["recipe"]]
    return [Text(["recipe:"]), Listing("Changes of the recipe", "\n".join(edits))] if edits else []


def _errors(found: Mapping[str, Any]) -> Iterator[Block]:
    """The place of the error, its traceback without the middle of a long one, and the chain's other end."""
    error = found.get("error", found)
    if found["file"]:
        yield Text(["in ", _place(found)], "small")
    calls = [printable(f"  {call['file']}:{call['line']} in {call['function']}") for call in error["frames"]]
    if len(calls) > _OUTER + _INNER + 1:
        calls[_OUTER:-_INNER] = [f"  … {len(calls) - _OUTER - _INNER} more calls"]
    yield Listing("Error", "\n".join([*calls, _headline(error)]))
    if other := found.get("other_end"):
        yield Text(["the other end of its chain:"], "small")
        yield Listing("The other end", _headline(other))


def _place(found: Mapping[str, Any]) -> Code:
    return Code(printable(f"{found['file']}:{found['line']}"))


def _headline(error: Mapping[str, Any]) -> str:
    lines = ": ".join(part for part in (error["type"], error["message"]) if part).splitlines()
    return "\n".join(map(printable, lines))


def whose(ranks: Sequence[int], first: int | None, total: int) -> str:
    """`rank 3`, `ranks 0-3, 7, first rank 2`, `all 8 ranks`; empty if the logs name none."""
    if len(ranks) <= 1:
        return f"rank {ranks[0]}" if ranks else ""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = "ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    text = f"all {total} ranks" if len(ranks) == total else named
    return text if first is None else f"{text}, first rank {first}"


def edit_text(edit: Edit) -> str:
    """`recipe.yaml:5: model.dtype: float16 -> float32`."""
    place = printable(f"{edit.file}:{edit.line}" if edit.line else edit.file)
    if edit.new is None:
        return f"{place}: {edit.path}: remove {_value(edit.old)}"
    if edit.old is None:
        return f"{place}: {edit.path}: add {_value(edit.new)}"
    return f"{place}: {edit.path}: {_value(edit.old)} -> {_value(edit.new)}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
