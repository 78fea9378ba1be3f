"""What rows hold that would not be trained: rows of another task, and columns that nothing reads.

A column of text that nothing reads is lost, whatever it is called; identifiers, addresses and numbers are
only listed. `columns: {NAME: null}` in the source leaves a column out. A column whose content is also in the
columns that are read (the prompt of a conversation in a column of its own), or that holds all of theirs (a
rendered conversation), is not lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from launcher.files.safe_files import parse_json
from launcher.recipe.field_tables import TASK_FORMATS
from launcher.recipe.reward_columns import unread
from launcher.rows.messages import OF_ROWS, is_conversation, is_mask_key, masks_row
from launcher.rows.sources import Row, is_content, is_empty, is_media, plain_name
from launcher.tasks import FORMATS, task_named
from launcher.tasks.dpo import DPO
from launcher.tasks.embedding import Embedding
from launcher.tasks.grpo import GRPO
from launcher.tasks.image_text_to_text import ImageTextToText
from launcher.tasks.kto import KTO
from launcher.tasks.reranker import Reranker
from launcher.tasks.reward import Reward
from launcher.tasks.rows import PREFERENCE, PROMPT_COMPLETION, TEXT
from launcher.tasks.token_classification import TokenClassification

if TYPE_CHECKING:
    from launcher.rows.sources import Detected


_FEWEST_WORDS = 4
"""Median of words from which on a column holds text."""
_LONG = 20
"""Median of words from which on texts may be repeated: a passage with several questions."""
_JUDGED = 2000
"""Characters of a text that are looked at."""
_WORD = re.compile(r"\S*[^\W\d_]\S*")
_UNSPACED = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]"
)
"""Letters of scripts without spaces between words (Chinese, Japanese, Thai, …): two count as a word."""
_KTO_LABELS = frozenset({"label", "desirable", "is_desirable", "kto_label", "kto_tag", "thumbs_up"})
_FLAGS = ("true", "false", "0", "1", "desirable", "undesirable")
_ANSWERS = frozenset(
    {"messages", "conversations", "conversation", "completion", "response", "output", "answer"}
)
_ASKED = frozenset({*_ANSWERS, "text", "texts", "prompt", "question", "instruction", "query", "caption"})
_PAIRS = (
    {"anchor", "positive"}, {"query", "positive"}, {"query", "pos"}, {"question", "positive"},
    {"sentence1", "sentence2", "score"}, {"sentence_a", "sentence_b", "score"},
    {"messages", "positive_messages"}, {"messages", "negative_messages"},
)  # fmt: skip
_CHECKS = ("ground_truth", "reward_model", "verification_info", "reward_fn", "reward_spec")
_ANSWERED = ("instruction", "prompt-completion", "chat", "image-chat", "image-prompt")
"""Formats whose rows hold a question and its answer."""
_LABELLED = tuple(one.name for one in KTO.row_formats)
_CHATS = ("chat", "image-chat")
"""Formats of which a column can mask messages."""
_SHORT_PARTS = frozenset({
    "system", "system_prompt", "system_message", "system_instruction", "meta_instruction", "tools",
    "functions", "available_tools", "tool_defs", "tool_schemas", "tool_list", "tool_calls", "function_calls",
    "chat_template_kwargs", "prompt", "instruction", "input", "context", "history", "chat_history",
})  # fmt: skip
"""Columns that are a part of the sample also where they hold a word or two, or the same in every row."""
_BESIDE_TEXT = frozenset({"completion", *PROMPT_COMPLETION.related["completion"], "role"})
"""What makes a row with a `text` a question with its answer, or a message: no text of its own."""
_SIDE_WORDS = frozenset(
    {"chosen", "rejected", *PREFERENCE.related["chosen"], *PREFERENCE.related["rejected"]}
)
_CHOICE_WORDS = _SIDE_WORDS | {"preference", "winner", "choice", "best"}
"""Words of columns that may tell which of two answers is better."""
_CHOICES = frozenset({"0", "1", "2", "a", "b", "true", "false", "tie"})


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one task."""

    task: str
    what: str
    """What the rows are, for messages."""
    fits: Callable[[Mapping[str, Any]], bool]
    """Whether a row is one; its columns in lower case with `_`, empty ones left out."""


