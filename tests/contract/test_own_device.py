"""A rank compares its device with the plan: torch.cuda is a stub, since no GPU is here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from launcher.errors import MachineError
from launcher.machine.gpus import STARTED_FOR
from launcher.train.job import read_job
from launcher.train.machine import torch_facts, why_no_device
from launcher.train.own_device import check_cuda, check_device

sys.path.insert(0, str(Path(__file__).parent))
from plans import write_run

MIB = 2**20
T4 = {"name": "Tesla T4", "total_memory": 15109 * MIB, "major": 7, "minor": 5, "uuid": "aa"}
CPU = {
    "num_nodes": 1,
    "devices_per_node": 1,
    "device": "cpu",
    "device_bytes": None,
    "compute_capability": None,
}
ONE_T4 = {**CPU, "device": "T4-16GB", "device_bytes": 15360 * MIB, "compute_capability": 7.5}
CUDA = torch.device("cuda", 0)


def job(tmp_path, hardware):
    run = write_run(tmp_path / "run", {})
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "hardware": hardware}))
    return read_job(run)


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch see one GPU with these properties."""

    def install(**properties):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        found = SimpleNamespace(**{**T4, **properties})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    return install


def test_torch_says_why_it_sees_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_cuda(job(tmp_path, CPU))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MachineError) as caught:
        check_cuda(job(tmp_path, ONE_T4))
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == ("device-differs", 4)
    assert f"torch {torch.__version__} is built for the CPU" in problem.message
    assert "T4-16GB" in problem.message
    old = "The NVIDIA driver on your system is too old (found version 11040)."

    def init():
        raise RuntimeError(f"\n{old} Please update your GPU driver.\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(MachineError, match="too old") as caught:
        check_cuda(job(tmp_path, ONE_T4))
    assert old in caught.value.problems[0].message
    assert "more" not in caught.value.problems[0].message


def test_the_reason_of_this_torch(monkeypatch):
    """Of the installed build, whichever it is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_device(torch)
    if torch.version.cuda is None:
        assert "built for the CPU" in why_no_device(torch)


# properties of the device, planned, STARTED_FOR, is it the planned one
DEVICES = {
    "as planned": ({}, {}, "", True),
    "as started": ({}, {}, "GPU-aa,GPU-bb", True),
    "a larger one": ({"total_memory": 81000 * MIB, "major": 9, "minor": 0}, {}, "", True),
    "another one": ({}, {}, "GPU-bb,GPU-aa", False),
    "less memory": ({"total_memory": 8000 * MIB}, {}, "", False),
    "an older one": ({"major": 7, "minor": 0}, {}, "", False),
    "two digits": ({"major": 12, "minor": 0}, {"compute_capability": 12.1}, "", False),
    "ten is above nine": ({"major": 10, "minor": 0}, {"compute_capability": 9.0}, "", True),
    "unnamed": ({"major": 3}, {"device": "15GB", "compute_capability": None}, "", True),
}


@pytest.mark.parametrize("case", DEVICES)
def test_memory_capability_and_uuid_are_compared(tmp_path, gpu, monkeypatch, case):
    properties, planned, started, same = DEVICES[case]
    gpu(**properties)
    monkeypatch.setenv(STARTED_FOR, started)
    work = job(tmp_path, {**ONE_T4, **planned})
    check_cuda(work)
    if same:
        check_device(work, CUDA)
        return
    with pytest.raises(MachineError) as caught:
        check_device(work, CUDA)
    assert caught.value.problems[0].code == "device-differs"


@pytest.mark.parametrize(("hardware", "device"), [(ONE_T4, torch.device("cpu")), (CPU, CUDA)])
def test_another_kind_of_device_is_refused(tmp_path, gpu, hardware, device):
    gpu()
    with pytest.raises(MachineError) as caught:
        check_device(job(tmp_path, hardware), device)
    assert caught.value.problems[0].code == "device-differs"


def test_doctor_opens_no_context(gpu, monkeypatch):
    """Selecting a device would: of some 500 MB on each of eight GPUs."""

    def select(*device):
        raise AssertionError(f"a context on {device}")

    gpu()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    for name in ("device", "set_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, select)
    found = torch_facts()["devices"]
    assert len(found) == 8
    assert found[0] == {"name": "Tesla T4", "capability": [7, 5], "total": 15109 * MIB, "bf16": False}
