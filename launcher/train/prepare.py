"""Prepare a run's data: `python -m launcher.train.prepare RUN_DIR [SAMPLES]`, or within rank 0.

Before any process group exists: ranks that wait for one that tokenises trip NCCL's watchdog. Writes
RUN_DIR/data.json, with the path of the cached samples, counts of rows, and some samples. A separate process
imports all that a rank imports, which takes longer than most data; so on one node rank 0 prepares the data
itself, and the others import meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError
from launcher.files.checkpoint import same_samples
from launcher.files.rank_status import LEFT_EARLY, PREPARE_STAGE, PREPARED, PREPARES
from launcher.files.safe_files import read_record, write_json
from launcher.machine.node_facts import unshared
from launcher.plan.stored import StoredPlan
from launcher.recipe.env import hide_kept
from launcher.recipe.suggestions import listed
from launcher.train import stopping
from launcher.train.job import Job, rank, read_job
from launcher.train.outcome import also_written_to, write_error
from launcher.train.progress import bars_in_status
from launcher.train.status import status, status_of_stage
from launcher.train.stopping import SIGNALS, end_with_supervisor

STAGE = "prepare"
"""In the name of logs/error-STAGE.json, and the phase of a rank's status."""
SAMPLES = 3
IMAGES = 8
"""Of a sample, with thumbnails."""
_POLL_S = 0.05
_NOTHING: Mapping[str, Any] = {"key": None, "splits": {}, "labels": None, "formats": [], "samples": []}
"""data.json of a run whose datasets hooks make."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare one run directory's data; the exit status of errors.py, 1 for an unforeseen error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) not in (1, 2):
        print("usage: python -m launcher.train.prepare RUN_DIR [SAMPLES]", file=sys.stderr)
        return 2
    run_dir = Path(arguments[0]).absolute()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for number in SIGNALS:  # unwind, so that no incomplete samples stay in the cache
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
    """If the supervisor leaves it to the ranks: rank 0 prepares the data, the others wait.

    Raises as `prepare_run`; a rank that raises here has the status phase `prepare`.
    """
    if not os.environ.pop(PREPARES, ""):
        return
    status().enter(STAGE)
    mark = job.run_dir / "logs" / PREPARED
    if rank() != 0:
        while not mark.exists():  # if rank 0 fails, the launcher ends this one
            time.sleep(_POLL_S)
        return
    with stopping.unwinding(), also_written_to(job.run_dir / "logs" / "prepare.log"), _all_cores():
        prepare_run(job)
    mark.touch()


def check_shared(job: Job) -> None:
    """MachineError (4) if this node does not see the prepared samples."""
    from launcher.train.data.store import RECORD

    if not (job.run_dir / RECORD).is_file():
        return
    folder = read_record(job.run_dir / RECORD).get("folder")
    if folder is not None and not Path(folder).exists():
        raise MachineError(unshared(socket.gethostname(), str(folder)))


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Within this the tokenizer's threads may use all cores: nothing else runs."""
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
    """Prepare the data and write data.json; returns its content.

    RecipeError for unusable data, and if more was truncated than the recipe allows. Datasets that hooks make
    are made in the ranks: nothing is prepared.
    """
    from launcher.train.data.store import RECORD

    if job.task.made_by_hooks:
        write_json(job.run_dir / RECORD, _NOTHING)
        return dict(_NOTHING)
    from launcher.train.data.build import held_out_samples
    from launcher.train.data.gate import check_dropped, check_stream, check_truncation
    from launcher.train.data.prepare import prepare
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
    record |= _tried(job, processing, record)
    record["held_out"] = held_out_samples(job, record)
    shown = _samples(job, processing, record, max(samples, 1))
    record["samples"] = shown[:samples]
    write_json(job.run_dir / RECORD, _with_references(job, record))
    _print_notices(job, processing, record, shown)
    return record


