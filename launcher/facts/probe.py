"""Every read from outside the recipe: devices, host memory, model configurations, free ports.

No import of torch or transformers, so that planning stays quick on a login node.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.facts.hardware import DEVICES, MIB, Hardware, with_host_memory
from launcher.facts.safe_files import expanded
from launcher.facts.shipped import facts_file

if TYPE_CHECKING:
    import socket

_PACKAGE_REF = "package:"
_SMI_SECONDS = 10
_CALIBRATION_BYTES = 1 << 20
"""About a thousand runs."""


def resolve_path(ref: str) -> Path:
    """The path that `ref` names: `package:NAME/inner/path` in an installed package, else itself.

    The package is located, not imported. RecipeError when the package or the path in it is absent.
    """
    if not ref.startswith(_PACKAGE_REF):
        return expanded(ref)
    name, _, inner = ref.removeprefix(_PACKAGE_REF).partition("/")
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        message = f"no Python package {name!r} is installed, so {ref!r} names nothing"
        raise RecipeError(Problem("package-missing", message, hint="install the package"))
    for folder in folders:
        if (path := Path(folder) / inner).exists():
            return path
    raise RecipeError(Problem("path-missing", f"package {name!r} has no file or folder {inner!r}"))


def free_port() -> int:
    """A TCP port that nothing listens on just now, at no address of this machine."""
    with _bound_everywhere(0) as sock:
        return int(sock.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nothing listens on a TCP port just now, at any address of this machine."""
    try:
        _bound_everywhere(port).close()
    except OSError:
        return False
    return True


