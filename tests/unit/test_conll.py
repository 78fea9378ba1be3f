"""CoNLL files: sentences, columns, comments, and tags that their scheme excludes."""

from __future__ import annotations

import gzip

import pytest

pytest.importorskip("transformers")

from launcher.errors import RecipeError
from launcher.rows.class_names import collect_labels
from launcher.rows.recognise import canonical, detect
from launcher.rows.sources import Row, iter_rows
from launcher.train.tasks.token_classification import EncodeWords, is_scheme, is_valid
from launcher.train.tiny import tiny_tokenizer

TASK = "token-classification"
OF_2003 = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# SYM B-NP O
1 CD I-NP O
"""
IDENTIFIED = "# id 12 domain=en\nAda _ _ B-PER\nran _ _ O\n\n\n# id 13 domain=en\nit _ _ O\n"
TABBED = "# sent_id = 1\nNew York\tB-LOC\n\t\nslept\tO\n"


def rows(folder, text: str, name: str = "train.conll") -> list[Row]:
    (folder / name).write_bytes(text.encode())
    return list(iter_rows({"path": str(folder / name)}))


def test_columns_of_sentences(tmp_path):
    first, second = rows(tmp_path, OF_2003)
    assert (first.number, second.number) == (3, 6)
    assert first.values == {
        "tokens": ["EU", "rejects"], "column_2": ["NNP", "VBZ"], "column_3": ["B-NP", "B-VP"],
        "labels": ["B-ORG", "O"],
    }  # fmt: skip
    assert second.values["tokens"] == ["#", "1"], "a word, with the columns of one"


def test_comments_tabs_windows_line_ends_and_packed_files(tmp_path):
    assert [row.values["tokens"] for row in rows(tmp_path, IDENTIFIED)] == [["Ada", "ran"], ["it"]]
    found = rows(tmp_path, TABBED.replace("\n", "\r\n"), "b.iob2")
    assert [row.values for row in found] == [
        {"tokens": ["New York"], "labels": ["B-LOC"]},
        {"tokens": ["slept"], "labels": ["O"]},
    ]
    (tmp_path / "c.conll.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfa O\nb O"))
    assert [row.values["tokens"] for row in iter_rows({"path": str(tmp_path / "c.conll.gz")})] == [["a", "b"]]


UNIVERSAL = """\
# sent_id = 1
1\tI\tI\tPRON\tPRP\t_\t2\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t0:root\t_

