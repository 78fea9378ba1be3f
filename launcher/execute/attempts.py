"""Repeat a failed run: with less memory (`on_oom: adapt`), on fewer nodes (`launch.min_nodes`) or unchanged
(`launch.max_restarts`).

Attempts follow each other until one finishes, nothing is left to change, or no restart is left. plan.json
records what was adapted, restarts.jsonl each restart.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.engines import engine_of
from launcher.errors import Interrupted, MachineError, Problem, RecipeError, RunFailed
from launcher.execute.endings import HANG, LAUNCHER_LOST, RANK_LOST, KnownFailure, ProgramFailed
from launcher.execute.fewer_nodes import (
    excludes_faulty,
    is_faulty_gpu,
    is_loss,
    readable,
    seats_left,
)
from launcher.execute.following import Look, blind
from launcher.execute.nodes import Nodes
from launcher.execute.resume import choose_checkpoint
from launcher.execute.run_dir import (
    DISK_FULL,
    EXCLUDES,
    RESTARTS,
    UNWRITABLE,
    last_step,
    locked,
    write_next_attempt,
)
from launcher.execute.signals import pause
from launcher.execute.start import execute, is_prepared
from launcher.execute.start_checks import spare_gpu
from launcher.execute.supervise import Limits
from launcher.files.checkpoint import MANIFEST, complete_checkpoints, read_manifest
from launcher.files.rank_status import read_statuses
from launcher.files.redaction import hider, secret_values
from launcher.files.safe_files import exists, parse_json, read_jsonl, read_record, write_text
from launcher.machine import probe
from launcher.machine.gpus import Gpu
from launcher.machine.software import require_modules
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.planner.adapting import BY, Adaptation, adapt, is_out_of_memory, moment_of
from launcher.planner.elastic import plan_on
from launcher.recipe.loading import LoadedRecipe, with_changes
from launcher.render.bundle import Bundle, dump_json, render

KEY = "adapted"
"""Key of the adaptations in plan.json."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""The first pause suits a killed process; the longest outlasts the reboot of a node."""
_STATUS_S = 0.5
"""Shortest time between two statuses of a rank."""
_MAY_PASS = ("run-failed", RANK_LOST, LAUNCHER_LOST, HANG)
"""Problems without a known cause: the next attempt may not meet them."""
_LESS = "lower data.max_length, use an adapter or model.quantization, or devices with more memory"
_FEWER = (
    "lower generation.max_completion_length or trainer.steps_per_generation (completions at a time), or "
    "generate elsewhere: generation.backend: vllm-server"
)
_KNOWN_TO_PASS = (
    "nccl-timeout", "nccl-peer-died", "port-in-use", "hub-unreachable", "hub-xet", "jit-stale-lock",
    "no-step", "exit-code-lost", "segmentation-fault", "terminal-closed", "trl-vllm-server",
    "nccl-system-error", "gpu-ecc",
)  # fmt: skip
"""Known failures that may not come again. The others are caused by the recipe, the machine or its memory."""


Failure = RunFailed | MachineError | Interrupted


@dataclass(frozen=True, slots=True)
class OomAdaptations:
    """All that `on_oom: adapt` has changed in a run."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted recipe key -> value, None where the key is removed: the recipe with them gives the plan."""
    adaptations: tuple[Mapping[str, Any], ...] = ()
    """One object per attempt: step, resumed_from, changed {setting: [old, new]}, reason."""


def read_adapted(run_dir: Path) -> OomAdaptations:
    """What was adapted in this run. RecipeError for a plan that cannot be read: the next one replaces it."""
    path = run_dir / "plan.json"
    found = read_record(path).get(KEY) if exists(path) else None
    if found is None:
        return OomAdaptations()
    try:
        return OomAdaptations(dict(found["changes"]), tuple(found["adaptations"]))
    except (TypeError, KeyError, ValueError) as error:
        raise RecipeError(Problem("record-unreadable", f"{KEY} is damaged: {error!r}", str(path))) from error


def with_adapted(bundle: Bundle, adapted: OomAdaptations) -> Bundle:
    """The bundle with what was adapted in its plan.json."""
    if not adapted.adaptations:
        return bundle
    plan = {**json.loads(bundle.files["plan.json"]), KEY: asdict(adapted)}
    return replace(bundle, files={**bundle.files, "plan.json": dump_json(plan)})


