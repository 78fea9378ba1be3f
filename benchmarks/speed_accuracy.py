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

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison import Compared, Measure, exit_status, spearman
from grids import CHOICES, FRESH, SPEED, Choice, Row, speed_rows
from memory_rows import job_of, make, plan_of, recipe_of, spec_of
from records import RECORDS, keep, read_record
from runner import parser_of

from launcher.machine.hardware import Processor, parse_hardware
from launcher.memory.estimate import estimate_memory
from launcher.plan.plan import StepTime
from launcher.planner.candidates import kept_by_sample
from launcher.planner.speed import predict_step

RECORD = RECORDS / "speed_cpu.json"
CORRELATION = 0.9
BEHIND = 1.05
"""A chosen configuration may take this much of the fastest measured one's time."""


def predict(row: Row, record: dict[str, Any]) -> StepTime:
    """What the planner predicts for the row on the processor of the record."""
    plan = plan_of(row)
    job, hardware = job_of(row, plan), parse_hardware(f"{row.processes}xcpu")
    kept = kept_by_sample(job, lambda alone: estimate_memory(plan.spec, alone, hardware))
    processor = Processor(**record["processor"])
    return predict_step(plan.spec, job, hardware, kept=kept, processor=processor, cores=record["cores"])


def timed_rows(record: dict[str, Any]) -> list[Compared]:
    """All rows of the grid; SystemExit names those that were not measured."""
    if absent := [row.name for row in speed_rows() if row.name not in record["seconds"]]:
        raise SystemExit(f"not measured: {' '.join(absent)}; speed_measure.py --only measures them")
    found = []
    for row, half in [*((row, row.half) for row in SPEED), *((row, "fresh") for row in FRESH)]:
        time = predict(row, record)
        found.append(Compared(row.name, half, record["seconds"][row.name], time.likely, time.low, time.high))
    return found


def gpu_correlations(records: Path = RECORDS) -> list[tuple[str, int, float]]:
    """(device, rows, rank correlation) of every GPU's record with at least three training rows."""
    found = []
    for path in sorted(records.glob("gpu_throughput_*.json")):
        record = read_record(path)
        pairs = [(row["step_s"], row["predicted_s"]) for row in record["rows"] if "predicted_s" in row]
        if len(pairs) >= 3:
            measured, predicted = zip(*pairs, strict=True)
            found.append((record["device"], len(pairs), spearman(measured, predicted)))
    return found


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


def measures(record: dict[str, Any], rows: Sequence[Compared]) -> Iterator[Measure]:
    """Each is printed, too."""
    for half in ("fresh", "held-out", "all"):
        some = [row for row in rows if half in (row.half, "all")]
        value = spearman([row.measured for row in some], [row.t0 for row in some])
        note = f"{len(some)} rows, {sum(row.is_in_range for row in some)} inside their range"
        print(f"{half}: rank correlation {value:.3f} over {note}")
        yield Measure(f"rank correlation, {half} rows", value, CORRELATION, note)
    gpus = gpu_correlations()
    for device, count, value in gpus:
        print(f"{device}: rank correlation {value:.3f} over {count} rows")
        yield Measure(f"rank correlation, {device}", value, CORRELATION, f"{count} rows")
    if not gpus:
        print("open: no record of a GPU (benchmarks/gpu_throughput.py writes one)")
        yield Measure("rank correlation, GPU", None, CORRELATION, "no record of a GPU")
    for name, taken, behind in compare_choices(record):
        print(f"{name}: the planner takes {taken.name}, {behind:.3f} of the fastest measured")
        yield Measure(f"choice of {name}", behind, BEHIND, f"takes {taken.name}", is_least=False)


def main() -> int:
    options = parser_of(__doc__, "check", "json").parse_args()
    record = read_record(RECORD)
    rows = timed_rows(record)
    print(f"{record['cores']} cores, {record['processor']['name']}, {record['date']}")
    print(f"{'row':<34}{'measured s':>11}{'likely s':>10}{'ratio':>7}{'range s':>18}  half")
    for row in sorted(rows, key=lambda one: one.measured):
        print(f"{row.name:<34}{row.measured:>11.3f}{row.t0:>10.3f}{row.t0 / row.measured:>7.2f}"
              f"{row.low:>9.3f}{row.high:>9.3f}  {row.half}")  # fmt: skip
    found = list(measures(record, rows))
    if options.json is not None:
        table = [one.cells for one in found]
        keep(options.json, ("measure", "found", "target", ""), table, ("torch", "transformers", "peft"))
    return exit_status([text for one in found for text in one.missed], options.check)


if __name__ == "__main__":
    sys.exit(main())
