"""Devices: a catalogue of published figures, and the `8xA100-80GB` notation. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

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


T, G = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Figures:
    """Published peaks of one device."""

    half: float
    """Multiply-adds of bf16 or fp16 matrices with fp32 sums, in operations a second."""
    tf32: float
    """The same of TF32; without such units those of fp32."""
    single: float
    """fp32 without tensor cores."""
    memory: float
    """Bytes a second from and to the device's own memory."""
    link: float
    """Bytes a second and direction to another device of the machine: NVLink, else PCIe."""
    host: float
    """Bytes a second and direction to the host's memory, over PCIe."""
    source: str


PCIE3, PCIE4, PCIE5 = 16 * G, 32 * G, 64 * G
"""One direction of 16 lanes: half of the sums that the data sheets print."""

_P100 = "NVIDIA Tesla P100 PCIe data sheet"
_V100 = "NVIDIA V100 data sheet (SXM2)"
_TURING = "NVIDIA Turing GPU architecture white paper (RTX 2080 Ti, reference clocks)"
_A100 = "NVIDIA A100 data sheet (SXM4)"
_A6000 = "NVIDIA RTX A6000 data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper"
_H100 = "NVIDIA H100 data sheet (SXM5)"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"

FIGURES: dict[str, Figures] = {
    "P100-16GB": Figures(18.7 * T, 9.3 * T, 9.3 * T, 732 * G, PCIE3, PCIE3, _P100),
    "V100-16GB": Figures(125 * T, 15.7 * T, 15.7 * T, 900 * G, 150 * G, PCIE3, _V100),
    "V100-32GB": Figures(125 * T, 15.7 * T, 15.7 * T, 900 * G, 150 * G, PCIE3, _V100),
    "T4-16GB": Figures(65 * T, 8.1 * T, 8.1 * T, 300 * G, PCIE3, PCIE3, "NVIDIA T4 data sheet"),
    "RTX2080Ti-11GB": Figures(53.8 * T, 13.4 * T, 13.4 * T, 616 * G, PCIE3, PCIE3, _TURING),
    "A100-40GB": Figures(312 * T, 156 * T, 19.5 * T, 1555 * G, 300 * G, PCIE4, _A100),
    "A100-80GB": Figures(312 * T, 156 * T, 19.5 * T, 2039 * G, 300 * G, PCIE4, _A100),
    "A30-24GB": Figures(165 * T, 82 * T, 10.3 * T, 933 * G, PCIE4, PCIE4, "NVIDIA A30 data sheet"),
    "A10-24GB": Figures(125 * T, 62.5 * T, 31.2 * T, 600 * G, PCIE4, PCIE4, "NVIDIA A10 data sheet"),
    "A10G-24GB": Figures(70 * T, 35 * T, 31.5 * T, 600 * G, PCIE4, PCIE4, "NVIDIA A10G data sheet"),
    "A40-48GB": Figures(149.7 * T, 74.8 * T, 37.4 * T, 696 * G, PCIE4, PCIE4, "NVIDIA A40 data sheet"),
    "A6000-48GB": Figures(
        154.8 * T, 77.4 * T, 38.7 * T, 768 * G, PCIE4, PCIE4, "NVIDIA RTX A6000 data sheet"
    ),
    "RTX3090-24GB": Figures(71 * T, 35.6 * T, 35.6 * T, 936 * G, PCIE4, PCIE4, _GA102),
    "RTX4090-24GB": Figures(165.2 * T, 82.6 * T, 82.6 * T, 1008 * G, PCIE4, PCIE4, _ADA),
    "L4-24GB": Figures(121 * T, 60 * T, 30.3 * T, 300 * G, PCIE4, PCIE4, "NVIDIA L4 data sheet"),
    "L40S-48GB": Figures(362 * T, 183 * T, 91.6 * T, 864 * G, PCIE4, PCIE4, "NVIDIA L40S data sheet"),
    "H100-80GB": Figures(989 * T, 494.7 * T, 67 * T, 3350 * G, 450 * G, PCIE5, _H100),
    "H200-141GB": Figures(989 * T, 494.7 * T, 67 * T, 4800 * G, 450 * G, PCIE5, "NVIDIA H200 data sheet"),
    "B200-180GB": Figures(2250 * T, 1125 * T, 75 * T, 7700 * G, 900 * G, PCIE5, "NVIDIA HGX B200 data sheet"),
    "RTX5090-32GB": Figures(209.5 * T, 104.8 * T, 104.8 * T, 1792 * G, PCIE5, PCIE5, _BLACKWELL),
}
"""Catalogue name -> figures. Where a name has boards of several forms, those of the fastest. Cards that
a bridge could join in pairs (A30, A40, A6000, RTX 3090) are counted without it."""

