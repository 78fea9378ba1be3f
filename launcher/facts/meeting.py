"""Which network interface a process group takes, and on which filesystem a folder lies; of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_VIRTUAL = ("lo", "docker")
"""What NCCL takes last, when nothing else is there (NCCL's bootstrap, `findInterfaces`)."""


@dataclass(frozen=True, slots=True)
class Interface:
    """What a process group meets on."""

    name: str
    """`eth0`; "unknown" where no interface has the address."""
    address: str
    """Empty where it has none."""
    by: str
    """Who says so: a variable's name, or a few words."""


def addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address, in the kernel's order; those without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose_interface(
    backend: str, environ: Mapping[str, str], known: Mapping[str, str], own: str | None
) -> Interface:
    """The interface on which `backend` (gloo | nccl) connects this machine's ranks with the others. Pure.

    known: interface -> address. own: the address to which this machine's name leads, None where to none.
    """
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    asked = environ.get(variable, "")
    if asked:
        name = _matching(asked, known) if backend == "nccl" else asked.partition(",")[0]
        return Interface(name, known.get(name, ""), variable)
    if backend == "nccl":
        names = sorted(known, key=lambda name: (name.startswith(_VIRTUAL), not name.startswith("ib")))
        name = names[0] if names else "unknown"
        return Interface(name, known.get(name, ""), "NCCL's own order")
    if own is None:
        return Interface("unknown", "", "the machine's name leads to no address")
    # 127.0.1.1, which Debian gives to a machine's own name, is an address of no interface but of loopback.
    elsewhere = LOOPBACK if own.startswith("127.") else "unknown"
    owner = next((name for name, address in known.items() if address == own), elsewhere)
    return Interface(owner, own, "the address of the machine's name")


def _matching(asked: str, known: Mapping[str, str]) -> str:
    """The first interface that NCCL's list allows: prefixes, `=` for whole names, `^` for all others."""
    exact, others = asked.startswith(("=", "^=")), asked.startswith("^")
    words = [word.partition(":")[0] for word in asked.lstrip("^=").split(",") if word]
    for name in known:
        hit = any(name == word if exact else name.startswith(word) for word in words)
        if hit != others:
            return name
    return asked


def own_address() -> str | None:
    """The IPv4 address to which this machine's own name leads; None where it leads to none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def infiniband() -> tuple[str, ...]:
    """InfiniBand and RoCE devices with an active port, which NCCL prefers to sockets."""
    root = Path("/sys/class/infiniband")
    found = []
    for device in sorted(root.glob("*")):
        with contextlib.suppress(OSError):
            if any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state")):
                found.append(device.name)
    return tuple(found)


def filesystem_of(folder: Path) -> str:
    """`nfs4 server:/home`, `tmpfs tmpfs`: kind and source of the filesystem of a folder; "unknown"."""
    best, found = "", "unknown"
    with contextlib.suppress(OSError):
        here = folder.resolve()
        for line in Path("/proc/mounts").read_text("utf-8", errors="replace").splitlines():
            source, mount, kind, *_ = line.split(" ")
            point = Path(mount.replace("\\040", " "))
            if len(mount) >= len(best) and (here == point or point in here.parents):
                best, found = mount, f"{kind} {source}"
    return found
