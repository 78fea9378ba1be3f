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
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


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
    ("text", "expected"),
    [
        ("x = 1\ndef f(row:\n    pass\n", "hooks.py:2: python: is not valid"),
        ("", "hooks.py:1: python: defines no hook at its top level (hooks: format_row(row), "),
        ("class A:\n    def format_row(self, row): pass\n", "hooks.py:1: python: defines no hook"),
        ("\ndef format_rows(row): pass\n", "hooks.py:2: python: the function format_rows is called by nobody"
         " (did you mean `format_row`?)"),
        ("def get_callbacks(): return []\n", "(did you mean `callbacks`?)"),
        ("def format_row(): pass\n", "hooks.py:1: python: format_row cannot be called as format_row(row)"
         " (write `def format_row(row):`)"),
        ("def format_row(row, tokenizer): pass\n", "format_row cannot be called as format_row(row)"),
        ("def format_row(row, *, key): pass\n", "format_row cannot be called as format_row(row)"),
        ("def callbacks(trainer): pass\n", "callbacks cannot be called as callbacks()"),
        ("compute_metrics = lambda: {}\n", "compute_metrics cannot be called as compute_metrics(prediction)"),
        ("async def format_row(row): pass\n", "format_row is a coroutine, expected a plain function"),
        ("x = '\0'\n", "is not valid Python: "),
    ],
)  # fmt: skip
def test_bad_hooks(tmp_path, text, expected):
    (only,) = problems(tmp_path, text)
    assert expected in only


def test_every_problem_of_the_file_is_told(tmp_path):
    found = problems(tmp_path, "def format_row(): pass\ndef callback(): pass\n")
    assert [line.partition(": python")[0] for line in found] == ["hooks.py:1", "hooks.py:2"]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"nowhere.py: python: no such file \(`python:`"):
        read_hooks(tmp_path / "nowhere.py")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        read_hooks(tmp_path)
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        read_hooks(tmp_path / "bytes.py")
    deep = write(tmp_path, "x = " + "(" * 100_000)
    with pytest.raises(RecipeError, match="is not valid Python"):
        read_hooks(deep)


def test_nothing_of_the_file_runs(tmp_path):
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w')\nimport nothing_of_this_name\ndef callbacks(): return []\n"
    assert read_hooks(write(tmp_path, text)).names == ("callbacks",)
    assert not marker.exists()
