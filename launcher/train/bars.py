"""The progress bars of transformers and the hub, which fill a file or a pipe with lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Within this, neither shows one; what was switched off before stays so."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
