"""A diagnosis as plain text: failure, cause, fix, recipe lines, then the traceback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launcher.knowledge.diagnose.findings import Diagnosis, Edit, Error, Finding, Unknown
from launcher.knowledge.lint.document import printable

_UNFINISHED = (
    "\nthe run in {} has no result: it is still running, was stopped or killed together with "
    "`effilaunch run`, or the disk was full\n"
)
_OUTER, _INNER = 2, 6
"""Calls shown of a long traceback: outermost and innermost."""


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """All findings, one block each."""
    blocks = [_finding(finding, diagnosis.ranks) for finding in diagnosis.findings]
    blocks += [
        f"unknown failure{_in_brackets(unknown, diagnosis.ranks)}\n\n{_error(unknown)}"
        for unknown in diagnosis.unknown
    ]
    if not blocks:
        text = "no failure found\n" if diagnosis.succeeded else "no known error, and no sign of success\n"
        text += "  the last lines:\n" if diagnosis.last_lines else ""
        text += "".join(f"    {printable(line)}\n" for line in diagnosis.last_lines)
        text += "".join(_noticed(finding) for finding in diagnosis.noticed)
        return text + (_UNFINISHED.format(printable(diagnosis.unfinished)) if diagnosis.unfinished else "")
    return "\n".join(blocks)


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


def _finding(finding: Finding, total: int) -> str:
    failure = finding.failure
    lines = [f"{failure.id}: {failure.title}{_in_brackets(finding, total)}"]
    lines += [f"  cause: {failure.cause}", f"  fix: {finding.fix}"]
    if finding.missing:
        lines.append(f"  without an error: {whose(finding.missing, None, 0)}; read what it printed last")
    if finding.meant:
        lines.append(f"  did you mean `{finding.meant}`?")
    if finding.recipe:
        lines += ["  recipe:", *(f"    {edit_text(edit)}" for edit in finding.recipe)]
    return "\n".join(lines) + "\n\n" + _error(finding)


def _noticed(finding: Finding) -> str:
    failure, error = finding.failure, finding.error
    return (
        f"\nnoticed {failure.id}: {failure.title}\n  cause: {failure.cause}\n  fix: {finding.fix}\n"
        f"  in {printable(error.file)}:{error.line}\n"
    )


def _in_brackets(found: Finding | Unknown, total: int) -> str:
    text = whose(found.ranks, found.first_rank, total)
    return f" ({text})" if text else ""


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


def _error(found: Finding | Unknown) -> str:
    """The place of the error, its traceback without the middle of a long one, and the chain's other end."""
    error, other = found.error, found.other_end
    place = f"  in {printable(error.file)}:{error.line}\n" if error.file else ""
    calls = [printable(f"    {f.file}:{f.line} in {f.function}") for f in error.frames]
    if len(calls) > _OUTER + _INNER + 1:
        left_out = len(calls) - _OUTER - _INNER
        calls = [*calls[:_OUTER], f"    … {left_out} more calls", *calls[-_INNER:]]
    text = place + "".join(call + "\n" for call in calls) + _headline(error)
    if other is not None:
        text += f"  raised {'again as' if other.causes else 'from'}:\n{_headline(other)}"
    return text


def _headline(error: Error) -> str:
    return "".join(f"  {printable(line)}\n" for line in error.headline.splitlines())
