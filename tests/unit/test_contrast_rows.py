"""Rows of embeddings and rerankers that contradict themselves or each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from launcher.report.data_sections import data_section
from launcher.report.sections import line
from launcher.rows.sources import Row
from launcher.train.data.encoded import Counts
from launcher.train.tasks.embedding import EncodeTexts
from launcher.train.tasks.reranker import EncodeDocuments
from launcher.train.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer(512)


def counted(encode, *rows):
    """The counts of rows, each in a batch of its own."""
    counts = Counts()
    for number, values in enumerate(rows):
        counts.read += 1
        counts.add(encode([Row(values, "x", number)]))
    return counts.to_json()


def encoder(loss, columns, max_length=64, **settings):
    job = SimpleNamespace(tiny=False, embedding=SimpleNamespace(loss=loss, **settings))
    return EncodeTexts(job, TOKENIZER, columns, max_length, False)


def of_pairs(*rows, negatives=0, max_length=64, prompts=None):
    columns = ("anchor", "positive", *(f"negative_{n + 1}" for n in range(negatives)))
    encode = encoder(
        "MultipleNegativesRankingLoss", columns, max_length, prompts=prompts or {}, negatives=negatives
    )
    names = ("anchor", "positives", "negatives")
    return counted(encode, *(dict(zip(names, (row[0], row[1:2], row[2:]), strict=True)) for row in rows))


def of_scores(*rows):
    columns = ("sentence1", "sentence2")
    encode = encoder("CoSENTLoss", columns, prompts={})
    return counted(encode, *(dict(zip((*columns, "score"), row, strict=True)) for row in rows))


def of_documents(*rows, most=8):
    loss = "LambdaLoss" if most > 1 else "MSELoss"
    section = SimpleNamespace(loss=loss, documents=most)
    return counted(EncodeDocuments(TOKENIZER, section, 64, False), *rows)


def test_a_positive_that_is_a_negative_leaves_its_row_out():
    found = of_pairs(["a", "b", "c", "b"], ["a", "b", "c", "d"], negatives=2)
    assert (found["kept"], found["dropped"], found["notes"]) == (1, {"equal": 1}, {})


def test_texts_that_are_cut_to_the_same_are_the_same():
    rows = [["a", "b c d e f", "b c d e g"]]
    assert of_pairs(*rows, negatives=1)["dropped"] == {}
    assert of_pairs(*rows, negatives=1, max_length=3)["dropped"] == {"equal": 1}


@pytest.mark.parametrize("prompts", [{}, {"query": "ask: ", "document": "doc: "}])
@pytest.mark.parametrize("row", [["a", " a", "b"], ["a", "b", "a"]])
def test_an_anchor_that_is_repeated_is_counted(row, prompts):
    found = of_pairs(row, ["a", "b", "c"], negatives=1, prompts=prompts)
    assert found["kept"] == 2
    assert found["notes"]["anchor-repeated"] == 1


def test_pairs_that_are_positive_and_negative_are_counted():
    found = of_pairs(["a", "b", "c"], ["a", "c", "d"], ["x", "b", "a"], ["a", "b", "c"], negatives=1)
    assert (found["kept"], found["notes"]) == (4, {"contradicting-labels": 1})


@pytest.mark.parametrize(
    ("rows", "notes"),
    [
        ([("a", "b", 1.0), ("a", "b", 0.0), ("a", "b", 0.5)], {"contradicting-labels": 1}),
        ([("a", "b", 1.0), ("b", "a", 0.0)], {"contradicting-labels": 1}),
        ([("a", "b", 1.0), ("b", "a", 1.0), ("a", "c", 0.0)], {}),
        ([("a", "a", 1.0)], {}),
    ],
)
def test_scored_pairs_with_several_scores_are_counted(rows, notes):
    found = of_scores(*rows)
    assert (found["kept"], found["dropped"], found["notes"]) == (len(rows), {}, notes)


def test_documents_with_several_labels():
    def one(query, document, label):
        return {"query": query, "documents": [document], "labels": [label]}

    found = of_documents(one("a", "b", 1.0), one("a", "b", 0.0), one("b", "a", 0.0), most=1)
    assert (found["kept"], found["notes"]) == (3, {"contradicting-labels": 1})
    ranked = {"query": "a", "documents": ["b", "c", "b"], "labels": [1.0, 0.0, 0.0]}
    same = {"query": "a", "documents": ["b", "c", "b"], "labels": [1.0, 0.0, 1.0]}
    other = {"query": "a", "documents": ["b", "c"], "labels": [0.0, 2.0]}
    found = of_documents(ranked, same, other)
    assert (found["kept"], found["dropped"]) == (2, {"equal": 1})
    assert found["notes"] == {"contradicting-labels": 2}


def test_positive_pairs_of_a_reranker():
    pair = {"anchor": "a", "positives": ["b"], "negatives": ["c", "b"]}
    found = of_documents(pair, {**pair, "negatives": ["a"]})
    assert (found["kept"], found["dropped"]) == (1, {"equal": 1})
    assert found["notes"] == {"anchor-repeated": 1}


def test_each_of_several_positives_is_a_sample_of_its_row():
    row = {"anchor": "a", "positives": ["b c", "d", "e"], "negatives": ["d"]}
    settings = {"prompts": {}, "negatives": 1}
    encode = encoder("MultipleNegativesRankingLoss", ("anchor", "positive", "negative_1"), **settings)
    batch = encode(
        [Row(row, "x", 1), Row({**row, "positives": ["d"]}, "x", 2), Row({**row, "positives": []}, "x", 3)]
    )
    lengths = [[len(TOKENIZER(text)["input_ids"]) for text in ("a", one, "d")] for one in ("b c", "e")]
    assert (batch.rows, batch.columns["lengths"]) == ([0, 0], lengths)
    assert (batch.kept, batch.dropped) == (1, {"equal": 1, "empty": 1})
    section = SimpleNamespace(loss="LambdaLoss", documents=8)
    ranked = EncodeDocuments(TOKENIZER, section, 64, False)([Row({**row, "negatives": ["f"]}, "x", 1)])
    assert ranked.columns["relevance"] == [[1.0, 1.0, 1.0, 0.0]]


def test_the_counts_are_shown():
    counts = of_pairs(["a", "a", "c"], ["a", "c", "d"], ["a", "b", "b"], negatives=1)
    split = {"counts": counts, "lengths": None, "samples": 2, "sources": []}
    table, notes = data_section({"splits": {"train": split}}).blocks
    assert table.rows[0][table.head.index("dropped")].value == 1
    assert [line(note).split()[:3] for note in notes.items[1:]] == [
        ["train:", "1", "rows"],
        ["train:", "1", "pairs"],
    ]