def _print_notices(
    job: Job, processing: Any, record: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]
) -> None:
    """What people should know of the data; shown: at least its first sample."""
    from launcher.rows.class_names import label_twins
    from launcher.train.data.special_tokens import warning
    from launcher.train.data.template import dates_written
    from launcher.train.model.processors import tokenizer_of

    text = "".join(piece for sample in shown[:1] for piece, _ in sample["pieces"])
    if dates := dates_written(tokenizer_of(processing), text) if job.task.reads_tokens else []:
        said = f"the samples have {', '.join(dates)}, also where a later run finds them in the cache"
        print(f"NOTE: the chat template writes today's date (strftime_now): {said}")
    for names in label_twins(record["labels"] or ()):
        print(f"WARNING: {len(names)} classes differ only in case or spaces: {', '.join(map(repr, names))}")
    for split in record["splits"].values():
        first = {name: (split["files"][file], line) for name, (file, line) in split["first_rows"].items()}
        if found := warning(job, split["counts"]["notes"], first):
            print(f"WARNING: {found}")
        for source in split["sources"]:
            for line in source["files"]:
                print(line)
            if source["unused"]:
                print(f"{source['path']}: columns that are not read: {listed(source['unused'])}")


def _with_references(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """The record whose files and paths have the recipe's references to the environment in place."""
    splits = {
        name: {**split, **{key: hide_kept(split[key], job.kept) for key in ("files", "sources")}}
        for name, split in record["splits"].items()
    }
    # Samples of a stream have no file.
    samples = [
        {**one, **{key: hide_kept(one[key], job.kept) for key in one.keys() & {"file"}}}
        for one in record["samples"]
    ]
    return {**record, "splits": splits, "samples": samples}


def _tried(job: Job, processing: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the task tries on its training samples."""
    from launcher.train.data.store import open_samples
    from launcher.train.tasks import train_task

    split = record["splits"].get("train")
    if split is None:
        return {}
    return train_task(job.task.name).tried(
        job, processing, open_samples(Path(record["folder"]) / split["file"])
    )


def _need_eos(job: Job, processing: Any) -> None:
    """A language model learns to stop from the EOS after each answer."""
    from launcher.train.model.processors import tokenizer_of

    if not job.task.classifies and tokenizer_of(processing).eos_token_id is None:
        hint = "set a tokenizer with an EOS; without one the model never learns to stop"
        raise RecipeError(
            Problem("eos-missing", "the tokenizer has no EOS token", path="model.tokenizer", hint=hint)
        )


def _refuse_other_data(job: Job, record: dict[str, Any]) -> None:
    """RecipeError if a run to be resumed began with other data: its place in the rows would be wrong."""
    from launcher.train.data.store import RECORD

    path = job.run_dir / RECORD
    if not any(job.checkpoints.glob("checkpoint-*")):
        return  # nothing was trained on the old data yet
    if not path.is_file() or (old := read_record(path)).get("key") == record["key"]:
        return
    folder, now = old.get("folder"), record.get("folder")
    if not folder or not now or not same_samples(Path(folder), Path(now)):
        message = "the data or the tokenizer has changed since the run was started"
        version = StoredPlan(job.plan).finished_by
        hint = f"restore the old files, finish the run with {version}, or start a new run"
        raise RecipeError(Problem("resume-differs", message, file=str(path), path="data", hint=hint))


def _samples(job: Job, processing: Any, record: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The first samples, each with its file and line (not when streaming: the order is random)."""
    from launcher.train.data.store import open_samples

    task, labels = job.task.name, record["labels"]
    split = record["splits"].get("train")
    if split is None:
        from launcher.train.data.stream import Stream

        stream = itertools.islice(Stream(job, processing), count)
        return [_shown(task, processing, sample, labels) for sample in stream]
    rows = open_samples(Path(record["folder"]) / split["file"])
    chosen = [rows[index] for index in range(min(count, rows.num_rows))]
    return [
        {"file": split["files"][row["file"]], "line": row["number"]}
        | _shown(task, processing, row, labels)
        | (_images(task, row) if place < SAMPLES else {})
        for place, row in enumerate(chosen)
    ]


def _images(task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Thumbnails of a sample, for the report."""
    from launcher.train.tasks import train_task

    images = train_task(task).shown_images(sample)
    return {"images": images[:IMAGES], "more_images": len(images[IMAGES:])} if images else {}


def _shown(
    task: str, processing: Any, sample: Mapping[str, Any], labels: Sequence[str] | None
) -> dict[str, Any]:
    """One prepared sample as JSON: its tokens, how many are targets, its text in pieces."""
    from launcher.train.tasks import train_task

    pieces, tokens, targets = train_task(task).shown(processing, sample, labels)
    return {"tokens": tokens, "targets": targets, "pieces": [list(piece) for piece in pieces]}


if __name__ == "__main__":
    sys.exit(main())
