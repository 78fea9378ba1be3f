"""Row formats of one task each: how a row becomes canonical, and rows made up for `--tiny`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.rows import image_rows
from launcher.rows.class_names import IGNORED
from launcher.rows.formats import (
    Shaper,
    after_prompt,
    instruction_prompt,
    is_number,
    label_of,
    number_in,
    opening,
    optional_text_in,
    refuse_outside,
    text_in,
    value_in,
)
from launcher.rows.images import COLOURS, coloured, image_file
from launcher.rows.messages import Message, is_conversation, messages_of, refuse_masks, tools_of
from launcher.rows.sources import Row, bad_row, is_empty, kind_of
from launcher.rows.token_rows import made_up_token_ids, shape_token_ids
from launcher.tasks.embedding import NEGATIVES, POSITIVE_PAIR, SCORED_PAIR
from launcher.tasks.grpo import PROMPT
from launcher.tasks.image_classification import IMAGE
from launcher.tasks.image_text_to_text import IMAGE_CHAT, IMAGE_PROMPT
from launcher.tasks.kto import LABELLED, LABELLED_CHAT, LABELLED_INSTRUCTION
from launcher.tasks.reranker import RANKING, RELEVANCE
from launcher.tasks.rows import TOKEN_IDS
from launcher.tasks.sequence_classification import CLASSIFICATION
from launcher.tasks.token_classification import WORDS

_THINGS = ("stone", "river", "lamp", "road", "bird", "cup", "tree", "boat")
_COLOURS = ("red", "green", "blue", "white", "black", "grey", "brown", "pink")
_FLAGS: Mapping[Any, bool] = {
    **{1: True, 0: False},
    **dict.fromkeys(("true", "1", "desirable", "good"), True),
    **dict.fromkeys(("false", "0", "undesirable", "bad"), False),
}
"""A label as rows hold it, text in lower case -> whether the answer is good."""
_PEOPLE = ("Ada", "Grace", "Alan", "Edsger")
_PLACES = ("London", "Paris", "Lima", "Oslo")
_NOUNS = ("stone", "river", "lamp", "road", "bird", "cup")
MOODS = {"bad": ("broken", "dull"), "fine": ("plain", "usual"), "good": ("lovely", "bright")}
"""Class of a made-up text -> words that show it."""


# --- classes of texts, of words and of images


def _shape_classified(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    pair = optional_text_in(row, columns.get("text_pair"))
    text = text_in(row, columns["text"])
    label = value_in(row, columns["label"])
    if not isinstance(label, float | list | tuple):  # of which `data.problem_type` decides
        label_of(row, label, columns["label"])
    return {"text": text, "text_pair": pair, "label": label}


def _made_up_classified(draw: random.Random, index: int) -> dict[str, Any]:
    mood = list(MOODS)[index % len(MOODS)]
    return {"text": f"This {draw.choice(_NOUNS)} is {draw.choice(MOODS[mood])}.", "label": mood}


def _shape_words(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    words, labels = (_list_in(row, value_in(row, columns[name]), columns[name]) for name in WORDS.needed)
    for word in words:
        if not isinstance(word, str):
            raise bad_row(row, f"column {columns['tokens']} holds {kind_of(word)}, expected words")
    if len(words) != len(labels):
        message = f"there are {len(words)} words in {columns['tokens']} and {len(labels)} labels"
        raise bad_row(row, f"{message} in {columns['labels']}", "give each word one label")
    kept = [label if label == IGNORED else label_of(row, label, columns["labels"]) for label in labels]
    return {"tokens": words, "labels": kept}


def _list_in(row: Row, value: Any, column: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise bad_row(row, f"column {column} holds {kind_of(value)}, expected a list")
    return list(value)


def _made_up_words(draw: random.Random, index: int) -> dict[str, Any]:
    if index % 4 == 3:
        return {"tokens": ["It", "rained", "again", "."], "labels": ["O"] * 4}
    words = [draw.choice(_PEOPLE), "lived", "in", draw.choice(_PLACES), "."]
    return {"tokens": words, "labels": ["B-PER", "O", "O", "B-LOC", "O"]}


def _shape_image(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """{image: the absolute path of its file, or the bytes; label}"""
    file = image_file(row, value_in(row, columns["image"]), f"column {columns['image']}")
    label = label_of(row, value_in(row, columns["label"]), columns["label"])
    return {"image": file.path if file.content is None else file.content, "label": label}


def _made_up_image(draw: random.Random, index: int) -> dict[str, Any]:
    name = list(COLOURS)[index % len(COLOURS)]
    return {"image": coloured(draw, name), "label": name}


# --- answers labelled good or bad


def _shape_labelled(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """{prompt, completion, label}, and tools: both text, or both messages."""
    asked, answer = columns["prompt"], columns["completion"]
    label = _flag_in(row, columns["label"])
    if not (is_conversation(value_in(row, asked)) or is_conversation(value_in(row, answer))):
        return {"prompt": text_in(row, asked), "completion": text_in(row, answer), "label": label}
    prompt, completion = _turns(row, asked, "user"), _turns(row, answer, "assistant")
    completion = after_prompt(prompt, completion)
    if asking := opening(completion):
        if not is_conversation(row.values[asked]):
            refuse_outside(row, asked, asking, [answer], f"columns: {{messages: {answer}, {asked}: null}}")
            prompt = []
        prompt, completion = prompt + asking, completion[len(asking) :]
    return _of_messages(row, prompt, completion, label, columns)


def _shape_labelled_instruction(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    given = optional_text_in(row, columns.get("input"))
    prompt = instruction_prompt(text_in(row, columns["instruction"]), given)
    label = _flag_in(row, columns["label"])
    return {"prompt": prompt, "completion": text_in(row, columns["output"]), "label": label}


def _shape_labelled_chat(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The last message is the answer, those before it are the prompt."""
    value_in(row, columns["messages"])
    messages = messages_of(row, columns["messages"])
    return _of_messages(row, messages[:-1], messages[-1:], _flag_in(row, columns["label"]), columns)


