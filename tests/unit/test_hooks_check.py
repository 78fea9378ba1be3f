"""The file of `python:` is checked from its text, before anything runs."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.recipe.hook_file import read_hooks
from launcher.recipe.hooks import HOOK, HOOKS
from launcher.tasks import TASKS, task_named
from launcher.train import hooks as loaded

CAUSAL_LM = task_named("causal-lm")


class TakesAll(type(CAUSAL_LM)):
    hooks = tuple(HOOK)


def write(folder, text):
    file = folder / "hooks.py"
    file.write_text(text, encoding="utf-8")
    return file


def problems(folder, text):
    with pytest.raises(RecipeError) as caught:
        read_hooks(write(folder, text), CAUSAL_LM)
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
        ("from transformers import Trainer\ndef callbacks(): return [Trainer]\n", ("callbacks",)),
        ("def format_rows(rows): pass\ndef callbacks(): return [format_rows]\n", ("callbacks",)),
        ("class C:\n    def format_rows(self): pass\ndef callbacks(): return [C()]\n", ("callbacks",)),
    ],
)
def test_good_hooks(tmp_path, text, names):
    hooks = read_hooks(write(tmp_path, text), CAUSAL_LM)
    assert hooks.names == names
    assert len(hooks.digest) == 64


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
        read_hooks(file, CAUSAL_LM)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_a_folder_is_no_file_of_hooks(tmp_path):
    with pytest.raises(RecipeError) as caught:
        read_hooks(tmp_path, CAUSAL_LM)
    assert caught.value.problems[0].code == "hooks-unreadable"


def test_nothing_of_the_file_runs(tmp_path):
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w')\nimport nothing_of_this_name\ndef callbacks(): return []\n"
    assert read_hooks(write(tmp_path, text), CAUSAL_LM).names == ("callbacks",)
    assert not marker.exists()


def test_the_table_names_every_hook_that_the_workers_load_and_no_other_is_taken():
    fields = set(loaded.Hooks.__dataclass_fields__) - {"digest"}
    assert fields == set(HOOK)
    assert len(HOOK) == len(HOOKS)
    judged = set(loaded._EXPLAINED) | set(loaded._IS_RIGHT)
    assert judged == {hook.name for hook in HOOKS if hook.kind == "function"}
    assert all(set(task.hooks) <= set(HOOK) for task in TASKS)
    assert not {name for hook in HOOKS for name in hook.misnomers} & set(HOOK)


def test_a_file_may_define_every_hook_of_a_task(tmp_path):
    functions = "".join(f"def {hook.call}: pass\n" for hook in HOOKS if hook.kind == "function")
    text = "from transformers import Trainer as Base\n" + functions + "class Trainer(Base): pass\n"
    assert read_hooks(write(tmp_path, text), TakesAll()).names == tuple(HOOK)


@pytest.mark.parametrize(
    ("text", "code", "line", "named"),
    [
        ("def compute_loss(outputs, labels): pass\n", "hook-signature", 1, "num_items_in_batch"),
        ("\ndef optimizer(model): pass\n", "hook-signature", 2, "optimizer(model, args)"),
        ("def Trainer(model): pass\n", "hook-signature", 1, "a function"),
        ("class Trainer: pass\n", "hook-signature", 1, "no base class"),
        ("def compute_loss_func(a, b, c): pass\n", "hook-unknown", 1, "compute_loss_func"),
        ("def collate_fn(samples): pass\n", "hook-unknown", 1, "collate_fn"),
        ("import x\nclass MyTrainer(x.Trainer): pass\n", "hook-unknown", 2, "MyTrainer"),
    ],
)
def test_hooks_of_other_signatures_and_names_are_refused(tmp_path, text, code, line, named):
    with pytest.raises(RecipeError) as caught:
        read_hooks(write(tmp_path, text), TakesAll())
    [problem] = caught.value.problems
    assert (problem.code, problem.line) == (code, line)
    assert named in f"{problem.message} {problem.hint}"


def test_a_hook_that_the_task_does_not_take_is_refused_by_name(tmp_path):
    with pytest.raises(RecipeError) as caught:
        read_hooks(write(tmp_path, "\ndef make_datasets(): pass\n"), CAUSAL_LM)
    [problem] = caught.value.problems
    assert (problem.code, problem.line) == ("hook-not-taken", 2)
    assert {"make_datasets", "causal-lm"} <= set(problem.message.split())
