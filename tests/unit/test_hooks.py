"""The user's hooks.py: loaded with what lies beside it, and every failure placed in the user's file."""

from __future__ import annotations

import pickle
import sys

import pytest

from launcher.errors import RecipeError, RunFailed
from launcher.recipe.hook_file import digest_of
from launcher.train.hooks import Hooks, check_collator, import_file, load_hooks, placed_in_file
from launcher.train.job import Job


def hooks(tmp_path, text: str, names: list[str]) -> Hooks:
    path = tmp_path / "hooks.py"
    path.write_text(text)
    settings = {"python.file": str(path), "python.hooks": names}
    return load_hooks(Job(tmp_path, {"settings": {key: {"value": value} for key, value in settings.items()}}))


def test_without_a_file_there_are_no_hooks(tmp_path):
    settings = {"python.file": {"value": None}, "python.hooks": {"value": []}}
    assert load_hooks(Job(tmp_path, {"settings": settings})) == Hooks()


def test_a_file_whose_hooks_are_not_needed_is_not_imported(tmp_path):
    settings = {"python.file": str(tmp_path / "gone.py"), "python.hooks": ["callbacks"]}
    job = Job(tmp_path, {"settings": {key: {"value": value} for key, value in settings.items()}})
    assert load_hooks(job, "make_model", "prepare_model") == Hooks()
    with pytest.raises(RecipeError):
        load_hooks(job, "make_model", "callbacks")


def test_only_the_promised_functions_are_taken(tmp_path):
    text = "def format_row(row):\n    return row\n\ndef compute_metrics(prediction):\n    return {}\n"
    found = hooks(tmp_path, text, ["format_row"])
    assert found.compute_metrics is None
    assert found.format_row({"a": 1}, "rows.jsonl", 1) == {"a": 1}


def test_modules_beside_the_file_are_found_while_it_loads(tmp_path):
    (tmp_path / "beside_hooks.py").write_text("WORD = 'found'\n")
    text = "from beside_hooks import WORD\n\ndef format_row(row):\n    return {'text': WORD}\n"
    try:
        assert hooks(tmp_path, text, ["format_row"]).format_row({}, "r", 1) == {"text": "found"}
    finally:
        sys.modules.pop("beside_hooks", None)
    assert str(tmp_path) not in sys.path


def test_two_files_of_one_name_do_not_meet(tmp_path):
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        found.append(
            hooks(
                tmp_path / folder, f"def format_row(row):\n    return {{'in': {folder!r}}}\n", ["format_row"]
            )
        )
    assert [one.format_row({}, "r", 1) for one in found] == [{"in": "a"}, {"in": "b"}]
    assert found[0].digest != found[1].digest


def test_a_row_may_be_left_out_and_is_not_changed_in_place(tmp_path):
    text = "def format_row(row):\n    row['a'] = 2\n    return None\n"
    row = {"a": 1}
    assert hooks(tmp_path, text, ["format_row"]).format_row(row, "r", 1) is None
    assert row == {"a": 1}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("def format_row(row):\n    return {}\n\nthis is wrong(\n", 4, "SyntaxError"),
        ("import a_module_that_is_not_there\n", 1, "ModuleNotFoundError.*a_module_that_is_not_there"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_is_placed(tmp_path, text, line, message):
    with pytest.raises(RecipeError, match=message) as caught:
        hooks(tmp_path, text, ["format_row"])
    problem = caught.value.problems[0]
    assert (problem.code, problem.file, problem.line) == ("hooks-broken", str(tmp_path / "hooks.py"), line)
    assert str(tmp_path) not in sys.path


def test_a_syntax_error_beside_the_file_names_the_line_that_imports_it(tmp_path):
    (tmp_path / "broken_beside.py").write_text("\n\n\n)\n")
    with pytest.raises(RecipeError, match=r"broken_beside.py, line 4") as caught:
        hooks(tmp_path, "import sys\nimport broken_beside\n", [])
    assert caught.value.problems[0].line == 2


def test_a_missing_file_is_named(tmp_path):
    settings = {
        "python.file": {"value": str(tmp_path / "gone.py")},
        "python.hooks": {"value": ["format_row"]},
    }
    with pytest.raises(RecipeError, match=r"gone.py: python: no such Python file"):
        load_hooks(Job(tmp_path, {"settings": settings}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(row):\n    return row\n", "the hook format_row does not exist"),
        ("format_row = 3\n", "the hook format_row is a int, expected a function"),
    ],
)
def test_a_promised_name_that_is_no_function_is_refused(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message):
        hooks(tmp_path, text, ["format_row"])


def test_an_error_of_format_row_names_the_row_and_the_line(tmp_path):
    text = "def inner(row):\n    return row['text']\n\ndef format_row(row):\n    return {'t': inner(row)}\n"
    with pytest.raises(RecipeError) as caught:
        hooks(tmp_path, text, ["format_row"]).format_row({}, "rows.jsonl", 40_317)
    assert str(caught.value) == (
        f"{tmp_path}/hooks.py:2: python: "
        "the hook format_row, for the row rows.jsonl:40317, raised KeyError: 'text'"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_below_the_users_code_names_the_users_line(tmp_path):
    text = "import json\n\ndef format_row(row):\n    return json.loads(row['text'])\n"
    with pytest.raises(RecipeError) as caught:
        hooks(tmp_path, text, ["format_row"]).format_row({"text": "{"}, "r", 1)
    assert caught.value.problems[0].line == 4


def test_a_row_of_another_type_is_placed_in_the_data(tmp_path):
    with pytest.raises(RecipeError) as caught:
        hooks(tmp_path, "def format_row(row):\n    return [row]\n", ["format_row"]).format_row(
            {}, "rows.csv", 7
        )
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("rows.csv", 7)
    assert "format_row returned list, expected a dict" in problem.message


def test_an_error_of_compute_metrics_ends_the_run(tmp_path):
    text = "def compute_metrics(prediction):\n    raise ValueError('two\\nlines')\n"
    with pytest.raises(
        RunFailed, match=r"hooks.py:2: python: the hook compute_metrics raised ValueError: two lines"
    ):
        hooks(tmp_path, text, ["compute_metrics"]).compute_metrics(None)


CALLBACKS = """
from transformers import TrainerCallback

class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        raise OSError("full disk")
    def on_save(self, args, state, control, **more):
        return "saved"

def callbacks():
    return {made}
"""


def test_callbacks_keep_their_class_and_explain_their_errors(tmp_path):
    pytest.importorskip("transformers")
    [watch] = hooks(tmp_path, CALLBACKS.format(made="[Watch()]"), ["callbacks"]).callbacks()
    assert type(watch).__name__ == "Watch"
    assert watch.on_save(None, None, None) == "saved"
    with pytest.raises(
        RunFailed, match=r"hooks.py:6: python: the hook Watch.on_step_end raised OSError: full disk"
    ):
        watch.on_step_end(None, None, None)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("[Watch]", "expected instances of TrainerCallback"),
        ("None", "hooks.py: python: the hook callbacks raised TypeError"),
        ("[1 / 0]", "hooks.py:11: python: the hook callbacks raised ZeroDivisionError"),
    ],
)
def test_callbacks_of_another_kind_are_refused(tmp_path, made, message):
    pytest.importorskip("transformers")
    found = hooks(tmp_path, CALLBACKS.format(made=made), ["callbacks"])
    with pytest.raises(RecipeError, match=message):
        found.callbacks()


