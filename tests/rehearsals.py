"""A recipe to rehearse, which needs neither weights nor data, and the command with limits of seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from patience import patience

ROOT = Path(__file__).resolve().parents[1]
MARK = "EFFILAUNCH_TEST_MARK"
RECIPE = """\
model:
  config: {{model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
           max_position_embeddings: 64}}
  tokenizer: none
data: {{train: [{{path: rows.jsonl}}], max_length: 32}}
sharding: {sharding}
global_batch_size: 12
trainer: {{max_steps: 8, per_device_train_batch_size: 2}}
launch: {launch}
"""
COMMAND = """
import sys
sys.executable = sys.argv[6]
from launcher.lab.rehearsal.run import rehearse_recipe
from launcher.errors import EffilaunchError
from launcher.report.outcome import emit, emit_error
try:
    asked = rehearse_recipe(
        sys.argv[1], on=sys.argv[2], seconds=float(sys.argv[3]), output_dir=sys.argv[4], as_json=True,
        meet_s=float(sys.argv[5]))
    code = emit("doctor", asked, as_json=True)
except EffilaunchError as error:
    code = emit_error("doctor", error, as_json=True)
sys.exit(code)
"""


def recipe(folder: Path, sharding: str = "{engine: ddp}", launch: str = "{}") -> Path:
    path = folder / "r.yaml"
    path.write_text(RECIPE.format(sharding=sharding, launch=launch))
    return path


class Rehearsal:
    """`doctor --rehearse` in a process of its own, which waits for ranks no longer than `meet_s`."""

    def __init__(
        self, folder: Path, sharding: str = "{engine: ddp}", *, on: str = "2xcpu", seconds: float = 2,
        meet_s: float = 60, python: Path | str = sys.executable,
    ) -> None:  # fmt: skip
        self.out, self.mark = folder / "out", uuid.uuid4().hex
        words = [str(recipe(folder, sharding)), on, str(seconds), str(self.out), str(meet_s), str(python)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words], text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def ended(self, code: int) -> dict[str, Any]:
        """What it printed, with the lines of the running job under `said`."""
        out, said = self.process.communicate(timeout=patience(400))
        assert self.process.returncode == code, said[-4000:] + out[-4000:]
        return {**json.loads(out), "said": said}

    def status(self, rank: int) -> dict[str, Any]:
        """What a rank last said; empty before its first word."""
        assert self.process.poll() is None, "it ended"
        try:
            found: dict[str, Any] = json.loads((self.out / "logs" / f"status-rank-{rank}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found


def rows(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Check -> its row."""
    return {row["id"]: row for row in answer["checks"]}
