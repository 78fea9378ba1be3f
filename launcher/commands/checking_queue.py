"""Whether this Slurm would take a recipe's jobs: asked before anything is written or queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import MachineError, Problem
from launcher.facts.queue import Partition, read_partitions, test_only
from launcher.facts.slurm import time_seconds
from launcher.plan.draft import Draft
from launcher.recipe.loading import LoadedRecipe
from launcher.recipe.schema import SlurmJob
from launcher.render.slurm import Submission, count_of, cpus_of_task

# What Slurm says -> (key of the recipe, what is wrong)
_SAID = {
    "invalid partition": ("partition", "names no partition of this Slurm"),
    "Invalid account": ("account", "is not valid here"),
    "Invalid qos": ("qos", "is not valid here"),
    "Invalid feature": ("constraint", "names a feature that no node has"),
    "reservation is invalid": ("reservation", "names no reservation of this Slurm"),
    "Invalid node name": ("nodelist", "names a node that this Slurm has not"),
    "generic resource": ("gpus_per_node", "asks for devices that no node of this Slurm has"),
    "--mail-type": ("options.mail-type", "is not a kind of mail"),
    "time limit": ("time", "is not what the partition takes"),
}


def check_queue(
    loaded: LoadedRecipe, job: Submission, scripts: Sequence[tuple[str, str]]
) -> tuple[list[Problem], list[str]]:
    """Problems of the jobs, each with its line of the recipe; and what Slurm says of their start.

    scripts: (name, text); the name of the prepare job begins with it. MachineError where Slurm is silent.
    """
    partitions = read_partitions()
    if not partitions:
        message = "the Slurm of this machine gives no answer: `sinfo` shows no partition"
        raise MachineError(Problem("slurm-no-answer", message, hint="try again; --dry-run shows the scripts"))
    problems: list[Problem] = []
    said: list[str] = []
    for name, script in scripts:
        is_prepare = name.startswith("prepare")
        asked: SlurmJob = job.slurm
        if is_prepare and job.slurm.prepare is not False:
            asked = job.slurm.prepare
        found = [*_check_partition(asked, job, partitions, is_prepare=is_prepare)]
        if not found:
            answer = test_only(script)
            if answer.code != 0:
                found = [_problem(answer.said, asked, job, partitions, is_prepare=is_prepare)]
            else:
                said.append(f"{name}: {answer.said}")
        problems += [placed(problem, loaded) for problem in found]
    return list(dict.fromkeys(problems)), said


def _check_partition(
    asked: SlurmJob, job: Submission, partitions: Sequence[Partition], *, is_prepare: bool
) -> list[Problem]:
    """What Slurm would take into the queue, and never start: it lets a job wait for more time or nodes."""
    name = asked.partition or job.slurm.partition
    prefix = "launch.slurm.prepare" if is_prepare and asked.partition else "launch.slurm"
    here = ", ".join(partition.name for partition in partitions)
    chosen = [p for p in partitions if p.name in name.split(",")] if name else []
    if name and not chosen:
        message = f"is {name}, and this Slurm has no such partition"
        return [Problem("slurm-partition", message, path=f"{prefix}.partition", hint=f"there are: {here}")]
    chosen = chosen or [partition for partition in partitions if partition.is_default]
    problems = []
    time = asked.time if asked.time is not None else job.slurm.time
    wanted = None if time is None else time_seconds(str(time))
    limits = [partition.limit_s for partition in chosen]
    if chosen and wanted and all(limit is not None and limit < wanted for limit in limits):
        longer = [p for p in partitions if p.limit_s is None or p.limit_s >= wanted]
        message = f"is {time}, and the partition {chosen[0].name} gives at most {_minutes(limits[0])}"
        hint = f"there is more in: {', '.join(p.name for p in longer)}" if longer else "ask for less"
        problems.append(Problem("slurm-time", message, path=_key("time", asked, is_prepare), hint=hint))
    nodes = job.hardware.num_nodes
    if chosen and not is_prepare and all(partition.nodes < nodes for partition in chosen):
        message = f"the plan is for {nodes} nodes, and the partition {chosen[0].name} has {chosen[0].nodes}"
        larger = [p.name for p in partitions if p.nodes >= nodes]
        hint = f"large enough: {', '.join(larger)}" if larger else "no partition here has as many"
        problems.append(Problem("slurm-nodes", message, path="hardware.num_nodes", hint=hint))
    return problems


def _key(key: str, asked: SlurmJob, is_prepare: bool) -> str:
    own = is_prepare and getattr(asked, key, None) is not None
    return f"launch.slurm.prepare.{key}" if own else f"launch.slurm.{key}"


def _minutes(seconds: float | None) -> str:
    return "as long as it likes" if seconds is None else f"{seconds / 60:g} minutes"


def _problem(
    said: str, asked: SlurmJob, job: Submission, partitions: Sequence[Partition], *, is_prepare: bool
) -> Problem:
    """Slurm's refusal in words, with the key that it is about and what there is instead."""
    for words, (key, what) in _SAID.items():
        if words.lower() not in said.lower():
            continue
        if key == "nodelist" and asked.nodelist is None:
            key = "exclude"
        if key == "gpus_per_node":
            return _no_such_device(said, job, partitions)
        value = _value(key, asked, job)
        message = f"{'is ' + value + ', which ' if value else ''}{what} (Slurm: {said})"
        return Problem(
            "slurm-refused", message, path=_key(key, asked, is_prepare), hint=_there_is(key, partitions)
        )
    cpus = max(partition.largest_cpus for partition in partitions)
    memory = max(partition.largest_mib for partition in partitions)
    sizes = "; ".join(
        f"{p.name}: {p.nodes} node(s) with up to {p.largest_cpus} CPUs and {p.largest_mib} MiB"
        + (f", {', '.join(sorted(set(p.gres)))}" if p.gres else "")
        for p in partitions
    )
    path = "launch.slurm.prepare" if is_prepare else "launch.slurm"
    wanted = asked.cpus_per_task if is_prepare else cpus_of_task(job.slurm, job.hardware)
    if "node configuration" in said and wanted is not None and wanted > cpus:
        message = f"{wanted} CPUs of a node are asked for, and no node has more than {cpus} (Slurm: {said})"
        return Problem("slurm-refused", message, path=f"{path}.cpus_per_task", hint=f"there is {sizes}")
    if "node configuration" in said and asked.mem and _mib(str(asked.mem)) > memory:
        message = f"{asked.mem} of a node are asked for, and none has more than {memory} MiB (Slurm: {said})"
        return Problem("slurm-refused", message, path=f"{path}.mem", hint=f"there is {sizes}")
    if "node configuration" in said and not is_prepare and _too_few_devices(job, partitions):
        return _no_such_device(said, job, partitions)
    if "option '--" in said:
        hint = "`man sbatch` lists the options of this Slurm"
        return Problem("slurm-refused", said, path=f"{path}.options", hint=hint)
    what = "the prepare job" if is_prepare else f"a job for {job.hardware.label}"
    message = f"Slurm would not take {what}: {said}"
    return Problem("slurm-refused", message, path=path, hint=f"there is {sizes}")


