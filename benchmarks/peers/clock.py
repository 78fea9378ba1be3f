"""Notes when each optimizer step ends, alike on every side: a line of JSON each in $BENCHMARK_STEPS.

effilaunch takes it as its `python:` file, the peers get it from `timed.py`. It waits for the device at the
end of a step, which a log at every step does, too. With $BENCHMARK_GATE, a named pipe, it lets no step begin
before a byte comes out of it: so several sides take their steps in turn.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """Lines: {"step", "time", "cpu"} when a step ends, {"step", "begun", "cpu_begun"} when its turn has come,
    {"step", "loss"} with GRPO's {"reward"} when it is logged, {"peak"} at the end. cpu: seconds of all
    threads of the process."""

    def __init__(self, path: Path, gate: Path | None) -> None:
        self._path, self._gate = path, gate

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._write({"step": state.global_step, "time": time.time(), "cpu": time.process_time()})
        if self._gate is not None and state.global_step < state.max_steps:
            with self._gate.open("rb") as gate:
                gate.read(1)
            self._write(
                {"step": state.global_step + 1, "begun": time.time(), "cpu_begun": time.process_time()}
            )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            rewards = {"reward": float(logs["reward"])} if "reward" in logs else {}
            self._write({"step": state.global_step, "loss": float(logs["loss"]), **rewards})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        self._write({"peak": peak})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(f"{json.dumps(line)}\n")


def callbacks() -> list[Any]:
    gate = os.environ.get("BENCHMARK_GATE")
    return [StepClock(Path(os.environ["BENCHMARK_STEPS"]), Path(gate) if gate else None)]
