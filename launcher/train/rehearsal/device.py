"""How fast a rank's device computes: products of fixed matrices, so that a throttled one stands out."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

WIDTH = {"cuda": 8192, "cpu": 512}
"""Of the square matrices: large enough to be bound by arithmetic, not by memory."""
SECONDS = {"cuda": 3.0, "cpu": 1.0}
"""A device that throttles does so under load, within seconds. A CPU's cores are shared with other work."""
CHUNK_S = 0.05
"""Products are timed in chunks of about so long."""
STEP_S = 0.02
"""Work of a step in which the ranks wait for one another."""


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was told; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def products(device: torch.device) -> Callable[[int], None]:
    """A function that multiplies two matrices so many times; it does not wait for a GPU."""
    width, dtype = WIDTH["cuda" if device.type == "cuda" else "cpu"], _dtype(device)
    left = torch.full((width, width), 0.5, dtype=dtype, device=device)
    right = torch.full((width, width), 2.0 / width, dtype=dtype, device=device)
    out = torch.empty_like(left)

    def run(count: int) -> None:
        for _ in range(count):
            torch.matmul(left, right, out=out)

    return run


def _dtype(device: torch.device) -> torch.dtype:
    """What tensor cores multiply where there are any: bf16 from Ampere on, else fp16."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def speed(device: torch.device) -> dict[str, Any]:
    """Operations a second of this rank's device: the median of its chunks and the best one."""
    run = products(device)
    width = WIDTH["cuda" if device.type == "cuda" else "cpu"]
    once = _seconds(run, 1, device)
    once = _seconds(run, 2, device) / 2  # the first product loads kernels
    count = max(1, min(1000, int(CHUNK_S / max(once, 1e-6))))
    times: list[float] = []
    until = time.monotonic() + SECONDS["cuda" if device.type == "cuda" else "cpu"]
    while time.monotonic() < until or len(times) < 3:
        times.append(_seconds(run, count, device) / count)
    work = 2.0 * width**3
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device": str(device),
        "flops": work / median(times),
        "best_flops": work / min(times),
        "step_products": max(1, int(STEP_S / median(times))),
    }


def _seconds(run: Callable[[int], None], count: int, device: torch.device) -> float:
    """Seconds of `count` products, by the device's own clock where it has one."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run(count)
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        run(count)
        end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1000
