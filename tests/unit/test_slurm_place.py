"""SLURM_* as Debian's Slurm 22.05 sets them -> a place among the tasks, or what is wrong."""

from __future__ import annotations

import os
import re
import shlex

import pytest

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.inputs.planning_facts import usable_cores
from launcher.schedulers.slurm_allocation import (
    expand_counts,
    expand_hosts,
    forgotten_srun,
    place_in,
    read_allocation,
    runs_alone,
    time_seconds,
    wrong_tasks,
)

JOB = "SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n[1-2] SLURM_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2"
# Recorded: the script of `sbatch -N2 --ntasks-per-node=2`, a task of its srun, the shell of `salloc -N2`.
BATCH = f"{JOB} SLURMD_NODENAME=n1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_TASKS_PER_NODE=2(x2)"
SALLOC = f"{JOB} SLURM_TASKS_PER_NODE=1(x2)"
STEP = (
    f"{JOB} SLURMD_NODENAME=n2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_NODEID=1 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_TASKS_PER_NODE=2(x2)"
)
FIRST = STEP.replace("NODEID=1", "NODEID=0").replace("PROCID=3", "PROCID=0").replace("LOCALID=1", "LOCALID=0")
RUN = "effilaunch run r.yaml"


def read(text: str, host: str = "login"):
    return read_allocation(dict(word.split("=", 1) for word in text.split()), host)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[001-003,7],gpu-a[1-2]", ["n001", "n002", "n003", "n7", "gpu-a1", "gpu-a2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_host_lists(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n1]", "n[a-b]", "n[3-1]", "a,,b", "n[1-999999]", "n[[1]]", "a b"]
)
def test_what_is_no_host_list(text):
    with pytest.raises(ValueError, match=r"\S"):
        expand_hosts(text)


def test_counts():
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    for text in ("", "x", "2(x", "1,,2"):
        with pytest.raises(ValueError, match="not a list of counts"):
            expand_counts(text)


def test_a_task_of_a_step():
    found = read(STEP)
    assert forgotten_srun(found, RUN) is None
    place = place_in(found, lambda host: f"address-of-{host}")
    assert place.job == "slurm-1.0"
    assert (place.member, place.members, place.num_nodes, place.node_rank) == (3, 4, 2, 1)
    assert (place.tasks_per_node, place.local_task, place.head) == (2, 1, "address-of-n1")
    assert list(place.ranks(2)) == [3]


def test_ports_differ_by_job_and_step_and_are_no_outgoing_ones():
    places = [
        place_in(read(STEP.replace("JOB_ID=1", f"JOB_ID={job}").replace("STEP_ID=0", f"STEP_ID={step}")))
        for job in (1, 2, 3, 999_999)
        for step in (0, 1)
    ]
    ports = [place.port for place in places]
    assert len(set(ports)) == len(ports)
    assert all(port >= 20_000 and port + 15 < 32_768 for port in ports)
    assert min(abs(a - b) for a in ports for b in ports if a != b) >= 16


def test_no_job_no_allocation():
    assert read("HOME=/root") is None
    assert read("SLURM_JOB_ID=1") is None  # a shell that pam_slurm_adopt put into a job


def test_a_batch_script_of_several_nodes_lacks_its_srun():
    problem = forgotten_srun(read(BATCH), RUN)
    assert problem.code == "slurm-no-srun"
    assert problem.hint == f"write `srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {RUN}`"


@pytest.fixture
def started(tmp_path, monkeypatch, capsys):
    """Runs a command beside a recipe r.yaml in a task of Slurm's; returns what it says."""
    (tmp_path / "r.yaml").write_text("model: {name_or_path: m}\ndata: {train: [{path: rows.jsonl}]}\n")
    monkeypatch.chdir(tmp_path)

    def start(variables: str, *command: str) -> str:
        for word in variables.split():
            monkeypatch.setenv(*word.split("=", 1))
        assert main([*command]) == 2
        return capsys.readouterr().err

    return start


@pytest.mark.parametrize(
    "command",
    ["run r.yaml --on 2x1xcpu --set seed=3 --set 'data.max_length= 64' --output-dir 'a b' --resume auto",
     "doctor r.yaml --rehearse"],
)  # fmt: skip
def test_the_line_to_write_is_the_command_that_was_given(command, started):
    assert f"--ntasks-per-node=1 effilaunch {command}`" in started(BATCH, *shlex.split(command))


@pytest.mark.parametrize(
    ("command", "mended"),
    [("run r.yaml --on 3x2xcpu --output-dir o", "run r.yaml --on 2x2xcpu --output-dir o"),
     ("run --on=3x2xcpu r.yaml", "run --on 2x2xcpu r.yaml"),
     ("run r.yaml --set 'hardware={num_nodes: 3, devices_per_node: 2, device: cpu}'",
      "run --on 2x2xcpu r.yaml --set 'hardware={num_nodes: 3, devices_per_node: 2, device: cpu}'")],
)  # fmt: skip
def test_a_plan_for_more_nodes_than_the_job_has(command, mended, started):
    """srun cannot give them: another job, or other hardware."""
    said = started(STEP, *shlex.split(command))
    assert (
        "start it in a job of 3 nodes; or, for the 2 of this one, write `srun --nodes=2 --ntasks=2 " in said
    )
    assert said.count(f"effilaunch {mended}`") == 2


