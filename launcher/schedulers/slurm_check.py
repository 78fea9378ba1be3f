"""What Slurm would reject or never start, as problems of recipe keys with the values that the cluster has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import MachineError, Problem
from launcher.recipe.schema import SlurmJob
from launcher.schedulers.queue import Submission
from launcher.schedulers.slurm_allocation import time_seconds
from launcher.schedulers.slurm_commands import Partition, read_partitions, test_only
from launcher.schedulers.slurm_script import PREPARE, count_of, cpus_of_task

_OPTION_OF = {
    "invalid partition": "partition", "invalid account": "account", "invalid qos": "qos",
    "invalid feature": "constraint", "reservation is invalid": "reservation",
    "invalid node name": "nodelist", "generic resource": "devices", "--mail-type": "options.mail-type",
    "time limit": "time", "node configuration": "size", "option '--": "options",
}  # fmt: skip
"""Part of Slurm's error -> the option that it is about; in this order."""


def check_scripts(job: Submission, files: Mapping[str, str]) -> tuple[list[Problem], list[str]]:
    """Problems of the scripts, and what Slurm answers about their start. MachineError without an answer."""
    partitions = read_partitions()
    if not partitions:
        message = "Slurm gives no answer: `sinfo` shows no partition"
        raise MachineError(Problem("slurm-no-answer", message, hint="try again; --dry-run shows the scripts"))
    problems: list[Problem] = []
    answers: list[str] = []
    for name, script in files.items():
        asked = _Asked(job, partitions, is_prepare=name == PREPARE)
        found = list(asked.over_limits())
        if not found:
            answer = test_only(script)
            if answer.code == 0:
                answers.append(f"{name}: {answer.text}")
            else:
                found = [asked.rejection(answer.text)]
        problems += found
    return list(dict.fromkeys(problems)), answers


@dataclass(frozen=True, slots=True)
class _Asked:
    """One script: the options that the recipe asks for, and what the partitions offer."""

    job: Submission
    partitions: Sequence[Partition]
    is_prepare: bool

    @property
    def options(self) -> SlurmJob:
        slurm = self.job.launch.slurm
        return slurm.prepare if self.is_prepare and slurm.prepare is not False else slurm

    def key(self, name: str) -> str:
        """The recipe key of an option: the prepare job inherits those that it does not set."""
        own = self.is_prepare and getattr(self.options, name.partition(".")[0], None)
        return f"launch.slurm.{'prepare.' if own else ''}{name}"

    def value(self, name: str) -> str:
        if name.startswith("options."):
            return str(self.options.options.get(name.removeprefix("options."), ""))
        found = getattr(self.options, name, None) or getattr(self.job.launch.slurm, name, None)
        return "" if found is None else str(found)

    def over_limits(self) -> Iterator[Problem]:
        """Problems of a job that Slurm would accept and never start: more time or nodes than there are."""
        name, there = self.value("partition"), self.partitions
        chosen = [p for p in there if (p.name in name.split(",") if name else p.is_default)]
        if name and not chosen:
            message = f"is {name}, and this cluster has no such partition"
            yield Problem("slurm-partition", message, path=self.key("partition"), hint=self._sizes())
        time, nodes = self.value("time"), self.job.node_counts[0]
        wanted = time_seconds(time) if time else None
        if chosen and wanted and all(p.limit_s is not None and p.limit_s < wanted for p in chosen):
            longer = [p.name for p in there if p.limit_s is None or p.limit_s >= wanted]
            most = f"{(chosen[0].limit_s or 0) / 60:g} minutes"
            message = f"is {time}, and the partition {chosen[0].name} gives at most {most}"
            hint = f"there is more in: {', '.join(longer)}" if longer else "ask for less"
            yield Problem("slurm-time", message, path=self.key("time"), hint=hint)
        if chosen and not self.is_prepare and all(partition.nodes < nodes for partition in chosen):
            has = f"the partition {chosen[0].name} has {chosen[0].nodes}"
            larger = ", ".join(p.name for p in there if p.nodes >= nodes)
            hint = f"large enough: {larger or 'no partition here'}"
            message = f"the plan needs {nodes} nodes, and {has}"
            yield Problem("slurm-nodes", message, path="hardware.num_nodes", hint=hint)

    def rejection(self, said: str) -> Problem:
        """Slurm's rejection as a problem of the recipe key that it is about."""
        of = next((name for words, name in _OPTION_OF.items() if words in said.lower()), "")
        if of == "nodelist" and self.options.nodelist is None:
            of = "exclude"
        if of == "size":
            of = self._too_large()
        if of == "devices":
            slurm, count = self.job.launch.slurm, self.job.hardware.devices_per_node
            key = next((k for k in ("gres", "gpus_per_node") if getattr(slurm, k) is not None), None)
            path = f"launch.slurm.{key}" if key else "hardware"
            message = f"the plan needs {count} device(s) per node, and no node here has them (Slurm: {said})"
            return Problem("slurm-devices", message, path=path, hint=self._sizes())
        value = "" if of in ("", "options") else self.value(of)
        message = f"{f'is {value}: ' if value else ''}Slurm rejects the job: {said}"
        path = self.key(of) if of else f"launch.slurm{'.prepare' if self.is_prepare else ''}"
        return Problem("slurm-refused", message, path=path, hint=self._sizes())

    def _too_large(self) -> str:
        """The option that asks for more than the largest node has; empty if none does."""
        there, hardware = self.partitions, self.job.hardware
        cpus = (
            self.options.cpus_per_task if self.is_prepare else cpus_of_task(self.job.launch.slurm, hardware)
        )
        if cpus and cpus > max(p.largest_cpus for p in there):
            return "cpus_per_task"
        if self.options.mem and _mib(str(self.options.mem)) > max(p.largest_mib for p in there):
            return "mem"
        counts = [count_of(gres) for p in there for gres in p.gres if gres.startswith("gpu")]
        needs = 0 if self.is_prepare or hardware.is_cpu else hardware.devices_per_node
        return "devices" if needs > max(counts, default=0) else ""

    def _sizes(self) -> str:
        """The partitions with the size of their largest node."""
        return "there is " + "; ".join(
            f"{p.name}: {p.nodes} node(s) with up to {p.largest_cpus} CPUs and {p.largest_mib} MiB"
            + "".join(f", {has}" for has in sorted({*p.gres, *p.features}))
            for p in self.partitions
        )


def _mib(text: str) -> float:
    """MiB of 64G."""
    return int(text[:-1]) * {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}.get(text[-1], 0.0)
