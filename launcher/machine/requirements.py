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
"""A release; other versions are compared by packaging."""


def requirements(versions: str) -> Iterator[Requirement]:
    """The requirements of a text; none for `*`. Raises packaging's InvalidRequirement."""
    from packaging.requirements import Requirement

    if versions != "*":
        yield from (Requirement(part.strip()) for part in versions.split(";"))


def holds(versions: str, installed: Mapping[str, str]) -> bool:
    """Whether the installed versions meet every requirement.

    installed: package -> version. A package that is not installed here, and a version that PEP 440 does not
    allow, count as meeting their requirement.
    """
    if versions == "*":
        return True
    simple = _at_least(versions, installed)
    return _by_packaging(versions, installed) if simple is None else simple


def _at_least(versions: str, installed: Mapping[str, str]) -> bool | None:
    """The same for `package>=1.2` and a release, without importing packaging, which takes long; None for
    everything else."""
    asked = _AT_LEAST.fullmatch(versions)
    version = None if asked is None else installed.get(asked[1])
    if asked is None or version is None:
        return None if asked is None else True
    found = _RELEASE.fullmatch(version)
    return None if found is None else _numbers(found[1]) >= _numbers(asked[2])


def _numbers(release: str) -> list[int]:
    """`2.10.0` -> [2, 10], without zeros at the end."""
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
