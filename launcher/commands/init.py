"""`init`: write a recipe from four questions and a look at the data, and plan it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from launcher.errors import Problem, RecipeError, printable
from launcher.inputs.data_survey import Sight, flags_of, goals_of, look, rows_for, rows_words, suggestion
from launcher.inputs.first_rows import data_problems
from launcher.inputs.first_samples import ROWS, try_first_rows
from launcher.inputs.fitting_method import Fitting, default_model, fit
from launcher.inputs.planning_facts import gather
from launcher.machine import probe
from launcher.machine.hardware import Hardware, parse_hardware, with_host_memory
from launcher.planner.elastic import plan_on
from launcher.planner.starting import GOALS, Rows, draft
from launcher.recipe.loading import load_recipe
from launcher.recipe.yaml_writer import recipe_text
from launcher.render.bundle import Bundle, render
from launcher.render.new_file import refuse_existing, write_new, writing
from launcher.report.outcome import Outcome, note
from launcher.report.plan_text import brief_text
from launcher.report.questions import ask, can_ask
from launcher.tasks import task_named

Given = TypeVar("Given")

_METHODS = {"full": "Full fine-tune", "lora": "LoRA", "qlora": "QLoRA"}
_LEARNS = {
    "instructions": "answers to instructions",
    "chat": "conversations",
    "text": "texts",
    "preferences": "preferred answers (DPO)",
    "classify": "labels",
    "images": "answers about images",
    "feedback": "answers marked good or bad (KTO)",
    "reward-model": "a score for answers",
    "reasoning": "answers that functions score (GRPO)",
    "embeddings": "texts that belong together",
    "ranking": "documents that answer a query",
}
_LICENSED = ("meta-llama/", "google/gemma", "bigcode/starcoder")


def init_command(
    model: str | None,
    data: str | None,
    on: str | None,
    goal: str | None,
    *,
    columns: Sequence[str],
    output: str | None,
    as_json: bool,
) -> Outcome:
    """Ask for what was not given, look at the data, write a recipe and plan it.

    RecipeError where nobody can be asked, or what was given cannot be used; nothing is written then.
    """
    asking = can_ask() and not as_json
    if not asking:
        _require({"--model": model, "--data": data, "--on": on, "--goal": goal})
    if output is not None:
        refuse_existing(Path(output))
    named = parse_columns(columns)
    sight = _answer(data, "Data (file, folder, pattern, or data set of the hub)", "", look)
    if asking and sight.count is not None:
        more = "more than " if sight.more else ""
        note(f"  {more}{sight.count:,} rows with the columns {printable(sight.columns)}")
    chosen, rows = _answer(
        goal, f"Goal ({', '.join(GOALS)})", _first_goal(sight, named), _use_goal(sight, named, asking)
    )
    if asking:
        note(f"  {printable(rows_words(rows))}")
    here = found_here() if on is None else ""
    hardware = _answer(on, "Hardware (such as 8xA100-80GB, 1x24GB, cpu)", here, _use_hardware)
    model_default = default_model(chosen, rows, hardware) if model is None else ""
    fitting = _answer(
        model, "Model (of the hub, folder, or .gguf file)", model_default,
        lambda name: fit(name, chosen, rows, hardware),
    )  # fmt: skip
    target = Path(output) if output is not None else _free_name(fitting)
    return _write(fitting, target)


def _answer(given: str | None, question: str, default: str, use: Callable[[str], Given]) -> Given:
    """The value of a flag, else the answer to a question."""
    return use(given) if given is not None else ask(question, default, use)


def _require(flags: Mapping[str, str | None]) -> None:
    """RecipeError with every flag that is missing where nobody can be asked."""
    problems = [
        Problem("usage", f"init needs {flag} if there is no terminal", hint=f"add {flag} …")
        for flag, value in flags.items()
        if value is None
    ]
    if problems:
        raise RecipeError(problems)


def parse_columns(words: Sequence[str]) -> dict[str, str | None]:
    """`field=column` words; `column=` leaves a column out (None). RecipeError for another form."""
    columns: dict[str, str | None] = {}
    for word in words:
        field, equals, column = word.partition("=")
        if not equals or (column and not field):
            hint = "for example completion=answer, or history= for a column that is not read"
            raise RecipeError(Problem("usage", f"{word!r} is not FIELD=COLUMN", hint=hint))
        columns[field] = column or None
    return columns


def _first_goal(sight: Sight, columns: Mapping[str, str | None]) -> str:
    """The goal that fits the columns of the rows, or similar names; empty where it is not clear."""
    if sight.count is None:
        return ""
    fitting = goals_of(sight, columns) or [goal for goal in GOALS if suggestion(sight, goal)]
    return fitting[0] if fitting else ""


def _use_goal(
    sight: Sight, columns: Mapping[str, str | None], asking: bool
) -> Callable[[str], tuple[str, Rows]]:
    """A function of a goal that returns it and its rows; columns with unknown names may be asked for."""

    def use(goal: str) -> tuple[str, Rows]:
        if goal not in GOALS:
            raise RecipeError(Problem("usage", f"{goal!r} is not one of {', '.join(GOALS)}"))
        try:
            return goal, rows_for(sight, goal, columns)
        except RecipeError as error:
            if not asking or columns or error.problems[0].code != "goal-columns":
                raise
            note(f"  {printable(error.problems[0].message)}")
        like = " ".join(flags_of(suggestion(sight, goal)))
        rows = ask(
            "Columns (FIELD=COLUMN …)", like, lambda text: rows_for(sight, goal, parse_columns(_words(text)))
        )
        return goal, rows

    return use


def _words(text: str) -> list[str]:
    """The words of an answer, quoted as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RecipeError(Problem("usage", f"{text!r} cannot be split into words: {error}")) from None


