"""Canonical rows to token ids and labels. Labels are made before padding, so EOS is always learnt.

A label is the token's own id where the token is learnt and -100 where it is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import Problem, RecipeError

IGNORED = -100
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, slots=True)
class Tokenise:
    """Callable for `Dataset.map`: a canonical row to input_ids, attention_mask, labels and counts."""

    tokenizer: Any
    shape: str
    """text | pair | chat"""
    loss_on: str
    """completion | assistant | all"""
    max_length: int
    """Tokens; longer samples lose their end."""

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        ids, learnt = self._encode(row)
        truncated = len(ids) > self.max_length
        ids, learnt = ids[: self.max_length], learnt[: self.max_length]
        labels = [token if learn else IGNORED for token, learn in zip(ids, learnt, strict=True)]
        # The first label is never predicted: a causal model shifts labels by one.
        targets = sum(label != IGNORED for label in labels[1:])
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": labels,
            "truncated": truncated,
            "targets": targets,
        }

    def _encode(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        if self.shape == "text":
            ids = with_eos(self.tokenizer, self.tokenizer(_text(row, "text"))["input_ids"])
            return ids, [True] * len(ids)
        if self.shape == "pair":
            prompt = without_eos(self.tokenizer, self.tokenizer(_text(row, "prompt"))["input_ids"])
            answer = self.tokenizer(_text(row, "completion"), add_special_tokens=False)["input_ids"]
            answer = with_eos(self.tokenizer, answer)
            return prompt + answer, [self.loss_on == "all"] * len(prompt) + [True] * len(answer)
        return encode_chat(self.tokenizer, row["messages"], self.loss_on)


def with_eos(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """`ids` ending in exactly the tokenizer's EOS (unchanged when it has none)."""
    eos = tokenizer.eos_token_id
    if eos is None or (ids and ids[-1] == eos):
        return list(ids)
    return [*ids, eos]


def without_eos(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """`ids` without a final EOS: some tokenizers add one, which would end a prompt."""
    ids = list(ids)
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], loss_on: str
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and which of them are learnt.

    loss_on: assistant learns every assistant turn, completion the last one, all everything.
    RecipeError when the tokenizer has no chat template or the template hides where a turn starts.
    """
    if not tokenizer.chat_template:
        raise RecipeError(
            Problem(
                "chat-template-missing",
                "the tokenizer has no chat template, and the rows are conversations",
                path="model.chat_template",
                hint="give model.chat_template, or use a model tuned for chat",
            )
        )
    turns = [dict(message) for message in messages]
    if loss_on == "all":
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
        return _end_of_turn(tokenizer, list(ids), [True] * len(ids))
    if loss_on == "assistant" and _GENERATION_BLOCK.search(str(tokenizer.chat_template)):
        encoded = tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    spans = _assistant_spans(tokenizer, turns, text)
    if loss_on == "completion":
        spans = spans[-1:]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learnt = [
        end > start and any(first <= start and end <= last for first, last in spans)
        for start, end in encoded["offset_mapping"]
    ]
    return _end_of_turn(tokenizer, list(encoded["input_ids"]), learnt)


def _assistant_spans(tokenizer: Any, turns: Sequence[dict[str, Any]], text: str) -> list[tuple[int, int]]:
    """Character ranges of the assistant's turns: what rendering one turn more adds to the text."""
    spans = []
    for index, turn in enumerate(turns):
        if turn.get("role") != "assistant":
            continue
        before = tokenizer.apply_chat_template(turns[:index], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(turns[: index + 1], tokenize=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise RecipeError(
                Problem(
                    "chat-template-mask",
                    "the chat template renders earlier turns differently once later ones follow, "
                    "so the assistant's tokens cannot be told apart",
                    path="data.loss_on",
                    hint="mark them in the template with {% generation %}, or use loss_on: all",
                )
            )
        spans.append((len(before), len(after)))
    return spans


def _end_of_turn(tokenizer: Any, ids: list[int], learnt: list[bool]) -> tuple[list[int], list[bool]]:
    """Add a learnt EOS to a conversation whose template ends the last turn with no special token."""
    special = {key for key, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    if not learnt or not learnt[-1] or tokenizer.eos_token_id is None:
        return ids, learnt
    if any(token in special for token in ids[-3:]):  # a line break may follow the closing token
        return ids, learnt
    return [*ids, tokenizer.eos_token_id], [*learnt, True]


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise RecipeError(
            Problem(
                "not-text",
                f"column {field} holds {type(value).__name__}, expected text",
                path="data",
            )
        )
    return value
