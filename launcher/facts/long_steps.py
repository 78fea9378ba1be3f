"""How far a step is that takes long, in words: for the logs of workers, and for the line of a run."""

from __future__ import annotations

_SO_FAR = "/s so far"


def amount(value: float, unit: str) -> str:
    """A number with its unit: bytes for B, else a noun in the plural, or nothing."""
    if unit != "B":
        return f"{value:,.0f} {unit}".rstrip()
    for size, name, places in ((2**30, "GiB", 2), (2**20, "MiB", 0), (2**10, "KiB", 0)):
        if value >= size:
            return f"{value / size:,.{places}f} {name}"
    return f"{value:.0f} B"


def of_total(done: float, total: float | None, unit: str) -> str:
    """How much is done, of how much: `1.20 GiB of 4.00 GiB`, `1,000 of 20,000 rows`, `12 rows`."""
    if not total or done >= total:
        return amount(done, unit)
    return f"{amount(done, unit if unit == 'B' else '')} of {amount(total, unit)}"


def step_line(title: str, done: float, total: float | None, unit: str, seconds: float, *, ended: bool) -> str:
    """A line of a log. seconds: since the step began."""
    if not done:
        return f"{title}: {seconds:.0f} s"
    speed = amount(done / max(seconds, 1e-9), unit)
    return f"{title}: {of_total(done, total, unit)}, {speed}{'/s' if ended else _SO_FAR}"


def is_passing(line: str) -> bool:
    """Whether a line says how far a step is that goes on: where a bar shows that, nobody needs the line."""
    return line.endswith(_SO_FAR)
