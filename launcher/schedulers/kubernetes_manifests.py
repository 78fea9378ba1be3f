"""The Kubernetes objects of a run: TrainJob or Indexed Job, as nested values. Pure.

Checked with the models of `kubeflow-trainer-api` 2.3 (Kubeflow Trainer v2, JobSet v1alpha2) and with
`kubernetes-validate`. Kubeflow Trainer takes the pods from a TrainingRuntime, which is written for each run;
in it is the specification of the JobSet that it creates.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from launcher.execute.run_dir import SUBMITTED
from launcher.machine.job_member import RENDEZVOUS_PORT
from launcher.recipe.schema import KubernetesSection
from launcher.schedulers.queue import ASKED_TO_STOP, PlannedRun, Submission
from launcher.schedulers.remote import prepare_script, run_script

Object = dict[str, Any]
LABEL = "effilaunch.dev/job"
"""Label of all objects and pods of a run: its name."""
FOLDER = "/etc/effilaunch"
"""Where the pods see the recipe."""
NODE, PREPARE = "node", "prepare"
"""Names of the containers, and of the jobs in a TrainJob. Kubeflow Trainer knows the first as the trainer."""
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
FINAL = (2, 3, 4)
"""Exit statuses that would repeat: the recipe, no plan that fits, the machine."""
_LEAVE_S = 60
"""Between the checkpoint of a stopped run and the end of its pod."""
_LONGEST = 40
"""Of a job's name: the pods of a TrainJob have it with 21 characters more, and 63 are allowed."""


def job_name(job: Submission, run: PlannedRun) -> str:
    """The name of a run's objects; another one for another run directory."""
    tail = f"-{hashlib.sha256(str(run.run_dir).encode()).hexdigest()[:8]}"
    stem = re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")
    stem = stem if re.match("[a-z]", stem) else f"run-{stem}"
    return stem[: _LONGEST - len(tail)].rstrip("-") + tail


def remote_run_dir(job: Submission, name: str) -> str:
    return f"{job.launch.kubernetes.runs}/{name}"


def manifests(job: Submission, run: PlannedRun) -> list[Object]:
    """The objects of a run, in the order in which they are created; the last one is the job."""
    asked, name = job.launch.kubernetes, job_name(job, run)
    recipe = _object("v1", "ConfigMap", name, asked) | {"data": {SUBMITTED: run.snapshot}}
    if asked.kind == "job":
        return [recipe, *_indexed_job(job, name)]
    policy = {"numNodes": job.hardware.num_nodes, "torch": {}}
    trainer = "trainer.kubeflow.org/v1alpha1"
    runtime = _object(trainer, "TrainingRuntime", name, asked)
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    sizes = {"numNodes": job.hardware.num_nodes}
    return [
        recipe,
        runtime | {"spec": {"mlPolicy": policy, "template": {"spec": _job_set_spec(job, name)}}},
        _object(trainer, "TrainJob", name, asked) | {"spec": {"runtimeRef": reference, "trainer": sizes}},
    ]


def _object(version: str, kind: str, name: str, asked: KubernetesSection) -> Object:
    metadata: Object = {"name": name, "labels": {**asked.labels, LABEL: name}}
    if asked.namespace:
        metadata["namespace"] = asked.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _job_set_spec(job: Submission, name: str) -> Object:
    asked = job.launch.kubernetes
    nodes = {
        "name": NODE,
        "replicas": 1,
        "template": {
            "metadata": {"labels": {ANCESTOR: "trainer"}},
            "spec": _job_spec(_pod(job, name, NODE), job.hardware.num_nodes),
        },
    }
    jobs = [nodes]
    if asked.prepare:
        prepare = {
            "template": {"spec": _job_spec(_pod(job, name, PREPARE), 1)},
            "name": PREPARE,
            "replicas": 1,
        }
        jobs = [prepare, nodes | {"dependsOn": [{"name": PREPARE, "status": "Complete"}]}]
    stopped = "|".join(map(str, ASKED_TO_STOP))
    rules = [
        {
            "name": "stopped",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureMessagePatterns": [f"exit code ({stopped}) ", "has condition DisruptionTarget"],
        },
        {
            "name": "final",
            "action": "FailJobSet",
            "onJobFailureMessagePatterns": [f"exit code ({'|'.join(map(str, FINAL))}) "],
        },
    ]
    return {"replicatedJobs": jobs, "failurePolicy": {"maxRestarts": asked.restarts, "rules": rules}}


