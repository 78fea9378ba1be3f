"""The tries of `on_oom: adapt` with scripts as workers: what is kept, continued, said and recorded."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import checkpoint
from factories import BASE, facts, recipe
from machines import gpus

from launcher.cli import main
from launcher.errors import MachineError, Problem, RecipeError, RunFailed
from launcher.execute import attempts
from launcher.execute.attempts import run_attempts
from launcher.execute.run_dir import write_next_attempt, write_run_dir
from launcher.files.safe_files import write_text
from launcher.planner.planner import make_plan
from launcher.render.bundle import render

PREPARED = """
import pathlib, sys
run = pathlib.Path(sys.argv[1])
(run / "data.json").write_text("{}")
with (run / "prepared").open("a") as file:
    file.write("once ")
"""
FULL = "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB"
# A worker whose device holds LIMIT samples; it trains three steps, and saves after the second.
WORKER = """
import hashlib, json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
plan = json.loads((run / "plan.json").read_text())
value = lambda name: plan["settings"][name]["value"]
micro = value("trainer.per_device_train_batch_size")
with (run / "resumed").open("a") as file:
    file.write(os.environ.get("EFFILAUNCH_RESUME", "nothing") + "\\n")
if SAVES:
    saved = run / "checkpoints" / "checkpoint-2"
    saved.mkdir(parents=True, exist_ok=True)
    (saved / "trainer_state.json").write_text("{}")
    (saved / "plan.json").write_bytes((run / "plan.json").read_bytes())
    files = {name: (saved / name).read_bytes() for name in ("trainer_state.json", "plan.json")}
    (saved / "manifest.json").write_text(json.dumps(
        {"schema_version": 1, "step": 2, "world_size": 1, "bytes": sum(map(len, files.values())),
         "files": {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                   for name, data in files.items()},
         "seconds": 0.1, "data": None, "versions": {}}))
    (run / "checkpoints" / "checkpoint-9").mkdir(exist_ok=True)  # it was never finished
(run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1.0}) + "\\n" for n in (1, 2, 3)))
if LIMIT < micro or not ENOUGH:
    what = "torch.OutOfMemoryError: " + FULL
    call = "  File \\"/x/worker.py\\", line 9, in " + WHERE
    trace = "\\n".join(("Traceback (most recent call last):", call, "    work()", what))
    print(trace, flush=True)
    (run / "logs" / "error-rank-0.json").write_text(json.dumps(
        {"rank": 0, "time": time.time(), "type": "OutOfMemoryError", "message": FULL, "traceback": trace,
         "problems": [], "exit_code": 1}))
    sys.exit(1)
