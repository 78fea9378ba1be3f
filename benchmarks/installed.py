"""Versions for the records of benchmarks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
