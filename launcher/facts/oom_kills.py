"""How often the kernel's OOM killer has ended a process of this control group, or of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OomKills:
    """Counters that only rise; None where the kernel does not tell."""

    group: int | None
    """Processes of this control group, whichever limit they met."""
    machine: int | None
    """Processes of the machine, other containers' included."""


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    """The counters as they stand. root: where /proc and /sys lie."""
    return OomKills(_group(root), _counter(root / "proc" / "vmstat"))


def has_killed(before: OomKills, after: OomKills) -> bool | None:
    """Whether a process was killed between two readings; None where neither counter can tell.

    The group's counter decides where it can be read: the machine's counts what others ran, too.
    """
    for old, new in ((before.group, after.group), (before.machine, after.machine)):
        if old is not None and new is not None:
            return new > old
    return None


def _group(root: Path) -> int | None:
    """The counter of this process's own memory group, version 2 or 1."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text("utf-8").splitlines()
    except OSError:
        return None
    mounted = root / "sys" / "fs" / "cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if "memory" in controllers.split(","):
            folders, name = (mounted / "memory" / inner, mounted / "memory"), "memory.oom_control"
        elif controllers == "":
            folders, name = (mounted / inner, mounted), "memory.events"
        else:
            continue
        # A container may see its own group at the mount, under the path that the host knows.
        for folder in folders:
            if (found := _counter(folder / name)) is not None:
                return found
    return None


def _counter(path: Path) -> int | None:
    """The value beside `oom_kill`."""
    try:
        text = path.read_text("utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None
