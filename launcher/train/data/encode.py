"""Which encoder turns the canonical rows of a task into samples."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.train.data.chat import in_forms, plain_message, require_template, template_origin
from launcher.train.data.encoded import EncodedBatch, Encoder
from launcher.train.data.formats import Detected, label_id
from launcher.train.data.rendered import RenderCheck
from launcher.train.data.sources import Row
from launcher.train.data.tokenize import make_encoder
from launcher.train.data.turns import Message, Template
from launcher.train.job import Job


def encoder_for(job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
    """The encoder of a plan's task for rows of this format."""
    if detected.format == "image":
        assert labels is not None, "classification knows its labels before it encodes"
        return ImageEncoder(labels)
    if detected.format == "preference":
        return PreferenceEncoder(job, processing)
    return make_encoder(job, processing, detected, labels)


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
                hint = "mend or remove the row"
                raise RecipeError(
                    Problem("row-failed", message, file=row.file, line=row.number, hint=hint)
                ) from error
        raise


class ImageEncoder:
    """Pictures stay what they are (a path, or the file's bytes) beside the id of their label.

    Each is opened once here, so that a broken one is found before a device is taken.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = labels

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        paths: list[str | None] = []
        contents: list[bytes | None] = []
        for row in rows:
            path, content = picture(row)
            paths.append(path)
            contents.append(content)
        columns: dict[str, list[Any]] = {
            "image_path": paths,
            "image_bytes": contents,
            "labels": [label_id(row, self.labels) for row in rows],
        }
        return EncodedBatch(columns, kept=len(rows), rows=list(range(len(rows))))


def picture(row: Row) -> tuple[str | None, bytes | None]:
    """(path, None) or (None, bytes) of a row's picture; RecipeError when it is none."""
    from PIL import Image

    value = row.values["image"]
    try:
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
            image.load()  # all of it: a file that is cut off opens well
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel, which RGB clips")
    except (OSError, SyntaxError, ValueError, AttributeError, TypeError) as error:
        message = f"the picture cannot be read: {error}"
        raise RecipeError(
            Problem("bad-image", message, file=row.file, line=row.number, hint="mend or remove the row")
        ) from error
    return (None, value) if isinstance(value, bytes) else (value, None)


class PreferenceEncoder:
    """Preference pairs through trl's own preparation, which does not look at what the template leaves out."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.job, self.tokenizer = job, tokenizer
        self._rendered = RenderCheck(template_origin(job), masked=False)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        from launcher.train.dpo import encode_preferences

        notes: Counter[str] = Counter()
        rows = [row if isinstance(row.values["chosen"], str) else self._checked(row, notes) for row in rows]
        batch = encode_preferences(self.job, self.tokenizer, rows)
        batch.notes = +notes
        return batch

    def _checked(self, row: Row, notes: Counter[str]) -> Row:
        """The row with its messages as the template takes them. RecipeError where it leaves something out."""
        require_template(self.tokenizer)
        template = Template(self.tokenizer, row.values.get("tools"))

        def find(messages: list[Message]) -> tuple[list[Message], Counter[str]]:
            found: Counter[str] = Counter()
            taken = self._rendered.adapted(template, messages, row)
            self._rendered.check(template, taken, template.render(taken), row, found)
            return taken, found

        prompt, values = row.values["prompt"], dict(row.values)
        for name in ("chosen", "rejected"):
            messages = [plain_message(message) for message in [*prompt, *row.values[name]]]
            taken, found = in_forms(find, messages, self._rendered.origin, row)
            notes.update(found)
            values |= {"prompt": taken[: len(prompt)], name: taken[len(prompt) :]}
        return Row(values, row.file, row.number)
