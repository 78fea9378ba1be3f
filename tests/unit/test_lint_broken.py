"""Broken DeepSpeed configs, each with the one place and code that lint has to name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from counted_work import LINEAR, cpu_growth
from every import every
from lint_cases import BROKEN

from launcher.knowledge.lint.check import LARGEST, MOST, lint_bytes, lint_text
from launcher.knowledge.lint.document import read_json

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_at_least_forty():
    assert len(BROKEN) >= 40


@every("name", BROKEN)
def test_a_broken_config_is_found_at_its_place(name):
    text, *expected = BROKEN[name]
    found = [[f.code, f.line, f.column, f.path] for f in lint_text(text, "ds.json")]
    # One mistake, one finding: nothing beside it.
    assert found == [expected]


@pytest.mark.parametrize(
    "others",
    [
        '"name": "x", "version": "y"',
        '"model": {}, "data": {}',
        '"transformers_version": "5", "eos_token_id": 2',
        '"hidden_size": 64, "num_hidden_layers": 2',
        '"added_tokens": [], "model": {}, "normalizer": null',
    ],
)
@pytest.mark.parametrize("own", ['"fp16": {"enabled": true, "opt_level": "O1"}', '"amp": {"enabled": true}'])
def test_names_of_other_files_beside_deepspeeds_own_are_unknown_keys(own, others):
    found = {f.path: f.code for f in lint_text(f'{{"train_batch_sise": 8, {own}, {others}}}', "ds.json")}
    assert "ds-not-a-config" not in found.values()
    assert {"train_batch_sise", *json.loads(f"{{{others}}}")} <= found.keys()
    (without,) = lint_text(f"{{{others}}}", "ds.json")
    assert without.code == "ds-not-a-config"


def test_a_key_that_deepspeed_never_reads_is_told_so_at_every_stage():
    def found(given, stage):
        section = {"stage": stage, "allgather_partitions": given}
        text = json.dumps({"train_batch_size": 8, "zero_optimization": section})
        return [f.message.replace(f"stage {stage}", "stage") for f in lint_text(text, "ds.json")]

    messages = [found(True, 3), found(False, 3), found(True, 0), found(False, 2), found(False, 1)]
    assert len(messages[0]) == 1
    assert [m for m in messages if m != messages[0]] == [], "the stage is not the reason"
    assert found(True, 1) == found(True, 2) == []


@pytest.mark.parametrize("name", ["8 as text", "gradient_cliping", "amp off", "fp16 and bf16", "never ends"])
def test_a_finding_is_written_as_a_compiler_does(name):
    text, code, line, column, _ = BROKEN[name]
    (finding,) = lint_text(text, "a/ds.json")
    assert str(finding).startswith(f"a/ds.json:{line}:{column}: {code}: {finding.message}")
    assert finding.message
    assert "\n" not in str(finding)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (BROKEN["zero_optimisation"][0], "`zero_optimization`"),
        (BROKEN["gradient_cliping"][0], "`gradient_clipping`"),
        (BROKEN["fp_16"][0], "`fp16`"),
        (BROKEN["pin_memroy"][0], "`pin_memory`"),
        (BROKEN["section at the top"][0], "`zero_optimization`"),
        (BROKEN["misspelt checkpointing key"][0], "`partition_activations`"),
        (BROKEN["misspelt optimizer parameter"][0], "`lr`"),
        (BROKEN["8 as text"][0], "write 8"),
        (BROKEN["1e5 steps"][0], "write 100000"),
        (BROKEN["cpu_offload"][0], '"offload_optimizer": {"device": "cpu"}'),
        (BROKEN["missing comma"][0], "comma"),
    ],
)
def test_the_hint_says_what_was_meant(text, meant):
    (finding,) = lint_text(text, "ds.json")
    assert meant in finding.hint


def test_windows_lines_and_wide_characters_keep_the_place():
    text = '{"train_batch_size": 8,\r\n"_note": "ö😀", "fp_16": {}}'
    (finding,) = lint_text(text, "ds.json")
    assert (finding.line, finding.column) == (2, 16)


def test_every_finding_of_one_file_is_told_in_the_order_of_the_text():
    text = '{"amp": {}, "fp_16": {},\n "zero_optimization": {"stage": "2", "overlap_com": 1}, // x\n}'
    places = [(f.line, f.column) for f in lint_text(text, "ds.json")]
    assert len(places) == 7
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("raw", "file", "word", "place"),
    [
        (b"\x89PNG\r\n\0\0", "a.json", "binary", (1, 1)),
        ('{"train_batch_size": 8}'.encode("utf-16"), "a.json", "UTF-16", (1, 1)),
        (b'{"a":\n "\xe9"}', "a.json", "UTF-8", (2, 3)),
        (b" " * (LARGEST + 1), "a.json", "bytes", (1, 1)),
        (b"train_batch_size: 8\n", "a.yaml", "YAML", (1, 1)),
    ],
)
def test_what_is_no_json_text_is_one_finding(raw, file, word, place):
    (finding,) = lint_bytes(raw, file)
    assert (finding.code, finding.line, finding.column) == ("ds-json-syntax", *place)
    assert word in finding.message


def test_json_under_a_yaml_name_is_read():
    assert lint_bytes(b'{"train_batch_size": 8}', "a.yaml") == []


def test_a_key_that_no_terminal_shows_stays_on_one_line():
    text = '{"train_batch_size": 8, "a\\nb": 1, "\\ud800": 2}'
    found = lint_text(text, "ds.json")
    assert [f.path for f in found] == ["a\\nb", "\\ud800"]
    assert all(str(f).encode("utf-8") and "\n" not in str(f) for f in found)


def test_damaged_files_are_read_as_the_trainer_reads_them_or_found():
    """A finding of JSON wherever json.load fails, the same value wherever it does not, and never a crash."""
    source = (ROOT / "ds_configs" / "zero3_nvme.json").read_text(encoding="utf-8")
    dice = random.Random(5)
    broken = 0
    for _ in range(1500):
        text = list(source)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(text))
            text[at : at + dice.randint(0, 2)] = dice.choice('{}[]",:/*#\\0123eE.-+tfnN \n\tü')
        damaged = "".join(text)
        codes = {finding.code for finding in lint_text(damaged, "ds.json")}
        try:
            value = json.loads(damaged)
        except ValueError:
            broken += 1
            assert any(code.startswith("ds-json") for code in codes), damaged
        else:
            assert not codes & {"ds-json-syntax", "ds-json-comments", "ds-json-comma"}, damaged
            root = read_json(damaged, "ds.json").root
            assert root is not None
            assert root.plain() == value
    assert 300 < broken < 1500


def test_a_large_file_of_mistakes_is_answered_in_linear_time():
    def mistakes(count: int) -> str:
        many = ",".join(f'"k{n}": {n}' for n in range(count))
        return f'{{"train_batch_size": 8, {many}}}'

    assert len(lint_text(mistakes(10_000), "ds.json")) == MOST
    assert cpu_growth(lambda text: lint_text(text, "ds.json"), mistakes, 2500) < LINEAR
