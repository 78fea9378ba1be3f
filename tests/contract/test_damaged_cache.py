"""Prepared data that is damaged in the cache is prepared again: no run ends on it, and none trains on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from launcher.errors import MachineError, RecipeError
from launcher.train.data.build import build_data
from launcher.train.data.job_sources import recognise
from launcher.train.data.store import _state, content_key, open_samples, read_record
from launcher.train.hooks import load_hooks
from launcher.train.prepare import main, prepare_run

sys.path.insert(0, str(Path(__file__).parent))
from test_prepare import job, pairs, samples_of, source, tokenizer_folder, write_rows  # noqa: F401 - fixtures


def by_one(arrow: Path) -> None:
    """Every stored token id and label that is not padding of the file, one higher; its time stays."""
    import pyarrow as pa

    state, mapped = arrow.stat(), bytearray(arrow.read_bytes())
    column = open_samples(arrow).data["input_ids"].chunk(0)
    ids = column.values.cast(pa.int32()).to_numpy(zero_copy_only=False)
    at = bytes(mapped).index(ids.tobytes())
    mapped[at : at + ids.nbytes] = (ids + 1).astype("int32").tobytes()
    arrow.write_bytes(mapped)
    os.utime(arrow, ns=(state.st_atime_ns, state.st_mtime_ns))


DAMAGES = {
    "an empty train.arrow": lambda folder: (folder / "train.arrow").write_bytes(b""),
    "half of train.arrow": lambda folder: os.truncate(
        folder / "train.arrow", (folder / "train.arrow").stat().st_size // 2
    ),
    "no train.arrow": lambda folder: (folder / "train.arrow").unlink(),
    "changed tokens": lambda folder: by_one(folder / "train.arrow"),
    "an empty data.json": lambda folder: (folder / "data.json").write_bytes(b""),
    "another data.json": lambda folder: (folder / "data.json").write_text(
        (folder / "data.json").read_text().replace('"stop": 40', '"stop": 20')
    ),
    "an empty manifest.json": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "an older version's folder": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_prepared_again(job, tmp_path, capsys, name):  # noqa: F811
    found = job(write_rows(tmp_path / "rows.jsonl", pairs(40)))
    record = prepare_run(found)
    whole, folder = samples_of(found), Path(record["folder"])
    assert capsys.readouterr().err.count("damaged") == 0
    DAMAGES[name](folder)
    with pytest.raises(RecipeError) as caught:
        build_data(found, None)  # a rank that nobody prepared for
    assert (caught.value.problems[0].code, caught.value.problems[0].file) == (
        "data-not-prepared",
        str(folder),
    )
    assert prepare_run(found) == record
    assert str(folder) in capsys.readouterr().err
    assert samples_of(found) == whole
    assert prepare_run(found) == record
    assert str(folder) not in capsys.readouterr().err


def test_samples_that_changed_without_a_trace_are_found_before_a_run(job, tmp_path):  # noqa: F811
    """The manifest's record of the file's state is that of the changed file, as after a fault of the disk."""
    found = job(write_rows(tmp_path / "rows.jsonl", pairs(40)))
    record = prepare_run(found)
    whole, folder = samples_of(found), Path(record["folder"])
    by_one(folder / "train.arrow")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["states"] = {name: _state(folder / name) for name in manifest["states"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert samples_of(found) != whole
    prepare_run(found)
    assert samples_of(found) == whole


def test_a_killed_preparation_leaves_nothing_that_stays(job, tmp_path):  # noqa: F811
    found = job(write_rows(tmp_path / "rows.jsonl", pairs(40)))
    code = (
        "import os, sys, launcher.train.data.prepare as module\n"
        "from launcher.train.prepare import main\n"
        "module.write_json = lambda *_: os.kill(os.getpid(), 9)\n"
        "main(sys.argv[1:])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(found.run_dir)], check=False)
    assert killed.returncode == -9
    (left,) = (tmp_path / "cache" / "data").iterdir()
    assert (left / "train.arrow").is_file()
    assert main([str(found.run_dir)]) == 0
    assert [path.name for path in left.parent.iterdir()] == [samples_folder(found)]


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b'{"format": "text", "columns": 1, "left_out": 1}'])
def test_a_damaged_note_on_a_hub_data_set_is_none(job, tmp_path, note):  # noqa: F811
    settings = {**source("org/none-of-these"), "name": None, "split": "train", "revision": None}
    asked = {name: settings[name] for name in ("path", "name", "split", "revision", "format", "columns")}
    found = job([settings])
    place = tmp_path / "cache" / "hub" / f"{content_key({**asked, 'hooks': load_hooks(found).digest})}.json"
    place.parent.mkdir(parents=True)
    place.write_bytes(note)
    with pytest.raises(MachineError) as caught:
        prepare_run(found)
    assert caught.value.problems[0].code != "cache-unreadable"
    known = {"format": "text", "columns": {}, "digest": "d", "unused": []}
    place.write_text(json.dumps(known))
    assert recognise(found, "train", load_hooks(found))[0].digest == "d"  # the place is right


def samples_folder(job) -> str:  # noqa: F811
    return Path(read_record(job)["folder"]).name
