"""What a rehearsal measured, as verdicts in the form of the checks of `doctor`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from launcher.errors import Problem
from launcher.knowledge.doctor.check import CheckResult, Verdict, fail, ok, skip, warn
from launcher.lab.rehearsal.outliers import (
    ABSURD_BYTES_PER_S,
    Slow,
    slow_devices,
    slow_links,
    slow_writers,
    stragglers,
)
from launcher.machine.interfaces import LOOPBACK, UNKNOWN

TITLES = {
    "rehearsal-start": "start",
    "rehearsal-ranks": "ranks",
    "rehearsal-interfaces": "interfaces",
    "rehearsal-all-reduce": "all-reduce",
    "rehearsal-links": "links",
    "rehearsal-devices": "devices",
    "rehearsal-waiting": "waiting",
    "rehearsal-shared": "shared directory",
    "rehearsal-save": "save",
    "rehearsal-stop": "checkpoint",
}
"""The checks of a rehearsal, in the order in which they are shown."""
SLOW_WRITER = 1 / 3
"""Of the others' median: clients of one file server never share it evenly. Below a third it is another mount,
another disk, or a slow network of its own."""
LEAST_BYTES = 64 * 2**20
"""Less shows the latency of a disk, not its speed."""

Row = Mapping[str, Any]
Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class Planned:
    """The parts of the plan that the measurements are compared with."""

    launcher: str
    ranks: int
    on_cpu: bool
    gradient_bytes: int
    stop_seconds: float | None
    """runtime.stop_seconds."""


def judge(
    measured: Mapping[str, Any], planned: Planned, problems: Sequence[Problem] = ()
) -> list[CheckResult]:
    """Every verdict that the measurements allow. problems: why the rehearsal did not finish."""
    names = Names(measured.get("ranks", []))
    verdicts: dict[str, Verdict | None] = {"rehearsal-start": _start(measured, planned, problems)}
    if names.ranks:
        verdicts["rehearsal-ranks"] = _ranks(names, measured)
    if names.ranks and planned.ranks > 1:
        verdicts["rehearsal-interfaces"] = _interfaces(names, measured)
    if planned.ranks == 1:
        alone = "one process: there is no communication, only its device and its save are measured"
        verdicts["rehearsal-all-reduce"] = skip("not measured", alone)
    checks: dict[str, Callable[[Rows, Names, Planned], Verdict]] = {
        "all_reduce": _all_reduce,
        "links": _links,
        "devices": _devices,
        "waiting": _waiting,
    }
    for key, check in checks.items():
        if measured.get(key):
            verdicts[f"rehearsal-{key.replace('_', '-')}"] = check(measured[key], names, planned)
    if rows := measured.get("save"):
        verdicts["rehearsal-shared"] = _shared(rows, names)
        verdicts["rehearsal-save"] = _save(rows, names)
        verdicts["rehearsal-stop"] = _stop(rows, planned)
    return [
        CheckResult(name, title, found) for name, title in TITLES.items() if (found := verdicts.get(name))
    ]


class Names:
    """The ranks by number, their nodes, and what both are called in a message."""

    def __init__(self, ranks: Rows) -> None:
        self.ranks = {int(facts["rank"]): facts for facts in ranks}
        self._firsts: dict[tuple[int, str], int] = {}
        for number, facts in self.ranks.items():
            self._firsts.setdefault((facts["node"], facts["host"]), number)
        self.several = len(self._firsts) > 1
        self._same_name = len({host for _, host in self._firsts}) < len(self._firsts)
        """Whether two nodes have one name, so that only their numbers tell them apart."""

    @property
    def firsts(self) -> list[int]:
        """The first rank of each node."""
        return list(self._firsts.values())

    def node_of(self, rank: int) -> int:
        """The first rank of this rank's node."""
        facts = self.ranks[rank]
        return self._firsts[facts["node"], facts["host"]]

    def host(self, rank: int) -> str:
        facts = self.ranks[rank]
        return f"{facts['host']} [node {facts['node']}]" if self._same_name else str(facts["host"])

    def hosts(self, ranks: Sequence[int]) -> str:
        """The hosts of these ranks; of more than three, their number and the first."""
        names = [self.host(rank) for rank in ranks]
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} nodes ({names[0]}, …)"

    def node(self, rank: int) -> str:
        """`node gpu07 (eth0)`."""
        return f"node {self.host(rank)} ({self.ranks[rank]['interface']})"

    def rank(self, rank: int, device: str = "") -> str:
        return f"rank {rank} on {self.host(rank)}" + (f" ({device})" if device else "")

    def end(self, rank: int) -> str:
        """An end of a link: a node, or a rank if there is one node."""
        return self.node(rank) if self.several else self.rank(rank)