def words_of(name: str) -> set[str]:
    """The words of a column's name, also without their digits."""
    return set(re.split(r"[^a-z0-9]+", plain_name(name))) | set(re.split(r"[^a-z]+", plain_name(name)))


def is_text(values: Sequence[Any]) -> bool:
    """Whether a column holds text: a median of four words or more, and over half of its values differ; of
    20 words, two values differ.
    """
    held = [value for value in values if is_content(value)]
    distinct = len({repr(value) for value in held})
    if 2 * distinct <= len(values) and distinct < 2:
        return False
    words = median(map(_words_in, held))
    return words >= (_FEWEST_WORDS if 2 * distinct > len(values) else _LONG)


def _words_in(value: Any) -> int:
    """The words of all texts in a value; a text of one word, such as a tag, an id or an address, has none."""
    beginnings = (text[:_JUDGED] for text in _texts(value))
    counts = (len(_WORD.findall(text)) + len(_UNSPACED.findall(text)) // 2 for text in beginnings)
    return sum(count for count in counts if count > 1)


def is_kto_label(name: str, value: Any) -> bool:
    """Whether a column holds labels of KTO: yes or no."""
    if name not in _KTO_LABELS or name.startswith(KTO.name) or isinstance(value, bool):
        return name in _KTO_LABELS
    return value in (0, 1) if isinstance(value, int | float) else str(value).strip().lower() in _FLAGS


def is_side(name: str, side: str) -> bool:
    """Whether a column of this name holds the `chosen` or `rejected` answer of a preference pair."""
    return side in name.split("_")


def _has_lists(row: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), list | tuple) for name in names)


def _token_labels(row: Mapping[str, Any]) -> bool:
    tags = [name for name in row if name.endswith("tags") or name in ("labels", "ner", "pos")]
    words = "tokens" if "tokens" in row else "words"
    return _has_lists(row, words) and any(_has_lists(row, name) for name in tags)


def _reranker(row: Mapping[str, Any]) -> bool:
    lists = any(row.get(name) for name in ("passages", "documents", "docs", "candidates"))
    return "query" in row and (lists or {"positives", "negatives"} <= row.keys() or "passage" in row)


def _has_any(row: Mapping[str, Any], *names: str) -> bool:
    return any(name in row for name in names)


KINDS = (
    Kind(TokenClassification.name, "words with a label each", _token_labels),
    Kind(
        DPO.name, "preference rows (a chosen and a rejected answer)",
        lambda row: any(is_side(name, "rejected") and is_content(value) for name, value in row.items()),
    ),
    Kind(
        KTO.name, "answers with a label that says good or bad",
        lambda row: _has_any(row, *_ANSWERS) and any(is_kto_label(*column) for column in row.items()),
    ),
    Kind(
        ImageTextToText.name, "conversations about images, video or sound",
        lambda row: any(map(is_media, row)) and _has_any(row, *_ASKED),
    ),
    Kind(Reranker.name, "queries with documents to rank", _reranker),
    Kind(
        Embedding.name, "pairs of texts that are alike",
        lambda row: any(names <= row.keys() for names in _PAIRS),
    ),
    Kind(
        GRPO.name, "prompts with what their answers are checked against",
        lambda row: _has_any(row, "prompt", "problem", "question", "messages") and _has_any(row, *_CHECKS),
    ),
    Kind("prm", "answers with a label for each step", lambda row: _has_lists(row, "completions", "labels")),
    Kind(
        "regression", "answers with a reward each",
        lambda row: Reward.name in row and _has_any(row, *_ANSWERS),
    ),
)  # fmt: skip
"""The first one that fits a row is meant."""


