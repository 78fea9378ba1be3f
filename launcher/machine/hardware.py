"""Devices and processors: memory, peak rates, and the `8xA100-80GB` notation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.errors import Problem, RecipeError

MIB = 2**20
VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)
"""Compute capabilities of the first GPUs of a generation."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a job runs on: `num_nodes` equal nodes with `devices_per_node` devices each."""

    num_nodes: int
    devices_per_node: int
    """Devices per node; on `cpu` the number of processes per node."""
    device: str
    """Catalogue name, `cpu`, or `NNGB` for an unnamed device."""
    device_bytes: int | None
    """Memory of one device; None where unknown (a CPU elsewhere)."""
    compute_capability: tuple[int, int] | None
    """CUDA compute capability; None for a CPU and for an unnamed device."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Warnings of a plan for the devices found here."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def label(self) -> str:
        """The notation that `parse_hardware` reads back."""
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        is_one = self.is_cpu and self.num_devices == 1
        return self.device if is_one else f"{nodes}{self.devices_per_node}x{self.device}"


T, G = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Figures:
    """Peaks of one device."""

    half: float
    """Multiply-adds of bf16 or fp16 matrices with fp32 sums, operations/s."""
    tf32: float
    """The same in TF32; of fp32 on devices without TF32."""
    single: float
    """fp32 without tensor cores, operations/s."""
    memory: float
    """Device memory bandwidth, bytes/s."""
    link: float
    """Bytes/s and direction to another device of the node: NVLink, else PCIe."""
    host: float
    """Bytes/s and direction to host memory, over PCIe or NVLink-C2C."""
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One entry of the catalogue."""

    bytes: int
    """As `nvidia-smi --query-gpu=memory.total` reports it; of AMD's devices as `amd-smi`."""
    capability: tuple[int, int] | None
    """From NVIDIA's table of CUDA GPUs; None for AMD's devices, of which the capacity alone is known here."""
    figures: Figures | None
    """None where the catalogue has no source for them: plans are ranked, never timed."""


def _device(
    mib: int, capability: tuple[int, int],
    half: float, tf32: float, single: float, memory: float, link: float, host: float, source: str,
) -> Device:  # fmt: skip
    """half, tf32 and single in TFLOP/s; memory, link and host in GB/s."""
    figures = Figures(half * T, tf32 * T, single * T, memory * G, link * G, host * G, source)
    return Device(mib * MIB, capability, figures)


def _capacity(mib: int) -> Device:
    return Device(mib * MIB, None, None)


_PCIE3, _PCIE4, _PCIE5 = 16, 32, 64
"""GB/s in one direction of 16 lanes: half of the figure in the data sheets."""
_C2C = 450
"""The same of NVLink-C2C between a Grace processor and its GPUs; two GPUs share it in a GB200."""
_P100 = "NVIDIA Tesla P100 PCIe data sheet"
_V100 = "NVIDIA V100 data sheet (SXM2)"
_TURING = "NVIDIA Turing GPU architecture white paper (RTX 2080 Ti, reference clocks)"
_A100 = "NVIDIA A100 data sheet (SXM4)"
_A6000 = "NVIDIA RTX A6000 data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper"
_H100 = "NVIDIA H100 data sheet (SXM5)"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"
# Devices without a data sheet of their own in public: the differences are from these places.
_A800 = f"{_A100}, with 400 GB/s of NVLink: Datura-ai/lium-io#1199"
_H800 = f"{_H100}, with 400 GB/s of NVLink: philisun.com, NVIDIA H800 vs H100"
_H20 = "NVIDIA H20: zangshuxian.com/new/674733024499207168; willitrunai.com/gpus/h20-96gb (NVLink)"
_L20 = "NVIDIA L20: xlite-dev/LeetCUDA, kernels/hgemm (FP16; TF32 has half); topcpu.net, A40 PCIe vs L20"
_ADA_CARDS = f"{_ADA}; cores x boost clock of the product page"
_PRO = "NVIDIA RTX Blackwell PRO GPU architecture white paper (Workstation Edition)"

