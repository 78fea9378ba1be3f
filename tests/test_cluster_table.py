"""The table of docs/cluster.md: each cell is a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from launcher.schedulers import QUEUES

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cluster.md").read_text("utf-8")
ROWS = ("start", "lost node", "preemption", "restart", "elastic", "sweep", "cancel", "logs")


def table() -> list[list[str]]:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[: len(ROWS) + 2]]


def test_the_table_has_every_scheduler_and_every_event():
    head, _, *rows = table()
    assert [name.lower() for name in head[1:]] == list(QUEUES)
    assert [row[0] for row in rows] == list(ROWS)


def test_every_cell_is_a_test():
    for row in table()[2:]:
        for cell in row[1:]:
            if cell != "-":
                found = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", cell)
                assert found, cell
                code = ast.parse((TESTS / found[1]).read_text("utf-8"))
                assert found[2] in {node.name for node in code.body if isinstance(node, ast.FunctionDef)}, (
                    cell
                )
