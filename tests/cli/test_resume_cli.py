"""`run --resume` in process, with scripts in place of the workers: what is chosen, refused and left alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import checkpoint

from launcher.cli import main
from launcher.commands import run
from launcher.errors import Interrupted, Problem, RunFailed
from launcher.execute import start_point
from launcher.files.checkpoint import FINISHED_BEFORE, complete_checkpoints
from launcher.inputs.finished_run import finished_run
from launcher.render.bundle import render

RECIPE = """\
model: {name_or_path: Qwen/Qwen3-0.6B}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], max_length: 32}
global_batch_size: 8
sharding: {engine: ddp}
trainer: {max_steps: 6, learning_rate: 1.0e-4, save_steps: 2, per_device_train_batch_size: 4}
"""
PREPARE = """
import hashlib, json, pathlib, sys
run = pathlib.Path(sys.argv[1])
plan = json.loads((run / "plan.json").read_text())
rows = pathlib.Path(plan["settings"]["data.train"]["value"][0]["path"]).read_bytes()
(run / "data.json").write_text(json.dumps({"key": hashlib.sha256(rows).hexdigest()[:32]}))
"""
WORKER = """
import json, os, pathlib, sys
run = pathlib.Path(sys.argv[1])
with (run / "resumed").open("a") as file:
    file.write(os.environ.get("EFFILAUNCH_RESUME", "nothing") + "\\n")
plan = json.loads((run / "plan.json").read_text())
steps = plan["settings"]["trainer.max_steps"]["value"]
if os.environ.get("DIES") == str(steps):
    sys.exit(3)
(run / "result.json").write_text(json.dumps({"steps": steps}))
(run / "COMPLETED").write_text("")
"""


class Runs:
    """A recipe's folder, and the command line in it."""

    def __init__(self, folder: Path, capsys) -> None:
        self.folder, self.out, self._capsys = folder, folder / "out", capsys
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
        (folder / "r.yaml").write_text(RECIPE)

    def __call__(self, *argv: object, on: str = "2xA100-80GB", out: Path | None = None):
        """Exit code, JSON envelope, and what was said beside it."""
        words = ["run", self.folder / "r.yaml", "--on", on, "--output-dir", out or self.out, "--json", *argv]
        code = main([str(word) for word in words])
        captured = self._capsys.readouterr()
        assert code != 70, captured.out + captured.err
        return code, json.loads(captured.out), captured.err

    def resumed(self) -> list[str]:
        return (self.out / "resumed").read_text().split("\n")[:-1]

    def checkpoint(self, step: int, ranks: int = 2) -> Path:
        """A whole checkpoint of the run as it is planned now."""
        folder = self.out / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (folder / "weights.bin").write_bytes(b"w" * 1000)
        (folder / "plan.json").write_bytes((self.out / "plan.json").read_bytes())
        files = {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in folder.iterdir()
        }
        data = json.loads((self.out / "data.json").read_text())["key"]
        manifest = {
            "schema_version": 1, "step": step, "world_size": ranks, "files": files, "data": data,
            "bytes": sum(facts["bytes"] for facts in files.values()), "seconds": 0.1,
            "versions": {"torch": "2.0.0"},
        }  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    def interrupted(self) -> None:
        (self.out / "COMPLETED").unlink()


@pytest.fixture
def runs(tmp_path, monkeypatch, capsys):
    def rendered(plan):
        scripts = (("prepare", PREPARE), ("command", WORKER))
        argvs = {name: (sys.executable, "-c", script, "{run_dir}") for name, script in scripts}
        return replace(render(plan), **argvs)

    monkeypatch.setattr(run, "render", rendered)
    monkeypatch.setattr(run, "check_machine", lambda plan, nodes=None: [])
    monkeypatch.setattr(run, "remember_run", lambda *_: "")
    monkeypatch.setattr(run, "result_text", lambda *_, **__: "")
    return Runs(tmp_path, capsys)


