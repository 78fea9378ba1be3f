"""What a rehearsal measured, as verdicts in the form of the other checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.doctor.rehearsed_links import ABSURD_BYTES_PER_S, Slow, slow_devices, slow_links, stragglers
from launcher.doctor.rehearsed_save import Saving, judge_save, judge_shared, judge_stop
from launcher.doctor.units import amount, duration, flops, rate
from launcher.errors import Problem
from launcher.facts.interfaces import LOOPBACK, UNKNOWN
from launcher.knowledge.doctor.check import Finding, Verdict, fail, ok, skip, warn

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
"""Every check of a rehearsal, in the order in which they are shown."""
IDS = tuple(TITLES)


@dataclass(frozen=True, slots=True)
class Planned:
    """What of the plan a rehearsal is judged against."""

    launcher: str
    ranks: int
    on_cpu: bool
    gradient_bytes: int
    stop_seconds: float | None
    """runtime.stop_seconds."""


def judge(measured: Mapping[str, Any], planned: Planned, problems: Sequence[Problem] = ()) -> list[Finding]:
    """Every verdict that what was measured allows. problems: why the rehearsal did not come to its end."""
    who = Who(measured.get("ranks", []))
    saving = Saving(measured.get("save", []), who.machine_of, who.machine_name, planned.stop_seconds)
    verdicts: dict[str, Verdict | None] = {"rehearsal-start": _start(measured, planned, problems)}
    if who.ranks:
        verdicts["rehearsal-ranks"] = _ranks(who, measured)
    if who.ranks and planned.ranks > 1:
        met = measured.get("joined_s") is not None
        verdicts["rehearsal-interfaces"] = _interfaces(who, str(measured.get("backend")), met=met)
    if planned.ranks == 1:
        alone = "one process: nothing passes between ranks, and only its device and its save are measured"
        verdicts["rehearsal-all-reduce"] = skip("not measured", alone)
    if measured.get("all_reduce"):
        verdicts["rehearsal-all-reduce"] = _all_reduce(measured["all_reduce"], who, planned)
    if measured.get("links"):
        verdicts["rehearsal-links"] = _links(measured["links"], who, planned)
    if measured.get("devices"):
        verdicts["rehearsal-devices"] = _devices(measured["devices"], who)
    if measured.get("waiting"):
        verdicts["rehearsal-waiting"] = _waiting(measured["waiting"], who, planned)
    if saving.rows:
        verdicts["rehearsal-shared"] = judge_shared(saving, who.filesystems)
        verdicts["rehearsal-save"] = judge_save(saving)
        verdicts["rehearsal-stop"] = judge_stop(saving)
    return [Finding(name, title, found) for name, title in TITLES.items() if (found := verdicts.get(name))]


class Who:
    """The ranks by number, and what they are called."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.ranks = {int(facts["rank"]): facts for facts in ranks}
        places = {(facts["node"], facts["host"]) for facts in ranks}
        self.several = len(places) > 1
        self._alike = len({host for _, host in places}) < len(places)
        """Whether two machines have one name, so that only their numbers tell them apart."""

    @property
    def firsts(self) -> list[int]:
        """The first rank of every machine."""
        found: dict[tuple[int, str], int] = {}
        for number, facts in self.ranks.items():
            found.setdefault((facts["node"], facts["host"]), number)
        return list(found.values())

    @property
    def filesystems(self) -> dict[int, str]:
        """First rank of a machine -> where it sees the run directory."""
        return {number: str(self.ranks[number]["filesystem"]) for number in self.firsts}

    def machine_of(self, rank: int) -> int:
        """The first rank of this rank's machine."""
        facts = self.ranks[rank]
        mine = (facts["node"], facts["host"])
        return next(n for n in self.firsts if (self.ranks[n]["node"], self.ranks[n]["host"]) == mine)

    def host(self, rank: int) -> str:
        facts = self.ranks.get(rank)
        if facts is None:
            return f"the machine of rank {rank}"
        return f"{facts['host']} [node {facts['node']}]" if self._alike else str(facts["host"])

    def machine_name(self, rank: int) -> str:
        """`gpu07 (eth0)`."""
        facts = self.ranks.get(rank)
        return self.host(rank) if facts is None else f"{self.host(rank)} ({facts['interface']})"

    def rank_name(self, rank: int, device: str = "") -> str:
        return f"rank {rank} on {self.host(rank)}" + (f" ({device})" if device else "")

    def end_name(self, rank: int) -> str:
        """An end of a link: a machine, or a rank where there is one machine."""
        return f"node {self.machine_name(rank)}" if self.several else self.rank_name(rank)


