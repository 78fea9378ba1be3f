"""lint against files that were made to stop it: what takes long, and names that no terminal shows."""

from __future__ import annotations

import json

import pytest
from counted_work import LINEAR, TIMES, cpu_growth

from launcher.knowledge.lint.check import LARGEST, applied, apply_fixes, lint_text
from launcher.knowledge.lint.document import PYTHON_NUMBER, read_json


@pytest.mark.parametrize("value", ['"1e999"', '"-1e400"', f'"{"9" * 50}"', f'"{"9" * 5000}"'])
@pytest.mark.parametrize("key", ["gradient_clipping", "train_batch_size"])
def test_a_number_that_no_setting_could_have_is_found_and_not_rewritten(key, value):
    text = f'{{"train_micro_batch_size_per_gpu": 1, "{key}": {value}}}'
    found = [finding for finding in lint_text(text, "a.json") if finding.path == key]
    assert [finding.code for finding in found] == ["ds-wrong-type"]
    better, left = apply_fixes(text, "a.json")
    assert json.loads(better)[key] == json.loads(value), "the text as it was: inf is no JSON"
    assert key in {finding.path for finding in left}


def test_the_largest_number_in_a_text_is_refused_in_one_pass():
    assert PYTHON_NUMBER.fullmatch("9" * LARGEST + "x") is None
    assert cpu_growth(PYTHON_NUMBER.fullmatch, lambda digits: "9" * digits + "x", LARGEST // TIMES) < LINEAR


@pytest.mark.parametrize(
    "inner",
    [
        lambda letters: "#\n" * (letters // 3),
        lambda letters: ", ".join(['"sub_group_size": 1'] * (letters // 25)),
        lambda letters: ", ".join(f'"stage3_x{number}": {{}}' for number in range(letters // 25)),
    ],
    ids=["comments", "duplicates", "unknown-keys"],
)
def test_a_file_of_mistakes_is_mended_in_linear_time(inner):
    def mistakes(letters: int) -> str:
        return f'{{"train_batch_size": 8, "zero_optimization": {{"stage": 2, {inner(letters)}}}}}'

    assert apply_fixes(mistakes(LARGEST // 100), "a.json")[0]
    assert cpu_growth(lambda text: apply_fixes(text, "a.json"), mistakes, LARGEST // 20) < LINEAR


@pytest.mark.parametrize("tail", [",", ", // c\n", ",/* c */", " # c\n,"])
def test_an_object_that_is_emptied_stays_json(tail):
    text = f'{{"train_batch_size": 8, "bf16": {{"loss_scale": 0{tail}}}}}'
    better, left = apply_fixes(text, "a.json")
    assert json.loads(better)["bf16"] == {}
    assert not [finding for finding in left if finding.code.startswith("ds-json")]


def test_edits_that_touch_are_left_for_the_next_round():
    from launcher.knowledge.lint.document import TextEdit

    groups = [
        [TextEdit(4, 6, "X")],
        [TextEdit(6, 7, "Y")],
        [TextEdit(0, 1, "A"), TextEdit(5, 6, "B")],
        [TextEdit(8, 9), TextEdit(1, 2, "C")],
    ]
    assert applied("0123456789", groups) == "0C23X679"


def test_a_name_of_a_file_does_not_reach_the_terminal_as_it_is():
    finding = lint_text("[]", "a\n\x1b[31m\udcff.json")[0]
    assert str(finding).startswith(r"a\n\x1b[31m\udcff.json:1:1: ")
    assert finding.to_json()["file"] == "a\n\x1b[31m\udcff.json"


def test_a_key_as_long_as_its_file_does_not_fill_the_screen():
    found = lint_text(f'{{"train_batch_size": 8, "{"k" * 50_000}": 1}}', "a.json")
    assert len(str(found[0])) < 5000
    assert found[0].code == "ds-typo-toplevel"


def test_a_bare_token_is_not_quoted():
    token = "hf_" + "Zq" * 14
    findings = read_json(f'{{"a": {token}}}', "ds.json").findings
    assert findings
    assert token not in repr(findings)
