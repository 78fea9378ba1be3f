"""`report`: a run directory, or several, as one HTML file; `run` and `plan --html` write theirs here, too."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.commands.diagnose import recipe_of, with_recipe
from launcher.errors import EffilaunchError, Interrupted, Problem, RecipeError
from launcher.execute.record import RunRecord, keep_end, read_run, total_seconds, without_secrets
from launcher.facts.redaction import hider, secret_values
from launcher.facts.safe_files import write_text
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.knowledge.lint.document import printable
from launcher.render.new_file import write_new, writing
from launcher.report.html.compare import differing
from launcher.report.html.page import compare_page, plan_record, run_page
from launcher.report.html.sections import losses, scores, steps_done
from launcher.report.html.values import at
from launcher.report.outcome import Outcome, note

REPORT = "report.html"
"""In a run directory: ours, and written anew by whoever reports on the run."""


def report_command(paths: Sequence[str], output: str | None) -> Outcome:
    """One run: its report, by default into its directory. Several: beside each other, in a new file here."""
    folders = [Path(path) for path in paths]
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110 - no error for a name that no folder can have
            hint = "name what `run` called run directory"
            raise RecipeError(Problem("no-run-dir", "is no run directory: no such folder", path, hint=hint))
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RecipeError(Problem("usage", "the same run is named twice", hint="name each run once"))
    records = [_safe(_diagnosed(read_run(folder), folder)) for folder in folders]
    data: dict[str, Any] = {"runs": [_facts(record) for record in records]}
    if len(records) == 1:
        page = run_page(records[0], _made())
        target = folders[0] / REPORT if output is None else Path(output)
    else:
        names = unlike([folder.resolve().parts for folder in folders])
        page, data["differs"] = compare_page(records, names, _made()), differing(records)
        target = Path(output) if output is not None else _free(Path(_named(names)))
    with writing(target):
        if output is None and len(records) == 1:
            write_text(target, page)
        else:
            write_new(target, page)
    return Outcome({**data, "report": str(target)}, f"wrote {printable(str(target))}\n")


def write_plan_page(data: Mapping[str, Any], recipe: str, output: str, problems: Sequence[Problem]) -> Path:
    """`plan --html`: the page of a plan. data: what `plan --json` says. output: "" for NAME-plan.html here.

    RecipeError where the file is there already, or cannot be written.
    """
    name = Path(recipe).stem
    target = Path(output or f"{name}-plan.html")
    text = str((data.get("files") or {}).get("recipe.yaml", ""))
    record = plan_record(data, name, text, [str(problem) for problem in problems])
    page = run_page(_safe(record), _made())
    with writing(target, "--html FILE"):
        write_new(target, page)
    return target


@contextlib.contextmanager
def reported(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Within this a run lives in its directory; however it ends, its report is written there."""
    try:
        yield
    except EffilaunchError as error:
        _report_end(run_dir, say, error)
        raise
    _report_end(run_dir, say, None)


def _report_end(run_dir: Path, say: Callable[[str], None], error: EffilaunchError | None) -> None:
    """Best effort: a report that cannot be made changes nothing about the run."""
    try:
        record = read_run(run_dir)
        if error is not None:
            said = [_hide()(problem.message) for problem in error.problems]
            interrupted = isinstance(error, Interrupted)
            keep_end(run_dir, said, interrupted=interrupted)
            record = replace(record, state="stopped" if interrupted else "failed", problems=said)
        write_text(run_dir / REPORT, run_page(_safe(_diagnosed(record, run_dir)), _made()))
    except Exception as why:  # also a bug of ours: the run has ended as it has, and its files tell all of it
        note(f"{printable(str(run_dir / REPORT))} was not written: {why}")
    else:
        say(f"report: {printable(str(run_dir / REPORT))}")


def _diagnosed(record: RunRecord, folder: Path) -> RunRecord:
    """The record with what its logs say, where it failed."""
    if record.state != "failed":
        return record
    try:
        found = diagnose([str(folder)], FAILURES)
        recipe = recipe_of([str(folder)])
        return replace(record, diagnosis=(found if recipe is None else with_recipe(found, recipe)).to_json())
    except (EffilaunchError, OSError, ValueError, EOFError):  # no logs, or none that can be read
        return record


def _safe(record: RunRecord) -> RunRecord:
    return without_secrets(record, _hide())


def _hide() -> Callable[[str], str]:
    return hider(secret_values(os.environ))


def _made() -> str:
    return f"Written by effilaunch {__version__} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC."


def _facts(record: RunRecord) -> dict[str, Any]:
    """One run for programs."""
    first, last = losses(record)
    result = record.result
    return {
        "run_dir": record.run_dir,
        "state": record.state,
        "recipe": record.plan.get("recipe"),
        "steps": int(steps_done(record)),
        "loss": {"first": first, "last": last},
        "eval": scores(record),
        "seconds": total_seconds(result),
        "tokens_per_second": result.get("tokens_per_second"),
        "memory": {
            "predicted": at(record.plan, "memory", "total"),
            "measured": at(result, "memory", "measured"),
        },
        "restarts": len(record.restarts),
        "diagnosis": dict(record.diagnosis) or None,
    }


def unlike(paths: Sequence[Sequence[str]]) -> list[str]:
    """Names for folders: as many of their last parts as make them differ."""
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _named(names: Sequence[str]) -> str:
    """A file's name for a comparison of these."""
    parts = [re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run" for name in names]
    return f"report-{'-'.join(parts)}"[:120] + ".html"


def _free(path: Path) -> Path:
    """The path, or with the first number that makes it new."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
