"""Seconds of one optimizer step of every row of the speed grid, measured on this machine's processor.

    python benchmarks/speed_measure.py                 all rows, written to records/speed_cpu.json
    python benchmarks/speed_measure.py --only NAME …   these rows alone; the others stay as recorded

A row is a process of its own that builds model and Trainer with the worker's functions, on rows of random
tokens, with all cores. It trains WARM steps that are not counted, then COUNTED. Rounds over all rows are
interleaved, so that a slow spell of the machine hits all of them alike; what counts is the fastest median
of a round.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import memory_measure
from grids import Row, speed_rows
from memory_rows import plan_of
from records import RECORDS, read_record, today, versions, write_record
from runner import in_process, parser_of

from launcher.machine.hardware import probe_processor

os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))  # memory is measured with one thread

RECORD = RECORDS / "speed_cpu.json"
WARM, COUNTED, TIMEOUT_S = 2, 4, 300


def time_steps(row: Row, run_dir: Path) -> dict[str, list[float]]:
    """Seconds of each counted step."""
    from transformers import TrainerCallback

    steps = WARM + COUNTED
    plan = plan_of(row, steps=steps)
    memory_measure.write_run(row, plan, run_dir)
    trainer = memory_measure.build_trainer(row, plan, run_dir, steps)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.train()
    assert len(ends) == steps, "all steps were trained"
    return {"seconds": [end - start for start, end in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]}


def record_of(seconds: dict[str, float]) -> dict[str, Any]:
    found = probe_processor()
    return {
        "about": "Seconds of an optimizer step on a processor; made by benchmarks/speed_measure.py",
        "date": today(), "cores": len(os.sched_getaffinity(0)),
        "processor": found and {"single": found.single, "half": found.half, "name": found.name},
        "versions": versions(memory_measure.PACKAGES), "seconds": seconds,
    }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, "rounds", "record", rows=speed_rows(), record=RECORD)
    options = parser.parse_args()
    rows = [row for row in speed_rows() if options.only is None or row.name in options.only]
    memory_measure.import_stack(rows)
    known = read_record(options.record)["seconds"] if options.only else {}
    found: dict[str, float] = {}
    failed = False
    for number in range(options.rounds):
        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                answer = in_process(time_steps, TIMEOUT_S, row, Path(folder))
            if "error" in answer:
                failed = True
                print(f"{row.name:<38} {answer['error']}", flush=True)
                continue
            median = statistics.median(answer["seconds"])
            found[row.name] = min(median, found.get(row.name, median))
            print(f"round {number + 1}  {row.name:<38}{median:9.4f} s", flush=True)
        write_record(options.record, record_of({**known, **found}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
