"""What real runs measure, beside what their plans predicted, and what later plans make of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from launched import effilaunch

from launcher.machine import probe
from launcher.train.memory_meter import Meter, bytes_by_device, weight_tensors

sys.path.insert(0, str(Path(__file__).parent))
from plans import trained as trained_here
from test_runs import check_states, folder, trained

pytestmark = pytest.mark.usefixtures("warm")

__all__ = ["folder"]

MIB = 2**20
KEYS = {
    "predicted", "measured", "method", "allocated", "load", "eval", "save", "host", "components",
    "contexts", "device_bytes", "steps", "tokens",
}  # fmt: skip


def planned(folder: Path) -> dict:
    """`memory` of `effilaunch plan --json` for the recipe that was run."""
    return effilaunch("plan", folder / "r.yaml", "--on", "cpu")["memory"]


# --- the meter


def test_phases_are_measured_apart():
    meter = Meter(on_cuda=False)
    kept = []
    with meter.phase("train"):
        kept.append(torch.zeros(2 * MIB, dtype=torch.uint8))
        with meter.phase("eval"):
            kept.append(torch.zeros(5 * MIB, dtype=torch.uint8))
            kept.pop()
        kept.append(torch.zeros(MIB, dtype=torch.uint8))
    with meter.phase("eval"):
        torch.zeros(MIB, dtype=torch.uint8)
    assert meter.peak("train").allocated == 3 * MIB
    assert meter.peak("eval").allocated == 7 * MIB
    assert meter.peak("save") is None


def test_a_batch_that_waits_for_its_turn_is_not_on_the_device():
    meter = Meter(on_cuda=False)
    batches = torch.utils.data.DataLoader(
        torch.zeros(16, MIB, dtype=torch.uint8), batch_size=2, num_workers=2, prefetch_factor=4
    )
    with meter.phase("train"):
        waiting = list(batches)  # as much as the queue of a loader may hold
        assert len(waiting) == 8
        meter.watch(waiting[:1])
        torch.zeros(MIB, dtype=torch.uint8)
    assert meter.peak("train").allocated == 3 * MIB


def test_a_phase_that_fails_is_ended():
    meter = Meter(on_cuda=False)

    def fail() -> None:
        with meter.phase("train"):
            held = torch.zeros(MIB, dtype=torch.uint8)
            raise ValueError(f"after {held.numel()} bytes")

    with pytest.raises(ValueError, match="bytes"):
        fail()
    with meter.phase("save"):
        torch.zeros(10, dtype=torch.uint8)
    assert meter.peak("save").allocated <= 10
    assert meter.peak("train").allocated == MIB


def test_tied_weights_are_counted_once():
    layer, head = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    head.weight = layer.weight
    assert bytes_by_device(weight_tensors(torch.nn.ModuleList([layer, head]))) == {-1: 4 * 64}


# --- a run's record


def test_a_run_measures_what_its_plan_predicts_and_the_next_plan_names_it(folder):
    text = "precision: fp32\n"
    before = planned_with(folder, text)
    data = trained(folder, text, "--on", "cpu", "--set", "data.eval={split: 0.1}")
    memory = data["result"]["memory"]
    assert set(memory) == KEYS
    assert memory["predicted"] == before["total"]
    for name, pair in memory["components"].items():
        assert pair["measured"] == pytest.approx(pair["predicted"], rel=0.02, abs=1024), name
    for phase in ("load", "eval", "save"):
        assert 0 < memory[phase]["measured"] <= 1.05 * memory[phase]["predicted"], phase
    assert memory["host"]["measured"] > memory["measured"]
    assert memory["contexts"] == [], "a CPU has none"
    assert memory["steps"] == 6
    assert memory["tokens"]["largest"] < memory["tokens"]["planned"] == 4 * 64

    (line,) = probe.calibration_file().read_text().splitlines()
    record = json.loads(line)
    assert record["measured"] == memory["measured"]
    assert record["predicted"] < memory["predicted"], "for the length that was met"
    assert record["measured"] == pytest.approx(record["predicted"], rel=0.1)
    for secret in (str(folder), "rows", "r.yaml", "tokenizer"):
        assert secret not in line

    after = planned(folder)
    assert before["calibration"] is None
    assert "from 1 run like it" in after["calibration"]
    assert str(probe.calibration_file()) in after["calibration"]
    assert after["components"] == before["components"]


def planned_with(folder: Path, text: str) -> dict:
    from test_runs import MODEL, REST

    (folder / "r.yaml").write_text(MODEL + text + REST, encoding="utf-8")
    return planned(folder)


def test_zero_2_over_two_processes_holds_the_states_that_were_planned(folder):
    data = trained(folder, "sharding: {zero_stage: 2}\nprecision: bf16\n", "--on", "2xcpu")
    check_states(data["result"])
    weights, components = 2 * data["result"]["total_params"], data["result"]["memory"]["components"]
    # bfloat16, and of gradients, master copy and moments the half of each process.
    assert components["weights"]["measured"] == pytest.approx(weights, rel=0.02)
    assert components["gradients"]["measured"] == pytest.approx(weights / 2, rel=0.02)
    assert components["optimizer"]["measured"] == pytest.approx(6 * weights / 2, rel=0.02)


def test_states_in_host_memory_are_not_taken_for_the_devices(tmp_path):
    """A CPU run cannot tell the two apart, so it claims nothing."""
    changes = {"sharding.offload_optimizer": "cpu"}
    run = trained_here(tmp_path / "run", changes)
    components = json.loads((run / "result.json").read_text())["memory"]["components"]
    assert components["optimizer"]["measured"] is components["gradients"]["measured"] is None
    assert components["weights"]["measured"] > 0
