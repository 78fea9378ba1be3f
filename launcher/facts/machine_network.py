"""Ports, interfaces, the hub, and the files that launchers read without being asked."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.facts.hub import HUB_SECONDS, hub_endpoint, is_offline

DEFAULT_PORT = 29500
"""MASTER_PORT of torchrun, accelerate and deepspeed."""
HOSTFILE = Path("/job/hostfile")
"""deepspeed's default --hostfile."""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """What processes meet on, and what is fetched over."""

    interfaces: tuple[str, ...]
    """Names of those that are up, loopback left out."""
    default_port_free: bool
    host_resolves: bool
    """Whether this machine's own name leads to an address, which process groups ask for."""
    offline: bool
    """HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is on."""
    hub: str
    """reachable | unreachable | offline"""
    endpoint: str
    """Host of the hub: $HF_ENDPOINT or huggingface.co."""
    hostfile: tuple[str, ...] | None
    """Lines of deepspeed's default hostfile; None without one."""


def read_network(environ: Mapping[str, str], hostfile: Path = HOSTFILE) -> NetworkFacts:
    """Look; no attempt takes longer than HUB_SECONDS, and none is made when offline is asked for."""
    offline, url = is_offline(environ), hub_endpoint(environ)
    answers = not offline and _succeeds(lambda: _connect(url, environ))
    return NetworkFacts(
        interfaces=_interfaces(),
        default_port_free=_is_free(DEFAULT_PORT),
        host_resolves=_resolves(),
        offline=offline,
        hub="offline" if offline else "reachable" if answers else "unreachable",
        endpoint=_host(url),
        hostfile=_lines(hostfile),
    )


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "huggingface.co"
    except ValueError:  # e.g. a bracket that is not closed
        return url


def _connect(url: str, environ: Mapping[str, str]) -> None:
    """A connection to the hub, or to the proxy that stands before it. OSError, or ValueError for no URL."""
    hub = urlsplit(url)
    host, port = hub.hostname or "huggingface.co", hub.port or (80 if hub.scheme == "http" else 443)
    proxy = environ.get(f"{hub.scheme}_proxy") or environ.get(f"{hub.scheme.upper()}_PROXY")
    if proxy:
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = parts.hostname or host, parts.port or 8080
    socket.create_connection((host, port), HUB_SECONDS).close()


def _succeeds(attempt: Callable[[], object]) -> bool:
    """Whether it ends in time, and well; looking up a name has no time limit of its own."""
    done: list[bool] = []

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # the second: a name or a port that is none
            attempt()
            done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS + 0.5)
    return bool(done)


def _interfaces() -> tuple[str, ...]:
    names = []
    for _, name in socket.if_nameindex():
        state = "unknown"
        with contextlib.suppress(OSError):
            state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        if name != "lo" and state in ("up", "unknown"):
            names.append(name)
    return tuple(names)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _resolves() -> bool:
    return _succeeds(lambda: socket.getaddrinfo(os.uname().nodename, None))


def _lines(path: Path) -> tuple[str, ...] | None:
    try:
        return tuple(path.read_text("utf-8", errors="replace").splitlines())
    except OSError:
        return None
