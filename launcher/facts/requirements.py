"""Requirements on installed versions: `transformers>=5,<6; torch>=2.5`, or `*` for every version."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_AT_LEAST = re.compile(r"\s*([A-Za-z0-9_-]+)\s*>=\s*(\d+(?:\.\d+)*)\s*")
"""The form that nearly all requirements have."""
_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\+[a-z0-9.]+)?")
"""A version without the parts that only packaging orders well; what is behind `+` makes it no smaller."""


def requirements(versions: str) -> Iterator[Requirement]:
    """The requirements of a text; none for `*`. Raises packaging's InvalidRequirement."""
    from packaging.requirements import Requirement

    if versions != "*":
        yield from (Requirement(part.strip()) for part in versions.split(";"))


def holds(versions: str, installed: Mapping[str, str]) -> bool:
    """Whether the installed versions meet every requirement.

    installed: package -> version. A package that is not installed here will be where the run is: it counts
    as one that meets its requirement, and so does a version that is no version by PEP 440.
    """
    if versions == "*":
        return True
    simple = _at_least(versions, installed)
    return _by_packaging(versions, installed) if simple is None else simple


def _at_least(versions: str, installed: Mapping[str, str]) -> bool | None:
    """The same for `package>=1.2` and a plain release, without importing packaging (a tenth of the time of
    `validate`); None for everything else."""
    asked = _AT_LEAST.fullmatch(versions)
    if asked is None:
        return None
    version = installed.get(asked[1])
    if version is None:
        return True
    found = _RELEASE.fullmatch(version)
    return None if found is None else _numbers(found[1]) >= _numbers(asked[2])


def _numbers(release: str) -> list[int]:
    """`2.10.0` -> [2, 10]: zeros at the end say nothing."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _by_packaging(versions: str, installed: Mapping[str, str]) -> bool:
    from packaging.version import InvalidVersion, Version

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
