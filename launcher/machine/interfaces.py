"""Network interfaces of this machine: which one leads to another machine, and which gloo and NCCL choose."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variable -> how it takes the name of an interface. NCCL takes one without `=` for a prefix."""

_SIOCGIFCONF = 0x8912
"""linux/sockios.h: all IPv4 addresses of this machine, each with the label of its interface."""
_ENTRY = 40
"""Bytes of a `struct ifreq` on a 64-bit Linux: 16 of name, then the address."""
_IPV6 = Path("/proc/net/if_inet6")


def own_address_towards(host: str) -> str:
    """This machine's address on the route to `host` (a name or an address).

    OSError where the name is unknown or no route exists. Connecting a datagram socket sends nothing.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # an invalid name, such as one with two dots in a row
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where none has."""
    return addresses().get(address)


def is_this_machine(host: str) -> bool:
    """Whether a name or an address is this machine's own; an unknown one is not."""
    if host in (socket.gethostname(), "localhost"):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError: an invalid name
        return False
    return any(one.startswith("127.") for one in found) or not found.isdisjoint(addresses())


def addresses() -> dict[str, str]:
    """Address -> name of the interface that has it, IPv4 and IPv6."""
    return {**_ipv6(), **_ipv4()}


def _ipv4() -> dict[str, str]:
    buffer = array.array("B", bytes(_ENTRY * 512))
    place, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, struct.pack("iL", len(buffer), place))
    length = struct.unpack("iL", answer)[0]
    raw = buffer.tobytes()[:length]
    found = {}
    for at in range(0, length, _ENTRY):
        # An alias such as eth0:1 is an address of eth0.
        name = raw[at : at + 16].split(b"\0", 1)[0].decode().partition(":")[0]
        found[socket.inet_ntoa(raw[at + 20 : at + 24])] = name
    return found


def _ipv6() -> dict[str, str]:
    try:
        lines = _IPV6.read_text("ascii").splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines]
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[5] for row in rows}


LOOPBACK, UNKNOWN = "lo", "unknown"
_VIRTUAL = ("lo", "docker")
"""Interfaces that NCCL uses only if there is no other (its bootstrap, `findInterfaces`)."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The interface on which a process group connects."""

    interface: str
    """`eth0`; UNKNOWN where no interface has the address."""
    address: str
    """Empty where it has none."""
    by: str
    """Why: the name of a variable, or a few words."""


def choose_interface(
    backend: str, environ: Mapping[str, str], known: Mapping[str, str], own: str | None
) -> Meeting:
    """The interface on which `backend` (gloo | nccl) connects this machine's ranks with the others. Pure.

    known: address -> interface. own: the address of this machine's name, None without one.
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
        return Meeting(UNKNOWN, "", "the host name has no address")
    # Debian gives the machine's own name 127.0.1.1, which belongs to loopback but to no interface's address.
    elsewhere = LOOPBACK if own.startswith("127.") else UNKNOWN
    return Meeting(known.get(own, elsewhere), own, "the address of the host name")


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
    """The address of this machine's own name, as gloo looks it up; None without one."""
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
