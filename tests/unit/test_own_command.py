"""A user's own command: what is refused, what is hidden, who its ranks are, what its processes do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import wait_until

import effilaunch
from launcher.errors import RecipeError
from launcher.execute.activity import DEVICES_S, QUIET_S, RUN_DIR, Activity
from launcher.execute.own_command import OwnCommand, own_command
from launcher.execute.supervise import Limits, Watch
from launcher.files.checkpoint import defect
from launcher.files.rank_status import read_statuses
from launcher.files.secrets import GIVEN
from launcher.parsing import UsageError, parse
from launcher.recipe.launch_file import load_launch
from launcher.recipe.schema import LaunchSection
from launcher.train import own_command as rank_side

LAUNCH = LaunchSection.model_construct()


def refused(call) -> list[tuple[str, str | None, int | None]]:
    with pytest.raises(RecipeError) as error:
        call()
    return [(problem.code, problem.path, problem.line) for problem in error.value.problems]


# --- the command line


def test_everything_behind_two_dashes_is_the_command_and_is_not_parsed():
    words = ["torchrun", "--nnodes", "1", "--json", "train.py", "--", "--resume"]
    command, options = parse(["run", "--resume", "auto", "--", *words])
    assert command.function().__name__ == "supervise_command"
    assert options["own"] == words
    assert (options["resume"], options["json"]) == ("auto", False)
    assert parse(["run", "recipe.yaml"])[0].function().__name__ == "run_command"


def test_options_of_a_recipe_are_none_of_a_command():
    with pytest.raises(UsageError, match="--tiny"):
        parse(["run", "--tiny", "--", "python", "train.py"])


def test_a_command_that_cannot_be_started_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    cases = {"usage": ([], ["effilaunch", "run", "x"]), "command-missing": (["torchrunn"], ["./train.py"])}
    for code, commands in cases.items():
        for words in commands:
            assert refused(lambda words=words: own_command(words, LAUNCH)) == [(code, None, None)]


def test_only_what_applies_to_a_command_is_read(tmp_path):
    file = tmp_path / "launch.yaml"
    file.write_text(
        "launch:\n  env: {A: '${ENV:NOT_SET}', RANK: '1'}\n  hostfile: h\n  hang_factor: x\nmodel: {}\n"
    )
    assert set(refused(lambda: load_launch(str(file), ["launch.max_restarts=-1"]))) == {
        ("env-missing", "launch.env.A", 2), ("owned-key", "launch.env.RANK", 2),
        ("unread-key", "launch.hostfile", 3), ("wrong-type", "launch.hang_factor", 4),
        ("unread-key", "model", 5), ("wrong-value", "launch.max_restarts", None),
    }  # fmt: skip
    assert refused(lambda: load_launch(str(tmp_path / "no.yaml"), [])) == [("unreadable", None, None)]
    for text, code in (
        ("launch: [1]", "wrong-type"),
        ("launch: {env: [1]}", "wrong-type"),
        ("- 1", "wrong-type"),
    ):
        file.write_text(text)
        assert [one[0] for one in refused(lambda: load_launch(str(file), []))] == [code]
    found = load_launch(None, ["launch.max_restarts=3", "launch.env.A=b"])
    assert (found.max_restarts, dict(found.env), found.hang_factor) == (3, {"A": "b"}, 20.0)


def test_secrets_in_the_command_are_hidden(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "of-the-environment")
    words = ("torchrun", "train.py", "--hub_token", "abcd-efgh-1234", "--password=geheim99", "--lr", "1e-4",
             "hf_" + "a" * 30, "of-the-environment", "--max_tokens", "128")  # fmt: skip
    shown = OwnCommand(words, "/bin/torchrun", LAUNCH).shown
    secret = "<secret>"
    assert shown == ["torchrun", "train.py", "--hub_token", secret, f"--password={secret}", "--lr", "1e-4",
                     secret, secret, "--max_tokens", "128"]  # fmt: skip
    assert OwnCommand(words, "/bin/torchrun", LAUNCH).name == "train.py"


# --- ranks that report nothing


@pytest.fixture
def two_ranks(tmp_path):
    """Two processes that wait, as a launcher starts them, the first with a child."""
    (tmp_path / "logs").mkdir()
    child = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'input()'])"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", child if rank == 0 else "input()"], stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, RUN_DIR: str(tmp_path), "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    yield tmp_path, [process.pid for process in started]
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ranks_are_found_by_their_environment_and_hang_without_output_and_work(two_ranks, monkeypatch):
    run_dir, pids = two_ranks
    now, percent, asked = [1000.0], [7], []
    activity = Activity(run_dir, ["GPU-a"], lambda uuids: asked.append(uuids) or percent[0], lambda: now[0])
    assert {rank: one.pid for rank, one in activity.ranks().items()} == dict(enumerate(pids))
    assert activity.world_size == 2
    monkeypatch.setattr(Activity, "_find_ranks", lambda self: dict(enumerate(pids)))
    watch = Watch(run_dir, 20.0, limits=Limits(start=200.0), unreported=activity.ranks)

    def hangs_after(seconds: float) -> bool:
        for _ in range(int(seconds / 5)):
            now[0] += 5.0
            watch.look(5.0)
        return watch.hang() is not None

    log = run_dir / "logs" / "launcher.log"
    log.write_text("started")
    os.utime(log, (now[0], now[0]))
    watch.look(1.0)
    assert not hangs_after(300)  # the GPUs work
    assert asked[0] == ["GPU-a"]
    assert len(asked) <= 300 / DEVICES_S
    percent[0] = 0
    assert not hangs_after(150)
    os.utime(log, (now[0], now[0]))  # a line of output
    assert not hangs_after(195)
    assert hangs_after(15)
    hang = watch.hang()
    assert hang is not None
    assert {rank: one.pid for rank, one in hang.statuses.items()} == dict(enumerate(pids))


def test_without_gpus_cpu_time_tells_who_works(two_ranks, monkeypatch):
    run_dir, _ = two_ranks
    now, used = [1000.0], [0.0]
    monkeypatch.setattr("launcher.execute.activity._cpu_seconds", lambda pid: used[0])
    activity = Activity(run_dir, clock=lambda: now[0])
    since = activity.ranks()[0].since
    for seconds, is_busy in ((QUIET_S + 5, False), (DEVICES_S, False), (DEVICES_S, True)):
        now[0] += seconds
        used[0] += DEVICES_S / 2 if is_busy else 0.1
        assert (activity.ranks()[0].since > since) is is_busy


def test_a_rank_that_vanishes_without_a_status_is_not_lost(tmp_path):
    watch = Watch(tmp_path, 20.0)
    seen = replace(Activity(tmp_path)._status(0, os.getpid()), pid=1)
    watch.unreported = lambda: {0: seen}
    watch.look(1.0)
    assert list(watch.living) == [0]
    watch.unreported = dict
    watch.look(1.0)
    assert not watch.in_trouble


# --- within the processes of the command


def python_in(run_dir: Path, code: str, *paths: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """An interpreter with effilaunch_rank.py and sitecustomize.py of a run, and other folders on its path."""
    from launcher.execute.own_command import _SITE

    folder = run_dir / "python"
    folder.mkdir(parents=True, exist_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    (folder / "effilaunch_rank.py").write_text(Path(rank_side.__file__).read_text())
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join(map(str, (folder, *paths)))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=run_dir,
        env={"PATH": os.environ["PATH"], RUN_DIR: str(run_dir), "PYTHONPATH": path, **env},
    )  # fmt: skip


def test_a_rank_has_its_log_without_secrets_its_error_and_the_hidden_sitecustomize(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'ran'")
    code = "import os, sys; print(os.environ['HIDDEN'], os.environ['MY_TOKEN']); raise ValueError('no rows')"
    env = {"WORLD_SIZE": "2", "MY_TOKEN": "abcdefgh1234", GIVEN: "MY_TOKEN"}
    done = [python_in(tmp_path, code, own, RANK=str(rank), **env) for rank in range(2)]
    assert [one.returncode for one in done] == [1, 1]
    assert [one.stdout for one in done] == ["ran <secret>\n", ""]
    assert "ValueError: no rows" in done[0].stderr
    for rank in range(2):
        log = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert log.startswith("ran <secret>\n")
        assert "ValueError: no rows" in log
        error = json.loads((tmp_path / f"logs/error-rank-{rank}.json").read_text())
        assert (error["type"], error["message"], error["rank"]) == ("ValueError", "no rows", rank)
    versions = json.loads((tmp_path / "logs/versions.json").read_text())
    assert versions["interpreter"] == sys.executable


def test_a_process_that_is_no_rank_keeps_its_output(tmp_path):
    done = python_in(tmp_path, "import sys; print(type(sys.stdout).__name__)")
    assert done.stdout == "TextIOWrapper\n"
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["versions.json"]


@pytest.fixture
def callback(tmp_path, monkeypatch):
    """The callback of a rank that trains alone, its arguments, and the state of its Trainer."""
    pytest.importorskip("transformers")
    monkeypatch.setenv(rank_side.LOGGED, "0")
    run_dir, out = tmp_path / "run", tmp_path / "out"
    for folder in (run_dir / "logs", run_dir / "checkpoints"):
        folder.mkdir(parents=True)
    args = SimpleNamespace(process_index=0, world_size=1, output_dir=str(out))
    state = SimpleNamespace(global_step=0, max_steps=10, num_input_tokens_seen=0)
    control = SimpleNamespace(
        should_training_stop=False, should_save=False, should_log=False, should_evaluate=True
    )
    found = rank_side._Callback(run_dir)
    yield found, args, state, control
    found._stop.unwatch()
    rank_side._leave()


def saved(out: str, step: int) -> Path:
    folder = Path(out) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of step {step}")
    return folder


def test_the_agreed_stop_saves_and_ends_the_script(callback):
    found, args, state, control = callback
    run_dir = found._run_dir
    found.on_train_begin(args, state, control)
    assert read_statuses(run_dir)[0].phase == "train"
    os.kill(os.getpid(), signal.SIGTERM)
    state.global_step = 1
    found.on_step_end(args, state, control)
    assert (control.should_training_stop, control.should_save, control.should_evaluate) == (True, True, False)
    folder = saved(args.output_dir, 1)
    found.on_save(args, state, control)
    with pytest.raises(SystemExit) as end:
        found.on_train_end(args, state, control)
    assert end.value.code == 0
    stopped = json.loads((run_dir / "stopped.json").read_text())
    assert (stopped["signal"], stopped["step"], stopped["checkpoint"]) == ("SIGTERM", 1, "checkpoint-1")
    assert defect(run_dir / "checkpoints/checkpoint-1", hashes=True) is None
    (folder / "model.safetensors").write_text("Weights of step 1")
    assert "SHA-256" in str(defect(run_dir / "checkpoints/checkpoint-1", hashes=True))
    assert read_statuses(run_dir) == {}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_resumed_trainer_drops_the_rows_and_links_of_later_steps(callback):
    found, args, state, control = callback
    run_dir = found._run_dir
    for step in (2, 4):
        (run_dir / f"checkpoints/checkpoint-{step}").symlink_to(saved(args.output_dir, step))
    rows = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    state.global_step = 2
    found.on_train_begin(args, state, control)
    state.global_step = 3
    found.on_log(args, state, control, logs={"loss": float("nan"), "epoch": 0.5})
    found.on_log(args, state, control, logs={"eval_loss": 2.0})
    found.on_log(args, state, control, logs={"train_runtime": 2.0})
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("loss"), row.get("eval_loss")) for row in lines] == [
        (1, 1.0, None), (2, 1.0, None), (3, None, None), (3, None, 2.0),
    ]  # fmt: skip
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert (Path(args.output_dir) / "checkpoint-4/model.safetensors").is_file()


def test_a_status_tells_steps_and_phases(callback):
    found, args, state, control = callback
    found.on_train_begin(args, state, control)
    for step in range(1, 5):
        found.on_step_begin(args, state, control)
        state.global_step = step
        control.should_save = step == 4
        found.on_step_end(args, state, control)
    found.status.write()
    status = read_statuses(found._run_dir)[0]
    assert (status.phase, status.step, status.steps, status.pid) == ("save", 4, 10, os.getpid())
    assert status.median is not None
    found.on_prediction_step(args, state, control)
    wait_until(lambda: read_statuses(found._run_dir)[0].phase == "evaluate", 10)


def test_outside_of_a_run_the_line_says_once_that_it_does_nothing(monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.delenv(RUN_DIR, raising=False)
    monkeypatch.setattr(effilaunch, "_said_outside", False)
    found = [effilaunch.callback() for _ in range(2)]
    assert [type(one) for one in found] == [transformers.TrainerCallback] * 2
    assert capsys.readouterr().err.count("does nothing") == 1


def test_the_line_needs_transformers_alone(tmp_path):
    """Without launcher, as in another environment, from the copies in the run directory."""
    (tmp_path / "transformers.py").write_text("class Trainer: train = None\nclass TrainerCallback: pass\n")
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "effilaunch.py").write_text(Path(effilaunch.__file__).read_text())
    code = (
        "import sys; sys.modules['launcher'] = None; import effilaunch; found = effilaunch.callback(); "
        "print(type(found).__name__, effilaunch.__file__)"
    )
    done = python_in(tmp_path, code, tmp_path)
    assert done.stdout == f"EffilaunchCallback {folder}/effilaunch.py\n", done.stderr


def test_the_first_rank_of_another_node_tells_its_supervisor_of_the_stop(callback, monkeypatch):
    found, args, state, control = callback
    monkeypatch.setenv("LOCAL_RANK", "0")
    args.process_index = 8
    found.on_train_begin(args, state, control)
    found._stop.ask(signal.SIGTERM)
    state.global_step = 1
    found.on_step_end(args, state, control)
    found.on_save(args, state, control)
    with pytest.raises(SystemExit):
        found.on_train_end(args, state, control)
    stopped = json.loads((found._run_dir / "stopped.json").read_text())
    assert (stopped["signal"], stopped["checkpoint"]) == ("SIGTERM", None)
    assert not list((found._run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(("asked", "folder", "resumed"), [
    (None, "out", True), (False, "out", True), ("own", "out", False), (None, "another", False),
])  # fmt: skip
def test_a_checkpoint_is_resumed_by_the_trainer_that_wrote_it(
    tmp_path, monkeypatch, capsys, asked, folder, resumed
):
    checkpoint = saved(str(tmp_path / "out"), 3)
    link = tmp_path / "checkpoint-3"
    link.symlink_to(checkpoint)
    monkeypatch.setenv(rank_side.RESUME, str(link))
    args = SimpleNamespace(process_index=0, output_dir=str(tmp_path / folder))
    assert rank_side._checkpoint_for(args, asked) == (str(checkpoint) if resumed else asked)
    assert ("WARNING" in capsys.readouterr().out) is not resumed
    assert rank_side._checkpoint_for(args, None) is None  # the second training of a script
