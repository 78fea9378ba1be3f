"""What a rehearsal measures between its ranks: all-reduce, links in both directions, and who waits for whom.

Every function is called by all ranks alike, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from launcher.train.rehearsal.device import products, synchronize
from launcher.train.together import of_all

FIRST = 64 * 2**10
"""Bytes of the first message of a size that is not known to be fast."""
GROWTH = 8
"""From one message to the next one, until the size that is asked for."""
QUICK_S, TRIES = 0.1, 3
LEAST_MESSAGES = 4
"""A size of which fewer fit into its time is measured with smaller messages instead."""
BLOCK_S = 0.5
"""The ranks agree so often whether the time is over."""
MOST_MESSAGES = 1000
PINGS = 20
LINK_S = 0.05
"""So long a block of a link takes about; of BLOCKS the best one counts, since other work only slows one."""
BLOCKS = 4
SMALLEST_BLOCK, LARGEST_BLOCK = 256 * 2**10, 64 * 2**20
"""Bytes: what queues on the way take in at once is no speed."""
ROUNDS = 15
"""Partners of an end at most: of more machines each measures so many links, not all."""
REPEATS = 2
"""Times that every link is measured, the best of which counts: what slows one is over the second time."""
STEPS = 12
"""Steps of the same work on all ranks, each with an all-reduce behind it."""


def all_reduce(device: torch.device, sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Sums over all ranks, size by size, for `seconds` in all: how long a message took, and was it right."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    for number, asked in enumerate(sizes):
        # One clock for all: who counted for itself would send a message more than the others.
        (left,) = _most([until - time.monotonic()], device)
        row = _one_size(device, asked, left / (len(sizes) - number))
        if rows and row["bytes"] <= rows[-1]["bytes"]:
            rows[-1]["asked_bytes"] = asked  # says nothing more than the one before
        else:
            rows.append(row)
        if row["bytes"] < asked:
            break  # larger ones would take longer still
    return rows


def _one_size(device: torch.device, asked: int, seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    size, each, right = _affordable(device, asked, seconds)
    message = torch.zeros(size // 4, device=device)
    times: list[float] = []
    while True:
        count = max(1, min(MOST_MESSAGES, int(BLOCK_S / max(each, 1e-6))))
        times += [_timed(message, device) for _ in range(count)]
        gone, each = _most([time.monotonic() - begun, median(times[-count:])], device)
        if gone >= seconds:
            break
    ranks = dist.get_world_size()
    middle = median(times)
    return {
        "bytes": size,
        "asked_bytes": asked,
        "count": len(times),
        "median_s": middle,
        "min_s": min(times),
        "max_s": max(times),
        "bus_bytes_per_s": bus_bandwidth(size, middle, ranks),
        "right": all(of_all(right)),
    }


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second on each rank's link: 2(n-1)/n of a message pass there, whatever the algorithm."""
    return size / seconds * 2 * (ranks - 1) / ranks


