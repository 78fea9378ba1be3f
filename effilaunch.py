"""effilaunch from Python: what its commands do, as functions.

    import effilaunch

    plan = effilaunch.plan("smoke", set={"trainer.max_steps": 20}, on="1xL4-24GB")
    done = effilaunch.run("smoke")

Errors are those of the command line. Importing this imports the standard library alone, and so may what is
copied of it: each function imports what it needs. The training stack is imported by the processes of a run.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from launcher.errors import (
        DoesNotFit,
        EffilaunchError,
        Interrupted,
        MachineError,
        Problem,
        RecipeError,
        RunFailed,
    )
    from launcher.inputs.shown_plan import ShownPlan
    from launcher.recipe.loading import LoadedRecipe
    from launcher.report.outcome import Outcome

    RecipeLike = str | os.PathLike[str] | LoadedRecipe
    P = TypeVar("P", bound="Plan")

__all__ = [
    "Diagnosis",
    "DoesNotFit",
    "EffilaunchError",
    "Interrupted",
    "LoadedRecipe",
    "MachineError",
    "Plan",
    "Problem",
    "RecipeError",
    "Result",
    "RunFailed",
    "Search",
    "callback",
    "diagnose",
    "load",
    "plan",
    "result",
    "run",
    "search",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The errors, and the type of a recipe; imported when asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "launcher.recipe.loading" if name == "LoadedRecipe" else "launcher.errors"
        return getattr(importlib.import_module(home), name)


class Plan:
    """A plan: every decision before a device is touched. `print` shows it as `effilaunch plan` does."""

    recipe: str
    """The recipe's file."""
    fits: bool | None
    """Whether it fits the devices and the memory of the node; None where a device's size is unknown."""
    settings: dict[str, Any]
    """Dotted key (`trainer.learning_rate`) -> value, of everything that the run uses."""
    hardware: dict[str, Any]
    """num_nodes, devices_per_node, device, device_bytes, compute_capability."""
    batch: dict[str, int]
    """In samples: micro x accumulation x data_parallel = global."""
    steps: int | None
    """Optimizer steps; None where they depend on the number of rows."""
    memory: dict[str, Any]
    """Bytes: `needed` on each device and its `margin`, `components`, `host_bytes` of a node, …"""
    seconds_per_step: tuple[float, float] | None
    """Predicted least and most; None where the device's figures are unknown."""
    fixes: list[dict[str, Any]]
    """The known fixes that the plan applies: id, title, reason, source, changed."""
    warnings: list[str]
    command: list[str]
    """Starts the processes of a node."""
    files: dict[str, str]
    """Name -> text of each file that a run directory begins with."""

    def __init__(self, shown: ShownPlan) -> None:
        self._shown, self._data = shown, shown.data
        data = self._data
        self.recipe, self.hardware, self.batch = data["recipe"], data["hardware"], data["batch"]
        self.memory, self.fits = data["memory"], False if shown.problems else data["memory"]["fits"]
        self.settings = {key: known["value"] for key, known in data["settings"].items()}
        self.steps, seconds = data["schedule"]["steps"], data["time"]["seconds_per_step"]
        self.seconds_per_step = None if seconds is None else (seconds[0], seconds[1])
        self.fixes, self.warnings = data["fixes"], data["warnings"]
        self.command, self.files = data["command"], data["files"]

    def explain(self, key: str = "") -> str:
        """Where the value of a setting came from, and why; of a section, or without a key of all settings."""
        from launcher.errors import Problem, RecipeError
        from launcher.report.plan_text import explain_text

        text = explain_text(self._data, key)
        if not text.strip():
            message, hint = f"the plan has no setting {key!r}", "`settings` has all of them"
            raise RecipeError(Problem("unknown-setting", message, path=key, hint=hint))
        return text

    def to_json(self) -> dict[str, Any]:
        """The object that `effilaunch plan --json` prints."""
        return _printed("plan", self._data, self._shown.problems)

    def to_html(self) -> str:
        """The page that `effilaunch plan --html` writes."""
        from launcher.report.run_pages import plan_page

        return plan_page(self._data, self.recipe, self._shown.problems)

    def _repr_html_(self) -> str:
        return _framed(self.to_html())

    def __str__(self) -> str:
        return self._shown.text()


class Search(Plan):
    """All configurations that a recipe allows; as a plan the first of them, which would run.

    `to_json` is the object that `effilaunch plan --search --json` prints.
    """

    rows: list[dict[str, Any]]
    """What fits, fastest first, then what does not: rank, settings, batch, memory, time, trade, …"""
    left_out: list[dict[str, str]]
    """What cannot run, however much memory there is: what, reason."""

    def __init__(self, shown: ShownPlan) -> None:
        super().__init__(shown)
        ranking = shown.ranking
        self._data |= ranking
        self.rows, self.left_out = ranking["search"], ranking["left_out"]

    def __str__(self) -> str:
        return self._shown.search_text()


