"""The drill: what strikes a run, when, how the run must end, and whether its loss went on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import Problem, RecipeError
from launcher.plan.plan import Plan
from launcher.recipe.schema import Recipe
from launcher.recipe.suggestions import close_key

STEPS = 12
"""Steps of a drill unless it is asked for others."""
LEAST_STEPS = 6
"""Two steps between saves, so that a fault can strike between two of them."""
GONE_S = 60.0
"""A lost rank ends the run on all ranks within a minute; what a stopped run's save needs comes on top."""
TOLERANCE = 8.0
"""Times the difference of two undisturbed runs: a resumed run of the same kind is one more draw of it."""

Losses = Mapping[int, float | None]
"""Step -> loss; None: it was not finite."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a run."""

    id: str
    """As EFFILAUNCH_DRILL names it."""
    title: str
    code: int
    """Exit code that the run must end with."""
    words: tuple[str, ...]
    """The cause that the run names has one of these in it."""
    in_save: bool = False
    """Strikes inside a save; else between two steps."""


KILLED = ("SIGKILL", "killed", "signal 9", "was lost")
FULL = ("disk", "space", "too large")
FAULTS = (
    Fault("terminate", "SIGTERM to the run", 130, ("SIGTERM",)),
    Fault("kill-rank", "SIGKILL of one rank", 5, KILLED),
    Fault("kill-all", "SIGKILL of all ranks", 5, KILLED),
    Fault("disk-full", "a full disk during a save", 5, FULL, in_save=True),
    Fault("kill-save", "SIGKILL of all ranks during a save", 5, KILLED, in_save=True),
)


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a drilled run."""

    steps: int

    @property
    def save_steps(self) -> int:
        """Three saves a run."""
        return self.steps // 3

    def strikes(self, fault: Fault) -> int:
        """The step at whose end, or in whose save, the fault strikes."""
        every = self.save_steps
        return 2 * every if fault.in_save else every + every // 2

    def kept(self, fault: Fault) -> int:
        """The last checkpoint that must be whole after the fault; a stopped run has saved one more."""
        return self.strikes(fault) if fault.id == "terminate" else self.save_steps


def make_course(steps: int) -> Course:
    """RecipeError for too few steps."""
    if steps < LEAST_STEPS:
        message = f"--steps {steps}: expected at least {LEAST_STEPS}, for a fault between two saves"
        raise RecipeError(Problem("usage", message, "--steps"))
    return Course(steps)


def choose_faults(only: str | None) -> tuple[Fault, ...]:
    """All faults, or those that `--only` names. RecipeError for a name that is none."""
    if only is None:
        return FAULTS
    known = {fault.id: fault for fault in FAULTS}
    names = [name.strip() for name in only.split(",") if name.strip()]
    problems = []
    for name in names:
        if name not in known:
            close = close_key(name, known)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
            problems.append(Problem("unknown-fault", f"there is no fault `{name}`", "--only", hint=hint))
    if not names:
        problems.append(
            Problem("usage", "--only names no fault", "--only", hint=f"there are {', '.join(known)}")
        )
    if problems:
        raise RecipeError(problems)
    return tuple(fault for fault in FAULTS if fault.id in names)


def course_overrides(recipe: Recipe, course: Course) -> list[str]:
    """What the drill sets of the recipe, as `--set` takes it: its length, its saves and its reports."""
    every = course.save_steps
    changes: dict[str, object] = {
        "trainer.num_train_epochs": "null",
        "trainer.max_steps": course.steps,
        "trainer.save_strategy": "steps",
        "trainer.save_steps": every,
        "trainer.logging_strategy": "steps",
        "trainer.logging_steps": 1,
        "trainer.report_to": "none",
        "early_stopping": "null",
        "launch.max_restarts": 0,
        "on_oom": "fail",  # a process that was killed may have been for its memory
    }
    if recipe.trainer.get("push_to_hub"):
        changes["trainer.push_to_hub"] = False
    # The best checkpoint is known by an evaluation beside each save, which the plan then asks for itself.
    if recipe.trainer.get("eval_strategy", "no") != "no" or recipe.trainer.get("load_best_model_at_end"):
        changes |= {"trainer.eval_strategy": "steps", "trainer.eval_steps": every}
    return [f"{key}={value}" for key, value in changes.items()]


def check_resumable(recipe: Recipe) -> None:
    """RecipeError where no checkpoint of this recipe can be gone on from."""
    if recipe.trainer.get("save_only_model"):
        raise RecipeError(
            Problem(
                "checkpoint-without-states",
                "checkpoints of weights alone cannot be resumed from, so there is nothing to drill",
                path="trainer.save_only_model",
                hint="--set trainer.save_only_model=false",
            )
        )


def check_states(plan: Plan) -> None:
    """RecipeError where what a checkpoint would hold lies on NVMe: such a run cannot be gone on from.

    The plan is asked, since a base profile may say so as well as the recipe.
    """
    for name in ("sharding.offload_optimizer", "sharding.offload_param"):
        if plan.at(name) == "nvme":
            raise RecipeError(
                Problem(
                    "nvme-resume",
                    "DeepSpeed does not read states from NVMe again, so there is nothing to drill",
                    path=name,
                    hint=f"--set {name}=cpu, or none, drills the rest of it",
                )
            )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a struck run ended."""

    code: int | None
    """None: it did not end in time and was killed."""
    struck: bool
    """Whether the fault happened at all."""
    seconds: float
    """From the fault until no process was left."""
    left: int
    """Processes that outlived it."""
    cause: str
    """What the run says it died of; empty when it says nothing."""


