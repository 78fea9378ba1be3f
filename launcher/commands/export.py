"""`export`: the result of a run in the form that another program uses, compared with the trained model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.commands.merge import card_record
from launcher.errors import Problem, RecipeError
from launcher.execute.run_dir import locked
from launcher.inputs.finished_run import consent_to_code, output_on_stderr, result_run
from launcher.machine.software import require_modules
from launcher.report.model_card import model_card
from launcher.report.outcome import Outcome, note
from launcher.report.result_text import exported_text


def export_command(
    run_dir: str,
    *,
    to: str,
    output: str | None,
    dtype: str,
    adapter: bool,
    quantize: str | None,
    llama_cpp: str | None,
    checkpoint: str | None,
    allow_code: bool,
) -> Outcome:
    """Export the result of a finished run, or a checkpoint of any run; nothing is left where it differs."""
    folder = result_run(run_dir, checkpoint)
    consent_to_code(folder, "export", hooks=False, allowed=allow_code)
    require_modules(("torch", "transformers"))
    from launcher.train.exports.export import export, target_named
    from launcher.train.exports.target import ExportRequest

    given = {"dtype": dtype != "auto", "adapter": adapter, "quantize": quantize, "llama_cpp": llama_cpp}
    unread = [name for name, value in given.items() if value and name not in target_named(to).options]
    if unread:
        words = " and ".join(f"--{name.replace('_', '-')}" for name in unread)
        raise RecipeError(Problem("usage", f"{words} means nothing with --to {to}", hint="leave it out"))
    place = f"export-{to}" if checkpoint is None else f"export-{to}-{checkpoint}"
    target = Path(output).absolute() if output is not None else folder / place
    record = card_record(folder, target.name, checkpoint)
    asked = ExportRequest(
        run_dir=folder, output=target, name=_served_name(record.plan, folder), checkpoint=checkpoint,
        dtype=dtype, adapter=adapter, quantize=quantize,
        llama_cpp=None if llama_cpp is None else Path(llama_cpp).absolute(),
    )  # fmt: skip

    def card(merged: Mapping[str, Any] | None) -> str:
        return model_card(record, target.name, merged)

    with contextlib.ExitStack() as held:
        if target.parent == folder:  # no run may continue in it meanwhile
            held.enter_context(locked(folder))
        with output_on_stderr():
            exported = export(to, asked, card, note)
    return Outcome({"run_dir": run_dir, **exported}, exported_text(exported))


def _served_name(plan: Mapping[str, Any], folder: Path) -> str:
    """The recipe's name, of the characters that servers take."""
    stem = Path(str(plan.get("recipe") or folder)).stem
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.") or "model"
