"""The job scripts as whole texts, and what decides at their end."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from factories import facts, recipe

from launcher.errors import RecipeError
from launcher.execute.run_dir import Stopped
from launcher.machine.bash_syntax import check_shell
from launcher.machine.hardware import parse_hardware
from launcher.planner.planner import make_plan
from launcher.schedulers.queue import PlannedRun, Submission
from launcher.schedulers.slurm_commands import without_defaults
from launcher.schedulers.slurm_requeue import decide
from launcher.schedulers.slurm_script import (
    check_warning,
    render_job,
    render_prepare_job,
    warning_seconds,
)

BASE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
launch:
  slurm:
"""
GPUS = """\
#!/bin/bash
#SBATCH --job-name=tune
#SBATCH --chdir=/home/me
#SBATCH --partition=gpu
#SBATCH --account=ab123
#SBATCH --time=1-00:00:00
#SBATCH --constraint=a100|h100
#SBATCH --mem=64G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=a100:8
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="/data/my runs/50%%/logs/slurm-%j.out"
#SBATCH --export=ALL
#SBATCH --mail-type=END
#SBATCH --exclusive
#SBATCH --comment="a \\"quoted\\" word"
# Written by `effilaunch submit`; `sbatch` with this file resumes the run.
set -eo pipefail
run_dir='/data/my runs/50%'
echo "==== start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID, $SLURM_JOB_NODELIST ===="
module load cuda/12.4
rm -f "$run_dir/stopped.json"  # of an earlier start
export EFFILAUNCH_EXCLUDES=1  # the requeue below leaves out a node with a faulty GPU
code=0
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 --cpus-per-task=32 \\
  /opt/venv/bin/python -m launcher.cli run "$run_dir/submitted.yaml" \\
  --output-dir "$run_dir" --resume auto || code=$?
case "$code" in
130 | 138 | 143)
  # Asked to stop: a preempted job, and one near its time limit, are requeued.
  /opt/venv/bin/python -m launcher.schedulers.slurm_requeue "$run_dir"
  ;;
0 | 2 | 3 | 4) ;;
*)
  # Failed: a job that lost a node, or a GPU of it, is requeued on others.
  /opt/venv/bin/python -m launcher.schedulers.slurm_requeue "$run_dir" --lost 2
  ;;
esac
exit "$code"
"""
PREPARES = """\
#!/bin/bash
#SBATCH --job-name=tune-prepare
#SBATCH --chdir=/home/me
#SBATCH --partition=cpu
#SBATCH --account=ab123
#SBATCH --time=1-00:00:00
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --open-mode=append
#SBATCH --output="/data/my runs/50%%/logs/slurm-prepare-%j.out"
#SBATCH --export=ALL
# Written by `effilaunch submit`; `sbatch` with this file resumes the run.
set -eo pipefail
run_dir='/data/my runs/50%'
echo "==== start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID, $SLURM_JOB_NODELIST ===="
module load cuda/12.4
/opt/venv/bin/python -m launcher.cli prepare "$run_dir/submitted.yaml"
"""
KEYS = """\
    partition: gpu
    account: ab123
    time: 1-00:00:00
    constraint: a100|h100
    mem: 64G
    cpus_per_task: 32
    gpus_per_node: a100:8
    setup: [module load cuda/12.4]
    prepare: {partition: cpu, cpus_per_task: 8}
    options: {mail-type: END, exclusive: true, comment: a "quoted" word}
"""


def job(here: Path, keys: str, on: str = "2x8xA100-80GB", text: str = BASE, **changes) -> Submission:
    loaded = recipe(here, text + (keys or "    {}\n"))
    plan = make_plan(loaded, facts(on))
    given = {
        "name": "tune",
        "python": "/opt/venv/bin/python",
        "cwd": "/home/me",
        "folder": Path("/r"),
        "hardware": parse_hardware(on),
        "launch": loaded.recipe.launch,
        **changes,
    }
    return Submission(**{"runs": (PlannedRun(given["folder"], plan, {}),), **given})


def sweep(asked: Submission, run_dirs: list[str]) -> Submission:
    plan = asked.runs[0].plan
    return replace(asked, runs=tuple(PlannedRun(Path(path), plan, {"seed": path}) for path in run_dirs))


