"""`report`: one run, or several compared, as one HTML page."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError, printable
from launcher.execute.record import read_run
from launcher.execute.run_dir import free_name
from launcher.files.safe_files import write_text
from launcher.render.new_file import write_new, writing
from launcher.report.compare import differing
from launcher.report.outcome import Outcome
from launcher.report.run_pages import REPORT, compare_page, made, run_page, shown_record
from launcher.report.run_sections import run_facts


def report_command(
    paths: Sequence[str], *, output: str | None, serve: bool, port: int, as_json: bool
) -> Outcome:
    """Write the report of a run into its directory, or the comparison of several to a new file here.

    serve: follow the runs on a page of this machine's loopback instead, until Ctrl-C.
    """
    folders = [Path(path) for path in paths]
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110 - no error for a name that no folder can have
            hint = "name the run directory that `run` printed"
            raise RecipeError(Problem("no-run-dir", "no such folder", path, hint=hint))
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RecipeError(Problem("usage", "the same run is named twice", hint="name each run once"))
    if serve:
        if as_json or output is not None:
            message = f"--serve excludes {'--json' if as_json else '--output'}"
            raise RecipeError(Problem("usage", message, hint="leave out one of the two"))
        return _serve(folders, port)
    if port:
        raise RecipeError(Problem("usage", "--port needs --serve", hint="add --serve, or leave it out"))
    records = [shown_record(read_run(folder), folder) for folder in folders]
    data: dict[str, Any] = {"runs": [run_facts(record) for record in records]}
    if len(records) == 1:
        page = run_page(records[0], made())
        target = folders[0] / REPORT if output is None else Path(output)
    else:
        names = unlike([folder.resolve().parts for folder in folders])
        page, data["differs"] = compare_page(records, names, made()), differing(records)
        target = Path(output) if output is not None else free_name(Path(_file_name(names)))
    with writing(target):
        if output is None and len(records) == 1:
            write_text(target, page)
        else:
            write_new(target, page)
    return Outcome({**data, "report": str(target)}, f"wrote {printable(str(target))}\n")


def _serve(folders: Sequence[Path], port: int) -> Outcome:
    from launcher.report.live import serving
    from launcher.report.loopback import wait_for_interrupt

    with serving(folders, unlike([folder.resolve().parts for folder in folders]), port) as address:
        wait_for_interrupt(address)
    return Outcome({}, "")


def unlike(paths: Sequence[Sequence[str]]) -> list[str]:
    """Names of folders: the fewest last parts that differ."""
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _file_name(names: Sequence[str]) -> str:
    """The name of the file that compares these."""
    parts = [re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run" for name in names]
    return f"report-{'-'.join(parts)}"[:120] + ".html"