def _failed(slow: Sequence[Slow], found: str, message: str, hint: str) -> Verdict:
    """A failure if something is bad, else a warning."""
    return fail(found, message, hint) if any(one.bad for one in slow) else warn(found, message, hint)


def _start(measured: Mapping[str, Any], planned: Planned, problems: Sequence[Problem]) -> Verdict:
    found = f"{planned.ranks} rank{'s' if planned.ranks > 1 else ''} by {planned.launcher}"
    if problems:
        message = "; ".join(problem.message for problem in problems)
        return fail(found, message, "; ".join(dict.fromkeys(p.hint for p in problems if p.hint)))
    met, joined = measured.get("met_s"), measured.get("joined_s")
    if met is None or joined is None:
        return ok(found)
    return ok(f"{found}, together after {met:.1f} s, joined after {joined:.1f} s")


def _ranks(names: Names, measured: Mapping[str, Any]) -> Verdict:
    nodes = [names.node_of(number) for number in names.ranks]
    found = ", ".join(f"{nodes.count(first)} on {names.host(first)}" for first in names.firsts)
    found += f", {measured['backend']}" if measured.get("backend") else ""
    versions = {first: names.ranks[first]["versions"] for first in names.firsts}
    differing = []
    for package in sorted({name for found_there in versions.values() for name in found_there}):
        nodes_by_version: dict[str, list[int]] = {}
        for first, found_there in versions.items():
            nodes_by_version.setdefault(found_there.get(package, "absent"), []).append(first)
        if len(nodes_by_version) > 1:
            parts = [f"{version} on {names.hosts(firsts)}" for version, firsts in nodes_by_version.items()]
            differing.append(f"{package} {', '.join(parts)}")
    if differing:
        hint = "install the same versions on all nodes, best as one environment on a shared disk"
        return fail(found, f"versions differ: {'; '.join(differing)}", hint)
    return ok(found)


def _interfaces(names: Names, measured: Mapping[str, Any]) -> Verdict:
    by_interface: dict[str, list[int]] = {}
    for first in names.firsts:
        by_interface.setdefault(names.ranks[first]["interface"], []).append(first)
    found = ", ".join(f"{name} on {names.hosts(firsts)}" for name, firsts in by_interface.items())
    if not names.several:
        return ok(f"{found} ({names.ranks[names.firsts[0]]['interface_by']})")
    inward = [*by_interface.get(LOOPBACK, []), *by_interface.get(UNKNOWN, [])]
    if inward and measured.get("joined_s") is None:  # ranks that joined over loopback are on one machine
        reason = names.ranks[inward[0]]["interface_by"]
        message = f"{names.hosts(inward)}: not reachable from the others: {reason} leads to no network"
        variable = "NCCL_SOCKET_IFNAME" if measured.get("backend") == "nccl" else "GLOO_SOCKET_IFNAME"
        return fail(found, message, f"set {variable} to the interface between the nodes")
    without = [first for first in names.firsts if not names.ranks[first]["infiniband"]]
    if without and len(without) < len(names.firsts):
        message = f"{names.hosts(without)}: no active InfiniBand or RoCE port, unlike the other nodes"
        return fail(found, message, "run `ibstat` there; NCCL falls back to sockets for all nodes")
    return ok(found)


def _all_reduce(rows: Rows, names: Names, planned: Planned) -> Verdict:
    largest = rows[-1]
    found = "; ".join(f"{amount(row['bytes'])} in {duration(row['median_s'])}" for row in rows)
    found += f"; {rate(largest['bus_bytes_per_s'])} bus bandwidth"
    wrong = [amount(row["bytes"]) for row in rows if not row["right"]]
    if wrong:
        message = f"the sum over all ranks is wrong for {', '.join(wrong)}: memory or a link corrupts data"
        return fail(found, message, "halve the number of nodes until one is left, to find the bad one")
    step = planned.gradient_bytes * largest["median_s"] / largest["bytes"]
    message = f"the gradients of a step ({amount(planned.gradient_bytes)}) take about {duration(step)}"
    if not planned.gradient_bytes:
        message = "the run has one copy of the model, so it reduces no gradients"
    if names.several and largest["bus_bytes_per_s"] < ABSURD_BYTES_PER_S:
        return fail(found, f"{message}: slower than 0.1 Gbit/s", "see links for the slow node")
    cut = [row for row in rows if row["bytes"] < row["asked_bytes"]]
    if cut:
        message += f"; not enough time for messages of {amount(cut[-1]['asked_bytes'])}"
    return ok(found, message)


