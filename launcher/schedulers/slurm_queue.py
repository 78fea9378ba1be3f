"""Ask Slurm about partitions, nodes and jobs, submit scripts, and explain its answers.

Every question is one short process.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.recipe.schema import SlurmJob
from launcher.schedulers.scheduler import Submission
from launcher.schedulers.slurm_allocation import time_seconds
from launcher.schedulers.slurm_script import count_of, cpus_of_task

_ANSWER_S = 60.0
"""A busy controller takes seconds; more counts as no answer."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT")
"""SLURM_* variables that belong to the cluster and not to a job."""
_UNKNOWN = "invalid job id"
"""The controller's error for an unknown job; other errors do not concern the job."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a Slurm command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Its error message, on one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition, as far as it limits a job."""

    name: str
    is_default: bool
    limit_s: float | None
    """Longest time of a job; None: no limit."""
    nodes: int
    largest_cpus: int
    largest_mib: int
    features: tuple[str, ...] = ()
    gres: tuple[str, ...] = ()
    """Devices of a node, as Slurm writes them: gpu:a100:8."""


ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL",
    "REVOKED", "PREEMPTED",
)  # fmt: skip
"""States of a job that has ended; those of PASSING may change once more."""
PASSING = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED")
"""Also shown for a moment for a job that is being requeued."""