DEVICES: dict[str, Device] = {
    "P100-16GB": _device(16276, (6, 0), 18.7, 9.3, 9.3, 732, _PCIE3, _PCIE3, _P100),
    "V100-16GB": _device(16160, (7, 0), 125, 15.7, 15.7, 900, 150, _PCIE3, _V100),
    "V100-32GB": _device(32510, (7, 0), 125, 15.7, 15.7, 900, 150, _PCIE3, _V100),
    "T4-16GB": _device(15360, (7, 5), 65, 8.1, 8.1, 300, _PCIE3, _PCIE3, "NVIDIA T4 data sheet"),
    "RTX2080Ti-11GB": _device(11264, (7, 5), 53.8, 13.4, 13.4, 616, _PCIE3, _PCIE3, _TURING),
    "A100-40GB": _device(40960, (8, 0), 312, 156, 19.5, 1555, 300, _PCIE4, _A100),
    "A100-80GB": _device(81920, (8, 0), 312, 156, 19.5, 2039, 300, _PCIE4, _A100),
    "A800-80GB": _device(81920, (8, 0), 312, 156, 19.5, 2039, 200, _PCIE4, _A800),
    "A30-24GB": _device(24576, (8, 0), 165, 82, 10.3, 933, _PCIE4, _PCIE4, "NVIDIA A30 data sheet"),
    "A10-24GB": _device(23028, (8, 6), 125, 62.5, 31.2, 600, _PCIE4, _PCIE4, "NVIDIA A10 data sheet"),
    "A10G-24GB": _device(23028, (8, 6), 70, 35, 31.5, 600, _PCIE4, _PCIE4, "NVIDIA A10G data sheet"),
    "A40-48GB": _device(46068, (8, 6), 149.7, 74.8, 37.4, 696, _PCIE4, _PCIE4, "NVIDIA A40 data sheet"),
    "A6000-48GB": _device(49140, (8, 6), 154.8, 77.4, 38.7, 768, _PCIE4, _PCIE4, _A6000),
    "RTX3090-24GB": _device(24576, (8, 6), 71, 35.6, 35.6, 936, _PCIE4, _PCIE4, _GA102),
    "RTX4070-12GB": _device(12282, (8, 9), 58.3, 29.1, 29.1, 504, _PCIE4, _PCIE4, _ADA_CARDS),
    "RTX4070TiSuper-16GB": Device(16376 * MIB, (8, 9), None),
    "RTX4080-16GB": _device(16376, (8, 9), 97.5, 48.7, 48.7, 717, _PCIE4, _PCIE4, _ADA),
    "RTX4090-24GB": _device(24564, (8, 9), 165.2, 82.6, 82.6, 1008, _PCIE4, _PCIE4, _ADA),
    "L4-24GB": _device(23034, (8, 9), 121, 60, 30.3, 300, _PCIE4, _PCIE4, "NVIDIA L4 data sheet"),
    "L20-48GB": _device(46068, (8, 9), 119.5, 59.75, 59.35, 864, _PCIE4, _PCIE4, _L20),
    "L40S-48GB": _device(46068, (8, 9), 362, 183, 91.6, 864, _PCIE4, _PCIE4, "NVIDIA L40S data sheet"),
    "H100-80GB": _device(81559, (9, 0), 989, 494.7, 67, 3350, 450, _PCIE5, _H100),
    "H800-80GB": _device(81559, (9, 0), 989, 494.7, 67, 3350, 200, _PCIE5, _H800),
    "H20-96GB": _device(97871, (9, 0), 148, 74, 44, 4000, 450, _PCIE5, _H20),
    "GH200-96GB": _device(97871, (9, 0), 989, 494, 67, 4000, 450, _C2C, "NVIDIA GH200 data sheet"),
    "H200-141GB": _device(143771, (9, 0), 989, 494.7, 67, 4800, 450, _PCIE5, "NVIDIA H200 data sheet"),
    "B200-180GB": _device(183359, (10, 0), 2250, 1125, 75, 7700, 900, _PCIE5, "NVIDIA HGX B200 data sheet"),
    "GB200-186GB": _device(
        189471, (10, 0), 2500, 1250, 80, 8000, 900, _C2C / 2, "NVIDIA GB200 NVL72 data sheet"
    ),
    "B300-288GB": _device(275040, (10, 3), 2250, 1125, 75, 8000, 900, _PCIE5, "NVIDIA HGX B300 data sheet"),
    "RTX5080-16GB": _device(16303, (12, 0), 112.6, 56.3, 56.3, 960, _PCIE5, _PCIE5, _BLACKWELL),
    "RTX5090-32GB": _device(32607, (12, 0), 209.5, 104.8, 104.8, 1792, _PCIE5, _PCIE5, _BLACKWELL),
    "RTXPRO6000-96GB": _device(97887, (12, 0), 503.8, 251.9, 126, 1792, _PCIE5, _PCIE5, _PRO),
    "MI300X-192GB": _capacity(196592),
    "MI325X-256GB": _capacity(262128),
}
"""Published figures, none measured by this project. Peaks are dense: of figures with structured sparsity,
half. Where a name has several boards, the fastest. Cards that a bridge can join in pairs (A30, A40, A6000,
RTX 3090) are counted without it. The bytes of the devices without a data sheet are from public output of
nvidia-smi and amd-smi."""

# Six digits, so that nothing computed from them overflows.
_NOTATION = r"(?:(?P<a>[0-9]{1,6})x)?(?:(?P<b>[0-9]{1,6})x)?(?P<device>[A-Za-z0-9-]{1,40})"
_UNNAMED = r"0*([1-9][0-9]{0,5})GB"


