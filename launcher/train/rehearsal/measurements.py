"""What the ranks of a rehearsal measure: devices, the network between them, and a save.

All ranks call the public functions in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from launcher.machine.hardware import AMPERE
from launcher.plan.rehearsal import LEAST_SHARE, SHARE, Rehearsal
from launcher.train.collectives import of_all

WIDTH = {"cuda": 8192, "cpu": 512}
"""Of the square matrices: large enough to be limited by arithmetic, not by memory."""
SECONDS = {"cuda": 3.0, "cpu": 1.0}
"""A device that throttles does so under load, within seconds. A CPU's cores are shared with other work."""
CHUNK_S = 0.05
"""Duration of a chunk of products that is timed."""
STEP_S = 0.02
"""Work of a step in which the ranks wait for one another."""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(device: torch.device) -> Callable[[int], None]:
    """A function that multiplies two matrices so many times; it does not wait for a GPU."""
    width, dtype = WIDTH[device.type], torch.float32
    if device.type == "cuda":  # a type that tensor cores multiply
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= AMPERE else torch.float16
    left = torch.full((width, width), 0.5, dtype=dtype, device=device)
    right = torch.full((width, width), 2.0 / width, dtype=dtype, device=device)
    out = torch.empty_like(left)

    def run(count: int) -> None:
        for _ in range(count):
            torch.matmul(left, right, out=out)

    return run


def speed(device: torch.device) -> dict[str, Any]:
    """FLOP/s of this rank's device, by products of fixed matrices: the median and the best chunk."""
    run = _products(device)
    _seconds(run, 1, device)  # the first product loads kernels
    once = _seconds(run, 2, device) / 2
    count = max(1, min(1000, int(CHUNK_S / max(once, 1e-6))))
    times: list[float] = []
    until = time.monotonic() + SECONDS[device.type]
    while time.monotonic() < until or len(times) < 3:
        times.append(_seconds(run, count, device) / count)
    work = 2.0 * WIDTH[device.type] ** 3
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device": str(device),
        "flops": work / median(times),
        "best_flops": work / min(times),
        "step_products": max(1, int(STEP_S / median(times))),
    }


def _seconds(run: Callable[[int], None], count: int, device: torch.device) -> float:
    """Seconds of `count` products, by the device's own clock if it has one."""
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


FIRST = 64 * 2**10
"""Bytes of the first message, before a size is known to be fast."""
GROWTH = 8
"""Ratio of two messages, up to the requested size."""
QUICK_S, ATTEMPTS = 0.1, 3
LEAST_MESSAGES = 4
"""A size of which fewer fit into its time is replaced by a smaller one."""
BLOCK_S = 0.5
"""Interval at which the ranks agree whether the time is over."""
MOST_MESSAGES = 1000
PINGS = 20
LINK_S, BLOCKS = 0.05, 4
"""Duration of a block on a link; the best of BLOCKS counts, since other work only slows one down."""
SMALLEST_BLOCK, LARGEST_BLOCK = 256 * 2**10, 64 * 2**20
"""Bytes: a smaller block would fit into the buffers on the way."""
ROUNDS = 15
"""Partners of an end at most; with more nodes not all links are measured."""
REPEATS = 2
"""Times that every link is measured; the best counts, since a disturbance is over the second time."""
STEPS = 12
"""Steps of equal work on all ranks, each followed by an all-reduce."""


