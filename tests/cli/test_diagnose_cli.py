"""`diagnose` as a user calls it: text, JSON, exit codes, the changed recipe; and `run` that calls it."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from launcher.cli import main
from launcher.commands.run import with_recipe_lines
from launcher.errors import MachineError, RunFailed
from launcher.execute.endings import run_failure
from launcher.knowledge.failures.catalogue import FAILURES

LOG = """Traceback (most recent call last):
  File "train.py", line 8, in main
    trainer.train()
{error}
"""
UNSCALE = "ValueError: Attempting to unscale FP16 gradients."
RECIPE = """task: causal-lm  # the task
model:
  config: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1,
    intermediate_size: 8, vocab_size: 16}
  dtype: float16  # as it is
data: {train: [{path: rows.jsonl}], max_length: 8}
trainer: {max_steps: 2}
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOG.format(error=UNSCALE))
    return path


@pytest.fixture
def run_dir(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "plan.json").write_text(json.dumps({"recipe": str(recipe)}))
    (folder / "logs" / "rank-0.log").write_text(LOG.format(error="ConnectionError: Connection reset by peer"))
    (folder / "logs" / "rank-1.log").write_text(LOG.format(error=UNSCALE))
    return folder


def report(run_dir, rank, error, **more):
    kind, _, message = error.partition(": ")
    record = {
        "rank": rank,
        "time": 5.0 + rank,
        "type": kind,
        "message": message,
        "exit_code": 1,
        "problems": [],
    }
    record |= {"traceback": LOG.format(error=error), **more}
    (run_dir / "logs" / f"error-rank-{rank}.json").write_text(json.dumps(record))


