"""Slurm's compressed lists: `n[001-003,7],gpu-a[1-2]` of hosts and `2(x3),1` of counts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_RANGE = r"(\d+)(?:-(\d+))?"
_COUNT = r"(\d+)(?:\(x(\d+)\))?"
MOST_HOSTS = 100_000
"""What is larger is no list of hosts, but a slip of the keyboard."""


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a compressed list, in its order. ValueError for what is no such list."""
    hosts: list[str] = []
    for part in _parts(text):
        for host in _expand(part):
            hosts.append(host)
            if len(hosts) > MOST_HOSTS:
                raise ValueError(f"{text!r} names more than {MOST_HOSTS} hosts")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> (2, 2, 2, 1), a number for each node. ValueError for what is no such list."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(_COUNT, part)
        if found is None or int(found[2] or 1) > MOST_HOSTS:
            raise ValueError(f"{text!r} is no list of counts")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _parts(text: str) -> Iterator[str]:
    """The list at its commas, less those inside brackets."""
    start = depth = 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is no list of hosts: its brackets do not match")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"{text!r} is no list of hosts: its brackets do not match")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    """One entry; it may have several pairs of brackets, of which the last counts fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        if not part or any(char.isspace() for char in part):
            raise ValueError(f"{part!r} is no name of a host")
        yield part
        return
    inside, _, behind = rest.partition("]")
    tails = list(_expand(behind)) if behind else [""]
    for entry in inside.split(","):
        found = re.fullmatch(_RANGE, entry)
        if found is None:
            raise ValueError(f"{entry!r} is no range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= MOST_HOSTS:
            raise ValueError(f"{entry!r} is no range of numbers")
        for number in range(first, last + 1):
            for tail in tails:
                yield f"{before}{number:0{len(found[1])}d}{tail}"