def _start(measured: Mapping[str, Any], planned: Planned, problems: Sequence[Problem]) -> Verdict:
    count = f"{planned.ranks} rank{'s' if planned.ranks > 1 else ''} by {planned.launcher}"
    if problems:
        message = "; ".join(problem.message for problem in problems)
        hint = "; ".join(dict.fromkeys(problem.hint for problem in problems if problem.hint))
        return fail(count, message, hint)
    met, joined = measured.get("met_s"), measured.get("joined_s")
    if met is None or joined is None:
        return ok(count)
    return ok(f"{count}, together after {met:.1f} s, joined after {joined:.1f} s")


def _ranks(who: Who, measured: Mapping[str, Any]) -> Verdict:
    per_machine: dict[int, int] = {}
    for number in who.ranks:
        per_machine[who.machine_of(number)] = per_machine.get(who.machine_of(number), 0) + 1
    hosts = ", ".join(f"{count} on {who.host(first)}" for first, count in per_machine.items())
    backend = measured.get("backend")
    found = hosts + (f", {backend}" if backend else "")
    differing = _differing({first: who.ranks[first]["versions"] for first in per_machine}, who)
    if differing:
        hint = "install the same versions on all machines; one environment on a shared disk is the surest"
        return fail(found, f"the machines differ: {'; '.join(differing)}", hint)
    return ok(found)


def _differing(versions: Mapping[int, Mapping[str, str]], who: Who) -> list[str]:
    """`torch 2.13.0 on a, 2.12.1 on b`, for every package that is not the same everywhere."""
    told = []
    for package in sorted({name for found in versions.values() for name in found}):
        by_version: dict[str, list[str]] = {}
        for first, found in versions.items():
            by_version.setdefault(found.get(package, "absent"), []).append(who.host(first))
        if len(by_version) > 1:
            parts = [f"{version} on {_some(hosts)}" for version, hosts in by_version.items()]
            told.append(f"{package} {', '.join(parts)}")
    return told


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} machines ({names[0]}, …)"


def _interfaces(who: Who, backend: str, *, met: bool) -> Verdict:
    """met: whether the ranks joined, so that a loopback is none: nodes that are one machine after all."""
    by_name: dict[str, list[int]] = {}
    for first in who.firsts:
        by_name.setdefault(who.ranks[first]["interface"], []).append(first)
    found = ", ".join(
        f"{name} on {_some([who.host(first) for first in firsts])}" for name, firsts in by_name.items()
    )
    if not who.several:
        by = who.ranks[who.firsts[0]]["interface_by"]
        return ok(f"{found} ({by})")
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    inward = [*by_name.get(LOOPBACK, []), *by_name.get(UNKNOWN, [])]
    if inward and not met:
        names = _some([who.host(first) for first in inward])
        message = (
            f"{names}: {who.ranks[inward[0]]['interface_by']} leads to no network, and the others cannot"
        )
        return fail(
            found, f"{message} reach it there", f"set {variable} to the interface between the machines"
        )
    without = [first for first in who.firsts if not who.ranks[first]["infiniband"]]
    if without and len(without) < len(who.firsts):
        names = _some([who.host(first) for first in without])
        return fail(found, f"{names}: no active InfiniBand or RoCE port, where the other machines have one",
                    "`ibstat` there; NCCL falls back to sockets for all")  # fmt: skip
    return ok(found)