def task_kind(values: Mapping[str, Any]) -> Kind | None:
    """The kind of a row; None where its columns show none of these tasks."""
    row = {plain_name(str(name)): value for name, value in values.items() if not is_empty(value)}
    return next((kind for kind in KINDS if kind.fits(row)), None)


def where_to(task: str) -> str:
    """What to do with rows of a task: the hint of an error."""
    if task in TASK_FORMATS:
        return f"write `task: {task}`"
    return f"this version has no task {task}: train them with a tool that has it"


def unread_columns(rows: Sequence[Row], detected: Detected) -> tuple[str, ...]:
    """Columns of the rows, in their order, that are not read, as a field or as a mask of messages."""
    read = set(detected.columns.values())
    if detected.format in _CHATS:
        masks = {name for name in OF_ROWS if any(masks_row(row.values.get(name)) for row in rows)}
        read.update(masks - detected.left_out)
    names = dict.fromkeys(str(name) for row in rows for name in row.values)
    return tuple(name for name in names if name not in read)


def class_labels(rows: Sequence[Row]) -> set[str]:
    """Columns of the name of a KTO label that hold classes or counts: more than yes and no."""
    return {
        str(name)
        for row in rows
        for name, value in row.values.items()
        if is_kto_label(plain_name(str(name)), value=True)
        and not is_empty(value)
        and not is_kto_label(plain_name(str(name)), value)
    }


def foreign_column(row: Row, detected: Detected, classes: Collection[str]) -> tuple[str, str, str] | None:
    """The first column of a row that makes it one of another task, what it holds and that task; None
    without one.

    classes: columns of labels that are no yes and no; so are those of `detected.judged`.
    """
    for name, value in _unread(row, detected):
        found = _foreign(name, detected.format)
        if found is None:
            continue
        what, task = found
        if task == KTO.name:
            is_known = name in classes or name in (detected.judged or ())
            is_one = not is_known and is_kto_label(plain_name(name), value)
        elif task == DPO.name:
            # A short rejected answer stands in many a prompt by chance.
            sided = is_side(plain_name(name), "rejected")
            is_one = _is_words(value) and (sided or not _is_held(value, row, detected))
        else:
            is_one = True
        if is_one:
            return name, what, task
    return None


def lost_columns(
    rows: Sequence[Row],
    detected: Detected,
    task: str,
    reward: Sequence[Mapping[str, Any]],
    least: int = 1,
) -> dict[str, Row]:
    """Columns that nothing reads and that belong to what is learned -> a row of which something is lost.

    `detected.judged` are not asked again whether they hold text: a row alone does not tell. Nor are columns
    that fewer than `least` rows have.
    """
    found: dict[str, Row] = {}
    asked: dict[str, list[tuple[Row, Any]]] = {}
    for row in rows:
        for name, value in _unread(row, detected):
            if name in found:
                continue
            if _is_lost(name, value, row, detected, task):
                found[name] = row
            elif name not in (detected.judged or ()):
                asked.setdefault(name, []).append((row, value))
    for name, held in asked.items():
        values = [value for _, value in held]
        if name in found or len(held) < least:
            continue
        if _chooses(name, values, detected):
            found[name] = held[0][0]
        elif is_text(values):
            found |= next(({name: row} for row, one in held if not _is_held(one, row, detected)), {})
    kept = unread(tuple(found), reward) if found else ()
    return {name: found[name] for name in kept}


def begins_late(row: Row, detected: Detected) -> list[str]:
    """Unread columns of a row that hold something and that none of the first rows had."""
    return [name for name, _ in _unread(row, detected) if name not in (detected.judged or ())]


def _unread(row: Row, detected: Detected) -> Iterator[tuple[str, Any]]:
    """Columns of a row that hold something and that are neither read nor left out, as all others are where
    `format: text` is written.
    """
    if detected.judged is None:
        return
    read = detected.columns.values()
    for name, value in row.values.items():
        if name not in read and name not in detected.left_out and not is_empty(value):
            yield str(name), value


