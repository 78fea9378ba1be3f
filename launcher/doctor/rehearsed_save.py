"""What the save of a rehearsal showed: is the run directory one for all, who writes slowly, how long a
checkpoint takes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.doctor.rehearsed_links import slow_writers
from launcher.doctor.units import amount, duration, rate
from launcher.knowledge.doctor.check import Verdict, fail, ok, skip, warn

SLOW_WRITER = 1 / 3
"""Of the others' median: clients of one file server share it, never evenly. A third is another mount, another
disk, or a network of its own that is slow."""
LEAST_BYTES = 64 * 2**20
"""Less shows how long a disk takes to say yes, and nothing of its speed."""


class Saving:
    """The rows of the ranks, by machine."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        machine_of: Callable[[int], int],
        name: Callable[[int], str],
        stop_seconds: float | None,
    ) -> None:
        """machine_of: rank -> first rank of its machine. name: of a machine, by any of its ranks."""
        self.rows, self.machine_of, self.name, self.stop_seconds = rows, machine_of, name, stop_seconds

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["error"] is not None]

    @property
    def written(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["error"] is None]

    @property
    def machines(self) -> list[int]:
        return list(dict.fromkeys(self.machine_of(row["rank"]) for row in self.rows))

    def rates(self) -> dict[int, float]:
        """Machine -> bytes a second of all its ranks together, where they wrote enough to show it."""
        found = {}
        for machine in self.machines:
            own = [row for row in self.written if self.machine_of(row["rank"]) == machine]
            total = sum(row["bytes"] for row in own)
            if total >= LEAST_BYTES:
                found[machine] = total / max(row["seconds"] for row in own)
        return found

    def checkpoint_seconds(self) -> float | None:
        """A checkpoint of the run: the rank that takes longest to write and to hash its share."""
        times = [
            max(row["seconds"], row["full_bytes"] * row["seconds"] / row["bytes"])
            + row["full_bytes"] * row["hash_s"]
            for row in self.written
            if row["full_bytes"]
        ]
        return max(times, default=None)

    def blind(self) -> dict[int, set[int]]:
        """Machine -> machines whose files it does not see; those alone that miss any."""
        found: dict[int, set[int]] = {}
        for row in self.written:
            for other in row["unseen"]:
                found.setdefault(self.machine_of(row["rank"]), set()).add(self.machine_of(other))
        return found


def judge_shared(saving: Saving, filesystems: Mapping[int, str]) -> Verdict:
    """Whether every machine sees what the others write.

    filesystems: machine -> where its run directory lies.
    """
    machines = saving.machines
    kinds = dict.fromkeys(filesystems.values())
    found = "; ".join(kinds)
    if len(machines) < 2:
        return skip(found, "one machine: nothing is shared")
    blind = saving.blind()
    if blind:
        alone = unshared(blind, machines)
        told = [f"node {saving.name(machine)}: {filesystems.get(machine, 'unknown')}" for machine in machines]
        if alone:
            names = ", ".join(f"node {saving.name(machine)}" for machine in alone)
            message = f"{names} does not share the run directory with the others ({'; '.join(told)})"
        else:
            message = f"the machines do not see one another's files in the run directory ({'; '.join(told)})"
        hint = "put the run directory (--output-dir) on a filesystem that is mounted on every machine"
        return fail(found, message, hint)
    wrong = [row for row in saving.written if row["read"] is not None and not row["read"]["right"]]
    if wrong:
        message = "; ".join(_misread(row, saving) for row in wrong)
        return fail(found, message, "the filesystem shows old or torn data: look at its mount options")
    late = max((row["seen_after_s"] for row in saving.written), default=0.0)
    after = f"; files of others are seen after {duration(late)}" if late >= 0.1 else ""
    return ok(f"{found}, seen by all {len(machines)} machines{after}")


def unshared(blind: Mapping[int, set[int]], machines: Sequence[int]) -> list[int]:
    """The machines that see nothing of most others, and that these do not see: with two, neither is known to
    be the wrong one."""
    if len(machines) < 3:
        return []
    half = (len(machines) - 1) / 2
    return [
        machine
        for machine in machines
        if len(blind.get(machine, set())) > half
        and sum(machine in missed for other, missed in blind.items() if other != machine) > half
    ]


def _misread(row: Mapping[str, Any], saving: Saving) -> str:
    read = row["read"]
    writer = f"what rank {read['rank']} on {saving.name(read['rank'])} wrote"
    reader = f"rank {row['rank']} on {saving.name(row['rank'])}"
    if read["error"]:
        return f"{reader} cannot read {writer}: {read['error']}"
    return f"{reader} reads other bytes than {writer}"


def judge_save(saving: Saving) -> Verdict:
    """Whether all could write, and who is slow."""
    if saving.failed:
        message = "; ".join(
            f"rank {row['rank']} on {saving.name(row['rank'])}: {row['error']}" for row in saving.failed
        )
        return fail(
            "a rank cannot save", message, "make room or set the rights there, or name another folder"
        )
    rates = saving.rates()
    total = sum(row["bytes"] for row in saving.written)
    longest = max(row["seconds"] for row in saving.written)
    found = f"{amount(total)} by {len(saving.written)} ranks in {duration(longest)}, {rate(total / longest)}"
    if len(saving.written) == 1:
        found = f"{amount(total)} in {duration(longest)}, {rate(total / longest)}"
    if len(rates) > 1:
        found += "; " + ", ".join(f"{saving.name(m)} {rate(speed)}" for m, speed in _shown(rates))
    slow = slow_writers(rates, SLOW_WRITER)
    if slow:
        message = "; ".join(
            f"node {saving.name(one.ends[0])} writes {rate(one.value)} where the median is {rate(one.normal)}"
            for one in slow
        )
        return fail(found, message, "its mount of the run directory, its network to the file server")
    return ok(found)


def _shown(rates: Mapping[int, float]) -> list[tuple[int, float]]:
    """The four slowest machines."""
    return sorted(rates.items(), key=lambda pair: pair[1])[:4]


def judge_stop(saving: Saving) -> Verdict | None:
    """A checkpoint's time beside what the plan counts with."""
    seconds = saving.checkpoint_seconds()
    if seconds is None:
        return None
    full = sum(row["full_bytes"] for row in saving.rows)
    found = f"{amount(full)}, about {duration(seconds)} at this speed"
    planned = saving.stop_seconds
    if planned is None:
        return ok(found)
    if seconds > planned:
        whole = -int(-seconds // 1)
        message = f"the plan counts {planned:g} s for a stop, which is a step and a checkpoint"
        hint = (
            f"launch.env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {whole + 60} where a scheduler signals all "
            f"processes, and let it signal {whole + 60} s before the end"
        )
        return warn(found, message, hint)
    return ok(f"{found}; the plan counts {planned:g} s for a stop")
