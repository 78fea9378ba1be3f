"""One run of one side: a process tree, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOK_S = 0.2
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RunFailed(Exception):
    """The side's process failed or took too long; the message is the end of what it said."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run showed."""

    first_step_s: float
    """From the start of the process to the end of the first optimizer step."""
    seconds: list[float]
    """Of each step after the first."""
    final_loss: float | None
    peak_bytes: int
    """CUDA's allocated peak, or the highest sum of the tree's resident bytes."""
    losses: list[float] = field(default_factory=list)


def run_side(command: list[str], folder: Path, steps: int, env: dict[str, str], timeout_s: float) -> Run:
    """Run it to its end. RunFailed when it fails, takes longer than `timeout_s` or leaves steps out."""
    notes, log = folder / "steps.jsonl", folder / "output.log"
    started = time.time()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env=env | {"BENCHMARK_STEPS": str(notes)}, start_new_session=True,
        )  # fmt: skip
        watch = _Memory(process.pid)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            watch.stop()
            _end(process)
    if code != 0:
        why = f"ended with code {code}" if code is not None else f"stopped after {timeout_s:.0f} s"
        raise RunFailed(f"{why}: {_last_words(log)}")
    return read_notes(notes, started, steps, watch.peak)


def read_notes(notes: Path, started: float, steps: int, tree_bytes: int) -> Run:
    """The clock's lines as a run. RunFailed when a step is missing."""
    lines: list[dict[str, Any]] = []
    if notes.is_file():
        lines = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    times = {line["step"]: line["time"] for line in lines if "time" in line}
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    if sorted(times) != list(range(1, steps + 1)):
        raise RunFailed(f"noted {len(times)} of {steps} steps")
    peaks = [line["peak"] for line in lines if line.get("peak")]
    seconds = [times[step] - times[step - 1] for step in range(2, steps + 1)]
    return Run(
        times[1] - started, seconds, losses.get(steps), max(peaks, default=tree_bytes),
        [losses[step] for step in sorted(losses)],
    )  # fmt: skip


class _Memory:
    """Looks at the resident bytes of a process and its descendants; shared pages count in each."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.peak = max(self.peak, sum(map(_resident, _tree(self._pid))))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
            found += [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it stays behind, whatever way it ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if "Error" in line] or [line for line in lines if line]
    return (errors or ["it said nothing"])[-1][:400]
