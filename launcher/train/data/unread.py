"""What rows hold that would not be trained: rows of another task, and columns that no field reads.

A row with an image, a rejected answer or a history would otherwise train without it. `columns: {NAME: null}`
in the source leaves a column out. A column whose content is also in the columns that are read (the prompt of
a conversation in a column of its own) is not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import RecipeError
from launcher.facts.safe_files import parse_json
from launcher.recipe.field_tables import TASK_FORMATS
from launcher.tasks import FORMATS, task_named
from launcher.tasks.dpo import DPO
from launcher.tasks.embedding import Embedding
from launcher.tasks.grpo import GRPO
from launcher.tasks.image_text_to_text import ImageTextToText
from launcher.tasks.kto import KTO
from launcher.tasks.reranker import Reranker
from launcher.tasks.reward import Reward
from launcher.tasks.token_classification import TokenClassification
from launcher.train.data.messages import OF_ROWS, is_mask_key, masks_row
from launcher.train.data.rendered import REASONING
from launcher.train.data.sources import Row, bad_row, is_content, is_empty, is_media, plain_name

if TYPE_CHECKING:
    from launcher.train.data.formats import Detected


COMPARED = frozenset({"positive_messages", "negative_messages"})
"""Columns of conversations that `messages` are compared with: ms-swift's rows for embedding and reranker."""
_KTO_LABELS = frozenset({"label", "desirable", "is_desirable", "kto_label", "kto_tag", "thumbs_up"})
_FLAGS = ("true", "false", "0", "1", "desirable", "undesirable")
_ANSWERS = frozenset(
    {"messages", "conversations", "conversation", "completion", "response", "output", "answer"}
)
_ASKED = frozenset({*_ANSWERS, "text", "texts", "prompt", "question", "instruction", "query", "caption"})
_PAIRS = (
    {"anchor", "positive"}, {"query", "positive"}, {"query", "pos"}, {"question", "positive"},
    {"sentence1", "sentence2", "score"}, {"sentence_a", "sentence_b", "score"},
)  # fmt: skip
_CHECKS = ("ground_truth", "reward_model", "verification_info", "reward_fn", "reward_spec")
_ANSWERED = ("instruction", "prompt-completion", "chat", "image-chat", "image-prompt")
"""Formats whose rows hold a question and its answer."""
_LABELLED = tuple(one.name for one in KTO.row_formats)
_CHATS = ("chat", "image-chat")
"""Formats of which a column can mask messages."""
_TOOLS = "tools that the model may call"
_TURNS = "a conversation"
_PROMPT = "a part of the prompt"
_PAIR = "the second text of a pair"
_CONVERSATION: Mapping[str, str] = {
    **dict.fromkeys(("history", "chat_history", "dialog_history", "previous_turns"), "earlier turns"),
    **dict.fromkeys(
        ("system", "system_prompt", "system_message", "system_instruction", "meta_instruction"),
        "a system prompt",
    ),
    **dict.fromkeys(
        ("tools", "functions", "available_tools", "tool_defs", "tool_schemas", "tool_list", "tool_calls",
         "function_calls"),
        _TOOLS,
    ),
    **dict.fromkeys(("messages", "conversations", "conversation", "dialog", "dialogue", "turns"), _TURNS),
    **dict.fromkeys(("prompt", "instruction", "input", "context", "question", "query", "passage"), _PROMPT),
    **dict.fromkeys(("completion", "response", "output"), "an answer"),
    **dict.fromkeys((*REASONING, "cot", "complex_cot", "chain_of_thought"), "reasoning before the answer"),
    **dict.fromkeys(("chat_template_kwargs", "documents"), "what the chat template writes into the prompt"),
}  # fmt: skip
_SECOND = frozenset(
    {"text2", "text_2", "text_b", "sentence2", "sentence_2", "sentence_b", "question2", "hypothesis"}
)
_BESIDE_TEXT = frozenset(
    {"prompt", "instruction", "completion", "response", "output", "messages", "conversation", "conversations"}
)
"""Names that make a row with a `text` one of another format, where the text does not hold what they hold."""
_OF_FIELD: Mapping[str, tuple[str, ...]] = {
    _PROMPT: ("input", "prompt"),
    _TURNS: ("prompt",),
    _TOOLS: ("tools",),
    _PAIR: ("text_pair",),
}
"""What a column holds -> optional fields that take it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one task."""

    task: str
    what: str
    """What the rows are, for messages."""
    fits: Callable[[Mapping[str, Any]], bool]
    """Whether a row is one; its columns in lower case with `_`, empty ones left out."""


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
        lambda row: _has_any(row, *COMPARED) or any(names <= row.keys() for names in _PAIRS),
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


