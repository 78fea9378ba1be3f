"""Pieces of inline SVG: escaped elements, axes with round numbers, colours told apart by everyone. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

BYTES = "bytes"
"""The unit whose values are shown in KiB, MiB or GiB."""

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#f0e442", "#cc79a7", "#d55e00", "#999999",
    "#b07d62",
)  # fmt: skip
"""Okabe and Ito's palette (jfly.uni-koeln.de/color), grey for its black, which a dark page would
hide, and a brown."""

STYLE = """
.plot{--ink:#1a1a1a;--soft:#595959;--grid:#d9d9d9;--paper:#ffffff;--band:#0072b22e;font-family:system-ui,
sans-serif;font-size:12px}
@media (prefers-color-scheme:dark){.plot{--ink:#f0f0f0;--soft:#b3b3b3;--grid:#454545;--paper:#171717;
--band:#56b4e940}}
.plot text{fill:var(--ink)}.plot .soft{fill:var(--soft)}.plot .head{font-size:15px;font-weight:600}
.plot .on-light{fill:#000}.plot .on-dark{fill:#fff}.plot .back{fill:var(--paper)}
.plot .grid{stroke:var(--grid);fill:none}.plot .axis,.plot .mark{stroke:var(--ink);fill:none}
.plot .mark{stroke-width:2}.plot .halo{stroke:var(--paper);stroke-width:5}
.plot .dot{stroke:var(--ink);stroke-width:.7}
.plot .band{fill:var(--band)}.plot .limit{stroke:var(--ink);stroke-dasharray:5 4}
.plot .part{stroke:var(--paper);stroke-width:1}
"""

# XML allows no other control characters, and no half of a surrogate pair.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CHARACTER = 6.6
"""Mean width of a character at 12 px, in px."""


def text_of(value: object) -> str:
    """Text that is safe in XML and HTML, also inside quotes."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def element(tag: str, inside: str = "", /, **attributes: object) -> str:
    """One element around markup. A name loses its trailing `_`, an inner `_` becomes `-`; None is skipped."""
    pairs = (
        f' {name.rstrip("_").replace("_", "-")}="{text_of(_short(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    opened = f"<{tag}{''.join(pairs)}"
    return f"{opened}>{inside}</{tag}>" if inside else f"{opened}/>"


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def label(words: object, x: float, y: float, *, anchor: str = "start", kind: str | None = None) -> str:
    """A text at a place; `kind` is its class."""
    return element("text", text_of(words) or " ", x=x, y=y, text_anchor=anchor, class_=kind)


def tooltip(words: str) -> str:
    """What a pointer shows over the element that it stands in, and a screen reader may read."""
    return element("title", text_of(words) or " ")


def fitted(words: str, pixels: float) -> str:
    """The words, cut with an ellipsis where they are wider than that."""
    most = max(1, int(pixels / _CHARACTER))
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def width_of(words: str) -> float:
    """About how many pixels the words take."""
    return len(words) * _CHARACTER


def shape(number: int, x: float, y: float, size: float = 5.0, inside: str = "") -> str:
    """The mark of the n-th group: colour and form both tell it, so that one of them is enough."""
    colour = COLOURS[number % len(COLOURS)]
    forms: Sequence[Sequence[tuple[float, float]]] = (
        ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
        ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        ((0, -1.2), (1.2, 1), (-1.2, 1)),
        ((0, 1.2), (1.2, -1), (-1.2, -1)),
    )
    if number % 5 == 0:
        return element("circle", inside, cx=x, cy=y, r=size, fill=colour, class_="dot")
    corners = " ".join(f"{x + size * a:.2f},{y + size * b:.2f}" for a, b in forms[number % 5 - 1])
    return element("polygon", inside, points=corners, fill=colour, class_="dot")


def svg(title: str, description: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A whole picture: named and described for those who do not see it, readable as a file of its own."""
    return element(
        "svg",
        tooltip(title)
        + element("desc", text_of(description) or " ")
        + element("style", STYLE)
        + element("rect", width="100%", height="100%", class_="back")
        + "\n".join(parts),
        xmlns="http://www.w3.org/2000/svg", class_="plot", role="img", aria_label=title,
        viewBox=f"0 0 {width:g} {height:g}", width=width, height=height,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels along one axis."""

    low: float
    high: float
    start: float
    """Pixel of `low`."""
    end: float
    """Pixel of `high`."""
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)


def divisor(largest: float, unit: str) -> tuple[float, str]:
    """What values are divided by to be shown, and the name of the shown unit."""
    if unit != BYTES:
        return 1.0, unit
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= size:
            return float(size), name
    return 1.0, "B"


def amount(value: float, unit: str) -> str:
    """A value with its unit, to three digits."""
    size, name = divisor(abs(value), unit)
    return f"{_three(value / size)} {name}".rstrip()


def _three(value: float) -> str:
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}" if places <= 6 else f"{value:.2e}"


def round_ticks(low: float, high: float, unit: str, *, most: int = 6) -> list[tuple[float, str]]:
    """Round values from `low` to `high`, each with its text (in the unit of `divisor(high)`)."""
    size, _ = divisor(high, unit)
    span = (high - low) / size
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / size / step - 1e-9)
    last = math.floor(high / size / step + 1e-9)
    return [(n * step * size, f"{n * step:.10g}") for n in range(first, last + 1)]


def log_ticks(low: float, high: float, unit: str) -> list[tuple[float, str]]:
    """Powers of ten from `low` to `high`, with 2 and 5 between them where they are few."""
    size, _ = divisor(high, unit)
    powers = range(math.floor(math.log10(low / size)), math.ceil(math.log10(high / size)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [(v * size, f"{v:g}") for v in found if low <= v * size <= high]