def _use_hardware(text: str) -> Hardware:
    return with_host_memory(parse_hardware(text), probe.host_memory_bytes())


def found_here() -> str:
    """This machine's devices in the form of `--on`; unknown devices by their memory."""
    found = probe.probe_hardware()
    try:
        parse_hardware(found.label)
    except RecipeError:
        return f"{found.devices_per_node}x{(found.device_bytes or 0) // 10**9}GB"
    return found.label


def _free_name(fitting: Fitting) -> Path:
    """MODEL_GOAL.yaml in the current folder, with a number if that exists."""
    start = fitting.start
    name = start.model.get("gguf_file", start.model["name_or_path"]).rstrip("/").rpartition("/")[2]
    name = name.removesuffix(".gguf").removeprefix("package:")
    stem = f"{re.sub('[^a-z0-9]+', '_', name.lower()).strip('_') or 'model'}_{start.goal}"
    number, target = 2, Path(f"{stem}.yaml")
    while target.exists():
        number, target = number + 1, Path(f"{stem}_{number}.yaml")
    return target


def _write(fitting: Fitting, target: Path) -> Outcome:
    """Write the recipe and plan it; a recipe that cannot be planned is removed."""
    fitting = _placed(fitting, target.absolute().parent)
    data, notes = draft(fitting.start, fitting.method, fitting.length, fitting.missed)
    with writing(target):
        write_new(target, recipe_text(data, notes, _head(fitting, target)))
    try:
        loaded = load_recipe(target)
        if problems := data_problems(loaded):
            raise RecipeError(problems)
        loaded, facts = gather(loaded, None)
        bundle = render(plan_on(loaded, facts))
        rows = fitting.start.rows
        unchecked = try_first_rows(bundle, has_more=rows.count is None or rows.more or rows.count > ROWS)
    except BaseException:
        target.unlink()
        raise
    return _outcome(fitting, target, bundle, unchecked)


def _placed(fitting: Fitting, folder: Path) -> Fitting:
    """With paths as in a recipe in `folder`: relative if they are below it."""
    start = fitting.start
    model, rows = dict(start.model), start.rows
    name = model["name_or_path"]
    if name.startswith("/"):
        near = _near(name, folder)
        model["name_or_path"] = near if near.startswith("/") else f"./{near}"
    rows = replace(rows, path=_near(rows.path, folder))
    return replace(fitting, start=replace(start, model=model, rows=rows))


def _near(path: str, folder: Path) -> str:
    return path.removeprefix(f"{folder}/")


def _head(fitting: Fitting, target: Path) -> list[str]:
    """The comment at the top of the recipe."""
    start = fitting.start
    name, file = printable(start.model["name_or_path"]), printable(target.name)
    lines = [f"{_METHODS[fitting.method]} of {name} on {_LEARNS[start.goal]}."]
    lines.append(f"On: {start.hardware.label}.")
    if start.rows.count is not None:
        lines.append(f"Data: {printable(rows_words(start.rows))}.")
    before = ["accept the model's licence on the hub"] if name.startswith(_LICENSED) else []
    extra = task_named(start.task).extra
    before += [f"pip install 'effilaunch[{extra}]'"] if extra else []
    if before:
        lines.append(f"Before: {'; '.join(before)}.")
    return [*lines, f"Launch: effilaunch run {file}"]


def _outcome(fitting: Fitting, target: Path, bundle: Bundle, unchecked: str | None) -> Outcome:
    start, rows = fitting.start, fitting.start.rows
    file = printable(str(target))
    steps = {
        f"effilaunch validate {file}": "every problem at once, after you changed it",
        f"effilaunch run {file} --tiny": "rehearse with a narrow model and four steps",
        f"effilaunch run {file}": "train",
    }
    width = max(map(len, steps))
    lines = [
        f"wrote {file}: {_METHODS[fitting.method]} of {printable(start.model['name_or_path'])} on "
        f"{_LEARNS[start.goal]}",
        "",
        brief_text(bundle, f"`effilaunch plan {file}` shows it whole").rstrip("\n"),
        "",
        f"rows      the first {ROWS} were prepared as `prepare` does: no fault"
        if unchecked is None
        else f"rows      not tokenised: {printable(unchecked)}; `effilaunch prepare {file}` checks them all",
        "",
        "next",
        *(f"  {command:{width}}  {purpose}" for command, purpose in steps.items()),
    ]
    data = {
        "path": str(target),
        "goal": start.goal,
        "task": start.task,
        "model": dict(start.model),
        "hardware": start.hardware.label,
        "method": fitting.method,
        "rows": {
            "path": rows.path,
            "format": rows.format,
            "columns": dict(rows.columns),
            "count": rows.count,
            "more": rows.more,
            "longest_characters": None if rows.longest is None else sum(map(len, rows.longest)),
            "longest_tokens": rows.longest_tokens,
        },
        "not_checked": unchecked,
        "next": list(steps),
    }
    return Outcome(data, "\n".join(lines))
