"""Slurm: runs as the tasks of a step of `srun`."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import RecipeError
from launcher.schedulers.scheduler import Gathering, Scheduler, StartRequest
from launcher.schedulers.slurm_allocation import (
    forgotten_srun,
    place_in,
    read_allocation,
    runs_alone,
    wrong_tasks,
)
from launcher.schedulers.slurm_commands import ask


class SlurmNodes(Scheduler):
    """The nodes of a Slurm job."""

    def starts(self, request: StartRequest) -> bool:
        elsewhere = request.is_manual or request.alone == "--dry-run"
        return not elsewhere and read_allocation(os.environ) is not None

    def gathering(self, request: StartRequest) -> Gathering | None:
        allocation = read_allocation(os.environ, socket.gethostname())
        assert allocation is not None, "asked inside a job"
        line = _line(request.words)
        if (forgotten := forgotten_srun(allocation, line)) is not None:
            raise RecipeError(forgotten)
        if allocation.step is None:
            request.say(runs_alone(allocation))
            return None
        hardware = request.hardware()
        # A rehearsal runs on one node, with the devices that it finds there.
        nodes, devices = (1, 1) if request.alone else (hardware.num_nodes, hardware.devices_per_node)
        fewer = replace(hardware, num_nodes=allocation.job_nodes).label
        other = _line(_with_hardware(request.words, fewer))
        launch = request.loaded.recipe.launch
        elastic = range(launch.min_nodes or 0, 1 + (launch.max_nodes or nodes) if launch.min_nodes else 0)
        if (wrong := wrong_tasks(allocation, nodes, devices, line, other, elastic)) is not None:
            raise RecipeError(wrong)
        return None if allocation.tasks == 1 else Gathering(place_in(allocation, node_address))


SCHEDULER = SlurmNodes()


def node_address(host: str) -> str:
    """The name of a node if it can be resolved, else its address in Slurm."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        found = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "-o", "show", "node", host).out)
        return found[1] if found else host
    return host


def _line(words: Sequence[str]) -> str:
    return shlex.join(["effilaunch", *words])


def _with_hardware(words: Sequence[str], label: str) -> list[str]:
    """The command with another --on; without one it comes after the command's name."""
    given = [at for at, word in enumerate(words) if word == "--on" or word.startswith("--on=")]
    if not given:
        return [*words[:1], "--on", label, *words[1:]]
    at = given[-1]
    after = at + (2 if words[at] == "--on" else 1)
    return [*words[:at], "--on", label, *words[after:]]
