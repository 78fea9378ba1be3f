"""`run -- COMMAND`: run a user's own command under the supervisor, and report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.execute.own_command import OwnCommand, files_of, own_command, run_own
from launcher.execute.record import RunRecord, read_run
from launcher.execute.run_dir import MARKER, read_own, written
from launcher.execute.signals import ended_by_signals
from launcher.execute.start_point import Beginning, beginning, run_place, set_newer_aside, with_own_folder
from launcher.machine.gpus import read_gpus
from launcher.recipe.launch_file import load_launch
from launcher.report.outcome import Outcome
from launcher.report.result_text import result_text
from launcher.report.run_display import Showing, showing
from launcher.report.run_pages import reported


@ended_by_signals()
def supervise_command(
    *,
    own: Sequence[str],
    launch: str | None,
    overrides: Sequence[str],
    resume: str | None,
    output_dir: str | None,
    as_json: bool,
) -> Outcome:
    """Run the words of `own` and return what was measured. launch: a file with `launch:`."""
    command = own_command(own, load_launch(launch, overrides))
    place = run_place(Path(f"{command.name}.own"), resume, output_dir)  # its stem is the script's name
    with showing(as_json=as_json) as shown, beginning(place, shown.say) as begins:
        if begins.chosen is not None:
            if (before := _finished(command, begins, shown.say)) is not None:
                shown.say(f"the run in {begins.run_dir} has finished: nothing is left to do\n")
                return before
            shown.say("\n".join([*begins.lines, ""]))
        begins = with_own_folder(begins)
        _run(command, begins, shown)
        return _outcome(read_run(begins.run_dir))


def _run(command: OwnCommand, begins: Beginning, shown: Showing) -> None:
    run_dir, gpus = begins.run_dir, read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), whole=False).usable
    with written(files_of(command, gpus), run_dir, resume=begins.chosen is not None):
        shown.say(f"run directory {run_dir}; Ctrl-C stops the command, and lets it save")
        set_newer_aside(begins, shown.say)
        with reported(run_dir, shown.say):
            checkpoint = None if begins.checkpoint is None else str(begins.checkpoint)
            run_own(
                command, run_dir, gpus=gpus, resume=checkpoint, say=shown.say, looking=shown.looking(run_dir)
            )


def _finished(command: OwnCommand, begins: Beginning, say: Callable[[str], None]) -> Outcome | None:
    """The outcome of a resumed run that has finished. RecipeError for another command or another run."""
    run_dir = begins.run_dir
    if not (run_dir / "plan.json").is_file():
        return None
    hint = "name another --output-dir"
    plan = read_own(run_dir)
    if plan is None:
        message = f"the run in {run_dir} is one of a recipe"
        raise RecipeError(Problem("resume-differs", message, hint=hint))
    is_same = plan.get("command") == command.shown
    if not (run_dir / MARKER).is_file():
        if not is_same:
            say(f"the command differs from that which the run began with: {' '.join(plan['command'])}")
        return None
    if not is_same:
        message = f"the run in {run_dir} has finished, with another command: {' '.join(plan['command'])}"
        raise RecipeError(Problem("finished-run", message, hint=hint))
    return _outcome(read_run(run_dir))


def _outcome(record: RunRecord) -> Outcome:
    data: dict[str, Any] = {"run_dir": record.run_dir, "result": dict(record.result)}
    return Outcome(data, result_text(record, []))
