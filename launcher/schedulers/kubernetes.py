"""Kubernetes: the jobs of `submit` as TrainJobs or Indexed Jobs, through the official client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import MachineError, Problem, RecipeError
from launcher.machine.bash_syntax import check_shell
from launcher.machine.hardware import Hardware
from launcher.recipe.schema import LaunchSection
from launcher.schedulers.kubernetes_manifests import LABEL, NODE, Object, manifests
from launcher.schedulers.queue import Checked, Ids, Phase, Queue, QueuedJob, Submission, asked, submit_each
from launcher.schedulers.remote import check_paths, dump_yaml

JOB = "job.yaml"
_ANSWER_S = 20
_GONE_S = 120.0
"""How long `--requeue` waits until the pods of the job before are gone."""
_SECTION = "launch.kubernetes"
_PLURALS = {
    "ConfigMap": "configmaps", "Service": "services", "Job": "jobs", "JobSet": "jobsets",
    "TrainingRuntime": "trainingruntimes", "TrainJob": "trainjobs",
}  # fmt: skip
"""Jobs that 0.2.0 submitted as JobSets are still followed, cancelled and started again."""
_ENDED: Mapping[str, Phase] = {"Complete": "done", "Completed": "done", "Failed": "failed"}
"""Type of a job's condition -> what it means; `Completed` is a JobSet's."""
_NEVER = ("InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerConfigError")
"""Reasons why a container waits that end only if the image, a Secret or a ConfigMap is changed."""
_EXIT_CODE = re.compile(r"exit code (\d+)")
_STAMP = re.compile(r"(\S+) (.*)")
_LARGEST = 1_000_000
"""Bytes of a recipe; a ConfigMap takes 1 MiB."""


class Kubernetes(Queue):
    """A cluster of the kubeconfig file, or the one in whose pod this runs."""

    name = "kubernetes"
    shares_files = False

    def __init__(self) -> None:
        self._read: dict[str, str] = {}
        """Pod -> time of the last line of its log that was read."""

    def require(self) -> None:
        if find_spec("kubernetes") is None:
            hint = "pip install 'effilaunch[kubernetes]'; --dry-run shows the manifests anywhere"
            raise MachineError(Problem("kubernetes-missing", "the package kubernetes is missing", hint=hint))

    def cpus_per_node(self, launch: LaunchSection, hardware: Hardware) -> int | None:
        return launch.kubernetes.cpus or (hardware.devices_per_node if hardware.is_cpu else None)

    def render(self, job: Submission) -> dict[str, str]:
        return {
            f"job-{index}.yaml" if job.is_sweep else JOB: dump_yaml(manifests(job, run))
            for index, run in enumerate(job.runs)
        }

    def check(self, job: Submission, files: Mapping[str, str], *, dry_run: bool) -> Checked:
        problems = [*_check_section(job)]
        if problems or (dry_run and find_spec("kubernetes") is None):
            return Checked(problems, unasked="the package kubernetes is not installed on this machine")

        def ask() -> tuple[Sequence[Problem], Sequence[str]]:
            with _asking(job.launch.kubernetes.context) as api:
                return _check_cluster(api, job, files)

        return asked(ask, dry_run=dry_run)

    def submit(self, job: Submission, files: Mapping[str, str]) -> Ids:
        context = job.launch.kubernetes.context
        return submit_each(self, job, (partial(_create, text, context) for text in files.values()))

    def jobs(self, ids: Sequence[str]) -> Mapping[str, QueuedJob]:
        found = {}
        for number in ids:
            context, namespace, kind, name = _parts(number)
            with _asking(context) as api:
                there = api.get(kind, namespace, name)
                if there is not None:
                    found[number] = _state(number, there, api.pods(namespace, name))
                elif api.is_cancelled(namespace, name):
                    found[number] = QueuedJob(number, "cancelled", "Cancelled", "is cancelled")
        return found

    def log(self, job: str, file: Path) -> str:
        context, namespace, _, name = _parts(job)
        new = ""
        with _asking(context) as api:
            for pod in api.pods(namespace, name):
                index = pod.metadata.labels.get("batch.kubernetes.io/job-completion-index", "0")
                if index == "0" and pod.status.phase not in ("Pending", "Unknown"):
                    new += self._lines(api, namespace, pod.metadata.name)
        if new or not file.exists():
            with file.open("a" if job in self._read else "w", encoding="utf-8") as stream:
                stream.write(new)
            self._read[job] = ""
        return new

    def _lines(self, api: _Api, namespace: str, pod: str) -> str:
        """The lines of a pod's log after those that were read before."""
        last, lines = self._read.get(pod, ""), []
        for line in api.log(namespace, pod, last).splitlines():
            found = _STAMP.fullmatch(line)
            stamp, text = (found[1], found[2]) if found else (line.strip(), "")
            if stamp > last:
                self._read[pod] = stamp
                lines.append(text)
        return "".join(f"{line}\n" for line in lines)

    def cancel(self, ids: Sequence[str]) -> None:
        for number in ids:
            context, namespace, kind, name = _parts(number)
            with _asking(context) as api:
                api.mark_cancelled(namespace, name)
                api.delete(kind, namespace, name)

    def requeue(self, run_dir: Path, job: str) -> str:
        context, namespace, kind, name = _parts(job)
        with _asking(context) as api:
            for old in yaml.safe_load_all((run_dir / JOB).read_text("utf-8")):
                api.delete(old["kind"], namespace, name)
            deadline = time.monotonic() + _GONE_S
            while api.get(kind, namespace, name) is not None:
                if time.monotonic() > deadline:
                    hint = "its pods are still ending: try again later"
                    raise MachineError(Problem("still-queued", f"{kind} {name} is still there", hint=hint))
                time.sleep(1)
        return _create((run_dir / JOB).read_text("utf-8"), context)