def as_adapted(loaded: LoadedRecipe, adapted: OomAdaptations, run_dir: Path) -> LoadedRecipe:
    """The recipe with the settings that earlier attempts of this run adapted.

    RecipeError if the recipe now gives one of them a value that no attempt had.
    """
    if not adapted.changes:
        return loaded
    earlier = sorted(run_dir.glob("plan-*.json"), key=lambda file: (len(file.name), file.name))
    plans = [parse_json(file.read_text("utf-8")) for file in (*earlier, run_dir / "plan.json")]
    problems = []
    for key in sorted(adapted.changes.keys() & loaded.origins.keys()):
        had = [plan["settings"].get(key, {}).get("value") for plan in plans]
        given: Any = loaded.recipe.model_dump()
        for name in key.split("."):
            given = given[name]
        if given != "auto" and given not in had:
            message = (
                f"the run was started with {had[0]!r} and, when memory ran out, adapted to {had[-1]!r}; "
                f"the recipe now has {given!r}"
            )
            hint = "restore the value, or start a new run"
            problems.append(Problem("resume-differs", message, path=key, hint=hint))
    if problems:
        raise RecipeError(problems)
    return with_changes(loaded, adapted.changes, BY)


def run_attempts(
    loaded: LoadedRecipe,
    facts: Facts,
    bundle: Bundle,
    run_dir: Path,
    *,
    gpus: Sequence[Gpu],
    resume: str | None,
    say: Callable[[str], None],
    limits: Limits | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
    nodes: Nodes | None = None,
    looking: Callable[[Plan], Look] = lambda plan: blind,
) -> tuple[Plan, dict[str, Any]]:
    """Execute a written run directory and return the plan that finished and its result.json.

    loaded, facts: the input of the first plan, before any adaptation. gpus: those of this node. limits,
    first_pause_s: timeouts. nodes: the other nodes, which take part in every attempt. looking: called as an
    attempt starts, returns what shows its progress. Raises the errors of `execute`; RunFailed lists the
    attempts; RecipeError if another run uses the directory.
    """
    prepare, failed = True, list[RunFailed]()
    with locked(run_dir) as lock:
        begun = Begun(run_dir, resume)
        restarts = Restarts(begun, int(bundle.plan.launch.max_restarts), say, first_pause_s)
        if nodes is not None:
            restarts.check = nodes.raise_if_over
        following = _NextAttempt(loaded, facts, restarts, nodes, looking, read_adapted(run_dir), gpus)
        while True:
            with _naming_the_failure_before(failed):
                try:
                    result = execute(
                        bundle, run_dir, gpus=following.gpus, master_port=probe.free_port(), resume=resume,
                        echo=say, look=looking(bundle.plan), prepare=prepare, limits=limits, lock=lock,
                        nodes=nodes,
                    )  # fmt: skip
                except (RunFailed, MachineError, Interrupted) as failure:
                    if isinstance(failure, RunFailed):
                        failed.append(failure)
                    bundle, resume = following.after(failure, bundle)
                else:
                    return bundle.plan, restarts.recorded(result, planned_length(bundle.plan))
            prepare = prepare and not is_prepared(run_dir)  # later attempts use the same samples


def planned_length(plan: Plan) -> dict[str, Any]:
    """How long a run was to train, for its result.json: a later dry run may write another plan.json."""
    length = {"max_steps": plan.trainer.max_steps, "num_train_epochs": plan.trainer.num_train_epochs}
    return {"planned": {name: value for name, value in length.items() if value is not None}}


