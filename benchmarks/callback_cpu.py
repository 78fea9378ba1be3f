"""CPU time that `effilaunch.callback()` takes in a step of one rank.

The events of a Trainer, with a log in every tenth step, for short steps and for long ones, in each of which a
thread writes the status; each beside the same events for a callback that does nothing, one after the other.
CPU seconds are the process's, its threads included. `--check` fails above TARGET_MS.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.train import own_command

TARGET_MS = 1.0
STEPS = {0.002: 2000, 1.0: 10}
"""Seconds of a step -> steps of a measurement."""


def ms_per_step(callback: Any, seconds: float, steps: int) -> float:
    """CPU milliseconds of a step that itself only waits."""
    args = SimpleNamespace(process_index=0, world_size=1, output_dir="out")
    state = SimpleNamespace(global_step=0, max_steps=steps + 1, num_input_tokens_seen=0)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    callback.on_train_begin(args, state, control)
    began = time.process_time()
    for step in range(1, steps + 1):
        callback.on_step_begin(args, state, control)
        time.sleep(seconds)
        state.global_step = step
        callback.on_step_end(args, state, control)
        if step % 10 == 0:
            callback.on_log(args, state, control, logs={"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-5})
    used = time.process_time() - began
    callback.on_train_end(args, state, control)
    return 1000 * used / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("logs", "checkpoints"):
            (Path(folder) / name).mkdir()
        os.environ |= {own_command.RUN_DIR: folder, own_command.LOGGED: "0"}
        import transformers

        for seconds, steps in STEPS.items():
            pairs = [
                (
                    ms_per_step(transformers.TrainerCallback(), seconds, steps),
                    ms_per_step(own_command.callback(), seconds, steps),
                )
                for _ in range(asked.rounds)
            ]
            without, with_it = (statistics.median(side) for side in zip(*pairs, strict=True))
            added = statistics.median(ours - theirs for theirs, ours in pairs)
            print(
                f"steps of {seconds:g} s: {without:.3f} ms without it, {with_it:.3f} ms with: {added:+.3f} ms"
            )
            worst = max(worst, added)
    return int(asked.check and worst > TARGET_MS)


if __name__ == "__main__":
    raise SystemExit(main())