UNNAMED = Figures(100 * T, 50 * T, 25 * T, 600 * G, PCIE4, PCIE4, "a stand-in: nobody's figures")
"""In place of a device that the catalogue does not have: plans are ranked by it, never timed."""
A_CPU = Figures(1 * T, 1 * T, 1 * T, 200 * G, 10 * G, 10 * G, "a stand-in: nobody's figures")
"""In place of a processor, likewise."""
CORE_MEMORY = 12 * G
"""Assumption: bytes a second from memory that one core can use at most."""
SOCKET_MEMORY = 200 * G
"""Assumption: the same of all cores together."""


def figures_of(
    hardware: Hardware, processor: Processor | None = None, cores: int = 1
) -> tuple[Figures, bool]:
    """The device's figures, and whether they are its own rather than a stand-in's.

    `processor`: this machine's, where the plan is for it, and `cores` that the processes share.
    """
    if hardware.is_cpu:
        return (A_CPU, False) if processor is None else (_share(processor, hardware, cores), True)
    found = FIGURES.get(hardware.device)
    return (UNNAMED, False) if found is None else (found, True)


def _share(processor: Processor, hardware: Hardware, cores: int) -> Figures:
    """The peaks of one process's cores; other processes are reached through memory."""
    own = cores / hardware.devices_per_node
    memory = min(own * CORE_MEMORY, SOCKET_MEMORY / hardware.devices_per_node)
    single, half = own * processor.single, own * processor.half
    return Figures(half, single, single, memory, memory, memory, f"counted: {processor.name}")


HIGHEST_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
"""kHz."""
CPUINFO = Path("/proc/cpuinfo")

_SINGLE = (("avx512f", 64), ("avx2", 32), ("avx", 16))
"""Flag -> fp32 operations a core finishes in a cycle: two units of so many lanes, a multiply-add is two."""
_PLAIN = 8
"""Of four lanes, in two units, of which one adds and one multiplies."""
_HALF = (("amx_bf16", 1024), ("avx512_bf16", 128))
"""The same of bf16 products with fp32 sums; AMX: 16 x 16 x 32 multiply-adds in 16 cycles."""
_EMULATED = 1 / 4
"""Share of the fp32 rate where bf16 has no unit of its own: operands are widened before each product."""


@dataclass(frozen=True, slots=True)
class Processor:
    """One core's peaks, in operations a second."""

    single: float
    """fp32 products."""
    half: float
    """bf16 products with fp32 sums."""
    name: str
    """The vector or matrix units that were counted, e.g. `avx512f, amx_bf16 at 2.7 GHz`."""

    @property
    def has_half(self) -> bool:
        """Whether bf16 has units of its own."""
        return self.half > self.single


def probe_processor() -> Processor | None:
    """This machine's processor; None where Linux says too little of it."""
    try:
        text = CPUINFO.read_text("utf-8", errors="replace")
    except OSError:
        return None
    try:
        return read_processor(text, float(HIGHEST_CLOCK.read_text("ascii")) * 1e3)
    except (OSError, ValueError):  # a virtual machine's clock does not change
        return read_processor(text)


def read_processor(text: str, hertz: float | None = None) -> Processor | None:
    """The processor of /proc/cpuinfo's text, of its first core; None without clock or flags.

    hertz: its highest clock, where that is known: an idle core's text has the clock of the moment.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    try:
        hertz = hertz or float(fields["cpu MHz"]) * 1e6
    except (KeyError, ValueError):
        return None
    if not flags or not 1e8 <= hertz <= 1e10:
        return None
    units, single = next(((name, lanes) for name, lanes in _SINGLE if name in flags), ("sse", _PLAIN))
    matrix, half = next(((name, lanes) for name, lanes in _HALF if name in flags), (None, single * _EMULATED))
    named = units if matrix is None else f"{units}, {matrix}"
    return Processor(single * hertz, half * hertz, f"{named} at {hertz / 1e9:.1f} GHz")
