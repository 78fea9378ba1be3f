"""The built wheel works with the checkout gone: base dependencies only, no PYTHONPATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_NO_CHECKOUT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
}


def call(*argv: object, cwd, code: int | None = 0) -> str:
    done = subprocess.run(
        [str(part) for part in argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=NEEDS_NO_CHECKOUT,
        check=False,
        timeout=300,
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("effilaunch-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a fresh environment that holds the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    call(*pip, "install", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return folder / "bin"


def test_wheel_carries_the_data(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("recipes", "*.yaml"), ("ds_configs", "*.json")):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern)]
        assert files
        assert {f"launcher/_data/{name}" for name in files} <= packed
    assert "launcher/facts/data/models.json" in packed
    assert "launcher/py.typed" in packed
    assert "launcher/lint/tables/deepspeed.json" in packed
    assert not [name for name in packed if name.startswith(("tests/", "recipes/", "benchmarks/"))]


def test_wheel_works_without_the_checkout(installed, tmp_path):
    effilaunch = installed / "effilaunch"
    where = call(installed / "python", "-c", "import launcher; print(launcher.__file__)", cwd=tmp_path)
    assert str(ROOT / "launcher") not in where

    listed = json.loads(call(effilaunch, "recipes", "--json", cwd=tmp_path))
    text = json.dumps(listed)
    assert all(path.stem in text for path in (ROOT / "recipes").glob("*.yaml"))

    plan = json.loads(
        call(effilaunch, "plan", "starcoder_lora", "--on", "8xA100-80GB", "--json", cwd=tmp_path)
    )
    assert plan["schema_version"] == 1
    assert plan["hardware"]["devices_per_node"] == 8
    # A base profile by name is found inside the wheel.
    plan = json.loads(call(effilaunch, "plan", "llama_7b_full_zero3", "--json", cwd=tmp_path))
    assert plan["ds_config"]["zero_optimization"]["stage"] == 3


def test_lint_diagnose_and_doctor_work_without_the_training_stack(installed, tmp_path):
    effilaunch = installed / "effilaunch"
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "gradient_cliping": 1.0}', encoding="utf-8")
    linted = call(effilaunch, "lint", "ds.json", "--json", cwd=tmp_path, code=2)
    assert [finding["code"] for finding in json.loads(linted)["findings"]] == ["ds-typo-toplevel"]

    log = ROOT / "tests/corpus/known/bf16-no-device.log"
    diagnosed = json.loads(call(effilaunch, "diagnose", log, "--json", cwd=tmp_path))
    assert [finding["id"] for finding in diagnosed["findings"]] == ["bf16-no-device"]

    checks = json.loads(call(effilaunch, "doctor", "--json", cwd=tmp_path, code=None))["checks"]
    found = {check["id"]: check for check in checks}
    assert found["torch"]["status"] == "warn"
    assert "torch" in found["torch"]["message"]
    assert found["versions"]["status"] == "ok"


def test_wheel_needs_only_the_base_dependencies(installed, tmp_path):
    listed = call(installed / "python", "-m", "pip", "list", "--format=json", cwd=tmp_path)
    names = {package["name"].lower() for package in json.loads(listed)}
    assert {"packaging", "pydantic", "pyyaml"} <= names
    assert not names & {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets"}
