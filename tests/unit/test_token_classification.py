"""Labelled words: which token has the label of its word, what is counted, scores of entities."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

from launcher.errors import RecipeError
from launcher.rows.class_names import IGNORED, collect_labels
from launcher.rows.recognise import canonical, detect
from launcher.rows.sources import Row
from launcher.train.tasks.token_classification import EncodeWords, encode_words, word_scores
from launcher.train.tiny import tiny_tokenizer

TASK = "token-classification"
LABELS = ("B-LOC", "B-PER", "I-PER", "O")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(512)


def row(tokens, labels, **more) -> Row:
    return Row({"tokens": tokens, "labels": labels, **more}, "data/ner.jsonl", 7)


def encoded(tokenizer, *rows, max_length=64, drops=False):
    return EncodeWords(tokenizer, max_length, drops, LABELS)(rows)


def words_of(tokenizer, ids, owners) -> list[str]:
    """The text from each first token of a word to the next one, without the spaces around it."""
    starts = [number for number, owner in enumerate(owners) if owner is not None]
    ends = [*starts[1:], len(ids)]
    return [tokenizer.decode(ids[start:end]).strip() for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    "words", [["Ada", "lived", "in", "London", "."], ["New York", "is", "größer"], ["a"], [".", ",", "!"]]
)
def test_each_word_has_its_label_at_its_first_token(tokenizer, words):
    found, owners = encode_words(tokenizer, words)
    assert found["input_ids"] == tokenizer(" ".join(words))["input_ids"], "the tokens of the plain text"
    assert [owner for owner in owners if owner is not None] == list(range(len(words)))
    assert words_of(tokenizer, found["input_ids"], owners) == words


def test_special_tokens_of_the_tokenizer_have_no_label():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {
        word: number for number, word in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "ada", "li", "##ved"))
    }
    bert = transformers.BertTokenizer(vocab=vocabulary)
    found, owners = encode_words(bert, ["Ada", "lived"])
    assert isinstance(bert.backend_tokenizer, tokenizers.Tokenizer)
    assert bert.convert_ids_to_tokens(found["input_ids"]) == ["[CLS]", "ada", "li", "##ved", "[SEP]"]
    assert owners == [None, 0, 1, None, None]


def test_labels_become_ids_and_other_tokens_none(tokenizer):
    batch = encoded(tokenizer, row(["Ada", "in", "London"], ["B-PER", "O", "B-LOC"]))
    (labels,) = batch.columns["labels"]
    assert [LABELS[label] for label in labels if label != IGNORED] == ["B-PER", "O", "B-LOC"]
    assert len(labels) == len(batch.columns["input_ids"][0]) > 3
    assert (batch.kept, batch.rows, batch.dropped, batch.notes) == (1, [0], {}, {})


def test_what_is_cut_off_left_out_or_without_a_token_is_counted(tokenizer):
    long = row(["London"] * 40, ["B-LOC"] * 40)
    length = len(tokenizer(" ".join(["London"] * 40))["input_ids"])
    batch = encoded(
        tokenizer,
        row(["", " "], ["O", "O"]),
        long,
        row(["Ada", "", "in"], ["B-PER", "O", "O"]),
        max_length=20,
    )
    assert (batch.kept, batch.rows, batch.dropped) == (2, [1, 2], {"empty": 1})
    assert (batch.truncated, batch.tokens_lost) == (1, length - 20)
    assert len(batch.columns["labels"][0]) == 20
    assert batch.notes == {"word-without-token": 1}
    assert encoded(tokenizer, long, max_length=20, drops=True).dropped == {"overlong": 1}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"tokens": ["a", "b"], "labels": ["O"]}, "bad-row"),
        ({"tokens": ["a", 1], "labels": ["O", "O"]}, "bad-row"),
        ({"tokens": ["a"], "labels": [0.5]}, "bad-row"),
        ({"tokens": ["a"], "labels": [None]}, "bad-row"),
        ({"tokens": ["a"], "labels": ["B-ORG"]}, "bad-row"),
    ],
)
def test_bad_rows_are_refused_with_their_place(tokenizer, values, code):
    good = row(["a"], ["O"])
    detected = detect([good], "auto", {}, TASK, "data/ner.jsonl")
    with pytest.raises(RecipeError) as caught:
        encoded(tokenizer, canonical(Row(values, "data/ner.jsonl", 9), detected))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.line) == (code, "data/ner.jsonl", 9)


def test_columns_of_other_names_are_suggested_and_read():
    conll = Row({"words": ["a"], "ner_tags": [0]}, "x.jsonl", 1)
    with pytest.raises(RecipeError) as caught:
        detect([conll], "auto", {}, TASK, "x.jsonl")
    assert "columns: {tokens: words, labels: ner_tags}" in caught.value.problems[0].hint
    columns = {"tokens": "words", "labels": "ner_tags"}
    assert canonical(conll, detect([conll], "auto", columns, TASK, "x.jsonl")).values == {
        "tokens": ["a"],
        "labels": [0],
    }


def test_a_mask_of_words_is_refused():
    masked = row(["a", "b"], ["O", "O"], loss_mask=[1, 0])
    with pytest.raises(RecipeError) as caught:
        detect([masked], "auto", {}, TASK, "data/ner.jsonl")
    assert caught.value.problems[0].code == "column-unread"
    detect([row(["a", "b"], ["O", "O"], loss_mask=[1, 1])], "auto", {}, TASK, "data/ner.jsonl")


def test_labels_of_all_words_are_collected():
    rows = [row(["a", "b"], ["O", "B-PER"]), row(["c"], ["B-LOC"])]
    assert collect_labels(rows) == ("B-LOC", "B-PER", "O")
    assert collect_labels([row(["a", "b"], [10, 2])]) == ("2", "10")


def test_scores_are_of_whole_entities_where_labels_are_those_of_entities():
    pytest.importorskip("seqeval")
    per, inside, loc, none = 1, 2, 0, 3
    targets = np.array([[IGNORED, per, inside, none, loc], [per, none, IGNORED, IGNORED, IGNORED]])
    guesses = np.array([[9, per, none, none, loc], [per, none, 0, 0, 0]])
    found = word_scores(["accuracy", "precision", "recall", "f1"], guesses, targets, LABELS)
    # Of three entities, "per inside" was found half, which is not found; three were predicted.
    assert found == {
        "accuracy": 5 / 6,
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
        "f1": pytest.approx(2 / 3),
    }


def test_a_word_with_the_label_minus_100_does_not_contribute_to_the_loss(tokenizer):
    given = row(["Ada", "in", "London"], [-100, "O", "B-LOC"])
    shaped = canonical(given, detect([given], "auto", {}, TASK, "data/ner.jsonl"))
    assert collect_labels([shaped]) == ("B-LOC", "O"), "it is no class"
    (labels,) = encoded(tokenizer, shaped).columns["labels"]
    assert [LABELS[label] for label in labels if label != IGNORED] == ["O", "B-LOC"]
    assert encoded(tokenizer, row(["Ada", "in"], [-100, -100])).dropped == {"no-targets": 1}


@pytest.mark.parametrize(("last", "single"), [("L", "U"), ("E", "S")])
def test_entities_of_bilou_labels_are_those_of_iobes(last, single):
    pytest.importorskip("seqeval")
    labels = ("B-PER", "I-PER", f"{last}-PER", "O", f"{single}-PER")
    # Two entities of one word each, one of three words, one of two, which was not found.
    targets = np.array([[4, 4, 0, 1, 2, 0, 2]])
    guesses = np.array([[4, 4, 0, 1, 2, 3, 3]])
    found = word_scores(["precision", "recall"], guesses, targets, labels)
    assert found == {"precision": 1.0, "recall": 0.75}


def test_scores_of_other_labels_are_macro_averages_of_words():
    pytest.importorskip("sklearn")
    targets, guesses = np.array([[0, 0, 0, 1]]), np.array([[0, 0, 1, 1]])
    found = word_scores(["recall", "precision"], guesses, targets, ("NOUN", "VERB"))
    assert found == {"recall": pytest.approx((2 / 3 + 1) / 2), "precision": pytest.approx((1 + 1 / 2) / 2)}
