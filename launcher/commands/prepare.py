"""`prepare`: tokenise and cache the data of a recipe before the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher.errors import DoesNotFit, Problem, RecipeError
from launcher.execute.run_dir import scratch_run_dir, write_run_dir
from launcher.execute.start import prepare_data
from launcher.files.safe_files import read_record
from launcher.inputs.first_rows import data_problems
from launcher.inputs.planning_facts import gather
from launcher.machine.software import require_modules
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render
from launcher.report.outcome import Outcome
from launcher.report.result_text import prepared_text
from launcher.report.run_display import showing
from launcher.report.terminal import Page, page_of
from launcher.tasks import task_named

NEEDED = ("transformers", "datasets")


def prepare_command(
    recipe: str, *, overrides: Sequence[str], on: str | None, show: int | None, tiny: bool, as_json: bool
) -> Outcome:
    """Prepare the data in a child process; `show` samples with their loss mask."""
    loaded = load_recipe(recipe, overrides)
    if task_named(loaded.recipe.task).made_by_hooks:
        message = f"task {loaded.recipe.task} prepares nothing: make_datasets makes its datasets in the run"
        raise RecipeError(Problem("usage", message, path="task", hint="`effilaunch run` needs no prepare"))
    absent = [] if tiny else data_problems(loaded)
    if absent:
        raise RecipeError(absent)
    require_modules(NEEDED)
    planned, facts = gather(loaded, on, tiny=tiny)
    try:
        plan = make_plan(planned, facts)
    except DoesNotFit as error:
        plan = error.nearest_miss  # data does not depend on the memory of the device
    bundle = render(plan)
    with scratch_run_dir("prepare") as run_dir:
        write_run_dir(bundle, run_dir, resume=False)
        with showing(as_json=as_json, on_stderr=True) as shown:
            prepare_data(bundle, run_dir, samples=show or 0, echo=shown.say, look=shown.look)
        record = read_record(run_dir / "data.json")
    samples = record.pop("samples")
    text = prepared_text(record, samples, Page() if as_json else page_of(sys.stdout))
    return Outcome({"data": record, "samples": samples}, text)