def refuse_lost(row: Row, fmt: str, columns: Mapping[str, str], left_out: frozenset[str], task: str) -> None:
    """RecipeError for a row with a column that belongs to what is learned and that the format does not read.

    columns: field of the format -> column; left_out: columns that the recipe leaves out.
    """
    read = columns.values()
    for name, value in row.values.items():
        column = _column(name, fmt)
        if column is None and (what := task_named(task).unread_columns.get(plain_name(str(name)))):
            column = _Column(what, judged_by="nothing")
        if column is None or name in read or name in left_out or is_empty(value):
            continue
        if _is_lost(column, name, value, row, read):
            raise _refused(row, name, column, fmt, columns, task)


@dataclass(frozen=True, slots=True)
class _Column:
    """What a column of some name holds."""

    what: str
    task: str = ""
    """The other task that such rows are for; empty: that of the rows."""
    judged_by: Literal["content", "mask", "kto label", "nothing"] = "content"
    """What of the value decides whether something is lost with it."""


def _is_lost(column: _Column, name: str, value: Any, row: Row, read: Any) -> bool:
    if column.judged_by == "mask":
        return masks_row(value, str(name))
    if column.judged_by == "kto label":
        return is_kto_label(plain_name(name), value)
    if column.judged_by == "nothing":
        return True
    if not is_content(value) or _is_number(value):  # a score of the answer, a count of turns
        return False
    # A short rejected answer stands in many a prompt by chance.
    return is_side(plain_name(name), "rejected") or not _is_contained(value, row, read)


@lru_cache(maxsize=4096)
def _column(column: str, fmt: str) -> _Column | None:
    """What a column of this name holds that rows of the format do not read; None where nothing is known."""
    name = plain_name(str(column))
    if fmt in ("image-chat", "image-prompt") and is_media(name):
        return _Column("images, video or sound", judged_by="nothing")
    if fmt != "image" and is_media(name):
        return _Column("images, video or sound", ImageTextToText.name, "nothing")
    if fmt != "preference" and (is_side(name, "chosen") or is_side(name, "rejected")):
        return _Column("an answer of a preference pair", DPO.name)
    if fmt in _ANSWERED and is_kto_label(name, True):
        return _Column("a label that says whether the answer is good", KTO.name, "kto label")
    if fmt in _ANSWERED and name in COMPARED:
        return _Column("texts that the conversation is compared with", Embedding.name, "nothing")
    is_read = fmt in _CHATS and column in OF_ROWS
    if (
        fmt in (*_ANSWERED, *_LABELLED, "text", "preference", "tokens")
        and is_mask_key(column)
        and not is_read
    ):
        return _Column("a mask of the loss", judged_by="mask")
    if fmt == "classification" and name in _SECOND:
        return _Column(_PAIR)
    if fmt in (*_ANSWERED, *_LABELLED, "preference", "image") or (fmt == "text" and name in _BESIDE_TEXT):
        what = _CONVERSATION.get(name)
        return None if what is None else _Column(what)
    return None


def _is_contained(value: Any, row: Row, read: Any) -> bool:
    """Whether all texts of a value are also in the columns that are read."""
    held = "\n".join(text for column in read for text in _texts(row.values.get(column)))
    return all(text.strip() in held for text in _texts(value))


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


def _refused(
    row: Row, name: str, column: _Column, fmt: str, columns: Mapping[str, str], task: str
) -> RecipeError:
    leave = f"`columns: {{{name}: null}}` trains without it"
    message = f"column {name} holds {column.what}, which {fmt} rows do not read"
    if column.task:
        message = f"{message}: such rows are for task {column.task}, not for {task}"
        return bad_row(row, message, f"{where_to(column.task)}; {leave}", code="rows-of-another-task")
    fields = [field for field in _OF_FIELD.get(column.what, ()) if field in FORMATS[fmt].optional]
    free = next((field for field in fields if columns.get(field) not in row.values), None)
    reads = f"`columns: {{{free}: {name}}}`" if free else "a `format_row` hook that puts it into the row"
    return bad_row(row, message, f"{reads} reads it; {leave}", code="column-unread")