@pytest.fixture
def stopped(runs):
    """A run that was killed after two checkpoints."""
    assert runs()[0] == 0
    runs.checkpoint(2)
    runs.checkpoint(4)
    runs.interrupted()
    return runs


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_auto_begins_where_nothing_is_there_yet(runs, monkeypatch):
    monkeypatch.setenv("EFFILAUNCH_RESUME", "/from/elsewhere")
    code, _, said = runs("--resume", "auto")
    assert code == 0
    assert "no checkpoint to resume from: the run starts from the beginning" in said
    assert runs.resumed() == ["nothing"]


def test_auto_begins_where_no_checkpoint_is_whole(runs):
    assert runs()[0] == 0
    runs.interrupted()
    (runs.out / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    (runs.out / "checkpoints" / ".saving" / "checkpoint-4").mkdir(parents=True)
    changed = RECIPE.replace("r: 8", "r: 4")
    (runs.folder / "r.yaml").write_text(changed)
    code, _, said = runs("--resume", "auto")
    assert code == 0
    assert "checkpoint-2 is skipped: it has no manifest.json" in said
    assert "checkpoint-4 is skipped" in said
    assert runs.resumed() == ["nothing", "nothing"]
    assert (runs.out / "plan.json").read_text().count('"adapter.r"') == 1


def test_auto_goes_on_from_the_newest(stopped):
    code, _, said = stopped("--resume", "auto")
    assert code == 0, said
    newest = stopped.out / "checkpoints" / "checkpoint-4"
    assert stopped.resumed()[1:] == [str(newest)]
    assert f"resumes from {newest} (step 4; " in said
    assert "MiB verified by hash" in said
    assert "version of torch: '2.0.0' -> " in said


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(stopped):
    weights = stopped.out / "checkpoints" / "checkpoint-4" / "weights.bin"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    assert 4 in complete_checkpoints(stopped.out / "checkpoints"), "its size is what it was"
    code, _, said = stopped("--resume", "auto")
    assert code == 0
    assert "checkpoint-4 is skipped: weights.bin" in said
    assert stopped.resumed()[1:] == [str(stopped.out / "checkpoints" / "checkpoint-2")]


def test_a_path_may_be_a_checkpoint_or_a_run(stopped):
    first = stopped.out / "checkpoints" / "checkpoint-2"
    assert stopped("--resume", first)[0] == 0
    stopped.interrupted()
    newest = stopped.checkpoint(6)
    assert stopped("--resume", stopped.out)[0] == 0
    assert stopped.resumed()[1:] == [str(first), str(newest)]


def test_who_goes_back_puts_the_newer_ones_aside(stopped):
    """Killed before its first save, the run goes on from where it went back to."""
    rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3, 4)]
    metrics = stopped.out / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"st')
    (stopped.out / "restarts.jsonl").write_text('{"step": 1, "cause": "x"}\n{"step": 3, "cause": "y"}\n')
    checkpoints = stopped.out / "checkpoints"
    given_up = contents(checkpoints / "checkpoint-4").values()
    (checkpoints / "checkpoint-9").mkdir()  # was never finished
    (checkpoints / "superseded-9").mkdir()
    code, data, said = stopped("--resume", checkpoints / "checkpoint-2")
    assert code == 0
    assert "set aside: checkpoint-4, checkpoint-9, " in said
    names = {"checkpoint-2", "superseded-4", "superseded-9", "superseded-9-2"}
    assert {path.name for path in checkpoints.iterdir()} == names
    assert list(contents(checkpoints / "superseded-4").values()) == list(given_up)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()[:-1]] == [1, 2]
    aside = (stopped.out / "metrics-superseded-9.jsonl").read_text()
    assert [json.loads(line)["step"] for line in aside.splitlines()] == [3, 4]
    assert [row["cause"] for row in data["result"]["restarts"]] == ["x"]
    stopped.interrupted()
    assert stopped("--resume", "auto")[0] == 0
    assert stopped.resumed()[1:] == [str(checkpoints / "checkpoint-2")] * 2
    code, data, _ = stopped("--resume", checkpoints / "superseded-4")
    assert (code, data["errors"][0]["code"]) == (2, "not-a-checkpoint")
    assert "continuation" in data["errors"][0]["message"]


