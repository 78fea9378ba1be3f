"""A chat template in Go's language, for Ollama: written only where it renders what was trained.

Nothing is translated. The trained template is asked to render conversations; where all of them are the same
pieces around the contents of the turns, these pieces are written as a Go template, which is such a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.train.exports.probes import conversations, rendered

_SYSTEM, _USER, _REPLY, _AGAIN = (
    "\u2039system\u203a",
    "\u2039user\u203a",
    "\u2039reply\u203a",
    "\u2039again\u203a",
)
"""Contents that no template changes, and that occur nowhere else."""
Turns = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class TemplatePieces:
    """The text around the contents of a conversation."""

    unasked: str
    """Before a conversation without a system prompt; some templates write one of their own there."""
    start: str
    """Before one with a system prompt."""
    system: tuple[str, str] | None
    """Around a system prompt; None where it is no turn of its own."""
    folded: str | None
    """Between a system prompt and the first user's text, in the same turn; None where it is not there."""
    user: tuple[str, str]
    reply: tuple[str, str]
    ask: str
    """The header that asks for an answer."""

    @property
    def takes_system(self) -> bool:
        return self.system is not None or self.folded is not None

    def render(self, turns: Turns) -> str:
        """What `go` renders: its loop, in Python."""
        system = next((turn["content"] for turn in turns if turn["role"] == "system"), "")
        around = {"system": self.system, "user": self.user, "assistant": self.reply}
        parts = [self.start if system else self.unasked]
        first = True
        for turn in turns:
            pieces = around[turn["role"]]
            if pieces is None:
                continue
            parts.append(pieces[0])
            if turn["role"] == "user":
                parts += [system, self.folded] if first and system and self.folded is not None else []
                first = False
            parts += [turn["content"], pieces[1]]
        return "".join([*parts, self.ask if turns[-1]["role"] != "assistant" else ""])

    def go(self, bos: str) -> str:
        """The Go template, without `bos`, which the server's tokenizer adds itself."""
        start, unasked = (text.removeprefix(bos) for text in (self.start, self.unasked))
        begin = _text(start)
        if start != unasked:
            begin = f"{{{{ if .System }}}}{_text(start)}{{{{ else }}}}{_text(unasked)}{{{{ end }}}}"
        body, word = "", "if"
        for role, around in (("system", self.system), ("user", self.user), ("assistant", self.reply)):
            if around is None:
                continue
            inside = "{{ .Content }}"
            if role == "user" and self.folded is not None:
                once = f"{{{{ if and $first $.System }}}}{{{{ $.System }}}}{_text(self.folded)}{{{{ end }}}}"
                inside = f"{once}{{{{ $first = false }}}}{inside}"
            body += f'{{{{ {word} eq .Role "{role}" }}}}{_text(around[0])}{inside}{_text(around[1])}'
            word = "else if"
        # An answer that the request has begun is continued, not asked for again.
        ask = f'{{{{ if ne $last "assistant" }}}}{_text(self.ask)}{{{{ end }}}}'
        variables = '{{ $last := "" }}' + ("{{ $first := true }}" if self.folded is not None else "")
        loop = f"{{{{ range .Messages }}}}{body}{{{{ end }}}}{{{{ $last = .Role }}}}{{{{ end }}}}"
        return f"{variables}{begin}{loop}{ask}"


def _text(text: str) -> str:
    """Literal text; what Go would read as an action, with what follows too, is a quoted string."""
    is_action = "{{" in text or "}}" in text or text.endswith("{")
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if is_action else text


def pieces_of(tokenizer: Any) -> TemplatePieces | None:
    """The pieces of the tokenizer's template; None where conversations are more than pieces."""
    found = _without_system(tokenizer)
    if found is None:
        return None
    found = _with_system(tokenizer, found)
    return found if found is not None and renders_alike(tokenizer, found) else None


def renders_alike(tokenizer: Any, pieces: TemplatePieces) -> bool:
    """Whether both render the same for every conversation that the trained template takes."""
    for turns in conversations():
        text = rendered(tokenizer, turns)
        if text is None and turns[0]["role"] == "system" and not pieces.takes_system:
            continue
        if text != pieces.render(turns):
            return False
    return True


def strips(tokenizer: Any, pieces: TemplatePieces) -> bool:
    """Whether the trained template changes white space around contents, which the pieces keep."""
    turns = [_turn("user", f"  {_USER}\n ")]
    return rendered(tokenizer, turns) != pieces.render(turns)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _without_system(tokenizer: Any) -> TemplatePieces | None:
    """The pieces around users and replies."""
    turns = [_turn("user", _USER), _turn("assistant", _REPLY), _turn("user", _AGAIN)]
    asked, longer = rendered(tokenizer, turns[:1]), rendered(tokenizer, turns)
    silent, ended = (rendered(tokenizer, turns[:count], ask=False) for count in (1, 2))
    if asked is None or longer is None or silent is None or ended is None:
        return None
    counts = [text.count(mark) for text in (asked, silent, longer) for mark in (_USER,)]
    if {*counts, longer.count(_REPLY), longer.count(_AGAIN), ended.count(_REPLY)} != {1}:
        return None
    head, tail = asked.split(_USER)
    after_user, after_reply = silent.split(_USER)[1], ended.split(_REPLY)[1]
    to_reply, rest = longer.split(_USER)[1].split(_REPLY)
    to_user, end = rest.split(_AGAIN)
    before_user = to_user.removeprefix(after_reply)
    fits = (
        longer.startswith(head + _USER) and end == tail and tail.startswith(after_user)
        and to_reply.startswith(after_user) and to_user.startswith(after_reply) and head.endswith(before_user)
    )  # fmt: skip
    if not fits:
        return None
    start = head[: len(head) - len(before_user)]
    reply = (to_reply.removeprefix(after_user), after_reply)
    ask = tail.removeprefix(after_user)
    return TemplatePieces(start, start, None, None, (before_user, after_user), reply, ask)


def _with_system(tokenizer: Any, found: TemplatePieces) -> TemplatePieces | None:
    """The same with the pieces of a system prompt, where the template takes one."""
    text = rendered(tokenizer, [_turn("system", _SYSTEM), _turn("user", _USER)])
    if text is None:
        return found
    if text.count(_SYSTEM) != 1 or text.count(_USER) != 1:
        return None
    before, rest = text.split(_SYSTEM)
    between = rest.split(_USER)[0]
    user, start, bos = found.user[0], found.unasked, tokenizer.bos_token or ""
    if before == start + user:
        return replace(found, folded=between)
    if not between.endswith(user):
        return None
    if not before.startswith(start):  # it begins with a system prompt of its own
        is_turns = user.startswith(bos)  # SmolLM2's BOS is the mark that begins each turn
        start = bos if bos and before.startswith(bos) and not is_turns else ""
    system = (before.removeprefix(start), between[: len(between) - len(user)])
    return replace(found, start=start, system=system)
