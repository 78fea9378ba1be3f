"""Write files that are whole or absent: a reader, or a start after a kill, never meets half of one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write beside the target, then rename. Raises OSError, and leaves nothing then."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON value. ValueError for numbers that JSON has not."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
