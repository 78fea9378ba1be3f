"""A tokenizer's chat template, and where the assistant speaks in a rendered conversation.

Three ways to find these ranges of characters, the first that works: the template marks them with
{% generation %}; each shorter conversation renders to a beginning of the complete text; the assistant's texts
are replaced by marks, and the two renderings are aligned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from launcher.rows.messages import Message

Span = tuple[int, int]
"""First character, and the one after the last."""

_TODAY = re.compile(r"""\bstrftime_now\(\s*(['"])(.+?)\1""")
_NUMBERS = {"Y": r"\d{4}", **dict.fromkeys("dmyHMS", r"\d{1,2}")}
"""Codes of strftime that are numbers -> their pattern; the others are words."""
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")


def render_errors() -> tuple[type[Exception], ...]:
    """What a template raises at a conversation that it does not take."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


def dates_written(tokenizer: Any, text: str) -> list[str]:
    """The dates in `text` that the chat template wrote as those of the day (`strftime_now`)."""
    templates = tokenizer.chat_template or ""
    source = "".join(templates.values()) if isinstance(templates, dict) else templates
    found = []
    for _, form in _TODAY.findall(source):
        parts = re.split(r"%-?([a-zA-Z])", form)
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = [_NUMBERS.get(code, r"[^\W\d]+") for code in parts[1::2]]
        found += re.findall(rf"\b{''.join(parts)}\b", text)
    return list(dict.fromkeys(found))


class Template:
    """A tokenizer's chat template together with the tools of one conversation."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None) -> None:
        self.tokenizer = tokenizer
        self.tools = tools or None
        self.source = str(tokenizer.get_chat_template(None, self.tools))
        self.has_generation = bool(_GENERATION_BLOCK.search(self.source))

    @cached_property
    def special(self) -> set[str]:
        """The texts of the tokenizer's special tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        return {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of a conversation; prompt: with the header that asks the assistant to speak."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=self.tools, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text and the ranges inside {% generation %}.

        This is what apply_chat_template does for its mask, which it makes of tokens: a range that begins
        with a space which the tokenizer folds into a word loses all later ranges there.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=self.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in spans[0] if end > start]

    def opening(self, messages: Sequence[Message], turn: int, text: str) -> int | None:
        """Where in the conversation's `text` the turn begins, after its header; None if unknown."""
        if turn == 0:
            return None
        asked = self.attempt(messages[:turn], prompt=True)
        before = self.attempt(messages[:turn])
        if asked is None or before is None or not text.startswith(before):
            return None if asked is None or not text.startswith(asked) else len(asked)
        if asked == before:
            return len(before) + len(self._header(messages[:turn], before))
        if text.startswith(asked):
            return len(asked)
        # The prompt may open a thought that this turn lacks: what was written of the rest is the header.
        prompt = before + asked[len(before) :].partition("<think>")[0]
        if text.startswith(prompt.rstrip()):
            return max(len(before), len(_shared_beginning(prompt, text)))
        shared = _shared_beginning(prompt, text)
        ends = [shared.rfind(sign) + len(sign) for sign in ("\n", *self.special) if sign in shared]
        return max(len(before), *ends) if ends else len(before)

    def _header(self, messages: Sequence[Message], before: str) -> str:
        """What a template that knows no prompt writes ahead of an answer, without the last spaces."""
        mark = _unused(before)
        after = self.attempt([*messages, {"role": "assistant", "content": mark}])
        if after is None or not after.startswith(before) or after.count(mark) != 1:
            return ""
        return after[len(before) : after.index(mark)].rstrip(" ")

    def attempt(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """`render`, None where the template refuses the conversation."""
        try:
            return self.render(messages, prompt=prompt)
        except render_errors():
            return None


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    """The places of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def find_spans(
    template: Template, messages: Sequence[Message], turns: Sequence[int]
) -> tuple[str, list[Span] | None]:
    """The rendered text and the ranges of these turns of the assistant, closing tokens included.

    One range for each turn, or more where the template marks several; None where they cannot be found.
    Whatever the template raises at the whole conversation passes.
    """
    text = ""
    if template.has_generation:
        text, spans = template.render_marked(messages)
        spoken = assistant_turns(messages)
        if list(turns) == spoken:
            return text, spans
        if len(spans) == len(spoken):
            return text, [span for turn, span in zip(spoken, spans, strict=True) if turn in turns]
        if (within := _within(template, messages, turns, text, spans)) is not None:
            return text, within
    text = text or template.render(messages)
    if not turns:
        return text, []
    spans_or_none = _by_prefixes(template, messages, turns, text)
    if spans_or_none is None:
        spans_or_none = _by_marks(template, messages, turns, text)
    return text, spans_or_none


def _within(
    template: Template, messages: Sequence[Message], turns: Sequence[int], text: str, spans: Sequence[Span]
) -> list[Span] | None:
    """Those of the marked ranges that are in these turns; None where the turns' borders are not known."""
    found: list[Span] = []
    for turn in turns:
        before, after = template.attempt(messages[:turn]), template.attempt(messages[: turn + 1])
        if turn == len(messages) - 1:
            after = text
        if before is None or after is None or not (text.startswith(before) and text.startswith(after)):
            return None
        found += [span for span in spans if len(before) <= span[0] < len(after)]
    return found


def _by_prefixes(
    template: Template, messages: Sequence[Message], turns: Sequence[int], text: str
) -> list[Span] | None:
    """What one turn more adds to the text; None when a longer conversation renders a turn otherwise."""
    spans = []
    for turn in turns:
        opening = template.opening(messages, turn, text)
        whole = turn == len(messages) - 1
        closed = text if whole else template.attempt(messages[: turn + 1])
        if opening is None or closed is None:
            return None
        if not text.startswith(closed) or len(closed) < opening:
            return None
        spans.append((opening, len(closed)))
    return spans


def _by_marks(
    template: Template, messages: Sequence[Message], turns: Sequence[int], text: str
) -> list[Span] | None:
    """The ranges by aligning the text with the same conversation where the assistant's texts are marks."""
    marked = list(messages)
    marks, said = [], []
    for turn in turns:
        mark = _unused(text, turn)
        marked[turn], original = _say(messages[turn], mark)
        marks.append(mark)
        said.append(original)
    shown = template.attempt(marked)
    if shown is None or any(shown.count(mark) != 1 for mark in marks):
        return None
    pieces = re.split("|".join(map(re.escape, marks)), shown)
    if not text.startswith(pieces[0]):
        return None
    prompt = _prompt(template, messages, text)
    spans = []
    shown_at, text_at = 0, 0  # where the piece before the mark begins in either text
    for number, turn in enumerate(turns):
        piece, following = pieces[number], pieces[number + 1]
        begins = text_at + len(piece)
        ends = _end_of_words(text, begins, said[number], following, last=number == len(turns) - 1)
        opening = template.opening(marked, turn, shown)
        if opening is not None and shown_at <= opening:
            header = min(opening - shown_at, len(piece))
        else:
            header = _end_of_header(piece, prompt)
        closing = _closing(template, marked[: turn + 1], marks[number], following)
        if closing is None and turn + 1 in assistant_turns(messages):
            closing = ""  # the template runs one turn into the next
        if ends is None or closing is None:
            return None
        spans.append((text_at + header, ends + len(closing)))
        shown_at += len(piece) + len(marks[number])
        text_at = ends
    return spans


def _unused(text: str, number: int = 0) -> str:
    """A word that no trimming or escaping changes and that `text` does not hold."""
    mark = f"qzMARK{number}zq"
    while mark in text:
        mark += "z"
    return mark


def _say(message: Message, mark: str) -> tuple[Message, str]:
    """(the message with its words replaced by `mark`, those words).

    A thought before the words stays, since templates treat thoughts differently; of a tool call the
    name is replaced, since templates may leave the words beside it out.
    """
    calls = message.get("tool_calls")
    if calls:
        first = dict(calls[0])
        inner = dict(first["function"]) if isinstance(first.get("function"), dict) else first
        name = str(inner.get("name", ""))
        inner["name"] = mark
        if inner is not first:
            first["function"] = inner
        return {**message, "tool_calls": [first, *calls[1:]]}, name
    content = message.get("content") or ""
    thought, closed, rest = content.rpartition("</think>")
    words = rest.strip()
    before, _, after = rest.partition(words) if words else (rest, "", "")
    return {**message, "content": thought + closed + before + mark + after}, words


def _end_of_words(text: str, begins: int, words: str, following: str, *, last: bool) -> int | None:
    """Where the words that begin at `begins` end, so that `following` comes next."""
    if last:
        ends = len(text) - len(following)
        return ends if ends >= begins and text.endswith(following) else None
    if text.startswith(words + following, begins):
        return begins + len(words)
    found = text.find(following, begins) if following else -1
    return None if found < 0 else found


def _prompt(template: Template, messages: Sequence[Message], text: str) -> str:
    """The header that asks for the assistant's answer, empty where it cannot be found."""
    asking = template.attempt(messages, prompt=True)
    return asking[len(text) :] if asking is not None and asking.startswith(text) else ""


def _end_of_header(piece: str, prompt: str) -> int:
    """Where the assistant's header ends in the text before its words.

    The prompt may open a thought that earlier turns lack, so its first line will do.
    """
    first_line = prompt[: prompt.find("\n") + 1]
    for header in (prompt, first_line):
        at = piece.rfind(header) if header else -1
        if at >= 0:
            return at + len(header)
    return len(piece.rstrip(" "))  # the space before a word is often part of its token


def _closing(template: Template, messages: Sequence[Message], mark: str, following: str) -> str | None:
    """How the template closes a turn, the last of `messages`: what follows the words where it stands last.

    following: what follows the words in the complete conversation.
    """
    shown = template.attempt(messages)
    if shown is None or shown.count(mark) != 1:
        return None
    tail = shown.partition(mark)[2]
    for closing in (tail, tail.rstrip()):
        if following.startswith(closing):
            return closing
    # Some templates end a conversation with a token more than a turn, or with another one.
    shared = _shared_beginning(tail, following)
    ends = [shared.rfind(token) + len(token) for token in template.special if token in shared]
    if ends:
        return shared[: max(ends)]
    starts = [token for token in template.special if following.startswith(token)]
    return max(starts, key=len) if starts and tail.startswith(tuple(template.special)) else None


def _shared_beginning(first: str, second: str) -> str:
    size = min(len(first), len(second))
    return first[: next((at for at in range(size) if first[at] != second[at]), size)]