def test_a_stop_is_planned_with_the_steps_that_were_seen(stopped):
    values = {"rank": 0, "host": "h", "pid": 1, "started": 1, "phase": "train", "step": 4, "since": 1.0}
    status = stopped.out / "logs" / "status-rank-0.json"
    status.write_text(json.dumps({**values, "median": 250.0, "code": None}))
    code, _, _ = stopped("--resume", "auto", "--dry-run")
    settings = json.loads((stopped.out / "plan.json").read_text())["settings"]
    assert (code, settings["runtime.stop_seconds"]["value"] >= 250) == (0, True)
    assert int(settings["launch.env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]) >= 250


def test_a_dry_run_goes_back_nowhere(stopped):
    before = contents(stopped.out / "checkpoints")
    assert stopped("--resume", stopped.out / "checkpoints" / "checkpoint-2", "--dry-run")[0] == 0
    assert contents(stopped.out / "checkpoints") == before


def test_a_run_that_came_from_another_one_goes_on_from_there_before_its_first_save(stopped, tmp_path):
    first = stopped.out / "checkpoints" / "checkpoint-2"
    new = tmp_path / "new"
    assert stopped("--resume", first, out=new)[0] == 0
    (new / "COMPLETED").unlink()
    assert stopped("--resume", "auto", out=new)[0] == 0
    assert (new / "resumed").read_text() == f"{first}\n{first}\n"
    (new / "COMPLETED").unlink()
    assert "origin.json" in (new / "command.sh").read_text(), "by hand it goes on from there, too"
    code, data, _ = stopped("--resume", new)
    assert code == 2
    (problem,) = data["errors"]
    assert problem["hint"].endswith(f"--output-dir {new} starts this run from {first}, with which it began")
    (first / "weights.bin").unlink()
    code, data, _ = stopped("--resume", "auto", out=new)
    (problem,) = data["errors"]
    assert (code, problem["code"]) == (2, "checkpoint-damaged")
    assert problem["file"] == str(new / "origin.json")
    assert "the checkpoint is damaged: weights.bin is missing" in problem["message"]
    shutil.rmtree(first)
    code, data, _ = stopped("--resume", "auto", out=new)
    (problem,) = data["errors"]
    assert f"origin.json names {first}, with which this run began" in problem["message"]
    assert "--output-dir" in problem["hint"]


def test_a_start_that_was_cut_off_keeps_where_it_came_from(stopped, monkeypatch, tmp_path):
    """As by Ctrl-C in the conversion of the checkpoint: the same command goes on, and `auto` does."""
    first, new = stopped.out / "checkpoints" / "checkpoint-2", tmp_path / "new"

    def cut_off(*_):
        raise Interrupted(Problem("interrupted", "SIGINT"))

    with monkeypatch.context() as patched:
        patched.setattr(run, "readable_checkpoint", cut_off)
        assert stopped("--resume", first, out=new)[0] == 130
    assert stopped("--resume", "auto", "--dry-run", out=new)[0] == 0
    assert stopped("--resume", first, out=new)[0] == 0
    assert (new / "resumed").read_text() == f"{first}\n"


def test_a_dry_run_keeps_where_it_came_from(stopped, tmp_path):
    first, new = stopped.out / "checkpoints" / "checkpoint-2", tmp_path / "new"
    assert stopped("--resume", first, "--dry-run", out=new)[0] == 0
    assert by_hand(new, tmp_path) == "auto"
    code, data, _ = stopped("--resume", stopped.out / "checkpoints" / "checkpoint-4", out=new)
    assert (code, data["errors"][0]["code"]) == (2, "run-dir-not-empty"), "it is of another origin"
    assert stopped("--resume", "auto", out=new)[0] == 0
    assert (new / "resumed").read_text() == f"{first}\n"
    shutil.copytree(stopped.out / "checkpoints" / "checkpoint-4", new / "checkpoints" / "checkpoint-4")
    code, data, _ = stopped("--resume", first, out=new)
    (problem,) = data["errors"]
    assert (code, problem["code"]) == (2, "run-dir-not-empty")
    assert "has saved checkpoints of its own since" in problem["message"]
    assert "--resume auto" in problem["hint"]


def test_a_checkpoint_is_continued_in_another_folder(stopped, tmp_path):
    before = contents(stopped.out)
    first = stopped.out / "checkpoints" / "checkpoint-2"
    assert stopped("--resume", first, out=tmp_path / "new")[0] == 0
    assert (tmp_path / "new" / "resumed").read_text() == f"{first}\n"
    assert contents(stopped.out) == before
    code, _, said = stopped("--resume", first, out=tmp_path / "new")
    assert (code, "nothing is left to train" in said) == (0, True)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("nowhere", "not-a-checkpoint", "no such folder"),
        ("rows.jsonl", "not-a-checkpoint", "neither a checkpoint nor a run directory"),
        ("out/checkpoints", "not-a-checkpoint", "neither a checkpoint nor a run directory"),
        ("out/checkpoints/checkpoint-9", "not-a-checkpoint", "never finished"),
        ("out/checkpoints/checkpoint-4", "checkpoint-damaged", "weights.bin is missing"),
    ],
)
def test_what_is_no_checkpoint_is_one_error(stopped, name, code, message):
    unfinished = stopped.out / "checkpoints" / "checkpoint-9"
    unfinished.mkdir()
    (unfinished / "trainer_state.json").write_text("{}")
    (stopped.out / "checkpoints" / "checkpoint-4" / "weights.bin").unlink()
    before = contents(stopped.folder)
    exit_code, data, _ = stopped("--resume", stopped.folder / name)
    (problem,) = data["errors"]
    assert (exit_code, problem["code"]) == (2, code)
    assert message in problem["message"]
    assert problem["file"] == str(stopped.folder / name)
    assert contents(stopped.folder) == before


