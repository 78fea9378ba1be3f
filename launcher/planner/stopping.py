"""How long a stop may take, and the time that a launcher allows for it. Pure.

After a signal the workers finish the current step, or those until they next agree (AGREE_S), and save a
checkpoint. A launcher that kills them before loses it.
"""

from __future__ import annotations

import math

from launcher.files.rank_status import AGREE_S
from launcher.machine.hardware import Hardware
from launcher.plan.draft import Draft
from launcher.plan.inputs import Facts
from launcher.plan.plan import Plan
from launcher.plan.settings import HasSettings
from launcher.planner.candidates import Candidate
from launcher.recipe.schema import Recipe

KILL_S = 30
"""Seconds after a signal at which DeepSpeed's launcher (launch.py terminate_process_tree, fixed) and torchrun
(launcher/api.py shutdown_timeout, a default) kill the workers."""
WRITE_BYTES = 200e6
"""Assumption: bytes of a checkpoint a second, hashed and on the disk. A plain network disk takes so much, a
local one more: who waits too long for a stop loses nothing, who waits too little all of it."""
UPLOAD_BYTES = 100e6
"""Assumption: bytes of a checkpoint a second that are copied to an object store and read back."""
SETTLE_S = 2.0
"""Assumption: what a save takes besides its bytes: ranks wait for each other, and each file for the disk."""
_WAIT_NAME = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
WAIT = f"launch.env.{_WAIT_NAME}"
"""Read by torchrun, and by `accelerate launch`, which starts workers through it."""


def settle_stop(draft: Draft, recipe: Recipe, chosen: Candidate, facts: Facts) -> None:
    """Record runtime.stop_seconds, and a launcher that waits so long; a warning where none does."""
    seconds, counted = stop_seconds(draft, chosen, facts)
    draft.put("runtime.stop_seconds", seconds, counted)
    if seconds <= KILL_S or draft.launch.launcher == "python":
        return
    if draft.launch.launcher == "deepspeed" and recipe.launch.launcher == "auto":
        reason = f"the deepspeed launcher kills {KILL_S} s after a signal, a stop may take {seconds} s"
        draft.put("launch.launcher", "accelerate", reason)
    if draft.launch.launcher == "deepspeed":
        draft.warn(
            f"a stop may take {seconds} s ({counted}), and the deepspeed launcher kills the workers "
            f"{KILL_S} s after a signal that reaches it: what was trained since the last checkpoint "
            f"({_how_often(draft)}) is lost then; launch.launcher: "
            "auto takes one that waits"
        )
        return
    if not draft.explicit(WAIT):
        draft.put(
            WAIT, str(seconds), f"torchrun kills {KILL_S} s after a signal; a stop may take {seconds} s"
        )
    elif _is_short(draft.launch.env[_WAIT_NAME], seconds):
        draft.warn(
            f"{WAIT}: {draft.launch.env[_WAIT_NAME]} is less than the {seconds} s that a stop may take "
            f"({counted}): what was trained since the last checkpoint ({_how_often(draft)}) may be lost at a "
            "signal"
        )


def stop_seconds(draft: Draft, chosen: Candidate, facts: Facts) -> tuple[int, str]:
    """(seconds, what was counted): the slowest step that is predicted or was seen, and one save."""
    alone = bool(draft.trainer.save_only_model)
    size = chosen.job.engine.checkpoint(facts.model, chosen.job, weights_alone=alone)
    save = size / WRITE_BYTES + SETTLE_S
    said = f"a checkpoint of {size / 1e9:.1f} GB at an assumed {WRITE_BYTES / 1e6:.0f} MB/s"
    if facts.pace.save is not None and facts.pace.save > save:
        save, said = facts.pace.save, f"a save of {facts.pace.save:.3g} s, which this run has seen"
    if draft.runtime.mirror is not None:
        save += size / UPLOAD_BYTES + SETTLE_S
        said += f", copied to {draft.runtime.mirror} at an assumed {UPLOAD_BYTES / 1e6:.0f} MB/s"
    predicted = None if chosen.time.seconds is None else chosen.time.seconds[1]
    seen = facts.pace.step
    step = max(predicted or 0.0, seen or 0.0)
    total = math.ceil(_until_a_stop(step, facts.hardware) + save)
    if predicted is None and seen is None:
        return total, f"{said}; a step is not predicted here and not counted"
    source = ", which this run has seen," if step == seen else ""
    return total, f"a step of up to {step:.3g} s{source} and {said}"


def _until_a_stop(step: float, hardware: Hardware) -> float:
    """Seconds from a signal to the end of the last step: several ranks agree about it every AGREE_S."""
    return step if hardware.num_devices == 1 else max(step, AGREE_S)


def kill_seconds(plan: Plan) -> float | None:
    """How long the plan's launcher waits after a signal before it kills; None where there is none."""
    launcher = plan.launch.launcher
    if launcher == "python":
        return None
    given = "" if launcher == "deepspeed" else plan.launch.env.get(_WAIT_NAME, "")
    return float(given) if given.isdigit() else float(KILL_S)


def slow_step_word(plan: Plan, step: float) -> str:
    """A warning for a run whose steps take `step` seconds where the launcher kills before such a step and a
    save are done; empty where the plan took it into account, or where they fit."""
    planned, kill = float(plan.runtime.stop_seconds or 0), kill_seconds(plan)
    predicted = 0.0 if plan.time.seconds is None else plan.time.seconds[1]
    save = max(0.0, planned - _until_a_stop(max(predicted, plan.pace.step or 0.0), plan.hardware))
    if kill is None or planned > kill or step + save <= kill:
        return ""
    total = math.ceil(step + save)
    return (
        f"WARNING: a step takes {step:.3g} s here, and a checkpoint about {save:.0f} s: where a scheduler "
        f"signals every process, the launcher kills the workers {kill:.0f} s later, without a checkpoint "
        f"({_how_often(plan)}). Let it signal effilaunch alone, {total + KILL_S} s before the end; "
        f"a run resumed with --resume auto counts this step"
    )


def _how_often(planned: HasSettings) -> str:
    trainer = planned.trainer
    if trainer.save_strategy != "steps":
        return f"trainer.save_strategy: {trainer.save_strategy}"
    return f"trainer.save_steps: {500 if trainer.save_steps is None else trainer.save_steps}"


def _is_short(given: str, seconds: int) -> bool:
    """Whether the recipe's own number is too small; the value of a reference is not known here."""
    return given.isdigit() and int(given) < seconds
