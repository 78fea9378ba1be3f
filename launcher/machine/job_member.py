"""The place of a process of effilaunch in a job on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    def seated(self, seats: Sequence[int]) -> JobMember:
        """The position among the members that take part; each of them starts a whole node.

        seats: their numbers, this one among them.
        """
        if len(seats) == self.members:
            return self
        number = seats.index(self.member)
        hosts = tuple(self.hosts[seat] for seat in seats if seat < len(self.hosts))
        return replace(
            self, member=number, members=len(seats), num_nodes=len(seats), node_rank=number, hosts=hosts
        )

    def ranks(self, devices_per_node: int) -> range:
        """The ranks that this member starts."""
        first = self.node_rank * devices_per_node
        if self.is_one_rank:
            return range(first + self.local_task, first + self.local_task + 1)
        return range(first, first + devices_per_node)
