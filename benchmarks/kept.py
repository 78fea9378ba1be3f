"""A benchmark's table as a record: cells as they were printed, with where and when they were measured."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from installed import processor_words, versions


def keep(path: Path, head: Sequence[str], rows: Sequence[Sequence[str]], packages: Iterable[str]) -> None:
    """Write one table. packages: those whose versions belong to the figures."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": processor_words(),
        "versions": {"python": platform.python_version(), **versions(packages)},
    }
    record = {**about, "head": list(head), "rows": [list(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
