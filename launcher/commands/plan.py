"""`plan` and `validate`: nothing here opens weights or devices, and of local data only the first rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.errors import DoesNotFit, EffilaunchError, Problem, RecipeError
from launcher.inputs.first_rows import judged_data
from launcher.inputs.planning_facts import check_model, gather, recipe_hardware
from launcher.knowledge.lint.document import printable
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.plan.planner import make_plan, plan_first
from launcher.plan.search import Search, search
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.report.outcome import Outcome, note
from launcher.schedulers.hostfile import hostfile_warnings

if TYPE_CHECKING:
    from launcher.render.bundle import Bundle


def bundle_json(bundle: Bundle) -> dict[str, Any]:
    """The keys of `plan --json`: plan.json plus the files."""
    return {**json.loads(bundle.files["plan.json"]), "files": dict(bundle.files)}


def plan_command(
    recipe: str,
    overrides: Sequence[str],
    on: str | None,
    explain: str | None,
    *,
    ranking: bool = False,
    trace: bool = False,
    html: str | None = None,
) -> Outcome:
    """The whole plan; with `explain`, where one value came from; with `ranking`, what it was chosen among.

    `trace`: with the memory of the real model, traced. `html`: also as a page, see there. Exit 3 shows the
    nearest miss.
    """
    from launcher.render.bundle import render

    loaded, facts = gather(load_recipe(recipe, overrides), on, trace=trace)
    absent = hostfile_warnings(loaded.recipe, facts.hardware)
    facts = replace(facts, warnings=(*facts.warnings, *absent))
    found = search(loaded, facts)
    problems: Sequence[Problem] = ()
    extra: dict[str, Any] = {}
    others: list[str] = []
    try:
        bundle = render(plan_first(loaded, facts, found))
    except DoesNotFit as error:
        bundle, problems = render(error.nearest_miss), error.problems
        extra = {"would_fit": [other.to_json() for other in error.would_fit]}
        others = [other.said for other in error.would_fit]
    for said in _nvme_words(bundle.plan):
        note(said)
    code = DoesNotFit.exit_code if problems else 0
    compared, traced = _traced(bundle.plan, facts)
    extra |= compared
    if ranking:
        from launcher.report.search_text import search_text

        shown = _ranking(found, bundle.plan)
        timed = bundle.plan.time.figures_known
        text = search_text(shown["search"], shown["compared"], shown["left_out"], others, timed=timed)
        return Outcome({**bundle_json(bundle), **extra, **shown}, text, problems, code)
    if explain is None:
        page = Outcome({**bundle_json(bundle), **extra}, _page(bundle) + traced, problems, code)
        return page if html is None else _with_page(page, recipe, html)
    return _explained(bundle, explain, problems, code)


def _traced(plan: Plan, facts: Facts) -> tuple[dict[str, Any], str]:
    """What a trace adds to the plan, for programs and for people; nothing without one."""
    if facts.trace is None:
        return {}, ""
    from launcher.inputs.model_trace import trace_rows
    from launcher.report.trace_text import trace_text

    compared = trace_rows(plan, facts)
    return ({}, "") if compared is None else ({"trace": compared}, trace_text(compared))


def _with_page(shown: Outcome, recipe: str, html: str) -> Outcome:
    """The plan, also written as a page: in the file `html`, with "" in one that is named by the recipe."""
    from launcher.commands.report import write_plan_page

    path = str(write_plan_page(shown.data, recipe, html, shown.problems))
    return replace(shown, data={**shown.data, "page": path}, text=f"{shown.text}\nwrote {printable(path)}\n")


def _page(bundle: Bundle) -> str:
    """The plan as one page of stdout."""
    from launcher.report.page import page_of
    from launcher.report.text import plan_text

    return plan_text(bundle, page_of(sys.stdout))


def _nvme_words(plan: Plan) -> list[str]:
    """What stands in the way of an offload to NVMe here; its checks are loaded where one is planned."""
    if "nvme" not in (plan.job.offload_optimizer, plan.job.offload_param):
        return []
    from launcher.doctor.start_checks import nvme_words

    return nvme_words(plan)


def _explained(bundle: Bundle, explain: str, problems: Sequence[Problem], code: int) -> Outcome:
    """Where one setting came from, those of a section, or with "" all of them."""
    from launcher.report.text import explain_text

    text = explain_text(bundle.plan, explain)
    if not text.strip():
        raise RecipeError(
            Problem(
                "unknown-setting",
                f"the plan has no setting {explain!r}",
                path=explain,
                hint="`plan --json` lists all settings",
            )
        )
    data = bundle_json(bundle)
    settings = data["settings"].items()
    chosen = {k: v for k, v in settings if not explain or (k + ".").startswith(explain + ".")}
    return Outcome({"settings": chosen}, text, problems, code)


def _ranking(found: Search, plan: Plan) -> dict[str, Any]:
    """The keys that `--search` adds to `plan --json`."""
    from launcher.plan.weighing import search_rows

    return {
        "search": search_rows(found, plan.schedule.steps),
        "compared": {
            "configurations": found.estimated + found.implied,
            "estimated": found.estimated,
            "implied": found.implied,
        },
        "left_out": [{"what": entry.what, "reason": entry.reason} for entry in found.left_out],
    }


def validate_command(recipes: Sequence[str]) -> Outcome:
    """All problems of the recipes; what is absent on this machine is a warning."""
    problems: list[Problem] = []
    checked: list[dict[str, Any]] = []
    lines: list[str] = []
    for name in recipes:
        found: list[Problem] = []
        warnings: list[str] = []
        try:
            loaded = load_recipe(name)
            if loaded.recipe.python:
                from launcher.recipe.hook_file import read_hooks

                read_hooks(loaded.recipe.python)
            warnings, _ = judged_data(loaded, None)
            written_for = recipe_hardware(loaded.recipe) if loaded.recipe.hardware else None
            warnings += hostfile_warnings(loaded.recipe, written_for)
            warnings += _try_plan(loaded)
        except EffilaunchError as error:
            found = error.problems
        problems += found
        checked.append({"recipe": name, "valid": not found, "warnings": warnings})
        lines.append(f"{printable(name)}: {'valid' if not found else f'{len(found)} problem(s)'}")
        lines += [f"  warning: {warning}" for warning in warnings]
    code = RecipeError.exit_code if problems else 0
    return Outcome({"recipes": checked}, "\n".join(lines), problems, code)


def _try_plan(loaded: LoadedRecipe) -> list[str]:
    """Plan on the recipe's own hardware, from local facts: refusals are problems, size is a warning."""
    try:
        if loaded.recipe.hardware is None:
            check_model(loaded.recipe)
            return []
        loaded, facts = gather(loaded, None, allow_network=False, allow_torch=False)
        warnings = _nvme_words(make_plan(loaded, facts))
    except DoesNotFit as error:
        return [problem.message for problem in error.problems]
    except RecipeError as error:
        if {p.code for p in error.problems} <= {"model-config-missing", "not-in-closed-form"}:
            return [problem.message for problem in error.problems]
        raise
    return warnings