def test_all_differences_are_refused_at_once_and_nothing_is_touched(stopped):
    text = RECIPE.replace("r: 8", "r: 16").replace("1.0e-4", "2.0e-4").replace("length: 32", "length: 64")
    (stopped.folder / "r.yaml").write_text(text)
    before = contents(stopped.folder)
    code, data, _ = stopped("--resume", "auto", "--set", "seed=7")
    assert code == 2
    found = {problem["path"]: problem for problem in data["errors"]}
    assert found.keys() == {"adapter.r", "trainer.learning_rate", "data.max_length", "seed"}
    assert {problem["code"] for problem in data["errors"]} == {"resume-differs"}
    assert (found["adapter.r"]["line"], found["trainer.learning_rate"]["line"]) == (2, 6)
    assert "was made with 8, the plan now has 16" in found["adapter.r"]["message"]
    assert contents(stopped.folder) == before


def test_the_checkpoint_is_asked_and_not_the_folder(stopped):
    """A start that was refused later, or a dry run, may have written another plan beside it."""
    plan = json.loads((stopped.out / "plan.json").read_text())
    plan["settings"]["adapter.r"]["value"] = 4
    (stopped.out / "plan.json").write_text(json.dumps(plan))
    assert stopped("--resume", "auto")[0] == 0


def test_other_rows_are_refused_and_nothing_is_touched(stopped):
    (stopped.folder / "rows.jsonl").write_text('{"text": "b"}\n')
    before = contents(stopped.folder)
    code, data, _ = stopped("--resume", "auto")
    (problem,) = data["errors"]
    assert (code, problem["code"], problem["path"]) == (2, "resume-differs", "data")
    assert contents(stopped.folder) == before


def test_other_ranks_are_told_and_another_engine_is_refused(stopped):
    code, _, said = stopped("--resume", "auto", on="1xA100-80GB")
    assert code == 0
    assert "number of ranks: 2 -> 1: random states of dropout start afresh" in said
    stopped.interrupted()
    before = contents(stopped.folder)
    code, data, _ = stopped("--resume", "auto", "--set", "sharding.engine=deepspeed")
    assert (code, [problem["path"] for problem in data["errors"]]) == (2, ["sharding.engine"])
    assert contents(stopped.folder) == before


def test_a_finished_run_has_nothing_left(stopped, monkeypatch):
    assert stopped("--resume", "auto")[0] == 0
    before = contents(stopped.out)
    monkeypatch.setattr(run, "check_machine", lambda plan, nodes=None: pytest.fail("it asked for devices"))
    code, data, said = stopped("--resume", "auto")
    assert (code, data["result"]["steps"]) == (0, 6)
    assert "nothing is left to train" in said
    assert contents(stopped.out) == before


