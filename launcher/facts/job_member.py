"""The place of a process of effilaunch in a job on several nodes."""

from __future__ import annotations

from dataclasses import dataclass

RENDEZVOUS_PORT = 29400
"""torchrun's own default: the port of node rank 0 where nothing names one."""


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
    """Port of the rendezvous, at which member 0 listens."""
    name: str = ""
    """Of the job, for its run directory; empty where two jobs may have the same."""
    hosts: tuple[str, ...] = ()
    """Names of all members, where the scheduler or the hostfile gives them."""

    @property
    def is_head(self) -> bool:
        return self.member == 0

    @property
    def is_one_rank(self) -> bool:
        """Whether this member starts one worker."""
        return self.tasks_per_node > 1

    def ranks(self, devices_per_node: int) -> range:
        """The ranks that this member starts."""
        first = self.node_rank * devices_per_node
        if self.is_one_rank:
            return range(first + self.local_task, first + self.local_task + 1)
        return range(first, first + devices_per_node)
