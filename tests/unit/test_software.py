"""What a plan's workers import; missing packages are named with what installs them."""

import platform
import sys
from importlib import metadata

import pytest
from factories import plan

from launcher.errors import MachineError
from launcher.execute.start_checks import check_machine
from launcher.knowledge.doctor.needs import NEEDED, needed_modules
from launcher.machine.software import PACKAGES, installed_versions, require_modules


def test_what_is_installed_passes():
    require_modules(["json", "yaml"])


def test_what_is_missing_is_named():
    with pytest.raises(MachineError, match="not installed: no_such_module_x") as caught:
        require_modules(["json", "no_such_module_x"])
    assert "effilaunch[train]" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("absent", "hint"),
    [
        (["torch"], "pip install 'effilaunch[train]'"),
        (["torch", "trl"], "pip install 'effilaunch[train,dpo]'"),
        (["flash_attn"], "pip install flash-attn --no-build-isolation"),
        (["liger_kernel"], "pip install 'effilaunch[liger]'"),
        (["tensorboard", "trackio"], "pip install 'effilaunch[trackers]'"),
        (["wandb", "trackio"], "pip install 'effilaunch[train,trackers]'"),
        (["mlflow"], "pip install mlflow"),
        (
            ["peft", "flash_attn"],
            "pip install 'effilaunch[train]'; pip install flash-attn --no-build-isolation",
        ),
    ],
)
def test_the_hint_installs_what_is_missing(monkeypatch, absent, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    with pytest.raises(MachineError) as caught:
        require_modules(["yaml", *absent])
    (problem,) = caught.value.problems
    assert problem.code == "package-missing"
    assert problem.message == f"not installed: {', '.join(absent)}"
    assert problem.hint == hint


FLASH = {"model__attn_implementation": "flash_attention_2"}


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, ["peft"]),
        ({"adapter": "null", "sharding__offload_optimizer": "cpu"}, ["deepspeed"]),
        ({"model__quantization": "nf4", "sharding__engine": "ddp"}, ["peft", "bitsandbytes"]),
        ({"task": "dpo"}, ["peft", "trl"]),
        ({"trainer__use_liger_kernel": "true"}, ["peft", "liger_kernel"]),
        ({"trainer__use_liger_kernel": "false"}, ["peft"]),
        (FLASH, ["peft", "flash_attn"]),
        ({"trainer__report_to": "trackio"}, ["peft", "trackio"]),
        ({"trainer__report_to": "[tensorboard, wandb]"}, ["peft", "tensorboard", "wandb"]),
        ({"trainer__report_to": "all"}, ["peft"]),
    ],
)
def test_what_the_workers_of_a_plan_import(tmp_path, monkeypatch, given, more):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = plan(tmp_path, "1xA100-80GB", **given)
    assert needed_modules(made) == [*NEEDED, *more]


def test_the_hubs_kernel_stands_in_for_flash_attn(tmp_path, monkeypatch):
    made = plan(tmp_path, "1xA100-80GB", **FLASH)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "kernels" else None)
    assert "flash_attn" not in needed_modules(made)


def test_a_run_whose_tracker_is_missing_does_not_start(tmp_path, monkeypatch):
    made = plan(tmp_path, "1xA100-80GB", trainer__report_to="[wandb, trackio]")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else object())
    with pytest.raises(MachineError, match="not installed: trackio") as caught:
        check_machine(made)
    assert caught.value.exit_code == 4
    assert caught.value.problems[0].hint == "pip install 'effilaunch[trackers]'"


def test_tensorboardx_stands_in_for_tensorboard(tmp_path, monkeypatch):
    made = plan(tmp_path, "1xA100-80GB", trainer__report_to="tensorboard")
    assert "tensorboard" in needed_modules(made)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "tensorboardX" else None)
    assert "tensorboard" not in needed_modules(made)


def test_versions_are_those_of_the_packages_metadata():
    said = {}
    for package in PACKAGES:
        try:
            said[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    assert {"torch", "transformers"} <= said.keys()
    assert installed_versions() == {"python": platform.python_version()} | said


def test_a_version_is_the_first_on_the_path_in_any_spelling(tmp_path, monkeypatch):
    for place, name in [("a", "Liger_Kernel-1.2.3+cpu"), ("b", "liger_kernel-9.9"), ("b", "trl-0.1.0")]:
        (tmp_path / place / f"{name}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / place) for place in ("no", "a", "b")), *sys.path])
    found = installed_versions()
    assert (found["liger-kernel"], found["trl"]) == ("1.2.3+cpu", "0.1.0")


def test_a_package_with_egg_info_has_its_version_too(tmp_path, monkeypatch):
    """As Debian's own packages and old conda ones are installed."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("")
    (tmp_path / "wandb-0.0.7-py3.11.egg-info").mkdir()
    (tmp_path / "wandb-0.0.7-py3.11.egg-info" / "PKG-INFO").write_text("Name: wandb\nVersion: 0.0.7\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert installed_versions()["wandb"] == "0.0.7"
