"""`drill`: interrupt a short run by faults, resume it and compare its losses."""

from __future__ import annotations

from typing import Any

from launcher.errors import Problem, RunFailed
from launcher.lab.drill import drill_recipe, drill_text
from launcher.report.outcome import Outcome, echo, note


def drill_command(recipe: str, *, as_json: bool, **options: Any) -> Outcome:
    """Drill a recipe; exit status 5 if it did not continue exactly after a fault."""
    drill = drill_recipe(recipe, say=note if as_json else echo, **options)
    problems = [
        Problem(
            "drill-failed",
            f"{record['id']}: {record['reason']}",
            file=record["run_dir"],
            hint=f"the output of the run is in {drill.folder}, in the logs of the same name",
        )
        for record in drill.data["faults"]
        if record["status"] == "failed"
    ]
    data = {"run_dir": str(drill.folder), **drill.data}
    code = RunFailed.exit_code if problems else 0
    return Outcome(data, drill_text(drill.data, drill.folder), problems[:1], code)