def _all_reduce(rows: Sequence[Mapping[str, Any]], who: Who, planned: Planned) -> Verdict:
    largest = rows[-1]
    found = "; ".join(f"{amount(row['bytes'])} in {duration(row['median_s'])}" for row in rows)
    found += f"; {rate(largest['bus_bytes_per_s'])} bus bandwidth"
    wrong = [amount(row["bytes"]) for row in rows if not row["right"]]
    if wrong:
        message = f"the sum over all ranks is wrong for {', '.join(wrong)}: memory or a link changes data"
        return fail(found, message, "run it with half of the machines, then a quarter, until one is left")
    step = planned.gradient_bytes * largest["median_s"] / largest["bytes"]
    message = f"the gradients of a step ({amount(planned.gradient_bytes)}) take about {duration(step)}"
    if not planned.gradient_bytes:
        message = "the run has one copy of the model, which reduces no gradients"
    if who.several and largest["bus_bytes_per_s"] < ABSURD_BYTES_PER_S:
        return fail(
            found, f"{message}: slower than a line of 0.1 Gbit/s", "the line of links names the place"
        )
    cut = [row for row in rows if row["bytes"] < row["asked_bytes"]]
    if cut:
        message += f"; too few messages of {amount(cut[-1]['asked_bytes'])} would fit into the time"
    return ok(found, message)


def _links(rows: Sequence[Mapping[str, Any]], who: Who, planned: Planned) -> Verdict:
    rates = sorted(row["bytes_per_s"] for row in rows)
    latency = min(row["latency_s"] for row in rows)
    kind = "between machines" if who.several else "between ranks"
    spread = rate(rates[0]) if len(rates) == 1 else f"{rate(rates[0])} to {rate(rates[-1])}"
    found = f"{spread} {kind}, {duration(latency)} latency"
    if planned.on_cpu and not who.several:
        return ok(found, "copies within one memory: numbers, and nothing to judge")
    slow = slow_links(rows, absurd=who.several)
    if not slow:
        lone = len(rates) == 2 and who.several
        return ok(found, "two machines: no third to compare them with" if lone else "")
    message = "; ".join(_slow_link(one, who) for one in slow)
    names = ", ".join(dict.fromkeys(who.end_name(end) for one in slow for end in one.ends))
    hint = (
        f"look at {names}: the port's speed and errors (`ethtool`, `ip -s link`), its cable, who else uses it"
    )
    return fail(found, message, hint) if any(one.bad for one in slow) else warn(found, message, hint)


def _slow_link(slow: Slow, who: Who) -> str:
    if slow.what in ("sends", "receives"):
        told = f"{who.end_name(slow.ends[0])} {slow.what} {rate(slow.value)}"
        return f"{told} where the median is {rate(slow.normal)}"
    if slow.what == "late":
        told = f"{who.end_name(slow.ends[0])} answers after {duration(slow.value)}"
        return f"{told} where the median is {duration(slow.normal)}"
    way = f"from {who.end_name(slow.ends[0])} to {who.end_name(slow.ends[1])}: {rate(slow.value)}"
    if slow.what == "link":
        return f"{way}, where both have {rate(slow.normal)} with others"
    if slow.what == "one-way":
        return f"{way}, where the way back has {rate(slow.normal)}"
    return f"{way}, less than a line of 0.1 Gbit/s carries"


def _devices(rows: Sequence[Mapping[str, Any]], who: Who) -> Verdict:
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(row["name"], []).append(row["flops"])
    found = "; ".join(
        f"{len(speeds)}x {name}: {flops(min(speeds))} to {flops(max(speeds))}"
        for name, speeds in kinds.items()
    )
    slow = slow_devices(rows)
    if slow:
        devices = {row["rank"]: f"{row['device']}, {row['name']}" for row in rows}
        message = "; ".join(
            f"{who.rank_name(one.ends[0], devices[one.ends[0]])} computes {flops(one.value)} where the "
            f"median is {flops(one.normal)}"
            for one in slow
        )
        if any(one.bad for one in slow):
            return fail(
                found, message, "`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE` there; who else uses it"
            )
        return warn(found, message, "who else uses that machine's cores?")
    if len(kinds) > 1:
        return warn(found, "the devices differ: the slower ones set the pace of all")
    return ok(found)


def _waiting(rows: Sequence[Mapping[str, Any]], who: Who, planned: Planned) -> Verdict:
    most = max(rows, key=lambda row: row["wait_s"])
    found = f"at most {duration(most['wait_s'])} in a step of {duration(most['work_s'] + most['wait_s'])}"
    last = stragglers(rows, on_cpu=planned.on_cpu)
    if not last:
        return ok(found)
    message = "; ".join(
        f"{who.rank_name(one.ends[0])} comes last in nearly every step: the others wait {one.value:.0%} of it"
        for one in last
    )
    hint = "who else uses that machine; the line of devices compares them alone"
    return fail(found, message, hint) if any(one.bad for one in last) else warn(found, message, hint)
