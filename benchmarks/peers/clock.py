"""Notes when each optimizer step ends, alike on every side: a line of JSON each in $BENCHMARK_STEPS.

effilaunch takes it as its `python:` file, the peers get it from `timed.py`. It waits for the device at the
end of a step, which a log at every step does, too.
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
    """Lines: {"step", "time"} when a step ends, {"step", "loss"} when it is logged, {"peak"} at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._write({"step": state.global_step, "time": time.time()})

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            self._write({"step": state.global_step, "loss": float(logs["loss"])})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        self._write({"peak": peak})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(f"{json.dumps(line)}\n")


def callbacks() -> list[Any]:
    return [StepClock(Path(os.environ["BENCHMARK_STEPS"]))]
