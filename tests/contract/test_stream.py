"""Streaming: rows encoded while they are read, each by one process, without end."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from launcher.errors import RecipeError
from launcher.rows.recognise import PEEK
from launcher.train.data.stream import Stream
from launcher.train.job import read_job
from launcher.train.model.processing import load_processing
from launcher.train.prepare import prepare_run

sys.path.insert(0, str(Path(__file__).parent))
from plans import TINY_LLAMA, trained, write_run

pytestmark = pytest.mark.usefixtures("warm")

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


def two_sources(tmp_path, *weights):
    """30 short rows and 400 others."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"other {i}"}) + "\n" for i in range(400)))
    files = [str(tmp_path / "rows.jsonl"), str(other)]
    return [{"path": file, "weight": weight} for file, weight in zip(files, weights, strict=True)]


@pytest.mark.parametrize("weights", [(1.0, 9.0), (9.0, 1.0), (0.5, 0.5)])
def test_weights_say_how_often_a_source_is_drawn(job, tmp_path, weights):
    """Also for a source that is used up many times before the other one is."""
    found = job(data__train=two_sources(tmp_path, *weights))
    drawn = texts(found, itertools.islice(stream(found), 3000))
    small = [text for text in drawn if text.startswith("row")]
    assert len(small) / len(drawn) == pytest.approx(weights[0] / sum(weights), abs=0.03)
    assert set(small) == {f"row {i}" for i in range(ROWS)}


def test_the_order_follows_from_the_seed_and_the_process(job, tmp_path, monkeypatch):
    changes = {"data__train": two_sources(tmp_path, 1.0, 1.0)}
    found = job(**changes)

    def beginning(job) -> list[str]:
        return texts(job, itertools.islice(stream(job), 300))

    first = beginning(found)
    assert beginning(found) == first
    assert beginning(job(**changes, seed=7)) != first
    monkeypatch.setenv("WORLD_SIZE", "2")
    kinds = []
    for number in ("0", "1"):
        monkeypatch.setenv("RANK", number)
        kinds.append([text.split()[0] for text in beginning(found)])
    assert kinds[0] != kinds[1]  # else all rows of a step would be of one source


def test_a_source_smaller_than_the_number_of_processes_reaches_all_of_them(job, tmp_path, monkeypatch):
    (tmp_path / "few.jsonl").write_text('{"text": "few 0"}\n{"text": "few 1"}\n')
    sources = [{"path": str(tmp_path / name)} for name in ("rows.jsonl", "few.jsonl")]
    monkeypatch.setenv("WORLD_SIZE", "5")
    for number in range(5):
        monkeypatch.setenv("RANK", str(number))
        found = job(data__train=sources)
        assert any(text.startswith("few") for text in texts(found, itertools.islice(stream(found), 40)))


def test_rows_pass_through_datasets_as_they_are():
    from launcher.rows.sources import Row
    from launcher.train.data.stream import shuffled

    rows = [
        Row({"a": {"x": 1}, "list": [1, "z", {"q": 2.5}]}, "file", 1),
        Row({"a": {"y": "text", "x": None}}, "file", 2),
        Row({"b": b"raw"}, "file", 3),
    ]

    def reader(number):
        return lambda shard: ({"source": number, "row": pickle.dumps(row)} for row in rows)

    found = list(shuffled([reader(0), reader(1)], [1.0, 1.0], [0], 3))
    assert all(row in rows for _, row in found)
    assert {(number, row.number) for number, row in found} == {(s, n) for s in (0, 1) for n in (1, 2, 3)}


def test_a_broken_row_is_named(job, tmp_path):
    found = job(data__train=two_sources(tmp_path, 1.0, 1.0))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": \n' + '{"text": "more"}\n' * 200)
    with pytest.raises(RecipeError) as caught:
        list(itertools.islice(stream(found), 1000))
    assert (caught.value.problems[0].file, caught.value.problems[0].line) == (
        str(tmp_path / "rows.jsonl"),
        ROWS + 1,
    )


