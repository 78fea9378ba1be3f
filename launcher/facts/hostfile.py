"""DeepSpeed's hostfile: `HOST slots=N`, a machine a line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.errors import Problem, RecipeError

_LINE = re.compile(r"(\S+)\s+slots=([0-9]+)")
_EXAMPLE = "HOST slots=N, such as `node1 slots=8`"


@dataclass(frozen=True, slots=True)
class Host:
    """A line of it."""

    name: str
    """As ssh takes it: a name, an address, or one of ssh's own aliases; USER@HOST as well."""
    slots: int
    """Devices, or processes on a CPU."""
    line: int


def parse_hostfile(text: str, file: str) -> tuple[Host, ...]:
    """The machines in their order. RecipeError with every line that is none, and its place.

    Blank lines and `#` comments are passed over, also behind an entry.
    """
    hosts: list[Host] = []
    problems = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        problem = _wrong(line, {host.name: host.line for host in hosts})
        if problem:
            problems.append(Problem("bad-hostfile", problem, file=file, line=number))
        elif found := _LINE.fullmatch(line):
            hosts.append(Host(found[1], int(found[2]), number))
    if not (hosts or problems):
        problems.append(Problem("bad-hostfile", f"it names no machine; {_EXAMPLE} was expected", file=file))
    if problems:
        raise RecipeError(problems)
    return tuple(hosts)


def _wrong(line: str, known: dict[str, int]) -> str:
    """What is wrong with a line; empty where nothing is."""
    name, *rest = line.split()
    if name.startswith("-"):  # ssh would read it as an option
        return f"{name!r} is no host name"
    if not rest:
        return f"{name} has no slots: {_EXAMPLE} was expected"
    found = _LINE.fullmatch(line)
    if found is None:
        return f"{' '.join(rest)!r} is not `slots=N`: {_EXAMPLE} was expected"
    if int(found[2]) == 0:
        return f"{name} has no slot: 1 or more was expected"
    if name in known:
        return f"{name} stands in line {known[name]} already: one line a machine, with all its slots"
    return ""