class Result:
    """A run as recorded in its directory. `print` shows it as `effilaunch run` does at the end."""

    run_dir: Path
    state: str
    """finished, running, stopped, failed, or not started."""
    steps: int
    """Optimizer steps that were trained."""
    loss: float | None
    """The last training loss; None where none was logged."""
    scores: dict[str, float]
    """Name -> value of the last evaluation, such as `eval_loss`."""
    seconds: float | None
    """Duration of all starts of the run."""
    metrics: list[dict[str, Any]]
    """Logged rows with their `step`; of very many, those that a chart shows."""

    def __init__(self, run_dir: Path) -> None:
        from launcher.execute.record import read_run
        from launcher.report.run_pages import shown_record
        from launcher.report.run_sections import run_facts

        self._record = shown_record(read_run(run_dir), run_dir)
        facts = run_facts(self._record)
        self.run_dir, self.state, self.steps = Path(facts["run_dir"]), facts["state"], facts["steps"]
        self.loss, self.scores, self.seconds = facts["loss"]["last"], facts["eval"], facts["seconds"]
        self.metrics = [dict(row) for row in self._record.metrics]

    def to_json(self) -> dict[str, Any]:
        """The object that `effilaunch run --json` prints; of a run that did not finish, as far as it came."""
        return _printed("run", {"run_dir": str(self.run_dir), "result": dict(self._record.result)})

    def to_html(self) -> str:
        """The page that `effilaunch report` writes."""
        from launcher.report.run_pages import made, run_page

        return run_page(self._record, made())

    def _repr_html_(self) -> str:
        return _framed(self.to_html())

    def __str__(self) -> str:
        from launcher.report.result_text import result_text

        return result_text(self._record, ())


class Diagnosis:
    """Why a run failed. `print` shows it as `effilaunch diagnose` does."""

    findings: list[dict[str, Any]]
    """Known failures, the cause first: id, title, cause, mend (what to do), changes (recipe keys), …"""
    unknown: list[dict[str, Any]]
    """Errors that are no known failure: type, message, frames, …"""
    succeeded: bool
    """Whether the logs have a sign of success."""

    def __init__(self, shown: Outcome) -> None:
        self._shown, data = shown, shown.data
        self.findings, self.unknown, self.succeeded = data["findings"], data["unknown"], data["succeeded"]

    def to_json(self) -> dict[str, Any]:
        """The object that `effilaunch diagnose --json` prints."""
        return _printed("diagnose", self._shown.data)

    def __str__(self) -> str:
        return self._shown.text


def load(recipe: RecipeLike, *, set: Mapping[str, object] | None = None) -> LoadedRecipe:
    """A checked recipe: a YAML file, the name of a shipped recipe, or one that was loaded before.

    set: dotted key (`trainer.max_steps`) -> value, instead of the recipe's; as `--set`. RecipeError with all
    problems of the recipe and of these.
    """
    from launcher.recipe.loading import LoadedRecipe, load_recipe

    with _shown_errors():
        overrides = _overrides(set or {})
        if not isinstance(recipe, LoadedRecipe):
            return load_recipe(os.fspath(recipe), overrides)
        if not overrides:
            return recipe
        return load_recipe(recipe.path, [*recipe.overrides, *overrides], text=recipe.text)


def plan(
    recipe: RecipeLike,
    *,
    set: Mapping[str, object] | None = None,
    on: str | None = None,
) -> Plan:
    """The plan of a recipe, as `effilaunch plan` makes it; nothing is started.

    recipe, set: as of `load`. on: hardware such as `8xA100-80GB` or `cpu`; None: the recipe's, or this
    machine. RecipeError; DoesNotFit, whose `nearest_miss` is the Plan that came closest.
    """
    return _planned(Plan, recipe, set, on)


def search(
    recipe: RecipeLike,
    *,
    set: Mapping[str, object] | None = None,
    on: str | None = None,
) -> Search:
    """All configurations of a recipe that fit, as `effilaunch plan --search` lists them.

    Arguments and errors as of `plan`.
    """
    return _planned(Search, recipe, set, on)


