"""Rows of conversations with images in one shape: messages with a mark for each image, and the images' files.

Files mark the place of an image in four ways: a part {"type": "image"} of a message, which may hold the
image itself; the text <image> in a message, as LLaVA, LLaMA-Factory and ShareGPT files have it; the text
<img>PATH</img>, as Qwen-VL files have it; or not at all, as TRL takes it: then the images come before the
first message of the user, and the rows are counted.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.rows.formats import SHARED, text_in, value_in
from launcher.rows.images import COLOURS, KEYS, ImageFile, coloured, image_file
from launcher.rows.messages import is_conversation
from launcher.rows.sources import Row, bad_row, kind_of, parsed_json

MARK = "qzIMAGEzq"
"""Stands for an image in a message's text; no trimming or escaping changes it."""
TAG = "<image>"
_NAMED = re.compile(r"<img>\s*([^<>]+?)\s*</img>")
WITHOUT_MARK = "images-without-mark"
"""Note: rows whose images have no place in the messages."""
_PARTS = ("image", "image_url", "input_image")
"""Types of parts of a message that are images."""


def shape_chat(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Canonical {messages, tools, images: list of ImageFile, unmarked} of a conversation, `train` as in chat.

    unmarked: whether the row does not say where its images are.
    """
    column = columns["messages"]
    return _shaped(row, columns, _items(row, value_in(row, column), column), {"messages": column})


def shape_prompt(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The same of a prompt and a completion, each text or messages."""
    items = []
    for field, role in (("prompt", "user"), ("completion", "assistant")):
        value = value_in(row, columns[field])
        if isinstance(value, str) and not is_conversation(value):
            items.append({"role": role, "content": text_in(row, columns[field])})
        else:
            items += _items(row, value, columns[field])
    return _shaped(row, columns, items, {"messages": "messages"})


def has_image(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether a row has an image in its own column, as a part of a message, or named in a text."""
    messages = (row.values.get(columns[name]) for name in ("messages", "prompt") if name in columns)
    items = [item for value in messages if isinstance(value, list | tuple) for item in value]
    return (
        bool(row.values.get(columns["images"]))
        or any(_is_image(part) for one in items for part in _parts(one))
        or any(_NAMED.search(text) for one in items for text in _texts(one))
    )


def refuse_texts(source: Mapping[str, Any], place: str) -> None:
    """RecipeError for a source of rows without an image, which may be under another name, unless the recipe
    agrees. source: its settings; place: the key of its path."""
    if source["columns"].get("images", "") is None:
        return
    message = (
        "no row has an image: they are in a column images (or image), a part of a message, or <img>PATH</img>"
    )
    hint = "name their column with `columns: {images: NAME}`; `columns: {images: null}` trains on texts alone"
    raise RecipeError(Problem("no-images", message, str(source["path"]), path=place, hint=hint))


def _shaped(
    row: Row, columns: Mapping[str, str], items: Sequence[Any], names: Mapping[str, str]
) -> dict[str, Any]:
    place = columns.get("images", "images")
    given = [image_file(row, value, f"{place}[{n}]") for n, value in enumerate(_given(row, place))]
    marked, images, unmarked = _marked(row, items, given, place)
    chat = Row({**row.values, names["messages"]: marked}, row.file, row.number)
    wanted = {"messages": names["messages"]} | ({"tools": columns["tools"]} if "tools" in columns else {})
    shaped = SHARED["chat"](chat, wanted)
    for number, message in enumerate(shaped["messages"]):
        if message["role"] == "assistant" and MARK in (message.get("content") or ""):
            fault = f"message {number + 1} of the assistant has an image, which no model here writes"
            raise bad_row(row, fault, "move the image into a message of the user", code="image-in-answer")
    return {**shaped, "images": images, "unmarked": unmarked}


def _given(row: Row, column: str) -> Sequence[Any]:
    """The images of a row's own column."""
    value = row.values.get(column)
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value = parsed_json(row, column, value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    return value if isinstance(value, list | tuple) else [value]


def _items(row: Row, value: Any, column: str) -> list[Any]:
    if isinstance(value, str):
        value = parsed_json(row, column, value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise bad_row(row, f"column {column} holds {kind_of(value)}, expected a list of messages")
    return list(value)


def _marked(
    row: Row, items: Sequence[Any], given: list[ImageFile], place: str
) -> tuple[list[Any], list[ImageFile], bool]:
    """(messages with marks, images in their order, whether no message said where they are)."""
    if any(_is_image(part) for item in items for part in _parts(item)):
        return (*_with_parts(row, items, given, place), False)
    texts = [text for item in items for text in _texts(item)]
    tags = sum(text.count(TAG) for text in texts)
    if named := [name for text in texts for name in _NAMED.findall(text)]:
        if tags or given:
            raise _wrong_number(
                row, f"{len(named)} of <img>PATH</img> and {tags} of {TAG}", len(given), place
            )
        images = [image_file(row, name, "<img>PATH</img>") for name in named]
        return [_tagged(item, lambda text: _NAMED.sub(MARK, text)) for item in items], images, False
    if tags == 0 and given:
        return _first(row, items, len(given)), given, True
    if tags != len(given):
        raise _wrong_number(row, f"{tags} marks {TAG}", len(given), place)
    return [_tagged(item, lambda text: text.replace(TAG, MARK)) for item in items], given, False


def _with_parts(
    row: Row, items: Sequence[Any], given: list[ImageFile], place: str
) -> tuple[list[Any], list[ImageFile]]:
    """Images from parts of messages; a part that holds none takes the next of the row's column."""
    images: list[ImageFile] = []
    waiting = iter(given)
    marked, empty = [], 0
    for number, item in enumerate(items):
        parts = []
        for part in _parts(item):
            if not _is_image(part):
                parts.append(part)
                continue
            parts.append({"type": "text", "text": MARK})
            if any(part.get(key) is not None for key in KEYS):
                images.append(image_file(row, part, f"message {number + 1}"))
                continue
            empty += 1
            if (one := next(waiting, None)) is not None:
                images.append(one)
        marked.append({**item, _key(item): parts} if parts else item)
    if empty != len(given):
        raise _wrong_number(
            row, f"{empty} parts of type image without an image of their own", len(given), place
        )
    return marked, images


def _tagged(item: Any, mark: Callable[[str], str]) -> Any:
    """A message with `mark` applied to its texts."""
    if not isinstance(item, Mapping):
        return item
    key = _key(item)
    content = item.get(key)
    if isinstance(content, str):
        return {**item, key: mark(content)}
    parts = [
        {**part, "text": mark(part["text"])}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in _parts(item)
    ]
    return {**item, key: parts} if parts else item


def _first(row: Row, items: Sequence[Any], count: int) -> list[Any]:
    """The messages with all marks before the first text of the user."""
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or str(item.get("role", item.get("from"))).lower() not in _USER:
            continue
        key, content = _key(item), item.get(_key(item))
        marks = MARK * count
        first = {"type": "text", "text": marks}
        changed = marks + content if isinstance(content, str) else [first, *_parts(item)]
        return [*items[:number], {**item, key: changed}, *items[number + 1 :]]
    raise bad_row(row, "the row has images and no message of a user", "delete the row", code="image-count")


_USER = frozenset({"user", "human"})


def _wrong_number(row: Row, marks: str, given: int, place: str) -> Exception:
    message = f"the messages have {marks}, and column {place} holds {given} images"
    return bad_row(row, message, "each image needs one mark, in the order of the images", code="image-count")


def _key(item: Mapping[str, Any]) -> str:
    return "value" if "content" not in item and "value" in item else "content"


def _parts(item: Any) -> Sequence[Any]:
    """The parts of a message's content; none where that is text."""
    content = item.get(_key(item)) if isinstance(item, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _texts(item: Any) -> Iterator[str]:
    """The texts of a message."""
    if not isinstance(item, Mapping):
        return
    content = item.get(_key(item))
    if isinstance(content, str):
        yield content
    for part in _parts(item):
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def made_up_chat(draw: random.Random, index: int) -> dict[str, Any]:
    """A conversation about coloured images: one image, every fourth row two of them."""
    names = [draw.choice(list(COLOURS)) for _ in range(2 if index % 4 == 0 else 1)]
    question = TAG * len(names) + "Which colour is it?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": " and ".join(names)}]
    return {"messages": turns, "images": [{"bytes": coloured(draw, name), "path": None} for name in names]}


def made_up_prompt(draw: random.Random, index: int) -> dict[str, Any]:
    """The same as a prompt and a completion."""
    row = made_up_chat(draw, index)
    prompt, completion = (turn["content"] for turn in row.pop("messages"))
    return {"prompt": prompt, "completion": completion, **row}