def all_reduce(device: torch.device, sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Sums over all ranks, size by size, for `seconds` in total: time per message, and if it is right."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    for number, asked in enumerate(sizes):
        # One clock for all: with clocks of their own, one rank would send a message more than the others.
        (left,) = _largest([until - time.monotonic()], device)
        row = _one_size(device, asked, left / (len(sizes) - number))
        if rows and row["bytes"] <= rows[-1]["bytes"]:
            rows[-1]["asked_bytes"] = asked  # the same measurement as the one before
        else:
            rows.append(row)
        if row["bytes"] < asked:
            break  # larger ones would take even longer
    return rows


def _one_size(device: torch.device, asked: int, seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    size, each, right = _affordable(device, asked, seconds)
    message = torch.zeros(size // 4, device=device)
    times: list[float] = []
    while True:
        count = max(1, min(MOST_MESSAGES, int(BLOCK_S / max(each, 1e-6))))
        times += [_timed(message, device) for _ in range(count)]
        gone, each = _largest([time.monotonic() - begun, median(times[-count:])], device)
        if gone >= seconds:
            break
    ranks = dist.get_world_size()
    return {
        "bytes": size,
        "asked_bytes": asked,
        "count": len(times),
        "median_s": median(times),
        "min_s": min(times),
        "max_s": max(times),
        # 2(n-1)/n of a message pass through each rank's link, whatever the algorithm.
        "bus_bytes_per_s": size / median(times) * 2 * (ranks - 1) / ranks,
        "right": all(of_all(right)),
    }


def _affordable(device: torch.device, asked: int, seconds: float) -> tuple[int, float, bool]:
    """(bytes, seconds of one message, whether its sum was right): the requested size, or the largest of which
    a few fit into the time, found by growing messages."""
    size = min(asked, FIRST)
    while True:
        message = torch.ones(size // 4, device=device)
        _timed(message, device)  # connections are made, and NCCL chooses an algorithm
        right = bool((message == dist.get_world_size()).all().item())
        message.zero_()
        (each,) = _largest([_timed(message, device)], device)
        if each < QUICK_S:  # it may have waited for a core
            (each,) = _largest([min(_timed(message, device) for _ in range(ATTEMPTS))], device)
        larger = min(asked, size * GROWTH)
        if size == asked or each * (larger / size) * LEAST_MESSAGES > seconds:
            return size, each, right
        size = larger


def _timed(message: torch.Tensor, device: torch.device) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    dist.all_reduce(message)
    _synchronize(device)
    return time.perf_counter() - begun


def _largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks."""
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [float(value) for value in reduced.tolist()]


def _pairings(ends: Sequence[int], rounds: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds in which every end has one partner (or none, if their number is odd), another one each time."""
    circle: list[int | None] = [*ends, *([None] if len(ends) % 2 else [])]
    found = []
    for _ in range(min(len(circle) - 1, rounds)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def links(device: torch.device, ends: Sequence[int]) -> list[dict[str, Any]]:
    """Both directions of the links between `ends` (ranks); the pairs of a round are measured at once."""
    me, own = dist.get_rank(), []
    for pairs in _pairings(ends) * REPEATS:
        dist.barrier()
        for first, second in pairs:
            if me in (first, second):
                own += _pair(device, first, second)
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for link in (link for of_rank in of_all(own) for link in of_rank):
        before = best.setdefault((link["from"], link["to"]), link)
        before["bytes_per_s"] = max(before["bytes_per_s"], link["bytes_per_s"])
        before["latency_s"] = min(before["latency_s"], link["latency_s"])
    return list(best.values())


def _pair(device: torch.device, first: int, second: int) -> list[dict[str, Any]]:
    """This rank's measurement of the link: the direction in which it sends."""
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
    """Seconds of a small message: half of the fastest round trip."""
    message = torch.zeros(2, device=device)
    times = []
    for _ in range(PINGS):
        _synchronize(device)
        begun = time.perf_counter()
        for turn in (begins, not begins):
            dist.send(message, peer) if turn else dist.recv(message, peer)
        _synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:]) / 2


def _one_way(device: torch.device, peer: int, *, sends: bool) -> float | None:
    """Bytes per second from one rank to the other, the best of some blocks; None for the receiver."""
    probe = torch.zeros(SMALLEST_BLOCK // 4, device=device)
    _block(probe, peer, device, sends=sends)
    wanted = SMALLEST_BLOCK / _block(probe, peer, device, sends=sends) * LINK_S
    bytes_ = int(min(max(wanted, SMALLEST_BLOCK), LARGEST_BLOCK)) // 4 * 4
    size = torch.tensor([bytes_], dtype=torch.int64, device=device)
    dist.send(size, peer) if sends else dist.recv(size, peer)
    block = torch.zeros(int(size.item()) // 4, device=device)
    times = [_block(block, peer, device, sends=sends) for _ in range(BLOCKS)]
    return block.numel() * 4 / min(times) if sends else None


def _block(block: torch.Tensor, peer: int, device: torch.device, *, sends: bool) -> float:
    """Seconds of one block, until the other side has acknowledged it."""
    acknowledgement = torch.zeros(2, device=device)
    _synchronize(device)
    begun = time.perf_counter()
    if sends:
        dist.send(block, peer)
        dist.recv(acknowledgement, peer)
    else:
        dist.recv(block, peer)
        _synchronize(device)
        dist.send(acknowledgement, peer)
    _synchronize(device)
    return time.perf_counter() - begun


def waiting(device: torch.device, count: int) -> list[dict[str, Any]]:
    """Steps of equal work on every rank: by rank the medians of its work and of its wait for the others, and
    in how many steps it waited least, so that all others waited for it."""
    message = torch.zeros(256, device=device)
    work, wait = [], []
    run = _products(device)
    for _ in range(STEPS + 2):
        dist.all_reduce(message)
        _synchronize(device)
        begun = time.perf_counter()
        run(count)
        _synchronize(device)
        worked = time.perf_counter()
        dist.all_reduce(message)
        _synchronize(device)
        work.append(worked - begun)
        wait.append(time.perf_counter() - worked)
    work, wait = work[2:], wait[2:]  # the first steps load kernels
    waits = of_all(wait)
    last = [min(range(len(waits)), key=lambda r: waits[r][step]) for step in range(STEPS)]
    medians = of_all((median(work), median(wait)))
    return [
        {"rank": r, "work_s": w, "wait_s": s, "last_in": last.count(r), "steps": STEPS}
        for r, (w, s) in enumerate(medians)
    ]


CHUNK = 8 * 2**20
WRITE_S = 60.0
"""A rank stops writing after this time: its speed is known."""
SEEN_S = 15.0
"""Time until the file of another node must be seen: NFS caches what it knows of a folder."""
READ = 64 * 2**20
"""Bytes of another node's file that are read and compared."""
SHARE_OF_FREE = 4
"""All ranks together write at most this part (a quarter) of the free disk space."""


def save(planned: Rehearsal, folder: Path, ranks: Sequence[dict[str, Any]], me: int) -> list[dict[str, Any]]:
    """Every rank writes its share of a checkpoint where the run would, and reads what another node wrote.

    An error of the disk is recorded, and never keeps the other ranks waiting. ranks: as `introduce` describes
    them.
    """
    mine = folder / SHARE.format(me)
    row: dict[str, Any] = {"rank": me, "full_bytes": planned.share(me), "error": None}
    try:
        size = min(of_all(_most(planned, folder, len(ranks))))  # by the fullest disk
        of_all(None)  # all write at the same time, as for a checkpoint
        row |= _write(mine, max(LEAST_SHARE, min(size, planned.share(me))))
        row |= _look(folder, of_all(row), ranks, me)
        of_all(None)  # nobody removes what another one still reads
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    return of_all(row)


def _most(planned: Rehearsal, folder: Path, ranks: int) -> int:
    """Most bytes that a rank may write here."""
    try:
        free = os.statvfs(folder)
    except OSError:
        return LEAST_SHARE
    return max(LEAST_SHARE, min(planned.cap_bytes, free.f_bavail * free.f_frsize // (SHARE_OF_FREE * ranks)))


def _write(path: Path, size: int) -> dict[str, Any]:
    """Write and sync; bytes, seconds, digest of the file's beginning, and seconds per byte of hashing."""
    piece = os.urandom(min(CHUNK, size))  # no disk can compress it
    digest, done = hashlib.sha256(), 0
    begun = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            while done < size and time.perf_counter() - begun < WRITE_S:
                part = piece[: size - done]
                part = part[: file.write(part)]
                digest.update(part[: max(0, READ - done)])
                done += len(part)
            os.fsync(file.fileno())
    except OSError as error:
        return {"error": f"{error.strerror or error} ({path})", "bytes": done, "seconds": None, "sha256": ""}
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    hashlib.sha256(piece).digest()
    hash_s = (time.perf_counter() - begun) / max(1, len(piece))
    return {"bytes": done, "seconds": seconds, "sha256": digest.hexdigest(), "hash_s": hash_s}


def _look(
    folder: Path, written: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]], me: int
) -> dict[str, Any]:
    """Which files of other nodes this rank does not see, and what it read of one of them."""
    nodes = [(facts["node"], facts["host"]) for facts in ranks]
    others = [row["rank"] for row in written if row["error"] is None and row["rank"] != me]
    elsewhere = [number for number in others if nodes[number] != nodes[me]]
    firsts = list({nodes[number]: number for number in reversed(elsewhere)}.values())
    seen_after, unseen = _await(folder, sorted(firsts))
    candidates = [number for number in (elsewhere or others) if number not in unseen]
    after = [number for number in candidates if number > me]
    chosen = (after or candidates or [None])[0]  # the next one, so that not all read the same file
    read = None if chosen is None else _read(folder, written[chosen])
    return {"unseen": sorted(unseen), "seen_after_s": seen_after, "read": read}


def _await(folder: Path, ranks: Sequence[int]) -> tuple[float, set[int]]:
    """(seconds until the last file was seen, ranks whose file was not)."""
    begun, unseen, after = time.monotonic(), set(ranks), 0.0
    while unseen and time.monotonic() - begun < SEEN_S:
        try:
            # A listing asks the file server again, while a single name may be cached.
            names = {path.name for path in folder.iterdir()}
        except OSError:
            names = set()
        found = {number for number in unseen if SHARE.format(number) in names}
        if found:
            unseen, after = unseen - found, time.monotonic() - begun
        if unseen:
            time.sleep(0.2)
    return after, unseen


def _read(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Read another rank's file: whether it is complete and right, and how fast that was."""
    path, digest, done = folder / SHARE.format(row["rank"]), hashlib.sha256(), 0
    begun, spent = time.perf_counter(), 0.0
    try:
        with path.open("rb", buffering=0) as file:
            while done < READ and (part := file.read(CHUNK)):
                spent += time.perf_counter() - begun
                digest.update(part[: READ - done])
                done += len(part)
                begun = time.perf_counter()
            complete = os.fstat(file.fileno()).st_size == row["bytes"]
    except OSError as error:
        return {"rank": row["rank"], "right": False, "bytes_per_s": None, "error": error.strerror}
    right = complete and digest.hexdigest() == row["sha256"]
    return {"rank": row["rank"], "right": right, "bytes_per_s": done / max(spent, 1e-9), "error": None}
