"""Signals in real ranks: one checkpoint of one step, a clean end, and a run that goes on as if nothing was.

The ranks are forks that signal themselves at a known moment; `tests/process/test_stopping_ranks.py` sends
signals from outside, through the real launchers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked import Ended, Forks
from patience import patience
from plans import LORA, TINY_LLAMA, write_run, zero_config

if not (find_spec("torch") and find_spec("deepspeed")):  # neither is imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

STEPS = 8
ASKED, EVERY = "TEST_SIGNALS", "TEST_AGREE_S"
HOOKS = f"""
import json
import os
import signal
import time
from pathlib import Path

from transformers import TrainerCallback

from launcher.train import agreement

# By default the ranks of a test agree at each step, so that it knows at which one they stop.
agreement.AGREE_S, *rates = json.loads(os.environ.get("{EVERY}", "[0]"))
if rates:
    rate = rates[int(os.environ["RANK"])]
    agreement.Agreement.__init__.__defaults__ = (lambda: rate * time.monotonic() - 1e6 * rate,)

ASKED = json.loads(os.environ.get("{ASKED}", "[]"))


def children():
    return [int(pid) for pid in Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split()]


class Signals(TrainerCallback):
    batches = 0

    def send(self, moment, number):
        # Each: moment, step, rank, signal, and to whom: this rank, its children, or another process.
        for *when, kind, whom in ASKED:
            if when == [moment, number, int(os.environ.get("RANK", "0"))]:
                pids = {{"self": [os.getpid()], "children": children()}}.get(whom, [whom])
                for pid in pids:  # by a third process: from its parent a child takes it otherwise
                    os.kill(pid, kind) if whom != "children" else os.system(f"kill -{{kind}} {{pid}}")
                print(f"signalled {{len(pids)}} of {{whom}}", flush=True)
                # What is to come at once is given the time.
                time.sleep(30 if moment == "load" else 0.2 if whom == "children" else 0)

    def on_train_begin(self, args, state, control, **_):
        self.send("load", 0)

    def on_step_begin(self, args, state, control, **_):
        self.send("begin", state.global_step + 1)

    def on_step_end(self, args, state, control, **_):
        self.send("end", state.global_step)

    def on_prediction_step(self, args, state, control, **_):
        self.batches += 1
        self.send("predict", self.batches)

    def on_save(self, args, state, control, **_):
        print(f"saved at {{state.global_step}}", flush=True)
        self.send("save", state.global_step)


def callbacks():
    return [Signals()]
