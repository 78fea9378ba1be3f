"""Code that a run directory of another user names: nothing of it runs before somebody said yes."""

from __future__ import annotations

import io
import json
import os

import pytest

from launcher.cli import main
from launcher.execute.run_dir import MARKER
from launcher.inputs import finished_run

STRANGER = 54321
HOOKS = (
    "import pathlib\npathlib.Path(__file__).with_name('RAN').touch()\n\n\ndef callbacks():\n    return []\n"
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def run(tmp_path):
    """A finished run whose plan names a hook file, all of it the user's own."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / MARKER).touch()
    (folder / "hooks.py").write_text(HOOKS)
    plan(folder, {"python.file": str(folder / "hooks.py"), "python.hooks": ["callbacks"]})
    return folder


def plan(folder, settings, **beside):
    values = {"task": "causal-lm", **settings}
    text = json.dumps({"settings": {key: {"value": value} for key, value in values.items()}, **beside})
    (folder / "plan.json").write_text(text)


def code_of(capsys, command, folder, *more):
    words = [command, str(folder), *(["Hello"] if command == "generate" else []), *more, "--json"]
    assert main(words) in (2, 4, 5, 70)
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    return problem["code"]


@pytest.mark.parametrize("foreign", [".", "plan.json", "hooks.py"])
def test_eval_asks_before_it_runs_a_strangers_hooks(run, capsys, foreign):
    finished_run.consent_to_code(run, "eval", hooks=True, allowed=False)  # all of it is the user's own
    os.chown(run / foreign, STRANGER, -1)
    assert code_of(capsys, "eval", run) == "foreign-code"
    assert code_of(capsys, "eval", run, "--checkpoint", "checkpoint-1") == "foreign-code"
    assert not (run / "RAN").exists()
    assert code_of(capsys, "eval", run, "--allow-code") == "not-trained"


@pytest.mark.parametrize("size", [17 << 20, 40 << 20])
def test_a_large_plan_is_asked_about_too(run, capsys, size):
    plan(run, {"python.file": str(run / "hooks.py"), "python.hooks": ["callbacks"]}, pad="x" * size)
    os.chown(run, STRANGER, -1)
    assert code_of(capsys, "eval", run) == "foreign-code"
    assert not (run / "RAN").exists()


def test_a_plan_above_the_limit_is_refused_by_the_question_and_by_the_worker(run, capsys, monkeypatch):
    monkeypatch.setattr("launcher.train.job.LARGEST_RECORD", 10)
    os.chown(run, STRANGER, -1)
    for more in ((), ("--allow-code",)):
        assert code_of(capsys, "eval", run, *more) == "bad-plan"
    assert not (run / "RAN").exists()


@pytest.mark.parametrize("command", ["eval", "generate", "merge"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, None])
def test_without_a_readable_plan_nothing_is_taken_for_harmless(run, capsys, command, content):
    (run / "plan.json").unlink()
    if content is not None:
        (run / "plan.json").write_bytes(content)
    os.chown(run, STRANGER, -1)
    assert code_of(capsys, command, run) == "bad-plan"


@pytest.mark.parametrize("setting", ["${ENV:SOME_HOOKS}", "${ENV:NOT_SET:hooks.py}"])
def test_a_hook_file_named_by_a_variable_is_the_one_whose_owner_counts(run, capsys, monkeypatch, setting):
    monkeypatch.setenv("SOME_HOOKS", str(run / "hooks.py"))
    monkeypatch.chdir(run)
    plan(run, {"python.file": setting, "python.hooks": ["callbacks"]})
    os.chown(run / "hooks.py", STRANGER, -1)
    assert code_of(capsys, "eval", run) == "foreign-code"


@pytest.mark.parametrize("command", ["eval", "generate", "merge"])
def test_a_models_own_code_is_asked_for_too(run, capsys, command):
    plan(run, {"model.trust_remote_code": True, "model.name_or_path": "org/model"})
    os.chown(run, STRANGER, -1)
    assert code_of(capsys, command, run) == "foreign-code"
    assert code_of(capsys, command, run, "--allow-code") == "not-trained"


@pytest.mark.parametrize("command", ["eval", "generate", "merge"])
@pytest.mark.parametrize("name", ["make_model", "prepare_model"])
def test_a_model_that_the_file_made_is_loaded_by_no_command(run, capsys, command, name):
    plan(run, {"python.file": str(run / "hooks.py"), "python.hooks": ["callbacks", name]})
    assert code_of(capsys, command, run) == "own-model"
    assert not (run / "RAN").exists()


@pytest.mark.parametrize("settings", [{}, {"python.file": None, "model.trust_remote_code": False}])
def test_without_code_nobody_is_asked(run, capsys, settings):
    plan(run, settings)
    os.chown(run, STRANGER, -1)
    for command in ("eval", "generate", "merge"):
        finished_run.consent_to_code(run, command, hooks=True, allowed=False)


def test_a_link_belongs_to_whom_it_leads(run, tmp_path):
    os.chown(run, STRANGER, -1)
    link = tmp_path / "mine"
    link.symlink_to(run)
    with pytest.raises(finished_run.RecipeError):
        finished_run.consent_to_code(link, "eval", hooks=True, allowed=False)


@pytest.mark.parametrize(
    ("answer", "runs"), [("yes\n", True), ("no\n", False), ("\n", False), ("what\nY\n", True)]
)
def test_at_a_terminal_it_is_a_question(run, monkeypatch, capsys, answer, runs):
    os.chown(run, STRANGER, -1)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    monkeypatch.setattr(finished_run, "can_ask", lambda: True)
    if runs:
        finished_run.consent_to_code(run, "eval", hooks=True, allowed=False)
    else:
        with pytest.raises(finished_run.RecipeError):
            finished_run.consent_to_code(run, "eval", hooks=True, allowed=False)
    assert str(run / "hooks.py") in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_what_only_reads_runs_nothing(run, command):
    os.chown(run, STRANGER, -1)
    main([command, str(run), *(["--output", str(run.parent / "page.html")] if command == "report" else [])])
    assert not (run / "RAN").exists()
