"""Devices: a catalogue of published figures, and the `8xA100-80GB` notation. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from launcher.errors import Problem, RecipeError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a job runs on: `num_nodes` equal machines with `devices_per_node` devices each."""

    num_nodes: int
    devices_per_node: int
    """Devices per node; on `cpu` the number of processes per node."""
    device: str
    """Catalogue name, `cpu`, or `NNGB` for an unnamed device."""
    device_bytes: int | None
    """Bytes that one device holds; None where it is not known (a CPU elsewhere)."""
    compute_capability: tuple[int, int] | None
    """CUDA compute capability; None for a CPU and for an unnamed device."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def label(self) -> str:
        """The notation that `parse_hardware` reads back."""
        count = f"{self.devices_per_node}x"
        if self.num_nodes > 1:
            count = f"{self.num_nodes}x{count}"
        if self.is_cpu and count == "1x":
            count = ""
        return f"{count}{self.device}"


# name: (MiB as `nvidia-smi --query-gpu=memory.total` reports them, compute capability as in
# NVIDIA's table of CUDA GPUs). A100-80GB and the V100s report the round figure or slightly less.
DEVICES: dict[str, tuple[int, tuple[int, int]]] = {
    "P100-16GB": (16276, (6, 0)),
    "V100-16GB": (16160, (7, 0)),
    "V100-32GB": (32510, (7, 0)),
    "T4-16GB": (15360, (7, 5)),
    "RTX2080Ti-11GB": (11264, (7, 5)),
    "A100-40GB": (40960, (8, 0)),
    "A100-80GB": (81920, (8, 0)),
    "A30-24GB": (24576, (8, 0)),
    "A10-24GB": (23028, (8, 6)),
    "A10G-24GB": (23028, (8, 6)),
    "A40-48GB": (46068, (8, 6)),
    "A6000-48GB": (49140, (8, 6)),
    "RTX3090-24GB": (24576, (8, 6)),
    "RTX4090-24GB": (24564, (8, 9)),
    "L4-24GB": (23034, (8, 9)),
    "L40S-48GB": (46068, (8, 9)),
    "H100-80GB": (81559, (9, 0)),
    "H200-141GB": (143771, (9, 0)),
    "B200-180GB": (183359, (10, 0)),
    "RTX5090-32GB": (32607, (12, 0)),
}

# Six digits: more than anybody has, and no figure that is computed from them overflows.
_NOTATION = r"(?:(?P<a>[0-9]{1,6})x)?(?:(?P<b>[0-9]{1,6})x)?(?P<device>[A-Za-z0-9-]{1,40})"
_UNNAMED = r"0*([1-9][0-9]{0,5})GB"


def device_facts(name: str) -> tuple[str, int | None, tuple[int, int] | None]:
    """Canonical name, bytes and compute capability of a device; RecipeError for an unknown name."""
    if name.lower() == "cpu":
        return "cpu", None, None
    if match := re.fullmatch(_UNNAMED, name, re.IGNORECASE):
        # Decimal gigabytes: an unnamed "24GB" device promises no more than that.
        return f"{match[1]}GB", int(match[1]) * 10**9, None
    by_lower = {known.lower(): known for known in DEVICES}
    known = by_lower.get(name.lower())
    if known is None:
        same_family = [d for d in DEVICES if d.lower().startswith(name.lower() + "-")]
        if len(same_family) == 1:
            known = same_family[0]
    if known is None:
        import difflib

        near = same_family or difflib.get_close_matches(name, DEVICES, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(DEVICES)}"
        raise RecipeError(Problem("unknown-device", f"no device {name!r} in the catalogue", hint=hint))
    mib, capability = DEVICES[known]
    return known, mib * MIB, capability


def parse_hardware(text: str) -> Hardware:
    """Read `8xA100-80GB`, `2x8xH100-80GB` (nodes x devices x device), `cpu`, `2xcpu`, `1x24GB`."""
    match = re.fullmatch(_NOTATION, text.strip())
    if match is None:
        raise RecipeError(
            Problem(
                "bad-hardware",
                f"cannot read hardware {text!r}: expected [NODESx]DEVICESxDEVICE",
                hint="e.g. 8xA100-80GB, 2x8xH100-80GB, 1x24GB, cpu or 2xcpu",
            )
        )
    first, second = match["a"], match["b"]
    nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
    if nodes < 1 or devices < 1:
        raise RecipeError(
            Problem("bad-hardware", f"hardware {text!r} needs at least one node and one device")
        )
    name, size, capability = device_facts(match["device"])
    return Hardware(nodes, devices, name, size, capability)


def with_host_memory(hardware: Hardware, host_bytes: int | None) -> Hardware:
    """A CPU's `device_bytes` is its share of the host's memory, where that is known."""
    if not hardware.is_cpu or host_bytes is None:
        return hardware
    return replace(hardware, device_bytes=host_bytes // hardware.devices_per_node)