def _links(rows: Rows, names: Names, planned: Planned) -> Verdict:
    rates = sorted(row["bytes_per_s"] for row in rows)
    latency = min(row["latency_s"] for row in rows)
    spread = rate(rates[0]) if len(rates) == 1 else f"{rate(rates[0])} to {rate(rates[-1])}"
    found = f"{spread} between {'nodes' if names.several else 'ranks'}, {duration(latency)} latency"
    if planned.on_cpu and not names.several:
        return ok(found, "copies within one memory, not judged")
    slow = slow_links(rows, absurd=names.several)
    if not slow:
        return ok(found, "two nodes: no third to compare with" if len(rates) == 2 and names.several else "")
    ends = ", ".join(dict.fromkeys(names.end(end) for one in slow for end in one.ends))
    hint = f"check {ends}: the port's speed and errors (`ethtool`, `ip -s link`), its cable, other traffic"
    return _failed(slow, found, "; ".join(_slow_link(one, names) for one in slow), hint)


def _slow_link(slow: Slow, names: Names) -> str:
    first, value, normal = names.end(slow.ends[0]), rate(slow.value), rate(slow.normal)
    if slow.what == "late":
        return f"{first} answers after {duration(slow.value)}, the median is {duration(slow.normal)}"
    if slow.what in ("sends", "receives"):
        return f"{first} {slow.what} {value}, the median is {normal}"
    compared = {
        "link": f"both have {normal} with others",
        "one-way": f"the opposite direction has {normal}",
        "absurd": "less than 0.1 Gbit/s",
    }
    return f"from {first} to {names.end(slow.ends[1])}: {value}, {compared[slow.what]}"


def _devices(rows: Rows, names: Names, planned: Planned) -> Verdict:
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row["name"], []).append(row["flops"])
    found = "; ".join(
        f"{len(values)}x {name}: {flops(min(values))} to {flops(max(values))}"
        for name, values in speeds.items()
    )
    if slow := slow_devices(rows):
        devices = {row["rank"]: f"{row['device']}, {row['name']}" for row in rows}
        message = "; ".join(
            f"{names.rank(one.ends[0], devices[one.ends[0]])} computes {flops(one.value)}, the median is "
            f"{flops(one.normal)}"
            for one in slow
        )
        hint = "run `nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE` there; look for other work on it"
        if not any(one.bad for one in slow):
            hint = "look for other work on that node's cores"
        return _failed(slow, found, message, hint)
    if len(speeds) > 1:
        return warn(found, "the devices differ: the slowest sets the pace of all")
    return ok(found)


def _waiting(rows: Rows, names: Names, planned: Planned) -> Verdict:
    most = max(rows, key=lambda row: row["wait_s"])
    found = f"at most {duration(most['wait_s'])} in a step of {duration(most['work_s'] + most['wait_s'])}"
    last = stragglers(rows, on_cpu=planned.on_cpu)
    if not last:
        return ok(found)
    message = "; ".join(
        f"{names.rank(one.ends[0])} is last in nearly every step: the others wait for {one.value:.0%} of it"
        for one in last
    )
    return _failed(last, found, message, "look for other work on that node; `devices` compares them alone")


def _good(rows: Rows) -> Rows:
    return [row for row in rows if row["error"] is None]


def _shared(rows: Rows, names: Names) -> Verdict:
    """Whether every node sees the files that the others write."""
    filesystems = {first: str(names.ranks[first]["filesystem"]) for first in names.firsts}
    nodes = list(dict.fromkeys(names.node_of(row["rank"]) for row in rows))
    found = "; ".join(dict.fromkeys(filesystems.values()))
    if len(nodes) < 2:
        return skip(found, "one node: nothing is shared")
    blind: dict[int, set[int]] = {}
    for row in _good(rows):
        for other in row["unseen"]:
            blind.setdefault(names.node_of(row["rank"]), set()).add(names.node_of(other))
    if blind:
        where = "; ".join(f"{names.node(node)}: {filesystems[node]}" for node in nodes)
        message = f"the nodes do not see one another's files in the run directory ({where})"
        if alone := unshared(blind, nodes):
            ends = ", ".join(names.node(node) for node in alone)
            message = f"{ends} does not share the run directory with the others ({where})"
        hint = "put the run directory (--output-dir) on a filesystem that is mounted on every node"
        return fail(found, message, hint)
    wrong = [row for row in _good(rows) if row["read"] is not None and not row["read"]["right"]]
    if wrong:
        message = "; ".join(_misread(row, names) for row in wrong)
        return fail(found, message, "the filesystem returns old or torn data: check its mount options")
    late = max((row["seen_after_s"] for row in _good(rows)), default=0.0)
    after = f"; files of others are seen after {duration(late)}" if late >= 0.1 else ""
    return ok(f"{found}, seen by all {len(nodes)} nodes{after}")