THEN
(run / "result.json").write_text(json.dumps({"steps": 4, "micro": micro}))
(run / "COMPLETED").write_text("")
"""
ADAPT = BASE + "on_oom: adapt\n"
EIGHT = {
    "global_batch_size": 64,
    "trainer__per_device_train_batch_size": 8,
    "trainer__activation_checkpointing": "true",
    "sharding__engine": "ddp",
}
SMALLEST = {
    "global_batch_size": 8,
    "trainer__per_device_train_batch_size": 1,
    "sharding__offload_activations": "cpu",
}
"""With nothing left to change but the engine."""


def worker(limit=1, *, saves=True, where="training_step", enough="True", then=""):
    """The script of a worker; enough: an expression of `value`, false where no batch is small enough."""
    names = {"LIMIT": str(limit), "SAVES": str(saves), "WHERE": repr(where), "ENOUGH": f"({enough})"}
    text = WORKER.replace("FULL", repr(FULL)).replace("THEN", then)
    for name, given in names.items():
        text = text.replace(name, given)
    return text


@pytest.fixture
def tries(tmp_path, monkeypatch):
    """Runs a recipe whose workers are a script; what was said, and what came of it."""

    def run(
        script, *, on="8xA100-80GB", text=ADAPT, prepare=PREPARED, resume=None, require=list, **overrides
    ):
        def rendered(plan):
            return replace(
                render(plan),
                prepare=(sys.executable, "-c", prepare, "{run_dir}"),
                command=(sys.executable, "-c", script, "{run_dir}"),
            )

        monkeypatch.setattr(attempts, "render", rendered)
        monkeypatch.setattr(attempts, "require_modules", require)
        loaded, told = recipe(tmp_path, text, **overrides), facts(on)
        bundle = rendered(make_plan(loaded, told))
        write_run_dir(bundle, tmp_path / "run", resume=resume is not None)
        said = []
        plan, result = run_attempts(
            loaded, told, bundle, tmp_path / "run", gpus=gpus(count=1), resume=resume, say=said.append
        )
        return plan, result, said

    return run


def plan_of(run_dir: Path, name="plan.json") -> dict:
    return json.loads((run_dir / name).read_text())


def micro_of(run_dir: Path, name="plan.json") -> tuple[int, int, int]:
    batch = plan_of(run_dir, name)["batch"]
    return batch["micro"], batch["accumulation"], batch["global"]


def test_a_run_goes_on_with_smaller_batches_until_one_fits(tries, tmp_path):
    plan, result, said = tries(worker(limit=2), **EIGHT)
    run = tmp_path / "run"
    assert (plan.batch.micro, result["micro"]) == (2, 2)
    assert micro_of(run, "plan-1.json") == (8, 1, 64)
    assert micro_of(run, "plan-2.json") == (4, 2, 64)
    assert micro_of(run) == (2, 4, 64)
    saved = str(run / "checkpoints" / "checkpoint-2")
    assert (run / "resumed").read_text().split() == ["nothing", saved, saved]
    assert (run / "prepared").read_text() == "once "
    first, second = plan_of(run)["adapted"]["adaptations"]
    assert (first["step"], first["resumed_from"]) == (3, 2)
    assert first["changed"]["trainer.per_device_train_batch_size"] == [8, 4]
    assert second["changed"]["trainer.gradient_accumulation_steps"] == [2, 4]
    assert "micro-batch 4 ran out of memory: 2 with accumulation 4" in second["reason"]
    assert "in place of trainer.per_device_train_batch_size of --set" in second["reason"]
    text = "\n".join(said)
    assert "trainer.per_device_train_batch_size: 8 -> 4" in text
    assert "the checkpoint of step 2; 1 step" in text
    assert text.count("torch.OutOfMemoryError") == 2


def test_without_being_asked_nothing_is_changed(tries, tmp_path):
    with pytest.raises(RunFailed) as caught:
        tries(worker(), text=BASE, **EIGHT)
    assert caught.value.problems[0].code == "cuda-oom"
    assert "adapted" not in plan_of(tmp_path / "run")
    assert not (tmp_path / "run" / "plan-1.json").exists()


def test_when_nothing_is_left_the_failure_lists_what_was_tried(tries, tmp_path):
    with pytest.raises(RunFailed) as caught:
        tries(worker(enough="False"), on="1xA100-80GB", text=ADAPT, global_batch_size=4,
              trainer__per_device_train_batch_size=2, trainer__activation_checkpointing="true",
              model__quantization="int8", trainer__optim="adamw_bnb_8bit")  # fmt: skip
    problem = caught.value.problems[0]
    assert (caught.value.exit_code, problem.code) == (5, "cuda-oom")
    assert "nothing is left to try. Tried: micro-batch 2 ran out of memory: 1 with" in problem.message
    first, second = plan_of(tmp_path / "run")["adapted"]["adaptations"]
    assert first["changed"]["trainer.per_device_train_batch_size"] == [2, 1]
    assert second["changed"]["sharding.offload_activations"] == ["none", "cpu"]
    assert micro_of(tmp_path / "run") == (1, 4, 4)


def test_nothing_to_try_at_all_is_said(tries):
    with pytest.raises(RunFailed, match=r"nothing is left to try\. Tried: nothing could be changed"):
        tries(worker(enough="False"), on="1xA100-80GB", global_batch_size=1,
              trainer__activation_checkpointing="true", model__quantization="int8",
              trainer__optim="adamw_bnb_8bit", sharding__offload_activations="cpu")  # fmt: skip


def test_the_next_try_is_diagnosed_by_its_own_lines(tries):
    """The logs still hold the first try's error."""
    with pytest.raises(RunFailed) as caught:
        tries(worker(limit=4, then="raise SystemExit(3)"), **EIGHT)
    assert caught.value.problems[0].code == "run-failed"
    assert "exit code 3" in caught.value.problems[0].message