def _is_lost(name: str, value: Any, row: Row, detected: Detected, task: str) -> bool:
    """Whether a column is lost by what its name says it holds, or for being messages."""
    by = _judged_by(name, detected.format, task)
    if by == "mask":
        return masks_row(value, name)
    if by == "answer" and not _is_words(value):
        return True
    if by in ("part", "answer") or (by is None and is_content(value) and is_conversation(value)):
        return _is_words(value) and not _is_held(value, row, detected)
    return by is not None


@lru_cache(maxsize=4096)
def _judged_by(name: str, fmt: str, task: str) -> Literal["mask", "part", "answer", "nothing"] | None:
    """How a column of this name is judged, whose values may be short or the same in every row."""
    plain = plain_name(name)
    if (is_media(plain) and fmt != "image") or plain in task_named(task).unread_columns:
        return "nothing"
    is_read = fmt in _CHATS and name in OF_ROWS
    if (
        is_mask_key(name)
        and not is_read
        and fmt in (*_ANSWERED, *_LABELLED, TEXT.name, PREFERENCE.name, "tokens")
    ):
        return "mask"
    if fmt == TEXT.name and plain.removesuffix("s") in _BESIDE_TEXT:
        return "answer"
    optional = [field for field, kind in FORMATS[fmt].optional.items() if kind in ("text", "text or texts")]
    is_field = any(plain in FORMATS[fmt].related.get(field, ()) for field in optional)
    return "part" if is_field or plain in _SHORT_PARTS else None


@lru_cache(maxsize=4096)
def _foreign(column: str, fmt: str) -> tuple[str, str] | None:
    """(what a column of this name holds, the other task that such rows are for)."""
    name = plain_name(column)
    if fmt not in ("image", "image-chat", "image-prompt") and is_media(name):
        return "images, video or sound", ImageTextToText.name
    if fmt != PREFERENCE.name and (is_side(name, "chosen") or is_side(name, "rejected")):
        return "an answer of a preference pair", DPO.name
    if fmt in _ANSWERED and is_kto_label(name, True):
        return "a label that says whether the answer is good", KTO.name
    return None


def _chooses(name: str, values: Sequence[Any], detected: Detected) -> bool:
    """Whether a column may tell which of two answers is better, where their columns do not."""
    if detected.format != PREFERENCE.name:
        return False
    sides = [detected.columns[side] for side in ("chosen", "rejected")]
    if any(_SIDE_WORDS & words_of(side) for side in sides):
        return False
    if _CHOICE_WORDS & words_of(name):
        return True
    ends = {str(value).strip().lower().rpartition("_")[2].partition(" ")[0] for value in values}
    return 1 < len(ends) < len(values) and ends <= _CHOICES


def _is_words(value: Any) -> bool:
    """Whether a value is text, a list or an object: no score of the answer, no count of turns."""
    return is_content(value) and not _is_number(value)


def _is_held(value: Any, row: Row, detected: Detected) -> bool:
    """Whether the columns that are read hold all texts of a value, or the value all of several of theirs."""
    read = [text for column in detected.columns.values() for text in _squeezed(row.values.get(column))]
    own = _squeezed(value)
    held, whole = "".join(read), "".join(own)
    return all(text in held for text in own) or (len(set(read)) > 1 and all(text in whole for text in read))


def _squeezed(value: Any) -> list[str]:
    """The texts of a value without white space."""
    return ["".join(text.split()) for text in _texts(value)]


def _texts(value: Any) -> Iterator[str]:
    parsed = _parsed(value) if isinstance(value, str) else None
    if parsed is not None:
        yield from _texts(parsed)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("role", "from"):
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def _is_number(value: Any) -> bool:
    """Whether it is a number as CSV files hold it."""
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False


def _parsed(text: str) -> Any:
    """A list or an object that is written as JSON text; None for any other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None