"""
Asked = tuple[str, int, int, int] | tuple[str, int, int, int, str | int]
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, int]] = {
    "one": ({"adapter": {**LORA, "lora_dropout": 0.1}}, None, 0),
    "ddp": ({}, None, 2),
    "zero2": ({"sharding.engine": "deepspeed", "sharding.zero_stage": 2}, zero_config(2), 2),
    "zero3": ({"sharding.engine": "deepspeed", "sharding.zero_stage": 3}, zero_config(3), 2),
}
BASE: dict[str, Any] = {
    "model.config": {**TINY_LLAMA, "attention_dropout": 0.1},
    "trainer.max_steps": STEPS,
    "trainer.save_strategy": "steps",
    "trainer.save_steps": 100,
    "trainer.lr_scheduler_type": "linear",
    "python.hooks": ["callbacks"],
}


class Run:
    """A run directory and how its ranks are started."""

    def __init__(self, forks: Forks, folder: Path, engine: str = "one", **changes: Any) -> None:
        more, ds_config, self.world = ENGINES[engine]
        (folder.parent / "hooks.py").write_text(HOOKS)
        said = {**BASE, **more, **changes, "python.file": str(folder.parent / "hooks.py")}
        self.forks, self.folder = forks, write_run(folder, said, ds_config)
        self.env = {} if ds_config else {"ACCELERATE_USE_CPU": "true"}
        assert forks.run(folder, 0, {}, module="prepare").codes == (0,)

    def start(self, *asked: Asked, **env: str) -> Ended:
        said = json.dumps([one if len(one) == 5 else (*one, "self") for one in asked])
        return self.forks.run(self.folder, self.world, {**self.env, ASKED: said, **env})

    def finish(self, **env: str) -> Run:
        ended = self.start(**env)
        assert set(ended.codes) == {0}, ended.said
        assert (self.folder / "COMPLETED").is_file()
        assert not (self.folder / "stopped.json").is_file()
        return self

    def stop(self, *asked: Asked, **env: str) -> dict[str, Any]:
        """Start it, be signalled; what stopped.json says. It ends cleanly, and is not done."""
        ended = self.start(*asked, **env)
        assert set(ended.codes) == {0}, ended.said
        assert not (self.folder / "COMPLETED").is_file(), ended.said
        return json.loads((self.folder / "stopped.json").read_text())

    def resume(self) -> Run:
        (self.folder / "stopped.json").unlink()
        return self.finish(EFFILAUNCH_RESUME="auto")

    def rows(self) -> dict[int, dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
            told.setdefault(row["step"], {}).update({name: row[name] for name in kept if name in row})
        return told

    def checkpoints(self) -> list[int]:
        found = (self.folder / "checkpoints").glob("checkpoint-*")
        return sorted(int(path.name.removeprefix("checkpoint-")) for path in found)

    def statuses(self) -> list[dict[str, Any]]:
        found = sorted((self.folder / "logs").glob("status-rank-*.json"))
        return [json.loads(path.read_text()) for path in found]


def twin(run: Run, folder: Path) -> Run:
    """The same plan on the same data, not yet started."""
    other = object.__new__(Run)
    other.forks, other.world, other.env, other.folder = run.forks, run.world, run.env, folder
    folder.mkdir()
    for name in ("plan.json", "ds_config.json", "data.json"):
        if (run.folder / name).is_file():
            (folder / name).write_bytes((run.folder / name).read_bytes())
    return other


@pytest.mark.parametrize(
    ("engine", "rank", "kind"),
    [
        pytest.param("one", 0, signal.SIGUSR1, marks=pytest.mark.slow),
        ("zero2", 1, signal.SIGTERM),
        pytest.param("ddp", 1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("ddp", 0, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("zero3", 1, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on(engine, rank, kind, tmp_path, forks):
    straight = Run(forks, tmp_path / "straight", engine).finish()
    expected = straight.rows()
    assert list(expected) == list(range(1, STEPS + 1))
    run = twin(straight, tmp_path / "stopped")
    # Twice, the second time as the scheduler grows impatient: it changes nothing.
    said = run.stop(("begin", 3, rank, kind), ("end", 3, rank, signal.SIGTERM))
    assert said["signal"] == kind.name
    assert (said["step"], said["checkpoint"]) == (3, "checkpoint-3")
    assert 0 < said["save_seconds"] <= said["seconds"] < 60
    assert run.checkpoints() == [3]
    last = [(status["phase"], status["step"], status["code"]) for status in run.statuses()]
    assert last == [("ended", 3, 0)] * max(1, run.world)
    assert run.rows() == {step: expected[step] for step in range(1, 4)}
    run.resume()
    assert run.rows() == expected


EVALUATED = {"data.eval": {"split": 0.25}, "trainer.eval_strategy": "steps", "trainer.eval_steps": 2}
EVALUATED |= {"trainer.per_device_eval_batch_size": 4, "trainer.prediction_loss_only": True}


@pytest.mark.parametrize(
    ("engine", "every", "asked"),
    [
        # Two seconds by clocks that run differently, the second one's even backwards.
        ("ddp", [2.0, 1.0, 30.0], ("begin", 10, 1, signal.SIGTERM)),
        pytest.param("zero2", [2.0, -5.0, 0.1], ("begin", 10, 1, signal.SIGUSR1), marks=pytest.mark.slow),
        # Steps that take longer than the time between two agreements.
        pytest.param("ddp", [0.001, 1.0, 1.0], ("begin", 10, 0, signal.SIGTERM), marks=pytest.mark.slow),
        pytest.param("ddp", [2.0, 1.0, 30.0], ("predict", 5, 1, signal.SIGTERM), marks=pytest.mark.slow),
        pytest.param("ddp", [2.0, 1.0, 30.0], ("save", 5, 1, signal.SIGTERM), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_agree_about_every_two_seconds_stop_at_one_step(engine, every, asked, tmp_path, forks):
    """With evaluations and saves between the steps."""
    often = {"trainer.eval_steps": 7, "trainer.save_steps": 5, "trainer.max_steps": 200}
    run = Run(forks, tmp_path / "run", engine, **{**EVALUATED, **often})
    said = run.stop(asked, **{EVERY: json.dumps(every)})
    assert said["signal"] == asked[3].name
    assert 5 <= said["step"] < 200
    if every[0] < 1 or asked[0] == "save":
        assert said["step"] == asked[1]
    assert said["checkpoint"] == f"checkpoint-{said['step']}"
    last = [(status["phase"], status["step"], status["code"]) for status in run.statuses()]
    assert last == [("ended", said["step"], 0)] * 2
    assert list(run.rows())[-1] == said["step"]


@pytest.mark.parametrize(
    ("engine", "asked", "step"),
    [
        # Due at the step of the stop, and left out.
        pytest.param("one", ("begin", 4, 0, signal.SIGTERM), 4, marks=pytest.mark.slow),
        # Cut in the middle, by one rank's signal.
        ("ddp", ("predict", 3, 1, signal.SIGTERM), 4),
    ],
)
def test_an_evaluation_that_a_stop_leaves_out_is_made_up_for(engine, asked, step, tmp_path, forks):
    straight = Run(forks, tmp_path / "straight", engine, **EVALUATED).finish()
    expected = straight.rows()
    assert [number for number, row in expected.items() if "eval_loss" in row] == [2, 4, 6, 8]
    run = twin(straight, tmp_path / "stopped")
    said = run.stop(asked)
    assert said["checkpoint"] == f"checkpoint-{step}"
    assert "eval_loss" in run.rows()[2]
    assert "eval_loss" not in run.rows()[step], "numbers of some of the rows count for nothing"
    run.resume()
    assert run.rows() == expected


@pytest.mark.slow
def test_at_the_end_of_an_epoch_nothing_is_saved_twice(tmp_path, forks):
    epochs = {"trainer.save_strategy": "epoch", "trainer.eval_strategy": "epoch"}
    straight = Run(forks, tmp_path / "straight", **{**EVALUATED, **epochs, "trainer.max_steps": 24})
    straight.finish()
    expected = straight.rows()
    first = min(number for number, row in expected.items() if "eval_loss" in row)
    assert first < 20, "the run has more than one epoch"
    run = twin(straight, tmp_path / "stopped")
    said = run.stop(("begin", first, 0, signal.SIGTERM))
    assert said["checkpoint"] == f"checkpoint-{first}"
    assert (run.folder / "logs" / "rank-0.log").read_text().count("saved at ") == 1
    run.resume()
    assert run.rows() == expected


@pytest.mark.slow
def test_a_checkpoint_that_is_due_anyway_is_the_stops(tmp_path, forks):
    """The signal arrives while checkpoint-2 is saved: no other step, no other save."""
    run = Run(forks, tmp_path / "run", "ddp", **{"trainer.save_steps": 2})
    said = run.stop(("save", 2, 1, signal.SIGTERM))
    assert (said["step"], said["checkpoint"]) == (2, "checkpoint-2")
    assert run.checkpoints() == [2]
    # At the end of a step that saves: once, too.
    other = twin(run, tmp_path / "other")
    assert other.stop(("end", 2, 0, signal.SIGTERM))["checkpoint"] == "checkpoint-2"
    assert (other.folder / "logs" / "rank-0.log").read_text().count("saved at ") == 1


@pytest.mark.slow
def test_a_stop_that_meets_the_last_step_or_the_result_lets_the_run_finish(tmp_path, forks):
    run = Run(forks, tmp_path / "run", **EVALUATED)
    last = 4 * (STEPS // 2)  # batches of the evaluation behind the last step
    for asked in (("end", STEPS, 0, signal.SIGTERM), ("predict", last, 0, signal.SIGUSR1)):
        other = twin(run, tmp_path / asked[0])
        ended = other.start(asked)
        assert ended.codes == (0,), ended.said
        assert (other.folder / "COMPLETED").is_file(), ended.said
        assert not (other.folder / "stopped.json").exists()
        assert "eval_loss" in other.rows()[STEPS]


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_rank_at_once(tmp_path, forks):
    run = Run(forks, tmp_path / "run")
    ended = run.start(("load", 0, 0, signal.SIGTERM))
    assert ended.codes == (143,), ended.said
    assert "SIGTERM before the first step" in (run.folder / "logs" / "rank-0.log").read_text()
    (status,) = run.statuses()
    assert (status["phase"], status["step"], status["code"]) == ("ended", 0, 143)
    assert not (run.folder / "stopped.json").exists()
    assert run.checkpoints() == []


@pytest.mark.slow
def test_a_stream_stops_and_goes_on(tmp_path, forks):
    stream = {"data.streaming": True, "trainer.max_steps": STEPS}
    straight = Run(forks, tmp_path / "straight", "ddp", **stream).finish()
    expected = straight.rows()
    run = twin(straight, tmp_path / "stopped")
    assert run.stop(("begin", 5, 1, signal.SIGUSR1))["checkpoint"] == "checkpoint-5"
    run.resume()
    assert run.rows() == expected


def test_dataloader_workers_do_not_die_of_the_group_s_signals(tmp_path, forks):
    """All signals for all processes of the run, as schedulers and terminals send them."""
    run = Run(forks, tmp_path / "run", **{"trainer.dataloader_num_workers": 2})
    kinds = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
    said = run.stop(*[("begin", 3, 0, kind, "children") for kind in kinds], ("begin", 3, 0, signal.SIGTERM))
    assert said["checkpoint"] == "checkpoint-3"
    assert (run.folder / "logs" / "rank-0.log").read_text().count("signalled 2 of children") == 3
    run.resume()
    assert sorted(run.rows()) == list(range(1, STEPS + 1))


CHILD = """
import multiprocessing, os, subprocess, time
from launcher.train import stopping

