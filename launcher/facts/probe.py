"""Read GPUs, memory, ports and package paths of the machine at hand.

Without torch or transformers, so that planning stays fast on a login node.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import json
import os
import re
from collections.abc import Sequence
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


SMI_SECONDS = 10
_SMI_COLUMNS = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version"
_NO_GPU = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that mean none; the last one is Slurm's."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi shows it; sizes in bytes."""

    index: str
    uuid: str
    name: str
    """NVIDIA's product name."""
    total: int
    used: int
    """By all processes."""
    capability: tuple[int, int] | None

    @property
    def device(self) -> str:
        """Catalogue name (`A100-80GB`) where the memory agrees within 3 %; else the product name."""
        product = self.name.lower().partition(" blackwell")[0]  # RTX PRO 6000 Blackwell Server Edition
        words = re.split(r"[^a-z0-9]+", product)
        joined = "".join(words)
        for name, device in DEVICES.items():
            family = name.rpartition("-")[0].lower()
            # Whole words, so that an L4 is not taken for an L40S; RTX cards join two words.
            named = family in words or (family.startswith("rtx") and joined.endswith(family[3:]))
            if named and abs(self.total - device.bytes) <= 0.03 * device.bytes:
                return name
        return self.name


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """GPUs and driver."""

    smi: str
    """ok | absent (no nvidia-smi on PATH) | failed (nvidia-smi exits with an error or does not answer)"""
    said: str
    """What a failing nvidia-smi printed, one line."""
    driver: str | None
    """Driver version, e.g. `550.54.15`."""
    cuda: str | None
    """The newest CUDA version that the driver supports, e.g. `12.4`."""
    gpus: tuple[Gpu, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES as set; None where it is not."""
    topology: str
    """`nvidia-smi topo -m`, "" with fewer than two GPUs."""

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES selects."""
        return self.gpus if self.visible is None else tuple(_selected(self.gpus, self.visible))


def _selected(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists; as in CUDA, an unknown entry ends the list."""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        match = [gpu for gpu in gpus if entry and (gpu.index == entry or gpu.uuid.startswith(entry))]
        if not match or match[0] in chosen:
            break
        chosen.append(match[0])
    return chosen


def read_gpus(visible: str | None) -> GpuFacts:
    """Ask nvidia-smi for GPUs, driver and topology. visible: CUDA_VISIBLE_DEVICES."""
    status, text, rows = _query_gpus()
    if status != "ok":
        return GpuFacts(status, " ".join(text.split())[:300], None, None, (), visible, "")
    _, overview = _ask_smi()
    cuda = re.search(r"CUDA Version:\s*([0-9]+\.[0-9]+)", overview)
    topology = _ask_smi("topo", "-m") if len(rows) > 1 else ("ok", "")
    return GpuFacts(
        smi="ok",
        said="",
        driver=rows[0][1] if rows else None,
        cuda=cuda[1] if cuda else None,
        gpus=tuple(gpu for gpu, _ in rows),
        visible=visible,
        topology=topology[1] if topology[0] == "ok" else "",
    )


def _query_gpus() -> tuple[str, str, list[tuple[Gpu, str]]]:
    """Status and output of nvidia-smi's query, and each GPU with its driver version."""
    status, text = _ask_smi(f"--query-gpu={_SMI_COLUMNS}", "--format=csv,noheader,nounits")
    try:
        return status, text, [_gpu(row) for row in csv.reader(text.splitlines()) if row and status == "ok"]
    except ValueError:  # e.g. "No devices were found", with exit status 0
        return "failed", text, []


def _gpu(row: list[str]) -> tuple[Gpu, str]:
    """ValueError for a row of another form."""
    index, uuid, name, total, used, capability, driver = (field.strip() for field in row)
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    held = int(used) * MIB if used.isdigit() else 0
    computes = (int(match[1]), int(match[2])) if match else None
    return Gpu(index, uuid, name, int(total) * MIB, held, computes), driver


def _ask_smi(*arguments: str) -> tuple[str, str]:
    """`ok`, `absent` or `failed`, and what nvidia-smi printed."""
    import subprocess

    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except FileNotFoundError:
        return "absent", ""
    except subprocess.TimeoutExpired:
        return "failed", f"no answer within {SMI_SECONDS} s"
    except (OSError, ValueError) as error:
        return "failed", str(error)
    failed = done.returncode != 0
    return ("failed" if failed else "ok"), done.stdout + (done.stderr if failed else "")


def memory_of_process(pid: int) -> dict[str, int]:
    """Bytes that the driver counts for a process on each GPU, by its UUID; empty where it does not list it.

    A container's process numbers may be others than the driver's.
    """
    columns = "--query-compute-apps=pid,gpu_uuid,used_memory"
    status, text = _ask_smi(columns, "--format=csv,noheader,nounits")
    rows = (
        [[field.strip() for field in row] for row in csv.reader(text.splitlines())] if status == "ok" else []
    )
    return {
        row[1]: int(row[2]) * MIB for row in rows if len(row) == 3 and row[0] == str(pid) and row[2].isdigit()
    }


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use.

    MachineError where CUDA_VISIBLE_DEVICES selects only GPUs that do not exist: a run would train on the CPU.
    """
    gpus = [gpu for gpu, _ in _query_gpus()[2]]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    chosen = _selected(gpus, wanted)
    if gpus and not chosen and wanted.split(",")[0].strip() not in _NO_GPU:
        message = f"CUDA_VISIBLE_DEVICES={wanted} names no GPU that nvidia-smi shows"
        if "MIG-" in wanted:
            message += ": a slice of a GPU (MIG) is not supported"
        hint = "name whole GPUs by number or UUID (nvidia-smi -L), or set an empty value to train on the CPU"
        raise MachineError(Problem("device-missing", message, hint=hint))
    return chosen


def probe_hardware() -> Hardware:
    """This machine's devices: GPUs that `CUDA_VISIBLE_DEVICES` selects, else one CPU process.

    Of unlike GPUs, all are planned as the smallest.
    """
    gpus = visible_gpus()
    if not gpus:
        return with_host_memory(Hardware(1, 1, "cpu", None, None), host_memory_bytes())
    weakest = min(gpus, key=lambda gpu: (gpu.total, gpu.capability or (0, 0)))
    return Hardware(1, len(gpus), weakest.device, weakest.total, weakest.capability)


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


@functools.cache
def _shipped_models() -> dict[str, Any]:
    return dict(json.loads(facts_file("models.json").read_text())["models"])


def shipped_model_names() -> tuple[str, ...]:
    """Names of the models with a shipped configuration: those it is published under, then their equals."""
    models = _shipped_models()
    return (*models, *(name for entry in models.values() for name in entry.get("names", ())))


def shipped_model_config(name: str) -> dict[str, Any] | None:
    """The shipped configuration of a model, None without one."""
    models = _shipped_models()
    if name in models:
        return dict(models[name]["config"])
    shared = next((entry for entry in models.values() if name in entry.get("names", ())), None)
    return {**shared["config"], **shared["names"][name]} if shared else None