def device_facts(name: str, place: str | None = None) -> tuple[str, int | None, tuple[int, int] | None]:
    """Canonical name, bytes and compute capability of a device.

    RecipeError for an unknown name; `place`: the option or key that has it.
    """
    if name.lower() == "cpu":
        return "cpu", None, None
    if match := re.fullmatch(_UNNAMED, name, re.IGNORECASE):
        # Decimal gigabytes: an unnamed "24GB" device promises no more than that.
        return f"{match[1]}GB", int(match[1]) * 10**9, None
    plain = name.lower()
    same_family = [d for d in DEVICES if d.lower().startswith(f"{plain}-")]
    found = [d for d in DEVICES if d.lower() == plain] or same_family
    if len(found) != 1:
        import difflib

        near = same_family or difflib.get_close_matches(name, DEVICES, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(DEVICES)}"
        message = f"no device {name!r} in the catalogue"
        raise RecipeError(Problem("unknown-device", message, path=place, hint=hint))
    device = DEVICES[found[0]]
    return found[0], device.bytes, device.capability


def is_capacity_only(hardware: Hardware) -> bool:
    """Whether this is a device of the catalogue that is no CUDA device."""
    device = DEVICES.get(hardware.device)
    return device is not None and device.capability is None


def parse_hardware(text: str, place: str | None = None) -> Hardware:
    """Read `8xA100-80GB`, `2x8xH100-80GB` (nodes x devices x device), `cpu`, `2xcpu`, `1x24GB`.

    RecipeError for anything else; `place`: the option that has it.
    """
    match = re.fullmatch(_NOTATION, text.strip())
    if match is None:
        message = f"cannot read hardware {text!r}: expected [NODESx]DEVICESxDEVICE"
        hint = "e.g. 8xA100-80GB, 2x8xH100-80GB, 1x24GB, cpu or 2xcpu"
        raise RecipeError(Problem("bad-hardware", message, path=place, hint=hint))
    first, second = match["a"], match["b"]
    nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
    if nodes < 1 or devices < 1:
        message = f"hardware {text!r} needs at least one node and one device"
        raise RecipeError(Problem("bad-hardware", message, path=place))
    name, size, capability = device_facts(match["device"], place)
    return Hardware(nodes, devices, name, size, capability)


def with_host_memory(hardware: Hardware, host_bytes: int | None) -> Hardware:
    """A CPU's `device_bytes` is its share of the host's memory, where that is known."""
    if not hardware.is_cpu or host_bytes is None:
        return hardware
    return replace(hardware, device_bytes=host_bytes // hardware.devices_per_node)


UNNAMED = Figures(100 * T, 50 * T, 25 * T, 600 * G, 32 * G, 32 * G, "placeholder, not published")
"""For a device that is not in the catalogue: plans are ranked with it, never timed."""
A_CPU = Figures(1 * T, 1 * T, 1 * T, 200 * G, 10 * G, 10 * G, "placeholder, not published")
"""The same for a processor."""
CORE_MEMORY = 12 * G
"""Assumption: memory bandwidth that one core can use, bytes/s."""
SOCKET_MEMORY = 200 * G
"""Assumption: the same for all cores together."""


def figures_of(
    hardware: Hardware, processor: Processor | None = None, cores: int = 1
) -> tuple[Figures, bool]:
    """The device's figures, and whether they are its own (False: a placeholder's).

    `processor`: this machine's, where the plan is for it; `cores`: shared by its processes.
    """
    if not hardware.is_cpu:
        found = DEVICES.get(hardware.device)
        figures = None if found is None else found.figures
        return (UNNAMED, False) if figures is None else (figures, True)
    if processor is None:
        return A_CPU, False
    own = cores / hardware.devices_per_node  # other processes are reached through memory
    memory = min(own * CORE_MEMORY, SOCKET_MEMORY / hardware.devices_per_node)
    single, half = own * processor.single, own * processor.half
    return Figures(half, single, single, memory, memory, memory, f"counted: {processor.name}"), True


HIGHEST_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
"""kHz."""
CPUINFO = Path("/proc/cpuinfo")

_SINGLE = (("avx512f", 64), ("avx2", 32), ("avx", 16))
"""Flag -> fp32 operations per core and cycle: two units of so many lanes, a multiply-add is two."""
_PLAIN = 8
"""SSE: four lanes in two units, one adds and one multiplies."""
_HALF = (("amx_bf16", 1024), ("avx512_bf16", 128))
"""The same of bf16 products with fp32 sums; AMX: 16 x 16 x 32 multiply-adds in 16 cycles."""
_EMULATED = 1 / 4
"""Share of the fp32 rate without bf16 units: operands are widened before each product."""


@dataclass(frozen=True, slots=True)
class Processor:
    """One core's peaks in operations/s: counted (units times clock), not measured."""

    single: float
    """fp32 products."""
    half: float
    """bf16 products with fp32 sums."""
    name: str
    """The vector or matrix units that were counted, e.g. `avx512f, amx_bf16 at 2.7 GHz`."""


def probe_processor() -> Processor | None:
    """This machine's processor; None where /proc/cpuinfo lacks its clock or flags."""
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

    hertz: its highest clock where known; /proc/cpuinfo has the current clock, low on an idle core.
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
