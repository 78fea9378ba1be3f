"""What `submit --to kubernetes` writes: golden manifests that the models and schemas of each kind accept."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from factories import facts, recipe
from kubernetes_stub import schema_error

from launcher.machine.hardware import parse_hardware
from launcher.planner.planner import make_plan
from launcher.schedulers.kubernetes import QUEUE
from launcher.schedulers.queue import PlannedRun, Submission

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
RECIPE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: /data/rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
launch:
  kubernetes:
    image: registry.example/effilaunch:1
    runs: /data/runs
    volumes: [{claim: data, path: /data}, {claim: models, path: /models, read_only: true}]
    secrets: [hf]
    image_pull_secrets: [registry]
    namespace: team
    cpus: 32
    memory: 512Gi
    shm: 64Gi
    node_selector: {gpu: a100}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    service_account: trainer
    priority_class: high
    labels: {kueue.x-k8s.io/queue-name: team}
    setup: [export NCCL_SOCKET_IFNAME=eth0]
"""


def submission(folder: Path, kind: str, on: str, text: str = RECIPE) -> Submission:
    loaded = recipe(folder, f"{text}    kind: {kind}\n")
    plan = make_plan(loaded, facts(on))
    run = PlannedRun(Path("/home/me/runs/tune"), plan, {}, "model: {name_or_path: m}\n")
    hardware, launch = parse_hardware(on), loaded.recipe.launch
    return Submission("tune", "python", "/home/me", run.run_dir, hardware, launch, (run,))


@pytest.mark.parametrize("on", ["2x8xA100-80GB", "1xcpu"])
@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_the_manifests_are_golden_and_accepted(kind, on, tmp_path):
    text = QUEUE.render(submission(tmp_path, kind, on))["job.yaml"]
    for body in yaml.safe_load_all(text):
        assert schema_error(body) == "", body["kind"]
    golden = GOLDEN / f"{kind}-{on}.yaml"
    if os.environ.get("EFFILAUNCH_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_a_misspelt_or_mistyped_field_is_noticed(kind, tmp_path):
    bodies = list(yaml.safe_load_all(QUEUE.render(submission(tmp_path, kind, "2x8xA100-80GB"))["job.yaml"]))
    for body in bodies:
        for spot in _mappings(body):
            broken = copy.deepcopy(body)
            _at(broken, spot)["misspelt"] = 1
            assert schema_error(broken) != "" or "labels" in spot or "data" in spot, spot


def _mappings(value, path=()):
    """The places of all mappings whose keys are fields."""
    free = ("labels", "nodeSelector", "limits", "requests", "torch", "selector", "data", "emptyDir")
    if isinstance(value, dict) and (not path or path[-1] not in free):
        yield path
        for key, child in value.items():
            yield from _mappings(child, (*path, key))
    if isinstance(value, list):
        for index, child in enumerate(value):
            yield from _mappings(child, (*path, index))


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def test_names_are_valid_and_differ_by_run_directory(tmp_path):
    job = submission(tmp_path, "job", "1xcpu")
    plan = job.runs[0].plan
    names = set()
    for stem in ("tune", "7B_Tune.v2", "x" * 80, "Ä"):
        for run_dir in ("/a", "/b"):
            one = replace(job, name=stem, runs=(PlannedRun(Path(run_dir), plan, {}),))
            (*_, body) = yaml.safe_load_all(QUEUE.render(one)["job.yaml"])
            names.add(body["metadata"]["name"])
    assert len(names) == 8
    assert all(len(name) <= 40 and name.isascii() and name[0].isalpha() for name in names)
