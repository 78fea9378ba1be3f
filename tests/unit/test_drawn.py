"""Of the slow tests CI runs a share, other ones with each commit; quick tests are never left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from drawn import SHARE, is_drawn

TESTS = Path(__file__).resolve().parents[1]
FILE = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_some(number): pass

@pytest.mark.slow(share=1)
def test_always(): pass

def test_quick(): pass
"""


def test_each_commit_draws_others_and_every_test_is_drawn_by_some():
    names = [f"tests/a.py::test[{number}]" for number in range(1000)]
    drawn = [{name for name in names if is_drawn(name, SHARE, f"commit {seed}")} for seed in range(80)]
    assert all(0.7 < len(one) * SHARE / len(names) < 1.4 for one in drawn)
    assert drawn[0] != drawn[1]
    assert set.union(*drawn) == set(names)
    assert all(is_drawn(name, 1, "any") for name in names)


def test_a_session_leaves_out_what_is_not_drawn_and_counts_it(tmp_path):
    (tmp_path / "test_some.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-p", "drawn", "-p", "no:cacheprovider", "--rootdir", tmp_path]

    def session(*options: str) -> tuple[int, int]:
        """Tests that passed, and tests that were left out."""
        words = [*command, "-W", "ignore", "-q", *options, tmp_path]
        said = subprocess.run(words, capture_output=True, text=True, cwd=TESTS, check=True).stdout
        counts = dict(
            reversed(part.split()) for part in said.splitlines()[-1].partition(" in ")[0].split(", ")
        )
        return int(counts["passed"]), int(counts.get("deselected", 0))

    assert session() == (42, 0)
    passed, left = session("--drawn")
    assert passed + left == 42
    assert 2 <= passed < 30
