"""Seconds of one optimizer step of every row of the speed grid, measured on this machine's processor.

    python benchmarks/speed_measure.py                 all rows, written to records/speed_cpu.json
    python benchmarks/speed_measure.py --only NAME …   these rows alone; the others stay as recorded

A row is a process of its own that builds model and Trainer with the worker's functions, on rows of random
tokens, with all cores. It trains WARM steps that are not counted, then COUNTED. Rounds over all rows are
interleaved, so that a slow spell of the machine hits all of them alike; what counts is the fastest median
of a round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import memory_measure
from grids import CHOICES, FRESH, SPEED, Row
from memory_rows import plan_of

os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))  # memory is measured with one thread

RECORD = Path(__file__).parent / "records" / "speed_cpu.json"
WARM, COUNTED = 2, 4
ROUNDS = 2
TIMEOUT_S = 300


def every_row() -> list[Row]:
    return [*SPEED, *FRESH, *(row for choice in CHOICES for row in choice.rows())]


def time_steps(row: Row, run_dir: Path) -> list[float]:
    """Seconds of each counted step."""
    from transformers import TrainerCallback

    memory_measure.STEPS = WARM + COUNTED
    plan = plan_of(row, steps=WARM + COUNTED)
    memory_measure.write_run(row, plan, run_dir)
    trainer = memory_measure.build_trainer(row, plan, run_dir)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.train()
    assert len(ends) == WARM + COUNTED, "all steps were trained"
    return [end - start for start, end in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]


def measure_row(row: Row, answer: Path) -> None:
    """Of a forked process: leaves seconds or an error in the file."""
    warnings.simplefilter("ignore")
    with answer.with_suffix(".log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            with tempfile.TemporaryDirectory() as folder:
                found: dict[str, Any] = {"seconds": time_steps(row, Path(folder))}
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    answer.write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def measure(row: Row) -> dict[str, Any]:
    """{seconds: of each counted step} or {error}."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        process = get_context("fork").Process(target=measure_row, args=(row, answer))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
        if not answer.is_file():
            return {"error": f"no answer (exit {process.exitcode})"}
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
        if "error" in found:
            print(answer.with_suffix(".log").read_text(errors="replace")[-2000:], file=sys.stderr)
        return found


def write_record(seconds: dict[str, float], path: Path) -> None:
    from launcher.facts.hardware import probe_processor

    processor = probe_processor()
    record = {
        "about": "Seconds of an optimizer step on a processor; made by benchmarks/speed_measure.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": None if processor is None else {"single": processor.single, "half": processor.half,
                                                     "name": processor.name},
        "versions": memory_measure.versions(),
        "seconds": seconds,
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these rows")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    options = parser.parse_args()
    rows = every_row()
    unknown = set(options.only or ()) - {row.name for row in rows}
    if unknown:
        parser.error(f"not in the grid: {', '.join(sorted(unknown))}")
    if options.only:
        rows = [row for row in rows if row.name in options.only]
    memory_measure.import_stack(rows)
    known = json.loads(options.record.read_text())["seconds"] if options.only else {}
    found: dict[str, float] = {}
    failed = 0
    for number in range(options.rounds):
        for row in rows:
            answer = measure(row)
            if "error" in answer:
                failed += 1
                print(f"{row.name:<38} {answer['error']}", flush=True)
                continue
            median = statistics.median(answer["seconds"])
            found[row.name] = min(median, found.get(row.name, median))
            print(f"round {number + 1}  {row.name:<38}{median:9.4f} s", flush=True)
        write_record({**known, **found}, options.record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
