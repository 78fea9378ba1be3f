"""Slurm's commands as functions: `squeue` and `sacct`, `sinfo`, `sbatch`, `scontrol`, `scancel`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import MachineError, Problem
from launcher.schedulers.queue import QueuedJob
from launcher.schedulers.slurm_allocation import time_seconds

ANSWER_S = 60.0
"""A busy controller takes seconds; more counts as no answer."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT")
"""SLURM_* variables that belong to the cluster and not to a job."""
_UNKNOWN = "invalid job id"
"""The controller's error for an unknown job; other errors do not concern the job."""
_FIELDS = (
    "JobArrayID", "State", "Reason", "exit_code", "NodeList", "RestartCnt", "StartTime", "PreemptTime",
    "Partition", "exc_nodes",
)  # fmt: skip
"""Of `squeue --Format`; its --json, of the same content, lists all jobs of the cluster."""
_PASSING = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED")
"""States that are also shown for a moment for a job that is being requeued."""
_FAILED = (*_PASSING, "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "REVOKED")
_STUCK = (
    "DependencyNeverSatisfied", "BadConstraints", "PartitionConfig", "PartitionTimeLimit",
    "PartitionNodeLimit", "InvalidAccount", "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip
"""Reasons why a job waits that end only if the job, its partition or its account is changed."""
_OF_ONE_PARTITION = (
    "PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip
"""Slurm shows the reason of the partition that it tried last: the others may take the job."""
_HINDERED = (
    "PartitionDown", "PartitionInactive", "NodeDown", "ReqNodeNotAvail", "JobHeldUser", "JobHeldAdmin",
)  # fmt: skip
"""Reasons that somebody has to resolve."""
_VARIABLES = {
    "time": "TIMELIMIT", "mem": "MEM_PER_NODE", "gpus-per-node": "GPUS_PER_NODE", "nodes": "NODES",
    "cpus-per-task": "CPUS_PER_TASK", "array": "ARRAY_INX", "job-name": "JOB_NAME",
}  # fmt: skip
"""Options of sbatch whose environment variable has another name."""


@dataclass(frozen=True, slots=True)
class SlurmResult:
    """The result of a Slurm command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Its error message, on one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)


def has_slurm() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def ask(
    *words: str, stdin: str = "", environ: Mapping[str, str] | None = None, limit_s: float = ANSWER_S
) -> SlurmResult:
    """Run one Slurm command; its result, also where it is not installed or does not answer in time."""
    env = slurm_environ(os.environ) if environ is None else dict(environ)
    try:
        done = subprocess.run(words, input=stdin, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return SlurmResult(124, "", f"{words[0]} gave no answer within {limit_s:.0f} s")
    except OSError as error:
        return SlurmResult(127, "", f"{words[0]} cannot be started: {error.strerror}")
    return SlurmResult(done.returncode, done.stdout, done.stderr)


def slurm_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of the job that this process runs in."""
    return {k: v for k, v in environ.items() if not k.startswith(("SLURM_", "SLURMD_")) or k in _KEPT}


def read_rows(ids: Sequence[str], *, limit_s: float = ANSWER_S) -> dict[str, dict[str, str]]:
    """Id -> fields of `squeue`, of the jobs that Slurm still knows; a task of an array has an id like 12_3.

    The controller forgets a job minutes after its end (MinJobAge); accounting, where there is any, does not.
    MachineError where the controller gives no answer. limit_s: time limit of one question.
    """
    form = ",".join(f"{field}:|" for field in _FIELDS)
    words = ("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}", f"--Format={form}")
    answer = ask(*words, limit_s=limit_s)
    if answer.code != 0 and _UNKNOWN not in answer.text.lower():
        message = f"Slurm gives no answer about job {', '.join(ids[:3])}: {answer.text}"
        raise MachineError(Problem("slurm-no-answer", message, hint="try again later"))
    found: dict[str, dict[str, str]] = {}
    for line in answer.out.splitlines():
        values = [_text(value.strip()) for value in line.split("|")]
        if len(values) > len(_FIELDS):
            row = dict(zip(_FIELDS, values, strict=False))
            code = row["exit_code"]  # as of wait(): 1280 is exit code 5
            row["exit_code"] = str(os.waitstatus_to_exitcode(int(code))) if code.isdigit() else ""
            found[values[0]] = row
    missing = [number for number in ids if number not in found]
    if missing and shutil.which("sacct"):
        found |= _accounted(missing)
    return {number: row for number, row in found.items() if number in ids}


def _text(text: str) -> str:
    return "" if text in ("None", "(null)", "Unknown", "N/A") else text


def _accounted(ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """The jobs that accounting knows; none without it."""
    words = ["sacct", "-X", "-n", "-P", "--format=JobID,State,ExitCode,NodeList", f"--jobs={','.join(ids)}"]
    found = {}
    for line in ask(*words).out.splitlines():
        number, state, code, nodes = [*line.split("|"), "", "", ""][:4]
        row = dict.fromkeys(_FIELDS, "") | {"JobArrayID": number, "NodeList": _text(nodes)}
        found[number] = row | {"State": state.partition(" ")[0], "exit_code": code.partition(":")[0]}
    return found


def as_job(row: Mapping[str, str]) -> QueuedJob:
    """A row of `squeue` as the state of a job."""
    number, state, code = row["JobArrayID"], row["State"], row["exit_code"]
    again = f", after {row['RestartCnt']} requeue(s)" if row["RestartCnt"] not in ("", "0") else ""
    if state == "PENDING":
        # `ReqNodeNotAvail, UnavailableNodes:n1` names the nodes, too.
        reason = row["Reason"].partition(",")[0]
        elsewhere = "," in row["Partition"] and reason in _OF_ONE_PARTITION
        text = f"waits ({row['Reason']}){again}" if reason else f"waits{again}"
        return QueuedJob(
            number, "waiting", state, text, obstacle=text if reason in _HINDERED else "",
            never_starts=reason if reason in _STUCK and not elsewhere else "",
            lost_its_dependency=reason == "DependencyNeverSatisfied",
        )  # fmt: skip
    if state not in (*_FAILED, "COMPLETED", "CANCELLED"):
        running = state in ("RUNNING", "COMPLETING")
        text = f"runs on {row['NodeList']}{again}" if running else f"is {state.lower()}"
        return QueuedJob(number, "running", state, text)
    ended = int(code) if re.fullmatch("-?[0-9]+", code) else None
    if state == "COMPLETED":
        return QueuedJob(number, "done", state, "is done", ended)
    if state == "CANCELLED":
        return QueuedJob(number, "cancelled", state, "is cancelled", ended)
    if state == "FAILED":
        return QueuedJob(number, "failed", state, f"failed with exit code {ended}", ended)
    why = f"Slurm ended the job: {state}" + (" (launch.slurm.mem)" if state == "OUT_OF_MEMORY" else "")
    return QueuedJob(number, "failed", state, f"is {state.lower()}", ended, why, may_return=state in _PASSING)


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


def read_partitions() -> list[Partition]:
    """The partitions; none where Slurm does not answer."""
    found: dict[str, Partition] = {}
    for line in ask("sinfo", "--noheader", "--format=%R|%P|%l|%D|%c|%m|%f|%G").out.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 8:
            continue
        name, starred, limit, nodes, cpus, mib, features, gres = fields
        old = found.get(name, Partition(name, False, None, 0, 0, 0))
        found[name] = Partition(
            name, starred.endswith("*"), time_seconds(limit), old.nodes + _number(nodes),
            max(old.largest_cpus, _number(cpus)), max(old.largest_mib, _number(mib)),
            old.features + _list(features), old.gres + _list(gres),
        )  # fmt: skip
    return list(found.values())


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if _text(text) else ()


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def test_only(script: str) -> SlurmResult:
    """Let Slurm check a script without submitting it."""
    return ask("sbatch", "--test-only", stdin=script, environ=without_defaults(os.environ, script))


def sbatch(script: Path, *, dependency: str | None = None) -> SlurmResult:
    """Submit a script; its number is the output's first word."""
    words = ["sbatch", "--parsable"]
    if dependency is not None:
        words += [f"--dependency=afterok:{dependency}", "--kill-on-invalid-dep=yes"]
    return ask(*words, str(script), environ=without_defaults(os.environ, script.read_text("utf-8")))


def without_defaults(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """The environment for sbatch, without the SBATCH_* variables that would override the script."""
    named = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    in_script = {f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}" for name in named}
    return {k: v for k, v in slurm_environ(environ).items() if k not in in_script}
