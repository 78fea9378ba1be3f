"""The GPUs of this machine as nvidia-smi reports them: which a run uses, their memory, who holds it.

Indices are nvidia-smi's, in PCI order; the ranks get CUDA_DEVICE_ORDER=PCI_BUS_ID, which numbers them alike.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.machine.hardware import DEVICES, MIB, Hardware

SMI_SECONDS = 60
"""Without persistence mode the driver initialises every GPU for each call, which takes seconds for each."""
STARTED_FOR = "EFFILAUNCH_GPUS"
"""Environment variable of the ranks: UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, in its order."""
SAME_SIZE = 0.9
"""Devices of one name differ by some percent: part of the memory may be kept for error correction, and torch
counts less than nvidia-smi."""
DEVICE_FILES = Path("/dev")
"""With the driver's `nvidia0`, `nvidiactl`, ..."""

_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.used", "compute_cap", "driver_version",
            "memory.free", "mig.mode.current", "display_active")  # fmt: skip
_NO_GPU = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that mean none; the last one is Slurm's."""
_UNREPORTED = ("[N/A]", "N/A", "[Not Supported]")
_DISPLAY, _SMALL = 1 / 2, 1 / 8
"""Share of the largest GPU's memory below which a card with an active display, or any card, only serves one:
a T400 in a DGX Station, a GT 1030 beside an RTX 3090."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi reports it; sizes in bytes."""

    index: str
    uuid: str
    name: str
    """NVIDIA's product name."""
    total: int | None
    """None where none is reported, as of a GPU that shares the host's memory."""
    used: int
    """By all processes."""
    capability: tuple[int, int] | None
    free: int | None = None
    """Less than total - used: the driver reserves some."""
    is_mig: bool = False
    """Whether it is divided into slices (MIG mode)."""
    has_display: bool = False
    """Whether a display is active on it."""
    fault: str = ""
    """What is reported in place of its memory, e.g. `GPU is lost`."""

    @property
    def label(self) -> str:
        """Index, name and UUID for a message."""
        return f"GPU {self.index} ({self.name}, {self.uuid})"

    @property
    def available(self) -> int | None:
        """Free memory, bytes; None where unknown."""
        return self.free if self.free is not None or self.total is None else self.total - self.used

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
            if named and self.total and abs(self.total - device.bytes) <= 0.03 * device.bytes:
                return name
        return self.name

    def is_enough_for(self, hardware: Hardware) -> bool:
        """Whether it has the memory and the compute capability that a plan counts on; unknown ones pass."""
        wanted, least = hardware.device_bytes, hardware.compute_capability
        is_small = None not in (wanted, self.total) and (self.total or 0) < SAME_SIZE * (wanted or 0)
        return not is_small and (least is None or self.capability is None or self.capability >= least)


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
    sign: str | None = None
    """What shows that there is a GPU, or that one is wanted, where nvidia-smi lists none."""

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES selects; without it, all but those that only serve a display."""
        if self.visible is None:
            return tuple(gpu for gpu in self.gpus if gpu not in self.left_out)
        return tuple(_selected(self.gpus, self.visible))

    @property
    def left_out(self) -> tuple[Gpu, ...]:
        """GPUs that only serve a display beside those that compute."""
        largest = max((gpu.total or 0 for gpu in self.gpus), default=0)
        if self.visible is not None:
            return ()
        return tuple(
            gpu
            for gpu in self.gpus
            if gpu.total is not None and gpu.total < largest * (_DISPLAY if gpu.has_display else _SMALL)
        )


def _selected(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists; as in CUDA, an unknown entry ends the list."""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        match = [gpu for gpu in gpus if entry and (gpu.index == entry or gpu.uuid.startswith(entry))]
        if not match or match[0] in chosen:
            break
        chosen.append(match[0])
    return chosen


