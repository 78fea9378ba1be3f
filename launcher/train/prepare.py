"""Prepare a run's data in a process of its own: `python -m launcher.train.prepare RUN_DIR [SAMPLES]`.

Before any process group exists: ranks that wait for one that tokenises trip NCCL's watchdog. Leaves
RUN_DIR/data.json, which names the cached samples, says what became of the rows, and holds some of them.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError
from launcher.train.job import Job, read_job
from launcher.train.outcome import write_error, write_json

STAGE = "prepare"
SAMPLES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare one run directory's data; the exit code of errors.py, 1 for the unforeseen."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) not in (1, 2):
        print("usage: python -m launcher.train.prepare RUN_DIR [SAMPLES]", file=sys.stderr)
        return 2
    run_dir = Path(arguments[0]).absolute()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    # One process here, so the tokenizer's own threads may have all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        prepare_run(read_job(run_dir), int(arguments[1]) if len(arguments) == 2 else SAMPLES)
    except EffilaunchError as error:
        write_error(run_dir, STAGE, error)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        write_error(run_dir, STAGE, error)
        return 1
    return 0


def prepare_run(job: Job, samples: int = SAMPLES) -> dict[str, Any]:
    """Prepare the data and write data.json; returns what it holds.

    RecipeError for unusable data, and when more was truncated than the recipe allows.
    """
    from launcher.train.data.gate import check_truncation
    from launcher.train.data.prepare import prepare
    from launcher.train.data.store import RECORD
    from launcher.train.hooks import load_hooks
    from launcher.train.metrics import check_metrics
    from launcher.train.processing import load_processing

    check_metrics(job)
    processing = load_processing(job)
    record = prepare(job, processing, load_hooks(job))
    record["samples"] = _samples(job, processing, record, samples)
    write_json(job.run_dir / RECORD, record)
    check_truncation(job, record)
    return record


def _samples(job: Job, processing: Any, record: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The first samples, each with its file and line (not when streaming: the order is random)."""
    from launcher.train.data.samples import show_sample
    from launcher.train.data.store import open_samples

    task, labels = job.value("task"), record["labels"]
    split = record["splits"].get("train")
    if split is None:
        from launcher.train.data.stream import Stream

        stream = itertools.islice(Stream(job, processing), count)
        return [show_sample(task, processing, sample, labels) for sample in stream]
    rows = open_samples(Path(record["folder"]) / split["file"])
    chosen = [rows[index] for index in range(min(count, rows.num_rows))]
    return [
        {"file": split["files"][row["file"]], "line": row["number"]}
        | show_sample(task, processing, row, labels)
        for row in chosen
    ]


if __name__ == "__main__":
    sys.exit(main())
