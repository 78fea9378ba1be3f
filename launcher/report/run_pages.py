"""The HTML pages of a run, of a plan, of several runs compared; writing them to their files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import EffilaunchError, Interrupted, Problem, printable
from launcher.execute.record import RunRecord, keep_end, read_run, without_secrets
from launcher.files.redaction import hider, secret_values
from launcher.files.safe_files import write_text
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.diagnose.patch import recipe_of, with_recipe
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.render.new_file import write_new, writing
from launcher.report import compare, plan_sections, run_sections
from launcher.report.data_sections import data_section
from launcher.report.html.blocks import tiles
from launcher.report.html.elements import Markup, code, tag
from launcher.report.html.page import page
from launcher.report.memory_sections import memory_section
from launcher.report.outcome import note
from launcher.report.sections import Section
from launcher.report.suites import suites_section

REPORT = "report.html"
"""The report in a run directory; every report of the run replaces it."""


def run_page(
    record: RunRecord,
    footer: str,
    more: Sequence[Section | None] = (),
    script: tuple[str, Markup] | None = None,
) -> str:
    """The page of one run, or of a plan. more, script: of a page that is served (live.py)."""
    plan = record.plan
    sections = [
        run_sections.ending_section(record),
        run_sections.training_section(record),
        run_sections.result_section(record),
        suites_section(record.result.get("suites")),
        *more,
        memory_section(plan, record.result),
        plan_sections.nodes_section(plan),
        plan_sections.decisions_section(plan),
        plan_sections.fixes_section(plan),
        plan_sections.warnings_section(plan),
        data_section(record.data),
        plan_sections.environment_section(plan, record.environment),
        plan_sections.command_section(plan, record.environment, record.recipe),
    ]
    return page(f"{record.name}: {record.state}", _header(record), sections, footer, script)


def _header(record: RunRecord) -> list[Markup]:
    """Name and state, a line about the run, its directory, and the most important numbers."""
    is_plan = record.state in ("planned", "not started")
    text, kind = run_sections.STATES[record.state], record.state.replace(" ", "-")
    if record.state == "planned" and record.problems:
        text, kind = "✕ does not fit", "failed"
    plan = record.plan
    rows = plan_sections.facts(plan) if is_plan else run_sections.run_rows(record)
    return [
        tag("p", f"effilaunch {'plan' if record.state == 'planned' else 'report'}", class_="over"),
        tag("div", tag("h1", record.name), tag("span", text, class_=f"state {kind}"), class_="title"),
        tag("p", plan_sections.summary(plan, plan_sections.LEAD), class_="lead"),
        *([tag("p", code(record.run_dir), class_="soft small")] if record.run_dir else []),
        tiles(rows),
    ]


def compare_page(
    records: Sequence[RunRecord],
    names: Sequence[str],
    footer: str,
    more: Sequence[Section | None] = (),
    script: tuple[str, Markup] | None = None,
) -> str:
    """The page of several runs. names: of the runs, each different; the others as of `run_page`."""
    title = f"{len(records)} runs compared"
    top = [tag("p", "effilaunch report", class_="over"), tag("h1", title)]
    return page(title, top, [*compare.sections(records, names), *more], footer, script)


def write_plan_page(data: Mapping[str, Any], recipe: str, output: str, problems: Sequence[Problem]) -> Path:
    """Write the page of a plan to a new file and return its path.

    output: the file, "" for NAME-plan.html in the current folder. The rest as of `plan_page`. Raises
    RecipeError if the file exists or cannot be written.
    """
    target = Path(output or f"{Path(recipe).stem}-plan.html")
    with writing(target, "--html FILE"):
        write_new(target, plan_page(data, recipe, problems))
    return target


def plan_page(data: Mapping[str, Any], recipe: str, problems: Sequence[Problem]) -> str:
    """The page of a plan. data: that of `plan --json`. problems: why it does not fit."""
    text = str((data.get("files") or {}).get("recipe.yaml", ""))
    messages = [str(problem) for problem in problems]
    record = RunRecord(name=Path(recipe).stem, state="planned", plan=data, recipe=text, problems=messages)
    return run_page(without_secrets(record, hide_secrets()), made())


@contextlib.contextmanager
def reported(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Write the report into the run directory as the block begins, and as it ends, also with an error."""
    _write_page(run_dir, lambda: read_run(run_dir))
    try:
        yield
    except EffilaunchError as error:
        _report_end(run_dir, say, error)
        raise
    _report_end(run_dir, say, None)


def _report_end(run_dir: Path, say: Callable[[str], None], error: EffilaunchError | None) -> None:
    """Write the report; a failure to do so changes nothing about the run."""

    def record() -> RunRecord:
        found = read_run(run_dir)
        if error is None:
            return found
        messages = [hide_secrets()(problem.message) for problem in error.problems]
        interrupted = isinstance(error, Interrupted)
        keep_end(run_dir, messages, interrupted=interrupted)
        return replace(found, state="stopped" if interrupted else "failed", problems=messages)

    if _write_page(run_dir, record):
        say(f"report: {printable(str(run_dir / REPORT))}")


def write_report(run_dir: Path) -> bool:
    """Write the report of a run that has changed since; whether that was possible."""
    return _write_page(run_dir, lambda: read_run(run_dir))


def _write_page(run_dir: Path, record: Callable[[], RunRecord]) -> bool:
    """Whether the page was written; the run needs none."""
    target = run_dir / REPORT
    try:
        write_text(target, run_page(shown_record(record(), run_dir), made()))
    except Exception as why:  # bugs of ours included
        note(f"{printable(str(target))} was not written: {why}")
        return False
    return True


def shown_record(record: RunRecord, folder: Path) -> RunRecord:
    """The record without secrets; with the diagnosis of its logs, if the run failed."""
    if record.state == "failed":
        with contextlib.suppress(EffilaunchError, OSError, ValueError, EOFError):  # no readable logs
            found, recipe = diagnose([str(folder)], FAILURES), recipe_of([str(folder)])
            found = found if recipe is None else with_recipe(found, recipe)
            record = replace(record, diagnosis=found.to_json())
    return without_secrets(record, hide_secrets())


def hide_secrets() -> Callable[[str], str]:
    return hider(secret_values(os.environ))


def made() -> str:
    """The line at the end of a page."""
    return f"Written by effilaunch {__version__} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC."