def unshared(blind: Mapping[int, set[int]], nodes: Sequence[int]) -> list[int]:
    """The nodes that do not see most others, and that most others do not see; none of two.

    blind: node -> nodes whose files it does not see.
    """
    if len(nodes) < 3:
        return []
    half = (len(nodes) - 1) / 2
    return [
        node
        for node in nodes
        if len(blind.get(node, set())) > half
        and sum(node in missed for other, missed in blind.items() if other != node) > half
    ]


def _misread(row: Row, names: Names) -> str:
    read, reader = row["read"], names.rank(row["rank"])
    if read["error"]:
        return f"{reader} cannot read the file of {names.rank(read['rank'])}: {read['error']}"
    return f"{reader} reads other bytes than {names.rank(read['rank'])} wrote"


def _save(rows: Rows, names: Names) -> Verdict:
    """Whether all could write, and which node is slow."""
    failed = [f"{names.rank(row['rank'])}: {row['error']}" for row in rows if row["error"] is not None]
    if failed:
        hint = "free disk space or fix the permissions there, or set another folder"
        return fail("a rank cannot save", "; ".join(failed), hint)
    total, longest = sum(row["bytes"] for row in rows), max(row["seconds"] for row in rows)
    ranks = f" by {len(rows)} ranks" if len(rows) > 1 else ""
    found = f"{amount(total)}{ranks} in {duration(longest)}, {rate(total / longest)}"
    rates = _write_rates(rows, names)
    if len(rates) > 1:
        slowest = sorted(rates.items(), key=lambda pair: pair[1])[:4]
        found += "; " + ", ".join(f"{names.node(node)} {rate(speed)}" for node, speed in slowest)
    if slow := slow_writers(rates, SLOW_WRITER):
        message = "; ".join(
            f"{names.node(one.ends[0])} writes {rate(one.value)}, the median is {rate(one.normal)}"
            for one in slow
        )
        return fail(found, message, "check its mount of the run directory, its network to the file server")
    return ok(found)


def _write_rates(rows: Rows, names: Names) -> dict[int, float]:
    """Node -> bytes per second of all its ranks together, if they wrote enough to show it."""
    own: dict[int, list[Row]] = {}
    for row in rows:
        own.setdefault(names.node_of(row["rank"]), []).append(row)
    totals = {node: sum(row["bytes"] for row in of_node) for node, of_node in own.items()}
    return {
        node: total / max(row["seconds"] for row in own[node])
        for node, total in totals.items()
        if total >= LEAST_BYTES
    }


def _stop(rows: Rows, planned: Planned) -> Verdict | None:
    """The time of a checkpoint, which its slowest rank determines, compared with the plan's."""
    times = [
        max(row["seconds"], row["full_bytes"] * row["seconds"] / row["bytes"])
        + row["full_bytes"] * row["hash_s"]
        for row in _good(rows)
        if row["full_bytes"]
    ]
    if not times:
        return None
    seconds, wanted = max(times), planned.stop_seconds
    full = sum(row["full_bytes"] for row in rows)
    found = f"{amount(full)}, about {duration(seconds)} at this speed"
    if wanted is None:
        return ok(found)
    if seconds <= wanted:
        return ok(f"{found}; the plan counts {wanted:g} s for a stop")
    more = ceil(seconds) + 60
    hint = (
        f"launch.env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {more} if a scheduler signals all processes; it should "
        f"signal {more} s before the end"
    )
    return warn(found, f"the plan counts {wanted:g} s for a stop, which is a step and a checkpoint", hint)


def amount(size: float) -> str:
    """Bytes in powers of ten, as networks and disks are specified."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size:.0f} B"


def rate(value: float) -> str:
    return f"{amount(value)}/s"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
