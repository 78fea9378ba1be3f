"""A process of effilaunch among those that run one job on several nodes."""

from __future__ import annotations

from dataclasses import dataclass

PORTS = 16
"""Number of ports from `JobMember.port` on that are tried for the control channel."""


@dataclass(frozen=True, slots=True)
class JobMember:
    """The position of this process among those that run one job."""

    job: str
    """Id of the job, e.g. "slurm-1234.0"."""
    member: int
    """0 plans and coordinates; the others follow."""
    members: int
    num_nodes: int
    node_rank: int
    tasks_per_node: int
    """1: one member per node, whose launcher starts the ranks; else each member is one rank."""
    local_task: int
    """0 .. tasks_per_node-1"""
    head: str
    """Host name or address of member 0."""
    port: int
    """First candidate for the control port of member 0; the next 15 are tried, too."""

    @property
    def is_head(self) -> bool:
        return self.member == 0

    @property
    def is_one_rank(self) -> bool:
        """Whether this member starts one worker itself, without a launcher."""
        return self.tasks_per_node > 1

    def ranks(self, devices_per_node: int) -> range:
        """The ranks that this member starts."""
        first = self.node_rank * devices_per_node
        if self.is_one_rank:
            return range(first + self.local_task, first + self.local_task + 1)
        return range(first, first + devices_per_node)
