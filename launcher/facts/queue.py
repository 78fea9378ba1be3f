"""What a Slurm answers: its partitions and nodes, the state of jobs, whether it would take a script.

Every question is one short process. Nothing here changes anything in Slurm.
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
from launcher.facts.slurm import time_seconds

_ANSWER_S = 60.0
"""A busy controller takes seconds; what takes longer is told as no answer."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT")
"""Variables of the user's shell that say which Slurm this is, and not in which job."""
_UNKNOWN = "invalid job id"
"""What the controller says of a job that it does not know; every other failure is none about the job."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command of Slurm's ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Its complaint, on one line."""
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


@dataclass(frozen=True, slots=True)
class Job:
    """What Slurm knows of a job just now."""

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
    """While it waits all that it may run in: low,big."""


ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL",
    "REVOKED", "PREEMPTED",
)  # fmt: skip
"""States after which nothing follows, but for those of PASSING."""
PASSING = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED")
"""Shown for a moment also of a job that is requeued."""


def has_slurm() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def ask(
    *words: str, stdin: str = "", environ: Mapping[str, str] | None = None, limit_s: float = _ANSWER_S
) -> Answer:
    """Run one command of Slurm's; its end, also where it is absent or gives no answer in time."""
    env = slurm_environ(os.environ) if environ is None else dict(environ)
    try:
        done = subprocess.run(words, input=stdin, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{words[0]} gave no answer within {limit_s:.0f} s")
    except OSError as error:
        return Answer(127, "", f"{words[0]} cannot be started: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def slurm_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a job that this runs in says of itself: a new job is another one."""
    return {k: v for k, v in environ.items() if not k.startswith(("SLURM_", "SLURMD_")) or k in _KEPT}


def node_address(host: str) -> str:
    """Under which name or address a node is reached: its name where that resolves, else what Slurm says."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "-o", "show", "node", host).out)
        return found[1] if found else host
    return host


def read_partitions() -> list[Partition]:
    """The partitions that a job may name; none where Slurm does not answer."""
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
            (*(before.features if before else ()), *_words(features)),
            (*(before.gres if before else ()), *_words(gres)),
        )
    return list(found.values())


def _words(text: str) -> tuple[str, ...]:
    return () if text in ("", "(null)") else tuple(text.split(","))


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def read_jobs(ids: Sequence[str], *, limit_s: float = _ANSWER_S) -> dict[str, Job]:
    """Id -> job, of those that Slurm still knows; a task of an array has an id such as 12_3.

    The controller forgets a job minutes after its end (MinJobAge); where there is accounting, that remembers.
    MachineError where the controller gives no answer: then nothing is known of any job.
    limit_s: so long one question may take.
    """
    found: dict[str, Job] = {}
    for parent in dict.fromkeys(number.partition("_")[0] for number in ids):
        answer = ask("scontrol", "--oneliner", "show", "job", parent, limit_s=limit_s)
        if answer.code != 0 and _UNKNOWN not in answer.said.lower():
            message = f"Slurm gives no answer about job {parent}: {answer.said}"
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
        _told(words.get("Reason", "")),
        int(code) if code.isdigit() and state in ENDED else None,
        int(number) if number.isdigit() else 0,
        _told(words.get("NodeList", "")),
        _number(words.get("Restarts", "0")),
        _told(words.get("StartTime", "")),
        _told(words.get("PreemptTime", "")),
        _told(words.get("Partition", "")),
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


def _told(text: str) -> str:
    return "" if text in ("None", "(null)", "Unknown", "N/A") else text


def _accounted(ids: Sequence[str]) -> dict[str, Job]:
    """The jobs that accounting remembers; none without it."""
    fields = "JobID,State,ExitCode,NodeList"
    words = ["sacct", "-X", "-n", "-P", f"--format={fields}", f"--jobs={','.join(ids)}"]
    found: dict[str, Job] = {}
    for line in ask(*words).out.splitlines():
        number, state, code, nodes = [*line.split("|"), "", "", ""][:4]
        first, _, signal = code.partition(":")
        found[number] = Job(
            number, state.partition(" ")[0], "", _number(first), _number(signal), _told(nodes)
        )
    return found


def test_only(script: str) -> Answer:
    """Whether Slurm would take a script: its own checks, nothing is submitted."""
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
"""Options whose variable is not called like them."""


def without_defaults(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """The environment for sbatch, less those SBATCH_* that would win over what the script says."""
    named = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    said = {f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}" for name in named}
    return {k: v for k, v in slurm_environ(environ).items() if k not in said}