QUEUE = Kubernetes()


def _id(context: str | None, namespace: str, kind: str, name: str) -> str:
    return "/".join([*([context] if context else []), namespace, kind, name])


def _parts(number: str) -> tuple[str | None, str, str, str]:
    """Context, namespace, kind and name of an id; a context may contain slashes."""
    *context, namespace, kind, name = number.split("/")
    return "/".join(context) or None, namespace, kind, name


# --- checks


def _check_section(job: Submission) -> Iterator[Problem]:
    asked = job.launch.kubernetes
    for key, what in (
        ("image", "the image of the containers"),
        ("runs", "the folder of the run directories"),
    ):
        if getattr(asked, key) is None:
            message = f"is missing: {what}"
            yield Problem(
                "kubernetes-key", message, path=f"{_SECTION}.{key}", hint=f"--set {_SECTION}.{key}=…"
            )
    places = [volume.path for volume in asked.volumes]
    if asked.runs is not None and job.runs[0].plan.runtime.mirror is None:
        writable = [volume.path for volume in asked.volumes if not volume.read_only]
        yield from check_paths(
            {f"{_SECTION}.runs": asked.runs}, writable, "kubernetes-path", f"{_SECTION}.volumes"
        )
    for run in job.runs:
        yield from check_paths(run.paths, places, "kubernetes-path", f"{_SECTION}.volumes")
        if len(run.snapshot.encode()) > _LARGEST:
            message = f"has over {_LARGEST} bytes, which is what a ConfigMap takes"
            yield Problem("kubernetes-recipe", message, path="model", hint="put long texts into files")
    if job.launch.hostfile is not None:
        message = "names the nodes, which Kubernetes chooses"
        hint = "--set launch.hostfile=null"
        yield Problem("kubernetes-hostfile", message, path="launch.hostfile", hint=hint)
    if (problem := check_shell(asked.setup, f"{_SECTION}.setup")) is not None:
        yield problem


def _check_cluster(api: _Api, job: Submission, files: Mapping[str, str]) -> tuple[list[Problem], list[str]]:
    """Problems of the cluster, and what it answers to a trial creation of every object."""
    asked = job.launch.kubernetes
    namespace = asked.namespace or api.namespace
    problems = [
        Problem("kubernetes-claim", f"the namespace {namespace} has no PersistentVolumeClaim {volume.claim}",
                path=f"{_SECTION}.volumes[{index}].claim", hint="`kubectl get pvc` lists them")
        for index, volume in enumerate(asked.volumes)
        if api.is_absent(api.core.read_namespaced_persistent_volume_claim, volume.claim, namespace)
    ]  # fmt: skip
    answers = []
    for name, text in files.items():
        for body in yaml.safe_load_all(text):
            problem = api.create(namespace, body, dry_run=True)
            if problem is not None and body["kind"] == "TrainJob" and "runtime" in problem.message.lower():
                continue  # its TrainingRuntime is not there in a trial, which Kubeflow's webhook checks
            if problem is not None and problem not in problems:
                problems.append(problem)
        answers.append(f"{name}: the cluster accepts it in the namespace {namespace}")
    return problems, [] if problems else answers


def _create(text: str, context: str | None) -> str:
    """Create the objects of a file; the id of its job. After an error none of them is left."""
    bodies: list[Object] = list(yaml.safe_load_all(text))
    with _asking(context) as api:
        namespace = bodies[0]["metadata"].get("namespace") or api.namespace
        for index, body in enumerate(bodies):
            if (problem := api.create(namespace, body)) is not None:
                for made in bodies[:index]:
                    api.delete(made["kind"], namespace, made["metadata"]["name"])
                raise RecipeError(problem)
    return _id(context, namespace, bodies[-1]["kind"], bodies[-1]["metadata"]["name"])


