"""What the planner's page asks, as JSON: what it offers to choose, plans of its recipes, charts of them.

The page is the same on the site, where this runs in the browser, and at `plan --browser`, where it runs on
the user's machine (launcher/report/planner_page). It gets what `plan --json` prints, and parts of the report.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from launcher.errors import DoesNotFit, EffilaunchError, Problem, RecipeError
from launcher.execute.record import RunRecord
from launcher.execute.record import without_secrets as record_without_secrets
from launcher.files.safe_files import LARGEST_TEXT, read_text
from launcher.files.shipped import recipes_dir, shipped_names
from launcher.inputs.planning_facts import gather, recipe_hardware
from launcher.inputs.shown_plan import ShownPlan, shown_plan
from launcher.machine.hardware import DEVICES, parse_hardware
from launcher.models.model_config import shipped_model_names
from launcher.recipe.json_schema import recipe_json_schema
from launcher.recipe.loading import load_recipe
from launcher.recipe.merged_yaml import find_recipe
from launcher.report import plan_sections
from launcher.report.html.blocks import drawn, drawn_block
from launcher.report.html.elements import joined
from launcher.report.loopback import wait_for_interrupt
from launcher.report.memory_sections import compared_bars, memory_section
from launcher.report.outcome import Outcome, json_text, note, without_secrets
from launcher.report.planner_page.page import PageStart, serving
from launcher.report.run_pages import hide_secrets
from launcher.report.sections import line
from launcher.report.values import at

START_ON = "1xH100-80GB"
"""Hardware of a page whose recipe names none."""


def answer(text: str) -> str:
    """The answer to one question of the page; `ask` names it. ValueError for what the page never sends."""
    answers: Mapping[str, Callable[[Any], dict[str, Any]]] = {
        "catalogue": catalogue, "plan": planned, "chart": chart,
    }  # fmt: skip
    try:
        asked = _QUESTION.validate_python(json.loads(text))
    except RecursionError:
        raise ValueError("the question is nested too deeply") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return json.dumps(answers[asked.ask](asked))


class _Question(BaseModel):
    """What the page sends: nothing is converted, so that nothing else is planned than was asked."""

    model_config = ConfigDict(strict=True, frozen=True)


class Catalogue(_Question):
    ask: Literal["catalogue"] = "catalogue"


class PageRecipe(_Question):
    """One recipe on one hardware."""

    ask: Literal["plan"] = "plan"
    path: str = Field(pattern=r"^[^\x00]*$")
    text: str
    sets: list[str] = []
    """As of `--set`."""
    on: str | None = None
    configs: dict[str, dict[str, Any]] = {}
    """Name of a model -> its configuration."""


class Column(_Question):
    name: str
    memory: dict[str, Any]
    """Of a plan."""


class Chart(_Question):
    ask: Literal["chart"] = "chart"
    columns: list[Column]


_QUESTION: TypeAdapter[Catalogue | PageRecipe | Chart] = TypeAdapter(
    Annotated[Catalogue | PageRecipe | Chart, Field(discriminator="ask")]
)


def catalogue(_asked: Catalogue) -> dict[str, Any]:
    """What the page offers: devices, recipes, models, and the schema of recipes."""
    folder = recipes_dir()
    return {
        "devices": [name for name in DEVICES if name != "cpu"],
        "recipes": {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in shipped_names()},
        "models": shipped_model_names(),
        "schema": recipe_json_schema(),
    }


def planned(asked: PageRecipe) -> dict[str, Any]:
    """One recipe on one hardware.

    The answer: `status` and `json` are those of `plan --json`; of a plan `memory`, `facts`
    (name, value, note), `changes` with which it would fit, `files` and `sections`, which is HTML.
    """
    try:
        loaded = load_recipe(asked.path, asked.sets, text=asked.text)
        made = shown_plan(*gather(loaded, asked.on, configs=asked.configs))
    except EffilaunchError as error:
        return _refused(error.exit_code, error.problems)
    except Exception as error:  # a bug of ours must not end the page
        message = f"{type(error).__name__}: {error}"
        hint = "this is a bug of effilaunch; `effilaunch plan` writes its log"
        return _refused(EffilaunchError.exit_code, [Problem("bug", message, hint=hint)])
    return _shown(made, asked.path, asked.text)


def _refused(status: int, problems: Sequence[Problem]) -> dict[str, Any]:
    problems = without_secrets(problems)
    return {
        "status": status,
        "json": json_text("plan", {}, problems),
        "problems": [problem.to_json() for problem in problems],
    }


def _shown(made: ShownPlan, path: str, text: str) -> dict[str, Any]:
    data = made.data
    problems = [str(problem) for problem in made.problems]
    record = RunRecord(Path(path).stem, "planned", data, recipe=text, problems=problems)
    record = record_without_secrets(record, hide_secrets())
    plan = record.plan
    sections = (
        memory_section(plan),
        plan_sections.decisions_section(plan),
        plan_sections.fixes_section(plan),
        plan_sections.warnings_section(plan),
        plan_sections.nodes_section(plan),
        plan_sections.environment_section(plan, {}),
    )
    rows = sorted(plan_sections.facts(plan), key=lambda row: row.name != plan_sections.MEMORY.name)
    facts = [[row.name, line(row.value), line(row.note)] for row in rows]
    facts += [[row["key"], row["value"], ""] for row in plan_sections.chosen_rows(plan)]
    return {
        "status": DoesNotFit.exit_code if made.problems else 0,
        "json": json_text("plan", data, made.problems),
        "problems": [problem.to_json() for problem in made.problems],
        "fits": at(data, "memory", "fits"),
        "memory": data["memory"],
        "facts": facts,
        "changes": [{"change": dict(one.change), "text": one.text} for one in made.would_fit],
        "files": dict(made.bundle.files),
        "sections": str(joined([drawn(section) for section in sections if section is not None])),
    }


def chart(asked: Chart) -> dict[str, Any]:
    """The memory of several plans on one scale."""
    columns = [(one.name, {"memory": one.memory}) for one in asked.columns]
    return {"chart": str(drawn_block(compared_bars(columns))) if columns else ""}


def browser_command(recipe: str, *, overrides: Sequence[str], on: str | None, port: int) -> Outcome:
    """Serve the planner's page with this recipe until Ctrl-C."""
    found = find_recipe(recipe)
    if found is None:
        load_recipe(recipe)  # says what is wrong with the name
    assert found is not None, "load_recipe refuses what find_recipe does not find"
    try:
        text = read_text(found, LARGEST_TEXT)
    except (OSError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        raise RecipeError(Problem("unreadable", message, str(found))) from None
    for one in overrides:
        if "=" not in one:
            hint = "write --set key=value, e.g. --set trainer.max_steps=100"
            raise RecipeError(Problem("override", f"cannot read {one!r}", "--set", hint=hint))
    if on is not None:
        parse_hardware(on, "--on")
    hardware = on or _own_hardware(found, overrides)
    if hardware is None:
        hardware = START_ON
        note(f"the recipe has no hardware: the page begins with {START_ON}; --on begins with another")
    start = PageStart(path=str(found), text=text, on=(hardware,), sets=tuple(overrides))
    with serving(start, answer, port) as address:
        wait_for_interrupt(address)
    return Outcome({}, "")


def _own_hardware(path: Path, overrides: Sequence[str]) -> str | None:
    """The `hardware` of the recipe."""
    with contextlib.suppress(EffilaunchError):
        recipe = load_recipe(path, overrides).recipe
        return None if recipe.hardware is None else recipe_hardware(recipe).label
    return None