stopping.watch({})
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True)
child.start()
time.sleep(0.2)
subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
child.join(0.3)
assert child.is_alive(), "it is not its parent who asks"
child.terminate()
child.join(120)
assert child.exitcode == 0, child.exitcode
"""


def test_a_child_process_obeys_the_sigterm_of_its_parent_alone():
    subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=patience(240))


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_unwinds_the_preparation_of_data(kind, tmp_path, monkeypatch):
    """Or half-written samples would stay in the cache."""
    from launcher.train import prepare
    from launcher.train.stopping import SIGNALS

    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(prepare, "read_job", lambda _: os.kill(os.getpid(), kind))
    try:
        with pytest.raises(SystemExit) as caught:
            prepare.main([str(tmp_path)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == 143


@pytest.mark.slow
def test_a_full_disk_says_what_is_there_to_go_on_from(tmp_path, forks):
    run = Run(forks, tmp_path / "run", **{"trainer.save_steps": 2})
    fault = json.dumps({"fault": "disk-full", "step": 3})
    ended = run.start(("begin", 3, 0, signal.SIGTERM), EFFILAUNCH_DRILL=fault)
    assert ended.codes != (0,), "the run lost what it was asked to save"
    said = json.loads((run.folder / "stopped.json").read_text())
    assert (said["step"], said["checkpoint"], said["save_seconds"]) == (3, "checkpoint-2", None)
    assert "without a checkpoint of it" in said["reason"]
    assert run.checkpoints() == [2]


@pytest.mark.parametrize(
    ("engine", "moment"),
    [
        ("one", "begin"),
        pytest.param("zero2", "begin", marks=pytest.mark.slow),
        pytest.param("one", "load", marks=pytest.mark.slow),
    ],
)
def test_ranks_whose_supervisor_dies_save_and_leave(engine, moment, tmp_path, forks):
    from launcher.files.rank_status import process_started

    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = process_started(supervisor.pid)
        run = Run(forks, tmp_path / "run", engine, **{"trainer.max_steps": 100_000})
        asked = (moment, 0 if moment == "load" else 3, 0, signal.SIGKILL, supervisor.pid)
        ended = run.start(asked, EFFILAUNCH_SUPERVISOR=f"{os.uname().nodename}:{supervisor.pid}:{started}")
        if moment == "load":
            assert ended.codes == (143,), ended.said
            return
        assert set(ended.codes) == {0}, ended.said
        said = json.loads((run.folder / "stopped.json").read_text())
        assert said["signal"] is None
        assert "the supervising process is gone" in said["reason"]
        assert said["checkpoint"] == f"checkpoint-{said['step']}"
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.slow
def test_a_stop_keeps_its_checkpoint_beside_the_best_one(tmp_path, forks):
    """With a limit of one, upstream ends a run by removing every checkpoint but the best."""
    best = {"trainer.load_best_model_at_end": True, "trainer.metric_for_best_model": "eval_loss"}
    best |= {"trainer.greater_is_better": True, "trainer.save_steps": 2, "trainer.save_total_limit": 1}
    straight = Run(forks, tmp_path / "straight", **{**EVALUATED, **best}).finish()
    assert straight.checkpoints()[0] == 2, "the loss only falls, so the first is the largest"
    run = twin(straight, tmp_path / "stopped")
    assert run.stop(("begin", 5, 0, signal.SIGTERM))["checkpoint"] == "checkpoint-5"
    assert run.checkpoints() == [2, 5]
    run.resume()
    assert run.rows() == straight.rows()
    ended = [json.loads((done.folder / "result.json").read_text())["eval"] for done in (straight, run)]
    assert [(row["step"], row["eval_loss"]) for row in ended] == [(2, straight.rows()[2]["eval_loss"])] * 2
