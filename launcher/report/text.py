"""Sections as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher.report import sections
from launcher.report.sections import Block, Cell, Code, Figure, Inline, Part, Section, line
from launcher.report.tables import WIDTH, table, wrapped
from launcher.report.terminal import DIM, GREEN, RED, YELLOW, Page

PLAIN = Page()
_WIDE = 120
"""Columns of tables and of rows with their names."""
_LEAST = 42
"""Columns of the last cell of a table, which is below the others where there is less space."""
_NAME, _BAR = 10, 24
_TONES: dict[str, tuple[str, ...]] = {"": (), "good": (GREEN,), "bad": (RED,), "warning": (YELLOW,)}


def section_lines(sections: Iterable[Section | None], page: Page = PLAIN) -> list[str]:
    """Sections with their headings, an empty line before each. What a page folds or draws is left out."""
    lines = []
    for section in sections:
        if section is not None:
            title = section.title[0].lower() + section.title[1:]
            heading = f"{title}: {section.summary}" if section.summary else title
            lines += ["", *(page.heading(one, *_TONES[section.tone]) for one in page.fitted(flat(heading)))]
            lines += block_lines(section.blocks, page)
    return lines


def block_lines(blocks: Iterable[Block], page: Page = PLAIN) -> list[str]:
    return [one for block in blocks for one in _block(block, page)]


def _block(block: Block, page: Page) -> Iterator[str]:
    width = page.within(WIDTH)
    match block:
        case sections.Rows():
            widest = max((len(flat(row.name)) for row in block.rows), default=0)
            for row in block.rows:
                name, is_command = flat(row.name).ljust(max(widest, _NAME - 2)), _is_code(row.parts)
                shown = (name, flat(line(row.parts)))
                yield from table([shown], width=None if is_command else page.within(_WIDE))
        case sections.Table():
            yield from _table(block, page)
        case sections.Notes():
            for item in block.items:
                yield from wrapped(flat(line(item)), width=width)
        case sections.Text():
            yield from wrapped(flat(line(block.parts)), width=width)
        case sections.Listing():
            yield from (f"  {one}" for one in block.text.splitlines())
        case sections.Group():
            yield from block_lines(block.blocks, page)
        case sections.Sample():
            yield from ("", f"{block.name} ({block.about})")
            yield "".join(_piece(text, is_target, page) for text, is_target in block.pieces)


def _is_code(parts: Inline) -> bool:
    """Whether this is a command or a path, which is copied: it stays on one line."""
    return len(parts) == 1 and isinstance(parts[0], Code)


def _table(block: sections.Table, page: Page) -> Iterator[str]:
    width, body = page.within(_WIDE), [[_cell(cell) for cell in row] for row in block.rows]
    rows = [list(block.head), *body]
    if block.kind == "numbers":
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows = [
            [row[0], *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))] for row in rows
        ]
        yield from (
            f"{line} {bar}".rstrip() for line, bar in zip(table(rows), _bars(block, page), strict=True)
        )
    elif sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]) <= width - _LEAST:
        yield from (one.rstrip() for one in table(rows, width=width))
    else:
        for named, (*_, last) in zip(table([row[:-1] for row in rows]), rows, strict=True):
            beside = f"{named}  {last}".rstrip()
            below = [*page.fitted(named.rstrip()), *wrapped(last, "      ", width=width)]
            yield from [beside] if len(beside) <= width else below


def _bars(block: sections.Table, page: Page) -> list[str]:
    """A bar after each component's size, if there is one size for each."""
    pairs = [row for row in block.rows if len(row) == 2 and isinstance(row[0], Part)]
    sizes = [row[1].value if row in pairs and isinstance(row[1], Figure) else 0 for row in block.rows]
    longest = max(sizes, default=0) or 1
    bars = [page.paint("#" * round(_BAR * size / longest), DIM) for size in sizes]
    return ["", *(f" {bar}" for bar in bars)]


def _cell(cell: Cell) -> str:
    """The text of a cell; of several lines the first."""
    return flat(str(cell) if isinstance(cell, str | Figure) else line(cell[0]))


def _piece(text: str, is_target: bool, page: Page) -> str:
    """Target text green, the rest dim; without colours the target text is in brackets."""
    if page.coloured:
        return page.paint(text, GREEN if is_target else DIM)
    return f"⟦{text}⟧" if is_target else text


def flat(text: str) -> str:
    """The text on one line, with escapes for unprintable characters."""
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
