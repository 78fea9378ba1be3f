"""Encode rows; what a library says of one of them is said with its place."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.train.data.encoded import EncodedBatch, Encoder
from launcher.train.data.sources import Row


def encode_rows(encoder: Encoder, rows: Sequence[Row]) -> EncodedBatch:
    """The encoder's batch; what a library says of one of the rows is said with that row's place."""
    try:
        return encoder(rows)
    except (EffilaunchError, MemoryError):
        raise
    except Exception:
        for row in rows:
            try:
                encoder([row])
            except EffilaunchError:
                raise
            except Exception as error:
                message = f"the row cannot be encoded: {type(error).__name__}: {error}"
                hint = "fix or remove the row"
                raise RecipeError(
                    Problem("row-failed", message, file=row.file, line=row.number, hint=hint)
                ) from error
        raise
