"""Sections as Markdown, of which a text of the user's never becomes markup. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from launcher.report.sections import (
    Block,
    Cell,
    Code,
    Figure,
    Inline,
    Listing,
    Notes,
    Rows,
    Section,
    Table,
    Text,
)


def section_text(section: Section) -> str:
    """The section with its heading; empty where nothing is in it."""
    body = [text for block in section.blocks for text in _block(block)]
    return "\n\n".join([f"## {section.title}", *body]) if body else ""


def _block(block: Block) -> Iterator[str]:
    match block:
        case Rows():
            if block.rows:
                yield _table(("", ""), [(row.name, [row.parts]) for row in block.rows])
        case Table():
            yield _table(block.head, block.rows)
        case Notes():
            yield "\n".join(f"- {_inline(item)}" for item in block.items)
        case Text():
            yield _inline(block.parts)
        case Listing():
            yield fenced(block.text, block.language)


def _table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [" | ".join(map(_cell, row)) for row in (head, *rows)]
    return "\n".join(f"| {line} |" for line in (lines[0], "|".join(["---"] * len(head)), *lines[1:]))


def _cell(cell: Cell) -> str:
    lines = [[cell]] if isinstance(cell, str | Figure) else cell
    return " ".join(" ".join(map(_inline, lines)).replace("|", "\\|").split())


def _inline(parts: Inline) -> str:
    return "".join(code(part) if isinstance(part, Code) else str(part) for part in parts)


def plain(text: str) -> str:
    """The text on one line, of which Markdown and HTML take nothing as markup."""
    return html.escape(re.sub(r"([\\`*_\[\]#|!~])", r"\\\1", " ".join(text.split())), quote=False)


def code(text: str) -> str:
    """The text on one line as inline code, which none of its backticks ends."""
    line = " ".join(text.split())
    fence = _fence(line, 1)
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"


def fenced(text: str, language: str) -> str:
    """A code block that no line of the text can end."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than the text has in a row."""
    return "`" * max(least, 1 + max(map(len, re.findall(r"`+", text)), default=0))