def test_a_finished_run_goes_on_when_more_is_asked_of_it(stopped):
    assert stopped("--resume", "auto")[0] == 0
    code, data, said = stopped("--resume", "auto", "--set", "trainer.max_steps=9")
    assert (code, data["result"]["steps"]) == (0, 9)
    assert "trainer.max_steps: 6 -> 9: a schedule that ends with the run has another end" in said
    assert len(stopped.resumed()) == 3


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_dry_run_does_not_hide_that_more_is_asked_of_a_finished_run(stopped, by_hand):
    assert stopped("--resume", "auto")[0] == 0
    assert stopped("--resume", "auto", "--set", "trainer.max_steps=9", "--dry-run")[0] == 0
    result = json.loads((stopped.out / "result.json").read_text())
    assert result["planned"] == {"max_steps": 6}
    if by_hand:  # its result tells no plan: the newest checkpoint does
        (stopped.out / "result.json").write_text('{"steps": 6}')
    code, data, said = stopped("--resume", "auto", "--set", "trainer.max_steps=9")
    assert (code, data["result"]["steps"]) == (0, 9), said
    assert len(stopped.resumed()) == 3


def test_a_finished_run_that_was_started_with_set_is_not_made_longer_without_it(stopped):
    """The recipe says 6 steps and the run was asked for 3: whoever forgets that trains on otherwise."""
    short = ("--set", "trainer.max_steps=3")
    assert stopped("--resume", "auto", *short)[0] == 0
    before = contents(stopped.out)
    code, data, _ = stopped("--resume", "auto")
    (problem,) = data["errors"]
    assert (code, problem["code"], problem["path"]) == (2, "finished-run", "trainer.max_steps")
    assert "--set trainer.max_steps=6" in problem["hint"]
    code, data, _ = stopped("--resume", "auto", "--set", "trainer={max_steps: null, num_train_epochs: 3}")
    assert code == 2
    newest = stopped.out / "checkpoints" / "checkpoint-4"
    assert stopped("--resume", newest)[1]["errors"][0]["code"] == "finished-run"
    assert contents(stopped.out) == before
    for steps in (2, 3):
        code, data, said = stopped("--resume", "auto", "--set", f"trainer.max_steps={steps}")
        assert (code, data["result"]["steps"], "nothing is left to train" in said) == (0, 3, True)
    code, data, _ = stopped("--resume", "auto", "--set", "trainer.max_steps=6")
    assert (code, data["result"]["steps"]) == (0, 6)


def test_the_result_of_a_finished_run_stays_until_a_newer_one_is_there(stopped, monkeypatch):
    assert stopped("--resume", "auto")[0] == 0
    result = (stopped.out / "result.json").read_bytes()
    longer = ("--resume", "auto", "--set", "trainer.max_steps=9")
    monkeypatch.setenv("DIES", "9")
    assert stopped(*longer)[0] == 5
    assert not (stopped.out / "COMPLETED").exists(), "what was asked for last is not done"
    assert (stopped.out / FINISHED_BEFORE).is_file()
    assert (stopped.out / "result.json").read_bytes() == result
    assert finished_run(str(stopped.out)) == stopped.out
    code, data, _ = stopped("--resume", "auto", "--set", "trainer.max_steps=6")
    assert (code, data["result"]["steps"]) == (0, 6)
    assert stopped(*longer)[0] == 5, "a second attempt that fails takes nothing away either"
    assert (stopped.out / FINISHED_BEFORE).is_file()
    monkeypatch.delenv("DIES")
    assert stopped(*longer)[0] == 0
    assert (stopped.out / "COMPLETED").is_file()


def test_a_finished_run_without_checkpoints_cannot_be_made_longer(runs):
    assert runs()[0] == 0
    assert runs("--resume", "auto")[0] == 0
    assert runs("--resume", "auto", "--set", "trainer.max_steps=9", "--dry-run")[0] == 0
    code, data, said = runs("--resume", "auto", "--set", "trainer.max_steps=9")
    assert (code, data["errors"][0]["code"]) == (2, "nothing-to-resume")
    assert "starts from the beginning" not in said
    assert runs.resumed() == ["nothing"]