def checked(script: str, tmp_path: Path) -> None:
    """No variable in an option, and nothing that shellcheck would say."""
    assert not [line for line in script.splitlines() if line.startswith("#SBATCH") and "$" in line]
    if shutil.which("shellcheck") is not None:
        (tmp_path / "job.sh").write_text(script)
        done = subprocess.run(["shellcheck", str(tmp_path / "job.sh")], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_job_on_gpus_and_its_prepare_job(tmp_path):
    asked = job(tmp_path, KEYS, folder=Path("/data/my runs/50%"))
    script, prepare = render_job(asked), render_prepare_job(asked, asked.runs)
    assert script == GPUS
    assert prepare == PREPARES
    checked(script, tmp_path)
    checked(prepare, tmp_path)


def test_an_elastic_job_takes_from_the_least_to_the_most_nodes_and_outlives_one(tmp_path):
    asked = job(tmp_path, "", on="3x8xA100-80GB")
    sizes = asked.launch.model_copy(update={"min_nodes": 2, "max_nodes": 4})
    script = render_job(replace(asked, launch=sizes))
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2-4", "#SBATCH --no-kill"} <= {*lines}
    (step,) = [line.split() for line in lines if line.startswith("srun ")]
    assert {'--nodes="$SLURM_JOB_NUM_NODES"', '--ntasks="$SLURM_JOB_NUM_NODES"', "--no-kill"} <= {*step}
    assert '"$run_dir" --lost 2' in script
    checked(script, tmp_path)


@pytest.mark.parametrize(
    ("ends", "code", "asks"),
    [("exit 130", 130, True), ("kill -USR1 $$", 138, True), ("kill -TERM $$", 143, True),
     ("exit 5", 5, True), ("exit 2", 2, False), ("exit 0", 0, False)],
)  # fmt: skip
def test_the_script_asks_for_a_requeue_after_every_stop_by_a_signal_and_every_failure(
    ends, code, asks, tmp_path
):
    """Also where the signal came before Python listened; the word of an earlier start decides nothing."""
    for name, text in (("srun", ends), ("python", f'echo "$*" > {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    asked = job(tmp_path, "", python=str(tmp_path / "python"), folder=tmp_path)
    (tmp_path / "stopped.json").write_text("{}")
    (tmp_path / "job.sh").write_text(render_job(asked))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], env=env, capture_output=True)
    assert done.returncode == code
    assert (tmp_path / "asked").is_file() == asks
    assert not asks or ("--lost" in (tmp_path / "asked").read_text()) is (code == 5)
    assert not (tmp_path / "stopped.json").exists()


def test_an_array_finds_its_run_directory_by_its_index(tmp_path):
    run_dirs = ["/s/0-a", "/s/1-it's", "/s/2-$x"]
    asked = job(tmp_path, "    array_limit: 2\n", on="2xcpu", tiny=True, folder=Path("/s"))
    asked = sweep(asked, run_dirs)
    script = render_job(asked)
    checked(script, tmp_path)
    assert "#SBATCH --array=0-2%2\n" in script
    assert "#SBATCH --output=/s/logs/slurm-%A_%a.out\n" in script
    assert "gpus" not in script
    assert "#SBATCH --cpus-per-task=2\n" in script  # a process has a CPU at least
    assert "--resume auto --tiny" in script
    begin = script[script.index("run_dirs=(") : script.index("echo ")]
    for index, run_dir in enumerate(run_dirs):
        env = {"SLURM_ARRAY_TASK_ID": str(index)}
        done = subprocess.run(
            ["bash", "-c", begin + 'echo "$run_dir"'], env=env, capture_output=True, text=True
        )
        assert done.stdout == f"{run_dir}\n"
    both = render_prepare_job(asked, asked.runs[:2])
    checked(both, tmp_path)
    assert "for run_dir in /s/0-a " in both


def test_devices_by_their_number_or_as_a_resource_and_no_prepare_job(tmp_path):
    assert "#SBATCH --gpus-per-node=8\n" in render_job(job(tmp_path, ""))
    named = job(tmp_path, "    gres: gpu:a100:8\n    prepare: false\n")
    script = render_job(named)
    assert "#SBATCH --gres=gpu:a100:8\n" in script
    assert "gpus-per-node" not in script
    assert render_prepare_job(named, named.runs) is None


def test_the_warning_leaves_time_for_a_step_and_a_save(tmp_path):
    whole = BASE.replace("adapter: {type: lora, r: 8}\n", "")
    asked = job(tmp_path, "    time: 30\n", text=whole)
    stop = asked.runs[0].plan.runtime.stop_seconds
    assert stop > 60  # a whole 7B model with its states
    assert warning_seconds(asked) == stop + 120
    small = job(tmp_path, "    time: 3\n")
    # Of a sweep, the run that takes longest to stop decides.
    both = replace(small, runs=(*small.runs, *asked.runs))
    assert warning_seconds(both) == warning_seconds(asked)
    problem = check_warning(small)
    assert (problem.path, problem.code) == ("launch.slurm.time", "slurm-time")
    for enough in ("4", "1-0"):
        assert check_warning(job(tmp_path, f"    time: '{enough}'\n")) is None


@pytest.mark.parametrize("name", ["/a\\b", '/a"b', "/a\nb", "/a$b"])
def test_names_that_slurm_takes_for_no_log(name, tmp_path):
    with pytest.raises(RecipeError) as caught:
        render_job(job(tmp_path, "", folder=Path(name)))
    assert caught.value.problems[0].code == "run-dir-name"


@pytest.mark.parametrize("folder", ["/a\nsrun x", '/a"b', "/a$b", "/a\rb"])
def test_a_current_folder_that_would_end_its_line_is_refused(folder, tmp_path):
    asked = job(tmp_path, "", cwd=folder)
    for render in (
        lambda: render_job(asked),
        lambda: render_prepare_job(asked, asked.runs),
        lambda: render_job(sweep(asked, ["/r/0"])),
    ):
        with pytest.raises(RecipeError) as caught:
            render()
        assert caught.value.problems[0].code == "folder-name"


def test_variables_do_not_win_over_the_script():
    environ = {"SBATCH_PARTITION": "x", "SBATCH_TIMELIMIT": "1", "SBATCH_EXPORT": "NONE", "SBATCH_QOS": "q",
               "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_CONF": "/c", "HOME": "/h"}  # fmt: skip
    script = "#SBATCH --partition=low\n#SBATCH --time=5\n#SBATCH --export=ALL\n"
    assert without_defaults(environ, script) == {"SBATCH_QOS": "q", "SLURM_CONF": "/c", "HOME": "/h"}


@pytest.mark.parametrize(
    ("lines", "entry"),
    [(["a", 'module load "cuda'], 1), (["if true; then", "x"], 1), (["a", "cat <<E", "b", "c"], 1),
     (["a\nb", "c; fi", "d"], 1), (["module load x \\"], 0), (["a && ", "b &&"], 1),
     (["x", "echo $(ls", "y"], 1)],
)  # fmt: skip
def test_lines_of_setup_that_bash_cannot_read(lines, entry):
    found = check_shell(lines, "launch.slurm.setup")
    assert found is not None
    assert found.path.startswith("launch.slurm.setup[")
    if "$(" not in str(lines):  # bash says where this one ends, not where it began
        assert found.path == f"launch.slurm.setup[{entry}]"


@pytest.mark.parametrize(
    "lines",
    [[], ["module load cuda/12.4"], ["if true; then", "  x", "fi"], ['a "b', 'c"'], ["exit 3"],
     ["shopt -s extglob", "ls !(a)"], ["cat <<E", "b", "E"], ["x \\", "y"], ["echo \\\\"], ["echo \u00e9"]],
)  # fmt: skip
def test_lines_of_setup_that_bash_can_read_are_not_run(lines, monkeypatch, tmp_path):
    (tmp_path / "env").write_text("echo bash: line 1: no")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "env"))
    assert check_shell([*lines], "p") is None
    assert check_shell([*lines, f"touch {tmp_path}/ran"], "p") is None
    assert not (tmp_path / "ran").exists()


