"""An API server for the objects of `submit --to kubernetes`, and what a cluster would do with them.

No cluster can be had here. Paths, kinds and bodies are checked: TrainJob and TrainingRuntime with the models
of Kubeflow Trainer, the others with the schemas of Kubernetes. The containers of a created job run as
processes of this machine, with the variables that the controllers set, in the order of `dependsOn`; pod
failure policies, backoff limits and failure policies are applied to their exit codes as the controllers
document it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models
from kubernetes_validate import ValidationError

from launcher.schedulers.kubernetes_manifests import FOLDER

TRAINER, JOBSET = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
KINDS = {
    ("v1", "configmaps"): "ConfigMap",
    ("v1", "services"): "Service",
    ("batch/v1", "jobs"): "Job",
    (JOBSET, "jobsets"): "JobSet",
    (TRAINER, "trainingruntimes"): "TrainingRuntime",
    (TRAINER, "trainjobs"): "TrainJob",
}
MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "JobSet": models.JobsetV1alpha2JobSet,
}
PATH = re.compile(r"/(?:api|apis/([^/]+))/([^/]+)/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?(?:/(log))?")


def schema_error(body: dict) -> str:
    """Why the API would not take an object; empty where it would."""
    if (model := MODELS.get(body["kind"])) is None:
        try:
            kubernetes_validate.validate(body, kubernetes_validate.latest_version(), strict=True)
        except ValidationError as error:
            return str(error)
        return ""
    try:
        known = model.from_dict(body).to_dict()
    except ValueError as error:
        return str(error)
    if known != body:  # the models drop unknown fields
        return f"unknown fields: {json.dumps(body)} is read as {json.dumps(known)}"
    runtime = body["kind"] == "TrainingRuntime"
    for job in body["spec"]["template"]["spec"]["replicatedJobs"] if runtime else ():
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
        if why := schema_error({**whole, "metadata": {"name": "x", **whole["metadata"]}}):
            return why
    return ""


class Pod:
    """A pod: one container as a process."""

    def __init__(self, name: str, template: dict, role: str, folder: Path, environ: dict[str, str]) -> None:
        self.name, self.template = name, template
        self.started = datetime.now(UTC)
        self.environ, self.folder, self.role = environ, folder, role
        self.lines: list[tuple[str, str]] = []
        self.code: int | None = None
        self.process: subprocess.Popen[str] | None = None

    def run(self) -> int:
        (container,) = self.template["spec"]["containers"]
        words = [self.environ["REPLACED"].join(w.split(self.environ["PLACE"])) for w in container["command"]]
        words = [word.replace(FOLDER, str(self.folder)) for word in words]
        env = {**os.environ, **self.environ, **{one["name"]: one["value"] for one in container["env"]}}
        self.process = subprocess.Popen(
            words,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with self.process as process:
            for line in process.stdout:
                stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + f"{len(self.lines) % 1000:03}Z"
                self.lines.append((stamp, line))
        self.code = process.returncode
        return self.code

    def shown(self) -> dict:
        phase = "Running" if self.process and self.code is None else "Pending"
        phase = phase if self.code is None else "Failed" if self.code else "Succeeded"
        state = {"running": {}} if self.code is None else {"terminated": {"exitCode": self.code}}
        status = {"name": self.role, "state": state, "ready": False, "restartCount": 0, "image": "i",
                  "imageID": "i"}  # fmt: skip
        index = {"batch.kubernetes.io/job-completion-index": self.environ["JOB_COMPLETION_INDEX"]}
        labels = {**self.template["metadata"]["labels"], **index}
        return {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "labels": labels,
                         "creationTimestamp": self.started.strftime("%Y-%m-%dT%H:%M:%SZ")},
            "spec": self.template["spec"],
            "status": {"phase": phase, "containerStatuses": [status] if self.process else []},
        }  # fmt: skip


class Cluster:
    """The API and its controllers. `namespaces` exist; `forbidden` may not be written to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.namespaces, self.forbidden = folder, {"default", "closed"}, {"closed"}
        self.kinds = dict(KINDS)
        self.claims = {"data"}
        self.objects: dict[tuple[str, str, str], dict] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.pending: dict[str, dict] = {}
        self.requests: list[tuple[str, str]] = []
        self.restarts: dict[str, int] = {}
        self.runs_pods = True
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                code, answer = stub.answer(self.command, self.path, body)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(code)
                kind = "text/plain" if isinstance(answer, str) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do_PATCH = _answer

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        for pods in list(self.pods.values()):
            for pod in pods:
                self._kill(pod, signal.SIGKILL)
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self, port: int | None = None) -> str:
        server = f"http://127.0.0.1:{port or self.server.server_address[1]}"
        return yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "stub",
            "clusters": [{"name": "stub", "cluster": {"server": server}}],
            "users": [{"name": "me", "user": {"token": "value-of-a-secret"}}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "me"}}],
        })  # fmt: skip

    # --- the API

    def answer(self, method: str, target: str, body: dict | None) -> tuple[int, object]:
        split = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        found = PATH.fullmatch(split.path)
        self.requests.append((method, split.path))
        if found is None:
            return 404, "404 page not found"
        group, version, namespace, plural, name, log = found.groups()
        version = f"{group}/{version}" if group else version
        if (version, plural) in (("v1", "pods"), ("v1", "persistentvolumeclaims")):
            return self._read(plural, namespace, name, log, query)
        kind = self.kinds.get((version, plural))
        if kind is None:
            return 404, "404 page not found"
        if namespace not in self.namespaces and method == "POST":
            return status(404, f'namespaces "{namespace}" not found')
        key = (namespace, kind, name or "")
        match method:
            case "GET":
                return (200, self.objects[key]) if key in self.objects else status(404, f"{name} not found")
            case "POST":
                strict, trial = query.get("fieldValidation") == "Strict", query.get("dryRun") == "All"
                return self._create(namespace, kind, version, body, strict=strict, is_trial=trial)
            case "DELETE":
                return self._delete(key)
            case _:
                kept = self.objects[key]["metadata"].setdefault("annotations", {})
                kept.update(body["metadata"]["annotations"])
                return 200, self.objects[key]

    def _read(self, plural: str, namespace: str, name: str | None, log: str | None, query: dict):
        if plural == "persistentvolumeclaims":
            if name in self.claims:
                body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}
                return 200, body
            return status(404, f'persistentvolumeclaims "{name}" not found')
        every = [pod for pods in self.pods.values() for pod in pods]
        if log:
            (pod,) = [pod for pod in every if pod.name == name]
            since = query.get("sinceSeconds")
            first = "" if since is None else datetime.fromtimestamp(
                time.time() - int(since), UTC).strftime("%Y-%m-%dT%H:%M:%S")  # fmt: skip
            return 200, "".join(f"{stamp} {line}" for stamp, line in pod.lines if stamp >= first)
        label, _, value = query["labelSelector"].partition("=")
        shown = [pod.shown() for pod in every]
        items = [one for one in shown if one["metadata"]["labels"].get(label) == value]
        if value in self.pending:
            items = [self.pending[value]]
        return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}

    def _create(self, namespace: str, kind: str, version: str, body: dict, *, strict: bool, is_trial: bool):
        name = body["metadata"]["name"]
        if (body["kind"], body["apiVersion"]) != (kind, version):
            return status(400, f"{body['kind']} {body['apiVersion']} does not match the path")
        if namespace in self.forbidden:
            return status(403, f'{kind} is forbidden: User "me" cannot create resource "{kind}"')
        if not strict:
            return status(400, "unknown fields would be dropped: no fieldValidation=Strict")
        if why := schema_error(body):
            return status(422, f"{kind} {name} is invalid: {why}")
        if (namespace, kind, name) in self.objects:
            return status(409, f'{kind} "{name}" already exists')
        if kind == "TrainJob" and (namespace, "TrainingRuntime", name) not in self.objects:
            return status(403, 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the '
                               "request: spec.runtimeRef: Invalid value: specified trainingRuntime must be "
                               "created before the TrainJob is created")  # fmt: skip
        if not is_trial:
            self.objects[namespace, kind, name] = body
            if kind in ("Job", "TrainJob") and self.runs_pods:
                threading.Thread(target=self._control, args=(namespace, kind, name), daemon=True).start()
        return 201, body

    def _delete(self, key: tuple[str, str, str]):
        body = self.objects.get(key)
        if body is None:
            return status(404, f"{key[2]} not found")
        if key[1] in ("Job", "JobSet", "TrainJob"):  # it stays until its pods have ended
            pods = self.pods.pop(key[2], [])
            threading.Thread(target=self._end, args=(key, pods), daemon=True).start()
        else:
            del self.objects[key]
        return 200, body

    def _end(self, key: tuple[str, str, str], pods: list[Pod]) -> None:
        for pod in pods:
            self._kill(pod, signal.SIGTERM)
        while any(pod.process is not None and pod.code is None for pod in pods):
            time.sleep(0.1)
        self.objects.pop(key, None)

    @staticmethod
    def _kill(pod: Pod, number: int) -> None:
        """As the kubelet: the signal goes to the first process of the container alone."""
        if pod.process is not None and pod.code is None:
            if number == signal.SIGKILL:
                os.killpg(pod.process.pid, number)
            else:
                pod.process.send_signal(number)

    # --- controllers and the kubelet

    def _control(self, namespace: str, kind: str, name: str) -> None:
        body = self.objects[namespace, kind, name]
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in self.objects[namespace, "ConfigMap", name]["data"].items():
            (folder / file).write_text(text)
        if kind == "Job":
            outcome = self._job(namespace, name, "node", body["spec"])
        else:
            runtime = self.objects[namespace, "TrainingRuntime", name]
            outcome = self._job_set(namespace, name, runtime["spec"]["template"]["spec"])
        failed = {"type": "Failed", "reason": "PodFailurePolicy"}
        condition = failed if outcome else {"type": "Complete", "reason": "Done"}
        body.setdefault("status", {})["conditions"] = [{**condition, "status": "True", "message": outcome}]

    def _job_set(self, namespace: str, name: str, spec: dict) -> str:
        """Its failure; empty where it is done."""
        policy = spec["failurePolicy"]
        while True:
            self.pods[name] = []
            for job in spec["replicatedJobs"]:
                message = self._job(namespace, name, job["name"], job["template"]["spec"])
                if message:
                    break
            if not message or name not in self.pods:  # done, or deleted meanwhile
                return message
            action = next(
                (rule["action"] for rule in policy["rules"]
                 if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])),
                "RestartJobSet",
            )  # fmt: skip
            count = self.restarts.get(name, 0)
            if action == "FailJobSet" or (action == "RestartJobSet" and count >= policy["maxRestarts"]):
                return message
            self.restarts[name] = count + 1

    def _job(self, namespace: str, name: str, role: str, spec: dict) -> str:
        """Its failure; empty where it is done. Failed pods are replaced up to `backoffLimit`, and those that
        a rule ignores without end."""
        pods = []
        for index in range(spec["completions"]):
            of_set = f"{name}-{role}-0-{index}"
            environ = {"JOB_COMPLETION_INDEX": str(index), "PET_NODE_RANK": str(index), "HOSTNAME": of_set,
                       "PET_MASTER_ADDR": "127.0.0.1", "PET_NNODES": str(spec["completions"]),
                       "PLACE": f"{name}-node-0-0.{name}", "REPLACED": "127.0.0.1"}  # fmt: skip
            pods.append(Pod(of_set, spec["template"], role, self.folder / name, environ))
        self.pods.setdefault(name, []).extend(pods)
        threads = [threading.Thread(target=pod.run, daemon=True) for pod in pods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = 0
        for pod in pods:
            while pod.code:
                rules = enumerate(spec["podFailurePolicy"]["rules"])
                index, action = next(
                    ((index, rule["action"]) for index, rule in rules
                     if pod.code in rule.get("onExitCodes", {}).get("values", ())), (0, "Count")
                )  # fmt: skip
                if action == "FailJob":
                    return (f"Container {role} for pod {namespace}/{pod.name} failed with exit code "
                            f"{pod.code} matching {action} rule at index {index}")  # fmt: skip
                failures += action == "Count"
                if failures > spec["backoffLimit"] or name not in self.pods:
                    return "Job has reached the specified backoff limit"
                self.restarts[name] = self.restarts.get(name, 0) + 1
                pod = Pod(f"{pod.name}-again", spec["template"], role, self.folder / name, pod.environ)
                self.pods.setdefault(name, []).append(pod)
                pod.run()
        return ""


def status(code: int, message: str) -> tuple[int, dict]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
