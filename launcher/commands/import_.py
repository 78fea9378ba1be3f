"""`import`: convert files of other tools to one recipe, list what was dropped, plan the recipe."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.engines.fsdp import FSDP
from launcher.errors import DoesNotFit, EffilaunchError, MachineError, Problem, RecipeError, printable
from launcher.importing.join import Imported, import_files
from launcher.importing.reading import Dropped, Effect
from launcher.importing.writing import files_of, recipe_text
from launcher.inputs.planning_facts import gather
from launcher.models.model_config import NOT_HERE
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.new_file import existing, write_new, writing
from launcher.report.outcome import Outcome, note

ASSUMED = "A100-80GB"
"""Device of the trial plan if neither a file nor --on names one."""
_ORDER = (Effect.NEEDED, Effect.TRAINING, Effect.NONE)
_HEADS = {
    Effect.TRAINING: "changes the training and has no recipe key:",
    Effect.NONE: "has no effect on the training result:",
}


def import_command(files: Sequence[str], *, output: str | None, on: str | None) -> Outcome:
    """Print the recipe, and what was dropped on stderr; or write it to `output` and print what was dropped.

    Exit status 2 if a value must still be set, or the recipe is refused; it is written anyway. Raises
    RecipeError if the files cannot be converted, or the output exists.
    """
    target = None if output is None else Path(output)
    name = "imported" if target is None else target.stem
    made = import_files(files)
    text = recipe_text(made, name, Path() if target is None else target.parent)
    others = files_of(made, name)
    if target is not None:
        _write(target, {target.name: text, **others})
    problems, messages = _tried(made, name, target, on)
    listed = "\n".join([*_listed(made), *_closing(made.notes, messages)]).strip()
    data: dict[str, Any] = {
        "recipe": text,
        "output": None if target is None else str(target),
        "files": others,
        "tools": [{"file": file, "tool": tool} for file, tool in zip(made.files, made.tools, strict=True)],
        "dropped": [_entry(entry) for entry in _sorted(made.dropped)],
        "notes": made.notes,
        "plan": messages,
    }
    code = RecipeError.exit_code if problems else 0
    if target is not None:
        wrote = [str(target), *(str(target.parent / other) for other in others)]
        return Outcome(data, f"{listed}\nwrote {', '.join(map(printable, wrote))}", problems, code)
    note(listed)
    if others:
        note(f"it refers to {', '.join(others)}: --output FILE writes them next to it")
    return Outcome(data, text, problems, code)


def _entry(entry: Dropped) -> dict[str, Any]:
    return {
        "file": entry.place.file,
        "line": entry.place.line,
        "key": entry.key,
        "value": entry.value,
        "effect": entry.effect.value,
        "reason": entry.reason,
        "hint": entry.hint or None,
    }


def _sorted(dropped: Sequence[Dropped]) -> list[Dropped]:
    return sorted(dropped, key=lambda e: (_ORDER.index(e.effect), e.place.file, e.place.line or 0))


def _closing(notes: Sequence[str], messages: Sequence[str]) -> list[str]:
    return ["", *notes, *messages] if notes or messages else []


def _listed(made: Imported) -> list[str]:
    """What was dropped, by effect; missing values are reported as errors instead."""
    lines: list[str] = []
    for effect in _ORDER[1:]:
        entries = [entry for entry in _sorted(made.dropped) if entry.effect is effect]
        if entries:
            lines += ["", _HEADS[effect], *(printable(f"  {entry.place} {entry}") for entry in entries)]
    return lines or ["nothing in the files was dropped"]


def _write(target: Path, texts: Mapping[str, str]) -> None:
    """Write the recipe and its files. Raises RecipeError if one exists."""
    files = {target.parent / name: text for name, text in texts.items()}
    if there := [problem for path in files if (problem := existing(path)) is not None]:
        raise RecipeError(there)
    for path, text in files.items():
        with writing(path):
            write_new(path, text)


def _tried(made: Imported, name: str, target: Path | None, on: str | None) -> tuple[list[Problem], list[str]]:
    """Plan the recipe; its problems, and the lines to print."""
    needed = [entry for entry in made.dropped if entry.effect is Effect.NEEDED]
    missing = [_missing(entry) for entry in needed]
    if target is not None:
        problems, messages = _planned(target, on, made)
    else:
        with tempfile.TemporaryDirectory(prefix="effilaunch-import-") as folder:
            path = Path(folder) / f"{name}.yaml"
            for other, text in files_of(made, name).items():
                write_new(path.parent / other, text)
            write_new(path, recipe_text(made, name, path.parent))
            problems, messages = _planned(path, on, made)
        problems = [_unplaced(problem, str(path)) for problem in problems]
    if missing:
        count = f"{len(missing)} value{'s' if len(missing) > 1 else ''}"
        return missing, [
            f"{count} must be set in the recipe: `plan` and `run` refuse it while `todo` names them"
        ]
    return problems, messages


def _missing(entry: Dropped) -> Problem:
    message = f"must be set in the recipe: {entry.reason}"
    hint = entry.hint or None
    return Problem("import-needs-word", message, entry.place.file, entry.place.line, entry.key, hint)


def _unplaced(problem: Problem, path: str) -> Problem:
    """The problem without the path of the temporary recipe; files next to it keep their names."""
    file = Path(problem.file) if problem.file else None
    if file is None or file.parent != Path(path).parent:
        return problem
    name = None if str(file) == path else file.name
    line = None if name is None else problem.line
    return Problem(problem.code, problem.message, name, line, problem.path, problem.hint)


def _planned(path: Path, on: str | None, made: Imported) -> tuple[list[Problem], list[str]]:
    """Plan for --on, the hardware of the recipe, or as many A100-80GB as the files name."""
    try:
        loaded = load_recipe(path)
        asked = on
        if asked is None and loaded.recipe.hardware is None:
            asked = _as_many(made)
        loaded, facts = gather(loaded, asked, allow_torch=False)
        plan = make_plan(loaded, facts)
    except DoesNotFit as error:
        message = f"no plan fits {asked or 'its hardware'}: {error.problems[0].message}"
        return ([] if on is None else list(error.problems)), [message]
    except MachineError as error:
        return [], [f"not planned here: {problem.message}" for problem in error.problems]
    except EffilaunchError as error:
        if {problem.code for problem in error.problems} <= {*NOT_HERE, "not-in-closed-form"}:
            return [], [f"not planned: {problem.message}" for problem in error.problems]
        return list(error.problems), []
    hardware = asked or "its hardware"
    size = f"{plan.memory.total / 2**30:.1f} GiB a device"
    message = f"it plans on {hardware}: {plan.batch.global_size} samples a step, {size}"
    return [], [message, "show a sample with its loss mask: effilaunch prepare RECIPE --show 1"]


def _as_many(made: Imported) -> str:
    """The number of devices in the files, else 8 for what needs several processes, else 1."""
    on = next((text.rpartition("--on ")[2] for text in made.notes if "--on " in text), "NxDEVICE")
    sharded = made.taken.keys() & {"sharding.tp_size", "sharding.sp_size", "sharding.cp_size"}
    engine = made.taken.get("sharding.engine")
    several = bool(sharded) or (engine is not None and engine.value == FSDP.name)
    count = on.replace("NxDEVICE", "8xDEVICE" if several else "1xDEVICE")
    return count.replace("DEVICE", ASSUMED)