# --- states


def _state(number: str, there: Object, pods: Sequence[Any]) -> QueuedJob:
    """A job and its pods as one state."""
    conditions = [one for one in there.get("status", {}).get("conditions", ()) if one.get("status") == "True"]
    ended = next((one for one in conditions if one["type"] in _ENDED), None)
    codes = [code for pod in pods if (code := _exit_code(pod)) is not None]
    if ended is not None:
        message = f"{ended.get('reason', '')}: {ended.get('message', '')}"
        said = _EXIT_CODE.search(message)
        # Of an Indexed Job the pods that were replaced are still there.
        code = int(said[1]) if said else next((code for code in reversed(codes) if code), None)
        phase = _ENDED[ended["type"]]
        if phase == "done":
            return QueuedJob(number, phase, ended["type"], "is done", 0)
        why = "" if code is not None else f"Kubernetes ended the job: {message}"
        return QueuedJob(number, phase, ended["type"], f"has failed ({message})", code, why)
    running = [pod.metadata.name for pod in pods if pod.status.phase == "Running"]
    if running:
        return QueuedJob(number, "running", "Running", f"runs in {', '.join(sorted(running)[:3])}")
    reason = next((why for pod in pods for why in _waits(pod)), "")
    if not reason and any(one["type"] == "Suspended" for one in conditions):
        reason = "Suspended: a queue such as Kueue starts it"
    stuck = reason if reason.startswith(_NEVER) else ""
    text = f"waits ({reason})" if reason else "waits"
    blocked = text if reason.startswith("Unschedulable") else ""
    return QueuedJob(number, "waiting", "Pending", text, obstacle=blocked, never_starts=stuck)


def _exit_code(pod: Any) -> int | None:
    for status in pod.status.container_statuses or ():
        if status.name == NODE and status.state.terminated is not None:
            return int(status.state.terminated.exit_code)
    return None


def _waits(pod: Any) -> Iterator[str]:
    """Why a pod does not start."""
    for one in pod.status.conditions or ():
        if one.type == "PodScheduled" and one.status == "False":
            yield f"{one.reason}: {one.message}"
    for status in [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]:
        if status.state.waiting is not None and status.state.waiting.reason not in (None, "PodInitializing"):
            waiting = status.state.waiting
            yield f"{waiting.reason}: {waiting.message}" if waiting.message else waiting.reason


# --- the client


@contextlib.contextmanager
def _asking(context: str | None) -> Iterator[_Api]:
    """The client. MachineError where there is no configuration, no answer, or no permission to ask."""
    QUEUE.require()
    import kubernetes
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield _Api(context)
    except ConfigException as error:
        hint = "KUBECONFIG names the file, launch.kubernetes.context the context"
        raise MachineError(
            Problem("kubernetes-config", f"no cluster is configured: {error}", hint=hint)
        ) from None
    except (HTTPError, OSError) as error:
        message = f"the cluster gives no answer: {_short(error)}"
        hint = "`kubectl cluster-info` asks the same address"
        raise MachineError(Problem("kubernetes-no-answer", message, hint=hint)) from None
    except kubernetes.client.ApiException as error:
        code = "kubernetes-permission" if error.status in (401, 403) else "kubernetes-no-answer"
        hint = "`kubectl auth can-i --list` shows what you may do"
        raise MachineError(Problem(code, f"the cluster refuses: {_said(error)}", hint=hint)) from None


