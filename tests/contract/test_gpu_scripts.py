"""The scripts of a first run on GPUs, on CPU processes: the same commands, with narrow models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_eight  # noqa: E402  (benchmarks is no package)
import gpu_first  # noqa: E402
from gpu import Device  # noqa: E402
from gpu_parts import Bench, Missed, Part, tried  # noqa: E402

from launcher.machine.hardware import parse_hardware  # noqa: E402


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, Device("cpu", parse_hardware("cpu"), True), 1, time.monotonic() + 600)


def run_of(folder: Path, name: str, losses: list[float]) -> Path:
    """A run directory with these losses."""
    out = folder / name
    out.mkdir()
    memory = dict.fromkeys(("expected", "low", "high", "needed", "phase", "method"), 0)
    plan = {"batch": {}, "settings": {}, "memory": memory, "time": {"seconds_per_step": 1}, "warnings": []}
    (out / "plan.json").write_text(json.dumps(plan))
    (out / "result.json").write_text(json.dumps({"memory": {}, "tokens_per_second": 1.0}))
    rows = [{"loss": loss, "tokens": 8 * n, "tokens_per_second": 4} for n, loss in enumerate(losses, 1)]
    (out / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return out


def test_losses_that_differ_are_missed(bench, tmp_path):
    first, same, other = (
        run_of(tmp_path, name, losses)
        for name, losses in (("a", [2.0, 1.0]), ("b", [2.0, 1.00001]), ("c", [2.0, 1.01]))
    )
    found = bench.alike({"a": first, "b": same})
    assert found["b"]["losses"] == [2.0, 1.00001]
    assert found["a"]["step_s"] == [2.0, 2.0]
    with pytest.raises(Missed, match=r"of c differ from those of a by 1\.00%"):
        bench.alike({"a": first, "c": other})
    with pytest.raises(ValueError, match="longer"):
        bench.alike({"a": first, "d": run_of(tmp_path, "d", [2.0, 1.5, 1.0])})


@pytest.mark.parametrize("ends", [2.0, 2.5, 1.9995, float("nan")])
def test_runs_that_learn_nothing_are_missed(bench, tmp_path, ends):
    alike = {name: run_of(tmp_path, name, [2.0, ends]) for name in "ab"}
    with pytest.raises(Missed, match="nothing was learned by a"):
        bench.alike(alike)


def test_a_part_that_fails_has_an_entry_and_so_has_what_a_cpu_lacks(bench):
    def missing(where: Bench) -> dict:
        where.command("validate", "absent.yaml")
        return {}

    entry = tried(Part("missing", missing, ("NCCL",)), bench)
    assert (entry["status"], entry["not_on_cpu"]) == ("failed", ["NCCL"])
    assert entry["commands"][0]["status"] == 2
    assert "absent.yaml" in entry["error"]
    bench.ends = 0
    late = tried(Part("late", missing), bench)
    assert (late["status"], late["error"]) == ("skipped", "the time budget is spent")


@pytest.mark.slow(share=24)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (gpu_first, ("machine", "results")),
        (gpu_first, ("adapted", "stopped")),
        (gpu_first, ("quantised", "grpo")),
        (gpu_first, ("lora", "qlora")),
        (gpu_first, ("engines",)),
        (gpu_eight, ("rehearsal", "faults")),
        (gpu_eight, ("fewer", "nodes")),
        (gpu_eight, ("engines", "lora")),
        (gpu_eight, ("quantised", "one-rank-full")),
    ],
)
def test_parts_pass_on_cpu_processes(script, parts, tmp_path):
    assert {*parts} <= {part.name for part in script.PARTS}
    record = tmp_path / "record.json"
    ended = subprocess.run(
        [sys.executable, str(script.__file__), "--cpu", "--out", str(record), "--budget",
         str(patience(2000)), "--only", *parts],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = {entry["name"]: entry for entry in json.loads(record.read_text())["parts"]}
    assert ended.returncode == 0, {name: entry.get("error") for name, entry in found.items()}
    assert {name: entry["status"] for name, entry in found.items()} == dict.fromkeys(parts, "passed")
