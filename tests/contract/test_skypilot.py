"""What `submit --to skypilot` writes: golden tasks, which SkyPilot reads, and the options of its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from factories import facts, recipe

from launcher.machine.hardware import parse_hardware
from launcher.planner.planner import make_plan
from launcher.schedulers.queue import PlannedRun, Submission
from launcher.schedulers.skypilot import QUEUE, accelerator

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "skypilot"
VERSION = "0.14.1"
RECIPE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: /data/rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
launch:
  skypilot:
"""
SMALL = "    setup: [pip install effilaunch]\n"
LARGE = """\
    infra: k8s/my-context
    spot: false
    image: docker:registry.example/effilaunch:1
    cpus: 32
    memory: 256
    disk: 512
    mounts: {/data: my-volume}
    runs: /data/runs
    secrets: [HF_TOKEN]
    setup: [export NCCL_SOCKET_IFNAME=eth0, nvidia-smi]
    restarts: 1
"""
CASES = {"small-1xA100-80GB": SMALL, "small-2xcpu": SMALL, "large-2x8xH100-80GB": LARGE}


def task(folder: Path, case: str) -> str:
    on = case.partition("-")[2]
    loaded = recipe(folder, RECIPE + CASES[case])
    run = PlannedRun(Path("/home/me/runs/tune"), make_plan(loaded, facts(on)), {})
    launch, hardware = loaded.recipe.launch, parse_hardware(on)
    return QUEUE.render(Submission("tune", "python", "/", run.run_dir, hardware, launch, (run,)))["task.yaml"]


@pytest.fixture(scope="session")
def skypilot() -> Path:
    """An environment with SkyPilot alone: its dependencies exclude those of the training stack."""
    folder = ROOT / "build" / f"skypilot-{VERSION}"
    if not (folder / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", f"skypilot=={VERSION}"]
        subprocess.run(pip, check=True, capture_output=True)
        (folder / "installed").touch()
    return folder / "bin"


@pytest.mark.parametrize("case", CASES)
def test_the_tasks_are_golden(case, tmp_path):
    text = task(tmp_path, case)
    golden = GOLDEN / f"{case}.yaml"
    if os.environ.get("EFFILAUNCH_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


READ = """\
import json, sys
import sky
from sky.client.cli import command
for name in ("launch", "queue", "logs", "cancel"):
    params = command.jobs.commands[name].params
    print(json.dumps([option for one in params for option in (*one.opts, *one.secondary_opts)]))
for path in sys.argv[1:]:
    print(json.dumps(sky.Task.from_yaml(path).to_yaml_config(), default=str))
"""
USED = (("--yes", "--detach-run", "--name", "--secret"), ("--all", "--output"),
        ("job_id", "--no-follow", "--tail"), ("--yes", "--name"))  # fmt: skip
"""Options and arguments of `sky jobs launch`, `queue`, `logs` and `cancel`."""


@pytest.mark.cluster
def test_skypilot_reads_every_task_as_it_is_meant_and_has_the_options(skypilot, tmp_path):
    files = []
    for case in CASES:
        files.append(tmp_path / f"{case}.yaml")
        files[-1].write_text(task(tmp_path, case).replace("HF_TOKEN: null", "HF_TOKEN: x"))
    broken = tmp_path / "broken.yaml"
    broken.write_text(files[0].read_text().replace("num_nodes:", "nodes:"))
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [str(skypilot / "python"), "-c", READ, *map(str, files), str(broken)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1  # of the last one
    assert "nodes" in done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]
    options, tasks = shown[: len(USED)], shown[len(USED) :]
    assert [sorted(set(used) - set(has)) for used, has in zip(USED, options, strict=True)] == [[]] * 4
    for file, read in zip(files, tasks, strict=True):
        given = yaml.safe_load(file.read_text())
        assert read["run"] == given["run"]
        assert read.get("num_nodes", 1) == given["num_nodes"]
        assert read["resources"]["job_recovery"].items() >= given["resources"]["job_recovery"].items()
        device, _, count = given["resources"].get("accelerators", "").partition(":")
        assert read["resources"].get("accelerators") == ({device: int(count)} if device else None)


@pytest.mark.parametrize(
    ("on", "name"),
    [("8xA100-80GB", "A100-80GB"), ("1xA100-40GB", "A100"), ("1xRTX4090-24GB", "RTX4090"), ("1x24GB", None),
     ("cpu", None)],
)  # fmt: skip
def test_devices_by_the_names_of_skypilot(on, name):
    assert accelerator(parse_hardware(on)) == name