_WAITS = {
    "Resources": "waits for free nodes",
    "Priority": "waits for jobs of higher priority",
    "Dependency": "waits for the job that prepares the data",
    "BeginTime": "waits; Slurm starts a requeued job after two minutes",
    "JobHeldUser": "is held: `scontrol release` releases it",
    "JobHeldAdmin": "is held by an administrator",
    "JobArrayTaskLimit": "waits for other jobs of the sweep (launch.slurm.array_limit)",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "PartitionDown": "waits until its partition is up: it is down",
    "PartitionInactive": "waits until its partition starts jobs again: it is inactive",
    "NodeDown": "waits for a node that is down",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for licenses",
}
"""Slurm's reason why a job waits -> what the job does."""
_STUCK = {
    "DependencyNeverSatisfied": "the job that it waits for failed",
    "BadConstraints": "no node has what it asks for",
    "PartitionConfig": "the partition does not take such a job (its limits of time, nodes or users)",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its quality of service may not use the partition",
}
"""The same for a job that never starts unless it, its partition or its account is changed."""
_OF_ONE_PARTITION = (
    "PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip
"""Slurm shows the reason of the partition that it tried last: the others may take the job."""
_HINDERED = (
    "PartitionDown", "PartitionInactive", "NodeDown", "ReqNodeNotAvail", "JobHeldUser", "JobHeldAdmin",
)  # fmt: skip
"""Reasons that somebody has to resolve; also shown for a sweep."""
_FAILED = {
    "CANCELLED": "the job was cancelled",
    "TIMEOUT": "the job reached its time limit before it could save",
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "OUT_OF_MEMORY": "Slurm killed the job for its memory (launch.slurm.mem)",
    "DEADLINE": "the job reached its deadline",
    "REVOKED": "the job was revoked",
    "PREEMPTED": "the job was preempted by another one, and was not requeued",
}


@dataclass(frozen=True, slots=True)
class Job:
    """The present state of a job."""

    id: str
    state: str
    """PENDING, RUNNING, COMPLETED, …"""
    reason: str = ""
    code: int | None = None
    """Exit code of its script, once it has ended."""
    signal: int = 0
    nodes: str = ""
    restarts: int = 0
    start: str = ""
    preempted: str = ""
    """When it was preempted last; empty where it never was."""
    partition: str = ""
    """While it waits, all partitions that it may run in: low,big."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def may_return(self) -> bool:
        return self.state in PASSING

    @property
    def has_succeeded(self) -> bool:
        return self.state == "COMPLETED"

    @property
    def was_cancelled(self) -> bool:
        return self.state == "CANCELLED"

    @property
    def failure(self) -> str:
        return _FAILED.get(self.state, "")

    @property
    def text(self) -> str:
        match self.state:
            case "PENDING":
                text = _WAITS.get(self._why, f"waits ({self._why})" if self._why else "waits")
                return text + (f"; it was requeued {self.restarts} time(s)" if self.restarts else "")
            case "RUNNING":
                again = f", after {self.restarts} requeue(s)" if self.restarts else ""
                return f"runs on {self.nodes}{again}"
            case "COMPLETED":
                return "is done"
            case "FAILED":
                return f"failed with exit code {self.code}"
            case _:
                return f"is {self.state.lower().replace('_', ' ')}"

    @property
    def obstacle(self) -> str:
        return self.text if self.state == "PENDING" and self._why in _HINDERED else ""

    @property
    def never_starts(self) -> str:
        elsewhere = "," in self.partition and self._why in _OF_ONE_PARTITION
        if self.state != "PENDING" or elsewhere or self._why not in _STUCK:
            return ""
        return f"{_STUCK[self._why]} ({self.reason})"

    @property
    def lost_its_dependency(self) -> bool:
        return self._why == "DependencyNeverSatisfied"

    @property
    def _why(self) -> str:
        """The first word of the reason: `ReqNodeNotAvail,_UnavailableNodes:n1` names the nodes, too."""
        return self.reason.partition(",")[0]


def has_slurm() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def ask(
    *words: str, stdin: str = "", environ: Mapping[str, str] | None = None, limit_s: float = _ANSWER_S
) -> Answer:
    """Run one Slurm command; its result, also where it is not installed or does not answer in time."""
    env = slurm_environ(os.environ) if environ is None else dict(environ)
    try:
        done = subprocess.run(words, input=stdin, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{words[0]} gave no answer within {limit_s:.0f} s")
    except OSError as error:
        return Answer(127, "", f"{words[0]} cannot be started: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def slurm_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of the job that this process runs in."""
    return {k: v for k, v in environ.items() if not k.startswith(("SLURM_", "SLURMD_")) or k in _KEPT}


def node_address(host: str) -> str:
    """The name of a node if it can be resolved, else its address in Slurm."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        found = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "-o", "show", "node", host).out)
        return found[1] if found else host
    return host


def read_partitions() -> list[Partition]:
    """The partitions; none where Slurm does not answer."""
    answer = ask("sinfo", "--noheader", "--format=%R|%P|%l|%D|%c|%m|%f|%G")
    found: dict[str, Partition] = {}
    for line in answer.out.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 8:
            continue
        name, starred, limit, nodes, cpus, mib, features, gres = fields
        before = found.get(name)
        found[name] = Partition(
            name,
            starred.endswith("*"),
            time_seconds(limit),
            _number(nodes) + (before.nodes if before else 0),
            max(_number(cpus), before.largest_cpus if before else 0),
            max(_number(mib), before.largest_mib if before else 0),
            (*(before.features if before else ()), *_list(features)),
            (*(before.gres if before else ()), *_list(gres)),
        )
    return list(found.values())


def _list(text: str) -> tuple[str, ...]:
    return () if text in ("", "(null)") else tuple(text.split(","))


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def read_jobs(ids: Sequence[str], *, limit_s: float = _ANSWER_S) -> dict[str, Job]:
    """Id -> job, of those that Slurm still knows; a task of an array has an id such as 12_3.

    The controller forgets a job minutes after its end (MinJobAge); accounting, where there is any, does not.
    MachineError where the controller gives no answer. limit_s: time limit of one question.
    """
    found: dict[str, Job] = {}
    for parent in dict.fromkeys(number.partition("_")[0] for number in ids):
        answer = ask("scontrol", "--oneliner", "show", "job", parent, limit_s=limit_s)
        if answer.code != 0 and _UNKNOWN not in answer.text.lower():
            message = f"Slurm gives no answer about job {parent}: {answer.text}"
            raise MachineError(Problem("slurm-no-answer", message, hint="try again later"))
        for line in answer.out.splitlines():
            found |= _read_job(line)
    missing = [number for number in ids if number not in found]
    if missing and shutil.which("sacct"):
        found |= _accounted(missing)
    return {number: job for number, job in found.items() if number in ids}


def _read_job(line: str) -> dict[str, Job]:
    """The jobs of one line of `scontrol show job`: several where an array's tasks wait together."""
    words = dict(re.findall(r"(?:^| )([A-Z][A-Za-z:]*)=(\S*)", line))
    if "JobId" not in words:
        return {}
    code, _, number = words.get("ExitCode", "").partition(":")
    state = words.get("JobState", "")
    job = Job(
        words["JobId"],
        state,
        _text(words.get("Reason", "")),
        int(code) if code.isdigit() and state in ENDED else None,
        int(number) if number.isdigit() else 0,
        _text(words.get("NodeList", "")),
        _number(words.get("Restarts", "0")),
        _text(words.get("StartTime", "")),
        _text(words.get("PreemptTime", "")),
        _text(words.get("Partition", "")),
    )
    parent, tasks = words.get("ArrayJobId"), words.get("ArrayTaskId")
    if parent is None or tasks is None:
        return {job.id: job}
    return {f"{parent}_{task}": job for task in _tasks(tasks)}


def _tasks(text: str) -> list[int]:
    """`0-2,5,8-12:2%4` -> [0, 1, 2, 5, 8, 10, 12]"""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        if match := _RANGE.fullmatch(part):
            first, last, step = match[1], match[2] or match[1], match[3] or "1"
            found += range(int(first), int(last) + 1, max(1, int(step)))
    return found


def _text(text: str) -> str:
    return "" if text in ("None", "(null)", "Unknown", "N/A") else text


def _accounted(ids: Sequence[str]) -> dict[str, Job]:
    """The jobs that accounting knows; none without it."""
    fields = "JobID,State,ExitCode,NodeList"
    words = ["sacct", "-X", "-n", "-P", f"--format={fields}", f"--jobs={','.join(ids)}"]
    found: dict[str, Job] = {}
    for line in ask(*words).out.splitlines():
        number, state, code, nodes = [*line.split("|"), "", "", ""][:4]
        first, _, signal = code.partition(":")
        found[number] = Job(
            number, state.partition(" ")[0], "", _number(first), _number(signal), _text(nodes)
        )
    return found


def test_only(script: str) -> Answer:
    """Let Slurm check a script without submitting it."""
    environ = without_defaults(os.environ, script)
    return ask("sbatch", "--test-only", stdin=script, environ=environ)


def submit(script: Path, *, dependency: str | None = None) -> Answer:
    """Submit a script; its number is the output's first word."""
    words = ["sbatch", "--parsable"]
    if dependency is not None:
        words += [f"--dependency=afterok:{dependency}", "--kill-on-invalid-dep=yes"]
    environ = without_defaults(os.environ, script.read_text("utf-8"))
    return ask(*words, str(script), environ=environ)


_VARIABLES = {
    "time": "TIMELIMIT", "mem": "MEM_PER_NODE", "gpus-per-node": "GPUS_PER_NODE", "nodes": "NODES",
    "cpus-per-task": "CPUS_PER_TASK", "array": "ARRAY_INX", "job-name": "JOB_NAME",
}  # fmt: skip
"""Options whose environment variable has another name."""


def without_defaults(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """The environment for sbatch, without the SBATCH_* variables that would override the script."""
    named = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    in_script = {f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}" for name in named}
    return {k: v for k, v in slurm_environ(environ).items() if k not in in_script}


# Part of Slurm's error -> (key of the recipe, what is wrong)
_REFUSALS = {
    "invalid partition": ("partition", "names no partition of this cluster"),
    "Invalid account": ("account", "is not valid here"),
    "Invalid qos": ("qos", "is not valid here"),
    "Invalid feature": ("constraint", "names a feature that no node has"),
    "reservation is invalid": ("reservation", "names no reservation of this cluster"),
    "Invalid node name": ("nodelist", "names a node that this cluster does not have"),
    "generic resource": ("gpus_per_node", "asks for devices that no node of this cluster has"),
    "--mail-type": ("options.mail-type", "is not a mail type"),
    "time limit": ("time", "is not allowed in the partition"),
}
_LISTED_BY = {"reservation": "scontrol show reservation", "nodelist": "sinfo -N", "exclude": "sinfo -N"}


def check_queue(job: Submission, scripts: Mapping[str, str]) -> tuple[list[Problem], list[str]]:
    """Problems of the jobs, each with its line of the recipe; and what Slurm answers about their start.

    scripts: name -> text; the name of the prepare job begins with `prepare`. MachineError where Slurm gives
    no answer.
    """
    partitions = read_partitions()
    if not partitions:
        message = "Slurm gives no answer: `sinfo` shows no partition"
        raise MachineError(Problem("slurm-no-answer", message, hint="try again; --dry-run shows the scripts"))
    problems: list[Problem] = []
    answers: list[str] = []
    for name, script in scripts.items():
        check = _Check(job, partitions, is_prepare=name.startswith("prepare"))
        found = check.limits()
        if not found:
            answer = test_only(script)
            if answer.code == 0:
                answers.append(f"{name}: {answer.text}")
            else:
                found = [check.refusal(answer.text)]
        problems += found
    return list(dict.fromkeys(problems)), answers


@dataclass(frozen=True, slots=True)
class _Check:
    """One script: the options that the recipe asks for, and what the partitions offer."""

    job: Submission
    partitions: Sequence[Partition]
    is_prepare: bool

    @property
    def asked(self) -> SlurmJob:
        slurm = self.job.launch.slurm
        return slurm.prepare if self.is_prepare and slurm.prepare is not False else slurm

    def key(self, name: str) -> str:
        """The recipe key of an option: the prepare job inherits those that it does not set."""
        own = self.is_prepare and getattr(self.asked, name, None) is not None
        return f"launch.slurm.prepare.{name}" if own else f"launch.slurm.{name}"

    def value(self, name: str) -> str:
        if name.startswith("options."):
            return str(self.asked.options.get(name.removeprefix("options."), ""))
        found = getattr(self.asked, name)
        found = getattr(self.job.launch.slurm, name, None) if found is None else found
        return "" if found is None else str(found)

    def limits(self) -> list[Problem]:
        """Problems of a job that Slurm would accept and never start: more time or nodes than there are."""
        name, partitions = self.value("partition"), self.partitions
        chosen = [p for p in partitions if (p.name in name.split(",") if name else p.is_default)]
        if name and not chosen:
            message = f"is {name}, and this cluster has no such partition"
            return [Problem("slurm-partition", message, path=self.key("partition"), hint=self._there_is())]
        problems = []
        time, nodes = self.value("time"), self.job.hardware.num_nodes
        wanted = time_seconds(time) if time else None
        if chosen and wanted and all(p.limit_s is not None and p.limit_s < wanted for p in chosen):
            longer = [p.name for p in partitions if p.limit_s is None or p.limit_s >= wanted]
            most = f"{(chosen[0].limit_s or 0) / 60:g} minutes"
            message = f"is {time}, and the partition {chosen[0].name} gives at most {most}"
            hint = f"there is more in: {', '.join(longer)}" if longer else "ask for less"
            problems.append(Problem("slurm-time", message, path=self.key("time"), hint=hint))
        if chosen and not self.is_prepare and all(partition.nodes < nodes for partition in chosen):
            message = (
                f"the plan needs {nodes} nodes, and the partition {chosen[0].name} has {chosen[0].nodes}"
            )
            larger = [p.name for p in partitions if p.nodes >= nodes]
            hint = f"large enough: {', '.join(larger)}" if larger else "no partition here has as many"
            problems.append(Problem("slurm-nodes", message, path="hardware.num_nodes", hint=hint))
        return problems

    def refusal(self, said: str) -> Problem:
        """Slurm's rejection as a problem of a recipe key, with the values that the cluster has."""
        for words, (name, what) in _REFUSALS.items():
            if words.lower() not in said.lower():
                continue
            if name == "gpus_per_node":
                return self._no_such_device(said)
            if name == "nodelist" and self.asked.nodelist is None:
                name = "exclude"
            value = self.value(name)
            message = f"{'is ' + value + ', which ' if value else ''}{what} (Slurm: {said})"
            return Problem("slurm-refused", message, path=self.key(name), hint=self._there_is(name))
        path = "launch.slurm.prepare" if self.is_prepare else "launch.slurm"
        if "node configuration" in said and (found := self._too_large(said, path)) is not None:
            return found
        if "option '--" in said:
            hint = "`man sbatch` lists the options of this Slurm"
            return Problem("slurm-refused", said, path=f"{path}.options", hint=hint)
        what = "the prepare job" if self.is_prepare else f"a job for {self.job.hardware.label}"
        return Problem("slurm-refused", f"Slurm rejects {what}: {said}", path=path, hint=self._sizes())

    def _too_large(self, said: str, path: str) -> Problem | None:
        """The problem of a job with more CPUs, memory or devices than any node has."""
        cpus, mib = max(p.largest_cpus for p in self.partitions), max(p.largest_mib for p in self.partitions)
        hardware, asked = self.job.hardware, self.asked
        wanted = asked.cpus_per_task if self.is_prepare else cpus_of_task(self.job.launch.slurm, hardware)
        if wanted is not None and wanted > cpus:
            name, message = "cpus_per_task", f"{wanted} CPUs per node are requested, no node has over {cpus}"
        elif asked.mem and _mib(str(asked.mem)) > mib:
            name, message = "mem", f"{asked.mem} per node are requested, no node has over {mib} MiB"
        else:
            counts = [count_of(gres) for p in self.partitions for gres in p.gres if gres.startswith("gpu")]
            has_fewer = max(counts, default=0) < hardware.devices_per_node
            needs_devices = not (self.is_prepare or hardware.is_cpu)
            return self._no_such_device(said) if needs_devices and has_fewer else None
        message = f"{message} (Slurm: {said})"
        return Problem("slurm-refused", message, path=f"{path}.{name}", hint=self._sizes())

    def _no_such_device(self, said: str) -> Problem:
        there = sorted({f"{name} in {p.name}" for p in self.partitions for name in p.gres})
        slurm, count = self.job.launch.slurm, self.job.hardware.devices_per_node
        key = next((k for k in ("gres", "gpus_per_node") if getattr(slurm, k) is not None), None)
        message = f"the plan needs {count} device(s) per node, and no node here has them (Slurm: {said})"
        hint = f"there is {', '.join(there)}" if there else "this cluster has no devices"
        return Problem("slurm-devices", message, path=f"launch.slurm.{key}" if key else "hardware", hint=hint)

    def _sizes(self) -> str:
        """The partitions with the size of their largest node."""
        sizes = [
            f"{p.name}: {p.nodes} node(s) with up to {p.largest_cpus} CPUs and {p.largest_mib} MiB"
            + (f", {', '.join(sorted(set(p.gres)))}" if p.gres else "")
            for p in self.partitions
        ]
        return f"there is {'; '.join(sizes)}"

    def _there_is(self, name: str = "partition") -> str | None:
        """The values that an option may have on this cluster."""
        if name == "partition":
            return f"there are: {', '.join(partition.name for partition in self.partitions)}"
        if name == "constraint":
            there = sorted({feature for partition in self.partitions for feature in partition.features})
            return f"there are: {', '.join(there)}" if there else "no node has any feature"
        return f"`{_LISTED_BY[name]}` lists them" if name in _LISTED_BY else None


def _mib(text: str) -> float:
    """MiB of 64G."""
    return int(text[:-1]) * {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}.get(text[-1], 0.0)
