"""DeepSpeed's hostfile: `HOST slots=N`, a machine a line. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from launcher.errors import Problem, RecipeError

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,6})")
_LABELS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_EXAMPLE = "HOST slots=N, such as `node1 slots=8`"


@dataclass(frozen=True, slots=True)
class Host:
    """A line of it."""

    name: str
    """As ssh takes it: a name, an address, or one of ssh's own aliases; USER@HOST as well."""
    slots: int
    """Devices, or processes on a CPU."""
    line: int


def is_host(name: str) -> bool:
    """Whether it may be the name of a machine, or is an address: what can be looked up, and is no option of
    ssh's."""
    if len(name) <= 253 and _LABELS.fullmatch(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return name.isascii() and name.isprintable()  # an address of IPv6 may end with any name of an interface


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
    if name.startswith("-") or not is_host(name.rpartition("@")[2]):  # the first ssh would read as an option
        return f"{name[:80]!r} is no host name: {_EXAMPLE} was expected"
    if not rest:
        return f"{name} has no slots: {_EXAMPLE} was expected"
    found = _LINE.fullmatch(line)
    if found is None:
        return f"{' '.join(rest)[:80]!r} is not `slots=N`: {_EXAMPLE} was expected"
    if int(found[2]) == 0:
        return f"{name} has no slot: 1 or more was expected"
    if name in known:
        return f"{name} stands in line {known[name]} already: one line a machine, with all its slots"
    return ""
