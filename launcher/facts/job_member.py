"""Where a process of effilaunch stands among those that run one job together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PORTS = 16
"""So many ports, from `Place.port` on, are tried for the head's control channel."""


@dataclass(frozen=True, slots=True)
class JobMember:
    """Where this process of effilaunch stands among those that run one job together."""

    job: str
    """The same for all members of a job and for no other, e.g. "slurm-1234.0"."""
    member: int
    """0 is the head, which plans and decides; the others take its orders."""
    members: int
    num_nodes: int
    node_rank: int
    tasks_per_node: int
    """1: one member a machine, whose launcher starts the ranks; else each member is one rank."""
    local_task: int
    """0 .. tasks_per_node-1"""
    head: str
    """Host name or address under which the head is reached."""
    port: int
    """First candidate for the head's control port; the next 15 are tried too."""

    @property
    def is_head(self) -> bool:
        return self.member == 0

    @property
    def is_one_rank(self) -> bool:
        """Whether this member starts one worker itself, and no launcher."""
        return self.tasks_per_node > 1

    def ranks(self, devices_per_node: int) -> range:
        """The ranks that this member starts."""
        first = self.node_rank * devices_per_node
        if self.is_one_rank:
            return range(first + self.local_task, first + self.local_task + 1)
        return range(first, first + devices_per_node)
