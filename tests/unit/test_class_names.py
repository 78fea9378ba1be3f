"""Whole-number labels whose names the data set declares, of Parquet and Arrow files and of the hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("datasets")

import datasets

from launcher.errors import RecipeError
from launcher.rows.class_names import declared
from launcher.train.data.hub_rows import hub_features
from launcher.train.job import read_job
from launcher.train.prepare import prepare_run

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from plans import write_run

KINDS = ("world", "sports", "business")
TAGS = ("O", "B-PER", "I-PER")
BERT = {
    "model_type": "bert", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def table(labels, names=KINDS, column="label"):
    kind = datasets.ClassLabel(names=list(names))
    if isinstance(labels[0], list):
        kind = datasets.Sequence(kind)
    features = datasets.Features({"text": datasets.Value("string"), column: kind})
    rows = {"text": [f"a {n}" for n in range(len(labels))], column: labels}
    return datasets.Dataset.from_dict(rows, features=features)


def prepared(folder: Path, path: Path, *, task: str = "sequence-classification", **changes):
    """The record of the prepared rows."""
    source = {"path": str(path), "format": "auto", "columns": changes.pop("columns", {})}
    settings = {"task": task, "tiny": False, "model.config": BERT, "data.train": [source], **changes}
    tokenizer(folder)
    job = read_job(write_run(folder / "run", {**settings, "model.tokenizer": str(folder / "tokenizer")}))
    prepare_run(job)
    return json.loads((folder / "run" / "data.json").read_text())


def tokenizer(folder: Path) -> None:
    from launcher.train.tiny import tiny_tokenizer

    tiny_tokenizer(512).save_pretrained(folder / "tokenizer")


def test_names_in_the_order_of_the_data_set(tmp_path):
    table([2, 0, 2, 0]).to_parquet(tmp_path / "a.parquet")
    record = prepared(tmp_path, tmp_path / "a.parquet")
    assert record["labels"] == list(KINDS), "also that of a class without rows"
    from launcher.train.data.store import open_samples

    samples = open_samples(Path(record["folder"]) / record["splits"]["train"]["file"])
    assert samples["labels"][:] == [2, 0, 2, 0]


@pytest.mark.parametrize("saved", ["disk", "older"])
def test_names_are_found_where_datasets_writes_them(tmp_path, saved):
    if saved == "disk":
        table([[0], [1, 2]], column="tags").save_to_disk(tmp_path / "d")
        assert declared({"path": str(tmp_path / "d")}) == {"tags": KINDS}
        return
    import pyarrow
    from pyarrow import parquet

    written = {"info": {"features": {"tags": [{"names": list(TAGS), "_type": "ClassLabel"}], "n": {}}}}
    plain = pyarrow.table({"tags": [[0, 1]]}).replace_schema_metadata({"huggingface": json.dumps(written)})
    parquet.write_table(plain, tmp_path / "o.parquet")
    assert declared({"path": str(tmp_path / "o.parquet")}) == {"tags": TAGS}
    (tmp_path / "rows.jsonl").write_text('{"tags": [0]}\n')
    assert declared({"path": str(tmp_path / "rows.jsonl")}) == {}


def test_names_of_words(tmp_path):
    features = datasets.Features({
        "tokens": datasets.Sequence(datasets.Value("string")),
        "ner_tags": datasets.Sequence(datasets.ClassLabel(names=list(TAGS))),
    })  # fmt: skip
    rows = {"tokens": [["Ada", "Lovelace"], ["it"]], "ner_tags": [[1, 2], [0]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    columns = {"labels": "ner_tags"}
    record = prepared(tmp_path, tmp_path / "a.parquet", task="token-classification", columns=columns)
    assert record["labels"] == list(TAGS)


def test_several_labels_have_names_and_scores_stay_numbers(tmp_path):
    table([[0], [1, 2], []]).to_parquet(tmp_path / "a.parquet")
    kind = {"data.problem_type": "multi_label_classification"}
    assert prepared(tmp_path, tmp_path / "a.parquet", **kind)["labels"] == list(KINDS)
    table([0, 2, 1]).to_parquet(tmp_path / "b.parquet")
    record = prepared(tmp_path / "b", tmp_path / "b.parquet", **{"data.problem_type": "regression"})
    assert record["labels"] == ["LABEL_0"]


def test_a_hook_gets_the_numbers_which_then_have_no_names(tmp_path):
    """It may have joined classes: the names would be those of others."""
    table([0, 1, 2, 1]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "hooks.py").write_text(
        "def format_row(row):\n    return {**row, 'label': int(row['label'] == 2)}\n"
    )
    hooks = {"python.file": str(tmp_path / "hooks.py"), "python.hooks": ["format_row"]}
    assert prepared(tmp_path, tmp_path / "a.parquet", **hooks)["labels"] == ["0", "1"]


def test_numbers_without_a_name_and_files_that_differ(tmp_path):
    table([0, 1, -1]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(RecipeError) as caught:
        prepared(tmp_path, tmp_path / "a.parquet")
    assert [(p.code, p.line) for p in caught.value.problems] == [("bad-row", 3)]
    (tmp_path / "parts").mkdir()
    table([0, 1]).to_parquet(tmp_path / "parts" / "1.parquet")
    table([0, 1], names=KINDS[::-1]).to_parquet(tmp_path / "parts" / "2.parquet")
    with pytest.raises(RecipeError) as caught:
        prepared(tmp_path / "c", tmp_path / "parts")
    assert [(p.code, p.file) for p in caught.value.problems] == [
        ("labels", str(tmp_path / "parts" / "2.parquet"))
    ]


def test_features_of_the_hub(tmp_path):
    """load_dataset takes a folder for a repository, which needs no network."""
    (tmp_path / "d").mkdir()
    table([0, 1]).to_parquet(tmp_path / "d" / "train.parquet")
    found = hub_features({"path": str(tmp_path / "d")}, tmp_path / "cache")
    assert found["label"] == {"names": list(KINDS), "_type": "ClassLabel"}
