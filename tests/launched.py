"""The command line in this process, what it printed, and what a run's directory says."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from launcher.cli import main


def effilaunch(*words: object, expect: int = 0, **env: str) -> dict[str, Any]:
    """A command with `--json` under these variables: its answer, and what went to stderr as `said`.

    Under the fixture `warm`, the processes that it starts are forks.
    """
    out, said = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(said)
    with streams[0], streams[1], mock.patch.dict(os.environ, env):
        code = main([*map(str, words), "--json"])
    assert code == expect, said.getvalue()[-6000:] + out.getvalue()[-2000:]
    return {**json.loads(out.getvalue()), "said": said.getvalue()}


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss; no step is reported twice."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert len(dict(found)) == len(found)
    return dict(found)
