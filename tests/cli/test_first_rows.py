"""`plan`, `validate` and the dry run look at the first rows of local files, within limits."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from launcher.cli import main
from launcher.inputs import first_rows, source_rows
from launcher.tasks.sequence_classification import MULTI

ROOT = Path(__file__).resolve().parents[2]
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """Writes a recipe for data and runs a command on it: (status, its JSON)."""
    monkeypatch.chdir(tmp_path)

    def call(train, *words, command="validate", **recipe):
        sources = train if isinstance(train, list) else [train]
        text = {"model": {"config": LLAMA, "tokenizer": "./none"}, **recipe}
        text["data"] = {"train": sources, "max_length": 64, **recipe.get("data", {})}
        (tmp_path / "recipe.yaml").write_text(json.dumps(text))
        code = main([command, "recipe.yaml", "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    return call


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def codes(said):
    return [(error["code"], error["path"]) for error in said["errors"]]


WRONG = [
    ({"path": "rows.jsonl", "columns": {"messages": "dialog"}}, [CHAT], "column-missing"),
    ({"path": "rows.jsonl"}, [{"frage": "a", "antwort": "b"}], "format-unknown"),
    ({"path": "rows.jsonl"}, [{**CHAT, "label": False}], "rows-of-another-task"),
    ({"path": "rows.jsonl"}, [{**CHAT, "system": "Be brief."}], "column-unread"),
    ({"path": "rows.jsonl"}, [{"text": "Which of these?", "answer": "That."}], "column-unread"),
    ({"path": "rows.jsonl"}, [CHAT, {"messages": []}], "bad-row"),
    ({"path": "rowz.jsonl"}, [CHAT], "data-missing"),
]


@pytest.mark.parametrize(("source", "rows", "code"), WRONG)
def test_what_is_wrong_with_local_rows_is_an_error_here_and_a_warning_elsewhere(
    asked, tmp_path, source, rows, code
):
    write(tmp_path / "rows.jsonl", rows)
    expected = [(code, "data.train[0].path")]
    for command in ("validate", "plan"):
        status, said = asked(source, command=command)
        assert (status, codes(said)) == (2, expected), command
    elsewhere = {"hardware": {"device": "H100-80GB"}}
    status, said = asked(source, **elsewhere)
    assert (status, len(said["recipes"][0]["warnings"])) == (0, 1)
    for given in ({}, elsewhere):
        status, said = asked(source, "--on", "1xA100-80GB", command="plan", **given)
        assert status == 0
        assert [w for w in said["warnings"] if "data.train[0]" in w], "named, and no reason to refuse"
    status, said = asked(source, command="plan", hardware={"device": "cpu"})
    assert (status, codes(said)) == (2, expected), "a CPU is here"
    status, said = asked(source, "--on", "cpu", command="prepare", **elsewhere)
    assert (status, codes(said)) == (2, expected), "what is run is run here"


PAIR, ROW = {"anchor": "a", "positive": "b"}, "data.train[0].path"
OF_TASKS = [
    ("reward", [{"chosen": "b", "rejected": "c"}, {"chosen": "b"}], {}, "bad-row", ROW),
    ("dpo", [{"chosen": "b", "rejected": "c"}, {"rejected": "b"}], {}, "bad-row", ROW),
    (
        "dpo", [{"prompt": "In French.", "chosen": CHAT["messages"], "rejected": CHAT["messages"][:1] * 2}],
        {}, "column-unread", ROW,
    ),
    ("embedding", [PAIR, {"anchor": "a"}], {}, "bad-row", ROW),
    ("embedding", [PAIR], {"negatives": 1}, "negatives", ROW),
    ("embedding", [{**PAIR, "negative": "c"}], {}, "negatives", ROW),
    ("embedding", [PAIR], {"loss": "TripletLoss"}, "negatives", ROW),
    ("embedding", [PAIR], {"loss": "CoSENTLoss"}, "format-loss", "embedding.loss"),
    (
        "embedding", [{"sentence1": "a", "sentence2": "b", "score": 5}], {"loss": "CosineSimilarityLoss"},
        "score-range", ROW,
    ),
    ("reranker", [{"query": "a", "documents": ["b"], "labels": [1]}], {}, "format-loss", "reranker.loss"),
    (
        "reranker", [{"query": "a", "documents": ["b", "c"], "labels": [1, 1]}], {"loss": "LambdaLoss"},
        "one-label", ROW,
    ),
    (
        "reranker", [{"query": "a", "documents": ["b", "c", "d"], "labels": [1, 0, 0]}],
        {"loss": "LambdaLoss", "documents": 2}, "documents", ROW,
    ),
]  # fmt: skip


IMAGES = {"task": "image-text-to-text", "model": {"name_or_path": "google/gemma-3-4b-it"}}
OF_ALL_ROWS = [
    ({"task": "sequence-classification"}, ["a", "a"], True),
    ({"task": "sequence-classification"}, ["a", ["b"]], False),
    ({"task": "sequence-classification"}, ["0.5", "1.5"], True),
    ({"task": "sequence-classification", "data": {"problem_type": "regression"}}, [1.5, "high"], False),
    ({"task": "sequence-classification", "data": {"problem_type": "regression"}}, [2, 2], True),
    ({"task": "sequence-classification", "data": {"problem_type": MULTI}}, ["a", "b"], False),
]


@pytest.mark.parametrize(("keys", "labels", "of_all"), OF_ALL_ROWS)
def test_labels_that_prepare_would_refuse(asked, tmp_path, keys, labels, of_all):
    """Of all rows together only where all were read."""
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    write(tmp_path / "rows.jsonl", rows)
    status, said = asked({"path": "rows.jsonl"}, **keys)
    assert (status, len(said["errors"])) == (2, 1)
    write(tmp_path / "rows.jsonl", rows + rows[:1] * 200)
    assert asked({"path": "rows.jsonl"}, **keys)[0] == (0 if of_all else 2)


def test_a_source_without_images_of_a_task_that_sees_them(asked, tmp_path):
    write(tmp_path / "rows.jsonl", [CHAT] * 20)
    status, said = asked({"path": "rows.jsonl"}, **IMAGES)
    assert (status, codes(said)) == (2, [("no-images", "data.train[0].path")])
    assert asked({"path": "rows.jsonl", "columns": {"images": None}}, **IMAGES)[0] == 0
    write(tmp_path / "rows.jsonl", [CHAT] * 200)
    assert asked({"path": "rows.jsonl"}, **IMAGES)[0] == 0, "later rows may have some"


@pytest.mark.parametrize(("task", "rows", "section", "code", "path"), OF_TASKS)
def test_rows_that_the_own_section_of_a_task_does_not_take(asked, tmp_path, task, rows, section, code, path):
    write(tmp_path / "rows.jsonl", rows)
    own = {task: section} if section else {}
    for command in ("validate", "plan"):
        status, said = asked({"path": "rows.jsonl"}, command=command, task=task, global_batch_size=2, **own)
        assert (status, codes(said)) == (2, [(code, path)])


def test_a_loss_that_no_source_fits_is_one_problem(asked, tmp_path):
    sources = [{"path": write(tmp_path / name, [PAIR]).name} for name in ("a.jsonl", "b.jsonl")]
    status, said = asked(sources, task="embedding", embedding={"loss": "CoSENTLoss"})
    assert (status, codes(said)) == (2, [("format-loss", "embedding.loss")])


def test_rows_of_such_a_task_that_are_left_out_or_fit(asked, tmp_path):
    listed = {"query": "a", "documents": ["b", "c"], "labels": [1, 0]}
    rows = [listed, {"query": "a", "documents": [], "labels": []}, {**listed, "documents": ["", "c"]}]
    write(tmp_path / "rows.jsonl", rows)
    assert asked({"path": "rows.jsonl"}, task="reranker", reranker={"loss": "LambdaLoss"})[0] == 0
    write(tmp_path / "rows.jsonl", [{**PAIR, "negatives": ["c", "d"]}])
    assert asked({"path": "rows.jsonl"}, task="embedding", embedding={"negatives": 2})[0] == 0


def test_fields_whose_column_is_left_out_and_columns_that_begin_in_a_later_file(asked, tmp_path):
    pair = {
        "prompt": "a",
        "chosen": "b",
        "rejected": "c",
        "preferred_output": "d",
        "non_preferred_output": "e",
    }
    write(tmp_path / "rows.jsonl", [pair])
    left = {"path": "rows.jsonl", "columns": {"rejected": None, "chosen": None}}
    for command in ("validate", "plan"):
        assert asked(left, task="dpo", command=command)[0] == 0
    write(tmp_path / "a.jsonl", [CHAT])
    remark = "some one off remark of the annotator"
    write(
        tmp_path / "b.jsonl", [CHAT, {**CHAT, "title": "Fix the login bug quickly"}, {**CHAT, "note": remark}]
    )
    status, said = asked({"path": "*.jsonl", "columns": {}}, data={"train": [{"path": "[ab].jsonl"}]})
    assert (status, codes(said)) == (2, [("column-unread", "data.train[0].path")])
    assert {"title", "note"} <= set(re.findall(r"\w+", said["errors"][0]["message"]))
    assert (said["errors"][0]["file"], said["errors"][0]["line"]) == (str(tmp_path / "b.jsonl"), 2)


def test_a_file_that_may_lie_elsewhere_is_a_warning(asked, tmp_path):
    write(tmp_path / "rows.jsonl", [CHAT])
    status, said = asked({"path": "on_the_cluster.jsonl"})
    assert status == 0
    assert "on_the_cluster.jsonl" in said["recipes"][0]["warnings"][0]


def test_rows_that_are_held_out_and_each_file_of_a_source_are_looked_at(asked, tmp_path):
    write(tmp_path / "good.jsonl", [CHAT])
    write(tmp_path / "bad.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    data = {"train": [{"path": "good.jsonl"}], "eval": [{"path": "bad.jsonl"}]}
    status, said = asked(None, data=data)
    assert (status, codes(said)[0][1]) == (2, "data.eval[0].path")
    status, said = asked({"path": "*.jsonl", "format": "chat"})
    assert status == 2
    write(tmp_path / "apart.jsonl", [CHAT])  # the format is that of the first file
    status, said = asked({"path": "*.jsonl"})
    assert (status, said["errors"][0]["file"]) == (2, str(tmp_path / "bad.jsonl"))


def test_columns_that_are_not_read_are_named_in_the_plan(asked, tmp_path):
    write(tmp_path / "rows.jsonl", [{**CHAT, "id": 1, "source": "x"}])
    status, said = asked({"path": "rows.jsonl"}, command="plan")
    assert status == 0
    assert [w for w in said["warnings"] if "id, source" in w and "data.train[0]" in w]


def test_files_of_other_splits_are_offered_for_evaluation(asked, tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        write(tmp_path / "rows" / name, [CHAT])
    status, said = asked({"path": "rows"}, command="plan")
    assert status == 0
    (line,) = [w for w in said["warnings"] if "dev.jsonl" in w]
    offered = yaml.safe_load(line[line.index("{eval") : line.rindex("`")])
    assert offered == {"eval": [{"path": str(tmp_path / "rows"), "split": "validation"}]}
    status, said = asked(None, data={"train": [{"path": "rows"}], **offered}, command="plan")
    assert status == 0
    assert [w for w in said["warnings"] if "{eval" in w or "trained on" in w] == []
    data = {"train": [{"path": "rows"}], "eval": [{"path": "rows"}]}
    assert [
        w
        for w in asked(None, data=data, command="plan")[1]["warnings"]
        if "data.eval[0]" in w and "split`" in w
    ]


WRAPPED = """\
Call me Ishmael. Some years ago, never mind how long precisely, having
little or no money in my purse, and nothing particular to interest me
on shore, I thought I would sail about a little.