def _turns(row: Row, column: str, role: str) -> list[Message]:
    """The messages of a column; text is one of `role`."""
    if is_conversation(row.values[column]):
        return messages_of(row, column)
    return [{"role": role, "content": text_in(row, column)}]


def _of_messages(
    row: Row, prompt: list[Message], completion: list[Message], label: bool, columns: Mapping[str, str]
) -> dict[str, Any]:
    if not prompt or not completion or completion[-1]["role"] != "assistant":
        message = "the label is about the last message, which must be the assistant's and follow another one"
        raise bad_row(row, message, "delete the row")
    shaped: dict[str, Any] = {"prompt": prompt, "completion": completion}
    refuse_masks(row, shaped)
    tools = tools_of(row, columns["tools"]) if "tools" in columns else None
    return {**shaped, "label": label, **({} if tools is None else {"tools": tools})}


def _flag_in(row: Row, column: str) -> bool:
    """Whether the answer is good. RecipeError for a value that says neither."""
    value = value_in(row, column)
    is_plain = isinstance(value, str | int | float)
    known = _FLAGS.get(value.strip().lower() if isinstance(value, str) else value) if is_plain else None
    if known is None:
        held = repr(value) if is_plain else kind_of(value)
        raise bad_row(
            row, f"column {column} holds {held}, expected whether the answer is good", "write true or false"
        )
    return known


def _made_up_answer(draw: random.Random, index: int) -> tuple[str, str, bool]:
    """A question, its answer, and whether that is good: two thirds are."""
    noun, count = draw.choice(("stone", "river", "lamp", "cup")), draw.randint(2, 9)
    good = index % 3 != 0
    return f"How many {noun}s are there? ", f"There are {count}." if good else "I do not want to count.", good


def _made_up_labelled(draw: random.Random, index: int) -> dict[str, Any]:
    return dict(zip(("prompt", "completion", "label"), _made_up_answer(draw, index), strict=True))


def _made_up_labelled_instruction(draw: random.Random, index: int) -> dict[str, Any]:
    return dict(zip(("instruction", "output", "label"), _made_up_answer(draw, index), strict=True))


def _made_up_labelled_chat(draw: random.Random, index: int) -> dict[str, Any]:
    prompt, answer, label = _made_up_answer(draw, index)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "label": label}


# --- pairs of texts, and documents of queries