RUNNING = {"State": "RUNNING", "StartTime": "2026-01-01T10:00:00", "PreemptTime": ""}
PREEMPTED = RUNNING | {"PreemptTime": "2026-01-01T11:00:00"}
LONG_AGO = PREEMPTED | {"StartTime": "2026-01-01T12:00:00"}
USR1, TERM = Stopped("SIGUSR1", 9), Stopped("SIGTERM", 9)


@pytest.mark.parametrize(
    ("known", "stopped", "checkpoint", "before", "again"),
    [
        (RUNNING, USR1, 9, 4, True),
        (RUNNING, USR1, 4, 4, False),  # no progress since the last start
        (RUNNING, USR1, 0, 0, False),
        (RUNNING, TERM, 9, 4, False),  # somebody's `scancel --signal=TERM`
        (RUNNING, None, 0, 0, False),
        (PREEMPTED, TERM, 9, 4, True),
        (PREEMPTED, None, 0, 0, True),  # before its first step
        (LONG_AGO, TERM, 9, 4, False),  # preempted before it was requeued
        (LONG_AGO, USR1, 9, 4, True),
        (RUNNING | {"State": "COMPLETING"}, TERM, 9, 4, False),  # scancel
        (RUNNING | {"State": "CANCELLED"}, USR1, 9, 4, False),
        (None, USR1, 9, 4, False),
    ],
)
def test_which_jobs_are_requeued(known, stopped, checkpoint, before, again):
    decided, why = decide(known, stopped, checkpoint, before)
    assert decided is again
    assert why
