"""docs/quickstart.md, followed literally: its files, and each of its commands in their order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
INSTALL = "make dev && . .venv/bin/activate"
"""What has made the environment that this test runs in."""


def test_every_step_of_the_quickstart_does_what_it_says(tmp_path):
    for name, text in re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    assert lines[0] == INSTALL
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    said = {}
    for line in lines[1:]:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said[line] = done.stdout
    result = json.loads((tmp_path / "runs" / "kettle" / "result.json").read_text())
    assert result["loss"]["last"] < 0.1 * result["loss"]["first"]
    answers = re.findall(r"^> (.*)$", PAGE, re.MULTILINE)
    asked = [line for line in said if "generate" in line]
    assert [said[line].strip().splitlines()[-1] for line in asked] == answers
    (measured,) = [line for line in said if line.startswith("effilaunch eval")]
    assert "accuracy" in said[measured]
    assert (tmp_path / "runs" / "kettle" / "report.html").stat().st_size > 20_000