HOOK = "def format_row(row):\n    return None if int(row['text'].split()[1]) % 3 == 0 else row\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_the_hook_leaves_out_are_counted(job, tmp_path, workers):
    (tmp_path / "hooks.py").write_text(HOOK)
    found = job(python__file=str(tmp_path / "hooks.py"), python__hooks=["format_row"])
    rows = stream(found)
    samples = itertools.islice(DataLoader(rows, batch_size=None, num_workers=workers), 20)
    assert not {text for text in texts(found, samples) if int(text.split()[1]) % 3 == 0}
    counts = rows.counts
    assert counts["read"] == counts["kept"] + counts["dropped"]["format_row"]
    if not workers:  # workers may have begun the next pass
        assert (counts["read"], counts["dropped"], counts["train"]) == (ROWS, {"format_row": 10}, 20)


def test_workers_do_not_add_to_the_same_number(job):
    rows = stream(job())
    list(itertools.islice(DataLoader(rows, batch_size=None, num_workers=3), ROWS))
    added = rows._counts.sum(dim=1)
    assert added[0] == 0
    assert (added[1:4] > 0).all()


TWO_RANKS = """
import itertools, json, os, sys
import torch
from launcher.train.data.stream import Stream, streamed_rows
from launcher.train.job import read_job
from launcher.train.prepare import prepare_run
from launcher.train.model.processing import load_processing
from launcher.train.worker import leave
from pathlib import Path
run, meeting = sys.argv[1:]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=2
)
job = read_job(Path(run))
stream = Stream(job, load_processing(job))
list(itertools.islice(stream, 10))
prepared = {"train": 0, "eval": 4, "read": 5, "kept": 4, "truncated": 1, "split": 0, "tokens": 50}
prepared |= {"tokens_lost": 2, "dropped": 1, "dropped_reasons": {"empty": 1}, "notes": {}}
rows = streamed_rows(job, stream, prepared)
print(json.dumps([rows, stream.counts]))
leave(0)
"""


def test_counts_are_those_of_all_processes_and_of_the_evaluation_rows(job, tmp_path):
    (tmp_path / "hooks.py").write_text(HOOK)
    run = job(python__file=str(tmp_path / "hooks.py"), python__hooks=["format_row"]).run_dir
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(run), str(tmp_path / "meeting")],
            env={**os.environ, "RANK": str(number), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    told = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks]
    (rows, first), (same, second) = told
    assert rows == same
    assert rows["train"] == 20
    assert rows["eval"] == 4
    for name in ("read", "kept", "tokens"):
        assert rows[name] == first[name] + second[name] + {"read": 5, "kept": 4, "tokens": 50}[name]
    assert rows["dropped_reasons"] == {
        "format_row": first["dropped"]["format_row"] + second["dropped"]["format_row"],
        "empty": 1,
    }
    assert rows["read"] == rows["kept"] + rows["dropped"]


