"""A run that goes back to an older checkpoint: what lies behind that belongs to what is given up.

It is put aside under other names, never continued, counted or removed: `superseded-N` beside the checkpoints,
and its lines of the run's records in files of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from launcher.execute.restarts import RESTARTS
from launcher.execute.run_dir import unwritable
from launcher.facts.checkpoint import SUPERSEDED, complete_checkpoints, incomplete_checkpoints
from launcher.facts.user_files import exists, is_after, read_lines

_RECORDS = ("metrics.jsonl", RESTARTS)


def put_aside_behind(run_dir: Path, step: int, say: Callable[[str], None]) -> None:
    """Put aside what lies behind `step`, where that is a checkpoint at least.

    Raises as `unwritable`. Records first: from a start that is cut off between, nothing is lost.
    """
    behind = _checkpoints_behind(run_dir / "checkpoints", step)
    if not behind:
        return
    try:
        for name in _RECORDS:
            _split(run_dir / name, step, max(behind))
        named = [_renamed(folder).name for _, folder in sorted(behind.items())]
    except OSError as error:
        raise unwritable(run_dir, error) from error
    old = [folder.name for _, folder in sorted(behind.items())]
    say(
        f"put aside: {', '.join(old)}, behind the step that the run goes on from, as {', '.join(named)} in "
        f"{run_dir / 'checkpoints'}; nothing goes on from there, and nothing removes it"
    )


def _checkpoints_behind(folder: Path, step: int) -> dict[int, Path]:
    """Step -> checkpoint of a later step, also one that is not whole."""
    found = [*complete_checkpoints(folder).values(), *incomplete_checkpoints(folder)]
    steps = {int(path.name.rpartition("-")[2]): path for path in found if path.parent == folder}
    return {number: path for number, path in steps.items() if number > step}


def _renamed(checkpoint: Path) -> Path:
    step = checkpoint.name.rpartition("-")[2]
    return checkpoint.rename(_free_name(checkpoint.with_name(f"{SUPERSEDED}{step}")))


def _free_name(path: Path) -> Path:
    """The path, or the first with a number behind its stem that is not taken."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


def _split(record: Path, step: int, last: int) -> None:
    """Move the rows of a record after `step` into a file of their own; damaged lines stay."""
    if not exists(record):
        return
    aside = _free_name(record.with_name(f"{record.stem}-{SUPERSEDED}{last}{record.suffix}"))
    parts = {path: path.with_name(f"{path.name}.part") for path in (aside, record)}
    try:
        with parts[aside].open("wb") as later, parts[record].open("wb") as kept:
            for line, row in read_lines(record):
                (later if is_after(row, step) else kept).write(line)
        if parts[aside].stat().st_size:
            for path, part in parts.items():
                part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
