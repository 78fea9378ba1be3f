"""The image has what an installation reads, and asks for extras that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_each_image_installs_the_same_extras_that_the_project_has():
    asked = [set(found.split(",")) for found in re.findall(r"'\.\[(.+)]'", DOCKERFILE)]
    assert len(asked) == DOCKERFILE.count("\nFROM ") == 2
    assert asked[0] == asked[1] <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_context_has_the_files_of_a_release_and_the_versions():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    released = {path.lstrip("/") for path in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert kept == released | {"pyproject.toml", "constraints.txt"}
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert DOCKERFILE.count("-c constraints.txt") == 2
