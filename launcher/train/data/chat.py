"""Conversations to token ids and labels, through the tokenizer's chat template."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json
from launcher.rows.class_names import IGNORED
from launcher.rows.messages import REASONING, TRAIN, Message
from launcher.rows.sources import Row, bad_row
from launcher.train.data.encoded import Collector, EncodedBatch
from launcher.train.data.rendered import TOOLS_HINT, Outline, RenderCheck
from launcher.train.data.template import Span, Template, assistant_turns, find_spans, render_errors
from launcher.train.job import Job

if TYPE_CHECKING:
    from launcher.rows.sources import Row
    from launcher.train.job import Job


T = TypeVar("T")
_CONTENTS: tuple[Message, ...] = ({}, {"content": None}, {"content": ""})


@dataclass(slots=True)
class Talk:
    """A rendered conversation."""

    text: str
    spans: list[Span]
    """Ranges of targets; with `loss_on: all`, the masked ones."""
    answered: bool
    """Whether it ends with an answer."""


class EncodeChat:
    """Encoder of conversations: canonical rows {messages, tools, train}.

    loss_on: with `assistant` every assistant turn is a target, with `completion` the last one, with `all`
    everything; a turn whose flag in `train` is False is masked. The closing token of a turn is a target; its
    header is masked, and so is text in the answer that the template inserts.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        overlong: str,
        loss_on: str,
        *,
        loss_on_inserted: bool = False,
        origin: str = "the chat template",
    ) -> None:
        """RecipeError when the tokenizer has no chat template, or cannot report where in the text a token is.

        origin: what errors call the template.
        """
        require_template(tokenizer)
        if loss_on != "all":
            _require_offsets(tokenizer)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.loss_on = loss_on
        self.loss_on_inserted = loss_on_inserted or loss_on == "all"
        self.rendered = RenderCheck(origin, masked=not self.loss_on_inserted)
        self._special = {key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._blank: dict[int, bool] = {}
        self._closing = self._closing_token()
        self._begins = self._beginning_tokens()

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        talks = [self._talk(row, found.notes) for row in rows]
        masked = self.loss_on != "all" or any(isinstance(talk, Talk) and talk.spans for talk in talks)
        encoded = self._encode([talk.text for talk in talks if isinstance(talk, Talk)], masked=masked)
        for talk in talks:
            if isinstance(talk, str):
                found.dropped[talk] += 1
                continue
            ids, places = next(encoded)
            labels = self._labels(ids, places, talk.spans)
            if talk.answered:
                ids, labels = self._with_end(ids, labels)
            found.add(ids, labels)
        return found

    def _labels(self, ids: list[int], places: list[Span], spans: list[Span]) -> list[int]:
        """Labels of a conversation's tokens; places: of each token in the text."""
        labels = [IGNORED] * len(ids) if self.loss_on != "all" else list(ids)
        for start, end in self._ranges(ids, places, spans):
            labels[start:end] = ids[start:end] if self.loss_on != "all" else [IGNORED] * (end - start)
        return labels

    def _talk(self, row: Row, notes: Counter[str]) -> Talk | str:
        """The rendered row, or why it is dropped."""
        messages = [plain_message(message) for message in row.values["messages"]]
        if not messages:
            return "empty"
        turns, left_out = self._turns(messages, row)
        if left_out and not turns and self.loss_on != "all":
            return "masked"
        answers = [turn for turn in turns if has_answer(messages[turn])]
        if turns and not answers:
            return "empty"
        if left_out:
            notes["turn-masked"] += len(left_out)
        if empty := [turn for turn in turns if turn not in answers]:
            _require_offsets(self.tokenizer)
            notes["empty-turn-masked"] += len(empty)
            turns, left_out = answers, sorted([*left_out, *empty])
        text, spans = self._render(messages, left_out if self.loss_on == "all" else turns, row, notes)
        return Talk(text, spans, messages[-1].get("role") == "assistant")

    def _turns(self, messages: Sequence[Message], row: Row) -> tuple[list[int], list[int]]:
        """(turns that are targets, turns that would be if the row did not mask them)."""
        turns = assistant_turns(messages)
        if self.loss_on == "completion":
            turns = turns[-1:]
        flags = row.values.get(TRAIN) or [None] * len(messages)
        for index, (message, flag) in enumerate(zip(messages, flags, strict=True)):
            if message.get("role") != "assistant" and flag is (self.loss_on != "all"):
                wanted = "to be learned" if flag else "not to be learned"
                learn_all = ", or learn everything with loss_on: all" if flag else ""
                raise bad_row(
                    row,
                    f"message {index + 1} (role {message.get('role')}) is {wanted}; with loss_on: "
                    f"{self.loss_on} only turns of the assistant can be chosen",
                    f"remove the mask of that message{learn_all}",
                    code="chat-mask",
                    path="data.loss_on",
                )
        left_out = [turn for turn in turns if flags[turn] is False]
        if left_out and not self.tokenizer.is_fast:
            _require_offsets(self.tokenizer)
        return [turn for turn in turns if flags[turn] is not False], left_out

    def _encode(self, texts: list[str], *, masked: bool) -> Iterator[tuple[list[int], list[Span]]]:
        """(ids, their places in the text) of each text; no places where every token is a target."""
        if not texts:
            return iter(())
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
            return_offsets_mapping=masked, verbose=False,
        )  # fmt: skip
        places = encoded["offset_mapping"] if masked else [[] for _ in texts]
        return zip(encoded["input_ids"], places, strict=True)

    def _render(
        self, messages: list[Message], turns: list[int], row: Row, notes: Counter[str]
    ) -> tuple[str, list[Span]]:
        """The text of a row and the ranges of `turns` in it."""
        template = self._template(row)

        def find(given: list[Message]) -> tuple[str, list[Span] | None]:
            taken = self.rendered.adapted(template, given, row)
            if turns or self.loss_on != "all":
                text, spans = find_spans(template, taken, turns)
            else:
                text, spans = template.render(taken), []
            found: Counter[str] = Counter()
            outline = self._outline(template, taken, text, row, found)
            if spans is not None and len(spans) == len(turns) and not self.loss_on_inserted:
                for number, (turn, span) in enumerate(zip(turns, spans, strict=True)):
                    own = taken[turn].get("content") or ""
                    added = self.rendered.inserted(template, outline, turn, own, text, span[0])
                    spans[number] = (span[0] + added, span[1])
                    found["inserted-text-masked"] += added > 0
            notes.update(+found)
            return text, spans

        text, spans = in_forms(find, messages, self.rendered.origin, row)
        if spans is None:
            raise bad_row(
                row,
                f"{self.rendered.origin} does not show which part of this conversation is the assistant's",
                "mark it in the template with {% generation %}, or use loss_on: all",
                code="chat-template-mask",
                path="data.loss_on",
            )
        return text, spans

    def _template(self, row: Row) -> Template:
        return Template(self.tokenizer, row.values.get("tools"))

    def _outline(
        self, template: Template, messages: list[Message], text: str, row: Row, found: Counter[str]
    ) -> Outline:
        """What the template does with such messages. RecipeError where `text` lacks something of them."""
        return self.rendered.check(template, messages, text, row, found)

    def _ranges(self, ids: list[int], offsets: list[Span], spans: list[Span]) -> Iterator[Span]:
        """The tokens of each range of characters, the closing token included."""
        for first, last in spans:
            start = bisect_left(offsets, first, key=itemgetter(0))
            # Some tokenizers report a token of spaces as an empty place at its end: it is before the span.
            while start < len(ids) and offsets[start][1] <= first:
                start += 1
            end = bisect_right(offsets, last, lo=start, key=itemgetter(1))
            yield start, self._close(ids, offsets, start, end, last)

    def _close(self, ids: list[int], offsets: list[Span], start: int, end: int, last: int) -> int:
        """The end of a range of targets, moved so that it is the turn's closing token where there is one."""
        if end < len(ids) and ids[end] in self._special and offsets[end][0] < last:
            return end + 1  # a token that swallows the line break after it
        if end < len(ids) and ids[end] == self._closing and ids[end - 1] != self._closing:
            return end + 1  # {% generation %} that leaves the closing token out
        closing = self._last_word(ids, end)
        # The model stops at the closing token: a line break after it is never needed.
        if closing >= start and ids[closing] in self._special:
            return closing + 1
        # Some templates end a turn with the marker of the next role alone, and their models stop there.
        after = end
        while after < len(ids) and ids[after] not in self._special and self._is_blank(ids[after]):
            after += 1
        return after + 1 if after < len(ids) and ids[after] in self._special - self._begins else end

    def _last_word(self, ids: list[int], end: int) -> int:
        """Index of the last token before `end` that is more than white space, -1 if none is."""
        index = end - 1
        while index >= 0 and ids[index] not in self._special and self._is_blank(ids[index]):
            index -= 1
        return index

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    def _with_end(self, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
        """Add an EOS that is a target to an answer that the template ends with no special token."""
        eos = self.tokenizer.eos_token_id
        last = self._last_word(ids, len(ids))
        if eos is None or last < 0 or labels[last] == IGNORED or ids[last] in self._special:
            return ids, labels
        while last + 1 < len(ids) and labels[last + 1] != IGNORED:
            last += 1
        return [*ids[: last + 1], eos], [*labels[: last + 1], eos]

    def _beginning_tokens(self) -> set[int]:
        """The special tokens that begin a text or an answer: no turn ends with them."""
        template, talk = self._template(Row({}, "", 0)), [{"role": "user", "content": "a"}]
        before, asked = template.attempt(talk) or "", template.attempt(talk, prompt=True) or ""
        header = asked[len(before) :] if asked.startswith(before) else ""
        ids = self.tokenizer(header, add_special_tokens=False)["input_ids"] if header else []
        return {self.tokenizer.bos_token_id, *ids}

    def _closing_token(self) -> int | None:
        """The special token that a template with {% generation %} writes after the last of its blocks."""
        template = self._template(Row({}, "", 0))
        if self.loss_on == "all" or not template.has_generation:
            return None
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text, spans = template.render_marked(talk)
        except render_errors():
            return None
        tail = text[spans[-1][1] :].lstrip() if spans else ""
        ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
        return ids[0] if ids and ids[0] in self._special else None


def has_answer(message: Message) -> bool:
    """Whether a turn of the assistant holds something: its end alone would teach to write nothing."""
    texts = (message.get(key) or "" for key in ("content", *REASONING))
    return any(text.strip() for text in texts) or "tool_calls" in message


def turns_end_open(tokenizer: Any) -> bool:
    """Whether the template ends a turn with the marker of the next role alone, which 0.2.0 did not learn."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    talk = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    try:
        template = Template(tokenizer, None)
        text, spans = find_spans(template, talk, [1])
    except render_errors():
        return False
    end = spans[-1][1] if spans else len(text)
    special = tuple(template.special)
    return not text[:end].rstrip().endswith(special) and text[end:].lstrip().startswith(special)


def template_origin(job: Job) -> str:
    """What errors call the chat template: the recipe's name for it, since the tokenizer may be of a cache."""
    given = job.model.chat_template
    if given:
        return "the template of model.chat_template" + (f" ({given})" if "{" not in given else "")
    return f"the chat template of {job.model.tokenizer or job.model.name_or_path}"


def require_template(tokenizer: Any) -> None:
    """RecipeError when the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        message = "the tokenizer has no chat template, and the rows are conversations"
        hint = "give model.chat_template, or use a model tuned for chat"
        raise RecipeError(Problem("chat-template-missing", message, path="model.chat_template", hint=hint))


def _require_offsets(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        message = "the tokenizer does not report where in the text a token is, so turns cannot be masked"
        hint = "use loss_on: all, or a model with a tokenizer.json"
        raise RecipeError(Problem("tokenizer-offsets", message, path="data.loss_on", hint=hint))


def in_forms(find: Callable[[list[Message]], T], messages: list[Message], origin: str, row: Row) -> T:
    """`find` with tool calls as most templates take them, else in the other forms that templates know.

    Arguments as objects, as JSON text, calls without the wrapping `function`; each without a content where a
    call has none, with None and with an empty one. RecipeError names the failure of the first form.
    """
    calls = any(message.get("tool_calls") for message in messages)
    refused: RecipeError | None = None
    failed: Exception | None = None
    for form, content in itertools.product(_FORMS, _CONTENTS) if calls else ((_FORMS[0], _CONTENTS[0]),):
        try:
            return find([{**content, **form(message)} for message in messages])
        except RecipeError as error:
            refused = refused or error
        except render_errors() as error:
            failed = error if form is _FORMS[0] else failed
    if refused is not None:
        raise refused
    what = "a conversation with tool calls" if calls else "this conversation"
    message = f"{origin} does not take {what}: {str(failed) or type(failed).__name__}"
    hint = TOOLS_HINT if calls else "correct the row, or give another template as model.chat_template"
    raise bad_row(row, message, hint, code="chat-template-failed", path="data.train") from failed


def plain_message(message: Message) -> Message:
    """A message as templates expect it: no empty keys, tool arguments mappings."""
    plain = {key: value for key, value in message.items() if value is not None}
    return _map_arguments(plain, _from_json)


def _map_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with `change` applied to the arguments of each of its tool calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for call in calls:
        inner = call.get("function", call)
        if "arguments" in inner:
            inner = {**inner, "arguments": change(inner["arguments"])}
        changed.append({**call, "function": inner} if "function" in call else inner)
    return {**message, "tool_calls": changed}


def _from_json(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def _to_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _unwrapped(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [call.get("function", call) for call in calls]} if calls else message


_FORMS: tuple[Callable[[Message], Message], ...] = (
    lambda message: message,
    lambda message: _map_arguments(message, _to_json),
    _unwrapped,
)
