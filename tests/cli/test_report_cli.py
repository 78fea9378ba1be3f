"""`report` and `plan --html`: the path of the file, what is refused, the JSON object."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reports import metrics, planned, read_page, result, write_finished, write_run

from launcher.cli import main
from launcher.commands.report import unlike
from launcher.errors import Interrupted, Problem, RunFailed
from launcher.report.run_pages import reported


@pytest.fixture(scope="module", autouse=True)
def plan_made_before():
    """Outside of any test's output."""
    planned()


def problem(capsys) -> dict:
    return json.loads(capsys.readouterr().out)["errors"][0]


def test_a_report_is_written_into_its_run_directory_again(tmp_path, capsys):
    run = write_finished(tmp_path / "a")
    for _ in range(2):
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out == f"wrote {run}/report.html\n"
    assert "✓ finished" in read_page(run / "report.html")


def test_json_has_the_numbers(tmp_path, capsys, root):
    run = write_finished(tmp_path / "a")
    assert main(["report", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == f"{run}/report.html"
    (facts,) = said["runs"]
    page = (root / "docs" / "reports.md").read_text("utf-8").partition("## JSON")[2]
    assert {*said, *facts} - {"schema_version", "command"} <= set(re.findall(r"`(\w+)`", page))
    assert facts.pop("recipe").endswith("tiny.yaml")
    predicted = facts["memory"].pop("predicted")
    assert predicted == json.loads((run / "plan.json").read_text("utf-8"))["memory"]["total"]
    measured = {"measured": int(3.8 * 2**30)}
    assert facts == {
        "run_dir": str(run), "state": "finished", "steps": 40, "loss": {"first": 1.4, "last": 0.52},
        "eval": {"eval_loss": 0.57}, "seconds": 95.0, "tokens_per_second": 227.6,
        "memory": measured, "restarts": 0, "diagnosis": None,
    }  # fmt: skip


def test_two_runs_are_compared_in_a_new_file_here(tmp_path, monkeypatch, capsys):
    first = write_finished(tmp_path / "a")
    second = write_finished(tmp_path / "b", result=result(tokens_per_second=400.0))
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    assert main(["report", "a", "b", "--json"]) == 0
    assert read_page(tmp_path / "report-a-b.html").count("✓ finished") == 2
    said = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert (said["report"], said["differs"]) == ("report-a-b-2.html", {})
    assert [run["run_dir"] for run in said["runs"]] == [str(first), str(second)]
    assert not (first / "report.html").exists()


def test_a_named_file_is_never_overwritten(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    target = tmp_path / "mine.html"
    assert main(["report", str(run), "--output", str(target)]) == 0
    text = target.read_bytes()
    capsys.readouterr()
    assert main(["report", str(run), "--output", str(target), "--json"]) == 2
    assert problem(capsys)["code"] == "file-exists"
    assert target.read_bytes() == text
    assert main(["report", str(run), "--output", str(tmp_path / "no" / "x.html"), "--json"]) == 2
    assert problem(capsys)["code"] == "file-unwritable"


def test_what_cannot_be_reported_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    for arguments, code in ((["absent"], "no-run-dir"), ([str(run), f"{run}/../a"], "usage")):
        assert main(["report", *arguments, "--json"]) == 2
        assert problem(capsys)["code"] == code
    (run / "plan.json").write_bytes(b"\xff{")
    assert main(["report", str(run), "--json"]) == 2
    assert problem(capsys)["code"] == "no-run-dir"


def test_a_failed_run_is_diagnosed(tmp_path, capsys):
    run = write_run(tmp_path / "a", metrics=metrics(7))
    calls = 'Traceback (most recent call last):\n  File "m.py", line 3, in f\n    g()\n'
    words = "CUDA out of memory. Tried to allocate 2.00 GiB."
    error = {"rank": 0, "time": 1.0, "type": "torch.OutOfMemoryError", "message": words}
    error["traceback"] = f"{calls}torch.OutOfMemoryError: {words}\n"
    (run / "logs" / "error-rank-0.json").write_text(json.dumps(error), "utf-8")
    assert main(["report", str(run), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["runs"]
    assert facts["state"] == "failed"
    assert facts["diagnosis"]["findings"][0]["id"] == "cuda-oom"
    page = read_page(run / "report.html")
    assert "What went wrong" in page
    assert "cuda-oom" in page


def test_no_secret_of_the_environment_is_written(tmp_path, monkeypatch):
    secret = 'hf_"secret&<value>'
    monkeypatch.setenv("MY_TOKEN", secret)
    run = write_finished(tmp_path / "a")
    (run / "recipe.yaml").write_text(f"# {secret}\n", "utf-8")
    assert main(["report", str(run)]) == 0
    page = read_page(run / "report.html")
    assert "&lt;secret&gt;" in page
    assert "hf_" not in page


def test_a_plan_is_a_page_too(tmp_path, monkeypatch, capsys, root):
    monkeypatch.chdir(tmp_path)
    recipe = str(root / "recipes" / "starcoder_lora.yaml")
    assert main(["plan", recipe, "--on", "8xA100-80GB", "--html"]) == 0
    assert capsys.readouterr().out.endswith("\nwrote starcoder_lora-plan.html\n")
    page = read_page(Path("starcoder_lora-plan.html"))
    assert "planned, nothing was started" in page
    assert "bigcode/starcoder" in page
    assert main(["plan", recipe, "--html", "--json"]) == 2, "it is there"
    assert problem(capsys)["code"] == "file-exists"
    assert main(["plan", recipe, "--on", "1x24GB", "--html", "miss.html", "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["page"] == "miss.html"
    assert "does not fit" in read_page(Path("miss.html"))


def test_a_run_writes_its_report_however_it_ends(tmp_path):
    said: list[str] = []
    finished, stopped, failed = (write_run(tmp_path / name) for name in "abc")
    with reported(finished, said.append):
        begun = read_page(finished / "report.html")
        assert "trainer.learning_rate" in begun, "the plan can be read while it runs"
        assert "✓ finished" not in begun
        (finished / "COMPLETED").touch()
    with pytest.raises(Interrupted), reported(stopped, said.append):
        raise Interrupted(Problem("interrupted", "SIGTERM: it goes on from checkpoint-4"))
    with pytest.raises(RunFailed), reported(failed, said.append):
        raise RunFailed(Problem("hang", "rank 3 hangs in an all-reduce"))
    assert said == [f"report: {run}/report.html" for run in (finished, stopped, failed)]
    pages = [read_page(run / "report.html") for run in (finished, stopped, failed)]
    assert "✓ finished" in pages[0]
    assert "■ stopped" in pages[1]
    assert "rank 3 hangs in an all-reduce" in pages[2]
    for run, state in ((stopped, "■ stopped"), (failed, "rank 3 hangs in an all-reduce")):
        assert main(["report", str(run)]) == 0
        assert state in read_page(run / "report.html"), "and a later report still knows"


def test_a_report_that_cannot_be_written_changes_nothing(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "a")
    monkeypatch.setattr("launcher.report.run_pages.run_page", lambda *_: 1 / 0)
    with reported(run, print):
        pass
    assert "report.html was not written: division by zero" in capsys.readouterr().err
    with reported(tmp_path / "absent", print):
        pass
    assert capsys.readouterr().out == ""


def test_names_of_runs_are_as_short_as_possible():
    assert unlike([("r", "x", "1"), ("r", "x", "2")]) == ["1", "2"]
    assert unlike([("r", "x", "1"), ("r", "y", "1")]) == ["x/1", "y/1"]