def _mib(text: str) -> float:
    """MiB of 64G."""
    return int(text[:-1]) * {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}.get(text[-1], 0.0)


def _too_few_devices(job: Submission, partitions: Sequence[Partition]) -> bool:
    counts = [count_of(name) for p in partitions for name in p.gres if name.startswith("gpu")]
    return not job.hardware.is_cpu and max(counts, default=0) < job.hardware.devices_per_node


def _no_such_device(said: str, job: Submission, partitions: Sequence[Partition]) -> Problem:
    there = sorted({f"{name} in {p.name}" for p in partitions for name in p.gres})
    key = next((k for k in ("gres", "gpus_per_node") if getattr(job.slurm, k) is not None), None)
    path = f"launch.slurm.{key}" if key else "hardware"
    count = job.hardware.devices_per_node
    message = f"no node of this Slurm has the {count} device(s) that the plan needs (Slurm: {said})"
    hint = f"there is {', '.join(there)}" if there else "this Slurm knows no devices at all"
    return Problem("slurm-devices", message, path=path, hint=hint)


def _value(key: str, asked: SlurmJob, job: Submission) -> str:
    if key.startswith("options."):
        return str(asked.options.get(key.removeprefix("options."), ""))
    value = getattr(asked, key)
    return "" if value is None and (value := getattr(job.slurm, key, None)) is None else str(value)


def _there_is(key: str, partitions: Sequence[Partition]) -> str | None:
    if key == "partition":
        return f"there are: {', '.join(partition.name for partition in partitions)}"
    if key == "constraint":
        there = sorted({feature for partition in partitions for feature in partition.features})
        return f"there are: {', '.join(there)}" if there else "no node has any feature"
    commands = {"reservation": "scontrol show reservation", "nodelist": "sinfo -N", "exclude": "sinfo -N"}
    return f"`{commands[key]}` lists them" if key in commands else None


def placed(problem: Problem, loaded: LoadedRecipe) -> Problem:
    """The problem with the line of its key, or of the nearest thing around it."""
    draft = Draft(loaded.origins)
    path = problem.path or ""
    while path and draft.origin(path) is None:
        path = path.rpartition(".")[0]
    file, line = draft.place(path) if path else (None, None)
    return replace(problem, file=file or str(loaded.path), line=line)
