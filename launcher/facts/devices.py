"""How fast the devices of the catalogue are, by their vendor's published figures. Pure.

Peaks are dense: where a data sheet gives figures with structured sparsity, half of them stands here.
Nothing of this was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.hardware import Hardware
from launcher.facts.processor import Processor

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
