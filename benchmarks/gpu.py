"""What the commands that measure on one GPU share: the device, its record, and their order of work."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from records import RECORDS, read_record, today, versions, write_record
from runner import Room, compare_again, in_process

from launcher.machine.hardware import Hardware, parse_hardware

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "flash_attn", "liger_kernel")
REHEARSAL = "A rehearsal with narrow models on a CPU: says nothing about a GPU."


@dataclass(frozen=True, slots=True)
class Device:
    """Where rows are measured."""

    name: str
    hardware: Hardware
    rehearsal: bool

    @property
    def torch_name(self) -> str:
        return "cpu" if self.rehearsal else "cuda"


def find_device(rehearse: bool) -> Device | None:
    """The first GPU, asked in a process of its own: a CUDA context does not outlive a fork."""
    if rehearse:
        return Device("cpu", parse_hardware("cpu"), True)
    return in_process(_first_gpu, 120.0).get("device")


def _first_gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(0)
    hardware = Hardware(1, 1, found.name, found.total_memory, (found.major, found.minor))
    return {"device": Device(found.name, hardware, rehearsal=False)}


def count() -> int:
    """GPUs that this process may use."""
    return int(in_process(_count, 120.0)["count"])


def _count() -> dict[str, Any]:
    import torch

    return {"count": torch.cuda.device_count()}


def obstacle(needs: Sequence[str], device: Device, left_s: float) -> str | None:
    """Why a row is not tried: a package is absent, or its turn comes too late."""
    absent = [name for name in needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if "flash_attn" in needs and device.rehearsal:
        return "flash_attn needs a GPU"
    return "the time budget is spent" if left_s <= 0 else None


def too_large(predicted_bytes: int, device: Device) -> str | None:
    """Why a row is not tried: its prediction exceeds the device."""
    size = device.hardware.device_bytes
    if size is None or predicted_bytes <= size:
        return None
    return f"predicted {predicted_bytes / 1e9:.1f} GB, the device has {size / 1e9:.1f}"


def room_of(device: Device, gigabytes: float | None) -> Room:
    """So much of the device's memory, or all of it."""
    return Room(gigabytes * 1e9 if gigabytes else device.hardware.device_bytes or math.inf)


def merged(
    entries: Sequence[dict[str, Any]], record: Mapping[str, Any], device: Device, names: Sequence[str]
) -> list[dict[str, Any]]:
    """The entries, with those of other rows that a record of this device and these versions has.

    A measured row stays where it was skipped now. names: of all rows, in the order of the grid.
    """
    known = {}
    if record.get("device") == device.name and record["versions"] == versions(PACKAGES):
        known = {one["name"]: one for one in record["rows"]}
    known |= {one["name"]: one for one in entries if "skipped" not in one or one["name"] not in known}
    return [known[name] for name in names if name in known]


def repeated(entries: Sequence[dict[str, Any]], record: Mapping[str, Any]) -> None:
    """Compare the bytes of each measured entry with the record, which has to have them."""
    known = {one["name"]: one["allocated"] for one in record["rows"] if "allocated" in one}
    same_versions = record["versions"] == versions(PACKAGES)
    for entry in (one for one in entries if "allocated" in one):
        compare_again(entry, "allocated", known[entry["name"]], same_versions)
        print(f"{entry['name']:<32} {entry.get('error', 'same')}")


def run_command(
    options: argparse.Namespace,
    kind: str,
    rows: Sequence[Any],
    measure: Callable[[Sequence[Any], Device], list[dict[str, Any]]],
    about: str,
) -> tuple[Device, list[dict[str, Any]]] | None:
    """Measure the rows that --only names, or all, and write the record; None where there is no GPU.

    The record is records/KIND_<device>.json or what --out names; a rehearsal leaves one only there.
    """
    device = find_device(options.rehearse)
    if device is None:
        print("skipped: no GPU is here; --rehearse runs the same code on a CPU", file=sys.stderr)
        return None
    chosen = [row for row in rows if options.only is None or row.name in options.only]
    entries = measure(chosen, device)
    out = options.out
    if out is None and not device.rehearsal:
        out = RECORDS / f"{kind}_{re.sub(r'[^a-z0-9]+', '_', device.name.lower()).strip('_')}.json"
    if out is not None and getattr(options, "repeat", False):
        repeated(entries, read_record(out))
    elif out is not None:
        before = read_record(out) if out.is_file() else {}
        write_record(out, {
            "about": REHEARSAL if device.rehearsal else about, "date": today(), "device": device.name,
            "hardware": device.hardware.device, "device_bytes": device.hardware.device_bytes,
            "versions": versions(PACKAGES),
            "rows": merged(entries, before, device, [row.name for row in rows]),
        })  # fmt: skip
    return device, entries