It is a way I have of driving off the spleen and regulating the circulation
whenever I find myself growing grim about the mouth.
"""
"""Moby-Dick, Herman Melville."""


def test_lines_of_wrapped_text_are_no_documents(asked, tmp_path):
    def warned(**source):
        status, said = asked({"path": "book.txt", **source}, command="plan")
        assert status == 0
        return [w for w in said["warnings"] if "sample_by" in w]

    (tmp_path / "book.txt").write_text(WRAPPED)
    (line,) = warned()
    assert "3 of the first 5 lines" in line
    for unit in ("document", "paragraph"):
        assert f"sample_by: {unit}" in line
        assert warned(sample_by=unit) == []
    for text in ("An article about whales, in one line.\n" * 9, "apple\nbanana\n" * 9):
        (tmp_path / "book.txt").write_text(text)
        assert warned() == []


def test_rows_that_a_hook_changes_are_not_judged(asked, tmp_path):
    write(tmp_path / "rows.jsonl", [{"frage": "a", "antwort": "b"}])
    (tmp_path / "hooks.py").write_text("def format_row(row):\n    return {'text': row['frage']}\n")
    assert asked({"path": "rows.jsonl"}, python="hooks.py")[0] == 0
    (tmp_path / "rows.jsonl").write_text("{")
    assert asked({"path": "rows.jsonl"}, python="hooks.py")[0] == 2


def hostile(folder):
    """Files that a reader without limits waits for, or fills the memory with."""
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "null.jsonl").symlink_to("/dev/zero")
    with (folder / "sparse.jsonl").open("wb") as stream:
        stream.truncate(40 << 30)
    with (folder / "sparse.json").open("wb") as stream:
        stream.write(b"[")
        stream.truncate(40 << 30)
    (folder / "sparse.csv").write_text("prompt,completion\n")
    os.truncate(folder / "sparse.csv", 40 << 30)
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as stream:
        for _ in range(64):
            stream.write(b" " * (1 << 20))
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 100)
    (folder / "binary.parquet").write_bytes(b"PAR1" + bytes(range(256)) * 100)
    (folder / "binary.arrow").write_bytes(os.urandom(4096))
    (folder / "deep.json").write_text("[" * 200_000)
    (folder / "deep.jsonl").write_text('{"a":' * 200_000)
    (folder / "digits.jsonl").write_text('{"text": ' + "9" * 100_000 + "}")
    (folder / "wide.csv").write_text(",".join(f"c{n}" for n in range(50_000)) + "\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "folder.jsonl").mkdir()
    (folder / "loop").mkdir()
    (folder / "loop" / "again").symlink_to(folder / "loop")
    (folder / "sealed.jsonl").write_text("{}")
    (folder / "sealed.jsonl").chmod(0)
    names = [path.name for path in folder.iterdir() if path.name != "recipe.yaml"]
    return [*names, "**/*.jsonl", "x" * 300 + "*.jsonl", "a\x00b*"]


def test_nothing_hostile_crashes_or_stalls_the_look(asked, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in hostile(folder):
        status, _ = asked({"path": f"rows/{name}"})
        assert status in (0, 2), name


def test_the_look_ends_with_its_time(asked, tmp_path, monkeypatch):
    write(tmp_path / "rows.jsonl", [CHAT])
    monkeypatch.setattr(first_rows, "_SECONDS", 0.2)
    monkeypatch.setattr(source_rows, "source_files", lambda settings: time.sleep(3600))
    assert asked({"path": "rows.jsonl"})[0] == 0


def test_a_large_file_is_read_at_its_beginning_alone(asked, tmp_path):
    good = json.dumps(CHAT) + "\n"
    (tmp_path / "rows.jsonl").write_text(good * 200 + "broken\n")
    assert asked({"path": "rows.jsonl"})[0] == 0
    (tmp_path / "rows.jsonl").write_text(good * 50 + "broken\n")
    assert asked({"path": "rows.jsonl"})[0] == 2
    long = json.dumps({"text": "x" * (5 << 20)})
    (tmp_path / "rows.jsonl").write_text(f"{long}\n{long}\n")
    assert asked({"path": "rows.jsonl"})[0] == 0, "no row within the bytes, so nothing is said"


def test_parquet_is_looked_at_where_pyarrow_is(asked, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"frage": ["a"], "antwort": ["b"]}), tmp_path / "rows.parquet")
    assert asked({"path": "rows.parquet"})[0] == 2
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert asked({"path": "rows.parquet"})[0] == 0
