"""`plan`: the complete plan, from the recipe and the first rows of local data; no weights, no devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.errors import DoesNotFit, Problem, RecipeError, printable
from launcher.inputs.shown_plan import planned
from launcher.recipe.loading import load_recipe
from launcher.report.outcome import Outcome
from launcher.report.terminal import page_of

if TYPE_CHECKING:
    from launcher.render.bundle import Bundle


def plan_command(
    recipe: str,
    *,
    overrides: Sequence[str],
    on: str | None,
    explain: str | None,
    trace: bool,
    search: bool,
    html: str | None,
    browser: bool = False,
    port: int = 0,
    as_json: bool = False,
) -> Outcome:
    """Show the plan; the nearest miss, with exit status 3, if none fits.

    explain: show the origin of this setting or section instead, "" for all. search: show all configurations
    that fit. trace: trace the memory of the real model. html: also write the plan to this HTML file, "" for
    NAME-plan.html. browser: serve a page to plan on instead.
    """
    if browser:
        return _in_browser(recipe, overrides, on, port, as_json=as_json, trace=trace)
    if port:
        raise RecipeError(Problem("usage", "--port needs --browser", hint="add --browser, or leave it out"))
    made = planned(load_recipe(recipe, overrides), on, trace=trace)
    code = DoesNotFit.exit_code if made.problems else 0
    if search:
        return Outcome({**made.data, **made.ranking}, made.search_text(), made.problems, code)
    if explain is None:
        shown = Outcome(made.data, made.text(page_of(sys.stdout)), made.problems, code)
        return shown if html is None else _with_page(shown, recipe, html)
    return _explained(made.bundle, explain, made.problems, code)


def _in_browser(
    recipe: str, overrides: Sequence[str], on: str | None, port: int, *, as_json: bool, trace: bool
) -> Outcome:
    if as_json or trace:
        message = f"--browser excludes {'--json' if as_json else '--trace'}"
        raise RecipeError(Problem("usage", message, hint="leave out one of the two"))
    from launcher.commands.plan_page import browser_command

    return browser_command(recipe, overrides=overrides, on=on, port=port)


def _with_page(shown: Outcome, recipe: str, html: str) -> Outcome:
    """Also write the plan as a page to the file `html`, "" for a default name."""
    from launcher.report.run_pages import write_plan_page

    path = str(write_plan_page(shown.data, recipe, html, shown.problems))
    return replace(shown, data={**shown.data, "page": path}, text=f"{shown.text}\nwrote {printable(path)}\n")


def _explained(bundle: Bundle, explain: str, problems: Sequence[Problem], code: int) -> Outcome:
    """Show where a setting, a section or, with "", all settings come from."""
    from launcher.report.plan_text import explain_text

    data = bundle.to_json()
    text = explain_text(data, explain)
    if not text.strip():
        message, hint = f"the plan has no setting {explain!r}", "`plan --json` lists all settings"
        raise RecipeError(Problem("unknown-setting", message, path=explain, hint=hint))
    settings = data["settings"].items()
    chosen = {k: v for k, v in settings if not explain or (k + ".").startswith(explain + ".")}
    return Outcome({"settings": chosen}, text, problems, code)