def answer(capsys, *arguments):
    code = main(["diagnose", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_of_a_log(log, capsys):
    code, found = answer(capsys, log)
    assert code == 0
    assert found["command"] == "diagnose"
    (finding,) = found["findings"]
    assert set(finding) == {
        "id", "title", "cause", "mend", "error", "ranks", "first_rank", "file", "line", "changes", "recipe",
        "did_you_mean", "other_end", "missing_ranks",
    }  # fmt: skip
    assert finding["id"] == "fp16-unscale"
    assert finding["error"]["type"] == "ValueError"
    assert finding["error"]["frames"] == [
        {"file": "train.py", "line": 8, "function": "main", "source": "trainer.train()"}
    ]
    assert (finding["file"], finding["line"]) == (str(log), 4)
    assert (found["unknown"], found["ranks"]) == ([], 1)


def test_recipe_keys_are_named_only_where_there_is_a_recipe(run_dir, log, capsys):
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    (run_dir / "logs" / "rank-1.log").write_text(LOG.format(error=error))
    key = "launch.env.CUDA_LAUNCH_BLOCKING"
    assert key in answer(capsys, run_dir)[1]["findings"][0]["mend"]
    log.write_text(LOG.format(error=error))
    advice = answer(capsys, log)[1]["findings"][0]["mend"]
    assert key not in advice
    assert "CUDA_LAUNCH_BLOCKING=1" in advice
    log.write_text(LOG.format(error=error).replace("train.py", "/v/launcher/train/worker.py"))
    assert key in answer(capsys, log)[1]["findings"][0]["mend"], "a run of this project"


def test_text_has_cause_fix_and_recipe_before_the_traceback(run_dir, capsys):
    assert main(["diagnose", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fp16-unscale: ")
    assert lines[0].endswith(" (rank 1)")
    assert lines[1].startswith("  cause: ")
    assert lines[2].startswith("  fix: ")
    assert lines[4] == f"    {run_dir.parent}/mine.yaml:5: model.dtype: float16 -> float32"
    assert lines[-1] == f"  {UNSCALE}"


def test_apply_writes_beside_the_original_recipe(run_dir, capsys):
    code, found = answer(capsys, run_dir, "--apply")
    fixed = run_dir.parent / "mine.mended.yaml"
    assert (code, found["mended"]) == (0, str(fixed))
    assert fixed.read_text() == RECIPE.replace("dtype: float16  #", "dtype: float32  #")
    code, found = answer(capsys, run_dir, "--apply")
    assert (code, found["errors"][0]["code"]) == (2, "mended-exists")


def test_a_shipped_recipe_is_changed_in_the_current_folder(run_dir, capsys, monkeypatch, tmp_path):
    shipped = tmp_path / "installed"
    shipped.mkdir()
    (shipped / "mine.yaml").write_text(RECIPE)
    (run_dir / "plan.json").write_text(json.dumps({"recipe": str(shipped / "mine.yaml")}))
    monkeypatch.setattr("launcher.commands.diagnose.recipes_dir", lambda: shipped)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    code, found = answer(capsys, run_dir, "--apply")
    assert (code, found["mended"]) == (0, str(here / "mine.mended.yaml"))
    assert "dtype: float32" in (here / "mine.mended.yaml").read_text()
    assert [path.name for path in shipped.iterdir()] == ["mine.yaml"]


def test_apply_needs_a_recipe(log, capsys):
    code, found = answer(capsys, log, "--apply")
    assert (code, found["errors"][0]["code"]) == (2, "no-recipe")


def test_an_unknown_failure_is_said_to_be_unknown(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(LOG.format(error="KeyError: 'mine'"))
    code, found = answer(capsys, path)
    assert (code, found["findings"]) == (0, [])
    (unknown,) = found["unknown"]
    assert (unknown["type"], unknown["message"], unknown["line"]) == ("KeyError", "'mine'", 4)
    assert main(["diagnose", str(path)]) == 0
    assert capsys.readouterr().out.startswith("unknown failure\n")


def test_standard_input_and_no_failure(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"all is well\n")))
    assert main(["diagnose", "-"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "    all is well"


def test_a_run_without_a_failure_and_without_a_result_is_not_called_well(run_dir, capsys):
    """A disk without room for logs leaves neither."""
    for log in (run_dir / "logs").iterdir():
        log.write_text("all is well\nProcess 812 exits successfully.\n")
    code, found = answer(capsys, run_dir)
    assert (code, found["findings"], found["unknown"], found["unfinished"]) == (0, [], [], str(run_dir))
    assert not found["succeeded"]
    assert main(["diagnose", str(run_dir)]) == 0
    assert str(run_dir) in capsys.readouterr().out
    (run_dir / "COMPLETED").touch()
    assert answer(capsys, run_dir)[1]["unfinished"] is None


def test_a_log_that_is_absent(tmp_path, capsys):
    code, found = answer(capsys, tmp_path / "absent.log")
    assert (code, found["errors"][0]["code"]) == (2, "log-unreadable")


def test_a_failed_run_is_named_after_the_known_failure(run_dir):
    report(run_dir, 1, UNSCALE)
    report(run_dir, 0, "ConnectionError: Connection reset by peer")
    error = run_failure(run_dir, 1, "launcher.log")
    assert isinstance(error, RunFailed)
    assert error.exit_code == 5
    (problem,) = error.problems
    assert problem.code == "fp16-unscale"
    assert "rank 1 failed first: ValueError: Attempting to unscale FP16 gradients." in problem.message
    assert problem.hint == next(failure.fix for failure in FAILURES if failure.id == "fp16-unscale")
    assert problem.file == str(run_dir / "logs" / "rank-1.log")


def test_a_failed_run_names_the_lines_of_its_recipe(run_dir):
    report(run_dir, 1, UNSCALE)
    recipe = run_dir.parent / "mine.yaml"
    failure = with_recipe_lines(run_failure(run_dir, 1, "launcher.log"), recipe, run_dir)
    (problem,) = failure.problems
    assert (failure.exit_code, problem.code) == (5, "fp16-unscale")
    assert problem.hint.endswith(
        f"`effilaunch diagnose {run_dir} --apply` changes {recipe}:5: model.dtype: float16 -> float32"
    )


def test_a_failed_run_that_no_change_of_the_recipe_fixes_names_no_line(run_dir):
    report(run_dir, 1, "RuntimeError: Weights only load failed: rng_state_1.pth")
    (run_dir / "logs" / "rank-1.log").write_text("")
    known = run_failure(run_dir, 1, "launcher.log")
    assert known.problems[0].code == "rng-weights-only"
    assert with_recipe_lines(known, run_dir.parent / "mine.yaml", run_dir) is known


def test_a_worker_that_was_killed_without_a_word(run_dir):
    for path in (run_dir / "logs").glob("rank-*.log"):
        path.write_text("training\n")
    (run_dir / "logs" / "launcher.log").write_text(
        "[ERROR] [launch.py:1:x] python exits with return code = -9\n"
    )
    (problem,) = run_failure(run_dir, 247, "launcher.log").problems
    assert (problem.code, problem.file) == ("sigkill-oom", str(run_dir / "logs" / "launcher.log"))


KILLED = "  exitcode  : -9 (pid: 12)\n"


@pytest.mark.parametrize(
    ("oom", "log", "ids"),
    [
        (False, KILLED, []),
        (None, KILLED, ["sigkill-oom"]),
        (True, KILLED, ["sigkill-oom"]),
        (False, "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.\n", ["sigkill-oom"]),
    ],
)
def test_what_the_supervisor_saw_of_a_killed_rank_counts(run_dir, capsys, oom, log, ids):
    """The kernel's counters may say that it was not for its memory."""
    for path in (run_dir / "logs").glob("rank-*.log"):
        path.write_text("training\n")
    (run_dir / "logs" / "launcher.log").write_text(log)
    lost = {"message": "rank 1 (pid 12) was killed by SIGKILL, last step 4", "ranks": [1], "oom": oom}
    (run_dir / "logs" / "lost.json").write_text(json.dumps(lost))
    code, data = answer(capsys, run_dir)
    assert code == 0
    assert [found["id"] for found in data["findings"]] == ids
    said = "rank 1 (pid 12) was killed by SIGKILL, last step 4; the kernel's OOM killer did not do it"
    assert [unknown["message"] for unknown in data["unknown"]] == ([] if ids else [said])
    assert [unknown["ranks"] for unknown in data["unknown"]] == ([] if ids else [[1]])


@pytest.mark.parametrize("oom", [False, None, True])
def test_a_killed_rank_is_a_failure_without_a_line_in_a_log(run_dir, capsys, oom):
    for path in (run_dir / "logs").glob("rank-*.log"):
        path.write_text("training\n")
    lost = {"message": "rank 1 (pid 12) was killed by SIGKILL, last step 4", "ranks": [1], "oom": oom}
    (run_dir / "logs" / "lost.json").write_text(json.dumps(lost))
    code, data = answer(capsys, run_dir)
    (unknown,) = data["unknown"]
    assert (code, data["findings"], unknown["ranks"], unknown["line"]) == (0, [], [1], 1)
    assert unknown["file"].endswith("logs/lost.json")
    assert unknown["message"].startswith(lost["message"])
    assert ("OOM killer" in unknown["message"]) == (oom is True)
    (run_dir / "COMPLETED").touch()
    assert answer(capsys, run_dir)[1]["unknown"] == []


def test_an_unknown_failure_of_a_run_keeps_its_own_words(run_dir):
    report(run_dir, 1, "KeyError: 'mine'")
    (run_dir / "logs" / "rank-1.log").write_text("")
    (problem,) = run_failure(run_dir, 1, "launcher.log").problems
    assert (problem.code, problem.message) == ("run-failed", "rank 1 failed first: KeyError: 'mine'")


def test_a_problem_of_the_worker_keeps_its_exit_code(run_dir):
    problem = {"code": "no-device", "message": "no GPU is visible"}
    report(run_dir, 1, UNSCALE, exit_code=4, problems=[problem])
    error = run_failure(run_dir, 4, "launcher.log")
    assert (type(error), error.problems[0].code) == (MachineError, "no-device")
