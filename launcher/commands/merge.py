"""`merge`: merge the adapter of a run into the base weights, and push the result to the hub."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError, printable
from launcher.execute.record import RunRecord, read_run, without_secrets
from launcher.execute.run_dir import locked
from launcher.files.redaction import hider, secret_values
from launcher.inputs.finished_run import consent_to_code, output_on_stderr, result_run
from launcher.machine.software import require_modules
from launcher.report.model_card import model_card
from launcher.report.outcome import Outcome, note
from launcher.report.result_text import merged_text, pushed_lines

if TYPE_CHECKING:
    from launcher.train.results.publishing import Repository

MERGED = "merged"
"""Folder of the merged model in the run directory."""


def merge_command(
    run_dir: str,
    *,
    output: str | None,
    dtype: str,
    push: str | None,
    checkpoint: str | None,
    allow_code: bool,
) -> Outcome:
    """Merge the adapter of a finished run and push the merged model; without an adapter, push the model.

    push: the repository, "" for hub_model_id of the recipe, None to push nothing. checkpoint: use the adapter
    of this checkpoint, of any run, instead of the result.
    """
    folder = result_run(run_dir, checkpoint)
    consent_to_code(folder, "merge", hooks=False, allowed=allow_code)
    has_model = (folder / "model" / "config.json").is_file() and not (folder / "adapter").exists()
    is_full = checkpoint is None and has_model
    require_modules(("torch", "transformers") if is_full else ("torch", "transformers", "peft"))
    from launcher.train.job import read_job
    from launcher.train.results.merge import nothing_to_merge, refuse_existing
    from launcher.train.results.publishing import reach_repository
    from launcher.train.results.trained import ADAPTER, check_readable, is_trained, trained_folder

    if is_full and push is None:
        raise RecipeError(nothing_to_merge(Path(run_dir)))
    if is_full and (output is not None or dtype != "auto"):
        hint = "remove --output and --dtype: model/ is pushed unchanged"
        raise RecipeError(Problem("usage", "the run has no adapter to merge", hint=hint))
    name = MERGED if checkpoint is None else f"{MERGED}-{checkpoint}"
    target = Path(output).absolute() if output is not None else folder / name
    trained = trained_folder(read_job(folder), checkpoint)
    if not is_full and is_trained(trained) != ADAPTER:
        raise RecipeError(nothing_to_merge(trained))
    check_readable(trained)  # before the repository is created
    if not is_full:
        refuse_existing(target)
    # Reached before the merge, so that a missing login fails at once.
    repository = None if push is None else reach_repository(push or _own_repository(folder))
    if is_full:
        assert repository is not None
        return _push_model(run_dir, folder, repository)
    with contextlib.ExitStack() as held:
        if target.parent == folder:  # no run may continue in it meanwhile
            held.enter_context(locked(folder))
        merged = _merge(folder, target, dtype, repository, checkpoint)
    pushed = None if repository is None else _sent(target, repository)
    data = {"run_dir": run_dir, "merged": merged, "pushed": pushed}
    return Outcome(data, merged_text(merged, pushed))


def _own_repository(folder: Path) -> str:
    """trainer.hub_model_id of the recipe. Raises RecipeError without one."""
    from launcher.train.job import read_job

    found = read_job(folder).trainer.hub_model_id
    if not isinstance(found, str) or not found:
        message = "--push names no repository, and the recipe of the run has no hub_model_id"
        hint = "write `--push OWNER/NAME`; for future runs set trainer.hub_model_id"
        raise RecipeError(Problem("usage", message, path="trainer.hub_model_id", hint=hint))
    return found


def _merge(
    folder: Path, target: Path, dtype: str, repository: Repository | None, checkpoint: str | None
) -> dict[str, Any]:
    from launcher.train.results.merge import Merged, merge

    note("merging: load the model, merge in float32, compare logits, write, read back")
    place = target.name if repository is None else repository.id

    def card(merged: Merged) -> str:
        return model_card(card_record(folder, place, checkpoint), place, merged.to_json())

    with output_on_stderr():
        return merge(folder, target, dtype, card, checkpoint).to_json()


def _push_model(run_dir: str, folder: Path, repository: Repository) -> Outcome:
    card = model_card(card_record(folder, repository.id), repository.id)
    pushed = _sent(folder / "model", repository, card)
    lines = ["the run has no adapter: model/ is pushed unchanged", *pushed_lines(pushed)]
    return Outcome({"run_dir": run_dir, "merged": None, "pushed": pushed}, "\n".join(lines))


def _sent(folder: Path, repository: Repository, card: str | None = None) -> dict[str, Any]:
    from launcher.train.results.publishing import send

    note(f"pushing {printable(str(folder))} to {printable(repository.id)}")
    with output_on_stderr():
        send(folder, repository, card)
    return repository.to_json()


def card_record(folder: Path, place: str, checkpoint: str | None = None) -> RunRecord:
    """The record for a model card, without secrets; of a checkpoint without the numbers of the run's end."""
    record = without_secrets(read_run(folder), hider(secret_values(os.environ)))
    name = place if "/" in place else record.name
    if checkpoint is None:
        return replace(record, name=name)
    result = {"rows": record.result.get("rows")}
    return replace(record, name=f"{name} ({checkpoint})", result=result, metrics=())
