"""Ray: what is submitted, states of jobs, and what the driver decides."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import facts, recipe

from launcher.machine.hardware import parse_hardware
from launcher.planner.planner import make_plan
from launcher.schedulers.queue import PlannedRun, Submission
from launcher.schedulers.ray import QUEUE, as_job

BASE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
launch: {max_restarts: 2, ray: RAY}
"""


def rendered(folder: Path, asked: str = "{}", hardware: str = "2x8xA100-80GB", **more) -> dict:
    """ray.json of a run with these options."""
    loaded = recipe(folder, BASE.replace("RAY", asked))
    run = PlannedRun(folder / "it's a run", make_plan(loaded, facts(hardware)), {})
    on = parse_hardware(hardware)
    job = Submission("tune", "python3", "/home/me", run.run_dir, on, loaded.recipe.launch, (run,), **more)
    ((name, text),) = QUEUE.render(job).items()
    assert name == "ray.json"
    return json.loads(text)


def test_a_node_is_a_bundle_with_its_devices_and_cpus(tmp_path):
    driver = rendered(tmp_path)["driver"]
    assert driver["bundle"] == {"CPU": 8, "GPU": 8}
    assert (driver["nodes"], driver["max_restarts"], driver["cwd"]) == (2, 2, "/home/me")
    assert rendered(tmp_path, "{cpus_per_node: 96, resources: {rack: 0.5}}")["driver"]["bundle"] == {
        "CPU": 96, "GPU": 8, "rack": 0.5,
    }  # fmt: skip
    assert rendered(tmp_path, hardware="2x3xcpu")["driver"]["bundle"] == {"CPU": 3}


def test_ray_waits_for_a_stop_longer_than_the_driver_does(tmp_path):
    """And the driver longer than a step and a save take."""
    found = rendered(tmp_path, "{runtime_env: {env_vars: {A: b}, pip: [x]}}")
    env = found["job"]["runtime_env"]["env_vars"]
    plan = make_plan(recipe(tmp_path, BASE.replace("RAY", "{}")), facts("2x8xA100-80GB"))
    assert found["job"]["runtime_env"]["pip"] == ["x"]
    assert env["A"] == "b" == found["driver"]["env"]["A"]
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) > found["driver"]["stop_seconds"] > plan.runtime.stop_seconds


def test_the_entrypoint_reports_a_python_without_effilaunch(tmp_path):
    """Exit status 4 and one error, whatever characters the run directory has."""
    (tmp_path / "python").write_text('#!/bin/sh\nif [ "$1" = -c ]; then exit 1; fi\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    entrypoint = rendered(tmp_path, f"{{python: {tmp_path}/python}}")["job"]["entrypoint"]
    done = subprocess.run(entrypoint, shell=True, capture_output=True, text=True)  # noqa: S602 as Ray does
    start, error = done.stdout.splitlines()
    assert done.returncode == 4
    assert start.startswith("==== start ")
    assert error.startswith("error: ")
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s|" "$@"\n')
    done = subprocess.run(entrypoint, shell=True, capture_output=True, text=True)  # noqa: S602
    assert done.stdout.splitlines()[1] == f"-m|launcher.schedulers.ray_job|{tmp_path}/it's a run|"


STATES = [
    ("PENDING", None, None, "waiting", None, False),
    ("RUNNING", None, None, "running", None, False),
    ("SUCCEEDED", 0, "Job finished successfully.", "done", 0, False),
    ("STOPPED", None, None, "cancelled", None, False),
    ("FAILED", 5, "Job entrypoint command failed with exit code 5", "failed", 5, False),
    ("FAILED", None, "runtime_env setup failed\nmore", "failed", None, True),
    ("FAILED", -9, "Job entrypoint command failed with exit code -9", "failed", -9, True),
]


@pytest.mark.parametrize(("state", "code", "message", "phase", "ours", "by_ray"), STATES)
def test_states_of_ray(state, code, message, phase, ours, by_ray):
    info = SimpleNamespace(status=SimpleNamespace(value=state), driver_exit_code=code, message=message)
    job = as_job("http://head:8265/raysubmit_1", info)
    assert (job.phase, job.code, bool(job.failure)) == (phase, ours, by_ray)
    assert "more" not in job.failure


def test_every_state_of_ray_is_known():
    common = pytest.importorskip("ray.dashboard.modules.job.common")
    from launcher.schedulers.ray import _PHASES

    assert {state.value for state in common.JobStatus} == set(_PHASES)


class Clock:
    def __init__(self, monkeypatch, module):
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def driver():
    return pytest.importorskip("launcher.schedulers.ray_job")


def test_after_a_failure_the_other_nodes_have_time_then_are_stopped_and_killed(driver, monkeypatch):
    clock, steps = Clock(monkeypatch, driver), driver._Escalation(100)
    steps.begin()
    sent = {}
    for clock.now in range(300):
        if number := steps.due():
            sent[number] = clock.now
    assert sent == {signal.SIGTERM: driver.END_S, signal.SIGKILL: driver.END_S + 100}
    assert steps.is_over


def test_a_stop_is_passed_on_at_once_and_a_second_one_kills(driver, monkeypatch):
    clock, steps = Clock(monkeypatch, driver), driver._Escalation(100)
    steps.asked(1)
    assert (steps.due(), steps.due()) == (signal.SIGTERM, 0)
    clock.now = 5.0
    steps.asked(2)
    assert (steps.due(), steps.due()) == (signal.SIGKILL, 0)


ENDINGS = [
    ([0, 0], 0),
    ([130, 130], 130),
    ([5, 130], 5),
    ([0, 4], 4),
    ([None, 130], 5),
]


@pytest.mark.parametrize(("codes", "status"), ENDINGS)
def test_one_exit_status_of_all_nodes(driver, codes, status):
    endings = [(rank, code, "") for rank, code in enumerate(codes)]
    assert driver.exit_code(endings, SimpleNamespace(is_elastic=False)) == status
    first = 5 if codes[0] is None else codes[0]
    assert driver.exit_code(endings, SimpleNamespace(is_elastic=True)) == (
        status if codes[0] is None else first
    )


def test_a_run_directory_that_the_head_does_not_see_is_a_machine_error(driver, tmp_path, capsys):
    assert driver.main([str(tmp_path / "run")]) == 4
    assert capsys.readouterr().out.startswith(f"error: the head node does not see {tmp_path}")
