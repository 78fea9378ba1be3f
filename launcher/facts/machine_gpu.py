"""GPUs and their driver, as nvidia-smi tells them."""

from __future__ import annotations

import csv
import re
import subprocess
from dataclasses import dataclass

from launcher.facts.hardware import MIB

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
