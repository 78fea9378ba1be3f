"""Which network interface of this machine leads to another one, for gloo and NCCL, which ask for its name."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
"""linux/sockios.h: all IPv4 addresses of this machine, each with the label of its interface."""
_ENTRY = 40
"""Bytes of a `struct ifreq` on a 64-bit Linux: 16 of name, then the address."""
_IPV6 = Path("/proc/net/if_inet6")


def own_address_towards(host: str) -> str:
    """The address under which this machine speaks to `host` (a name or an address).

    OSError where the name leads nowhere, or no route there. Nothing is sent: to connect a datagram socket
    only chooses the route.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # no name at all, such as one with two dots in a row
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where none has."""
    return addresses().get(address)


def is_this_machine(host: str) -> bool:
    """Whether a name or an address is this machine's own; one that leads nowhere is not."""
    if host in (socket.gethostname(), "localhost"):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # what is no name at all is not even looked up
        return False
    return any(one.startswith("127.") for one in found) or not found.isdisjoint(addresses())


def addresses() -> dict[str, str]:
    """Address -> name of the interface that has it, IPv4 and IPv6."""
    return {**_ipv6(), **_ipv4()}


def _ipv4() -> dict[str, str]:
    room = array.array("B", bytes(_ENTRY * 512))
    place, _ = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, struct.pack("iL", len(room), place))
    length = struct.unpack("iL", answer)[0]
    raw = room.tobytes()[:length]
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
