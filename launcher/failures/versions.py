"""Requirements on installed versions: `transformers>=5,<6; torch>=2.5`, or `*` for every version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version


def requirements(versions: str) -> Iterator[Requirement]:
    """The requirements of a text; none for `*`. Raises packaging's InvalidRequirement."""
    if versions != "*":
        yield from (Requirement(part.strip()) for part in versions.split(";"))


def holds(versions: str, installed: Mapping[str, str]) -> bool:
    """Whether the installed versions meet every requirement.

    installed: package -> version. A package that is not installed here will be where the run is: it counts
    as one that meets its requirement, and so does a version that is no version by PEP 440.
    """
    for requirement in requirements(versions):
        found = installed.get(requirement.name)
        if found is None:
            continue
        try:
            version = Version(found)
        except InvalidVersion:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            return False
    return True
