"""Records of benchmarks: what was found, with where, when and with what it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def read_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def keep(path: Path, head: Sequence[str], rows: Sequence[Sequence[str]], packages: Iterable[str]) -> None:
    """Write one table: cells as they were printed. packages: those whose versions belong to the figures."""
    about = {
        "date": today(),
        "machine": processor_words(),
        "versions": {"python": platform.python_version(), **versions(packages)},
    }
    write_record(path, {**about, "head": list(head), "rows": [list(row) for row in rows]})


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


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
