"""docs/comparison.md: each cell has a source of its own project at one version, or says `not found`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from every import every

PAGE = Path(__file__).resolve().parents[1] / "docs" / "comparison.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINKS = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", TEXT, flags=re.MULTILINE))
ABSENT = "not found"
HOMES = {
    "axolotl": ("axolotl-ai-cloud/axolotl", "axolotl"),
    "LLaMA-Factory": ("hiyouga/LlamaFactory", "llamafactory"),
    "TRL": ("huggingface/trl", "trl"),
    "ms-swift": ("modelscope/ms-swift", "ms-swift"),
    "Unsloth": ("unslothai/unsloth", "unsloth"),
}
"""Column -> repository, and package on the index."""


def tables() -> list[list[list[str]]]:
    """Cells of each table that compares: its head, then its rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        if len(rows[0]) > 2:
            found.append([rows[0], *rows[2:]])
    return found


CELLS = [
    (f"{row[0]}: {name}", name, cell)
    for head, *rows in tables()
    for row in rows
    for name, cell in zip(head[1:], row[1:], strict=True)
]


def test_every_table_compares_the_same_projects():
    assert len(tables()) == 3
    assert all(head[1:] == ["effilaunch", *HOMES] for head, *_ in tables())
    assert set(re.findall(r"\]\[([\w-]+)\]", TEXT)) == set(LINKS)


@every("place", CELLS, ids=lambda place: place[0])
def test_each_cell_has_a_source_of_its_project(place):
    _, name, cell = place
    targets = re.findall(r"\[[^\]]+\]\(([^)]+)\)", cell)
    targets += [LINKS[key] for key in re.findall(r"\]\[([\w-]+)\]", cell)]
    if name == "effilaunch":
        assert targets
        assert all((PAGE.parent / target.partition("#")[0]).is_file() for target in targets)
        return
    assert bool(targets) != cell.startswith(ABSENT)
    repository, package = HOMES[name]
    fixed = rf"https://github\.com/{repository}/(blob|tree)/[0-9a-f]{{40}}/\S+"
    published = rf"https://pypi\.org/project/{package}/[\d.]+/"
    assert all(re.fullmatch(f"{fixed}|{published}", target) for target in targets)


@pytest.mark.parametrize("name", HOMES)
def test_what_was_read_is_named_with_its_version(name):
    """And a repository is linked at one version alone."""
    repository, package = HOMES[name]
    versions = set(re.findall(rf"github\.com/{repository}/\w+/([0-9a-f]{{40}})", TEXT))
    packages = set(re.findall(rf"pypi\.org/project/{package}/([\d.]+)/", TEXT))
    (row,) = re.findall(rf"^\| {name} \| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert len(versions) == len(packages) == 1
    assert re.search(r"20\d\d-\d\d-\d\d", row)
    assert packages.pop() in row
