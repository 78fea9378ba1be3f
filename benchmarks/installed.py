"""Where and with what a benchmark ran, for its record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable


def processor_words() -> str:
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
