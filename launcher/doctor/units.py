"""Amounts and times as networks and disks are sold: powers of ten. Pure."""

from __future__ import annotations


def amount(size: float) -> str:
    """Bytes for people."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size:.0f} B"


def rate(value: float) -> str:
    return f"{amount(value)}/s"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
