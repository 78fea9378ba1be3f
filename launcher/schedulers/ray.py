"""Ray: the jobs of `submit` through Ray's job API: an existing cluster, `ray start`, KubeRay.

Each job's entrypoint is a driver (ray_job.py) that reserves the nodes and starts the run on them. An id is
the address of the cluster's dashboard and Ray's own id, ADDRESS/raysubmit_….
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from launcher import __version__
from launcher.errors import MachineError, Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.machine.hardware import Hardware
from launcher.recipe.schema import LaunchSection
from launcher.render.bundle import dump_json
from launcher.schedulers.queue import (
    START,
    Checked,
    Ids,
    Phase,
    PlannedRun,
    Queue,
    QueuedJob,
    Submission,
    asked,
    submit_each,
)

JOB, DRIVER = "ray.json", "launcher.schedulers.ray_job"
MARGIN_S = 60
"""For the ends of the ranks, and of the driver."""
_PHASES: Mapping[str, Phase] = {
    "PENDING": "waiting", "RUNNING": "running", "SUCCEEDED": "done", "FAILED": "failed",
    "STOPPED": "cancelled",
}  # fmt: skip
_ANSWER_S = 10.0
_SECTION = "launch.ray"


class Ray(Queue):
    """The cluster of `launch.ray.address`, of RAY_ADDRESS, or of this machine."""

    name = "ray"

    def require(self) -> None:
        if find_spec("ray") is None:
            hint = "pip install 'effilaunch[ray]', in the version of the cluster; --dry-run works without it"
            raise MachineError(Problem("ray-missing", "the package ray is not installed here", hint=hint))

    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        return launch.ray.cpus_per_node or (hardware.devices_per_node if hardware.is_cpu else None)

    def render(self, job: Submission) -> dict[str, str]:
        return {
            f"{run.run_dir.name}/{JOB}" if job.is_sweep else JOB: dump_json(_rendered(job, run))
            for run in job.runs
        }

    def check(self, job: Submission, files: Mapping[str, str], *, dry_run: bool) -> Checked:
        problems = [*_check_section(job)]
        if problems or (dry_run and find_spec("ray") is None):
            return Checked(problems, unasked="the package ray is not installed here")

        def ask() -> tuple[Sequence[Problem], Sequence[str]]:
            with _asking(job.launch.ray.address) as client:
                return _check_cluster(client.get_address(), job)

        return asked(ask, dry_run=dry_run)

    def submit(self, job: Submission, files: Mapping[str, str]) -> Ids:
        address = job.launch.ray.address
        return submit_each(self, job, (partial(_submit, run.run_dir, address) for run in job.runs))

    def jobs(self, ids: Sequence[str]) -> Mapping[str, QueuedJob]:
        found = {}
        for number in ids:
            address, _, own = number.rpartition("/")
            with _asking(address) as client, _unless_absent():
                found[number] = as_job(number, client.get_job_info(own))
        return found

    def log(self, job: str, file: Path) -> str:
        address, _, own = job.rpartition("/")
        text: bytes = b""
        with _asking(address) as client, _unless_absent():
            text = client.get_job_logs(own).encode()
        seen = file.stat().st_size if file.exists() else 0
        with file.open("ab") as stream:
            stream.write(text[seen:])
        return text[seen:].decode("utf-8", "replace")

    def cancel(self, ids: Sequence[str]) -> None:
        for number in ids:
            address, _, own = number.rpartition("/")
            with _asking(address) as client, _unless_absent():
                client.stop_job(own)

    def requeue(self, run_dir: Path, job: str) -> str:
        return _submit(run_dir, job.rpartition("/")[0])


QUEUE = Ray()


def _rendered(job: Submission, run: PlannedRun) -> dict[str, Any]:
    """What is submitted (the arguments of Ray's `submit_job`), and what its driver does."""
    asked, hardware = job.launch.ray, job.hardware
    bundle = {"CPU": asked.cpus_per_node or hardware.devices_per_node, **asked.resources}
    if not hardware.is_cpu:
        bundle["GPU"] = hardware.devices_per_node
    least, most = job.node_counts
    stop_s = run.plan.runtime.stop_limit_s
    env = {str(name): str(value) for name, value in asked.runtime_env.get("env_vars", {}).items()}
    # Ray's own limit is 3 s; the driver waits for the nodes, and kills what does not end.
    limits = {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_s + 2 * MARGIN_S)}
    python, folder = shlex.quote(asked.python), shlex.quote(str(run.run_dir))
    absent = (
        f"error: `{asked.python}` of the head node cannot import effilaunch {__version__}: install it in the "
        "environment of the Ray nodes, or with launch.ray.runtime_env"
    )
    script = [
        f'echo "{START}$(date -u +%FT%TZ) $(hostname)"',
        f"{python} -c 'import {DRIVER}' || {{ echo {shlex.quote(absent)}; exit 4; }}",
        f"exec {python} -m {DRIVER} {folder}",
    ]
    return {
        "job": {
            "entrypoint": "; ".join(script),
            "runtime_env": {**asked.runtime_env, "env_vars": {**env, **limits}},
            "metadata": {"name": job.name, "run_dir": str(run.run_dir), "effilaunch": __version__},
        },
        "driver": {
            "effilaunch": __version__,
            "nodes": most,
            "least": least,
            "per_node": f"{hardware.devices_per_node}x{hardware.device}",
            "bundle": bundle,
            "tiny": job.tiny,
            "prepare": asked.prepare,
            "cwd": job.cwd,
            "wait_seconds": asked.wait_seconds,
            "stop_seconds": stop_s + MARGIN_S,
            "max_restarts": run.plan.launch.max_restarts,
            "env": env,
        },
    }


