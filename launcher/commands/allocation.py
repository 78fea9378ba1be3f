"""A command inside a job of Slurm's: which place it has there, or what is wrong with how it was started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from launcher.commands.gather import find_hardware
from launcher.errors import RecipeError
from launcher.facts.place import Place
from launcher.facts.queue import node_address
from launcher.facts.slurm import (
    forgotten_srun,
    place_in,
    read_allocation,
    runs_alone,
    wrong_tasks,
)
from launcher.recipe.loading import LoadedRecipe
from launcher.report.text import shell_word


def allocated(
    loaded: LoadedRecipe, on: str | None, *, tiny: bool, say: Callable[[str], None]
) -> Place | None:
    """The place of this task of a step; None outside a job, and for the only task of one.

    RecipeError (2) in the shell of `salloc` on another machine, without srun in a job of several nodes, and
    for tasks that are neither one a node nor one a device.
    """
    allocation = read_allocation(os.environ, socket.gethostname())
    if allocation is None:
        return None
    command = f"effilaunch run {shell_word(str(loaded.path))}"
    forgotten = forgotten_srun(allocation, command)
    if forgotten is not None:
        raise RecipeError(forgotten)
    if allocation.step is None:
        say(runs_alone(allocation))
        return None
    hardware = find_hardware(loaded.recipe, on)
    # A rehearsal takes one machine and what it finds there.
    nodes, devices = (1, 1) if tiny else (hardware.num_nodes, hardware.devices_per_node)
    wrong = wrong_tasks(allocation, nodes, devices, command)
    if wrong is not None:
        raise RecipeError(wrong)
    return None if allocation.tasks == 1 else place_in(allocation, node_address)