def long_rows(tmp_path):
    rows = [{"prompt": f"ask {i}", "completion": "word " * 200} for i in range(ROWS)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": str(tmp_path / "long.jsonl")}]


def test_truncation_is_judged_by_a_sample_before_the_run(job, tmp_path):
    found = job(data__train=long_rows(tmp_path), data__max_truncated=0.1)
    with pytest.raises(RecipeError, match=r"% of the tokens in a sample of the streamed rows were cut off"):
        prepare_run(found)
    prepare_run(job(data__train=long_rows(tmp_path), data__max_truncated=1.0, seed=1))


def test_truncation_of_the_whole_run_is_warned_of(job, tmp_path, capsys):
    from launcher.train.data.encoded import result_rows
    from launcher.train.data.stream import streamed_rows

    for allowed in (1.0, 0.1):
        found = job(data__train=long_rows(tmp_path), data__max_truncated=allowed)
        rows = stream(found)
        next(iter(rows))
        assert streamed_rows(found, rows, result_rows(0, 0, []))["truncated"] == ROWS
        said = capsys.readouterr().out
        assert ("warning: " in said and "in 30 of 30 rows" in said) == (allowed == 0.1)


def test_rows_that_teach_nothing_end_the_run(job, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "' + "a " * 200 + '", "completion": "b"}\n' * 1)
    with pytest.raises(RecipeError) as caught:
        next(iter(stream(job())))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("nothing-left", "data.train")
    assert "no-targets: 1" in problem.message


def test_a_stream_trains_and_resumes_exactly(job, tmp_path, monkeypatch):
    changes = {
        "tiny": False,
        "model.tokenizer": str(tmp_path / "tokenizer"),
        "data.train": [{"path": str(tmp_path / "rows.jsonl"), "format": "auto", "columns": {}}],
        "data.streaming": True,
        "data.eval": [{"path": str(tmp_path / "eval.jsonl"), "format": "text"}],
        "data.packing": True,
        "trainer.save_strategy": "steps",
        "trainer.save_steps": 3,
        "trainer.max_steps": 6,
    }
    job()  # writes the tokenizer and the rows
    (tmp_path / "eval.jsonl").write_text('{"text": "kept"}\n{"text": " "}\n')
    whole = trained(tmp_path / "whole", changes)
    halved = trained(tmp_path / "halved", {**changes, "trainer.max_steps": 3})
    with monkeypatch.context() as patch:
        patch.setenv("EFFILAUNCH_RESUME", "auto")
        trained(halved, changes)

    def losses(folder):
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"]) for row in rows if "loss" in row]

    assert len(losses(whole)) == 6
    assert losses(halved) == losses(whole)
    rows = json.loads((whole / "result.json").read_text())["rows"]
    assert rows["train"] >= 6
    assert rows["eval"] == 1
    assert rows["dropped_reasons"] == {"empty": 1}
    assert rows["read"] == rows["kept"] + rows["dropped"]
    prepared_rows = trained(tmp_path / "prepared", {**changes, "data.streaming": False})
    assert set(rows) == set(json.loads((prepared_rows / "result.json").read_text())["rows"])


def test_a_row_that_cannot_be_read_is_named_with_its_line(job, tmp_path):
    settings = job()
    rows = [json.dumps({"text": f"row {i}"}) for i in range(ROWS)]
    rows[20] = json.dumps({"text": 7})
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(RecipeError) as caught:
        list(stream(settings).unpacked(passes=1))
    assert (caught.value.problems[0].file, caught.value.problems[0].line) == (
        str(tmp_path / "rows.jsonl"),
        21,
    )


def test_dropped_rows_of_a_stream_are_judged_before_the_run_and_warned_of_after_it(job, tmp_path, capsys):
    from launcher.train.data.encoded import result_rows
    from launcher.train.data.stream import streamed_rows

    rows = [{"prompt": f"ask {i}", "completion": "" if i % 2 else "word"} for i in range(ROWS)]
    (tmp_path / "half.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = [{"path": str(tmp_path / "half.jsonl")}]
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(data__train=source, data__max_dropped=0.4))
    assert [problem.code for problem in caught.value.problems] == ["too-much-dropped"]
    prepare_run(job(data__train=source, data__max_dropped=0.5))
    capsys.readouterr()
    for allowed in (0.5, 0.4):
        found = job(data__train=source, data__max_dropped=allowed)
        given = stream(found)
        next(iter(given))
        streamed_rows(found, given, result_rows(0, 0, []))
        assert ("data.max_dropped" in capsys.readouterr().out) == (allowed == 0.4)


def test_a_streamed_row_of_another_task_is_refused(job, tmp_path):
    rows = [{"prompt": f"ask {i}", "completion": "word", "label": bool(i % 2)} for i in range(ROWS)]
    (tmp_path / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = job(data__train=[{"path": str(tmp_path / "kto.jsonl")}])
    with pytest.raises(RecipeError) as caught:
        prepare_run(found)
    assert caught.value.problems[0].code == "rows-of-another-task"


def test_samples_of_a_stream_are_shown_with_no_place(job):
    shown = prepare_run(job(), 2)["samples"]
    assert [set(sample) & {"file", "row"} for sample in shown] == [set(), set()]


def test_a_streamed_column_that_begins_late_is_refused(job, tmp_path):
    rows = [{"prompt": f"ask {i}", "completion": "word"} for i in range(PEEK)]
    rows.append({**rows[0], "title": "Fix the login bug quickly"})
    (tmp_path / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError) as caught:
        list(stream(job(data__train=[{"path": str(tmp_path / "late.jsonl")}])).unpacked(1))
    assert [(p.code, p.line) for p in caught.value.problems] == [("column-unread", PEEK + 1)]
