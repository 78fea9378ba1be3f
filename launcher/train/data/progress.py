"""Progress of long steps: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

EVERY_S = 15.0
"""Seconds between two lines of a log."""


class Progress:
    """Counts rows of `total` (None: unknown) and shows them on stderr."""

    def __init__(self, title: str, total: int | None, stream: TextIO | None = None) -> None:
        self._title, self._total = title, total
        self._stream = stream or sys.stderr
        self._done = 0
        self._started = self._said = time.monotonic()
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=title, unit=" rows", unit_scale=True, file=self._stream)

    def add(self, rows: int) -> None:
        """Count rows that are done."""
        self._done += rows
        if self._bar is not None:
            self._bar.update(rows)
        elif time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            self._line()

    def _line(self) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        share = f" of {self._total:,}" if self._total else ""
        speed = f"{self._done / seconds:,.0f} rows/s"
        print(f"{self._title}: {self._done:,}{share} rows, {speed}", file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            self._line()