def _job_spec(pod: Object, nodes: int) -> Object:
    """An Indexed Job that fails with its first pod, for a message with the exit code."""
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [*FINAL, *ASKED_TO_STOP]}},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod,
    }


def _indexed_job(job: Submission, name: str) -> list[Object]:
    """A Job alone, and the Service by which its pods find the first; Kubernetes replaces pods one by one."""
    asked, nodes = job.launch.kubernetes, job.hardware.num_nodes
    pod = _pod(job, name, NODE)
    if asked.prepare:
        pod["spec"]["initContainers"] = _pod(job, name, PREPARE)["spec"]["containers"]
    spec = _job_spec(pod, nodes) | {"backoffLimit": asked.restarts * nodes}
    spec["podFailurePolicy"] = {
        "rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [*FINAL]}},
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [*ASKED_TO_STOP]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }
    whole = _object("batch/v1", "Job", name, asked) | {"spec": spec}
    if nodes == 1:
        return [whole]
    pod["spec"]["subdomain"] = name
    service = _object("v1", "Service", name, asked)
    ports = [{"name": "rendezvous", "port": RENDEZVOUS_PORT}]
    selects = {"clusterIP": "None", "publishNotReadyAddresses": True, "ports": ports}
    return [service | {"spec": {**selects, "selector": {LABEL: name}}}, whole]


def _script(job: Submission, name: str, role: str) -> str:
    asked, recipe = job.launch.kubernetes, f"{FOLDER}/{SUBMITTED}"
    if role == PREPARE:
        return prepare_script(recipe, tiny=job.tiny, setup=asked.setup)
    if asked.kind == "trainjob":
        rank, head = '"$node_rank"', f'"$head:{RENDEZVOUS_PORT}"'
        # torchrun, which the run starts, would take Kubeflow's variables for its own options.
        ours = "node_rank=${PET_NODE_RANK:-0} head=${PET_MASTER_ADDR:-localhost}"
        setup = [ours, "unset ${!PET_@}", *asked.setup]
    else:
        rank, head = '"${JOB_COMPLETION_INDEX:-0}"', f"{name}-0.{name}:{RENDEZVOUS_PORT}"
        setup = asked.setup
    return run_script(
        recipe, remote_run_dir(job, name), rank=rank, head=head, nodes=job.hardware.num_nodes, tiny=job.tiny,
        setup=setup,
    )  # fmt: skip


def _pod(job: Submission, name: str, role: str) -> Object:
    """The template of the pods; `role` names their container."""
    asked = job.launch.kubernetes
    container = {
        "name": role,
        "image": asked.image,
        "command": ["bash", "-c", _script(job, name, role)],
        "env": [{"name": "EFFILAUNCH_CACHE", "value": f"{asked.runs}/cache"}],
        "envFrom": [{"secretRef": {"name": secret}} for secret in asked.secrets],
        "resources": _resources(job, role),
        "volumeMounts": [
            {"name": "recipe", "mountPath": FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": f"volume-{index}", "mountPath": volume.path, "readOnly": volume.read_only}
                for index, volume in enumerate(asked.volumes)
            ),
        ],
    }
    memory: Object = {"medium": "Memory"} | ({"sizeLimit": asked.shm} if asked.shm else {})
    volumes: list[Object] = [
        {"name": "recipe", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": memory},
        *(
            {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for index, volume in enumerate(asked.volumes)
        ),
    ]
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.stop_seconds + _LEAVE_S,
        "serviceAccountName": asked.service_account,
        "priorityClassName": asked.priority_class,
        "nodeSelector": asked.node_selector,
        "tolerations": asked.tolerations,
        "imagePullSecrets": [{"name": secret} for secret in asked.image_pull_secrets],
        "containers": [_without_empty(container)],
        "volumes": volumes,
    }
    return {"metadata": {"labels": {**asked.labels, LABEL: name}}, "spec": _without_empty(spec)}


def _resources(job: Submission, role: str) -> Object:
    asked, hardware = job.launch.kubernetes, job.hardware
    cpus = asked.cpus or (hardware.devices_per_node if hardware.is_cpu else None)
    requests = {"cpu": None if cpus is None else str(cpus), "memory": asked.memory}
    limits = {"memory": asked.memory}
    if role == NODE and not hardware.is_cpu:
        limits[asked.device] = str(hardware.devices_per_node)
    return _without_empty({"requests": _without_empty(requests), "limits": _without_empty(limits)})


def _without_empty(values: Mapping[str, Any]) -> Object:
    return {key: value for key, value in values.items() if value not in (None, [], {})}
