"""A command inside a job of Slurm's: which place it has there, or what is wrong with how it was started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher.commands.gather import find_hardware
from launcher.errors import Problem, RecipeError
from launcher.facts.place import Place
from launcher.recipe.loading import LoadedRecipe
from launcher.report.text import shell_word
from launcher.schedulers.slurm_allocation import (
    forgotten_srun,
    place_in,
    read_allocation,
    runs_alone,
    wrong_tasks,
)
from launcher.schedulers.slurm_queue import node_address


def refuse_hostfile() -> None:
    """RecipeError (2) in one of several tasks of a step: each would start all machines of a hostfile."""
    allocation = read_allocation(os.environ)
    if allocation is None or allocation.step is None or allocation.tasks == 1:
        return
    message = f"each of the {allocation.tasks} tasks of srun would start all machines of the hostfile"
    hint = "take it away for Slurm (--set launch.hostfile=null), or start the run once, without srun"
    raise RecipeError(Problem("slurm-hostfile", message, path="launch.hostfile", hint=hint))


def allocated(
    loaded: LoadedRecipe,
    on: str | None,
    command: Sequence[str],
    *,
    tiny: bool,
    say: Callable[[str], None],
) -> Place | None:
    """The place of this task of a step; None outside a job, and for the only task of one.

    command: the words that the user gave, for the line that mends an error.
    RecipeError (2) in the shell of `salloc` on another machine, without srun in a job of several nodes, and
    for tasks that are neither one a node nor one a device.
    """
    allocation = read_allocation(os.environ, socket.gethostname())
    if allocation is None:
        return None
    forgotten = forgotten_srun(allocation, _line(command))
    if forgotten is not None:
        raise RecipeError(forgotten)
    if allocation.step is None:
        say(runs_alone(allocation))
        return None
    hardware = find_hardware(loaded.recipe, on)
    # A rehearsal takes one machine and what it finds there.
    nodes, devices = (1, 1) if tiny else (hardware.num_nodes, hardware.devices_per_node)
    fewer = replace(hardware, num_nodes=allocation.job_nodes).label
    wrong = wrong_tasks(allocation, nodes, devices, _line(command), _line(_with_hardware(command, fewer)))
    if wrong is not None:
        raise RecipeError(wrong)
    return None if allocation.tasks == 1 else place_in(allocation, node_address)


def _line(words: Sequence[str]) -> str:
    return " ".join(["effilaunch", *map(shell_word, words)])


def _with_hardware(words: Sequence[str], label: str) -> list[str]:
    """The command with another --on; without one it comes behind the command's name."""
    given = [at for at, word in enumerate(words) if word == "--on" or word.startswith("--on=")]
    if not given:
        return [*words[:1], "--on", label, *words[1:]]
    at = given[-1]
    behind = at + (2 if words[at] == "--on" else 1)
    return [*words[:at], "--on", label, *words[behind:]]
