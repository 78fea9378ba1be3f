"""`import effilaunch`: the objects of the commands, their errors, and what is imported for them."""

from __future__ import annotations

import html
import json
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from factories import BASE
from reports import metrics, write_finished, write_run

import effilaunch
from launcher.cli import main
from launcher.commands.run import run_recipe
from launcher.report import run_pages

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests/corpus/known/bf16-no-device.log"
ON = "8xA100-80GB"
TOO_LARGE = {"adapter": None, "trainer.max_steps": 3}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def printed(capsys, *words, code=0):
    """The JSON of a command."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(error, call, *arguments, **named):
    """Code, key and exit status of each problem."""
    with pytest.raises(error) as caught:
        call(*arguments, **named)
    return [(problem.code, problem.path) for problem in caught.value.problems]


CHILD = """
import sys
import effilaunch
print(sorted(name for name in sys.modules if name.split(".")[0] not in sys.stdlib_module_names))
if sys.argv[1:]:
    recipe, log, run = sys.argv[1:]
    effilaunch.plan(recipe, on="8xA100-80GB").to_html()
    effilaunch.search(recipe, on="8xA100-80GB")
    effilaunch.diagnose(log)
    effilaunch.result(run).to_html()
    from launcher.commands import run
    heavy = {"torch", "transformers", "datasets", "accelerate", "peft", "deepspeed", "numpy", "pandas"}
    print(sorted(heavy & set(sys.modules)))
