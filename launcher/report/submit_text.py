"""Render job scripts, submissions and sweeps as plain text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.knowledge.lint.document import printable
from launcher.render.bundle import Bundle
from launcher.report.tables import table
from launcher.report.text import plan_text, shell_word
from launcher.schedulers.submitted import Submitted


def dry_run_text(bundle: Bundle, scripts: Mapping[str, str], heard: Sequence[str]) -> str:
    """The plan, every script, and the answers of the scheduler."""
    parts = [plan_text(bundle)]
    parts += [
        f"{name}\n" + "".join(f"  {line}\n" for line in text.splitlines()) for name, text in scripts.items()
    ]
    return "\n".join([*parts, *heard, "nothing was written or submitted"]) + "\n"


def submitted_text(submitted: Submitted) -> str:
    """The submitted jobs, and how to follow or cancel them."""
    folder = shell_word(str(submitted.folder))
    what = (
        f"array {submitted.job} of {len(submitted.runs)} jobs"
        if submitted.is_sweep
        else f"job {submitted.job}"
    )
    before = f", after job {submitted.prepare} that prepares the data" if submitted.prepare else ""
    return (
        f"submitted {what}{before}\n"
        f"  directory  {printable(str(submitted.folder))}\n"
        f"  follow     effilaunch submit {folder} --follow\n"
        f"  cancel     effilaunch submit {folder} --cancel\n"
    )


def cancelled_text(submitted: Submitted) -> str:
    others = f"; the other runs of {printable(str(submitted.folder))} continue" if submitted.is_part else ""
    return f"cancelled job(s) {', '.join(submitted.own_jobs)}; they are not requeued{others}\n"


def sweep_text(submitted: Submitted, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per run: its values, its last losses, how it ended."""
    names = list(rows[0]["values"])
    evaluated = any(row["eval_loss"] is not None for row in rows)
    head = ["run", *names, "loss", *(["eval loss"] if evaluated else []), "seconds", "state"]
    body = [
        [
            row["run_dir"].rpartition("/")[2].partition("-")[0],
            *(_shown(row["values"][name]) for name in names),
            _number(row["loss"]),
            *([_number(row["eval_loss"])] if evaluated else []),
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
            row["state"],
        ]
        for row in rows
    ]
    done = [row for row in rows if row["seconds"] is not None]
    lines = [f"sweep of {len(rows)} runs in {printable(str(submitted.folder))}", *table([head, *body])]
    by = "eval_loss" if evaluated else "loss"
    if done and all(row[by] is not None for row in done):
        best = min(done, key=lambda row: row[by])
        lines.append(f"lowest {by.replace('_', ' ')}: {printable(best['run_dir'])}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
