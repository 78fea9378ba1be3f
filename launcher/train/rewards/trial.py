"""Try the reward functions on ten rows before anything starts, in a process of their own.

`python -m launcher.train.rewards.trial REQUEST ANSWER`: both are JSON files. The reference answers and empty
ones are scored; the reference must score higher. What the functions print is shown without secrets.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.files.redaction import hide_in, hider, secret_values
from launcher.files.safe_files import parse_json
from launcher.rows.sources import Row, bad_row, kind_of
from launcher.tasks.grpo import KEY, SHIPPED_REWARDS
from launcher.train.job import Job

ROWS = 10
REFERENCES = (
    "answer", "solution", "ground_truth", "final_answer", "reference", "target", "completion", "response",
    "output", "expected",
)  # fmt: skip
"""Columns that may hold the reference answer, where no shipped function names one."""
START_S = 120.0
"""Seconds for the start of the process and the imports of the file, besides the functions' own limits."""
SHOWN = 4000
"""Characters of what the functions print."""


def try_rewards(job: Job, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score the reference answers and empty completions of prepared rows; what was found, for data.json.

    rows: {prompt, place, columns, reference}. RecipeError where a function fails, hangs or returns no
    number. A warning is printed where the reference scores no higher.
    """
    references = [row["reference"] for row in rows]
    column = next((reference[0] for reference in references if reference), None)
    answers = ["" if reference is None else reference[1] for reference in references]
    request = {
        "functions": job.reward,
        "rows": list(rows),
        "completions": {
            name: [_completion(row["prompt"], text) for row, text in zip(rows, texts, strict=True)]
            for name, texts in (("reference", answers), ("empty", [""] * len(rows)))
        },
        "ids": {"reference": [tokenizer(text)["input_ids"] for text in answers], "empty": [[]] * len(rows)},
    }
    values = _run(job, request)["values"]
    weights = {name: entry["weight"] for name, entry in zip(values, job.reward, strict=True)}
    totals = {
        kind: sum(weights[name] * _mean(found[kind]) for name, found in values.items())
        for kind in ("reference", "empty")
    }
    found = {"rows": len(rows), "reference_column": column, "values": values, "totals": totals}
    warning = _warning(found)
    if warning:
        print(f"WARNING: {warning}", flush=True)
    return {**found, "warning": warning}


def reference_of(entries: Sequence[Mapping[str, Any]], row: Row) -> list[str] | None:
    """[column, reference answer] of a row {columns}: what a shipped function compares with, else by name.

    RecipeError where a shipped function is to compare with something else than text or a number.
    """
    columns = row.values["columns"]
    for index, entry in enumerate(entries):
        named = {**SHIPPED_REWARDS.get(entry["function"], {}), **entry["arguments"]}.get("column")
        if entry["function"] in SHIPPED_REWARDS and str(named) in columns:
            value = columns[str(named)]
            if not isinstance(value, str | int | float):
                message = f"column {named} holds {kind_of(value)}, expected text or a number to compare with"
                hint = (
                    "name another column in `arguments: {column: ...}`, or write the answer into a column of "
                )
                hint += "its own with a `format_row` hook (`python: FILE`)"
                raise bad_row(row, message, hint, code="reward-column", path=f"{KEY}[{index}]")
            return [str(named), str(value)]
    nested = [value for value in columns.values() if isinstance(value, Mapping)]
    for held in (columns, *nested):  # in an object as verl writes it: reward_model: {ground_truth: ...}
        name = next((name for name in REFERENCES if isinstance(held.get(name), str | int | float)), None)
        if name is not None:
            return [name, str(held[name])]
    return None


def _completion(prompt: Any, text: str) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _mean(values: Sequence[float | None]) -> float:
    real = [value for value in values if value is not None]
    return math.fsum(real) / len(real) if real else 0.0


def _warning(found: Mapping[str, Any]) -> str | None:
    """What is suspicious about the values; None where the reference scores higher."""
    reference, empty = found["totals"]["reference"], found["totals"]["empty"]
    if found["reference_column"] is None:
        return (
            f"no column of the rows holds a reference answer ({', '.join(REFERENCES[:4])}, ...), so the "
            f"reward functions were tried on empty completions alone: mean reward {empty:g}"
        )
    if reference > empty:
        return None
    each = ", ".join(
        f"{name}: {_mean(values['reference']):g} and {_mean(values['empty']):g}"
        for name, values in found["values"].items()
    )
    return (
        f"on {found['rows']} rows the reference answer (column {found['reference_column']}) scores "
        f"{reference:g}, an empty completion {empty:g}: the reward does not prefer what is right ({each})"
    )


def _run(job: Job, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the process; RecipeError with its problem, or where it does not end or dies."""
    limit = START_S + 2 * sum(entry["time_limit"] for entry in job.reward)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "launcher.train.rewards.trial", str(asked), str(answer)]
        names = ", ".join(entry["function"] for entry in job.reward)
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            _show(error.stdout)
            message = f"the reward functions did not return within {limit:g} s on {len(request['rows'])} rows"
            where = f" (rows {request['rows'][0]['place']} to {request['rows'][-1]['place']}): {names}"
            raise RecipeError(Problem("reward-hangs", message + where, path=KEY)) from None
        _show(ended.stdout)
        if not answer.is_file():
            message = f"the process that tries the reward functions ended with status {ended.returncode}"
            hint = "its output is above; negative: the signal that ended it"
            raise RecipeError(Problem("reward-failed", f"{message}: {names}", path=KEY, hint=hint))
        found: dict[str, Any] = parse_json(answer.read_text(encoding="utf-8"))
    if found.get("problems"):
        hide = hider(secret_values(os.environ))
        raise RecipeError([Problem(**hide_in(one, hide)) for one in found["problems"]])
    return found


def _show(output: bytes | None) -> None:
    """Print what the functions printed, without secrets."""
    text = hider(secret_values(os.environ))((output or b"").decode("utf-8", "replace")).strip()
    if text:
        cut = text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
        print(f"output of the reward functions:\n{cut}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Call all functions on the rows of a request; the values, or the problem, go into the answer."""
    from launcher.train.rewards.calls import load_rewards, values_of

    request = parse_json(Path(arguments[0]).read_text(encoding="utf-8"))
    rows = request["rows"]
    names = sorted(set().union(*(row["columns"] for row in rows)))
    columns: dict[str, Any] = {name: [row["columns"].get(name) for row in rows] for name in names}
    columns |= {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    places, prompts = [row["place"] for row in rows], [row["prompt"] for row in rows]
    found: dict[str, Any] = {}
    try:
        found["values"] = {
            reward.name: {
                kind: values_of(
                    reward, places, prompts, completions, request["ids"][kind], columns, RecipeError
                )
                for kind, completions in request["completions"].items()
            }
            for reward in load_rewards(request["functions"])
        }
    except EffilaunchError as error:
        fields = ("code", "message", "file", "line", "path", "hint")
        found["problems"] = [{name: getattr(one, name) for name in fields} for one in error.problems]
    aside = Path(arguments[1]).with_suffix(".part")
    aside.write_text(json.dumps(found), encoding="utf-8")
    aside.rename(arguments[1])
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(sys.argv[1:]))
