"""Which network interface a process group of this machine takes, and on which filesystem a folder lies."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPBACK, UNKNOWN = "lo", "unknown"
_VIRTUAL = ("lo", "docker")
"""What NCCL takes last, when nothing else is there (its bootstrap, `findInterfaces`)."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a process group meets on."""

    interface: str
    """`eth0`; UNKNOWN where no interface has the address."""
    address: str
    """Empty where it has none."""
    by: str
    """Who says so: a variable's name, or a few words."""


def choose_interface(
    backend: str, environ: Mapping[str, str], known: Mapping[str, str], own: str | None
) -> Meeting:
    """The interface on which `backend` (gloo | nccl) connects this machine's ranks with the others. Pure.

    known: address -> interface. own: the address to which this machine's name leads, None where to none.
    """
    names: dict[str, str] = {}
    for address, name in sorted(known.items(), key=lambda pair: ":" in pair[0]):  # IPv4 first
        names.setdefault(name, address)
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    asked = environ.get(variable, "")
    if asked:
        name = _matching(asked, list(names)) if backend == "nccl" else asked.partition(",")[0]
        return Meeting(name, names.get(name, ""), variable)
    if backend == "nccl":
        ordered = sorted(names, key=lambda name: (name.startswith(_VIRTUAL), not name.startswith("ib")))
        name = ordered[0] if ordered else UNKNOWN
        return Meeting(name, names.get(name, ""), "NCCL's own order")
    if own is None:
        return Meeting(UNKNOWN, "", "the machine's name leads to no address")
    # 127.0.1.1, which Debian gives to a machine's own name, is an address of no interface but of loopback.
    elsewhere = LOOPBACK if own.startswith("127.") else UNKNOWN
    return Meeting(known.get(own, elsewhere), own, "the address of the machine's name")


def _matching(asked: str, names: list[str]) -> str:
    """The first interface that NCCL's list allows: prefixes, `=` for whole names, `^` for all others."""
    exact, others = "=" in asked[:2], asked.startswith("^")
    words = [word.partition(":")[0] for word in asked.lstrip("^=").split(",") if word]
    for name in names:
        hit = any(name == word if exact else name.startswith(word) for word in words)
        if hit != others:
            return name
    return asked


def own_address() -> str | None:
    """The address to which this machine's own name leads, as gloo asks; None where it leads to none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def infiniband() -> tuple[str, ...]:
    """InfiniBand and RoCE devices with an active port, which NCCL prefers to sockets."""
    found = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        with contextlib.suppress(OSError):
            if any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state")):
                found.append(device.name)
    return tuple(found)


def filesystem_of(folder: Path) -> str:
    """`nfs4 server:/home`, `tmpfs tmpfs`: kind and source of the filesystem of a folder; UNKNOWN."""
    best, found = "", UNKNOWN
    with contextlib.suppress(OSError):
        here = folder.resolve()
        for line in Path("/proc/mounts").read_text("utf-8", errors="replace").splitlines():
            source, mount, kind, *_ = line.split(" ")
            point = Path(mount.replace("\\040", " "))
            if len(mount) >= len(best) and (here == point or point in here.parents):
                best, found = mount, f"{kind} {source}"
    return found
