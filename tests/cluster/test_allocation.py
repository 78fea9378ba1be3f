"""`run` inside an allocation: batch scripts, salloc, plain srun; one task a node, one a device."""

from __future__ import annotations

import json

import pytest

from launcher.schedulers.slurm_allocation import expand_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("text", ["n[001-003,7],gpu-a[1-2]", "a", "a,b", "r[1-2]n[01-03]", "x[9-11]"])
def test_host_lists_are_read_as_slurm_reads_them(cluster, text):
    assert list(expand_hosts(text)) == cluster.run("scontrol", "show", "hostnames", text).stdout.split()


def test_plain_srun_without_hardware_takes_that_of_the_step(cluster, recipe, tmp_path):
    """Nodes are those of the step, tasks beyond one a node its devices; nobody but the first task plans."""
    run = ["effilaunch", "run", str(recipe()), "--dry-run", "--output-dir", str(tmp_path / "run")]
    cluster.run("srun", "-N1", "-n2", "bash", "-c", 'test "$SLURM_PROCID" = 1 || exec "$@"', "bash", *run)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["hardware"]["num_nodes"], plan["hardware"]["devices_per_node"]) == (1, 2)
    assert plan["batch"]["data_parallel"] == 2


def test_a_forgotten_srun_is_refused_with_the_line_to_write(cluster, recipe, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\neffilaunch run {recipe()}\n")
    log = tmp_path / "job.out"
    ended = cluster.run("sbatch", "--wait", "-N2", "-t10", f"-o{log}", str(script), check=False)
    assert ended.returncode == 2
    assert "without srun this runs only on the first" in log.read_text()
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 effilaunch run" in log.read_text()


def test_the_shell_of_salloc_is_no_node(cluster, recipe):
    path = recipe()
    done = cluster.run("salloc", "-N1", "effilaunch", "run", str(path), check=False)
    assert done.returncode == 2
    assert f"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 effilaunch run {path}" in done.stderr


def test_tasks_that_fit_no_plan_are_refused_by_all_in_the_same_words(cluster, recipe):
    """More ranks than the nodes have, too: three tasks for two nodes of eight devices."""
    done = cluster.run(
        "srun", "-N2", "-n3", "effilaunch", "run", str(recipe()), "--on", "2x8xA100-80GB", check=False
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 3
    assert len(set(said)) == 1
    assert "3 task(s) on 2 node(s), but the plan is for 2 node(s) with 8 device(s) each" in said[0]
    assert done.returncode == 2


def test_a_batch_script_of_one_node_runs_without_srun_and_says_so(cluster, recipe, tmp_path):
    log = tmp_path / "job.out"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\neffilaunch run {recipe()} --dry-run --output-dir {tmp_path}/dry\n"
                      f"effilaunch run {tmp_path}/absent.yaml\n")  # fmt: skip
    cluster.run("sbatch", "--wait", "-N1", "-t10", f"-o{log}", str(script), check=False)
    assert "nothing was started" in log.read_text()


def test_a_hostfile_under_srun_is_refused_by_every_task(cluster, recipe, base):
    (base / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    path = recipe("launch: {hostfile: hosts}\n")
    done = cluster.run("srun", "-N2", "effilaunch", "run", str(path), "--on", "2x1xcpu", check=False)
    assert done.returncode == 2
    assert done.stderr.count("error: launch.hostfile: ") == 2
