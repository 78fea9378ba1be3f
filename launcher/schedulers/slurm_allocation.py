"""Read the place of a process in a Slurm job from SLURM_* variables and compressed host lists. Pure.

Seen on Slurm 22.05: a batch script has the job's variables and those of a first task (SLURM_PROCID=0), but no
SLURM_STEP_ID; the shell of `salloc` runs where it was typed, and has the job's variables alone; a task of
`srun` has all. SLURM_STEP_ID of an interactive or a batch step is one of the highest numbers there are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from launcher.errors import Problem, RecipeError
from launcher.machine.job_member import JobMember

_LAST_STEP = 0xFFFF_FFF0
"""Steps from here on are Slurm's own: batch, extern, interactive, pending."""
_DIGITS = 10
"""Of the largest number of 32 bits."""
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below the ports that a system gives to outgoing connections (32768 and above)."""
_BETWEEN = 16
"""Ports from that of one step to that of the next."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One process in a Slurm job."""

    job: str
    """Number of the job; each task of an array has its own."""
    step: int | None
    """Number of the step; None in a batch script, in the shell of `salloc`, in an interactive step."""
    hosts: tuple[str, ...]
    """Hosts of the step; outside a step, of the job."""
    job_nodes: int
    """Nodes of the whole job."""
    tasks_per_node: tuple[int, ...]
    """Tasks of the step on each host; outside a step, those that the job asks for."""
    node_rank: int
    task: int
    """0 .. tasks-1, in the order of --distribution: node by node (block), or from node to node (cyclic)."""
    local_task: int
    on_node: bool
    """Whether this process runs on one of the nodes; the shell of `salloc` need not."""
    restarts: int = 0
    """How often the job was requeued."""

    @property
    def tasks(self) -> int:
        return sum(self.tasks_per_node)

    @property
    def name(self) -> str:
        return f"slurm-{self.job}" if self.step is None else f"slurm-{self.job}.{self.step}"


def read_allocation(environ: Mapping[str, str], host: str = "") -> Allocation | None:
    """The allocation in SLURM_*; None outside a job. RecipeError for variables that Slurm does not write.

    host: name of this machine, to recognise the shell of `salloc`.
    """
    job = environ.get("SLURM_JOB_ID", "")
    step = _step(environ.get("SLURM_STEP_ID", ""))
    of_job = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    listed = (environ.get("SLURM_STEP_NODELIST") if step is not None else "") or of_job
    if not job or not listed:
        return None
    counted = "SLURM_STEP_TASKS_PER_NODE" if step is not None else "SLURM_TASKS_PER_NODE"
    try:
        hosts, job_nodes = expand_hosts(listed), len(expand_hosts(of_job or listed))
        counts = expand_counts(environ[counted]) if environ.get(counted) else (1,) * len(hosts)
        names = ("JOB_ID", "NODEID", "PROCID", "LOCALID", "RESTART_COUNT")
        _, rank, task, local, restarts = (_number(environ.get(f"SLURM_{n}", "0")) for n in names)
    except ValueError as error:
        raise RecipeError(_unread(str(error))) from None
    if len(counts) != len(hosts):
        raise RecipeError(_unread(f"{counted}={environ[counted]} does not fit the hosts {listed}"))
    if step is not None:
        _check_place(environ, (rank, task, local), counts)
    short = host.partition(".")[0]
    on_node = step is not None or "SLURMD_NODENAME" in environ or short in hosts
    return Allocation(job, step, hosts, job_nodes, counts, rank, task, local, on_node, restarts)


def _check_place(environ: Mapping[str, str], place: tuple[int, int, int], counts: tuple[int, ...]) -> None:
    """RecipeError for a task of a step without a valid place. place: NODEID, PROCID and LOCALID."""
    rank, task, local = place
    names = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
    if missing := [name for name in names if not environ.get(name)]:
        raise RecipeError(_unread(f"a task of a step has {', '.join(names)}, but {missing[0]} is missing"))
    on_node = counts[rank] if rank < len(counts) else 0
    for name, number, most, of in (
        (names[0], rank, len(counts), "node(s) of the step"),
        (names[1], task, sum(counts), "task(s) of the step"),
        (names[2], local, on_node, f"task(s) on node {rank}"),
    ):
        if number >= most:
            raise RecipeError(_unread(f"{name}={number}, and there are {most} {of}, counted from 0"))


def _number(text: str) -> int:
    """An unsigned 32-bit number. ValueError for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise ValueError(f"{text[:40]!r} is not a number")
    return int(text)


def _step(text: str) -> int | None:
    """The number of a step; None outside one, and for Slurm's own steps. RecipeError for other text."""
    try:
        number = _number(text) if text else _LAST_STEP
    except ValueError as error:
        raise RecipeError(_unread(f"SLURM_STEP_ID: {error}")) from None
    return number if number < _LAST_STEP else None


def _unread(why: str) -> Problem:
    hint = "run it where Slurm set these variables, or unset SLURM_JOB_ID to run it outside the job"
    return Problem("slurm-environment", f"the SLURM_* variables cannot be read: {why}", hint=hint)


def srun_line(nodes: int, tasks: int, command: str) -> str:
    """The `srun` line with `tasks` on each node."""
    return f"srun --nodes={nodes} --ntasks={nodes * tasks} --ntasks-per-node={tasks} {command}"