def _affordable(device: torch.device, asked: int, seconds: float) -> tuple[int, float, bool]:
    """(bytes, seconds of one message, whether its sum was right): the size that was asked for, or the largest
    of which a few fit into the time, as the ranks find by growing messages."""
    size = min(asked, FIRST)
    while True:
        message = torch.ones(size // 4, device=device)
        _timed(message, device)  # connections are made, and NCCL chooses an algorithm
        right = bool((message == dist.get_world_size()).all().item())
        message.zero_()
        (each,) = _most([_timed(message, device)], device)
        if each < QUICK_S:  # one message of a few may have waited for a core
            (each,) = _most([min(_timed(message, device) for _ in range(TRIES))], device)
        larger = min(asked, size * GROWTH)
        if size == asked or each * (larger / size) * LEAST_MESSAGES > seconds:
            return size, each, right
        size = larger


def _timed(message: torch.Tensor, device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    dist.all_reduce(message)
    synchronize(device)
    return time.perf_counter() - begun


def _most(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of every value over all ranks."""
    told = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return [float(value) for value in told.tolist()]


def pairings(ends: Sequence[int], rounds: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds in which every end has one partner (or none, where their number is odd); over all rounds each
    meets every other once, or as many others as there are rounds."""
    circle: list[int | None] = [*ends, *([None] if len(ends) % 2 else [])]
    found = []
    for _ in range(min(len(circle) - 1, rounds)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def links(device: torch.device, ends: Sequence[int]) -> list[dict[str, Any]]:
    """Both directions of the links between `ends` (ranks); pairs of a round are measured at the same time."""
    me, own = dist.get_rank(), []
    for pairs in pairings(ends) * REPEATS:
        dist.barrier()
        for first, second in pairs:
            if me in (first, second):
                own += _pair(device, first, second)
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for link in (link for told in of_all(own) for link in told):
        before = best.setdefault((link["from"], link["to"]), link)
        before["bytes_per_s"] = max(before["bytes_per_s"], link["bytes_per_s"])
        before["latency_s"] = min(before["latency_s"], link["latency_s"])
    return list(best.values())


def _pair(device: torch.device, first: int, second: int) -> list[dict[str, Any]]:
    """What this rank measured of the link: the way on which it sends."""
    me = dist.get_rank()
    peer = second if me == first else first
    latency = _latency(device, peer, begins=me == first)
    found = []
    for sender in (first, second):
        rate = _one_way(device, peer, sends=me == sender)
        if rate is not None:
            found.append({"from": me, "to": peer, "bytes_per_s": rate, "latency_s": latency})
    return found


def _latency(device: torch.device, peer: int, *, begins: bool) -> float:
    """Seconds of one way of a small message: half of the fastest of some there and back."""
    word = torch.zeros(2, device=device)
    times = []
    for _ in range(PINGS):
        synchronize(device)
        begun = time.perf_counter()
        for turn in (begins, not begins):
            dist.send(word, peer) if turn else dist.recv(word, peer)
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:]) / 2


def _one_way(device: torch.device, peer: int, *, sends: bool) -> float | None:
    """Bytes a second from one rank to the other, the best of some blocks: the sender's word, else None."""
    probe = torch.zeros(SMALLEST_BLOCK // 4, device=device)
    _block(probe, peer, device, sends=sends)
    seconds = _block(probe, peer, device, sends=sends)
    rate = SMALLEST_BLOCK / seconds
    size = torch.tensor([_block_bytes(rate * LINK_S)], dtype=torch.int64, device=device)
    dist.send(size, peer) if sends else dist.recv(size, peer)
    block = torch.zeros(int(size.item()) // 4, device=device)
    times = [_block(block, peer, device, sends=sends) for _ in range(BLOCKS)]
    return block.numel() * 4 / min(times) if sends else None


def _block_bytes(wanted: float) -> int:
    return int(min(max(wanted, SMALLEST_BLOCK), LARGEST_BLOCK)) // 4 * 4


def _block(block: torch.Tensor, peer: int, device: torch.device, *, sends: bool) -> float:
    """Seconds of one block, until the other side has said that it has it."""
    word = torch.zeros(2, device=device)
    synchronize(device)
    begun = time.perf_counter()
    if sends:
        dist.send(block, peer)
        dist.recv(word, peer)
    else:
        dist.recv(block, peer)
        synchronize(device)
        dist.send(word, peer)
    synchronize(device)
    return time.perf_counter() - begun


def waiting(device: torch.device, count: int) -> list[dict[str, Any]]:
    """Steps of the same work on every rank: medians of its work and of its wait for the others, by rank; and
    in how many of the steps it waited least, so that all others waited for it."""
    word = torch.zeros(256, device=device)
    work, wait = [], []
    run = products(device)
    for _ in range(STEPS + 2):
        dist.all_reduce(word)
        synchronize(device)
        begun = time.perf_counter()
        run(count)
        synchronize(device)
        worked = time.perf_counter()
        dist.all_reduce(word)
        synchronize(device)
        work.append(worked - begun)
        wait.append(time.perf_counter() - worked)
    work, wait = work[2:], wait[2:]  # the first steps set kernels up
    waits = of_all(wait)
    last = [min(range(len(waits)), key=lambda r: waits[r][step]) for step in range(STEPS)]
    medians = of_all((median(work), median(wait)))
    return [
        {"rank": r, "work_s": w, "wait_s": s, "last_in": last.count(r), "steps": STEPS}
        for r, (w, s) in enumerate(medians)
    ]