class _Api:
    """The calls that are needed, the same for all kinds."""

    def __init__(self, context: str | None) -> None:
        from kubernetes import client, config

        configuration = client.Configuration()
        self.namespace = "default"
        try:
            file = os.environ.get("KUBECONFIG")
            config.load_kube_config(file, context, client_configuration=configuration)
            every, current = config.list_kube_config_contexts(file)
            chosen = next((one for one in every if one["name"] == context), current)
            self.namespace = chosen["context"].get("namespace", "default")
        except config.ConfigException:
            if context is not None:
                raise
            config.load_incluster_config(client_configuration=configuration)
            own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
            self.namespace = own.read_text("utf-8").strip()
        configuration.retries = 1
        made = client.ApiClient(configuration)
        self.core, self.custom = client.CoreV1Api(made), client.CustomObjectsApi(made)
        self.refused: type[Exception] = client.ApiException

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        group = _group(kind)
        found = self._found(self.custom.get_namespaced_custom_object, *group, namespace, _PLURALS[kind], name)
        return found if found is None else dict(found)

    def pods(self, namespace: str, name: str) -> list[Any]:
        """The pods of a run, the oldest first."""
        listed = self.core.list_namespaced_pod(
            namespace, label_selector=f"{LABEL}={name}", _request_timeout=_ANSWER_S
        )
        return sorted(listed.items, key=lambda pod: (str(pod.metadata.creation_timestamp), pod.metadata.name))

    def log(self, namespace: str, pod: str, since: str) -> str:
        more = {}
        if since:
            then = datetime.fromisoformat(since[:19]).replace(tzinfo=UTC)
            more["since_seconds"] = int((datetime.now(UTC) - then).total_seconds()) + 2
        text = self._found(self.core.read_namespaced_pod_log, pod, namespace, timestamps=True, **more)
        return text or ""

    def create(self, namespace: str, body: Object, *, dry_run: bool = False) -> Problem | None:
        """Create an object, or let the cluster check it; the problem where it rejects it."""
        core = {"ConfigMap": self.core.create_namespaced_config_map,
                "Service": self.core.create_namespaced_service}  # fmt: skip
        kind = body["kind"]
        # Not the default, which drops unknown fields with a warning.
        more = {"_request_timeout": _ANSWER_S, "field_validation": "Strict"}
        more |= {"dry_run": "All"} if dry_run else {}
        try:
            if kind in core:
                core[kind](namespace, body, **more)
            else:
                self.custom.create_namespaced_custom_object(
                    *_group(kind, body["apiVersion"]), namespace, _PLURALS[kind], body, **more
                )
        except self.refused as error:
            return _rejected(error, kind, namespace)
        return None

    def delete(self, kind: str, namespace: str, name: str) -> None:
        core = {"ConfigMap": self.core.delete_namespaced_config_map,
                "Service": self.core.delete_namespaced_service}  # fmt: skip
        if kind in core:
            self._found(core[kind], name, namespace)
        else:
            self._found(
                self.custom.delete_namespaced_custom_object, *_group(kind), namespace, _PLURALS[kind], name,
                propagation_policy="Foreground",
            )  # fmt: skip

    def mark_cancelled(self, namespace: str, name: str) -> None:
        body = {"metadata": {"annotations": {f"{LABEL}-cancelled": "true"}}}
        self._found(self.core.patch_namespaced_config_map, name, namespace, body)

    def is_cancelled(self, namespace: str, name: str) -> bool:
        found = self._found(self.core.read_namespaced_config_map, name, namespace)
        return found is not None and f"{LABEL}-cancelled" in (found.metadata.annotations or {})

    def is_absent(self, call: Callable[..., Any], *names: str) -> bool:
        """Whether something is not there; False where it may not be looked at."""
        try:
            return self._found(call, *names) is None
        except self.refused as error:
            if getattr(error, "status", None) == 403:
                return False
            raise

    def _found(self, call: Callable[..., Any], *names: Any, **more: Any) -> Any:
        """The answer of a call; None for what does not exist."""
        try:
            return call(*names, _request_timeout=_ANSWER_S, **more)
        except self.refused as error:
            if getattr(error, "status", None) == 404:
                return None
            raise


def _group(kind: str, version: str = "") -> tuple[str, str]:
    """Group and version of a kind."""
    known = {"Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
    group, _, number = (version or known.get(kind, "trainer.kubeflow.org/v1alpha1")).partition("/")
    return group, number


def _rejected(error: Any, kind: str, namespace: str) -> Problem:
    """The cluster's rejection as a problem of the recipe."""
    said = _said(error)
    if error.status == 401 or "cannot create" in said:
        hint = "`kubectl auth can-i --list` shows what you may do"
        message = f"you may not create {kind}: {said}"
        return Problem("kubernetes-permission", message, path=f"{_SECTION}.namespace", hint=hint)
    if error.status == 404 and "namespaces" in said:
        message = f"the cluster has no namespace {namespace}"
        hint = "`kubectl get namespaces` lists them"
        return Problem("kubernetes-namespace", message, path=f"{_SECTION}.namespace", hint=hint)
    if error.status == 404:
        message = f"this cluster does not know {kind}"
        hint = "install Kubeflow Trainer v2, or write `kind: job`"
        return Problem("kubernetes-kind", message, path=f"{_SECTION}.kind", hint=hint)
    if error.status == 409:
        hint = "`submit RUN_DIR --requeue` starts it again; another --output-dir is another job"
        return Problem("already-submitted", f"{kind} exists: {said}", path=_SECTION, hint=hint)
    return Problem("kubernetes-refused", f"the cluster rejects the {kind}: {said}", path=_SECTION)


def _said(error: Any) -> str:
    """The message of an answer of the API."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _short(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return str(reason).partition("(Caused by")[0].rpartition(">: ")[2] or type(error).__name__
