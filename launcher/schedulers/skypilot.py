"""SkyPilot: the jobs of `submit` as managed jobs, through its `sky` command.

The command, and not the package: it needs versions of other packages that the training stack excludes, and is
usually installed in an environment of its own. A job is found by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.execute.run_dir import SUBMITTED
from launcher.files.redaction import hider, secret_values
from launcher.machine.bash_syntax import check_shell
from launcher.machine.hardware import Hardware
from launcher.machine.job_member import RENDEZVOUS_PORT
from launcher.recipe.schema import LaunchSection
from launcher.schedulers.queue import (
    ASKED_TO_STOP,
    Checked,
    Ids,
    Phase,
    PlannedRun,
    Queue,
    QueuedJob,
    Submission,
    submit_each,
)
from launcher.schedulers.remote import check_paths, dump_yaml, run_script

JOB = "task.yaml"
_SECTION = "launch.skypilot"
_RECIPE = f"/tmp/effilaunch-recipe/{SUBMITTED}"
"""Where the nodes see the recipe."""
_ANSWER_S = 900.0
"""To launch, SkyPilot first starts a controller, which takes minutes."""
_LOG_S = 30.0
"""Between two looks at the log of a running job: SkyPilot always sends all of it."""
_OWN_NAMES = ("A100-80GB", "V100-32GB")
"""Devices whose memory is part of SkyPilot's name, too."""
_PHASES: Mapping[str, Phase] = {
    "PENDING": "waiting", "STARTING": "waiting", "RECOVERING": "waiting", "SUCCEEDED": "done",
    "CANCELLED": "cancelled",
}  # fmt: skip
"""Status of a managed job -> what it means; the others that begin with FAILED are failures, the rest runs."""
_PREFIX = re.compile(r"\(([^()]*)pid=\d+[^()]*\) ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class SkyPilot(Queue):
    """Whatever clouds, Kubernetes clusters and machines the `sky` command of this machine knows."""

    name = "skypilot"
    shares_files = False

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self._looked: dict[str, float] = {}
        """Job -> the lines of its log that were read, and when."""
        self._numbers: dict[str, int] = {}
        """Job -> SkyPilot's number of its newest start, which also finds the log of one that has ended."""
        self._ended: set[str] = set()

    def require(self) -> None:
        if shutil.which("sky") is None:
            hint = "pip install skypilot in an environment of its own; --dry-run shows the task anywhere"
            message = "the command sky of SkyPilot is not installed on this machine"
            raise MachineError(Problem("skypilot-missing", message, hint=hint))

    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        return launch.skypilot.cpus or (hardware.devices_per_node if hardware.is_cpu else None)

    def render(self, job: Submission) -> dict[str, str]:
        return {
            f"task-{index}.yaml" if job.is_sweep else JOB: dump_yaml([_task(job, run)])
            for index, run in enumerate(job.runs)
        }

    def check(self, job: Submission, files: Mapping[str, str], *, dry_run: bool) -> Checked:
        problems, asked = [*_check_section(job)], job.launch.skypilot
        warnings = []
        if job.runs[0].plan.runtime.mirror is None and not _places(asked.runs, asked.mounts):
            warnings.append(
                "checkpoints and the result are on the disks of the nodes, which are lost with them: set "
                "runtime.mirror to a bucket"
            )
        if problems or dry_run:
            return Checked(problems, warnings, unasked="SkyPilot checks a task when it is launched")
        return Checked((), warnings)

    def submit(self, job: Submission, files: Mapping[str, str]) -> Ids:
        return submit_each(self, job, (partial(_launch, job.folder / file) for file in files))

    def jobs(self, ids: Sequence[str]) -> Mapping[str, QueuedJob]:
        words = ("jobs", "queue", "--all", "--output", "json")
        answer = _sky(*words)
        try:
            rows = json.loads(answer.stdout[answer.stdout.index("[") :])
            newest = {row["job_name"]: row for row in sorted(rows, key=lambda row: int(row["job_id"]))}
        except (ValueError, KeyError, TypeError):
            raise _no_answer(words, answer) from None
        found = {name: _state(newest[name]) for name in ids if name in newest}
        self._numbers |= {name: int(newest[name]["job_id"]) for name in found}
        self._ended |= {name for name, job in found.items() if job.has_ended}
        return found

    def log(self, job: str, file: Path) -> str:
        is_new = job not in self._lines
        if not is_new and job not in self._ended and time.monotonic() - self._looked[job] < _LOG_S:
            return ""
        before = self._lines.get(job, [])
        answer = _sky("jobs", "logs", "--no-follow", "--tail", "0", str(self._numbers[job]))
        lines = list(_own_lines(answer.stdout)) or before  # no answer
        self._lines[job], self._looked[job] = lines, time.monotonic()
        is_longer = lines[: len(before)] == before  # another cluster, after a recovery, has another log
        new = "".join(f"{line}\n" for line in lines[len(before) if is_longer else 0 :])
        with file.open("w" if is_new else "a", encoding="utf-8") as stream:
            stream.write(new)
        return new

    def cancel(self, ids: Sequence[str]) -> None:
        for name in ids:
            words = ("jobs", "cancel", "--yes", "--name", name)
            answer = _sky(*words)
            if answer.returncode != 0:
                raise _no_answer(words, answer)

    def requeue(self, run_dir: Path, job: str) -> str:
        self._ended.discard(job)
        return _launch(run_dir / JOB)


QUEUE = SkyPilot()


# --- the task


def job_name(job: Submission, run: PlannedRun) -> str:
    """The name of a run's job; another one for another run directory."""
    stem = re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")[:24] or "run"
    return f"{stem}-{hashlib.sha256(str(run.run_dir).encode()).hexdigest()[:8]}"


def _task(job: Submission, run: PlannedRun) -> dict[str, Any]:
    asked, name, nodes = job.launch.skypilot, job_name(job, run), job.hardware.num_nodes
    script = run_script(
        _RECIPE, f"{asked.runs}/{name}", rank='"$SKYPILOT_NODE_RANK"', head=f'"$head:{RENDEZVOUS_PORT}"',
        nodes=nodes, tiny=job.tiny, setup=['head=$(head -n1 <<< "$SKYPILOT_NODE_IPS")'],
    )  # fmt: skip
    mounts: dict[str, Any] = {_RECIPE: str(run.run_dir / SUBMITTED)}
    mounts |= {
        path: {"source": source, "mode": "MOUNT"} for path, source in asked.mounts.items() if "://" in source
    }
    task = {
        "name": name,
        "resources": _resources(job),
        "num_nodes": nodes,
        "file_mounts": mounts,
        "volumes": {path: source for path, source in asked.mounts.items() if "://" not in source},
        "secrets": dict.fromkeys(asked.secrets),
        "setup": "".join(f"{line}\n" for line in asked.setup),
        "run": script,
    }
    return {key: value for key, value in task.items() if value not in ({}, "")}


def _resources(job: Submission) -> dict[str, Any]:
    asked, hardware = job.launch.skypilot, job.hardware
    device = asked.accelerator or accelerator(hardware)
    cpus = asked.cpus or (hardware.devices_per_node if hardware.is_cpu else None)
    recovery = {"max_restarts_on_errors": asked.restarts, "recover_on_exit_codes": [*ASKED_TO_STOP]}
    found = {
        "infra": asked.infra,
        "accelerators": f"{device}:{hardware.devices_per_node}" if device else None,
        "cpus": f"{cpus}+" if cpus else None,
        "memory": f"{asked.memory}+" if asked.memory else None,
        "disk_size": asked.disk,
        "image_id": asked.image,
        "use_spot": asked.spot,
        "job_recovery": recovery,
    }
    return {key: value for key, value in found.items() if value is not None}


def accelerator(hardware: Hardware) -> str | None:
    """SkyPilot's name of a device; None for CPUs and unnamed devices."""
    name = hardware.device
    if hardware.is_cpu or re.fullmatch(r"\d+GB", name):
        return None
    return name if name in _OWN_NAMES else name.partition("-")[0]


def _places(path: str, mounts: Mapping[str, str]) -> bool:
    return not check_paths({"": path}, [*mounts], "", "")


def _check_section(job: Submission) -> Iterator[Problem]:
    asked, hardware = job.launch.skypilot, job.hardware
    if not hardware.is_cpu and not (asked.accelerator or accelerator(hardware)):
        message = f"is missing: the plan is for {hardware.device}, which names no device of SkyPilot"
        path = f"{_SECTION}.accelerator"
        yield Problem("skypilot-accelerator", message, path=path, hint="`sky gpus list` lists the names")
    if hardware.num_nodes > 1:
        paths = {f"{_SECTION}.runs": asked.runs}
        yield from check_paths(paths, [*asked.mounts], "skypilot-path", f"{_SECTION}.mounts")
    for run in job.runs:
        yield from check_paths(run.paths, [*asked.mounts], "skypilot-path", f"{_SECTION}.mounts")
    for index, name in enumerate(asked.secrets):
        if name not in os.environ:
            message = f"{name} is not set in this environment"
            yield Problem("skypilot-secret", message, path=f"{_SECTION}.secrets[{index}]", hint="set it")
    if job.launch.hostfile is not None:
        message, hint = "names the nodes, which SkyPilot starts", "--set launch.hostfile=null"
        yield Problem("skypilot-hostfile", message, path="launch.hostfile", hint=hint)
    if (problem := check_shell(asked.setup, f"{_SECTION}.setup")) is not None:
        yield problem


# --- the command


def _sky(*words: str) -> subprocess.CompletedProcess[str]:
    QUEUE.require()
    try:
        return subprocess.run(
            ["sky", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"sky {words[0]}: {getattr(error, 'strerror', None) or f'no answer within {_ANSWER_S:.0f} s'}"
        raise MachineError(
            Problem("skypilot-no-answer", why, hint="`sky api status` shows its server")
        ) from None


def _launch(file: Path) -> str:
    """Launch a task; its name. RecipeError where SkyPilot rejects it."""
    text = file.read_text("utf-8")
    name: str = re.findall(r"^name: (\S+)$", text, re.MULTILINE)[0]
    secrets = re.search(r"^secrets:\n((?:  .*\n)+)", text, re.MULTILINE)
    named = re.findall(r"^  (\w+):", secrets[1], re.MULTILINE) if secrets else []
    given = [word for secret in named for word in ("--secret", secret)]
    answer = _sky("jobs", "launch", "--yes", "--detach-run", "--name", name, *given, str(file))
    if answer.returncode != 0:
        message = f"SkyPilot rejects the task: {_said(answer)}"
        raise RecipeError(Problem("skypilot-refused", message, file=str(file), hint="nothing was launched"))
    return name


def _no_answer(words: Sequence[str], answer: subprocess.CompletedProcess[str]) -> MachineError:
    message = f"`sky {' '.join(words)}` failed: {_said(answer)}"
    return MachineError(Problem("skypilot-no-answer", message, hint="`sky api status` shows its server"))


def _said(answer: subprocess.CompletedProcess[str]) -> str:
    """The last lines of an answer, without colours and secrets."""
    hide = hider(secret_values(os.environ))
    lines = [line.strip() for line in _COLOUR.sub("", answer.stdout + answer.stderr).splitlines()]
    said: str = hide("; ".join([line for line in lines if line][-3:]))
    return said or f"exit status {answer.returncode}"


def _own_lines(text: str) -> Iterator[str]:
    """The lines that node rank 0 printed: SkyPilot puts the node in front of each."""
    for line in _COLOUR.sub("", text).splitlines():
        found = _PREFIX.match(line)
        if found is not None and "worker" not in found[1]:
            yield line[found.end() :]


def _state(row: Mapping[str, Any]) -> QueuedJob:
    name, state = str(row["job_name"]), str(row["status"])
    failed = state.startswith("FAILED")
    phase = _PHASES.get(state, "failed" if failed else "running")
    again = f", after {row['recovery_count']} recoveries" if row.get("recovery_count") else ""
    where = f" on {row['infra']}" if row.get("infra") and phase == "running" else ""
    why = (
        f"SkyPilot ended the job: {state}: {row.get('failure_reason') or 'see sky jobs logs'}"
        if failed
        else ""
    )
    return QueuedJob(name, phase, state, f"is {state.lower()}{where}{again}", failure=why)