# sent_id = 2
1-2\tdella\t_\t_\t_\t_\t_\t_\t_\t_
1\tdi\tdi\tADP\tE\t_\t2\tcase\t_\t_
2\tla\til\tDET\tRD\t_\t0\troot\t_\t_
"""
NUMBERED = "#\tnote\n1\tAda\tO\tB-PER\n2\t1815\tO\tO\n\n1\tran\tO\tO\n"


def test_numbers_of_words_ranges_and_empty_nodes_are_no_words(tmp_path):
    for name in ("a.conll", "a.conllu"):
        found = rows(tmp_path, UNIVERSAL, name)
        assert [row.values["tokens"] for row in found] == [["I", "do", "n't"], ["di", "la"]]
        assert [row.number for row in found] == [2, 10]
        assert found[0].values["upos"] == ["PRON", "AUX", "PART"]
        with pytest.raises(RecipeError) as caught:  # the labels are one of the columns
            detect(found, "auto", {}, TASK, name)
        assert caught.value.problems[0].code == "format-unknown"
        detected = detect(found, "auto", {"labels": "upos"}, TASK, name)
        assert canonical(found[1], detected).values["labels"] == ["ADP", "DET"]
    found = rows(tmp_path, NUMBERED)
    assert [row.values["tokens"] for row in found] == [["Ada", "1815"], ["ran"]]
    assert found[0].values["labels"] == ["B-PER", "O"]
    assert rows(tmp_path, "1 CD O\nman NN O\n\n1 CD O\n")[0].values["tokens"] == ["1", "man"]


def test_conll_files_by_other_names(tmp_path):
    for name, code in (
        ("a.train", "data-suffix"), ("b.dev", "data-suffix"), ("*.test", "data-suffix"),
        ("c.tsv", "data-unreadable"),
    ):  # fmt: skip
        for text in (OF_2003.replace(" ", "\t"), UNIVERSAL, NUMBERED):
            file = name.replace("*", "d")
            with pytest.raises(RecipeError) as caught:
                rows(tmp_path, text, file)
            if "*" in name:
                with pytest.raises(RecipeError) as caught:
                    list(iter_rows({"path": str(tmp_path / name)}))
            (problem,) = caught.value.problems
            assert (problem.code, ".conll" in problem.hint) == (code, True)
            assert rows(tmp_path, text, f"{file}.conll")
    for text in ("text\tlabel\na b\t1\n\nc\t2\n", "text\tlabel\na\t1\nb\t2\n\n", "\ufefftext\n\na\n"):
        assert rows(tmp_path, text, "table.tsv"), "a table with an empty line"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("# O\na B-X\n", ["#", "a"]),
        ("# a note of the file\n\n# O\na B-X\n", ["#", "a"]),
        ("#\tO\na b\tB-X\n", ["#", "a b"]),
        ("#\tid\tO\na\tb\tB-X\n", ["#", "a"]),
        ("# id = 1\n#\tX\tO\na\tb\tB-X\n", ["#", "a"]),
        ("# 1\n#tag O\na O\n", ["#", "#tag", "a"]),
        ("a O\n# O\n", ["a", "#"]),
        ("a x O\n# id O\n", ["a", "#"]),
    ],
)
def test_a_number_sign_with_the_columns_of_a_word_is_a_word(tmp_path, text, tokens):
    (row,) = rows(tmp_path, text)
    assert row.values["tokens"] == tokens


def test_comments_are_before_the_first_word_of_a_sentence(tmp_path):
    text = "# id 1 x=1\n# text = a b c\na x y O\n\n# newpar\n# id 2 x=1\nb x y O\n"
    assert [row.values["tokens"] for row in rows(tmp_path, text)] == [["a"], ["b"]]
    with pytest.raises(RecipeError) as caught:
        rows(tmp_path, "# O\n# text\n")
    assert caught.value.problems[0].code == "no-rows"


@pytest.mark.parametrize(
    ("text", "line"), [("a O\n# note here\n", 2), ("a O\nb\n", 2), ("a O\nb X O\n", 2), ("a\n", 1)]
)
def test_lines_of_another_width_are_named(tmp_path, text, line):
    with pytest.raises(RecipeError) as caught:
        rows(tmp_path, text)
    assert [(p.code, p.line) for p in caught.value.problems] == [("data-unreadable", line)]


def test_other_columns_are_chosen(tmp_path):
    found = rows(tmp_path, OF_2003)
    assert canonical(found[0], detect(found, "auto", {}, TASK, "x")).values["labels"] == ["B-ORG", "O"]
    detected = detect(found, "auto", {"labels": "column_2"}, TASK, "x")
    assert canonical(found[0], detected).values["labels"] == ["NNP", "VBZ"]
    with pytest.raises(RecipeError) as caught:
        detect(found, "auto", {"labels": "column_4"}, TASK, "x")
    assert caught.value.problems[0].code == "column-missing"


def test_a_text_file_of_words_is_told_its_name(tmp_path):
    found = rows(tmp_path, OF_2003, "train.txt")
    with pytest.raises(RecipeError) as caught:
        detect(found, "auto", {}, TASK, str(tmp_path / "train.txt"))
    (problem,) = caught.value.problems
    assert problem.code == "format-unknown"
    assert ".conll" in problem.hint


@pytest.mark.parametrize(
    ("tags", "closed", "valid"),
    [
        ("O B-A I-A O B-A B-B", False, True),
        ("I-A O", False, False),
        ("B-A I-B", False, False),
        ("B-A O I-A", False, False),
        ("B-A L-A U-B O", True, True),
        ("B-A I-A E-A S-A", True, True),
        ("B-A I-A O", True, False),
        ("B-A U-B", True, False),
        ("B-A", True, False),
        ("L-A", True, False),
    ],
)
def test_the_order_of_tags(tags, closed, valid):
    assert is_valid(tags.split(), closed=closed) is valid


def test_rows_with_tags_out_of_order_are_kept_and_counted():
    def batch(*tags):
        found = [Row({"tokens": ["a"] * len(one), "labels": one}, "x", n) for n, one in enumerate(tags)]
        return EncodeWords(tiny_tokenizer(512), 64, False, collect_labels(found))(found)

    found = batch(["B-A", "I-A"], ["O", "I-A"], ["B-A", "I-A", -100])
    assert (found.kept, found.notes) == (3, {"invalid-tags": 1})
    assert batch(["B-A", "L-A"], ["B-A", "O"]).notes == {"invalid-tags": 1}
    assert batch(["NN", "VB"], ["VB", "NN"]).notes == {}, "no scheme"
    assert not is_scheme(("I-A", "O")), "IOB1 without neighbours says nothing of beginnings"
