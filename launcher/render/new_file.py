"""A new file for the user, written completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Problem, RecipeError


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


def existing(path: Path, option: str = "--output") -> Problem | None:
    """Why nothing is written there: something is there, be it a link that leads nowhere."""
    if not os.path.lexists(path):
        return None
    hint = f"move it away, or name another file with {option}"
    return Problem("file-exists", "is there already, and is not overwritten", file=str(path), hint=hint)


def refuse_existing(path: Path, option: str = "--output") -> None:
    """RecipeError where something is there already."""
    if (problem := existing(path, option)) is not None:
        raise RecipeError(problem)


@contextlib.contextmanager
def writing(path: Path, option: str = "--output") -> Iterator[None]:
    """Within this a file is written that the user asked for; RecipeError where that cannot be."""
    try:
        yield
    except FileExistsError:
        refuse_existing(path, option)
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
        message = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        hint = f"name another file with {option}"
        raise RecipeError(Problem("file-unwritable", message, file=str(path), hint=hint)) from None