def _bound_everywhere(port: int) -> socket.socket:
    """A socket that has the port at all addresses, as torch's store will; OSError where it is taken."""
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
    """Where prepared data, converted models and the calibration file are kept.

    $EFFILAUNCH_CACHE, else ~/.cache/effilaunch.
    """
    given = os.environ.get("EFFILAUNCH_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "effilaunch"


def calibration_file() -> Path:
    """What finished runs measured beside what was predicted, one JSON object a line."""
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
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS and WebAssembly do not
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def host_memory_bytes() -> int | None:
    """Memory this process may use: the machine's, or the control group's limit where lower."""
    limits = []
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit_file in (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ):
        try:
            limits.append(int(limit_file.read_text()))
        except (OSError, ValueError):  # absent, or the word "max"
            continue
    return min(limits, default=None)


def probe_hardware() -> Hardware:
    """This machine's devices: GPUs that `CUDA_VISIBLE_DEVICES` leaves, else one CPU process."""
    return probe_hardware_with_notes()[0]


def probe_hardware_with_notes() -> tuple[Hardware, tuple[str, ...]]:
    """As `probe_hardware`, and remarks on what it had to decide (unlike devices)."""
    devices = _visible(_query_gpus(), os.environ)
    if not devices:
        cpu = Hardware(1, 1, "cpu", None, None)
        return with_host_memory(cpu, host_memory_bytes()), ()
    weakest = min(devices, key=lambda d: (d.size, d.capability or (0, 0)))
    notes: tuple[str, ...] = ()
    if len({(d.name, d.size) for d in devices}) > 1:
        names = ", ".join(sorted({d.name for d in devices}))
        notes = (f"devices differ ({names}); all are planned as the smallest, {weakest.name}",)
    return weakest.as_hardware(len(devices)), notes


def visible_devices() -> list[str]:
    """Indices of the GPUs that this process may use, as nvidia-smi numbers them."""
    return [gpu.index for gpu in visible_gpus()]


def visible_gpus() -> list[ProbedGpu]:
    """The GPUs that this process may use."""
    return _visible(_query_gpus(), os.environ)


def boot_id() -> str:
    """The same for all processes of a machine, until it is started again; empty where nobody tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


_NO_GPU = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that mean none; the last one is Slurm's."""


class ProbedGpu:
    """One line of nvidia-smi's answer."""

    __slots__ = ("capability", "index", "name", "size", "uuid")

    def __init__(self, fields: list[str]) -> None:
        index, uuid, name, mib, capability = (field.strip() for field in fields)
        self.index, self.uuid = index, uuid
        self.size = int(mib) * MIB
        match = re.fullmatch(r"(\d+)\.(\d+)", capability)
        self.capability = (int(match[1]), int(match[2])) if match else None
        self.name = _catalogue_name(name, int(mib)) or name

    def as_hardware(self, count: int) -> Hardware:
        return Hardware(1, count, self.name, self.size, self.capability)


def _catalogue_name(marketing: str, mib: int) -> str | None:
    """`NVIDIA A100-SXM4-80GB` -> `A100-80GB` when the memory agrees within 3 %."""
    words = re.split(r"[^a-z0-9]+", marketing.lower())
    joined = "".join(words)
    for name, (known_mib, _) in DEVICES.items():
        family = name.rpartition("-")[0].lower()
        # Whole words, so that an L4 is not taken for an L40S; RTX cards join two words.
        named = family in words or (family.startswith("rtx") and joined.endswith(family[3:]))
        if named and abs(mib - known_mib) <= 0.03 * known_mib:
            return name
    return None


def _query_gpus() -> list[ProbedGpu]:
    import subprocess

    query = "index,uuid,name,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        return [ProbedGpu(row) for row in csv.reader(answer.stdout.splitlines()) if row]
    except (OSError, subprocess.SubprocessError, ValueError):
        # No driver, a driver that does not answer, or another form of answer: no GPU to plan for.
        return []


def _visible(devices: list[ProbedGpu], environ: Mapping[str, str]) -> list[ProbedGpu]:
    """The devices that `CUDA_VISIBLE_DEVICES` names; as in CUDA, an unknown entry ends the list.

    MachineError where it asks for devices and none of these is meant: a run would train on the CPU.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return devices
    chosen: list[ProbedGpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        match = [d for d in devices if entry and (d.index == entry or d.uuid.startswith(entry))]
        if not match or match[0] in chosen:
            break
        chosen.append(match[0])
    if devices and not chosen and wanted.split(",")[0].strip() not in _NO_GPU:
        raise MachineError(_names_none(wanted))
    return chosen


def _names_none(wanted: str) -> Problem:
    message = f"CUDA_VISIBLE_DEVICES={wanted} names no GPU that nvidia-smi shows"
    if "MIG-" in wanted:
        message += ": a slice of a GPU (MIG) is not planned for"
    hint = "name whole GPUs by number or UUID (nvidia-smi -L); an empty value means a run on the CPU"
    return Problem("device-missing", message, hint=hint)


@functools.cache
def _shipped_models() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = json.loads(facts_file("models.json").read_text())["models"]
    return models


def shipped_model_names() -> tuple[str, ...]:
    """Names of the models whose published configurations come with the package."""
    return tuple(_shipped_models())


def shipped_model_config(name: str) -> dict[str, Any] | None:
    """Published configuration values that come with the package, or None for another model."""
    entry = _shipped_models().get(name)
    return dict(entry["config"]) if entry else None


SMI = "nvidia-smi"
SMI_SECONDS = 10
_QUERY = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; sizes in bytes."""

    index: str
    uuid: str
    name: str
    total: int
    used: int
    """By every process of the machine."""
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Devices and driver."""

    smi: str
    """ok | absent (no nvidia-smi on PATH) | failed (it is there and does not answer)"""
    said: str
    """What a failing nvidia-smi printed, one line."""
    driver: str | None
    """Version of the driver, e.g. `550.54.15`."""
    cuda: str | None
    """The newest CUDA that the driver runs, e.g. `12.4`."""
    gpus: tuple[Gpu, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES as set; None where it is not."""
    topology: str
    """`nvidia-smi topo -m`, "" with fewer than two GPUs."""

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves; as in CUDA, an unknown entry ends the list."""
        if self.visible is None:
            return self.gpus
        chosen: list[Gpu] = []
        for entry in (part.strip() for part in self.visible.split(",")):
            match = [g for g in self.gpus if entry and (g.index == entry or g.uuid.startswith(entry))]
            if not match or match[0] in chosen:
                break
            chosen.append(match[0])
        return tuple(chosen)


def read_gpus(visible: str | None) -> GpuFacts:
    """Ask nvidia-smi; a driver that does not answer is a fact too."""
    status, text = _ask(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    rows = list(csv.reader(text.splitlines())) if status == "ok" else []
    try:
        gpus = tuple(_gpu(row) for row in rows if row)
    except ValueError:  # e.g. "No devices were found", which leaves with 0
        status, gpus = "failed", ()
    if status != "ok":
        return GpuFacts(status, _one_line(text), None, None, (), visible, "")
    driver = rows[0][-1].strip() if gpus else None
    _, overview = _ask()
    cuda = re.search(r"CUDA Version:\s*([0-9]+\.[0-9]+)", overview)
    topology = _ask("topo", "-m") if len(gpus) > 1 else ("ok", "")
    return GpuFacts(
        "ok", "", driver, cuda[1] if cuda else None, gpus, visible, topology[1] if topology[0] == "ok" else ""
    )


def _gpu(row: list[str]) -> Gpu:
    if len(row) != len(_QUERY.split(",")):
        raise ValueError(row)
    index, uuid, name, total, used, capability, _ = (field.strip() for field in row)
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    held = int(used) * MIB if used.isdigit() else 0
    return Gpu(index, uuid, name, int(total) * MIB, held, (int(match[1]), int(match[2])) if match else None)


def _ask(*arguments: str) -> tuple[str, str]:
    """`ok`, `absent` or `failed`, and what nvidia-smi printed."""
    try:
        done = subprocess.run(
            [SMI, *arguments], capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except FileNotFoundError:
        return "absent", ""
    except subprocess.TimeoutExpired:
        return "failed", f"it did not answer within {SMI_SECONDS} s"
    except OSError as error:
        return "failed", str(error)
    said = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    return ("ok" if done.returncode == 0 else "failed"), said


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


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