@dataclass(slots=True)
class _NextAttempt:
    """What follows a failed attempt of a run."""

    loaded: LoadedRecipe
    facts: Facts
    restarts: Restarts
    nodes: Nodes | None
    looking: Callable[[Plan], Look]
    adapted: OomAdaptations
    gpus: Sequence[Gpu]
    """Of this node, in the next attempt."""
    _faulty: set[str] = field(default_factory=set)
    """UUIDs of those that were replaced."""

    def after(self, failure: Failure, bundle: Bundle) -> tuple[Bundle, str | None]:
        """The next attempt, and the checkpoint that it resumes. Raises the failure where there is none."""
        if is_loss(failure, bundle.plan, self.nodes) or excludes_faulty(failure, bundle.plan, self.nodes):
            return self._on_fewer(failure, bundle.plan)
        if not isinstance(failure, RunFailed) or (is_faulty_gpu(failure) and os.environ.get(EXCLUDES)):
            raise failure
        if isinstance(failure, KnownFailure) and _is_adaptable(bundle.plan, failure):
            step = _next_adaptation(self.loaded, self.facts, bundle.plan, failure, self.adapted)
            bundle, self.adapted, resume = _write_adapted(
                self.restarts.begun, step, self.adapted, self.restarts.say
            )
            return bundle, resume
        try:
            return bundle, self.restarts.next(failure, elsewhere=self._takes_spare(failure, bundle.plan))
        except (RunFailed, Interrupted) as error:
            if not is_loss(error, bundle.plan, self.nodes):
                raise
            return self._on_fewer(error, bundle.plan)  # lost in the pause

    def _takes_spare(self, failure: RunFailed, plan: Plan) -> bool:
        """Whether another GPU of this node, which has all ranks, takes the place of a faulty one."""
        known = failure.finding.first_rank if isinstance(failure, KnownFailure) else None
        place = 0 if len(self.gpus) == 1 else known
        may = self.restarts.allowed and self.nodes is None and is_faulty_gpu(failure)
        if not may or place is None or place >= len(self.gpus):
            return False
        spare = spare_gpu(plan, {gpu.uuid for gpu in self.gpus} | self._faulty)
        if spare is None:
            return False
        old = self.gpus[place]
        self._faulty.add(old.uuid)
        self.gpus = [*self.gpus[:place], spare, *self.gpus[place + 1 :]]
        self.restarts.say(f"\n{old.label} is faulty: {spare.label} takes its place")
        return True

    def _on_fewer(self, failure: Failure, plan: Plan) -> tuple[Bundle, str | None]:
        """The next attempt on the nodes that are left. Raises the failure where these are too few."""
        assert self.nodes is not None, "it is a loss of nodes"
        restarts, begun = self.restarts, self.restarts.begun
        reached, number = last_step(begun.run_dir), seats_left(plan, self.nodes, failure, restarts.say)
        plan = plan_on(as_adapted(self.loaded, self.adapted, begun.run_dir), self.facts, number)
        bundle = with_adapted(render(plan), self.adapted)
        resumes, begins, lines = begun.resumes()
        write_next_attempt(bundle, begun.run_dir, keeps_checkpoints=True)
        for line in lines:
            restarts.say(f"  {line}")
        restarts.say(f"  {_start_text(begins, reached, '', None)}\n")
        resume = readable(resumes, bundle, begun.run_dir, restarts.say, self.looking(plan))
        restarts.record(failure, step=reached, resumed_from=begins, waited_s=0.0, num_nodes=number)
        return bundle, resume


@contextlib.contextmanager
def _naming_the_failure_before(failed: list[RunFailed]) -> Iterator[None]:
    """If the disk prevents an attempt, raise RunFailed that also gives the failure before it."""
    try:
        yield
    except (MachineError, RecipeError) as error:
        problem = error.problems[0]
        if not failed or problem.code not in (DISK_FULL, UNWRITABLE):
            raise
        before = failed[-1].problems[0].message
        message = f"{problem.message}; so the run could not be repeated after this failure: {before}"
        fix = "free space there" if problem.code == DISK_FULL else "make it writable again"
        hint = f"{fix}; then continue with --resume auto"
        raise RunFailed(replace(problem, message=message, hint=hint)) from error


# Out of memory: the next attempt uses less.


def _is_adaptable(plan: Plan, failure: KnownFailure) -> bool:
    return plan.on_oom == "adapt" and is_out_of_memory(failure.finding.failure.id, plan.hardware)


def _next_adaptation(
    loaded: LoadedRecipe, facts: Facts, plan: Plan, failure: KnownFailure, adapted: OomAdaptations
) -> Adaptation:
    """The next adaptation. RunFailed if none is left."""
    calls = {frame.function for frame in failure.finding.error.frames}
    moment = moment_of(failure.finding.failure.id, calls)
    step = adapt(loaded, facts, plan, before=adapted.changes, moment=moment)
    left = "nothing is left to try"
    try:
        if step is not None:
            require_modules(engine_of(step.plan).packages)
    except MachineError as error:
        step, left = None, f"what is left to try cannot be done here: {error.problems[0].message}"
    if step is not None:
        return step
    problem = failure.problems[0]
    tried = "; ".join(one["reason"] for one in adapted.adaptations) or "nothing could be changed"
    message = f"{problem.message.rstrip('.')}. on_oom: adapt: {left}. Tried: {tried}"
    hint = _LESS if moment != "generating" else _FEWER
    raise RunFailed(Problem(problem.code, message, file=problem.file, hint=hint)) from failure


