"""Data preparation as a run does it: real tokenizers and files, cached by content."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from launcher.errors import MachineError, RecipeError
from launcher.plan.settings import DataSettings, declared_keys
from launcher.report.result_text import prepared_text
from launcher.tasks import TASKS
from launcher.train.data.build import build_data
from launcher.train.data.prepare import _key_parts
from launcher.train.data.store import open_samples, read_record
from launcher.train.hooks import load_hooks
from launcher.train.job import read_job
from launcher.train.model.processing import load_processing
from launcher.train.prepare import prepare_run

sys.path.insert(0, str(Path(__file__).parent))
from plans import TINY_LLAMA, write_run

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    from launcher.train.tiny import tiny_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(512).save_pretrained(folder)
    return folder


@pytest.fixture
def job(tmp_path, tokenizer_folder, monkeypatch):
    """A function that writes a run directory over real files and returns its job."""
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    numbers = iter(range(100))

    def make(rows: Path | list[dict], **changes):
        train = rows if isinstance(rows, list) else [source(rows)]
        settings = {
            "tiny": False,
            "model.config": TINY_LLAMA,
            "model.tokenizer": str(tokenizer_folder),
            "data.train": train,
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
        return read_job(write_run(tmp_path / f"run-{next(numbers)}", settings))

    return make


def source(path: Path, **more) -> dict:
    return {"path": str(path), "format": "auto", "columns": {}, "weight": 1.0, **more}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, length: int = 4) -> list[dict]:
    return [{"prompt": f"ask {i}", "completion": " ".join([f"word{i}"] * length)} for i in range(count)]


def samples_of(job) -> list[dict]:
    record = read_record(job)
    return open_samples(Path(record["folder"]) / "train.arrow").to_list()


def test_rows_become_samples_with_their_places(job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", pairs(5))
    found = job(path)
    record = prepare_run(found)
    samples = samples_of(found)
    assert [sample["number"] for sample in samples] == [1, 2, 3, 4, 5]
    assert record["splits"]["train"]["files"] == [str(path)]
    assert record["formats"] == ["prompt-completion"]
    counts = record["splits"]["train"]["counts"]
    assert (counts["read"], counts["kept"], counts["dropped"]) == (5, 5, {})
    assert counts["tokens"] == sum(len(sample["input_ids"]) for sample in samples)
    first = record["samples"][0]
    assert (first["file"], first["line"]) == (str(path), 1)
    assert first["pieces"][0] == ["ask 0", False]
    assert first["pieces"][1][0].startswith("word0")
    assert first["pieces"][1][1] is True


def test_the_cache_is_found_by_content_and_not_by_name(job, tmp_path):
    first = job(write_rows(tmp_path / "a.jsonl", pairs(4)))
    record = prepare_run(first)
    arrow = Path(record["folder"]) / "train.arrow"
    written = arrow.stat().st_mtime_ns
    again = prepare_run(job(tmp_path / "a.jsonl", trainer__learning_rate=1.0))
    assert again["key"] == record["key"]
    assert arrow.stat().st_mtime_ns == written
    write_rows(tmp_path / "a.jsonl", pairs(5))
    changed = prepare_run(job(tmp_path / "a.jsonl"))
    assert changed["key"] != record["key"]
    shorter = prepare_run(job(tmp_path / "a.jsonl", data__max_length=8))
    assert shorter["key"] not in (record["key"], changed["key"])


def test_every_key_of_data_names_the_cache_or_changes_no_sample():
    """A key that is in neither would leave a changed recipe with the samples of the earlier one."""
    used_later = {"metrics", "packing", "padding_free", "pad_to_multiple_of"}
    judged_on_counts = {"max_truncated", "max_dropped"}
    by_content = {"train", "eval"}
    of_the_machine = {"num_proc"}
    others = used_later | judged_on_counts | by_content | of_the_machine
    deciding = {name for name, key in declared_keys().items() if key.decides_samples}
    assert {f"data.{name}" for name in DataSettings.KINDS} == {f"data.{name}" for name in others} | deciding
    assert not {f"data.{name}" for name in others} & deciding


@pytest.mark.parametrize("task", [task.name for task in TASKS if task.reads_tokens])
def test_no_samples_of_0_2_0_are_found(job, task):
    """Which read control tokens inside texts and learned other ends of turns. Images are what they were."""
    from launcher.train.tiny import tiny_tokenizer

    found = job([], task=task)
    parts = _key_parts(found, tiny_tokenizer(512), load_hooks(found), {})
    of_0_2_0 = {
        "task", "seed", "versions", "tokenizer", "hooks", "sources", "reference", "columns", "template",
        "trainer.max_completion_length", "model.name_or_path", "model.revision", "model.config",
        *(f"data.{name}" for name in (
            "max_length", "overlong", "loss_on", "loss_on_inserted", "fim", "streaming", "problem_type",
        )),
        *(f"embedding.{name}" for name in ("negatives", "prompts", "loss")),
        *(f"reranker.{name}" for name in ("documents", "loss")),
    }  # fmt: skip
    assert "data.special_tokens_in_text" in set(parts) - of_0_2_0


def test_a_half_written_cache_is_not_taken(job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", pairs(4))
    record = prepare_run(job(path))
    folder = Path(record["folder"])
    (folder / "data.json").unlink()
    (folder / "train.arrow").write_bytes(b"half")
    again = job(path)
    assert prepare_run(again)["key"] == record["key"]
    assert len(samples_of(again)) == 4


def test_a_run_is_not_continued_with_other_data(job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", pairs(4))
    found = job(path)
    prepare_run(found)
    write_rows(path, pairs(5))
    prepare_run(found)  # nothing was learnt yet
    (found.run_dir / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    prepare_run(found)
    write_rows(path, pairs(6))
    for plan, version in (
        ({**found.plan, "references": {}}, "the version that began it"),
        ({name: value for name, value in found.plan.items() if name != "references"}, "effilaunch 0.2.0"),
    ):
        with pytest.raises(RecipeError) as caught:
            prepare_run(dataclasses.replace(found, plan=plan))
        (problem,) = caught.value.problems
        assert (problem.code, problem.path) == ("resume-differs", "data")
        assert version in problem.hint


def test_a_removed_cache_is_named(job, tmp_path):
    found = job(write_rows(tmp_path / "rows.jsonl", pairs(4)))
    record = prepare_run(found)
    (Path(record["folder"]) / "data.json").unlink()
    with pytest.raises(RecipeError) as caught:
        build_data(found, None)
    problem = caught.value.problems[0]
    assert (problem.code, problem.file) == ("data-not-prepared", record["folder"])
    shutil.rmtree(record["folder"])
    with pytest.raises(RecipeError) as caught:
        build_data(found, None)
    assert caught.value.problems[0].code == "data-not-prepared"


def test_a_run_without_prepared_data_says_how_to_prepare_it(job, tmp_path):
    found = job(write_rows(tmp_path / "rows.jsonl", pairs(4)))
    with pytest.raises(RecipeError, match="is not prepared") as caught:
        build_data(found, None)
    assert "launcher.train.prepare" in caught.value.problems[0].hint


def test_weights_repeat_and_thin_out_sources(job, tmp_path):
    many = write_rows(tmp_path / "many.jsonl", pairs(40))
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": "p", "completion": f"c{i}"} for i in range(4)])
    found = job([source(many, weight=0.25), source(few, weight=2.5)])
    prepare_run(found)
    data = build_data(found, load_processing(found))
    assert len(data.train) == 10 + 4 + 4 + 2
    assert data.counts["read"] == 44
    again = build_data(found, load_processing(found))
    assert data.train.to_list() == again.train.to_list()


def test_the_pieces_of_one_document_stay_on_one_side_of_the_split(job, tmp_path):
    rows = [{"text": f"{letter} " * 100} for letter in "abcdefghijklmnopqrst"]
    found = job(write_rows(tmp_path / "long.jsonl", rows), data__max_length=32, data__eval={"split": 0.25})
    record = prepare_run(found)
    processing = load_processing(found)
    data = build_data(found, processing)
    total = record["splits"]["train"]["samples"]
    assert (total - record["held_out"], record["held_out"]) == (len(data.train), len(data.eval))
    words = [
        {processing.decode(sample["input_ids"]).split()[0] for sample in part}
        for part in (data.train, data.eval)
    ]
    assert len(data.train) > 40
    assert len(words[1]) == 5
    assert not words[0] & words[1]


def test_packs_hold_every_sample_once(job, tmp_path):
    rows = [{"prompt": "p", "completion": "w " * (1 + i % 20)} for i in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    plain, packed = job(path), job(path, data__packing=True)
    processing = load_processing(plain)
    for found in (plain, packed):
        prepare_run(found)
    single = build_data(plain, processing).train
    packs = build_data(packed, processing).train
    assert len(packs) < len(single) / 2
    documents = []
    for index in range(len(packs)):
        pack = packs[index]
        starts = [i for i, position in enumerate(pack["position_ids"]) if position == 0]
        ends = [*starts[1:], len(pack["input_ids"])]
        assert len(pack["input_ids"]) <= 64
        documents += [pack["input_ids"][a:b] for a, b in zip(starts, ends, strict=True)]
    assert sorted(documents) == sorted(single["input_ids"][:])


def test_everything_dropped_is_counted_by_reason(job, tmp_path):
    rows = [
        {"prompt": "a " * 100, "completion": "lost"},
        {"prompt": "a", "completion": "kept"},
        {"prompt": "a", "completion": "long " * 100},
    ]
    found = job(write_rows(tmp_path / "rows.jsonl", rows))
    record = prepare_run(found)
    counts = record["splits"]["train"]["counts"]
    assert (counts["read"], counts["kept"]) == (3, 2)
    assert counts["dropped"] == {"no-targets": 1}
    assert counts["truncated"] == 2
    data = build_data(found, load_processing(found))
    assert data.counts["dropped_reasons"] == {"no-targets": 1}


def test_a_source_of_which_no_row_is_left_names_its_own_reasons(job, tmp_path):
    """Not those of the source before it."""
    cut = [{"prompt": "a " * 100, "completion": "lost"}, *pairs(30)]
    empty = [{"prompt": "a", "completion": ""}] * 3
    files = [write_rows(tmp_path / "cut.jsonl", cut), write_rows(tmp_path / "empty.jsonl", empty)]
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(files[0], data__train=[source(file) for file in files]))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.path) == ("nothing-left", str(files[1]), "data.train[1].path")
    assert "(empty: 3)" in problem.message
    assert "empty: " in problem.hint
    assert "no-targets" not in f"{problem.message} {problem.hint}"
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(write_rows(tmp_path / "cut.jsonl", cut[:1])))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("nothing-left", "data.max_length")


def test_too_much_truncation_stops_before_the_run(job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", pairs(4, length=200))
    with pytest.raises(RecipeError, match="of the train tokens were cut off, in 4 of 4 rows") as caught:
        prepare_run(job(path, data__max_truncated=0.2))
    assert caught.value.problems[0].path == "data.max_length"
    dropped = job(path, data__max_truncated=0.2, data__overlong="drop")
    with pytest.raises(RecipeError, match="overlong: 4"):
        prepare_run(dropped)


def test_hooks_change_and_drop_rows(job, tmp_path):
    hooks = tmp_path / "hooks.py"
    hooks.write_text(
        "def format_row(row):\n"
        "    if row['n'] % 2:\n"
        "        return None\n"
        "    return {'prompt': 'q', 'completion': f\"answer {row['n']}\"}\n"
    )
    rows = [{"n": i} for i in range(6)]
    found = job(
        write_rows(tmp_path / "rows.jsonl", rows),
        python__file=str(hooks),
        python__hooks=["format_row"],
    )
    record = prepare_run(found)
    counts = record["splits"]["train"]["counts"]
    assert counts["dropped"] == {"format_row": 3}
    assert [sample["number"] for sample in samples_of(found)] == [1, 3, 5]
    hooks.write_text(hooks.read_text().replace("answer", "reply"))
    assert prepare_run(found)["key"] != record["key"]


def test_a_changed_neighbour_of_the_hooks_is_noticed(job, tmp_path):
    (tmp_path / "words.py").write_text("WORD = 'one'\n")
    hooks = tmp_path / "hooks.py"
    hooks.write_text("import words\ndef format_row(row):\n    return {'text': words.WORD + row['text']}\n")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c"}] * 3)
    changes = {"python__file": str(hooks), "python__hooks": ["format_row"]}
    first = prepare_run(job(rows, **changes))
    assert prepare_run(job(rows, **changes))["key"] == first["key"]
    (tmp_path / "words.py").write_text("WORD = 'two'\n")
    assert prepare_run(job(rows, **changes))["key"] != first["key"]


def test_moved_files_are_found_again_and_named_by_their_new_place(job, tmp_path):
    first = prepare_run(job(write_rows(tmp_path / "old.jsonl", pairs(4))))
    new = (tmp_path / "old.jsonl").rename(tmp_path / "new.jsonl")
    moved = prepare_run(job(new))
    assert moved["key"] == first["key"]
    assert moved["samples"][0]["file"] == str(new)


def test_a_seed_decides_samples_only_where_the_middle_is_filled_in(job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "def f(a): return a"}] * 3)
    keys = {prepare_run(job(path, seed=seed))["key"] for seed in (1, 2)}
    assert len(keys) == 1
    fim = {"rate": 1.0, "spm_rate": 0.5}
    assert len({prepare_run(job(path, seed=seed, data__fim=fim))["key"] for seed in (1, 2)}) == 2


def test_several_processes_prepare_the_same_samples(job, tmp_path, monkeypatch):
    from launcher.train.data import prepare as module

    path = write_rows(tmp_path / "rows.jsonl", pairs(2000))
    one = job(path)
    prepare_run(one)
    expected = samples_of(one)
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "other"))
    several = job(path, data__num_proc=2)
    prepare_run(several)
    assert samples_of(several) == expected


def test_an_error_in_a_child_process_keeps_its_place(job, tmp_path, monkeypatch):
    from launcher.train.data import prepare as module

    rows = pairs(1500)
    rows[1400]["completion"] = 7
    path = write_rows(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(path, data__num_proc=2))
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == (str(path), 1401)
    assert not list((tmp_path / "cache" / "data").glob("*"))


def test_the_command_line_shows_samples_with_their_masks(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "rows.jsonl", pairs(6))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{config: {json.dumps(TINY_LLAMA)}, tokenizer: {tokenizer_folder}}}\n"
        "data: {train: [{path: rows.jsonl}], max_length: 64}\n"
        "trainer: {max_steps: 1}\n"
        "hardware: {device: A100-80GB, devices_per_node: 8}\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {**os.environ, "EFFILAUNCH_CACHE": str(tmp_path / "cache"), "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "launcher.cli", "prepare", str(recipe), "--show", "2"]
    split = subprocess.run(
        [*command, "--set", "data.eval={split: 0.34}"], env=env, capture_output=True, text=True, check=False
    )
    assert "Samples of train: 4 to train on, 2 held out." in split.stdout, split.stderr
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    (train,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("  train  ")][:1]
    assert train[1:7] == ["6", "6", "0", "0", "0", "6"]
    assert "ask 0⟦word0" in shown.stdout
    assert "Sample 2 (rows.jsonl, line 2: " in shown.stdout
    asked = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, check=False)
    data = json.loads(asked.stdout)
    assert data["data"]["splits"]["train"]["counts"]["kept"] == 6
    assert len(data["samples"]) == 2
    arrow = Path(data["data"]["folder"]) / "train.arrow"
    written = arrow.stat().st_mtime_ns
    # The GPU job finds what the CPU job prepared: the hardware does not decide the samples.
    elsewhere = [*command, "--json", "--on", "cpu", "--set", "global_batch_size=4"]
    again = subprocess.run(elsewhere, env=env, capture_output=True, text=True, check=False)
    assert json.loads(again.stdout)["data"]["key"] == data["data"]["key"]
    assert arrow.stat().st_mtime_ns == written
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{broken\n')
    failed = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert f"{tmp_path / 'rows.jsonl'}:2" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not list(scratch.glob("effilaunch-*"))


def test_columns_that_nothing_reads_are_said(job, tmp_path, capsys):
    rows = [{"instruction": "a", "output": "b", "system": "be kind", "history": []}] * 3
    path = write_rows(tmp_path / "rows.jsonl", rows)
    left_out = {"path": str(path), "format": "auto", "columns": {"system": None}, "weight": 1.0}
    record = prepare_run(job(path, data__train=[left_out]))
    assert record["splits"]["train"]["sources"][0]["unused"] == ["system", "history"]
    assert "columns that are not read: system, history" in capsys.readouterr().out


def test_the_files_of_a_folder_are_listed_by_split(job, tmp_path, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        write_rows(folder / name, [{"text": f"of {name}"}])
    record = prepare_run(job(folder))
    split, printed = record["splits"]["train"], capsys.readouterr().out
    assert [Path(file).name for file in split["files"]] == ["train-0.jsonl", "train-1.jsonl"]
    assert split["counts"]["read"] == 2
    read, left, offered = split["sources"][0]["files"]
    assert "train-0.jsonl, train-1.jsonl" in read
    assert "test.jsonl" in left
    assert "split: test" in offered
    assert all(line in printed for line in (read, left, offered))
    assert left in " ".join(prepared_text(record, []).split())


def test_no_source_vanishes_by_its_weight(job, tmp_path):
    many = write_rows(tmp_path / "many.jsonl", pairs(10))
    few = write_rows(tmp_path / "few.jsonl", pairs(3))
    found = job([source(many), source(few, weight=0.1)])
    prepare_run(found)
    assert len(build_data(found, load_processing(found)).train) == 11


def test_fill_in_the_middle_of_rows_that_are_no_text_is_refused(job, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", pairs(3))
    with pytest.raises(RecipeError, match="only text has a middle"):
        prepare_run(job(path, data__fim={"rate": 1.0, "spm_rate": 0.5}))


def test_empty_answers_are_dropped_and_counted(job, tmp_path):
    rows = [{"prompt": "a", "completion": " "}, {"prompt": "a", "completion": "b"}]
    record = prepare_run(job(write_rows(tmp_path / "rows.jsonl", rows)))
    assert record["splits"]["train"]["counts"]["dropped"] == {"empty": 1}


def test_a_tokenizer_without_eos_is_refused(job, tmp_path, tokenizer_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    path = write_rows(tmp_path / "rows.jsonl", pairs(3))
    with pytest.raises(RecipeError, match="no EOS"):
        prepare_run(job(path, model__tokenizer=str(tmp_path / "endless")))


def test_what_a_library_says_of_a_row_is_said_with_its_place(job, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    wrong = {"role": "assistant", "content": None, "tool_calls": [{"function": None, "name": "w"}]}
    rows.append({"messages": [{"role": "user", "content": "a"}, wrong]})
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(path))
    assert (caught.value.problems[0].file, caught.value.problems[0].line) == (str(path), 5)


def test_a_cache_that_cannot_be_written_is_named(job, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", pairs(3))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="cannot write the prepared data") as caught:
        prepare_run(job(path))
    assert "EFFILAUNCH_CACHE" in caught.value.problems[0].hint


def test_preference_answers_of_two_kinds_are_refused_and_equal_ones_dropped(job, tmp_path):
    pytest.importorskip("trl")
    talk = [{"role": "assistant", "content": "x"}]
    plain = {"prompt": "ask ", "chosen": "good", "rejected": "bad"}
    equal = {"prompt": "ask ", "chosen": "same", "rejected": "same"}
    record = prepare_run(job(write_rows(tmp_path / "a.jsonl", [plain, equal, plain]), task="dpo"))
    assert record["splits"]["train"]["counts"]["dropped"] == {"equal": 1}
    other = {
        "prompt": [{"role": "user", "content": "ask"}],
        "chosen": talk,
        "rejected": [{"role": "assistant", "content": "y"}],
    }
    path = write_rows(tmp_path / "b.jsonl", [plain, other])
    with pytest.raises(RecipeError, match="those of rows before it are text") as caught:
        prepare_run(job(path, task="dpo"))
    assert caught.value.problems[0].line == 2


def test_a_source_that_loses_its_rows_stops_the_run(job, tmp_path):
    """194 of 300 rows without an answer; and one of two files, whose share of all rows is small."""
    good = write_rows(tmp_path / "good.jsonl", pairs(400))
    bad = write_rows(
        tmp_path / "bad.jsonl", pairs(106) + [{"prompt": "a", "completion": ""} for _ in range(194)]
    )
    sources = [{"path": str(path), "format": "auto", "columns": {}, "weight": 1.0} for path in (good, bad)]
    for changes in ({"data__train": sources[1:]}, {"data__train": sources}, {"data__eval": sources[1:]}):
        with pytest.raises(RecipeError) as caught:
            prepare_run(job(good, data__max_dropped=0.05, **changes))
        (problem,) = caught.value.problems
        assert (problem.code, problem.path) == ("too-much-dropped", "data.max_dropped")
        assert problem.file == str(bad)
        assert "194 of 300" in problem.message
    record = prepare_run(job(good, data__max_dropped=0.65, data__train=sources))
    told = [(source["rows"], source["dropped"]) for source in record["splits"]["train"]["sources"]]
    assert told == [(400, {}), (300, {"empty": 194})]


def test_rows_that_the_recipe_leaves_out_are_counted_and_no_loss(job, tmp_path):
    rows = [*pairs(10), *pairs(10, length=200)]
    found = job(write_rows(tmp_path / "rows.jsonl", rows), data__overlong="drop", data__max_dropped=0.0)
    record = prepare_run(found)
    assert record["splits"]["train"]["counts"]["dropped"] == {"overlong": 10}


def test_a_column_of_the_conversation_stops_the_run_wherever_it_appears(job, tmp_path):
    """Far behind the rows by which the format is recognised, and in rows held out, too."""
    rows = pairs(300)
    rows[250] = {**rows[250], "rejected": "another answer"}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    source = {"path": str(path), "format": "auto", "columns": {}, "weight": 1.0}
    good = write_rows(tmp_path / "good.jsonl", pairs(5))
    for found in (job(path), job(good, data__eval=[source])):
        with pytest.raises(RecipeError) as caught:
            prepare_run(found)
        (problem,) = caught.value.problems
        assert (problem.code, problem.file, problem.line) == ("rows-of-another-task", str(path), 251)
    rows[250] = {**rows[250], "rejected": ""}
    record = prepare_run(job(write_rows(path, rows[:251])))
    assert record["splits"]["train"]["counts"]["kept"] == 251
    rows[150] = {**rows[150], "title": "Fix the login bug quickly"}
    rows[250] = {**rows[250], "note": "some remark of the annotator"}
    with pytest.raises(RecipeError) as caught:
        prepare_run(job(write_rows(path, rows)))
    (problem,) = caught.value.problems
    assert (problem.code, problem.line) == ("column-unread", 151)
    assert "title, note" in problem.message, "all of them at the end"
    left_out = [{**source, "columns": {"extra": None}}]
    write_rows(path, [{**row, "extra": "x", "id": 1} for row in pairs(3)])
    record = prepare_run(job(path, data__train=left_out))
    assert record["splits"]["train"]["sources"][0]["unused"] == ["extra", "id"]


def test_labels_are_counted_and_alike_ones_are_a_warning(job, tmp_path, capsys):
    names = ["positive", "Positive", "positive ", "negative", "positive"]
    rows = [{"text": f"a {number}", "label": name} for number, name in enumerate(names)]
    task = {"task": "sequence-classification", "data__problem_type": "single_label_classification"}
    record = prepare_run(job(write_rows(tmp_path / "rows.jsonl", rows), **task))
    counts = {"positive": 2, "negative": 1, "Positive": 1, "positive ": 1}
    assert record["splits"]["train"]["labels"] == counts
    assert "'Positive', 'positive', 'positive '" in capsys.readouterr().out
    assert "positive 2, Positive 1, negative 1, positive  1" in prepared_text(record, [])
    several = [{"text": "a", "label": ["x", "y"]}, {"text": "b", "label": ["y"]}, {"text": "c", "label": []}]
    task["data__problem_type"] = "multi_label_classification"
    record = prepare_run(job(write_rows(tmp_path / "several.jsonl", several), **task))
    assert record["splits"]["train"]["labels"] == {"x": 1, "y": 2}
    words = [{"tokens": ["Ada", "ran", "."], "labels": ["B-PER", "O", "O"]}]
    record = prepare_run(job(write_rows(tmp_path / "words.jsonl", words), task="token-classification"))
    assert record["splits"]["train"]["labels"] == {"B-PER": 1, "O": 2}
    assert "WARNING" not in capsys.readouterr().out
    scores = [{"text": "a", "label": 1}, {"text": "b", "label": 2}]
    task["data__problem_type"] = "regression"
    record = prepare_run(job(write_rows(tmp_path / "scores.jsonl", scores), **task))
    assert "labels" not in record["splits"]["train"]
