"""The speed table of one GPU, rehearsed on a CPU: the same code with narrow models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_throughput  # noqa: E402  (benchmarks is no package)
from gpu import Device  # noqa: E402
from gpu_steps import ROWS, SpeedRow, attention_flops, matrix_params, step_flops  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm")

KINDS = ("matmul", "full-chunked", "lora-compiled-nocast", "mix-padded", "mix-varlen-chunked",
         "full-liger")  # fmt: skip
"""One row of each way through the code."""
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}  # fmt: skip


def rehearse(out: Path, *names: str) -> list[dict]:
    command = [sys.executable, str(BENCHMARKS / "gpu_throughput.py"), "--rehearse", "--out", str(out)]
    done = subprocess.run(
        [*command, *(("--only", *names) if names else ())],
        capture_output=True, text=True, timeout=500, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8"))["rows"]


def check(entries: list[dict]) -> None:
    """Everything runs but what names a package that is not here."""
    for entry in entries:
        absent = "not installed" in entry.get("skipped", "") or "needs a GPU" in entry.get("skipped", "")
        assert absent or entry["step_s"] > 0, entry
        assert "error" not in entry


@pytest.mark.slow
def test_each_kind_of_row_runs(tmp_path):
    entries = rehearse(tmp_path / "record.json", *KINDS)
    assert [entry["name"] for entry in entries] == list(KINDS)
    check(entries)
    trained = next(entry for entry in entries if entry["name"] == "mix-padded")
    assert trained["tokens_per_second"] > 0
    assert trained["of_measured"] is not None, "the rate of the first row stands beside the others'"


@pytest.mark.slow
def test_every_row_runs(tmp_path):
    entries = rehearse(tmp_path / "record.json")
    assert [entry["name"] for entry in entries] == [row.name for row in ROWS]
    check(entries)


def test_without_a_gpu_it_says_so_and_is_content():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_throughput.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.split(":")[0]) == (0, "skipped")


def test_operations_are_those_of_the_convention():
    assert matrix_params(LLAMA_8B) == 7_504_658_432, "8.03 billion less the table of embeddings and the norms"
    row = SpeedRow("", documents=(4096,), accumulation=1)
    full = step_flops(LLAMA_8B, row, 0)
    assert full / 4096 == pytest.approx(6 * 7.5047e9 + 6 * 32 * 4096 * 4096, rel=1e-3)
    assert step_flops(LLAMA_8B, row, 0, square=True) / full == pytest.approx(1.067, abs=0.001)
    lora = SpeedRow("", documents=(4096,), accumulation=1, method="lora")
    assert full / step_flops(LLAMA_8B, lora, 42_000_000) == pytest.approx(1.45, abs=0.01)
    assert step_flops(LLAMA_8B, lora, 5, full=True) == full
    apart = attention_flops(LLAMA_8B, (2048, 2048))
    assert attention_flops(LLAMA_8B, (4096,)) == 2 * apart, "documents do not see each other"


def test_a_shape_that_does_not_fit_gives_way_to_a_smaller_one():
    from launcher.machine.hardware import Hardware

    row = next(row for row in ROWS if row.name == "full-sdpa")
    found = {}
    for name, size in (("H200", 141e9), ("H100", 80e9), ("toy", 1e9)):
        device = Device(name, Hardware(1, 1, name, int(size), (9, 0)), rehearsal=False)
        found[name] = gpu_throughput.model_of(row, device, 100.0)
    assert found["H200"][0] == "meta-llama/Llama-3.1-8B"
    assert found["H100"][0] == "meta-llama/Llama-3.2-3B"
    assert "predicted" in found["toy"][1]


def test_targets_are_judged_on_one_shape():
    def entry(name: str, model: str, speed: float, mfu: float) -> dict:
        return {"name": name, "model": model, "tokens_per_second": speed, "mfu": mfu, "ceiling_to_full": 1.45}

    rows = [entry("full-a", "8B", 100, 0.4), entry("full-b", "8B", 130, 0.52), entry("mix-c", "1B", 900, 0.9)]
    assert gpu_throughput.judge(rows)[0].holds is True
    assert gpu_throughput.judge(rows)[1].holds is None
    assert gpu_throughput.judge([*rows, entry("lora-a", "3B", 300, 0.4)])[1].holds is None
    assert gpu_throughput.judge([*rows, entry("lora-a", "8B", 160, 0.4)])[1].holds is False
    assert gpu_throughput.judge([*rows, entry("lora-a", "8B", 163, 0.4)])[1].holds is True
