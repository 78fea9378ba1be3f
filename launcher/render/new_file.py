"""A file beside the user's own: written whole, or not there."""

from __future__ import annotations

from pathlib import Path


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet. OSError otherwise; what a full disk took of it is removed.

    Half a character, as a wrong name in the environment leaves one, is written as an escape.
    """
    content = text.encode("utf-8", errors="backslashreplace")
    with path.open("xb") as stream:
        try:
            stream.write(content)
            stream.flush()
        except BaseException:
            path.unlink()
            raise
