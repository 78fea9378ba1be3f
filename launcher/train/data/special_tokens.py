"""Special tokens in the texts of rows (`data.special_tokens_in_text`): counted, refused, or read as text.

A tokenizer reads `<|im_end|>` in a user's message as the token that ends the turn. To read it as plain text
(`escape`), its first character is replaced in the row by one that no text has, so that template and masks
take it for common text. A copy of the tokenizer puts the character back, and knows the special tokens that
remain, which the template wrote, under other names. Names and characters are as long as what they stand for:
the places of tokens in the text stay right.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.rows.formats import every_text
from launcher.rows.sources import Detected, Row, bad_row
from launcher.train.data.encoded import EncodedBatch, Encoder
from launcher.train.job import Job
from launcher.train.model.processors import tokenizer_of
from launcher.train.tasks import train_task

NOTE = "special-token-in-text"
_KEY = "data.special_tokens_in_text"
_NO_TEXT = frozenset({"label", "labels", "columns", "images"})
"""Canonical fields that are not tokenised."""
_SHOWN = 4
"""Tokens that a warning names."""
_NONCHARACTERS = [chr(number) for number in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode keeps for use inside of programs."""


def text_encoder(job: Job, processing: Any, detected: Detected, labels: Sequence[str] | None) -> Encoder:
    """The task's encoder of such rows, which also looks for special tokens in their texts.

    RecipeError as that of the encoder; where rows have special tokens and may not; and where the tokenizer
    cannot read them as plain text.
    """
    task = train_task(job.task.name)
    if not job.task.reads_tokens:
        return task.encoder(job, processing, detected, labels)
    asked = job.data.special_tokens_in_text
    special = special_tokens(tokenizer_of(processing))
    if asked == "escape":
        escapes = Escapes(special)
        encode = task.encoder(job, escapes.processing(processing), detected, labels)
        return SpecialTokens(encode, special, escapes.hide)
    return SpecialTokens(
        task.encoder(job, processing, detected, labels), special, _refuse if asked == "refuse" else None
    )


def special_tokens(tokenizer: Any) -> list[str]:
    """The texts that a tokenizer reads as special tokens, the longest first."""
    ids = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder.items()
    found = {str(token) for number, token in added if token.special or number in ids}
    return sorted((found | set(tokenizer.all_special_tokens)) - {""}, key=lambda text: (-len(text), text))


def warning(job: Job, notes: Mapping[str, int], first_rows: Mapping[str, tuple[str, int]]) -> str | None:
    """About rows with special tokens in their texts; None without any, or where the recipe says what to do.

    notes: rows of each note; first_rows: file and line of a row with it.
    """
    if job.data.special_tokens_in_text is not None:
        return None
    shown = []
    for name, rows in notes.items():
        if name.startswith(NOTE):
            file, line = first_rows[name]
            shown.append(f"{rows:,} with {name.removeprefix(NOTE).removeprefix(': ')} (first: {file}:{line})")
    if not shown:
        return None
    escape = "" if job.task.rolls_out else ", `escape` reads them as text"
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (
        f"texts of rows hold special tokens, read as control tokens: {'; '.join(shown[:_SHOWN])}{more}. "
        f"`{_KEY}: keep` accepts them, `refuse` stops at the row{escape}"
    )