def _check_section(job: Submission) -> Iterator[Problem]:
    if job.launch.hostfile is not None:
        message, hint = "names the nodes, which Ray chooses", "remove it for Ray: --set launch.hostfile=null"
        yield Problem("ray-hostfile", message, path="launch.hostfile", hint=hint)
    for name in ("CPU", "GPU", "memory", "object_store_memory"):
        if name in job.launch.ray.resources:
            hint = "`hardware` sets the devices, launch.ray.cpus_per_node the CPUs"
            message = f"{name} is not a resource of your own"
            yield Problem("ray-resources", message, path=f"{_SECTION}.resources.{name}", hint=hint)
    if find_spec("ray") is not None:
        yield from _check_runtime_env(job.launch.ray.runtime_env)


def _check_runtime_env(given: Mapping[str, Any]) -> Iterator[Problem]:
    """What Ray rejects, and keys that it would ignore."""
    from ray.runtime_env import RuntimeEnv

    path = f"{_SECTION}.runtime_env"
    for name in sorted(given.keys() - RuntimeEnv.known_fields):
        hint = f"known: {', '.join(sorted(key for key in RuntimeEnv.known_fields if key[0] != '_'))}"
        yield Problem("ray-runtime-env", "Ray does not know this key", path=f"{path}.{name}", hint=hint)
    try:
        RuntimeEnv(**given)
    except (TypeError, ValueError) as error:
        yield Problem("ray-runtime-env", f"Ray rejects it: {error}", path=path)


