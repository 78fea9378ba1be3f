"""`submit`: checked before the queue, submitted, followed, cancelled; arrays."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from launcher.cli import main

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
ONE = "hardware: {num_nodes: 1, devices_per_node: 1, device: cpu}\n"
JOB = "launch: {slurm: {partition: low, time: 10}}\n"
ALONE = "launch: {slurm: {partition: low, time: 10, prepare: false}}\n"


def test_prepare_and_train_run_what_was_submitted(cluster, recipe, tmp_path, monkeypatch, capfd):
    """Behind its prepare job, with the recipe as it was: a later edit changes nothing."""
    monkeypatch.setenv("MY_TOKEN", "value-of-a-secret")
    path = recipe(ONE + "launch: {slurm: {partition: low, time: 10}, env: {MY_TOKEN: '${ENV:MY_TOKEN}'}}\n")
    given = path.read_text()
    run_dir = tmp_path / "a b%j" / "run"
    assert main(["submit", str(path), "--to", "slurm", "--output-dir", str(run_dir), "--detach"]) == 0
    path.write_text("model: {name_or_path: ./elsewhere}\n")
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--detach"]) == 2  # broken now
    capfd.readouterr()
    assert main(["submit", str(run_dir), "--follow", "--json"]) == 0
    shown = capfd.readouterr()
    told = json.loads(shown.out)
    assert told["result"]["steps"] == 6
    assert "(prepare) is done" in shown.err
    assert (run_dir / "recipe.yaml").read_text() == given
    record = json.loads((run_dir / "submit.json").read_text())
    assert cluster.job(record["jobs"]["run"])["JobState"] == "COMPLETED"
    for file in run_dir.rglob("*"):
        assert not file.is_file() or b"value-of-a-secret" not in file.read_bytes(), file
    if shutil.which("shellcheck"):
        scripts = [str(run_dir / name) for name in ("job.sbatch", "prepare.sbatch")]
        checked = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    # nothing is submitted into a folder that holds a run
    path.write_text(given)
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--detach"]) == 2
    assert "is not empty" in capfd.readouterr().err
    assert main(["submit", str(run_dir)]) == 2
    assert "was submitted from" in capfd.readouterr().err


REFUSED = [
    ("launch.slurm.partition=nope", "slurm-partition", "launch.slurm.partition", "short: 1 node"),
    ("launch.slurm.time=2-00:00:00", "slurm-time", "launch.slurm.time", "60 minutes"),
    ("launch.slurm={partition: short, time: 30}", "slurm-time", "launch.slurm.time", "low, high, wide"),
    ("launch.slurm.time=2", "slurm-time", "launch.slurm.time", ""),
    ("hardware.num_nodes=3", "slurm-nodes", "hardware.num_nodes", "low has 2"),
    ("hardware.devices_per_node=8", "slurm-refused", "launch.slurm.cpus_per_task", "2 CPUs"),
    ("hardware={device: A100-80GB, devices_per_node: 8}", "slurm-devices", "hardware", "8 device(s)"),
    ("launch.slurm.mem=64G", "slurm-refused", "launch.slurm.mem", "64G"),
    ("launch.slurm.constraint=a100", "slurm-refused", "launch.slurm.constraint", "a100"),
    ("launch.slurm.exclude=n9", "slurm-refused", "launch.slurm.exclude", "n9"),
    ("launch.slurm.reservation=r", "slurm-refused", "launch.slurm.reservation", ""),
    ("launch.slurm.options={mail-type: NEVER}", "slurm-refused", "launch.slurm.options.mail-type", "NEVER"),
    ("launch.slurm.options={bogus: 1}", "slurm-refused", "launch.slurm.options", "'--bogus=1'"),
    ("launch.slurm.prepare.cpus_per_task=9", "slurm-refused", "launch.slurm.prepare.cpus_per_task", "is 9"),
]


@pytest.mark.parametrize(("override", "code", "key", "shown"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_slurm_would_reject_is_refused_before_the_queue(
    recipe, override, code, key, shown, capsys, tmp_path
):
    path = recipe(ONE + JOB)
    run_dir = tmp_path / "run"
    assert main(["submit", str(path), "--output-dir", str(run_dir), "--set", override, "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["code"], error["path"]) == (code, key)
    assert shown in f"{error['message']} {error['hint']}"
    assert not run_dir.exists()


def test_a_dry_run_writes_and_submits_nothing(cluster, recipe, tmp_path, capsys):
    before = set(cluster.run("squeue", "-h", "-o", "%i").stdout.split())
    path = recipe(ONE + JOB)
    assert main(["submit", str(path), "--dry-run", "--json", "--output-dir", str(tmp_path / "run")]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {"job.sbatch", "prepare.sbatch", "submitted.yaml", "plan.json", "recipe.yaml"} <= files.keys()
    assert not (tmp_path / "run").exists()
    after = set(cluster.run("squeue", "-h", "-o", "%i").stdout.split())
    assert after <= before, "jobs of other tests may end meanwhile"


def test_a_job_whose_data_cannot_be_prepared_is_told_and_cancelled(cluster, recipe, base, tmp_path, capfd):
    path = recipe(ONE + JOB)
    text = path.read_text().replace("rows.jsonl", "broken.jsonl")
    path.write_text(text)
    # Before anything is queued the first rows are looked at, and no more.
    rows = (base / "rows.jsonl").read_text() * 200
    (base / "broken.jsonl").write_text(rows + '{"nothing": "to learn"}\n')
    assert main(["submit", str(path), "--output-dir", str(tmp_path / "run")]) == 2
    shown = capfd.readouterr()
    assert "the data could not be prepared: " in shown.err
    assert "broken.jsonl" in shown.err
    record = json.loads((tmp_path / "run" / "submit.json").read_text())
    assert cluster.job(record["jobs"]["run"])["JobState"] == "CANCELLED"


def test_all_problems_of_a_sweep_come_at_once(recipe, tmp_path, capsys):
    path = recipe(ONE + ALONE)
    sweep = ["--sweep", "trainer.optim=adamw_torch,adamw_torsh", "--sweep", "precision=fp32,fp23"]
    assert main(["submit", str(path), *sweep, "--output-dir", str(tmp_path / "sweep")]) == 2
    shown = capsys.readouterr().err
    assert "adamw_torsh" in shown
    assert "fp23" in shown
    assert not (tmp_path / "sweep").exists()
    sizes = ["--sweep", "hardware.num_nodes=1,2", "--output-dir", str(tmp_path / "sweep")]
    assert main(["submit", str(path), *sizes]) == 2
    assert "one array" in capsys.readouterr().err
