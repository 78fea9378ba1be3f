"""Conversations to token ids and labels, through the tokenizer's chat template."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError
from launcher.train.data.encoded import IGNORED, Collector, EncodedBatch
from launcher.train.data.turns import Message, Span, Template, find_spans, render_errors

if TYPE_CHECKING:
    from launcher.train.data.sources import Row


class EncodeChat:
    """Encoder of conversations: canonical rows {messages, tools}.

    loss_on: assistant learns every assistant turn, completion the last one, all everything. A turn's
    closing token is learnt with it, its header is not.
    """

    def __init__(self, tokenizer: Any, max_length: int, overlong: str, loss_on: str) -> None:
        """RecipeError when the tokenizer has no chat template, or cannot tell where a token lies."""
        if not tokenizer.chat_template:
            raise RecipeError(
                Problem(
                    "chat-template-missing",
                    "the tokenizer has no chat template, and the rows are conversations",
                    path="model.chat_template",
                    hint="give model.chat_template, or use a model tuned for chat",
                )
            )
        if loss_on != "all" and not tokenizer.is_fast:
            raise RecipeError(
                Problem(
                    "tokenizer-offsets",
                    "the tokenizer does not tell where in the text a token lies, so turns cannot be masked",
                    path="data.loss_on",
                    hint="use loss_on: all, or a model with a tokenizer.json",
                )
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.overlong = overlong
        self.loss_on = loss_on
        self._special = {key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._blank: dict[int, bool] = {}
        self._closing = self._closing_token()

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        found = Collector(self.max_length, self.overlong)
        talks = [self._talk(row) for row in rows]
        encoded = self._encode([talk[0] for talk in talks if talk is not None])
        for talk in talks:
            if talk is None:
                found.drop("empty")
                continue
            _, spans, answered = talk
            ids, places = next(encoded)
            labels = list(ids) if spans is None else self._labels(ids, places, spans)
            if answered:
                ids, labels = self._with_end(ids, labels)
            found.add(ids, labels)
        return found.batch()

    def _talk(self, row: Row) -> tuple[str, list[Span] | None, bool] | None:
        """(text, what is learnt or None for all, whether it ends with an answer); None without turns."""
        messages = [plain_message(message, row) for message in row.values["messages"]]
        if not messages:
            return None
        text, spans = self._render(messages, row)
        return text, None if self.loss_on == "all" else spans, messages[-1].get("role") == "assistant"

    def _encode(self, texts: list[str]) -> Iterator[tuple[list[int], list[Span]]]:
        """(ids, their places in the text) of each text; no places where all is learnt."""
        if not texts:
            return iter(())
        masked = self.loss_on != "all"
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=masked,
            verbose=False,
        )
        places = encoded["offset_mapping"] if masked else [[] for _ in texts]
        return zip(encoded["input_ids"], places, strict=True)

    def _render(self, messages: list[Message], row: Row) -> tuple[str, list[Span]]:
        template = Template(self.tokenizer, row.values.get("tools"))

        def find(turns: list[Message]) -> tuple[str, list[Span] | None]:
            if self.loss_on == "all":
                return template.render(turns), []
            return find_spans(template, turns, last_only=self.loss_on == "completion")

        text, spans = _with_known_arguments(find, messages, row)
        _refuse_lost_tools(text, messages, template, row)
        if spans is None:
            raise RecipeError(
                Problem(
                    "chat-template-mask",
                    "the chat template does not show which part of this conversation the assistant says, "
                    "so its tokens cannot be told apart",
                    file=row.file,
                    line=row.number,
                    path="data.loss_on",
                    hint="mark them in the template with {% generation %}, or use loss_on: all",
                )
            )
        return text, spans

    def _labels(self, ids: list[int], offsets: list[Span], spans: list[Span]) -> list[int]:
        labels = [IGNORED] * len(ids)
        for first, last in spans:
            start = bisect_left(offsets, first, key=itemgetter(0))
            # Some tokenizers report a token of spaces as an empty place at its end: it lies before the span.
            while start < len(ids) and offsets[start][1] <= first:
                start += 1
            end = bisect_right(offsets, last, lo=start, key=itemgetter(1))
            end = self._close(ids, offsets, start, end, last)
            labels[start:end] = ids[start:end]
        return labels

    def _close(self, ids: list[int], offsets: list[Span], start: int, end: int, last: int) -> int:
        """The end of a learnt range, moved so that it is the turn's closing token where there is one."""
        if end < len(ids) and ids[end] in self._special and offsets[end][0] < last:
            return end + 1  # a token that swallows the line break after it
        if end < len(ids) and ids[end] == self._closing and ids[end - 1] != self._closing:
            return end + 1  # {% generation %} that leaves the closing token out
        closing = self._last_word(ids, end)
        # The model stops at the closing token: a line break after it is never asked of it.
        return closing + 1 if closing >= start and ids[closing] in self._special else end

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
        """Add a learnt EOS to an answer that the template ends with no special token."""
        eos = self.tokenizer.eos_token_id
        last = self._last_word(ids, len(ids))
        if eos is None or last < 0 or labels[last] == IGNORED or ids[last] in self._special:
            return ids, labels
        while last + 1 < len(ids) and labels[last + 1] != IGNORED:
            last += 1
        return [*ids[: last + 1], eos], [*labels[: last + 1], eos]

    def _closing_token(self) -> int | None:
        """The special token that a template with {% generation %} writes after the last of its blocks."""
        template = Template(self.tokenizer, None)
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


