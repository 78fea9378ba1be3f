"""Runs of the sides: process trees, watched from outside, that take their steps in turn."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

LOOK_S = 0.2
POLL_S = 0.01
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
    rewards: list[float] = field(default_factory=list)
    """Of GRPO's generations."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of each step after the first, of all threads of the process that trains."""


class SideProcess:
    """One run of one side. `gated`: each step but the first waits until it is asked for."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], *, gated: bool) -> None:
        self._notes, self._log, self._gate = folder / "steps.jsonl", folder / "output.log", folder / "gate"
        env = env | {"BENCHMARK_STEPS": str(self._notes)}
        if gated:
            os.mkfifo(self._gate)
            env["BENCHMARK_GATE"] = str(self._gate)
        self._gated, self._started, self._over = gated, time.time(), False
        with self._log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
                env=env, start_new_session=True,
            )  # fmt: skip
        self._watch = _Memory(self._process.pid)

    def reach(self, step: int, timeout_s: float) -> None:
        """Wait for the end of a step, after letting it begin. RunFailed when it does not come."""
        deadline = time.monotonic() + timeout_s
        opened = not self._gated or step == 1
        while not self._has_ended(step):
            opened = opened or self._open_gate()
            if self._process.poll() is not None:
                self._fail(f"ended with code {self._process.returncode} before step {step}")
            if time.monotonic() > deadline:
                self._fail(f"stopped after {timeout_s:.0f} s without step {step}")
            time.sleep(POLL_S)

    def finish(self, steps: int, timeout_s: float) -> Run:
        """What the run showed, when it has ended. RunFailed when it failed or left steps out."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._fail(f"stopped after {timeout_s:.0f} s")
        self.end()
        if code != 0:
            self._fail(f"ended with code {code}")
        return read_notes(self._notes, self._started, steps, self._watch.peak)

    def end(self) -> None:
        """Nothing of it stays behind, whatever way it ended."""
        if self._over:
            return
        self._over = True
        self._watch.stop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _has_ended(self, step: int) -> bool:
        return self._notes.is_file() and f'{{"step": {step}, "time"' in self._notes.read_text("utf-8")

    def _open_gate(self) -> bool:
        """Let the next step begin; False where the side does not wait for it yet."""
        try:
            gate = os.open(self._gate, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads it
                raise
            return False
        try:
            os.write(gate, b"1")
        finally:
            os.close(gate)
        return True

    def _fail(self, why: str) -> NoReturn:
        raise RunFailed(f"{why}: {_last_words(self._log)}")


def run_together(
    sides: Mapping[str, tuple[list[str], Path]], steps: int, env: dict[str, str], timeout_s: float
) -> tuple[dict[str, Run], dict[str, str]]:
    """(runs, why a side has none) of sides that are there at once, and of which one computes at a time.

    sides: command and folder by name. Each starts and takes its first step alone; the others are taken in
    turn, so that a slow spell of the machine is one of all sides. A side that is alone waits for nobody.
    timeout_s: of each side's start, of a step and of its end.
    """
    running: dict[str, SideProcess] = {}
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}

    def try_with(name: str, call: Callable[[SideProcess], Any]) -> Any:
        try:
            return call(running[name])
        except RunFailed as error:
            failed[name] = str(error)
            running.pop(name).end()
            return None

    try:
        for name, (command, folder) in sides.items():
            running[name] = SideProcess(command, folder, env, gated=len(sides) > 1)
            try_with(name, lambda side: side.reach(1, timeout_s))
        for step in range(2, steps + 1):
            names = list(running)
            first = step % len(names) if names else 0
            for name in names[first:] + names[:first]:
                try_with(name, partial(SideProcess.reach, step=step, timeout_s=timeout_s))
                if step == steps and name in running:
                    run = try_with(name, lambda side: side.finish(steps, timeout_s))
                    runs |= {name: run} if run is not None else {}
    finally:
        for side in running.values():
            side.end()
    return {name: runs[name] for name in sides if name in runs}, failed


def read_notes(notes: Path, started: float, steps: int, tree_bytes: int) -> Run:
    """The clock's lines as a run. RunFailed when a step is missing.

    A step counts from where its turn came, or from the end of the one before.
    """
    lines: list[dict[str, Any]] = []
    if notes.is_file():
        lines = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    times = {line["step"]: line["time"] for line in lines if "time" in line}
    begun = {line["step"]: line["begun"] for line in lines if "begun" in line}
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    if sorted(times) != list(range(1, steps + 1)):
        raise RunFailed(f"noted {len(times)} of {steps} steps")
    peaks = [line["peak"] for line in lines if line.get("peak")]
    rewards = {line["step"]: line["reward"] for line in lines if "reward" in line}
    used = {line["step"]: line["cpu"] for line in lines if "cpu" in line}
    used_before = {line["step"]: line["cpu_begun"] for line in lines if "cpu_begun" in line}
    later = range(2, steps + 1)
    return Run(
        times[1] - started, [times[step] - begun.get(step, times[step - 1]) for step in later],
        losses.get(steps), max(peaks, default=tree_bytes), [losses[step] for step in sorted(losses)],
        [rewards[step] for step in sorted(rewards)],
        [used[step] - used_before.get(step, used[step - 1]) for step in later if step in used],
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


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if "Error" in line] or [line for line in lines if line]
    return (errors or ["it said nothing"])[-1][:400]