def test_a_checkpoint_without_a_plan_is_refused(stopped):
    (stopped.out / "checkpoints" / "checkpoint-4" / "plan.json").write_text("[]")
    folder = stopped.out / "checkpoints" / "checkpoint-4"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["plan.json"] = {"bytes": 2, "sha256": hashlib.sha256(b"[]").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, data, _ = stopped("--resume", folder)
    assert (code, data["errors"][0]["code"]) == (2, "not-a-checkpoint")


def by_hand(run_dir: Path, folder: Path) -> str:
    """What command.sh tells the workers to go on from; they are stood in for."""
    stand_in = folder / "python"
    stand_in.write_text('#!/bin/sh\necho "${EFFILAUNCH_RESUME-nothing}"\n')
    stand_in.chmod(0o755)
    script = (run_dir / "command.sh").read_text().replace(sys.executable, str(stand_in))
    (run_dir / "by-hand.sh").write_text(script)
    said = subprocess.run(["bash", run_dir / "by-hand.sh"], capture_output=True, text=True, check=True).stdout
    return said.split()[-1]


def test_a_start_by_hand_is_the_start_that_was_made(stopped, tmp_path):
    assert stopped("--resume", "auto")[0] == 0
    assert by_hand(stopped.out, tmp_path) == "auto"
    assert stopped(out=stopped.folder / "fresh")[0] == 0
    assert by_hand(stopped.folder / "fresh", tmp_path) == "nothing"


def test_zero_on_other_ranks_is_converted_before_devices_are_taken(stopped, monkeypatch, tmp_path):
    """The conversion itself is in tests/process/test_resume_ranks.py."""
    text = RECIPE.replace("engine: ddp", "zero_stage: 2")
    (stopped.folder / "r.yaml").write_text(text)
    out = stopped.folder / "zero"
    stopped.out = out
    assert stopped(out=out)[0] == 0
    checkpoint = stopped.checkpoint(2)
    stopped.interrupted()
    asked = []

    def converted(path, run_dir, why, say, look):
        asked.append((path, why))
        twin = run_dir / "converted" / path.name
        twin.mkdir(parents=True)
        (twin / "latest_universal").write_text("global_step2_universal")
        return twin

    monkeypatch.setattr(start_point, "converted", converted)
    assert stopped("--resume", "auto", "--set", "sharding.engine=deepspeed", on="1xA100-80GB")[0] == 0
    assert asked == [(checkpoint, "2 ranks wrote it, 1 rank shall read it")]
    assert stopped.resumed()[1:] == [str(out / "converted" / "checkpoint-2")]
    shown = json.loads((out / "ds_config.json").read_text())
    assert shown["checkpoint"] == {"load_universal": True}
    assert by_hand(out, tmp_path) == str(out / "converted" / "checkpoint-2"), "nothing else could be read"
    stopped.interrupted()
    assert stopped("--resume", "auto", "--set", "sharding.engine=deepspeed")[0] == 0
    assert "checkpoint" not in json.loads((out / "ds_config.json").read_text())
    assert not (out / "converted").exists()
    assert by_hand(out, tmp_path) == "auto"


def test_a_converted_checkpoint_that_the_run_rotates_out_is_no_longer_read(stopped, monkeypatch):
    first, twin = stopped.out / "checkpoints" / "checkpoint-2", stopped.out / "converted" / "checkpoint-2"
    shutil.rmtree(stopped.out / "checkpoints" / "checkpoint-4")
    twin.mkdir(parents=True)
    monkeypatch.setattr(start_point, "converted", lambda *_: twin)
    begins = start_point.Beginning(stopped.out, start_point.verify_checkpoint(first))
    with start_point.readable_checkpoint(begins, start_point.Resumption((), "other ranks"), print) as read:
        assert read == str(twin)
        shutil.rmtree(first)  # save_total_limit
        stopped.checkpoint(4)
    assert not twin.exists()


def test_a_conversion_of_which_the_disk_took_no_log_is_one_error(tmp_path, monkeypatch):
    from launcher.execute import resume
    from launcher.execute.following import Ended

    monkeypatch.setattr(resume, "follow", lambda start: Ended(1))
    with pytest.raises(RunFailed, match=r"could not be converted .*: exit code 1"):
        resume.converted(checkpoint(tmp_path, 2), tmp_path / "run", "more ranks", print)