def _with_known_arguments(
    find: Callable[[list[Message]], tuple[str, list[Span] | None]], messages: list[Message], row: Row
) -> tuple[str, list[Span] | None]:
    """`find` with tool arguments as most templates take them (mappings), else as the others do (JSON)."""
    try:
        try:
            return find(messages)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return find([_map_arguments(message, _to_json) for message in messages])
    except render_errors() as error:
        raise RecipeError(
            Problem(
                "chat-template-failed",
                f"the chat template does not take this conversation: {str(error) or type(error).__name__}",
                file=row.file,
                line=row.number,
                path="data.train",
                hint="mend the row, or give another template as model.chat_template",
            )
        ) from error


def _refuse_lost_tools(text: str, messages: list[Message], template: Template, row: Row) -> None:
    """Many templates know no tools and leave them out without a word; RecipeError where that happened."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    for what, items in (("tool", template.tools or ()), ("tool call", calls)):
        for item in items:
            inner = item.get("function", item) if isinstance(item, dict) else {}
            name = inner.get("name") if isinstance(inner, dict) else None
            if isinstance(name, str) and _is_lost(name, what, text, messages, template):
                raise RecipeError(
                    Problem(
                        "chat-template-tools",
                        f"the chat template leaves out the {what} {name}",
                        file=row.file,
                        line=row.number,
                        path="model.chat_template",
                        hint="give a template that renders it, describe tools in a system message, "
                        "or leave such rows out",
                    )
                )


def _is_lost(name: str, what: str, text: str, messages: list[Message], template: Template) -> bool:
    """Whether a tool's name is not in the text, or only because somebody speaks of it."""
    if name not in text:
        return True
    if not any(name in str(message.get("content") or "") for message in messages):
        return False
    try:
        if what == "tool":
            return Template(template.tokenizer, None).render(messages) == text
        without = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
        return template.render([{**m, "content": m.get("content") or ""} for m in without]) == text
    except render_errors():
        return False


def plain_message(message: Message, row: Row) -> Message:
    """A message as templates expect it: no empty keys, the content one text, tool arguments mappings.

    RecipeError for content that is not text.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_part_text(part, row) for part in content)
    elif content is not None and not isinstance(content, str):
        raise _not_text(f"content of a message is {type(content).__name__}, expected text", row)
    return _map_arguments(plain, _from_json)


def _part_text(part: Any, row: Row) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        message = f"content of a message has a part of type {kind}; vision-language models are not supported"
        raise _not_text(message, row)
    text: str = part["text"]
    return text


def _not_text(message: str, row: Row) -> RecipeError:
    hint = "only text parts can be trained on: {type: text, text: ...}"
    return RecipeError(Problem("chat-content", message, file=row.file, line=row.number, hint=hint))


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
        return json.loads(arguments)
    except ValueError:
        return arguments


def _to_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