def _check_cluster(address: str, job: Submission) -> tuple[list[Problem], list[str]]:
    """The problem of a cluster without enough nodes; what the cluster has."""
    from ray.util.state import list_nodes

    asked, bundle = job.launch.ray, _rendered(job, job.runs[0])["driver"]["bundle"]
    nodes = [node for node in list_nodes(address, detail=True, limit=10_000) if node.state == "ALIVE"]
    fits = [
        node
        for node in nodes
        if all((node.resources_total or {}).get(name, 0) >= count for name, count in bundle.items())
    ]
    needed = ", ".join(f"{count:g} {name}" for name, count in bundle.items())
    answer = f"{address}: {len(nodes)} node(s), {len(fits)} with {needed}"
    if len(fits) >= job.node_counts[0] or asked.wait_seconds:
        return [], [answer]
    own = ("CPU", "GPU", *asked.resources)
    has = sorted(
        {", ".join(f"{(node.resources_total or {}).get(name, 0):g} {name}" for name in own) for node in nodes}
    )
    message = f"{job.node_counts[0]} node(s) with {needed} are needed, and the cluster has {len(fits)}"
    hint = f"its nodes have {'; '.join(has)}; launch.ray.wait_seconds waits for nodes that are started later"
    return [Problem("ray-resources", message, path="hardware", hint=hint)], []


def _submit(run_dir: Path, address: str | None) -> str:
    """Submit the job of a run directory; its id."""
    path = run_dir / JOB
    try:
        given = parse_json(path.read_text("utf-8"))["job"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(Problem("not-submitted", f"cannot be read: {error}", file=str(path))) from None
    with _asking(address) as client:
        return f"{client.get_address()}/{client.submit_job(**given)}"


def as_job(number: str, info: Any) -> QueuedJob:
    """A job of Ray's as the state of ours."""
    state = str(info.status.value)
    phase, code = _PHASES[state], info.driver_exit_code
    why = ""
    if phase == "failed" and (code is None or code < 0):  # the driver did not start, or was killed
        lines = (info.message or "").splitlines() or [""]
        why = f"Ray ended the job: {lines[0]}"
    text = {"waiting": "waits", "running": "runs", "done": "is done", "cancelled": "is cancelled"}.get(
        phase, why or f"has failed with exit code {code}"
    )
    return QueuedJob(number, phase, state, text, 0 if phase == "done" else code, why)


@contextlib.contextmanager
def _unless_absent() -> Iterator[None]:
    """A job that Ray does not know is none."""
    try:
        yield
    except RuntimeError as error:
        if "status code 404" not in str(error):
            raise


@contextlib.contextmanager
def _asking(address: str | None) -> Iterator[Any]:
    """A client of the job API. MachineError (4) where the cluster does not answer, or refuses.

    address: None for that of RAY_ADDRESS, else of a cluster on this machine.
    """
    QUEUE.require()
    from ray.exceptions import AuthenticationError, RayError
    from ray.job_submission import JobSubmissionClient

    asked = address or os.environ.get("RAY_ADDRESS") or None
    shown = asked or "this machine (no launch.ray.address, no RAY_ADDRESS)"
    hint = "launch.ray.address or RAY_ADDRESS is the URL of the dashboard, e.g. http://HEAD:8265"
    try:
        _reach(asked)
        yield JobSubmissionClient(asked)
    except AuthenticationError as error:
        message = f"Ray at {shown} refuses the token: {_first_line(error)}"
        raise MachineError(Problem("ray-permission", message, hint="RAY_AUTH_TOKEN")) from None
    except (OSError, RuntimeError, ValueError, RayError) as error:
        message = f"no answer of Ray at {shown}: {_first_line(error)}"
        raise MachineError(Problem("ray-no-answer", message, hint=hint)) from None


def _reach(address: str | None) -> None:
    """OSError where nothing listens: Ray would try for up to two minutes. ValueError for no address."""
    if address is None or address == "auto":
        return
    found = urlsplit(address if "://" in address else f"//{address}")
    if found.scheme not in ("", "http", "https") or not found.hostname or not (found.scheme or found.port):
        raise ValueError(f"{address!r} is neither a URL with http or https nor HOST:PORT")
    if found.scheme and found.scheme in getproxies() and not proxy_bypass(found.hostname):
        return
    port = found.port or (443 if found.scheme == "https" else 80)
    with socket.create_connection((found.hostname, port), timeout=_ANSWER_S):
        pass


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
