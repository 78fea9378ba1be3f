"""Rows with a chosen and a rejected answer, for every task that compares the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.data.chat import in_forms, plain_message, require_template, template_origin
from launcher.train.data.encoded import EncodedBatch
from launcher.train.data.rendered import RenderCheck
from launcher.train.data.sources import Row
from launcher.train.data.turns import Message, Template
from launcher.train.job import Job


def refuse_mixture(rows: Sequence[Row]) -> None:
    """RecipeError where some rows are text and some messages.

    trl looks at the first row alone to tell them apart, and text of a later row loses its EOS.
    """
    kinds = [isinstance(row.values["chosen"], str) for row in rows]
    for row, kind in zip(rows, kinds, strict=True):
        if kind is not kinds[0]:
            what = ("text", "messages") if kind else ("messages", "text")
            message = f"the answers are {what[0]}, those of rows before it are {what[1]}"
            hint = "put the two kinds into two sources"
            raise RecipeError(Problem("mixed-rows", message, file=row.file, line=row.number, hint=hint))


class PreferenceEncoder:
    """Checks what the chat template leaves out of preference pairs; `encode` then makes samples of them."""

    def __init__(self, job: Job, tokenizer: Any, encode: Callable[[Sequence[Row]], EncodedBatch]) -> None:
        self.tokenizer, self.encode = tokenizer, encode
        self._rendered = RenderCheck(template_origin(job), masked=False)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        notes: Counter[str] = Counter()
        rows = [row if isinstance(row.values["chosen"], str) else self._checked(row, notes) for row in rows]
        batch = self.encode(rows)
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