def bad_ending(fault: Fault, ending: Ending, stop_s: float) -> str | None:
    """What is wrong with how the run ended; None: nothing.

    stop_s: seconds that a step and a save of this plan may take together.
    """
    limit = GONE_S + (stop_s if fault.id == "terminate" else 0.0)
    if ending.code is None:
        return "the run did not end"
    if not ending.struck:
        return f"it did not strike: the run ended with exit code {ending.code}: {ending.cause or 'no cause'}"
    if ending.code != fault.code:
        return f"it ended with exit code {ending.code}, expected {fault.code}: {ending.cause or 'no cause'}"
    if ending.left:
        return f"{ending.left} of its processes outlived it"
    if ending.seconds > limit:
        return f"it took {ending.seconds:.0f} s to end, expected {limit:.0f} s at most"
    if not any(word.casefold() in ending.cause.casefold() for word in fault.words):
        return f"the cause that it names is not the fault: {ending.cause or 'none'}"
    return None


def bad_checkpoint(fault: Fault, course: Course, found: int | None) -> str | None:
    """What is wrong with the last whole checkpoint (its step) after the fault; None: nothing."""
    wanted = course.kept(fault)
    if found is None:
        return "no whole checkpoint was left"
    good = found >= wanted if fault.id == "terminate" else found == wanted
    return None if good else f"the last whole checkpoint is of step {found}, expected {wanted}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses of a run beside those of the undisturbed one."""

    steps: int
    """Steps that both have."""
    difference: float | None
    """The largest; None where one loss is finite and the other is not, or there was nothing to compare."""
    worst: int | None
    """The step of it."""
    missing: tuple[int, ...]
    """Steps that only one of them has."""


def compare(found: Losses, expected: Losses) -> Comparison:
    """Two runs, step by step."""
    both = sorted(found.keys() & expected.keys())
    gaps = {step: _gap(found[step], expected[step]) for step in both}
    worst = max(both, key=lambda step: (gaps[step] is None, gaps[step] or 0.0), default=None)
    missing = tuple(sorted(found.keys() ^ expected.keys()))
    return Comparison(len(both), None if worst is None else gaps[worst], worst, missing)


def _gap(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return 0.0 if one is other else None
    return abs(one - other)


def bad_losses(found: Comparison, tolerance: float) -> str | None:
    """What is wrong with a run's losses; None: nothing."""
    if found.missing:
        return f"steps {_listed(found.missing)} are not in both runs"
    if found.difference is None:
        return (
            "there is nothing to compare"
            if found.worst is None
            else f"step {found.worst}: not finite in one run"
        )
    if found.difference > tolerance:
        expected = "the same to the last bit" if tolerance == 0 else f"at most {tolerance:.2g} apart"
        return f"step {found.worst}: losses are {found.difference:.3g} apart, expected {expected}"
    return None


def tolerance_of(runs: Sequence[Losses]) -> float:
    """How far losses may lie apart: not at all where two undisturbed runs agree, or one alone was made."""
    if len(runs) < 2:
        return 0.0
    return TOLERANCE * (compare(runs[1], runs[0]).difference or 0.0)


def _listed(steps: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, steps[:most])) + (", …" if len(steps) > most else "")
