"""The file of `python:` is checked from its text, before anything runs."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.recipe.hook_file import read_hooks


def write(folder, text):
    file = folder / "hooks.py"
    file.write_text(text, encoding="utf-8")
    return file


def problems(folder, text):
    with pytest.raises(RecipeError) as caught:
        read_hooks(write(folder, text))
    return [(problem.code, problem.line) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def format_row(row):\n    return row\n", ("format_row",)),
        ("def callbacks(): return []\ndef format_row(row, /, more=1): pass\n", ("format_row", "callbacks")),
        ("def compute_metrics(*args): pass\n", ("compute_metrics",)),
        ("format_row = lambda row: row\n", ("format_row",)),
        ("from here import format_row\nimport there as callbacks\n", ("format_row", "callbacks")),
        ("try:\n    import a\nexcept ImportError:\n    def format_row(row): pass\n", ("format_row",)),
        ("import functools\n@functools.cache\ndef format_row(a, b): pass\n", ("format_row",)),
        ("\ufeffdef callbacks(): return []\n", ("callbacks",)),
        ("def _format_rows(a, b): pass\ndef format_row(row): return _format_rows(row, 1)\n", ("format_row",)),
        ("def format_rows(row): pass\ndef format_row(row): return format_rows(row)\n", ("format_row",)),
        ("def callbacks(): return ['\\d']\n", ("callbacks",)),
        ("def format_rows(rows): pass\ndef callbacks(): return [format_rows]\n", ("callbacks",)),
        ("class C:\n    def format_rows(self): pass\ndef callbacks(): return [C()]\n", ("callbacks",)),
    ],
)
def test_good_hooks(tmp_path, text, names):
    hooks = read_hooks(write(tmp_path, text))
    assert hooks.names == names
    assert hooks.text == text.removeprefix("\ufeff")


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("x = 1\ndef f(row:\n    pass\n", "hooks-syntax", 2),
        ("", "hook-missing", 1),
        ("class A:\n    def format_row(self, row): pass\n", "hook-missing", 1),
        ("\ndef format_rows(row): pass\n", "hook-unknown", 2),
        ("def get_callbacks(): return []\n", "hook-unknown", 1),
        ("def format_row(): pass\n", "hook-signature", 1),
        ("def format_row(row, tokenizer): pass\n", "hook-signature", 1),
        ("def format_row(row, *, key): pass\n", "hook-signature", 1),
        ("def callbacks(trainer): pass\n", "hook-signature", 1),
        ("compute_metrics = lambda: {}\n", "hook-signature", 1),
        ("async def format_row(row): pass\n", "hook-signature", 1),
    ],
)
def test_bad_hooks(tmp_path, text, code, line):
    assert problems(tmp_path, text) == [(code, line)]


def test_every_problem_of_the_file_is_reported(tmp_path):
    found = problems(tmp_path, "def format_row(): pass\ndef callback(): pass\n")
    assert [line for _, line in found] == [1, 2]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "hooks-missing"),
        (b"\xff\xfe", "hooks-unreadable"),
        (b"x = '\0'", "hooks-syntax"),
        (b"x = " + b"(" * 100_000, "hooks-syntax"),
    ],
)
def test_files_that_cannot_be_parsed(tmp_path, content, code):
    file = tmp_path / "hooks.py"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_hooks(file)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_a_folder_is_no_file_of_hooks(tmp_path):
    with pytest.raises(RecipeError) as caught:
        read_hooks(tmp_path)
    assert caught.value.problems[0].code == "hooks-unreadable"


def test_nothing_of_the_file_runs(tmp_path):
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w')\nimport nothing_of_this_name\ndef callbacks(): return []\n"
    assert read_hooks(write(tmp_path, text)).names == ("callbacks",)
    assert not marker.exists()
