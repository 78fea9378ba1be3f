"""How a worker ends: its collectives may still be cleaning up, and must not decide the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience

pytest.importorskip("torch")

from launcher.machine.probe import free_port

ENDING = """
import atexit, threading, time
import torch
import torch.distributed as dist
from launcher.train.worker import leave

class Torn:
    def __del__(self):
        print("torn down", flush=True)

torn = Torn()
atexit.register(print, "exit handlers ran")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1000))
for _ in range(6):  # nobody waits for them, and the group's threads hold the last references
    dist.all_reduce(torch.ones(4_000_000), async_op=True)
threading.Thread(target=lambda: (time.sleep(0.5), print("thread finished"))).start()
print("written but not flushed", end="")
leave(3)
"""

ENTRY = """
import runpy, sys

class Torn:
    def __del__(self):
        print("torn down", flush=True)

torn = Torn()
sys.argv = ["worker"]
runpy.run_module("launcher.train.worker", run_name="__main__")
"""


def end_of_two_ranks() -> list[tuple[int, str]]:
    meet = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",
    }
    place = {**os.environ, **meet, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", ENDING]
    ranks = [
        subprocess.Popen(command, env={**place, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=patience(120))[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, printed, strict=True)]


def test_a_worker_that_is_done_is_not_aborted_by_the_threads_of_its_process_group():
    for code, printed in end_of_two_ranks():
        assert code == 3
        assert "written but not flushed" in printed
        assert "thread finished" in printed
        assert "exit handlers ran" in printed
        assert "torn down" not in printed


def test_the_worker_is_left_that_way():
    root = str(Path(__file__).parents[2])
    place = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", ENTRY],
        env=place,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: python -m launcher.train.worker RUN_DIR\n"


def test_wandb_is_told_the_exit_code():
    script = """
import sys
from types import SimpleNamespace
from launcher.train.worker import leave
sys.modules["launcher.train.tracking"] = SimpleNamespace(finish_wandb=lambda code: print("told", code))
leave(5)
"""
    place = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=place,
        stdout=subprocess.PIPE,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, "told 5\n")


def test_output_that_nobody_reads_does_not_change_the_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    script = "from launcher.train.worker import leave; print('lost', end=''); leave(3)"
    place = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=place, stdout=writer, timeout=patience(120), check=False
    )
    os.close(writer)
    assert done.returncode == 3