def test_the_file_runs_once_in_a_process_and_anew_when_it_has_changed(tmp_path):
    text = "runs = []\n\ndef callbacks():\n    runs.append(1)\n    return []\n"
    first = hooks(tmp_path, text, ["callbacks"])
    again = hooks(tmp_path, text, ["callbacks"])
    first.callbacks(), again.callbacks()
    (module,) = {
        m for name, m in sys.modules.items() if getattr(m, "__file__", "") == str(tmp_path / "hooks.py")
    }
    assert module.runs == [1, 1]
    assert hooks(tmp_path, text.replace("runs.append(1)", "pass"), ["callbacks"]).callbacks() == []
    assert module.runs == [1, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compute_loss", "def compute_loss(outputs, labels, num_items_in_batch):\n    return {value}\n"),
        ("optimizer", "def optimizer(model, args):\n    return {value}\n"),
        ("data_collator", "def data_collator(processing):\n    return {value}\n"),
        ("prepare_model", "def prepare_model(model):\n    return {value}\n"),
        ("make_model", "def make_model(config):\n    return {value}\n"),
        ("make_datasets", "def make_datasets():\n    return {value}\n"),
        ("processing", "def processing():\n    return {value}\n"),
    ],
)
@pytest.mark.parametrize("value", ["None", "'text'"])
def test_what_a_hook_returns_is_judged_and_its_errors_placed(tmp_path, name, text, value):
    arguments = (None,) * text.partition("(")[2].partition(")")[0].count(",") + (None,)
    arguments = () if "()" in text else arguments
    function = getattr(hooks(tmp_path, text.format(value=value), [name]), name)
    with pytest.raises(RecipeError) as caught:
        function(*arguments)
    problem = caught.value.problems[0]
    assert (problem.code, problem.file, problem.line) == ("hook-result", str(tmp_path / "hooks.py"), 1)
    function = getattr(hooks(tmp_path, text.format(value="1 / 0"), [name]), name)
    with pytest.raises(RunFailed) as failed:
        function(*arguments)
    assert (failed.value.problems[0].code, failed.value.problems[0].line) == ("hook-failed", 2)


def test_what_hooks_must_return_is_taken(tmp_path):
    torch = pytest.importorskip("torch")
    text = """
import torch
def compute_loss(outputs, labels, num_items_in_batch): return torch.zeros(())
def optimizer(model, args): return torch.optim.SGD(model.parameters()), None or Steps()
def data_collator(processing): return list
def prepare_model(model): return model
def make_datasets(): return [1], None
class Steps:
    def step(self): pass
class Trainer(dict): pass
"""
    names = ["compute_loss", "optimizer", "data_collator", "prepare_model", "make_datasets", "Trainer"]
    found = hooks(tmp_path, text, names)
    model = torch.nn.Linear(1, 1)
    assert found.compute_loss(None, None, None) == 0
    assert isinstance(found.optimizer(model, None)[0], torch.optim.SGD)
    assert found.data_collator(None).__class__.__name__ == "OwnCollator"
    assert found.prepare_model(model) is model
    assert found.make_datasets() == ([1], None)
    assert found.Trainer.__name__ == "Trainer"


