"""Rows that are tokenised already: what they become, and what is refused with file and line."""

from __future__ import annotations

import random

import pytest
from grounds import tokenizer_of_1024_words

from launcher.errors import RecipeError
from launcher.rows.class_names import IGNORED as OFF
from launcher.rows.recognise import detect, read_row
from launcher.rows.sources import Row
from launcher.rows.token_rows import made_up_token_ids
from launcher.train.data.tokenize import EncodePairs, EncodeTokenIds

VOCABULARY = 1024


def read(**values):
    """The canonical values of a row."""
    row = Row(values, "rows.jsonl", 7)
    detected = detect([row], "auto", {}, "causal-lm", "rows.jsonl")
    assert detected.format == "token-ids"
    return read_row(row, detected)


def encoded(*rows, max_length=16, overlong="truncate"):
    return EncodeTokenIds(max_length, overlong, VOCABULARY)(rows)


@pytest.mark.parametrize(
    ("values", "documents"),
    [
        ({}, [([5, 6, 7, 8], [OFF, OFF, 7, 8])]),
        ({"attention_mask": [1, 1, 1, 1], "position_ids": [0, 1, 2, 3]}, [([5, 6, 7, 8], [OFF, OFF, 7, 8])]),
        ({"attention_mask": [0, 1, 1, 1]}, [([6, 7, 8], [OFF, 7, 8])]),
        ({"labels": [5, 6, OFF, OFF], "attention_mask": [1, 1, 0, 0]}, [([5, 6], [5, 6])]),
        ({"position_ids": [0, 1, 0, 1]}, [([5, 6], [OFF, OFF]), ([7, 8], [7, 8])]),
        ({"attention_mask": [0, 1, 1, 1], "position_ids": [1, 0, 1, 0]},
         [([6, 7], [OFF, 7]), ([8], [8])]),
        ({"attention_mask": [0] * 4, "labels": [OFF] * 4}, [([], [])]),
        ({"attention_mask": None}, [([5, 6, 7, 8], [OFF, OFF, 7, 8])]),
    ],
)  # fmt: skip
def test_a_row_is_its_documents_without_padding(values, documents):
    row = read(**{"input_ids": [5, 6, 7, 8], "labels": [OFF, OFF, 7, 8], **values})
    assert row.values == {"documents": documents}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"labels": [OFF, 6, 7]}, "labels"),
        ({"labels": [6, 7, 8, OFF]}, "labels[0]"),
        ({"labels": [OFF, OFF, 7, -1]}, "labels[3]"),
        ({"labels": [OFF, None, 7, 8]}, "labels"),
        ({"input_ids": [5, 6.0, 7, 8]}, "input_ids"),
        ({"input_ids": [5, True, 7, 8]}, "input_ids"),
        ({"input_ids": [[5, 6], [7, 8]]}, "input_ids"),
        ({"attention_mask": [1, 1, 1]}, "attention_mask"),
        ({"attention_mask": [1, 0, 1, 1]}, "attention_mask"),
        ({"attention_mask": [1, 1, 1, 2]}, "attention_mask"),
        ({"attention_mask": [1, 1, 1, 0]}, "labels"),
        ({"attention_mask": "1111"}, "attention_mask"),
        ({"position_ids": [1, 2, 3, 4]}, "position_ids"),
        ({"position_ids": [0, 1, 1, 2]}, "position_ids"),
        ({"position_ids": [0, 2, 4, 6]}, "position_ids"),
    ],
)
def test_rows_that_would_train_something_else_are_refused(values, names):
    with pytest.raises(RecipeError) as caught:
        read(**{"input_ids": [5, 6, 7, 8], "labels": [OFF, OFF, 7, 8], **values})
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == ("rows.jsonl", 7)
    assert names in problem.message.split(", ")[0]
    assert problem.code == "bad-row"


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(token):
    with pytest.raises(RecipeError) as caught:
        encoded(read(input_ids=[5, token, 7], labels=[OFF, OFF, 7]))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.line) == ("unknown-token", "rows.jsonl", 7)


def test_rows_are_the_samples_that_the_texts_would_give():
    """Prompts and completions, tokenised by the library and written as ids, train the same."""
    tokenizer = tokenizer_of_1024_words()
    texts = [Row({"prompt": f"w{n} w9", "completion": f"w{n + 1} w7 w8"}, "t.jsonl", n) for n in range(1, 9)]
    wanted = EncodePairs(tokenizer, 16, "truncate", "completion")(texts)
    columns = zip(wanted.columns["input_ids"], wanted.columns["labels"], strict=True)
    found = encoded(*(read(input_ids=ids, labels=labels) for ids, labels in columns))
    assert (found.columns, found.rows) == (wanted.columns, wanted.rows)
    assert (found.kept, found.tokens, found.truncated) == (8, wanted.tokens, 0)


def test_each_document_is_a_sample_and_length_is_counted():
    joined = read(
        input_ids=[5, 6, 7, 8, 9, 5], labels=[OFF, 6, 7, OFF, 9, 5], position_ids=[0, 1, 2, 0, 1, 2]
    )
    none = read(input_ids=[5, 6], labels=[OFF, OFF])
    empty = read(input_ids=[5], labels=[OFF], attention_mask=[0])
    found = encoded(joined, none, empty, joined, max_length=2)
    assert found.columns == {"input_ids": [[5, 6], [8, 9]] * 2, "labels": [[OFF, 6], [OFF, 9]] * 2}
    assert found.rows == [0, 0, 3, 3]
    assert (found.kept, found.split, found.truncated, found.tokens_lost, found.tokens) == (2, 2, 2, 4, 14)
    assert found.dropped == {"no-targets": 1, "empty": 1}
    assert encoded(joined, max_length=2, overlong="drop").dropped == {"overlong": 1}


def test_made_up_rows_are_such_rows():
    made = [read(**made_up_token_ids(random.Random(0), index)) for index in range(4)]
    assert encoded(*made).kept == 4


@pytest.mark.parametrize("columns", [{"text": "one two three four five"}, {"prompt": "a", "completion": "b"}])
def test_rows_that_are_also_texts_ask_which_is_meant(columns):
    row = Row({"input_ids": [5, 6], "labels": [OFF, 6], **columns}, "rows.jsonl", 1)
    with pytest.raises(RecipeError) as caught:
        detect([row], "auto", {}, "causal-lm", "rows.jsonl")
    assert [problem.code for problem in caught.value.problems] == ["format-ambiguous"]
    unread = dict.fromkeys(columns)
    assert detect([row], "auto", unread, "causal-lm", "rows.jsonl").format == "token-ids"


def test_other_tasks_say_whose_rows_they_are():
    row = Row({"input_ids": [5, 6], "labels": [OFF, 6]}, "rows.jsonl", 1)
    with pytest.raises(RecipeError) as caught:
        detect([row], "auto", {}, "dpo", "rows.jsonl")
    assert "token-ids" in str(caught.value)
