"""The plan's speed model beside measured steps: does it rank configurations as a clock does?

    python benchmarks/speed_accuracy.py            every recorded row, predicted beside measured
    python benchmarks/speed_accuracy.py --check    exit 1 when a target is missed
    python benchmarks/speed_accuracy.py --json R   write the summary

Measured seconds come from records/speed_cpu.json (benchmarks/speed_measure.py). Predictions are computed
here, for the processor that the record names. Rank correlation is Spearman's, over the fresh rows (which
no figure of the model was set beside), over those of the held-out half and over all. Of each `Choice` the
planner's first pick is compared with the fastest way that was measured. The training rows of a GPU
(records/gpu_throughput_*.json) bring their prediction with them; without such a record that target is open.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grids import CHOICES, FRESH, SPEED, Choice, Row
from kept import keep
from memory_rows import job_of, make, plan_of, recipe_of, spec_of

from launcher.facts.hardware import Processor, parse_hardware
from launcher.memory.estimate import estimate_memory
from launcher.plan.plan import StepTime
from launcher.planner.candidates import kept_by_sample
from launcher.planner.speed import predict_step

RECORD = Path(__file__).parent / "records" / "speed_cpu.json"
CORRELATION = 0.9
BEHIND = 1.05
"""A chosen configuration may take this much of the fastest measured one's time."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One row: seconds of a step."""

    name: str
    half: str
    measured: float
    predicted: StepTime


def read_record(path: Path = RECORD) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return record


def predict(row: Row, record: dict[str, Any]) -> StepTime:
    """What the planner predicts for the row on the processor of the record."""
    plan = plan_of(row)
    job, hardware = job_of(row, plan), parse_hardware(f"{row.processes}xcpu")
    kept = kept_by_sample(job, lambda alone: estimate_memory(plan.spec, alone, hardware))
    processor = Processor(**record["processor"])
    return predict_step(plan.spec, job, hardware, kept=kept, processor=processor, cores=record["cores"])


def timed_rows(record: dict[str, Any]) -> list[Timed]:
    """All rows of the grid; SystemExit names those that were not measured."""
    needed = [*SPEED, *FRESH, *(row for choice in CHOICES for row in choice.rows())]
    if absent := [row.name for row in needed if row.name not in record["seconds"]]:
        raise SystemExit(f"not measured: {' '.join(absent)}; speed_measure.py --only measures them")
    halves = [*((row, row.half) for row in SPEED), *((row, "fresh") for row in FRESH)]
    return [Timed(row.name, half, record["seconds"][row.name], predict(row, record)) for row, half in halves]


def gpu_correlations(records: Path = RECORD.parent) -> list[tuple[str, int, float]]:
    """(device, rows, rank correlation) of every GPU's record with at least three training rows."""
    found = []
    for path in sorted(records.glob("gpu_throughput_*.json")):
        record = json.loads(path.read_text("utf-8"))
        pairs = [(row["step_s"], row["predicted_s"]) for row in record["rows"] if "predicted_s" in row]
        if len(pairs) >= 3:
            measured, predicted = zip(*pairs, strict=True)
            found.append((record["device"], len(pairs), spearman(measured, predicted)))
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [(2 * ordered.index(v) + ordered.count(v) + 1) / 2 for v in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation of two equally long sequences; ValueError for fewer than three."""
    if len(one) != len(other) or len(one) < 3:
        raise ValueError(f"{len(one)} and {len(other)} values have no rank correlation")
    a, b = ranks(one), ranks(other)
    middle = (len(a) + 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return both / spread


def picked(choice: Choice) -> Row:
    """The way to compute a choice that the planner takes."""
    first = next(iter(choice.rows()))
    recipe = recipe_of(first)
    del recipe["trainer"]["per_device_train_batch_size"], recipe["trainer"]["gradient_accumulation_steps"]
    del recipe["trainer"]["activation_checkpointing"]
    recipe["global_batch_size"] = choice.samples
    plan = make(recipe, spec_of(first), parse_hardware("cpu"))
    found = (plan.batch.micro, plan.job.checkpointing)
    return next(row for row in choice.rows() if (row.micro_batch, row.checkpointing) == found)


def compare_choices(record: dict[str, Any]) -> list[tuple[str, Row, float]]:
    """(choice, the planner's row, its measured seconds over the fastest row's)."""
    found = []
    for choice in CHOICES:
        seconds = {row.name: record["seconds"][row.name] for row in choice.rows()}
        taken = picked(choice)
        found.append((choice.name, taken, seconds[taken.name] / min(seconds.values())))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="write the summary")
    options = parser.parse_args()
    record = read_record()
    rows = timed_rows(record)
    print(f"{record['cores']} cores, {record['processor']['name']}, {record['date']}")
    print(f"{'row':<34}{'measured s':>11}{'likely s':>10}{'ratio':>7}{'range s':>18}  half")
    for row in sorted(rows, key=lambda one: one.measured):
        time = row.predicted
        print(f"{row.name:<34}{row.measured:>11.3f}{time.likely:>10.3f}{time.likely / row.measured:>7.2f}"
              f"{time.low:>9.3f}{time.high:>9.3f}  {row.half}")  # fmt: skip
    missed, table = [], []
    for half in ("fresh", "held-out", "all"):
        some = [row for row in rows if half in (row.half, "all")]
        value = spearman([row.measured for row in some], [row.predicted.likely for row in some])
        inside = sum(row.predicted.low <= row.measured <= row.predicted.high for row in some)
        print(f"{half}: rank correlation {value:.3f} over {len(some)} rows, {inside} inside their range")
        table.append((f"rank correlation, {half} rows", f"{value:.3f}", f"at least {CORRELATION}",
                      f"{len(some)} rows, {inside} inside their range"))  # fmt: skip
        if value < CORRELATION:
            missed.append(f"rank correlation of {half} rows: {value:.3f} < {CORRELATION}")
    gpus = gpu_correlations()
    for device, count, value in gpus:
        print(f"{device}: rank correlation {value:.3f} over {count} rows")
        table.append(
            (f"rank correlation, {device}", f"{value:.3f}", f"at least {CORRELATION}", f"{count} rows")
        )
        if value < CORRELATION:
            missed.append(f"rank correlation of {device}: {value:.3f} < {CORRELATION}")
    if not gpus:
        print("open: no record of a GPU (benchmarks/gpu_throughput.py writes one)")
        table.append(("rank correlation, GPU", "open", f"at least {CORRELATION}", "no record of a GPU"))
    for name, taken, behind in compare_choices(record):
        print(f"{name}: the planner takes {taken.name}, {behind:.3f} of the fastest measured")
        table.append((f"choice of {name}", f"{behind:.3f}", f"at most {BEHIND}", f"takes {taken.name}"))
        if behind > BEHIND:
            missed.append(f"{name}: {behind:.3f} > {BEHIND}")
    if options.json is not None:
        keep(options.json, ("measure", "found", "target", ""), table, ("torch", "transformers", "peft"))
    for text in missed:
        print(f"missed: {text}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
