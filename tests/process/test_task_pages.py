"""The pages of docs/tasks/, followed from an empty folder: their files, and their commands with few steps."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launched import effilaunch
from test_docs import ROOT, blocks, named_files

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_module")]
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))
STEPS = 2


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_recipe_of_a_page_trains_and_its_result_is_used(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in named_files(page).items():
        Path(name).write_text(text, encoding="utf-8")
    done = [followed(shlex.split(line)) for text in blocks(page, "sh") for line in text.splitlines()]
    assert "run" in done


def followed(words: list[str]) -> str:
    """Run one line of a page; a `run` with few steps (pages give `max_steps`). Returns its command."""
    if words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True)
        return "python"
    assert words[0] == "effilaunch"
    if words[1] == "run":
        result = effilaunch(*words[1:], "--set", f"trainer.max_steps={STEPS}", CUDA_VISIBLE_DEVICES="")[
            "result"
        ]
        assert result["steps"] == STEPS
        assert all(math.isfinite(loss) for loss in result["loss"].values())
    else:  # in a process of its own: what one task imports is not there for the next
        command = [sys.executable, "-m", "launcher", *words[1:]]
        subprocess.run(command, check=True)
    return words[1]