def test_a_step_of_fewer_nodes_than_the_job_has(started):
    command = "run r.yaml --on 3x2xcpu"
    said = started(STEP.replace(JOB, JOB.replace("n[1-2]", "n[1-3]")), *command.split())
    assert f"write `srun --nodes=3 --ntasks=3 --ntasks-per-node=1 effilaunch {command}`" in said
    assert "this one" not in said


def test_a_batch_script_of_one_node_runs_with_a_note():
    found = read(BATCH.replace("n[1-2]", "n1").replace("2(x2)", "2"))
    assert forgotten_srun(found, RUN) is None
    assert "job 1 has one node" in runs_alone(found)


def test_the_shell_of_salloc():
    assert forgotten_srun(read(SALLOC), RUN).code == "slurm-login-node"
    # On the only node itself, as on a workstation, it may.
    alone = SALLOC.replace("n[1-2]", "n1").replace("1(x2)", "1")
    assert forgotten_srun(read(alone, "n1.cluster.org"), RUN) is None
    assert forgotten_srun(read(alone, "login"), RUN).code == "slurm-login-node"


@pytest.mark.parametrize("number", ["4294967290", "4294967291", "4294967292", "4294967293"])
def test_the_steps_of_slurm_itself_are_none(number):
    found = read(f"{BATCH} SLURM_STEP_ID={number} SLURM_STEP_NODELIST=n1 SLURM_STEP_TASKS_PER_NODE=1")
    assert (found.step, found.hosts) == (None, ("n1", "n2"))


@pytest.mark.parametrize(
    ("tasks", "nodes", "devices", "right"),
    [("1(x2)", 2, 8, True), ("8(x2)", 2, 8, True), ("2,1", 2, 8, False), ("4(x2)", 2, 8, False),
     ("1(x2)", 1, 8, False), ("1(x2)", 4, 8, False), ("1(x2)", 2, 1, True)],
)  # fmt: skip
def test_tasks_are_one_a_node_or_one_a_device(tasks, nodes, devices, right):
    found = read(FIRST.replace("STEP_TASKS_PER_NODE=2(x2)", f"STEP_TASKS_PER_NODE={tasks}"))
    problem = wrong_tasks(found, nodes, devices, RUN, RUN)
    assert (problem is None) == right
    if problem is not None and nodes <= 2:
        assert f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {RUN}" in problem.hint


@pytest.mark.parametrize(
    "broken",
    ["SLURM_STEP_NODELIST=n[1-", "SLURM_PROCID=x", "SLURM_STEP_TASKS_PER_NODE=1", "SLURM_STEP_ID=\u00b2",
     f"SLURM_STEP_ID={'1' * 5000}", "SLURM_JOB_ID=\u00b2", "SLURM_NODEID=-1", f"SLURM_PROCID={'1' * 5000}"],
)  # fmt: skip
def test_variables_that_slurm_would_not_write(broken):
    name = broken.partition("=")[0]
    with pytest.raises(RecipeError, match="cannot be read"):
        read(re.sub(rf"{name}=\S+", broken, STEP))


@pytest.mark.parametrize(
    ("broken", "said"),
    [("SLURM_PROCID=4", "SLURM_PROCID=4, and there are 4 task(s) of the step, counted from 0"),
     ("SLURM_NODEID=2", "SLURM_NODEID=2, and there are 2 node(s) of the step"),
     ("SLURM_LOCALID=2", "SLURM_LOCALID=2, and there are 2 task(s) on node 1"),
     ("SLURM_PROCID=", "SLURM_PROCID is missing"), ("SLURM_NODEID=", "SLURM_NODEID is missing"),
     ("SLURM_LOCALID=", "SLURM_LOCALID is missing")],
)  # fmt: skip
def test_a_task_of_a_step_has_a_place_in_it(broken, said):
    """Else each task without a number would be the first one."""
    name = broken.partition("=")[0]
    given = "" if broken.endswith("=") else broken
    with pytest.raises(RecipeError, match=re.escape(said)):
        read(re.sub(rf"{name}=\S+", given, STEP))
    assert read(re.sub(rf"{name}=\S+", given, BATCH)).step is None  # there it is nobody's place


def test_tasks_may_be_dealt_out_node_by_node_or_in_turn():
    cyclic = read(
        STEP.replace("NODEID=1 SLURM_PROCID=3 SLURM_LOCALID=1", "NODEID=1 SLURM_PROCID=1 SLURM_LOCALID=0")
    )
    assert list(place_in(cyclic).ranks(2)) == [2]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86400), ("1-00:00:00", 86400), ("2-12", 216000),
     ("1-01:30", 91800), ("infinite", None), ("abc", None)],
)  # fmt: skip
def test_times(text, seconds):
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("slurm", "on_node", "cores"),
    [("", "", 3), (STEP, "6", 6), (STEP, "3", 3), (FIRST.replace("2(x2)", "1(x2)"), "6", 3)],
)
def test_the_cores_that_a_run_may_use(monkeypatch, slurm, on_node, cores):
    """Two tasks a node, each bound to three cores of its own, or sharing three; one that has three."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for word in slurm.split():
        monkeypatch.setenv(*word.split("=", 1))
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", on_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7})
    assert usable_cores() == cores
