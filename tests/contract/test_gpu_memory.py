"""The sweep on one GPU, rehearsed on a CPU: the same code with narrow models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_memory  # noqa: E402  (benchmarks is no package)
from gpu import Device, find_device  # noqa: E402
from grids import GPU_MEMORY as ROWS  # noqa: E402
from grids import Row  # noqa: E402
from records import RECORDS  # noqa: E402
from runner import error_of, in_process, in_processes  # noqa: E402

from launcher.machine.hardware import parse_hardware  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm")

KINDS = (
    "vit-large-fp16",
    "bert-large-adafactor",
    "smollm2-bf16-packing",
    "smollm2-bf16-accumulation2",
    "llama-1b-lora-bf16-ckpt",
    "t5-large-bf16",
)
"""One row of each way through the code."""


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_memory.py"), "--rehearse", *arguments],
        capture_output=True, text=True, timeout=500, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def device() -> Device:
    found = find_device(rehearse=True)
    assert found is not None
    return found


def entry_of(row: Row) -> dict:
    return gpu_memory.sweep([gpu_memory.rehearsed(row)], device(), 300.0)[0]


def test_the_sweep_has_thirty_rows_that_need_torch_and_transformers_alone() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert sum(not row.needs for row in ROWS) >= 30


def test_every_row_is_predicted_at_its_published_size() -> None:
    gpu = Device("a GPU", parse_hardware("1xH100-80GB"), False)
    for row in ROWS:
        predicted = gpu_memory.predict(row, gpu)
        assert 0 < predicted.total < 80 * 10**9, row.name


@pytest.mark.slow
def test_a_rehearsal_measures_each_kind_of_row(tmp_path: Path) -> None:
    out = tmp_path / "rehearsal.json"
    done = rehearse("--out", str(out), "--only", *KINDS)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert "says nothing about a GPU" in record["about"]
    assert record["device"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    assert [entry["name"] for entry in record["rows"]] == [row.name for row in ROWS if row.name in KINDS]
    for entry in record["rows"]:
        assert entry["allocated"] > 0
        assert entry["step_s"] > 0
        assert entry["t0_without_context"] == entry["t0"]  # a CPU has no context
        # Models this small are mostly one-off buffers: only nonsense is told here.
        assert entry["t0"] == pytest.approx(entry["allocated"], rel=1.0), entry["name"]
    assert f"{len(KINDS)} measured, 0 skipped, 0 failed" in done.stdout


def test_a_rehearsal_leaves_no_record(tmp_path: Path) -> None:
    before = sorted(RECORDS.iterdir())
    done = rehearse("--only", "llama-1b-bf16true-flash")
    assert done.returncode == 0
    assert "0 measured, 1 skipped" in done.stdout
    assert sorted(RECORDS.iterdir()) == before


@pytest.mark.slow
def test_rows_measured_again_are_compared_with_the_record_and_leave_the_others(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    one, other = "bert-large-adafactor", "smollm2-bf16-packing"
    assert rehearse("--out", str(out), "--only", one).returncode == 0
    done = rehearse("--repeat", "--out", str(out), "--only", one)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{one} same" in " ".join(done.stdout.split())
    record = json.loads(out.read_text())
    record["rows"][0]["allocated"] += 1
    out.write_text(json.dumps(record))
    assert rehearse("--repeat", "--out", str(out), "--only", one).returncode == 1
    assert rehearse("--out", str(out), "--only", other).returncode == 0
    merged = json.loads(out.read_text())["rows"]
    assert [entry["name"] for entry in merged] == [one, other]
    assert merged[0] == record["rows"][0]


def test_a_row_whose_package_is_absent_says_which() -> None:
    row = next(row for row in ROWS if row.name == "qwen3-bf16")
    entry = entry_of(Row(row.name, row.model, needs=("no_such_package",)))
    assert entry["skipped"] == "no_such_package not installed"
    assert "allocated" not in entry


def test_rows_after_the_budget_are_skipped() -> None:
    entries = gpu_memory.sweep([gpu_memory.rehearsed(row) for row in ROWS[:5]], device(), 0.0)
    assert [entry["skipped"] for entry in entries] == ["the time budget is spent"] * 5


def test_a_row_larger_than_the_device_is_skipped() -> None:
    small = Device("small", parse_hardware("1x2GB"), False)
    entry = gpu_memory.sweep([ROWS[0]], small, 60.0)[0]
    assert entry["skipped"].startswith("predicted ")


def test_a_row_that_fails_says_why_and_the_next_one_runs() -> None:
    def fail() -> dict:
        raise ValueError("no such thing")

    assert in_process(fail, 30.0) == {"error": "ValueError: no such thing"}
    assert in_process(dict, 30.0) == {}
    assert in_process(os._exit, 30.0, 7) == {"error": "the process ended with code 7"}
    assert in_process(time.sleep, 0.2, 60) == {"error": "stopped after 0 s"}


def test_processes_that_wait_for_a_failed_one_are_ended() -> None:
    def wait() -> dict:
        time.sleep(3600)
        return {}

    def fail() -> dict:
        raise ValueError("no such thing")

    answers = in_processes([wait, fail], 3600.0)  # longer than this test may take
    assert error_of(answers) == "ValueError: no such thing"
    assert error_of(in_processes([dict, dict], 30.0)) is None
    assert in_process(in_process, 30.0, dict, 20.0) == {}, "a process that was forked can fork, too"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_nothing_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_memory.py")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "no GPU is here" in done.stderr