def _shape_positive(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """{anchor, positives, negatives: the texts of all columns of negatives, in their order}."""
    negatives = [
        text
        for name in (*NEGATIVES, "negatives")
        if name in columns and not is_empty(held := row.values.get(columns[name]))
        for text in _texts_in(
            row, [held] if isinstance(held, str) and name in NEGATIVES else held, columns[name]
        )
    ]
    positives = value_in(row, columns["positive"])
    positives = [positives] if isinstance(positives, str) else _texts_in(row, positives, columns["positive"])
    return {"anchor": text_in(row, columns["anchor"]), "positives": positives, "negatives": negatives}


def _texts_in(row: Row, value: Any, column: str) -> list[str]:
    """A list of texts. RecipeError for anything else."""
    if not isinstance(value, list | tuple):
        raise bad_row(row, f"column {column} holds {kind_of(value)}, expected a list of texts")
    for one in value:
        if not isinstance(one, str):
            raise bad_row(row, f"the list in column {column} holds {kind_of(one)}, expected texts")
    return list(value)


def _shape_scored(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    texts = {name: text_in(row, columns[name]) for name in ("sentence1", "sentence2")}
    return {**texts, "score": number_in(row, columns["score"])}


def _made_up_positive(draw: random.Random, index: int) -> dict[str, Any]:
    colour, thing = _COLOURS[index % 8], _THINGS[index // 8 % 8]
    found = {"anchor": f"Which {thing} is {colour}?", "positive": f"The {colour} one of the {thing}s."}
    return found | {f"negative_{n}": f"{draw.choice(_THINGS)} {n}, not {colour}." for n in range(1, 33)}


def _made_up_scored(draw: random.Random, index: int) -> dict[str, Any]:
    colour, other, thing = draw.choice(_COLOURS), draw.choice(_COLOURS), draw.choice(_THINGS)
    texts = {"sentence1": f"The {thing} is {colour}.", "sentence2": f"It is a {other} {thing}."}
    return {**texts, "score": 1.0 if colour == other else 0.2}


def _shape_relevance(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    documents = [text_in(row, columns["document"])]
    return {
        "query": text_in(row, columns["query"]),
        "documents": documents,
        "labels": [number_in(row, columns["score"])],
    }


def _shape_ranking(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    documents = _texts_in(row, value_in(row, columns["documents"]), columns["documents"])
    labels = value_in(row, columns["labels"])
    if not isinstance(labels, list | tuple) or not all(map(is_number, labels)):
        message = f"column {columns['labels']} holds {kind_of(labels)}, expected a list of numbers"
        raise bad_row(row, message)
    if len(documents) != len(labels):
        raise bad_row(row, f"there are {len(documents)} documents and {len(labels)} labels")
    return {
        "query": text_in(row, columns["query"]),
        "documents": documents,
        "labels": [float(one) for one in labels],
    }


def _made_up_relevance(draw: random.Random, index: int) -> dict[str, Any]:
    row = _made_up_positive(draw, index // 2)  # two documents of each query
    good = index % 2 == 0
    document = row["positive"] if good else row["negative_1"]
    return {"query": row["anchor"], "document": document, "score": float(good)}


def _made_up_ranking(draw: random.Random, index: int) -> dict[str, Any]:
    row = _made_up_positive(draw, index)
    return {"query": row["anchor"], "documents": [row["negative_1"], row["positive"]], "labels": [0.0, 1.0]}


# --- prompts


def _shape_prompt(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """{prompt: text or messages, columns: the others} of a row."""
    column = columns["prompt"]
    value = row.values.get(column)
    prompt = messages_of(row, column) if is_conversation(value) else text_in(row, column)
    if not isinstance(prompt, str) and prompt[-1].get("role") == "assistant":
        hint = "leave the answer out of the prompt, or put it into a column of its own"
        raise bad_row(row, f"column {column} ends with a message of the assistant", hint)
    tools = tools_of(row, "tools") if row.values.get("tools") else None
    if tools:
        raise bad_row(
            row, "column tools holds tools, which task grpo does not support", "write `tools: null`"
        )
    return {"prompt": prompt, "columns": {k: v for k, v in row.values.items() if k != column}}


def _made_up_prompt(draw: random.Random, _: int) -> dict[str, Any]:
    first, second = draw.randint(2, 9), draw.randint(2, 9)
    return {"prompt": f"{first} + {second} = ", "answer": str(first + second)}


# --- the table


@dataclass(frozen=True, slots=True)
class OwnFormat:
    """A row format of one task."""

    shape: Shaper
    make: Callable[[random.Random, int], dict[str, Any]]
    """A row made up for `--tiny`, with the format's own names as columns."""


OWN_FORMATS: Mapping[str, OwnFormat] = {
    CLASSIFICATION.name: OwnFormat(_shape_classified, _made_up_classified),
    WORDS.name: OwnFormat(_shape_words, _made_up_words),
    IMAGE.name: OwnFormat(_shape_image, _made_up_image),
    IMAGE_CHAT.name: OwnFormat(image_rows.shape_chat, image_rows.made_up_chat),
    IMAGE_PROMPT.name: OwnFormat(image_rows.shape_prompt, image_rows.made_up_prompt),
    LABELLED.name: OwnFormat(_shape_labelled, _made_up_labelled),
    LABELLED_INSTRUCTION.name: OwnFormat(_shape_labelled_instruction, _made_up_labelled_instruction),
    LABELLED_CHAT.name: OwnFormat(_shape_labelled_chat, _made_up_labelled_chat),
    POSITIVE_PAIR.name: OwnFormat(_shape_positive, _made_up_positive),
    SCORED_PAIR.name: OwnFormat(_shape_scored, _made_up_scored),
    RELEVANCE.name: OwnFormat(_shape_relevance, _made_up_relevance),
    RANKING.name: OwnFormat(_shape_ranking, _made_up_ranking),
    PROMPT.name: OwnFormat(_shape_prompt, _made_up_prompt),
    TOKEN_IDS.name: OwnFormat(shape_token_ids, made_up_token_ids),
}
"""Format -> what is its own; those of several tasks are in formats.py."""
