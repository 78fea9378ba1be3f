"""Tasks with a trainer of trl: what the encoders of their rows have in common."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.errors import MachineError, Problem, RecipeError
from launcher.rows.messages import Message
from launcher.rows.sources import Row
from launcher.train.data.chat import has_answer, in_forms, plain_message, require_template, template_origin
from launcher.train.data.encoded import EncodedBatch
from launcher.train.data.rendered import RenderCheck
from launcher.train.data.template import Template
from launcher.train.job import Job
from launcher.train.tasks.task import TrainTask

if TYPE_CHECKING:
    from launcher.rows.sources import Detected
    from launcher.train.data.encoded import Encoder


@contextlib.contextmanager
def importing_trl(task: str) -> Iterator[None]:
    """MachineError where trl cannot be imported."""
    try:
        yield
    except ImportError as error:
        message = f"task {task} needs trl, which cannot be imported: {error}"
        hint = "pip install 'effilaunch[dpo]'"
        raise MachineError(Problem("trl-missing", message, path="task", hint=hint)) from error


class TrainPairs(TrainTask):
    """A task whose batches trl's trainer makes, of samples that `encode` makes."""

    encode: Callable[[Job, Any, Sequence[Row]], EncodedBatch]
    """Rows {prompt} and `answers`, all text or all messages, as samples; equal answers are dropped."""
    answers: tuple[str, ...] = ("chosen", "rejected")
    """Canonical fields of a row that each continue its prompt."""

    def encoder(self, job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
        return PreferenceEncoder(job, processing, partial(self.encode, job, processing), self.answers)

    def collator(self, job: Job, processing: Any) -> None:
        return None


def needs_reference(job: Job) -> bool:
    """Whether the loss of a run reads log-probabilities of a reference."""
    return job.task.needs_reference(job.fields(job.trainer))


class HasReference(TrainTask):
    """A task whose trainer has a reference."""

    def as_it_began(self, job: Job, trainer: Any, processing: Any) -> None:
        """The reference is what training began with; trl copies the weights that it is given."""
        from launcher.train.model.models import load_model

        if not needs_reference(job):
            return
        if job.adapter.path:
            from peft import load_peft_weights, set_peft_model_state_dict

            from launcher.train.model.processing import local_or_hub
            from launcher.train.upstream.model_seams import adapters_by_own_names

            weights = load_peft_weights(local_or_hub(job.adapter.path), device="cpu")
            with adapters_by_own_names():
                set_peft_model_state_dict(trainer.model, weights, adapter_name="ref")
        elif not job.has_adapter:
            trainer.ref_model.load_state_dict(load_model(job, processing).state_dict())


class TrainAgainstReference(HasReference, TrainPairs):
    """A task of answers whose trainer has a reference."""


def refuse_mixture(rows: Sequence[Row], answer: str = "chosen") -> None:
    """RecipeError where some rows are text and some messages.

    trl checks the first row alone, and text of a later row loses its EOS.
    """
    kinds = [isinstance(row.values[answer], str) for row in rows]
    for row, kind in zip(rows, kinds, strict=True):
        if kind is not kinds[0]:
            what = ("text", "messages") if kind else ("messages", "text")
            message = f"the answers are {what[0]}, those of rows before it are {what[1]}"
            hint = "put the two kinds into two sources"
            raise RecipeError(Problem("mixed-rows", message, file=row.file, line=row.number, hint=hint))


def _is_answer(answer: str | list[Message]) -> bool:
    """Whether no turn of an answer is empty: trl takes all of its tokens into the loss."""
    if isinstance(answer, str):
        return bool(answer.strip())
    return all(has_answer(turn) for turn in answer if turn.get("role") == "assistant")


class PreferenceEncoder:
    """Drops empty answers, and checks what the chat template leaves out; then `encode` makes the samples."""

    def __init__(
        self,
        job: Job,
        tokenizer: Any,
        encode: Callable[[Sequence[Row]], EncodedBatch],
        answers: Sequence[str],
    ) -> None:
        self.tokenizer, self.encode, self.answers = tokenizer, encode, answers
        self._rendered = RenderCheck(template_origin(job), masked=False)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        notes: Counter[str] = Counter()
        first = self.answers[0]
        places = [
            number
            for number, row in enumerate(rows)
            if all(_is_answer(row.values[name]) for name in self.answers)
        ]
        answered = [rows[number] for number in places]
        batch = self.encode(
            [row if isinstance(row.values[first], str) else self._checked(row, notes) for row in answered]
        )
        batch.rows = [places[number] for number in batch.rows]
        batch.dropped += Counter(empty=len(rows) - len(places))
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
        for name in self.answers:
            messages = [plain_message(message) for message in [*prompt, *row.values[name]]]
            taken, found = in_forms(find, messages, self._rendered.origin, row)
            notes.update(found)
            values |= {"prompt": taken[: len(prompt)], name: taken[len(prompt) :]}
        return Row(values, row.file, row.number)