"""


def child(*arguments, path, options=()):
    """The two lines of CHILD, in an interpreter that has this folder alone as its path."""
    command = [sys.executable, *options, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n" + CHILD]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_heavy_is_imported_before_a_run(file, tmp_path):
    run = write_finished(tmp_path / "run")
    assert child(file, LOG, run, path=ROOT)[1] == "[]"


def test_a_copy_of_the_file_imports_the_standard_library_alone(tmp_path):
    shutil.copy(ROOT / "effilaunch.py", tmp_path)
    assert child(path=tmp_path, options=("-I", "-S")) == ["['__main__', 'effilaunch']"]


def test_a_plan_is_that_of_the_command(file, capsys):
    plan = effilaunch.plan(file, on=ON, set={"trainer.max_steps": 7})
    assert plan.to_json() == printed(capsys, "plan", file, "--on", ON, "--set", "trainer.max_steps=7")
    assert (plan.fits, plan.steps, plan.settings["trainer.max_steps"]) == (True, 7, 7)
    assert plan.batch["micro"] * plan.batch["accumulation"] * plan.batch["data_parallel"] == 64
    assert plan.files["recipe.yaml"] == BASE
    assert plan.explain("trainer.max_steps").startswith("trainer.max_steps = 7\n  from override, --set:")
    assert refused(effilaunch.RecipeError, plan.explain, "nope") == [("unknown-setting", "nope")]
    assert main(["plan", str(file), "--on", ON, "--set", "trainer.max_steps=7"]) == 0
    assert str(plan).strip() == capsys.readouterr().out.strip()


def test_a_plan_in_a_notebook_is_the_page_in_a_frame(file, tmp_path, monkeypatch):
    monkeypatch.setattr(run_pages, "made", lambda: "Written now.")
    page = tmp_path / "page.html"
    assert main(["plan", str(file), "--on", ON, "--html", str(page)]) == 0
    shown = effilaunch.plan(file, on=ON)._repr_html_()
    (framed,) = re.findall(r'^<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>$', shown)
    assert html.unescape(framed) == page.read_text(encoding="utf-8")


def test_a_search_is_that_of_the_command(file, capsys):
    found = effilaunch.search(file, on=ON)
    assert found.to_json() == printed(capsys, "plan", file, "--on", ON, "--search")
    assert found.rows[0]["rank"] == 1
    assert found.rows[0]["settings"].items() <= found.settings.items()
    assert main(["plan", str(file), "--on", ON, "--search"]) == 0
    assert str(found).strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize(("call", "option"), [(effilaunch.plan, ()), (effilaunch.search, ("--search",))])
def test_what_does_not_fit_raises_with_the_nearest_miss(file, capsys, call, option):
    with pytest.raises(effilaunch.DoesNotFit) as caught:
        call(file, set=TOO_LARGE, on="1xT4-16GB")
    wrong = caught.value
    assert (wrong.exit_code, wrong.nearest_miss.fits) == (3, False)
    words = ("--set", "adapter=null", "--set", "trainer.max_steps=3", *option)
    shown = printed(capsys, "plan", file, "--on", "1xT4-16GB", *words, code=3)
    assert wrong.nearest_miss.to_json() == shown
    assert [dict(one.change) for one in wrong.would_fit] == [one["change"] for one in shown["would_fit"]]


VALUES = {
    "trainer.learning_rate": 1e-5,
    "trainer.run_name": "no",
    "data.max_length": 77,
    "data.train[0].columns": {"prompt": "a: b", "completion": "null"},
    "launch.env": {"A": "1"},
    "adapter": None,
}


def test_values_are_set_as_they_are(file):
    loaded = effilaunch.load(file, set=VALUES).recipe
    assert loaded.trainer["learning_rate"] == 1e-5
    assert loaded.trainer["run_name"] == "no"
    assert loaded.data.train[0].columns == VALUES["data.train[0].columns"]
    assert (loaded.data.max_length, loaded.launch.env, loaded.adapter) == (77, {"A": "1"}, None)
    path = file.parent / "rows here.jsonl"
    assert effilaunch.load(file, set={"data.train[0].path": path}).recipe.data.train[0].path == str(path)


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({"trainer.max_stepz": 1}, [("unknown-key", "trainer.max_stepz")]),
        (
            {"trainer.seed": object(), "adapter": {1, 2}},
            [("override", "trainer.seed"), ("override", "adapter")],
        ),
        (["trainer.max_steps=1"], [("override", None)]),
        ("trainer.max_steps=1", [("override", None)]),
        ({"": 1}, [("override", None)]),
    ],
)
def test_values_that_no_recipe_can_have_are_refused(file, given, problems):
    assert refused(effilaunch.RecipeError, effilaunch.load, file, set=given) == problems


def test_a_loaded_recipe_stays_as_it_was_loaded(file):
    loaded = effilaunch.load(file, set={"trainer.max_steps": 5})
    file.write_text(BASE.replace("max_steps: 10", "max_steps: 99"), encoding="utf-8")
    assert effilaunch.plan(loaded, on=ON).steps == 5
    again = effilaunch.plan(loaded, set={"seed": 7}, on=ON)
    assert (again.steps, again.settings["seed"]) == (5, 7)


def test_errors_are_those_of_the_command_line(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hidden-sesame-12345")
    other = tmp_path / "axolotl.yml"
    other.write_text("base_model: a/b\ndatasets: [{path: rows.jsonl, type: alpaca}]\nadapter: lora\n")
    for recipe, words in (("hidden-sesame-12345", {}), (other, {}), (file, {"global_batch_size": "x"})):
        with pytest.raises(effilaunch.RecipeError) as caught:
            effilaunch.load(recipe, set=words)
        overrides = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
        shown = printed(capsys, "plan", recipe, *overrides, code=2)["errors"]
        assert [problem.to_json() for problem in caught.value.problems] == shown
        assert "sesame" not in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_the_errors_are_the_classes_of_the_command_line():
    codes = {name: getattr(effilaunch, name).exit_code for name in effilaunch.__all__ if "Error" in name}
    assert codes == {"EffilaunchError": 70, "MachineError": 4, "RecipeError": 2}
    assert [effilaunch.DoesNotFit.exit_code, effilaunch.RunFailed.exit_code] == [3, 5]
    assert effilaunch.Interrupted.exit_code == 130
    with pytest.raises(AttributeError):
        _ = effilaunch.nope


def test_a_diagnosis_is_that_of_the_command(capsys):
    found = effilaunch.diagnose(LOG)
    assert found.to_json() == printed(capsys, "diagnose", LOG)
    assert [one["id"] for one in found.findings] == ["bf16-no-device"]
    text = effilaunch.diagnose(LOG.read_text(encoding="utf-8"))
    assert [one["id"] for one in text.findings] == ["bf16-no-device"]
    assert text.findings[0]["mend"] == found.findings[0]["mend"]
    assert "bf16-no-device" in str(text)
    assert refused(effilaunch.RecipeError, effilaunch.diagnose, "bf16 no device") == [
        ("log-unreadable", None)
    ]
    unknown = effilaunch.diagnose('Traceback (most recent call last):\n  File "a.py", line 1\nMyError: no\n')
    assert (unknown.findings, unknown.unknown[0]["message"]) == ([], "no")


def test_the_result_of_a_run_directory(tmp_path):
    found = effilaunch.result(write_finished(tmp_path / "run"))
    assert (found.state, found.steps, found.loss, found.scores) == ("finished", 40, 0.52, {"eval_loss": 0.57})
    assert found.seconds == 95.0
    assert [row["step"] for row in found.metrics if "loss" in row] == list(range(1, 41))
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found.to_json() == {
        "schema_version": 1, "command": "run", "run_dir": str(tmp_path / "run"), "result": stored,
    }  # fmt: skip
    assert "<iframe" in found._repr_html_()
    assert str(found).startswith("done\n")
    failed = effilaunch.result(write_run(tmp_path / "failed", metrics=metrics(3)))
    assert (failed.state, failed.steps, failed.to_json()["result"]) == ("failed", 3, {})
    assert str(failed).startswith("failed\n")
    assert refused(effilaunch.RecipeError, effilaunch.result, tmp_path / "no") == [("no-run-dir", None)]


def test_a_run_outside_the_main_thread_is_refused(file):
    told = []

    def call():
        told.append(refused(effilaunch.RecipeError, effilaunch.run, file, on="cpu"))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert told == [[("usage", None)]]


def test_a_run_gets_what_was_asked(file, tmp_path, monkeypatch):
    """What runs is the command's own function; a real run is in process/test_notebook.py."""
    asked = {}

    def stand_in(loaded, **options):
        asked.update(options, steps=loaded.recipe.trainer["max_steps"])
        return type("Done", (), {"data": {"run_dir": str(write_finished(tmp_path / "out"))}})

    monkeypatch.setattr("launcher.commands.run.run_recipe", stand_in)
    assert run_recipe is not stand_in
    done = effilaunch.run(
        file, set={"trainer.max_steps": 3}, on="cpu", tiny=True, resume="auto", output_dir=tmp_path / "out"
    )
    assert done.run_dir == tmp_path / "out"
    assert asked == {
        "on": "cpu", "tiny": True, "resume": "auto", "output_dir": str(tmp_path / "out"), "steps": 3,
    }  # fmt: skip