class SpecialTokens:
    """Encoder around another one: counts the rows whose texts hold special tokens, under `NOTE: TOKEN`."""

    def __init__(
        self, encode: Encoder, special: Sequence[str], change: Callable[[Row, str], str] | None
    ) -> None:
        """change: what becomes of a special token in a text; None: it stays."""
        self._encode, self._change = encode, change
        self._pattern = _any_of(special)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        notes: Counter[str] = Counter()
        first: dict[str, tuple[str, int]] = {}
        given = list(rows)
        for number, row in enumerate(rows):
            values = [value for name, value in row.values.items() if name not in _NO_TEXT]
            found = {token for text in every_text(values) for token in self._pattern.findall(text)}
            for token in sorted(found):
                notes[f"{NOTE}: {token}"] += 1
                first.setdefault(f"{NOTE}: {token}", (row.file, row.number))
            if found and self._change is not None:
                given[number] = self._changed(row, self._change)
        batch = self._encode(given)
        batch.notes.update(notes)
        batch.first_rows |= first
        return batch

    def _changed(self, row: Row, new: Callable[[Row, str], str]) -> Row:
        def change(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(lambda match: new(row, match[0]), value)
            if isinstance(value, Mapping):
                return {key: change(one) for key, one in value.items()}
            return [change(one) for one in value] if isinstance(value, list | tuple) else value

        values = {name: value if name in _NO_TEXT else change(value) for name, value in row.values.items()}
        return Row(values, row.file, row.number)


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches each of these texts, the longest first. Grouped by their beginnings: 20 times faster."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        groups.setdefault(token[:2], []).append(re.escape(token[2:]))
    parts = [f"{re.escape(start)}(?:{'|'.join(groups[start])})" for start in sorted(groups, key=len)[::-1]]
    return re.compile("|".join(parts) or r"(?!)")


def _refuse(row: Row, token: str) -> str:
    message = f"the row's text holds {token}, which the tokenizer reads as a special token"
    hint = "correct the row; `escape` reads it as plain text, `keep` as the special token"
    raise bad_row(row, message, hint, code=NOTE, path=_KEY)


class Escapes:
    """Special tokens of a tokenizer, and how rows hide theirs from it."""

    def __init__(self, special: Sequence[str]) -> None:
        self.special = special
        first = sorted({token[0] for token in special})
        half = len(_NONCHARACTERS) // 2
        if len(first) > half:
            message = (
                f"the special tokens of the tokenizer begin with {len(first)} characters, at most {half}"
            )
            raise RecipeError(Problem("special-tokens", f"{message} can be escaped", path=_KEY))
        self._hidden = dict(zip(first, _NONCHARACTERS, strict=False))
        self._renamed = dict(zip(first, _NONCHARACTERS[half:], strict=False))

    def hide(self, _: Row, token: str) -> str:
        """A special token of a row's text, which a template takes for common text."""
        return self._hidden[token[0]] + token[1:]

    def processing(self, processing: Any) -> Any:
        """A copy of a tokenizer, or of a processor with one, that reads what `hide` gives as plain text."""
        tokenizer = tokenizer_of(processing)
        if tokenizer is processing:
            return self._tokenizer(processing)
        copied = copy.copy(processing)
        copied.tokenizer = self._tokenizer(tokenizer)
        return copied

    def _tokenizer(self, tokenizer: Any) -> Any:
        from tokenizers import AddedToken

        if not tokenizer.is_fast:
            message = "is escape, and the tokenizer is not a fast one, which alone can tell the two apart"
            hint = "use a model with a tokenizer.json, or `refuse`"
            raise RecipeError(Problem("slow-tokenizer", message, path=_KEY, hint=hint))
        copied = copy.deepcopy(tokenizer)
        known = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        names = {token: self._renamed[token[0]] + token[1:] for token in self.special}
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        copied.add_tokens([
            AddedToken(name, **{flag: getattr(known[token], flag) for flag in flags}, special=False)
            for token, name in names.items()
        ])  # fmt: skip
        ids = {copied.convert_tokens_to_ids(name): tokenizer.convert_tokens_to_ids(token)
               for token, name in names.items()}  # fmt: skip
        copied.__class__ = _escaping(type(tokenizer), self._swap(names), ids)
        self._check(tokenizer, copied)
        return copied

    def _swap(self, names: Mapping[str, str]) -> Callable[[Any], Any]:
        """Renames special tokens in a text, or in a list of texts, and shows what rows have hidden."""
        pattern = _any_of(self.special)
        shown = str.maketrans({hidden: character for character, hidden in self._hidden.items()})

        def swap(text: Any) -> Any:
            if isinstance(text, str):
                return pattern.sub(lambda match: names[match[0]], text).translate(shown)
            return [swap(one) for one in text] if isinstance(text, list | tuple) else text

        return swap

    def _check(self, tokenizer: Any, copied: Any) -> None:
        """RecipeError where a special token is made of plain text too."""
        for token in self.special:
            number = tokenizer.convert_tokens_to_ids(token)
            hidden = self._hidden[token[0]] + token[1:]
            if (
                number != tokenizer.unk_token_id
                and number in copied(hidden, add_special_tokens=False)["input_ids"]
            ):
                message = f"is escape, and the tokenizer makes {token} of plain text too"
                raise RecipeError(Problem("special-tokens", message, path=_KEY, hint="use refuse"))


def _escaping(kind: Any, swap: Callable[[Any], Any], ids: Mapping[int, int]) -> Any:
    """A subclass of a tokenizer's class whose calls swap texts before, and ids after."""

    def original(found: Any) -> Any:
        if isinstance(found, list):
            return [original(one) for one in found]
        if isinstance(found, int):
            return ids.get(found, found)
        for alias, number in ids.items():  # a tensor
            found[found == alias] = number
        return found

    class Escaping(kind):
        def __call__(self, text: Any = None, text_pair: Any = None, *rest: Any, **options: Any) -> Any:
            options = {**options, "split_special_tokens": True}
            for name in ("text_target", "text_pair_target"):
                options |= {name: swap(options[name])} if name in options else {}
            encoded = super().__call__(swap(text), swap(text_pair), *map(swap, rest), **options)
            for name in encoded.keys() & {"input_ids", "labels"}:
                encoded[name] = original(encoded[name])
            return encoded

    Escaping.__name__ = Escaping.__qualname__ = kind.__name__
    return Escaping