def _write_adapted(
    begun: Begun, step: Adaptation, adapted: OomAdaptations, say: Callable[[str], None]
) -> tuple[Bundle, OomAdaptations, str | None]:
    """Write the next attempt into the run directory and print what changes.

    Returns its bundle, all adaptations, and the checkpoint to resume.
    """
    run_dir = begun.run_dir
    reached = last_step(run_dir)
    resumes, begins, lines = begun.resumes()
    unreadable = step.unreadable if resumes is not None else ""
    if not step.keeps_checkpoints:
        resumes, begins, lines = None, 0, []
        begun.anew()
    entry: Mapping[str, Any] = {
        "step": reached,
        "resumed_from": begins,
        "changed": {key: list(values) for key, values in step.changed.items()},
        "reason": step.reason,
    }
    adapted = OomAdaptations(step.changes, (*adapted.adaptations, entry))
    bundle = with_adapted(render(step.plan), adapted)
    aside = write_next_attempt(bundle, run_dir, keeps_checkpoints=step.keeps_checkpoints)
    say(f"\non_oom: adapt: {step.reason}")
    for line in [f"{key}: {old} -> {new}" for key, (old, new) in step.changed.items()] + lines:
        say(f"  {line}")
    say(f"  {_start_text(begins, reached, unreadable, aside)}\n")
    return bundle, adapted, resumes


def _start_text(begins: int, reached: int, unreadable: str, aside: str | None) -> str:
    """Where the next attempt starts, and the steps that are lost."""
    count = reached - begins
    lost = "1 step is" if count == 1 else f"{count} steps are"
    if begins:
        again = f"; {lost} repeated" if count > 0 else ""
        return f"resumes from the checkpoint of step {begins}{again}"
    if unreadable:
        kept = f"; they are kept in {aside}" if aside else ""
        return f"starts again at step 0, {lost} lost: of the checkpoints, {unreadable}{kept}"
    return f"starts again at step 0{f', {lost} lost: no checkpoint was saved yet' if reached else ''}"


# A failure that may be transient: the next attempt is the same.


def may_pass(failure: RunFailed) -> bool:
    """Whether a restarted run may succeed: not where it must fail in the same way."""
    if isinstance(failure, KnownFailure):
        return failure.finding.failure.id in _KNOWN_TO_PASS
    return not isinstance(failure, ProgramFailed) and failure.problems[0].code in _MAY_PASS


def pause_before(number: int, first_s: float = FIRST_PAUSE_S) -> float:
    """Seconds before restart `number` of those in a row (1 is the first)."""
    return min(first_s * 2.0 ** min(number - 1, 30), LONGEST_PAUSE_S)


@dataclass(slots=True)
class Begun:
    """The checkpoint that a command began with, and those that were there before it."""

    run_dir: Path
    resume: str | None
    """What its first attempt resumes."""
    _there: Mapping[str, int] = field(default_factory=dict)
    """Checkpoints that were there before -> when their manifest was written."""

    def __post_init__(self) -> None:
        complete = complete_checkpoints(self.run_dir / "checkpoints").values()
        self._there = {path.name: (path / MANIFEST).stat().st_mtime_ns for path in complete}

    def anew(self) -> None:
        """From now on, resume nothing that existed until now."""
        self.resume, self._there = None, {}

    def resumes(self) -> tuple[str | None, int, list[str]]:
        """What the next attempt resumes, its step, and lines for the user; None and 0: it starts anew.

        This command's newest complete checkpoint, else what the command began with.
        """
        chosen = choose_checkpoint(self.run_dir)
        path = chosen.checkpoint
        is_own = path is not None and self._there.get(path.name) != (path / MANIFEST).stat().st_mtime_ns
        if self.resume not in (None, "auto") and not is_own:
            # A newer one that was there before belongs to a continuation that the user did not choose.
            before = Path(str(self.resume))
            manifest = read_manifest(before)
            step = 0 if manifest is None else manifest.step
            return self.resume, step, [f"resumes from {before}, as before"]
        return (None if path is None else str(path)), chosen.step, chosen.lines()


@dataclass(frozen=True, slots=True)
class _Place:
    """How far an attempt came, and its error: the same twice would come a third time."""

    code: str
    step: int
    checkpoint: int
    """The newest one's step; 0 without any."""
    between_statuses: int
    """Steps that a rank may do between two statuses."""

    def is_same(self, last: _Place) -> bool:
        alike = (self.code, self.checkpoint) == (last.code, last.checkpoint)
        return alike and abs(self.step - last.step) <= self.between_statuses


