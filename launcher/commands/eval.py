"""`eval`: loss, perplexity and accuracy of the result of a run."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.errors import Problem, RecipeError
from launcher.facts.safe_files import parse_json
from launcher.facts.software import require_modules
from launcher.inputs.finished_run import consent_to_code, finished_run, output_on_stderr
from launcher.render.new_file import refuse_existing, write_new, writing
from launcher.report.outcome import Outcome, note
from launcher.report.result_text import evaluated_text


def eval_command(
    run_dir: str, *, checkpoint: str | None, data: str | None, output: str | None, allow_code: bool
) -> Outcome:
    """Evaluate a finished run, or a checkpoint of any run, on the held-out rows or on those of a file."""
    folder = finished_run(run_dir) if checkpoint is None else Path(run_dir).absolute()
    if output is not None:
        _check_free(Path(output))
    consent_to_code(folder, "eval", hooks=True, allowed=allow_code)
    require_modules(("torch", "transformers", "datasets"))
    from launcher.train.results.evaluate import evaluate

    with output_on_stderr():
        found = evaluate(folder, checkpoint, None if data is None else Path(data), note).to_json()
    at_end = _at_end(folder) if checkpoint is None and data is None else None
    result = {"run_dir": run_dir, "data": data or "the rows held out", **found, "at_end": at_end}
    if output is not None:
        with writing(Path(output)):
            write_new(Path(output), json.dumps(result, indent=2) + "\n")
    return Outcome(result, evaluated_text(result))


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
