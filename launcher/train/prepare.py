"""Prepare a run's data: `python -m launcher.train.prepare RUN_DIR [SAMPLES]`, or within rank 0.

Before any process group exists: ranks that wait for one that tokenises trip NCCL's watchdog. Leaves
RUN_DIR/data.json, which names the cached samples, says what became of the rows, and holds some of them.
A process of its own imports all that a rank imports, which takes longer than most data; so on one machine
rank 0 prepares it itself, and the others import meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.facts.checkpoint import same_samples
from launcher.facts.rank_status import LEFT_EARLY, PREPARE_STAGE, PREPARED, PREPARES
from launcher.facts.safe_files import read_record, write_json
from launcher.recipe.suggestions import listed
from launcher.train import stopping
from launcher.train.job import Job, rank, read_job
from launcher.train.outcome import also_written_to, write_error
from launcher.train.progress import bars_in_status
from launcher.train.status import status, status_of_stage
from launcher.train.stopping import SIGNALS, end_with_supervisor

STAGE = "prepare"
"""Of logs/error-STAGE.json, and the phase of a rank's status."""
SAMPLES = 3
_POLL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare one run directory's data; the exit code of errors.py, 1 for the unforeseen."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) not in (1, 2):
        print("usage: python -m launcher.train.prepare RUN_DIR [SAMPLES]", file=sys.stderr)
        return 2
    run_dir = Path(arguments[0]).absolute()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for number in SIGNALS:  # they unwind, so that no half-written samples stay in the cache
        signal.signal(number, lambda *_: sys.exit(LEFT_EARLY))
    end_with_supervisor(os.environ)
    try:
        with status_of_stage(run_dir, PREPARE_STAGE), bars_in_status(), _all_cores():
            status().enter(STAGE)
            prepare_run(read_job(run_dir), int(arguments[1]) if len(arguments) == 2 else SAMPLES)
    except EffilaunchError as error:
        write_error(run_dir, STAGE, error)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        write_error(run_dir, STAGE, error)
        return 1
    return 0


def prepare_in_ranks(job: Job) -> None:
    """Where the supervisor has left it to the ranks: rank 0 prepares the data, the others wait for it.

    Raises as `prepare_run`; a rank that raises here has status phase `prepare`.
    """
    if not os.environ.pop(PREPARES, ""):
        return
    status().enter(STAGE)
    mark = job.run_dir / "logs" / PREPARED
    if rank() != 0:
        while not mark.exists():  # when rank 0 fails, the launcher ends this one
            time.sleep(_POLL_S)
        return
    with stopping.unwinding(), also_written_to(job.run_dir / "logs" / "prepare.log"), _all_cores():
        prepare_run(job)
    mark.touch()


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Nothing else runs meanwhile, so the tokenizer's own threads may have all cores."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def prepare_run(job: Job, samples: int = SAMPLES) -> dict[str, Any]:
    """Prepare the data and write data.json; returns what it holds.

    RecipeError for unusable data, and when more was truncated than the recipe allows.
    """
    from launcher.train.data.gate import check_dropped, check_stream, check_truncation
    from launcher.train.data.prepare import prepare
    from launcher.train.data.store import RECORD
    from launcher.train.hooks import load_hooks
    from launcher.train.metrics import check_metrics
    from launcher.train.model.processing import load_processing

    check_metrics(job)
    processing = load_processing(job)
    _need_eos(job, processing)
    record = prepare(job, processing, load_hooks(job))
    _refuse_other_data(job, record)
    check_truncation(job, record)
    check_dropped(job, record)
    if job.data.streaming:
        check_stream(job, processing)
    record["samples"] = _samples(job, processing, record, samples)
    write_json(job.run_dir / RECORD, record)
    for split in record["splits"].values():
        for source in split["sources"]:
            if source["unused"]:
                print(f"{source['path']}: columns that are not read: {listed(source['unused'])}")
    return record


def _need_eos(job: Job, processing: Any) -> None:
    """A language model learns to stop from the EOS after each answer."""
    if not job.task.name.endswith("-classification") and processing.eos_token_id is None:
        hint = "give a tokenizer with an EOS; without one the model never learns to stop"
        raise RecipeError(
            Problem("eos-missing", "the tokenizer has no EOS token", path="model.tokenizer", hint=hint)
        )


def _refuse_other_data(job: Job, record: dict[str, Any]) -> None:
    """A run goes on with the data that it began with: its place in the rows would mean nothing else."""
    from launcher.train.data.store import RECORD

    path = job.run_dir / RECORD
    if not any(job.checkpoints.glob("checkpoint-*")):
        return  # nothing was learnt from the old data yet
    if not path.is_file() or (old := read_record(path)).get("key") == record["key"]:
        return
    folder, now = old.get("folder"), record.get("folder")
    if not folder or not now or not same_samples(Path(folder), Path(now)):
        message = "the data or the tokenizer has changed since the run was started"
        hint = "bring the old files back, or start a new run"
        raise RecipeError(Problem("resume-differs", message, file=str(path), path="data", hint=hint))


def _samples(job: Job, processing: Any, record: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The first samples, each with its file and line (not when streaming: the order is random)."""
    from launcher.train.data.samples import show_sample
    from launcher.train.data.store import open_samples

    task, labels = job.task.name, record["labels"]
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
