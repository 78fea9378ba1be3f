"""Read devices, memory, ports and package paths of the machine at hand.

Without torch or transformers, so that planning stays fast on a login node.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.safe_files import expanded
from launcher.machine.hardware import Hardware, with_host_memory

if TYPE_CHECKING:
    import socket

    from launcher.machine.gpus import Gpu, GpuFacts

_PACKAGE_REF = "package:"
_CALIBRATION_BYTES = 1 << 20
"""About a thousand runs."""


def resolve_path(ref: str) -> Path:
    """The path that `ref` names: `package:NAME/inner/path` in an installed package, else itself.

    The package is located, not imported. RecipeError when the package or the path in it is absent.
    """
    if not ref.startswith(_PACKAGE_REF):
        return expanded(ref)
    name, _, inner = ref.removeprefix(_PACKAGE_REF).partition("/")
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        message = f"no Python package {name!r} is installed, so {ref!r} names nothing"
        raise RecipeError(Problem("package-missing", message, hint="install the package"))
    for folder in folders:
        if (path := Path(folder) / inner).exists():
            return path
    raise RecipeError(Problem("path-missing", f"package {name!r} has no file or folder {inner!r}"))


def free_port() -> int:
    """A TCP port that is currently free on all addresses."""
    with _bound_everywhere(0) as sock:
        return int(sock.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a TCP port is currently free on all addresses."""
    try:
        _bound_everywhere(port).close()
    except OSError:
        return False
    return True


def _bound_everywhere(port: int) -> socket.socket:
    """A socket bound to the port on all addresses, like torch's store; OSError where it is in use."""
    import socket

    both = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if both:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except OSError:
        sock.close()
        raise
    return sock


def cache_root() -> Path:
    """Folder of prepared data, converted models and the calibration file.

    $EFFILAUNCH_CACHE, else ~/.cache/effilaunch.
    """
    given = os.environ.get("EFFILAUNCH_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "effilaunch"


def calibration_file() -> Path:
    """Path of the calibration file (`measured_runs`)."""
    return cache_root() / "calibration.jsonl"


def calibration_text() -> str:
    """The newest part of the calibration file, "" without one."""
    try:
        with calibration_file().open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            start = max(0, size - _CALIBRATION_BYTES)
            stream.seek(start)
            found = stream.read()
    except OSError:
        return ""
    if start:
        found = found.partition(b"\n")[2]
    return found.decode("utf-8", errors="replace")


def own_cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def host_memory_bytes() -> int | None:
    """Memory that this process may use: total, or the cgroup's limit if lower."""
    limits = []
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(ValueError, OSError):  # absent, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(limits, default=None)


def boot_id() -> str:
    """Random id of this boot of the machine; "" where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def probe_hardware() -> Hardware:
    """This machine's devices: the GPUs that a run would use, else one CPU process.

    GPUs of different kinds are planned with the least memory and the lowest compute capability among them.
    MachineError as `require_gpus`, and for a GPU whose memory nvidia-smi does not report.
    """
    from launcher.machine.gpus import require_gpus

    facts = require_gpus()
    gpus = facts.usable
    if not gpus:
        return with_host_memory(Hardware(1, 1, "cpu", None, None), host_memory_bytes())
    if any(gpu.total is None for gpu in gpus):
        raise MachineError(_without_memory(gpus))
    smallest = min(gpus, key=lambda gpu: (gpu.total or 0, gpu.capability or (0, 0)))
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    lowest = min(known) if len(known) == len(gpus) else None
    kinds = dict.fromkeys(gpu.device for gpu in gpus)
    # The catalogue's figures of one kind would not be those of the others.
    device = smallest.device if smallest.capability == lowest else "/".join(kinds)
    return Hardware(1, len(gpus), device, smallest.total, lowest, tuple(_notes(facts, len(kinds) > 1)))


def _without_memory(gpus: Sequence[Gpu]) -> Problem:
    size = f"{(host_memory_bytes() or 0) // 10**9}GB"
    shared = next(gpu for gpu in gpus if gpu.total is None)
    return Problem(
        "device-memory-unknown",
        f"nvidia-smi reports no memory for {shared.label}, as of a GPU that shares the host's memory",
        hint=f"set what it may use: --on {len(gpus)}x{size}; or train on the CPU: --on cpu",
    )


def _notes(facts: GpuFacts, are_mixed: bool) -> Iterator[str]:
    """What a plan for GPUs of different kinds does with them."""
    for gpu in facts.left_out:
        yield (
            f"{gpu.label} is left out: it serves a display beside larger GPUs; CUDA_VISIBLE_DEVICES names "
            "the GPUs to use"
        )
    if are_mixed:
        names = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in facts.usable)
        yield (
            f"GPUs of different kinds ({names}) are planned with the least memory and the lowest compute "
            "capability of them; CUDA_VISIBLE_DEVICES names the GPUs to use"
        )


@dataclass(frozen=True, slots=True)
class OomKills:
    """How often the kernel's OOM killer has killed a process; None where unknown."""

    group: int | None
    """In this cgroup."""
    machine: int | None
    """On the machine, including other containers."""


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    """The current counters. root: of /proc and /sys."""
    return OomKills(_group(root), _counter(root / "proc" / "vmstat"))


def has_killed(before: OomKills, after: OomKills) -> bool | None:
    """Whether a process was killed between two readings; None where unknown.

    The cgroup's counter takes precedence: the machine's also counts other containers.
    """
    for old, new in ((before.group, after.group), (before.machine, after.machine)):
        if old is not None and new is not None:
            return new > old
    return None


def _group(root: Path) -> int | None:
    """The counter of this process's memory cgroup (v2 or v1)."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text("utf-8").splitlines()
    except OSError:
        return None
    mounted = root / "sys" / "fs" / "cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, name = mounted / "memory", "memory.oom_control"
        elif controllers == "":
            base, name = mounted, "memory.events"
        else:
            continue
        # In a container, the mount may already be its own cgroup.
        for folder in (base / path.lstrip("/"), base):
            if (found := _counter(folder / name)) is not None:
                return found
    return None


def _counter(path: Path) -> int | None:
    """The value of `oom_kill`."""
    try:
        text = path.read_text("utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None
