"""The page of all known failures."""

from __future__ import annotations

import re

from launcher.knowledge.failures.catalogue import CHAPTERS, FAILURES, Failure

HEAD = """\
# Known failures

<!-- Written by `python docs/make.py`; a test compares them. -->

{count} known failures of the training stack, and where each is handled:

| where | meaning |
|---|---|
| fix | the plan sets a value, warns or refuses (`effilaunch fixes ID`, [fixes.md](fixes.md)) |
| refusal | `plan` or `run`, or a worker before the first step, stops with this problem code |
| lint | `effilaunch lint` reports it in a DeepSpeed config ([lint.md](lint.md)) |
| doctor | this check of `effilaunch doctor` looks for it ([doctor.md](doctor.md)) |
| handled | this function avoids it, counts it, or stops the run in time |
| diagnose | `effilaunch diagnose` recognises it in a log ([diagnose.md](diagnose.md)) |

The source is the code that raises the failure, or a public thread about it. Parentheses give the affected
versions. Cause and fix of each entry are in `launcher/knowledge/failures/`.
"""


def page_text() -> str:
    """The page, as Markdown."""
    parts = [HEAD.format(count=len(FAILURES))]
    for title, failures in CHAPTERS.items():
        rows = [_row(failure) for failure in failures]
        parts.append(
            "\n".join([f"## {title}\n", "| id | what | where | source |", "|---|---|---|---|", *rows]) + "\n"
        )
    return "\n".join(parts)


def _row(failure: Failure) -> str:
    title = failure.title if failure.versions == "*" else f"{failure.title} ({_code(failure.versions)})"
    where = ", ".join(_place(kind, reference) for kind, reference in failure.handled())
    cells = (_code(failure.id), title, where, linked(failure.source))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _place(kind: str, reference: str) -> str:
    if kind == "diagnose":
        return kind
    if kind == "none":
        return f"not needed: {reference}"
    if kind == "worker":
        module, _, name = reference.partition(":")
        return f"handled: [{_code(name)}](../{module.replace('.', '/')}.py)"
    return f"{kind} {_code(reference)}"


def _code(text: str) -> str:
    return f"`{text}`"


def linked(source: str) -> str:
    """Threads (`owner/name#1, #2`) as links; underscores of paths are no emphasis."""
    threads = re.sub(r"([A-Za-z0-9-]+/[\w.-]+)#\d+(?:, #\d+)*", _threads, source)
    return threads.replace("__", "\\_\\_")


def _threads(found: re.Match[str]) -> str:
    numbers = re.findall(r"#(\d+)", found[0])
    address = f"https://github.com/{found[1]}/issues/"
    shown = [f"{found[1]}#{numbers[0]}", *(f"#{number}" for number in numbers[1:])]
    return ", ".join(f"[{text}]({address}{n})" for text, n in zip(shown, numbers, strict=True))