def forgotten_srun(allocation: Allocation, command: str) -> Problem | None:
    """The problem of a process that needs `srun` and was started without it; None where it may run."""
    nodes = len(allocation.hosts)
    line = srun_line(nodes, 1, command)
    if not allocation.on_node:
        hosts = ", ".join(allocation.hosts[:3]) + (", …" if nodes > 3 else "")
        message = (
            f"this is the shell of `salloc`, not one of the {nodes} node(s) of job {allocation.job} ({hosts})"
        )
        return Problem("slurm-login-node", message, hint=f"write `{line}`")
    if allocation.step is None and nodes > 1:
        message = f"job {allocation.job} has {nodes} nodes, and without srun this runs only on the first"
        return Problem("slurm-no-srun", message, hint=f"write `{line}`")
    return None


def runs_alone(allocation: Allocation) -> str:
    """A note on a process that was started without `srun` in a job of one node."""
    return (
        f"job {allocation.job} has one node: this runs there without srun; with `srun` before the command it "
        f"also gets the signal that Slurm sends before the end (--signal)"
    )


def wrong_tasks(
    allocation: Allocation, nodes: int, devices: int, command: str, fewer: str, elastic: range = range(0)
) -> Problem | None:
    """The problem of a step whose tasks are neither one per node nor one per device of the plan's hardware.

    The same in every task. fewer: the command for the nodes of the job, if the plan needs more. elastic: the
    numbers of nodes that an elastic run may have.
    """
    counts = set(allocation.tasks_per_node)
    hosts = len(allocation.hosts)
    if (hosts == nodes and counts in ({1}, {devices})) or (hosts in elastic and counts == {1}):
        return None
    has = f"{allocation.tasks} task(s) on {hosts} node(s)"
    message = f"the step has {has}, but the plan is for {nodes} node(s) with {devices} device(s) each"
    there = min(nodes, allocation.job_nodes)
    line = command if there == nodes else fewer
    hint = f"write `{srun_line(there, 1, line)}` (one task a node)"
    if devices > 1:
        hint += f" or `{srun_line(there, devices, line)}` (one a device)"
    if there < nodes:
        hint = f"start it in a job of {nodes} nodes; or, for the {there} of this one, {hint}"
    return Problem("slurm-tasks", message, hint=hint)


def place_in(allocation: Allocation, address: Callable[[str], str] = str) -> JobMember:
    """The place of this task of a step. address: host name -> address by which other nodes reach it."""
    step = allocation.step or 0
    count = allocation.tasks_per_node[0]
    port = _FIRST_PORT + (int(allocation.job) * 37 + step) * _BETWEEN % _PORTS
    return JobMember(
        job=allocation.name, member=allocation.task, members=allocation.tasks,
        num_nodes=len(allocation.hosts), node_rank=allocation.node_rank, tasks_per_node=count,
        local_task=allocation.local_task, head=address(allocation.hosts[0]), port=port,
        name=allocation.name + (f"-{allocation.restarts}" if allocation.restarts else ""),
        hosts=allocation.hosts if count == 1 else (),
    )  # fmt: skip


def time_seconds(text: str) -> float | None:
    """Seconds of a time in Slurm's format; None for `infinite` and other text.

    minutes, minutes:seconds, hours:minutes:seconds, days-hours, and that with minutes, and seconds
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is None and third is None:
        return 60.0 * (first or 0) + (second or 0)
    return 86400.0 * (days or 0) + 3600.0 * (first or 0) + 60.0 * (second or 0) + (third or 0)


_RANGE = r"(\d+)(?:-(\d+))?"
_COUNT = r"(\d+)(?:\(x(\d+)\))?"
MOST_HOSTS = 100_000
"""A longer list is taken for a mistake."""


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a compressed list, in its order. ValueError for other text."""
    every = (host for part in _parts(text) for host in _expand(part))
    hosts = tuple(itertools.islice(every, MOST_HOSTS + 1))
    if len(hosts) > MOST_HOSTS:
        raise ValueError(f"{text!r} names more than {MOST_HOSTS} hosts")
    return hosts


def expand_counts(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> (2, 2, 2, 1), a number for each node. ValueError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(_COUNT, part)
        if found is None or int(found[2] or 1) > MOST_HOSTS:
            raise ValueError(f"{text!r} is not a list of counts")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _parts(text: str) -> Iterator[str]:
    """Split the list at the commas outside brackets."""
    start = depth = 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is not a list of hosts: its brackets do not match")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"{text!r} is not a list of hosts: its brackets do not match")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    """The hosts of one entry; of several pairs of brackets the last varies fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        if not part or any(char.isspace() for char in part):
            raise ValueError(f"{part!r} is not a host name")
        yield part
        return
    inside, _, after = rest.partition("]")
    tails = list(_expand(after)) if after else [""]
    for entry in inside.split(","):
        found = re.fullmatch(_RANGE, entry)
        if found is None:
            raise ValueError(f"{entry!r} is not a range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= MOST_HOSTS:
            raise ValueError(f"{entry!r} is not a range of numbers")
        for number in range(first, last + 1):
            for tail in tails:
                yield f"{before}{number:0{len(found[1])}d}{tail}"
