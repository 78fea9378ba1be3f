"""Which node, link or device of a rehearsal is slow, by the numbers alone. Pure.

Other work only makes a measurement slower, so the best of several counts, and nothing is reported below a
factor that noise does not reach. With two there is no median: only what no network should be is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SLOW_LINK = 0.5
"""Of the others' median. Nodes of one network reach 0.8 and more of each other even through a shared switch;
half is a port that negotiated a lower speed, another interface, or a cable with errors."""
ABSURD_BYTES_PER_S = 12.5e6
"""0.1 Gbit/s: slower than any network used for training, whatever else is on it."""
ONE_WAY, ONE_WAY_ABSURD = 0.25, 0.1
"""Of the other direction: both use the same full-duplex line. Below a quarter is a warning; other work does
not explain a tenth."""
LATE, LATE_MORE_S = 10.0, 1e-3
"""Times the others' median, and seconds more than it: the fastest of 19 messages does not wait for a core."""
SLOW_GPU = 0.75
"""Of the others' median: GPUs of one model differ by a few percent; a throttled or capped one by more."""
SLOW_CPU = 0.5
"""The same for CPUs, whose cores other work uses: a warning, never a failure."""
LEAST = 3
"""With fewer there is no median to compare one with."""
LAST_IN, WAITED = 0.8, 0.3
"""A rank that all others wait for is the last one in nearly every step, and costs them much of it."""
WORKS_LONGER, WORKS_LONGER_CPU = 1.2, 2.0
"""Times the others' median: a rank that waits less without working longer is only nearer to the network."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank, node, device or link that is slower than the others."""

    ends: tuple[int, ...]
    """Ranks: one for a node or device, two for the direction from the first to the second."""
    what: str
    """sends | receives | link | one-way | absurd | late | computes | keeps-waiting | writes"""
    value: float
    """Bytes per second, seconds, FLOP/s, or the waiting share of a step."""
    normal: float
    """The value of the others; for `absurd` the limit."""
    bad: bool = True
    """Whether it is a failure; else a warning."""


def slow_links(links: Rows, *, absurd: bool) -> list[Slow]:
    """Ends, and links between good ends, that are slow.

    absurd: whether to apply the absolute limit: between nodes, not inside of one.
    """
    ends = sorted({int(link["from"]) for link in links})
    found: list[Slow] = []
    if len(ends) >= LEAST:
        found = _slow_ends(links)
        found += _slow_pairs(links, {slow.ends[0] for slow in found})
        found += [slow for end in ends if (slow := _late_end(links, end)) is not None]
    named = {end for slow in found for end in slow.ends}
    if absurd:
        found += [
            Slow((link["from"], link["to"]), "absurd", link["bytes_per_s"], ABSURD_BYTES_PER_S)
            for link in links
            if link["bytes_per_s"] < ABSURD_BYTES_PER_S and not named & {link["from"], link["to"]}
        ]
    if len(ends) < LEAST and not found:
        found = _one_way(links)
    return found


def _slow_ends(links: Rows) -> list[Slow]:
    """Ends whose best link in a direction is slower than the best ones of the others."""
    found = []
    for what, side in (("sends", "from"), ("receives", "to")):
        found += _below(_of_ends(links, "bytes_per_s", (side,), max), SLOW_LINK, what)
    return found


def _below(values: Mapping[int, float], floor: float, what: str) -> list[Slow]:
    """The ends whose value is below `floor` times the median of the others."""
    found = []
    for end, value in values.items():
        normal = median(other for rank, other in values.items() if rank != end)
        if value < floor * normal:
            found.append(Slow((end,), what, value, normal))
    return found


def _of_ends(
    links: Rows, key: str, sides: Sequence[str], choose: Callable[[list[float]], float]
) -> dict[int, float]:
    """End -> the chosen value of its links; `sides`: the ends by which a link belongs to it."""
    values: dict[int, list[float]] = {}
    for link in links:
        for side in sides:
            values.setdefault(int(link[side]), []).append(float(link[key]))
    return {end: choose(own) for end, own in values.items()}


def _slow_pairs(links: Rows, slow_ends: set[int]) -> list[Slow]:
    """Links that are slow although both ends are fast with others."""
    found = []
    for link in links:
        ends = (int(link["from"]), int(link["to"]))
        if slow_ends & set(ends):
            continue
        others = [
            [other["bytes_per_s"] for other in links if end in (other["from"], other["to"])
             and {other["from"], other["to"]} != set(ends)]
            for end in ends
        ]  # fmt: skip
        if not all(others):
            continue
        normal = min(median(rates) for rates in others)
        if link["bytes_per_s"] < SLOW_LINK * normal:
            found.append(Slow(ends, "link", link["bytes_per_s"], normal))
    return found


def _late_end(links: Rows, end: int) -> Slow | None:
    """An end with a high latency to every other."""
    least = _of_ends(links, "latency_s", ("from", "to"), min)
    normal = median(value for other, value in least.items() if other != end)
    late = least[end] > LATE * normal and least[end] > normal + LATE_MORE_S
    return Slow((end,), "late", least[end], normal) if late else None


def _one_way(links: Rows) -> list[Slow]:
    """With two ends: one direction much slower than the other."""
    found = []
    for link in links:
        back = [o["bytes_per_s"] for o in links if (o["from"], o["to"]) == (link["to"], link["from"])]
        if back and link["bytes_per_s"] < ONE_WAY * back[0]:
            bad = link["bytes_per_s"] < ONE_WAY_ABSURD * back[0]
            ends = (int(link["from"]), int(link["to"]))
            found.append(Slow(ends, "one-way", link["bytes_per_s"], back[0], bad))
    return found


def slow_devices(devices: Rows) -> list[Slow]:
    """Devices that compute slower than others of the same model; of two, the faster one is the reference."""
    found = []
    for name in dict.fromkeys(device["name"] for device in devices):
        alike = [device for device in devices if device["name"] == name]
        on_cpu = name == "cpu"
        for device in alike:
            rest = [other["best_flops"] for other in alike if other is not device]
            if rest and device["best_flops"] < (SLOW_CPU if on_cpu else SLOW_GPU) * median(rest):
                slow = Slow((device["rank"],), "computes", device["best_flops"], median(rest), not on_cpu)
                found.append(slow)
    return found


def stragglers(waiting: Rows, *, on_cpu: bool) -> list[Slow]:
    """The rank that all others wait for in nearly every step; `value`: the share of a step that they wait."""
    found = []
    for own in waiting:
        others = [row for row in waiting if row is not own]
        if not others or own["last_in"] < LAST_IN * own["steps"]:
            continue
        waits = median([row["wait_s"] for row in others]) - own["wait_s"]
        step = own["work_s"] + own["wait_s"]
        factor = WORKS_LONGER_CPU if on_cpu else WORKS_LONGER
        longer = own["work_s"] > factor * median([row["work_s"] for row in others])
        if longer and waits > WAITED * step:
            found.append(Slow((own["rank"],), "keeps-waiting", waits / step, 0.0, not on_cpu))
    return found


def slow_writers(rates: Mapping[int, float], floor: float) -> list[Slow]:
    """Nodes (by their first rank) that write slower than `floor` times the others' median."""
    return [] if len(rates) < LEAST else _below(rates, floor, "writes")
