"""A rank that a fatal signal ends leaves its calls in the run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience

from launcher.execute.endings import lost_problem
from launcher.files.rank_status import fatal_log
from launcher.knowledge.diagnose.examine import diagnose
from launcher.knowledge.failures.catalogue import FAILURES

RANK = """
import ctypes, os, signal, sys
from launcher.train.worker import as_rank

def crash(run_dir):
    ctypes.string_at(0)
def abort(run_dir):
    os.abort()
def end(run_dir):
    pass
sys.exit(as_rank("worker", globals()[sys.argv[1]], sys.argv[2:]))
"""


def ended(run_dir: Path, how: str, rank: int) -> int:
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    root = str(Path(__file__).resolve().parents[2])
    words = [sys.executable, "-c", RANK, how, str(run_dir)]
    # What a debugger or a system collects of a crash is not wanted here.
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    words[2] = limits + words[2]
    return subprocess.run(words, env={**os.environ, **env, "PYTHONPATH": root}, capture_output=True,
                          timeout=patience(120), check=False).returncode  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "plan.json").write_text("{}")
    return tmp_path


def test_a_crash_is_known_with_its_rank_and_its_calls(run_dir):
    assert ended(run_dir, "end", 0) == 0
    assert ended(run_dir, "crash", 1) == -signal.SIGSEGV
    assert not fatal_log(run_dir, 0).exists()
    calls = fatal_log(run_dir, 1).read_text()
    assert "Segmentation fault" in calls
    assert "in string_at" in calls
    (finding,) = diagnose([str(run_dir)], FAILURES).findings
    assert (finding.failure.id, finding.ranks, finding.first_rank) == ("segmentation-fault", (1,), 1)
    assert finding.error.file == str(fatal_log(run_dir, 1))
    lost = [lost_problem(run_dir, "x", [rank]).file for rank in (0, 1)]
    assert lost == [str(run_dir / "logs" / "rank-0.log"), str(fatal_log(run_dir, 1))]


def test_an_abort_is_recorded_too_and_is_no_cause_beside_one(run_dir):
    assert ended(run_dir, "abort", 0) == -signal.SIGABRT
    (unknown,) = diagnose([str(run_dir)], FAILURES).unknown
    assert unknown.error.message == "Fatal Python error: Aborted"
    with (run_dir / "logs" / "rank-0.log").open("a") as log:
        log.write("RuntimeError: CUDA driver error: out of memory\n")
    (finding,) = diagnose([str(run_dir)], FAILURES).findings
    assert finding.failure.id == "cuda-oom"
