"""Splits by the names of files are those that the hub's library finds in the same folder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.packaged_modules import _EXTENSION_TO_MODULE

from launcher.rows.files import KINDS, rows_kind
from launcher.rows.splits import splits_of

FOLDERS = (
    "", "data/", "train/", "dev/", "my-test/", "eval set/", "val2/", "validate/", "deep/testing_a/", "a/b/",
    "latest/", "train.d/x/",
)  # fmt: skip
NAMES = (
    "train.jsonl", "test.csv", "validation.jsonl", "dev.tsv", "my_train_1.jsonl", "training-2.jsonl",
    "rows.jsonl", "latest.jsonl", "strain.jsonl", "eval.json", "evaluation3.jsonl", "val.txt",
    "trainer.jsonl", "a test.jsonl", "x9test9.jsonl", "Test.jsonl", "a.train.jsonl",
    "train-00000-of-00002.parquet", "test_sft-00001-of-00002.parquet",
)  # fmt: skip


def of_the_hub(folder: Path) -> dict[str, set[str]]:
    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    return {
        str(split): {str(Path(file).relative_to(folder)) for file in files} for split, files in found.items()
    }


def test_splits_are_those_of_the_hub(tmp_path):
    draw = random.Random(0)
    kinds = set()
    for number in range(60):
        folder = tmp_path / str(number)
        names = sorted({draw.choice(FOLDERS) + draw.choice(NAMES) for _ in range(draw.randint(1, 5))})
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        ours = {split: set(files) for split, files in splits_of(names).items()} or {"train": set(names)}
        assert ours == of_the_hub(folder), names
        kinds.add(tuple(ours))
    assert len(kinds) > 6


def test_kinds_of_files_are_those_of_the_hub():
    known = [suffix for suffix in KINDS if suffix in _EXTENSION_TO_MODULE]
    assert len(known) > 8
    assert [rows_kind(Path(f"a{suffix}.gz")) for suffix in known] == [
        _EXTENSION_TO_MODULE[suffix][0] for suffix in known
    ]
