"""Conversations through the whole preparation: masks of rows, text that templates insert, counts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from launcher.errors import RecipeError
from launcher.rows.class_names import IGNORED
from launcher.train.data.build import build_data
from launcher.train.data.store import open_samples, read_record
from launcher.train.data.stream import Stream
from launcher.train.data.template import dates_written
from launcher.train.job import read_job
from launcher.train.model.processing import load_processing
from launcher.train.prepare import prepare_run

sys.path.insert(0, str(Path(__file__).parent))
from plans import TINY_LLAMA, write_run

pytestmark = pytest.mark.usefixtures("warm")

TEMPLATE = (  # ends an answer without a thought with an empty one, as Qwen3's
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% if '</think>' not in m.content %}<think></think>{% endif %}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK = {"role": "user", "content": "ask"}
FULL = {"messages": [ASK, {"role": "assistant", "content": "one"}]}
MASKED = {
    "messages": [*FULL["messages"], ASK, {"role": "assistant", "content": "two", "loss": False}],
}
EMPTY = {"messages": [ASK, {"role": "assistant", "content": "three", "weight": 0}]}
NOTES = {"field-not-rendered: name": 1, "inserted-text-masked": 2, "turn-masked": 1}


@pytest.fixture
def tokenizer(tmp_path):
    from launcher.train.tiny import tiny_tokenizer

    made = tiny_tokenizer(512)
    made.chat_template = TEMPLATE
    made.add_tokens(["<|user|>", "<|assistant|>", "<|end|>"], special_tokens=True)
    made.save_pretrained(tmp_path / "tokenizer")
    return made


@pytest.fixture
def job(tmp_path, tokenizer, monkeypatch):
    """A function that writes rows and a run directory over them and returns its job."""
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))
    numbers = itertools.count()

    def make(rows, **changes):
        number = next(numbers)
        path = tmp_path / f"rows-{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = {
            "tiny": False,
            "model.config": TINY_LLAMA,
            "model.tokenizer": str(tmp_path / "tokenizer"),
            "data.train": [{"path": str(path), "format": "auto", "columns": {}, "weight": 1.0}],
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
        return read_job(write_run(tmp_path / f"run-{number}", settings))

    return make


def learned(tokenizer, sample):
    return tokenizer.decode([token for token in sample["labels"] if token != IGNORED])


def rows():
    named = {"messages": [{**ASK, "name": "ann"}, FULL["messages"][1]]}
    return [named, MASKED, EMPTY]


def test_what_is_masked_is_counted_and_not_learned(job, tokenizer):
    record = prepare_run(job(rows()))
    counts = record["splits"]["train"]["counts"]
    assert (counts["kept"], counts["dropped"]) == (2, {"masked": 1})
    assert counts["notes"] == NOTES
    samples = open_samples(Path(record["folder"]) / "train.arrow")
    assert [learned(tokenizer, sample) for sample in samples] == ["one<|end|>", "one<|end|>"]


def test_the_option_learns_what_is_inserted_and_is_part_of_the_key(job, tokenizer):
    plain = prepare_run(job(rows()))
    record = prepare_run(job(rows(), data__loss_on_inserted=True))
    assert record["key"] != plain["key"]
    notes = record["splits"]["train"]["counts"]["notes"]
    assert notes == {name: count for name, count in NOTES.items() if name != "inserted-text-masked"}
    samples = open_samples(Path(record["folder"]) / "train.arrow")
    assert learned(tokenizer, samples[0]) == "<think></think>one<|end|>"


def test_the_option_is_refused_where_no_template_renders(job):
    with pytest.raises(RecipeError) as caught:
        prepare_run(job([{"prompt": "a", "completion": "b"}], data__loss_on_inserted=True))
    assert caught.value.problems[0].path == "data.loss_on_inserted"


def test_packs_and_streams_keep_the_masks(job, tokenizer):
    packed = job(rows(), data__packing=True, data__max_length=256)
    prepare_run(packed)
    pack = build_data(packed, load_processing(packed)).train[0]
    assert learned(tokenizer, pack) == "one<|end|>" * 2
    streamed = Stream(job(rows(), data__streaming=True), tokenizer)
    assert [learned(tokenizer, s) for s in streamed.unpacked(passes=1)] == ["one<|end|>"] * 2
    counts = streamed.counts
    assert counts["dropped"] == {"masked": 1}
    assert counts["notes"] == {"field-not-rendered": 1, "inserted-text-masked": 2, "turn-masked": 1}


def test_the_command_says_the_numbers(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{config: {json.dumps(TINY_LLAMA)}, tokenizer: {tmp_path / 'tokenizer'}}}\n"
        "data: {train: [{path: rows.jsonl}], max_length: 64}\n"
        "trainer: {max_steps: 1}\n"
    )
    env = {**os.environ, "EFFILAUNCH_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "launcher.cli", "prepare", str(recipe), "--on", "cpu"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    lines = [
        line.split() for line in shown.stdout.splitlines() if line.startswith("  train: ") and "turns" in line
    ]
    assert [words[1] for words in lines] == ["1", "2", "1"], shown.stdout
    asked = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, check=False)
    assert json.loads(asked.stdout)["data"]["splits"]["train"]["counts"]["notes"] == NOTES


def test_preference_rows_are_looked_at_too(job):
    pytest.importorskip("trl")
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    good = {"prompt": [ASK], "chosen": chosen, "rejected": rejected}
    assert prepare_run(job([good], task="dpo"))["splits"]["train"]["counts"]["kept"] == 1
    masked = {**good, "chosen": [{**chosen[0], "train": False}]}
    stranger = {**good, "prompt": [ASK, {"role": "critic", "content": "hm"}]}
    called = {**good, "rejected": [{"role": "tool_call", "content": {"name": "f", "arguments": {}}}]}
    weighed = {**good, "weight": 0.5}
    for row, code in [
        (masked, "bad-row"), (stranger, "chat-template-role"), (called, "chat-template-tools"),
        (weighed, "column-unread"),
    ]:  # fmt: skip
        with pytest.raises(RecipeError) as caught:
            prepare_run(job([good, row], task="dpo"))
        assert (caught.value.problems[0].code, caught.value.problems[0].line) == (code, 2)


def test_special_tokens_in_text_are_a_warning_with_the_row_unless_the_recipe_keeps_them(
    job, tokenizer, capsys
):
    turned = [FULL, {"messages": [{**ASK, "content": "a<|end|><|assistant|>no"}, FULL["messages"][1]]}]
    records = {}
    for asked in (None, "keep", "escape", "refuse"):
        work = job(turned, data__special_tokens_in_text=asked)
        if asked == "refuse":
            with pytest.raises(RecipeError) as caught:
                prepare_run(work)
            assert (caught.value.problems[0].code, caught.value.problems[0].line) == (
                "special-token-in-text",
                2,
            )
            continue
        records[asked] = prepare_run(work)
        place = f"{work.data.train[0]['path']}:2"
        assert (f"(first: {place})" in capsys.readouterr().out) is (asked is None)
        split = records[asked]["splits"]["train"]
        assert split["counts"]["notes"]["special-token-in-text: <|end|>"] == 1
        assert split["first_rows"]["special-token-in-text: <|end|>"] == [0, 2]
    ids = {
        asked: open_samples(Path(record["folder"]) / "train.arrow")[1]["input_ids"]
        for asked, record in records.items()
    }
    assert ids[None] == ids["keep"]
    ends = tokenizer.convert_tokens_to_ids("<|end|>")
    assert [one.count(ends) for one in (ids["keep"], ids["escape"])] == [3, 2]
    streamed = job(turned, data__streaming=True, data__special_tokens_in_text="escape")
    samples = list(Stream(streamed, load_processing(streamed)).unpacked(passes=1))
    assert ids["escape"] in [sample["input_ids"] for sample in samples]


def test_a_date_of_the_day_that_the_template_writes_is_told_as_it_was_written(
    job, tokenizer, tmp_path, capsys
):
    rows = [{"messages": [{**ASK, "content": "since 01 Jan 1999"}, FULL["messages"][1]]}]
    today = "{% set day = strftime_now('%d %b %Y') %}Today: {{ day }}.\n"
    for text, told in (
        (TEMPLATE, False),
        (today + TEMPLATE, True),
        ("Today: 26 Jul 2024.\n" + TEMPLATE, False),
    ):
        work = job(rows, model__chat_template=text)
        prepare_run(work)
        written = tokenizer.decode(
            open_samples(Path(read_record(work)["folder"]) / "train.arrow")[0]["input_ids"]
        )
        said = capsys.readouterr().out
        assert ("strftime_now" in said) is told
        if told:
            assert dates_written(load_processing(work), written.replace(written[7:18], "05 May 2031")) == [
                "05 May 2031", "01 Jan 1999"
            ]  # fmt: skip
            assert written[7:18] in said
