"""Hostfiles as DeepSpeed reads them: `HOST slots=N`, one node per line."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import LARGEST_TEXT, read_text
from launcher.machine.hardware import Hardware
from launcher.recipe.schema import Recipe

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,6})")
_LABELS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_EXAMPLE = "HOST slots=N, such as `node1 slots=8`"


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hostfile."""

    name: str
    """What ssh accepts: a name, an address or an alias of ssh's configuration; also USER@HOST."""
    slots: int
    """Devices, or processes on a CPU."""
    line: int


def is_host(name: str) -> bool:
    """Whether this is an address or may be a host name, and no option of ssh."""
    if len(name) <= 253 and _LABELS.fullmatch(name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return name.isascii() and name.isprintable()  # an IPv6 address may end with any interface name


def parse_hostfile(text: str, file: str) -> tuple[Host, ...]:
    """The hosts in their order. RecipeError with every wrong line.

    Blank lines and `#` comments are skipped, also after an entry.
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        if wrong := _wrong(line, hosts):
            message, hint = wrong
            problems.append(Problem("bad-hostfile", message, file=file, line=number, hint=hint))
        elif found := _LINE.fullmatch(line):
            hosts[_machine(found[1])] = Host(found[1], int(found[2]), number)
    if not (hosts or problems):
        problems.append(Problem("bad-hostfile", f"the file names no host; expected {_EXAMPLE}", file=file))
    if problems:
        raise RecipeError(problems)
    return tuple(hosts.values())


def _machine(name: str) -> str:
    """A host in one form: without user, in lower case."""
    host = name.rpartition("@")[2]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().removesuffix(".")


def _wrong(line: str, known: Mapping[str, Host]) -> tuple[str, str | None] | None:
    """What is wrong with a line, and the hint; None where nothing is."""
    name, *rest = line.split()
    if (hint := _host_hint(name)) is not None:
        return f"{name[:80]!r} is not a host name: expected {_EXAMPLE}", hint
    if not rest:
        return f"{name} has no slots: expected {_EXAMPLE}", None
    found = _LINE.fullmatch(line)
    if found is None:
        return f"{' '.join(rest)[:80]!r} is not `slots=N`: expected {_EXAMPLE}", None
    if int(found[2]) == 0:
        return f"{name} has 0 slots: expected 1 or more", None
    if (other := known.get(_machine(name))) is not None:
        written = "" if other.name == name else f" as {other.name}"
        message = f"{name} is in line {other.line} already{written}"
        return f"{message}: write one line per host, with all its slots", None
    return None


def _host_hint(name: str) -> str | None:
    """A hint for what is not HOST or USER@HOST; None if it is."""
    user, at, host = name.rpartition("@")
    if is_host(host) and user.isprintable() and bool(user) == bool(at) and not name.startswith("-"):
        return None
    if "," in host or "[" in host[1:]:  # as Slurm writes lists: node[2-3]
        return "write one host per line"
    if host.startswith("["):
        return "write IPv6 addresses without brackets, and a port in ~/.ssh/config"
    if host.count(":") == 1:
        return "write the port in ~/.ssh/config"
    if at and not (user and host):
        return "write HOST or USER@HOST"
    return "a name has letters, digits, - and _ between its dots, at most 63 each; or write an address"


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of `launch.hostfile`. RecipeError where it cannot be read, or has a wrong line."""
    try:
        text = read_text(path, LARGEST_TEXT)
    except (OSError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        message = f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        hint = "a file with a line `HOST slots=N` for each host; relative paths are relative to the recipe"
        code = "hostfile-missing" if absent else "hostfile-unreadable"
        raise RecipeError(Problem(code, message, path="launch.hostfile", hint=hint)) from None
    return parse_hostfile(text, path)


def equal_hosts(path: str) -> tuple[Host, ...]:
    """The hosts of a file that alone decides the devices per host. RecipeError where they differ."""
    first, *others = hosts = read_hostfile(path)
    what = f"slots and {first.name} has {first.slots}: hosts must be equal"
    hint = "give all the same number, or set with `hardware` or --on how many devices of each are used"
    _refuse([other for other in others if other.slots != first.slots], path, "", what, hint)
    return hosts


def _refuse(hosts: Sequence[Host], file: str, before: str, after: str, hint: str | None = None) -> None:
    """RecipeError with the problem of each of these hosts: `NAME has N`, with the text around it."""
    problems = [
        Problem("bad-hostfile", f"{before}{host.name} has {host.slots} {after}", file, host.line, hint=hint)
        for host in hosts
    ]
    if problems:
        raise RecipeError(problems)


def check_hosts(hosts: Sequence[Host], hardware: Hardware, file: str) -> None:
    """RecipeError where a plan for several nodes needs more hosts than there are, or more devices than one
    of the first hosts has."""
    if hardware.num_nodes > len(hosts):
        message = f"{hardware.label} asks for {hardware.num_nodes} nodes, the hostfile names {len(hosts)}"
        hint = "add hosts, or plan for fewer: `hardware` or --on"
        raise RecipeError(Problem("bad-hostfile", message, file=file, path="launch.hostfile", hint=hint))
    too_small = [h for h in hosts[: hardware.num_nodes] if h.slots < hardware.devices_per_node]
    needs = f"{hardware.label} needs {hardware.devices_per_node} devices per node, "
    _refuse(too_small, file, needs, "slots")


def hostfile_warnings(recipe: Recipe, hardware: Hardware | None) -> list[str]:
    """A warning if the hostfile is not on this machine, which may plan for others. RecipeError if it exists
    and is wrong or does not fit the hardware (None: the hostfile's own)."""
    file = recipe.launch.hostfile
    if file is None:
        return []
    try:
        hosts = equal_hosts(file) if hardware is None else read_hostfile(file)
    except RecipeError as error:
        if error.problems[0].code != "hostfile-missing":
            raise
        return [f"{problem.message} ({problem.path})" for problem in error.problems]
    if hardware is not None and hardware.num_nodes > 1:
        # Node rank 0 is not known here: after the hosts that are used in any case comes the best one.
        first, rest = hosts[: hardware.num_nodes - 1], hosts[hardware.num_nodes - 1 :]
        check_hosts([*first, *sorted(rest, key=lambda host: -host.slots)], hardware, file)
    return []
