"""Streaming: rows encoded while they are read, each by one process, without end."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from launcher.errors import RecipeError
from launcher.train.data.stream import Stream
from launcher.train.job import read_job
from launcher.train.processing import load_processing

sys.path.insert(0, str(Path(__file__).parent))
from plans import TINY_LLAMA, trained, write_run

ROWS = 30


@pytest.fixture
def job(tmp_path):
    from launcher.train.tiny import tiny_tokenizer

    tiny_tokenizer(512).save_pretrained(tmp_path / "tokenizer")
    rows = "".join(json.dumps({"text": f"row {i} " + "w " * (i % 7)}) + "\n" for i in range(ROWS))
    (tmp_path / "rows.jsonl").write_text(rows)

    def make(**changes):
        settings = {
            "tiny": False,
            "model.config": TINY_LLAMA,
            "model.tokenizer": str(tmp_path / "tokenizer"),
            "data.train": [{"path": str(tmp_path / "rows.jsonl"), "format": "auto", "columns": {}}],
            "data.streaming": True,
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
        return read_job(write_run(tmp_path / f"run-{len(changes)}", settings))

    return make


def texts(job, samples) -> list[str]:
    processing = load_processing(job)
    return [" ".join(processing.decode(sample["input_ids"]).split()[:2]) for sample in samples]


def stream(job) -> Stream:
    return Stream(job, load_processing(job))


def test_each_pass_holds_every_row_once_in_another_order(job):
    found = texts(job(), itertools.islice(stream(job()), 2 * ROWS))
    first, second = found[:ROWS], found[ROWS:]
    assert sorted(first) == sorted(second) == sorted(f"row {i}" for i in range(ROWS))
    assert first != second


def test_processes_and_workers_share_the_rows_out(job, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        loader = DataLoader(stream(job()), batch_size=None, num_workers=2)
        # Two workers of one process hold 15 rows of a pass, 7 and 8.
        shares.append(set(texts(job(), itertools.islice(loader, 14))))
    assert not shares[0] & shares[1]


def test_counts_include_the_workers(job):
    rows = stream(job())
    list(itertools.islice(DataLoader(rows, batch_size=None, num_workers=2), ROWS))
    assert rows.counts["read"] >= ROWS
    assert rows.counts["kept"] == rows.counts["read"]
    assert rows.fresh().counts["read"] == 0


def test_packs_of_a_stream_hold_the_rows_of_a_pass(job):
    packed = job(data__packing=True)
    processing = load_processing(packed)
    rows = []
    for pack in stream(packed):
        assert len(pack["input_ids"]) <= 64
        starts = [i for i, position in enumerate(pack["position_ids"]) if position == 0]
        for start, end in itertools.pairwise([*starts, len(pack["input_ids"])]):
            rows.append(processing.decode(pack["input_ids"][start:end]).split()[1])
        if len(rows) >= ROWS:
            break
    assert sorted(rows[:ROWS], key=int) == [str(i) for i in range(ROWS)]


def test_weights_say_how_often_a_source_is_drawn(job, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"other {i}"}) + "\n" for i in range(400)))
    sources = [
        {"path": str(tmp_path / "rows.jsonl"), "format": "auto", "columns": {}, "weight": 1.0},
        {"path": str(other), "format": "auto", "columns": {}, "weight": 9.0},
    ]
    found = job(data__train=sources)
    import random

    from launcher.train.data.prepare import recognise
    from launcher.train.data.stream import interleaved
    from launcher.train.hooks import Hooks

    known = [recognise(found, source, Hooks(), digest=False) for source in sources]
    drawn = [index for index, _ in interleaved(found, known, Hooks(), random.Random(0))]
    assert len(drawn) == 430
    share = drawn[:200].count(0) / 200
    assert 0.05 < share < 0.16


def test_rows_that_teach_nothing_end_the_run(job, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "' + "a " * 200 + '", "completion": "b"}\n' * 1)
    with pytest.raises(RecipeError, match="nothing to learn"):
        next(iter(stream(job())))


def test_a_stream_trains_and_resumes_exactly(job, tmp_path, monkeypatch):
    changes = {
        "tiny": False,
        "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": [{"path": str(tmp_path / "rows.jsonl"), "format": "auto", "columns": {}}],
        "data.streaming": True,
        "data.packing": True,
        "trainer.save_strategy": "steps",
        "trainer.save_steps": 3,
        "trainer.max_steps": 6,
    }
    job()  # writes the tokenizer and the rows
    whole = trained(tmp_path / "whole", changes)
    halved = trained(tmp_path / "halved", {**changes, "trainer.max_steps": 3})
    with monkeypatch.context() as patch:
        patch.setenv("EFFILAUNCH_RESUME", "auto")
        trained(halved, changes)

    def losses(folder):
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"]) for row in rows]

    assert len(losses(whole)) == 6
    assert losses(halved) == losses(whole)
    rows = json.loads((whole / "result.json").read_text())["rows"]
    assert rows["kept"] > 0