def run(
    recipe: RecipeLike,
    *,
    set: Mapping[str, object] | None = None,
    on: str | None = None,
    tiny: bool = False,
    resume: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Result:
    """Plan, train and report, as `effilaunch run` does; what it prints is printed.

    recipe, set, on: as of `plan`. tiny: rehearse with a two-layer model for four steps. resume: `auto`, or a
    checkpoint. output_dir: the run directory. Interrupting this (Ctrl-C, a notebook's stop button) lets the
    ranks save a checkpoint, and raises Interrupted; a second time ends them at once. Raises RecipeError,
    DoesNotFit, MachineError, RunFailed. For the main thread, which alone receives signals.
    """
    from launcher.commands.run import run_recipe
    from launcher.errors import Problem, RecipeError
    from launcher.execute.signals import ended_by_signals

    if threading.current_thread() is not threading.main_thread():
        message = "run() was called outside the main thread, which alone receives the signals that stop a run"
        raise RecipeError(Problem("usage", message, hint="call it there, or start `effilaunch run`"))
    loaded = load(recipe, set=set)
    folder, checkpoint = (None if path is None else os.fspath(path) for path in (output_dir, resume))
    with _shown_errors(), ended_by_signals():
        done = run_recipe(loaded, on=on, tiny=tiny, resume=checkpoint, output_dir=folder)
    return Result(Path(done.data["run_dir"]))


def result(run_dir: str | os.PathLike[str]) -> Result:
    """What is recorded of a run, finished or not. RecipeError for a folder that is no run directory."""
    with _shown_errors():
        return Result(Path(run_dir))


def diagnose(text_or_path: str | os.PathLike[str]) -> Diagnosis:
    """Why a run failed: of a run directory or a log, or of the text of a log.

    A `str` with a line break is text, any other one a path. RecipeError for what cannot be read.
    """
    from launcher.commands.diagnose import shown_diagnosis
    from launcher.knowledge.diagnose.given import diagnose_files, diagnose_text

    with _shown_errors():
        if isinstance(text_or_path, str) and "\n" in text_or_path:
            return Diagnosis(shown_diagnosis(diagnose_text(text_or_path)))
        found, _recipe = diagnose_files([os.fspath(text_or_path)])
        return Diagnosis(shown_diagnosis(found))


def callback() -> Any:
    """A callback of transformers, for a Trainer in the script of `effilaunch run -- COMMAND`.

    `Trainer(..., callbacks=[effilaunch.callback()])` gives the run its steps and losses, one stop of all
    ranks with a checkpoint, and `--resume auto`. In a process that no such run has started it does nothing,
    and says so once. It needs transformers, and nothing else of effilaunch than this file.
    """
    global _said_outside
    if "EFFILAUNCH_RUN_DIR" in os.environ:
        with contextlib.suppress(ModuleNotFoundError):  # of a run of another kind, or without its PYTHONPATH
            return importlib.import_module("effilaunch_rank").callback()
    from transformers import TrainerCallback

    if not _said_outside and os.environ.get("RANK", "0") == "0":
        message = "callback() does nothing: `effilaunch run -- COMMAND` did not start this process"
        sys.stderr.write(f"effilaunch: {message}\n")
    _said_outside = True
    return TrainerCallback()


_said_outside = False


def _planned(kind: type[P], recipe: RecipeLike, set: Mapping[str, object] | None, on: str | None) -> P:
    """The plan that the commands show; DoesNotFit where it is only the nearest miss."""
    from launcher.errors import DoesNotFit
    from launcher.inputs.shown_plan import planned

    loaded = load(recipe, set=set)
    with _shown_errors():
        shown = planned(loaded, on)
        made = kind(shown)
        if shown.problems:
            raise DoesNotFit(shown.problems, made, shown.would_fit)
        return made


def _overrides(values: Any) -> Sequence[str]:
    """`--set` of these values."""
    from launcher.errors import Problem, RecipeError
    from launcher.recipe.yaml_writer import flow

    if not isinstance(values, Mapping):
        hint = 'write set={"trainer.max_steps": 100}'
        raise RecipeError(Problem("override", f"set is {type(values).__name__}, expected a dict", hint=hint))
    found, wrong = [], []
    for key, value in values.items():
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            found.append(f"{key}={flow(value)}")
        except (TypeError, ValueError):
            message = f"{type(value).__name__} is no value of a recipe"
            hint = "give text, a number, a boolean, None, a list or a dict"
            wrong.append(Problem("override", message, path=key, hint=hint))
    if wrong:
        raise RecipeError(wrong)
    return found


@contextlib.contextmanager
def _shown_errors() -> Iterator[None]:
    """Raise errors as the command line shows them."""
    from launcher.errors import EffilaunchError
    from launcher.report.outcome import shown_problems

    try:
        yield
    except EffilaunchError as error:
        error.problems = shown_problems(error)
        error.args = ("\n".join(map(str, error.problems)),)
        raise


def _printed(command: str, data: dict[str, Any], problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """The object of a command's `--json`, as a program reads it."""
    from launcher.report.outcome import json_text

    found: dict[str, Any] = json.loads(json_text(command, data, problems))
    return found


def _framed(page: str) -> str:
    """A page for a notebook, in a frame: its styles must not reach the notebook's own."""
    style = "width: 100%; height: 40em; border: 0"
    return f'<iframe srcdoc="{html.escape(page)}" style="{style}"></iframe>'
