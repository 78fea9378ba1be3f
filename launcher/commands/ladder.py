"""`ladder`: measure the memory of each strategy of a recipe beside its estimate."""

from __future__ import annotations

from typing import Any

from launcher.lab.ladder import climb_ladder, ladder_text
from launcher.report.outcome import Outcome
from launcher.report.run_display import showing


def ladder_command(recipe: str, *, as_json: bool, **options: Any) -> Outcome:
    """Run the ladder; exit status 4 or 5 if no rung ran."""
    with showing(as_json=as_json, says_rows=False) as shown:
        folder, data = climb_ladder(recipe, shown=shown, **options)
    return Outcome({"run_dir": str(folder), **data}, ladder_text(data, folder))