def test_a_class_is_asked_for_where_a_function_stands(tmp_path):
    with pytest.raises(RecipeError, match="expected a class"):
        hooks(tmp_path, "def Trainer(): pass\n", ["Trainer"])


def test_memory_that_ran_out_in_a_hook_stays_what_it_is(tmp_path):
    text = "class OutOfMemoryError(RuntimeError): pass\ndef processing(): raise OutOfMemoryError\n"
    with pytest.raises(RuntimeError) as caught:
        hooks(tmp_path, text, ["processing"]).processing()
    assert type(caught.value).__name__ == "OutOfMemoryError"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1677721600 bytes", RuntimeError),
        ("CUDA driver error: out of memory", RuntimeError),
        ("Error out of memory at line 80 in file ops.cu", RuntimeError),
        ("Failed to CUDA calloc 512 bytes", RuntimeError),
        ("size mismatch", RunFailed),
    ],
)
def test_errors_of_memory_that_have_no_class_are_known_by_their_words(tmp_path, message, kind):
    with pytest.raises(kind):
        hooks(tmp_path, f"def processing(): raise RuntimeError({message!r})\n", ["processing"]).processing()


COLLATOR = """
class Pad:
    def __call__(self, samples):
        return {made}

def data_collator(processing):
    return Pad(){more}
"""


def collator(folder, made="{'n': len(samples)}", more=""):
    return hooks(folder, COLLATOR.format(made=made, more=more), ["data_collator"]).data_collator(None)


def test_a_collator_reaches_workers_that_have_not_imported_its_file(tmp_path):
    pickled = pickle.dumps(collator(tmp_path))
    for name in [name for name in sys.modules if name.startswith("effilaunch_hooks_")]:
        del sys.modules[name]
    assert pickle.loads(pickled)([1, 2]) == {"n": 2}


@pytest.mark.parametrize(
    ("workers", "context", "refused"),
    [(0, "spawn", False), (2, "fork", False), (2, "spawn", True), (2, "forkserver", True)],
)
def test_a_collator_that_workers_cannot_get_is_refused(tmp_path, workers, context, refused):
    check_collator(collator(tmp_path), workers=workers, context=context)
    unpicklable = collator(tmp_path, more=" and (lambda samples: {})")
    if not refused:
        check_collator(unpicklable, workers=workers, context=context)
        return
    with pytest.raises(RecipeError) as caught:
        check_collator(unpicklable, workers=workers, context=context)
    problem = caught.value.problems[0]
    assert (problem.code, problem.file) == ("collator-not-picklable", str(tmp_path / "hooks.py"))


@pytest.mark.parametrize(("made", "kind", "code"), [("[]", RecipeError, "hook-result"),
                                                    ("1 / 0", RunFailed, "hook-failed")])  # fmt: skip
def test_what_a_collator_makes_is_judged(tmp_path, made, kind, code):
    with pytest.raises(kind) as caught:
        collator(tmp_path, made)([])
    assert caught.value.problems[0].code == code


def test_a_file_that_has_changed_since_the_plan_is_refused(tmp_path):
    (tmp_path / "hooks.py").write_text("def make_datasets(): return [1], None\n")
    settings = {"python.file": str(tmp_path / "hooks.py"), "python.hooks": ["make_datasets"]}
    settings["python.digest"] = digest_of(tmp_path / "hooks.py")
    job = Job(tmp_path, {"settings": {key: {"value": value} for key, value in settings.items()}})
    assert load_hooks(job).digest == settings["python.digest"]
    (tmp_path / "hooks.py").write_text("def make_datasets(): return [2], None\n")
    with pytest.raises(RecipeError) as caught:
        load_hooks(job)
    assert caught.value.problems[0].code == "hooks-changed"


def test_an_error_below_other_code_is_not_the_files(tmp_path):
    """What fails below transformers' own Trainer, called by the user's, may be another rank's failure."""
    beside = tmp_path / "transformers"
    beside.mkdir()
    (beside / "trainer.py").write_text("def step():\n    raise ValueError('peer')\n")
    (tmp_path / "hooks.py").write_text(
        "def run(step):\n    step()\n\ndef fail():\n    raise ValueError('own')\n"
    )
    own, theirs = import_file(tmp_path / "hooks.py"), import_file(beside / "trainer.py")
    job = Job(tmp_path, {"settings": {"python.file": {"value": str(tmp_path / "hooks.py")}}})
    with pytest.raises(ValueError, match="peer"), placed_in_file(job):
        own.run(theirs.step)
    with pytest.raises(RunFailed) as caught, placed_in_file(job):
        own.fail()
    assert caught.value.problems[0].line == 5