def read_gpus(visible: str | None, *, whole: bool = True) -> GpuFacts:
    """Ask nvidia-smi for GPUs and driver; `whole`: for CUDA's version and the topology, too."""
    status, text, rows = _query_gpus()
    if status != "ok":
        said = " ".join(text.split())[:300]
        return GpuFacts(status, said, None, None, (), visible, "", _sign_of_gpu(visible))
    overview = _ask_smi()[1] if whole else ""
    cuda = re.search(r"CUDA Version:\s*([0-9]+\.[0-9]+)", overview)
    topology = _ask_smi("topo", "-m") if whole and len(rows) > 1 else ("ok", "")
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
    status, text = _ask_smi(f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits")
    if status != "ok":
        return status, text, []
    try:
        rows = [_gpu(row) for row in csv.reader(text.splitlines()) if row]
    except ValueError:  # e.g. "No devices were found", with exit status 0
        return "failed", text, []
    return ("ok", text, rows) if rows else ("failed", "it lists no GPU", [])


def _gpu(row: list[str]) -> tuple[Gpu, str]:
    """ValueError for a row of another form."""
    index, uuid, name, total, used, capability, driver, *later = (field.strip() for field in row)
    if not index.isdigit():
        raise ValueError(index)
    free, mig, display = (*later, "", "", "")[:3]
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    gpu = Gpu(
        index, uuid, name, _mib(total), _mib(used) or 0,
        (int(match[1]), int(match[2])) if match else None, _mib(free), mig == "Enabled", display == "Enabled",
        "" if total.isdigit() or total in _UNREPORTED else total.strip("[]"),
    )  # fmt: skip
    return gpu, driver


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


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


def _sign_of_gpu(visible: str | None) -> str | None:
    if visible is not None and not _hides_all(visible):
        return f"CUDA_VISIBLE_DEVICES={visible} is set"
    return next((f"{path} exists" for path in sorted(DEVICE_FILES.glob("nvidia*"))), None)


def _hides_all(visible: str | None) -> bool:
    return visible is not None and visible.split(",")[0].strip() in _NO_GPU


def require_gpus() -> GpuFacts:
    """The GPUs of this machine; none where CUDA_VISIBLE_DEVICES hides all, or where nothing hints at one.

    MachineError where a run would train on the CPU without being asked to: nvidia-smi fails, or is missing
    beside a GPU; CUDA_VISIBLE_DEVICES selects none that exists; one that it would use cannot be used.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _hides_all(visible):
        return GpuFacts("ok", "", None, None, (), visible, "")
    facts = read_gpus(visible, whole=False)
    on_cpu = "train on the CPU: --on cpu"
    if facts.smi == "failed":
        message = f"nvidia-smi fails, so the GPUs of this machine are not known: {facts.said or 'no message'}"
        hint = f"repair the driver (after an update of it: reboot), or {on_cpu}"
        raise MachineError(Problem("driver-failed", message, hint=hint))
    if facts.sign is not None:
        message = f"{facts.sign}, and there is no nvidia-smi on PATH to ask for the GPUs"
        hint = f"install the driver's programs or add their folder to PATH, or {on_cpu}"
        raise MachineError(Problem("nvidia-smi-missing", message, hint=hint))
    if facts.gpus and not facts.usable:
        message = f"CUDA_VISIBLE_DEVICES={visible} names no GPU that nvidia-smi shows"
        if "MIG-" in str(visible):
            message += ": a slice of a GPU (MIG) is not supported"
        hint = "name whole GPUs by number or UUID (nvidia-smi -L), or set an empty value to train on the CPU"
        raise MachineError(Problem("device-missing", message, hint=hint))
    if problems := unusable(facts.usable):
        raise MachineError(problems)
    return facts


def unusable(gpus: Sequence[Gpu]) -> list[Problem]:
    """A problem for each GPU that is lost, cannot be read, or is divided into slices."""
    good = ",".join(gpu.index for gpu in gpus if not gpu.is_mig and not gpu.fault)
    way = f"use the others: CUDA_VISIBLE_DEVICES={good}" if good else "train on the CPU: --on cpu"
    problems = []
    for gpu in gpus:
        if gpu.is_mig:
            message = f"{gpu.label} is in MIG mode: a slice of a GPU is not supported"
            hint = f"{way}; `nvidia-smi -i {gpu.index} -mig 0` ends the mode"
            problems.append(Problem("device-unusable", message, hint=hint))
        elif gpu.fault:
            message = f"{gpu.label}: nvidia-smi reports {gpu.fault!r} in place of its memory"
            problems.append(Problem("device-unusable", message, hint=way))
    return problems


def visible_gpus() -> list[Gpu]:
    """The GPUs that a run of this process uses; MachineError as `require_gpus`."""
    return list(require_gpus().usable)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: str
    uuid: str
    held: int | None
    """Bytes; None where the driver does not report them."""
    name: str


def memory_holders() -> list[Holder]:
    """The processes that compute on GPUs, as the driver lists them; empty where it cannot be asked.

    A container's process numbers may be others than the driver's.
    """
    columns = "--query-compute-apps=pid,gpu_uuid,used_memory,process_name"
    status, text = _ask_smi(columns, "--format=csv,noheader,nounits")
    rows = [line.split(", ", 3) for line in text.splitlines()] if status == "ok" else []
    return [
        Holder(row[0].strip(), row[1], _mib(row[2].strip()), "".join(row[3:]))
        for row in rows
        if len(row) >= 3
    ]


def utilisation(uuids: Sequence[str]) -> int | None:
    """Percent of the last second in which the busiest of these GPUs computed; None where it is unknown."""
    status, text = _ask_smi("--query-gpu=uuid,utilization.gpu", "--format=csv,noheader,nounits")
    rows = [line.partition(", ") for line in text.splitlines()] if status == "ok" else []
    return max(
        (int(used) for uuid, _, used in rows if uuid in uuids and used.strip().isdigit()), default=None
    )


def memory_of_process(pid: int) -> dict[str, int]:
    """Bytes that the driver counts for a process on each GPU, by UUID; empty where it is not listed."""
    own = (holder for holder in memory_holders() if holder.pid == str(pid))
    return {holder.uuid: holder.held for holder in own if holder.held is not None}
