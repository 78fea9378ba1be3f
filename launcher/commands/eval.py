"""`eval`: loss, perplexity and accuracy of the result of a run; with --suite, its scores in benchmarks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import locked
from launcher.files.safe_files import parse_json, read_json, write_json
from launcher.inputs.finished_run import consent_to_code, output_on_stderr, result_run
from launcher.machine.child import ask
from launcher.machine.software import require_modules
from launcher.render.new_file import refuse_existing, write_new, writing
from launcher.report.outcome import Outcome, note
from launcher.report.result_text import evaluated_text, suites_text
from launcher.report.run_pages import write_report

SUITES = "launcher.train.results.suites"
"""The module that runs lm-eval, in a process of its own."""


def eval_command(
    run_dir: str,
    *,
    checkpoint: str | None,
    data: str | None,
    suite: str | None,
    limit: int | None,
    fewshot: int | None,
    batch_size: int | None,
    seed: int | None,
    no_base: bool,
    output: str | None,
    allow_code: bool,
) -> Outcome:
    """Evaluate a finished run, or a checkpoint of any run, on held-out rows, those of a file, or suites."""
    settings = {"limit": limit, "fewshot": fewshot, "batch_size": batch_size, "seed": seed}
    _check_options(suite, data, settings, no_base=no_base)
    folder = result_run(run_dir, checkpoint)
    if output is not None:
        _check_free(Path(output))
    consent_to_code(folder, "eval", hooks=suite is None, allowed=allow_code)
    if suite is not None:
        request = {
            "run_dir": str(folder), "checkpoint": checkpoint, **settings, "batch_size": batch_size or 1,
            "suites": [name for part in suite.split(",") if (name := part.strip())],
            "with_base": not no_base, "allow_code": allow_code,
        }  # fmt: skip
        return _suites(run_dir, folder, request, output)
    require_modules(("torch", "transformers", "datasets"))
    from launcher.train.results.evaluate import evaluate

    with output_on_stderr():
        found = evaluate(folder, checkpoint, None if data is None else Path(data), note).to_json()
    at_end = _at_end(folder) if checkpoint is None and data is None else None
    result = {"run_dir": run_dir, "data": data or "the rows held out", **found, "at_end": at_end}
    _write(output, result)
    return Outcome(result, evaluated_text(result))


def _check_options(
    suite: str | None, data: str | None, settings: Mapping[str, int | None], *, no_base: bool
) -> None:
    """Raise RecipeError for options that have no effect together, and for numbers that mean nothing."""
    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is not None]
    given += ["--no-base"] if no_base else []
    if suite is None and given:
        message = f"{' and '.join(given)} only mean something with --suite"
        raise RecipeError(Problem("usage", message, hint="name the benchmarks with --suite, or leave it out"))
    if suite is not None and data is not None:
        message = "--suite and --data exclude each other: a suite brings its own rows"
        raise RecipeError(Problem("usage", message, hint="evaluate the two one after the other"))
    if suite is not None and not suite.strip(", "):
        raise RecipeError(Problem("usage", "--suite names no benchmark", hint="for example --suite gsm8k"))
    for name, least in (("limit", 1), ("batch_size", 1), ("fewshot", 0), ("seed", 0)):
        value = settings[name]
        if value is not None and value < least:
            message = f"--{name.replace('_', '-')} is {value}, expected {least} or more"
            raise RecipeError(Problem("usage", message, hint="see `effilaunch eval --help`"))


def _suites(run_dir: str, folder: Path, request: Mapping[str, Any], output: str | None) -> Outcome:
    """Scores of the trained model and the one before training, kept with the result of the run."""
    require_modules(("torch", "transformers", "datasets", "lm_eval"))
    note("evaluating with lm-eval: the trained model" + (", then the base" if request["with_base"] else ""))
    kept = request["checkpoint"] is None
    with locked(folder) if kept else contextlib.nullcontext():  # what takes hours must not end at a lock
        found = ask(SUITES, request)
        if kept:
            _keep(folder, found["suites"])
    result = {"run_dir": run_dir, **found, "kept": kept}
    _write(output, result)
    return Outcome(result, suites_text(result))


def _keep(folder: Path, suites: Mapping[str, Any]) -> None:
    """Add the scores to result.json, where those of the same task are replaced, and to the report."""
    result = read_json(folder / "result.json")
    write_json(folder / "result.json", {**result, "suites": {**result.get("suites", {}), **suites}})
    write_report(folder)


def _write(output: str | None, result: Mapping[str, Any]) -> None:
    if output is not None:
        with writing(Path(output)):
            write_new(Path(output), json.dumps(result, indent=2) + "\n")


def _at_end(folder: Path) -> float | None:
    """The loss of the last evaluation during the run: same weights, same rows."""
    try:
        result = parse_json((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    held_out = result.get("eval") if isinstance(result, dict) else None
    found = held_out.get("eval_loss") if isinstance(held_out, dict) else None
    return found if isinstance(found, int | float) else None


def _check_free(path: Path) -> None:
    """Raise RecipeError before the work if the file could not be written after it."""
    refuse_existing(path)
    if "\0" in str(path) or not path.parent.is_dir():
        hint = "name a file in an existing folder with --output"
        raise RecipeError(Problem("file-unwritable", "its folder does not exist", file=str(path), hint=hint))