def test_data_that_does_not_fit_the_memory_is_no_matter_of_the_batch(tries, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.execute.start.has_killed", lambda *_: True)
    with pytest.raises(RunFailed) as caught:
        tries(worker(), prepare="import os; os.kill(os.getpid(), 9)", on="2xcpu",
              text=ADAPT.replace("512", "64"), global_batch_size=8)  # fmt: skip
    assert caught.value.problems[0].code == "sigkill-oom"
    assert not (tmp_path / "run" / "plan-1.json").exists()


def test_a_next_try_that_cannot_be_written_still_knows_where_the_run_came_from(tmp_path):
    run = tmp_path / "run"
    bundle = render(make_plan(recipe(tmp_path, BASE), facts("2xcpu")))
    write_run_dir(bundle, run, resume=False)
    (run / "origin.json").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    in_the_way = run / "metrics-1.jsonl"
    in_the_way.mkdir()
    with pytest.raises(RecipeError, match="cannot write the run directory"):
        write_next_attempt(bundle, run, keeps_checkpoints=False)
    assert (run / "origin.json").is_file()
    in_the_way.rmdir()
    assert write_next_attempt(bundle, run, keeps_checkpoints=False) is None
    assert not (run / "origin.json").exists()


def test_zero_starts_again_where_it_cannot_read_the_checkpoints(tries, tmp_path):
    one = {**EIGHT, **SMALLEST}
    plan, _, said = tries(worker(enough="value('sharding.engine') == 'deepspeed'"), **one)
    run = tmp_path / "run"
    assert (plan.job.engine.name, plan.job.zero_stage) == ("deepspeed", 3)
    assert (run / "resumed").read_text().split() == ["nothing", "nothing"]
    assert (run / "checkpoints-1" / "checkpoint-2" / "trainer_state.json").is_file()
    assert len((run / "metrics-1.jsonl").read_text().splitlines()) == 3
    assert json.loads((run / "ds_config.json").read_text())["zero_optimization"]["stage"] == 3
    assert (run / "accelerate-1.yaml").is_file()
    assert not (run / "accelerate.yaml").exists()
    text = "\n".join(said)
    assert (
        "starts again at step 0, 3 steps are lost: of the checkpoints, DeepSpeed cannot read those of ddp"
        in text
    )
    assert "in checkpoints-1" in text


def test_a_package_that_the_next_try_lacks_ends_the_run(tries):
    def lacking(names):
        raise MachineError(Problem("module-missing", f"not installed: {', '.join(names)}"))

    one = {**EIGHT, **SMALLEST}
    with pytest.raises(RunFailed, match="cannot be done here: not installed: deepspeed"):
        tries(worker(enough="False"), require=lacking, **one)


def test_memory_that_runs_out_while_loading_changes_no_batch(tries):
    plan, _, said = tries(
        worker(saves=False, where="load_model", limit=8, enough="value('sharding.zero_stage') == 3"),
        **{**EIGHT, "sharding__engine": "deepspeed", "sharding__zero_stage": 2},
    )
    assert (plan.job.zero_stage, plan.batch.micro) == (3, 8)
    assert "starts again at step 0, 3 steps are lost: no checkpoint was saved yet" in "\n".join(said)


def test_a_checkpoint_that_the_user_named_is_continued_again(tries, tmp_path):
    """A later one of another start would lead past the place that the user went back to."""
    run = tmp_path / "run"
    write_run_dir(render(make_plan(recipe(tmp_path, ADAPT, **EIGHT), facts())), run, resume=False)
    for step in (1, 7):
        checkpoint(run / "checkpoints", step)
    named = str(run / "checkpoints" / "checkpoint-1")
    _, _, said = tries(worker(limit=4, saves=False), resume=named, **EIGHT)
    assert (run / "resumed").read_text().split() == [named, named]
    assert "the checkpoint of step 1; 2 steps" in "\n".join(said)


def test_a_next_try_that_a_full_disk_does_not_take_is_told_with_what_ran_out(tries, tmp_path, monkeypatch):
    def full(path, text):
        if path.name.endswith("-1.json"):  # a file of the attempt before
            raise OSError(errno.ENOSPC, "No space left on device")
        write_text(path, text)

    monkeypatch.setattr("launcher.execute.run_dir.write_text", full)
    with pytest.raises(RunFailed, match="No space left on device") as caught:
        tries(worker(limit=4), **EIGHT)
    assert caught.value.problems[0].code == "disk-full"
    assert "CUDA out of memory" in caught.value.problems[0].message
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2").is_dir()


def test_an_adapted_run_is_resumed_as_adapted(tries, tmp_path, capsys):
    """With the recipe that it was started with, whose batch it cannot have."""
    tries(worker(limit=2), text=BASE + "on_oom: adapt\n", **EIGHT)
    run = tmp_path / "run"
    given = [f"{key.replace('__', '.')}={value}" for key, value in EIGHT.items()]

    def resumed(*more: str) -> int:
        sets = [word for text in (*given, *more) for word in ("--set", text)]
        return main(["run", str(tmp_path / "recipe.yaml"), "--on", "8xA100-80GB", "--resume", "auto",
                     "--output-dir", str(run), "--dry-run", *sets])  # fmt: skip

    before = plan_of(run)
    assert resumed() == 0, capsys.readouterr().err
    assert micro_of(run) == (2, 4, 64)
    assert plan_of(run)["adapted"] == before["adapted"]
    assert resumed("trainer.max_steps=20") == 0
    assert plan_of(run)["schedule"]["steps"] == 20
    assert resumed("on_oom=fail") == 0
    assert micro_of(run) == (2, 4, 64)
    capsys.readouterr()
    assert resumed("trainer.per_device_train_batch_size=16") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the run was started with 8 and, when memory ran out, adapted to 2; the recipe now has 16" in said
    assert resumed("trainer.learning_rate=0.5") == 2
    assert "trainer.learning_rate: the checkpoint was made with 0.0002" in capsys.readouterr().err


def test_memory_that_runs_out_in_an_evaluation_shrinks_its_batch_alone(tries):
    text = ADAPT.replace("max_length: 512}", "max_length: 512, eval: {split: 0.1}}")
    script = worker(
        limit=8, where="evaluation_loop", enough="value('trainer.per_device_eval_batch_size') <= 2"
    )
    plan, _, said = tries(script, text=text, trainer__per_device_eval_batch_size=8, **EIGHT)
    assert (plan.batch.micro, plan.job.eval_batch) == (8, 2)
    assert "trainer.per_device_eval_batch_size: 4 -> 2" in "\n".join(said)