def _place(failure: RunFailed, run_dir: Path) -> _Place:
    statuses = read_statuses(run_dir).values()
    steps = [status.step for status in statuses]
    reached = max([*steps, last_step(run_dir)]) if any(steps) else 0
    newest = max(complete_checkpoints(run_dir / "checkpoints"), default=0)
    medians = [status.median for status in statuses if status.median]
    between = int(_STATUS_S / min(medians)) if medians else 0
    return _Place(failure.problems[0].code, reached, newest, between)


@dataclass(slots=True)
class Restarts:
    """The restarts of one command."""

    begun: Begun
    allowed: int
    """In a row, without a new checkpoint between."""
    say: Callable[[str], None]
    first_pause_s: float = FIRST_PAUSE_S
    check: Callable[[], None] = lambda: None
    """Called in the pauses: raises where the run cannot continue, as when a node is lost."""
    _in_a_row: int = 0
    _last: _Place | None = None
    _causes: list[str] = field(default_factory=list)
    _unwritten: list[dict[str, Any]] = field(default_factory=list)
    """Restarts that are not in restarts.jsonl."""

    def next(self, failure: RunFailed, *, elsewhere: bool = False) -> str | None:
        """Wait, and return what the next attempt resumes (EFFILAUNCH_RESUME); None: it starts anew.

        elsewhere: it has other hardware than that which failed.
        Raises the failure where there is no next attempt, with what was tried. Interrupted after a signal.
        """
        place = _place(failure, self.begun.run_dir)
        if self._last is not None and place.checkpoint != self._last.checkpoint:
            self._in_a_row = 0
        if not (self.allowed and (elsewhere or may_pass(failure))):
            raise self._with_causes(failure, [])
        if self._last is not None and place.is_same(self._last) and not elsewhere:
            why = f"it failed twice in the same way at step {place.step}, so it is not restarted again"
            raise self._with_causes(failure, [why])
        if self._in_a_row >= self.allowed:
            raise self._with_causes(failure, [f"launch.max_restarts: {self.allowed} is used up"])
        self._in_a_row, self._last = self._in_a_row + 1, place
        self._causes.append(failure.problems[0].message)
        return self._restart(failure, place.step)

    def _restart(self, failure: RunFailed, step: int) -> str | None:
        run_dir = self.begun.run_dir
        waited = pause_before(self._in_a_row, self.first_pause_s)
        cause = failure.problems[0].message
        self.say(f"\nrestart {self._in_a_row} of {self.allowed} in {waited:g} s: {cause}")
        stopped_by = pause(waited, self.check)
        if stopped_by is not None:
            message = f"{stopped_by.name}: stopped while it waited to restart; it had failed: {cause}"
            hint = "continue it with --resume auto"
            raise Interrupted(Problem("interrupted", message, file=str(run_dir), hint=hint)) from failure
        resumes, begins, lines = self.begun.resumes()
        for line in lines:
            self.say(line)
        self.record(failure, step=step, resumed_from=begins, waited_s=waited)
        return resumes

    def record(self, failure: Failure, **values: float) -> None:
        """Add a restart to restarts.jsonl."""
        run_dir = self.begun.run_dir
        cause = hider(secret_values(os.environ))(failure.problems[0].message)
        row = {"time": time.time(), "cause": cause, **values}
        try:
            with (run_dir / RESTARTS).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            self._unwritten.append(row)
            reason = error.strerror
            self.say(f"{run_dir / RESTARTS} cannot be written ({reason}): the run continues without it")

    def _with_causes(self, failure: RunFailed, why: list[str]) -> RunFailed:
        """The failure with what was tried before it."""
        if not self._causes:
            return failure
        problem, count = failure.problems[0], len(self._causes)
        before = "; ".join(dict.fromkeys(self._causes))
        tried = f"{count} restart{'s' if count > 1 else ''} before, after: {before}"
        problem = replace(problem, message="; ".join([problem.message.rstrip("."), *why, tried]))
        if isinstance(failure, KnownFailure):
            return KnownFailure(problem, failure.finding)
        return RunFailed([problem, *failure.problems[1:]])

    def recorded(self, result: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Add all restarts of the run, and `more`, to result.json; its content.

        Where result.json cannot be written, it stays as the worker wrote it.
        """
        run_dir = self.begun.run_dir
        rows = [*read_jsonl(run_dir / RESTARTS), *self._unwritten]
        complete = {**result, **more, "restarts": rows}
        try:
            write_text(run_dir / "result.json", dump_json(complete))
        except OSError as error:
            reason = error.strerror
            self.say(f"{run_dir / 'result.json'} cannot be written ({reason}): it lacks the restarts")
        return complete
