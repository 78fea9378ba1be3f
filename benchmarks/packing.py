"""How fast lengths are packed and how full the packs are, beside trl's own best-fit decreasing.

    python benchmarks/packing.py            the table
    python benchmarks/packing.py --check    exit 1 below a million lengths/s or a fill of 99.5 %

The lengths are a million draws of lognormal(6, 1), seed 0, clipped to the pack. The targets hold for
packs of 2048 tokens. trl packs a table of tokens, not lengths: its time includes moving one byte a token.
The two are compared by processor time, which other load on the machine hardly changes.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from comparison import exit_status
from runner import parser_of

from launcher.train.data.batches import pack_lengths

ROWS = 1_000_000
TARGET_LENGTH = 2048
OTHER_LENGTHS = (1000, 4096, 100_000)
LENGTHS_PER_SECOND = 1e6
FILL = 0.995


def draw(max_length: int) -> Any:
    """Lengths in tokens, int64 [ROWS], of 1 to max_length."""
    drawn = np.random.default_rng(0).lognormal(6, 1, ROWS)
    return np.clip(drawn, 1, max_length).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Measured:
    """Lengths per second of the wall clock and of processor time, and the packs made."""

    wall: float
    cpu: float
    fill: float
    packs: int


def ours(max_length: int, rounds: int) -> Measured:
    """Medians over the rounds."""
    lengths = draw(max_length)
    packs = pack_lengths(lengths, max_length)  # the first call also pays for lazy imports of numpy
    wall, cpu = [], []
    for _ in range(rounds):
        start, start_cpu = time.perf_counter(), time.process_time()
        packs = pack_lengths(lengths, max_length)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    fill = float(lengths.sum()) / (len(packs) * max_length)
    return Measured(ROWS / statistics.median(wall), ROWS / statistics.median(cpu), fill, len(packs))


def trl_bfd(max_length: int) -> Measured:
    """One run of `trl.pack_dataset`, all rows in one batch: by default it packs 1000 rows at a time."""
    import datasets
    import pyarrow as pa
    import trl

    datasets.disable_progress_bars()
    lengths = draw(max_length)
    offsets = np.zeros(ROWS + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    rows = datasets.Dataset(pa.table({"input_ids": tokens}))
    options = {"batch_size": None, "keep_in_memory": True, "new_fingerprint": "benchmark"}
    start, start_cpu = time.perf_counter(), time.process_time()
    packed = trl.pack_dataset(rows, seq_length=max_length, strategy="bfd", map_kwargs=options)
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return Measured(ROWS / wall, ROWS / cpu, float(lengths.sum() / (len(packed) * max_length)), len(packed))


def show(name: str, max_length: int, found: Measured, note: str = "") -> None:
    print(
        f"{name:<14}{max_length:>11,}{found.wall:>13,.0f}{found.cpu:>15,.0f}"
        f"{found.fill:>10.3%}{found.packs:>10,}  {note}".rstrip()
    )


def main() -> int:
    parser = parser_of(__doc__, "check")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each length (default 5)")
    parser.add_argument("--ours", action="store_true", help="leave trl out")
    options = parser.parse_args()

    print(f"{'packer':<14}{'max_length':>11}{'lengths/s':>13}{'per CPU s':>15}{'fill':>10}{'packs':>10}")
    found = ours(TARGET_LENGTH, options.rounds)
    show("pack_lengths", TARGET_LENGTH, found, f"target {LENGTHS_PER_SECOND:,.0f}/s, {FILL:.1%}")
    if not options.ours:
        other = trl_bfd(TARGET_LENGTH)
        show(
            "trl bfd", TARGET_LENGTH, other, f"pack_lengths takes {found.cpu / other.cpu:.0f}x less CPU time"
        )
    for max_length in OTHER_LENGTHS:
        show("pack_lengths", max_length, ours(max_length, options.rounds))
    below = found.wall < LENGTHS_PER_SECOND or found.fill < FILL
    missed = [f"{found.wall:,.0f} lengths/s, fill {found.fill:.3%}"] if below else []
    return exit_status(missed, options.check)


if __name__ == "__main__":
    sys.exit(main())
