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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.facts.hardware import DEVICES, MIB, Hardware, with_host_memory
from launcher.facts.shipped import facts_file
from launcher.facts.user_files import expanded

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


def visible_gpus() -> list[Gpu]:
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


class Gpu:
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


def _query_gpus() -> list[Gpu]:
    import subprocess

    query = "index,uuid,name,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        return [Gpu(row) for row in csv.reader(answer.stdout.splitlines()) if row]
    except (OSError, subprocess.SubprocessError, ValueError):
        # No driver, a driver that does not answer, or another form of answer: no GPU to plan for.
        return []


def _visible(devices: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The devices that `CUDA_VISIBLE_DEVICES` names; as in CUDA, an unknown entry ends the list.

    MachineError where it asks for devices and none of these is meant: a run would train on the CPU.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return devices
    chosen: list[Gpu] = []
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
