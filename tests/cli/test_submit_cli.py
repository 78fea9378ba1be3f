"""`submit` where no Slurm is: a laptop sees the scripts, and what is wrong with a recipe."""

from __future__ import annotations

import json
import re

import pytest

from launcher.cli import main

RECIPE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: absent/rows.jsonl}], max_length: 512}
trainer: {max_steps: 10}
launch: {slurm: {partition: gpu, time: 24:00:00, cpus_per_task: 32}}
"""
MANY = "9" * 5000
OFFLOADED = ["--set", "sharding={engine: deepspeed, zero_stage: 2, offload_optimizer: cpu}"]


@pytest.fixture(autouse=True)
def without_slurm(tmp_path, monkeypatch):
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_needs_neither_slurm_nor_data(tmp_path, capsys):
    assert main(["submit", "r.yaml", "--to", "slurm", "--on", "2x8xA100-80GB", "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "#SBATCH --nodes=2\n" in found["files"]["job.sbatch"]
    assert "#SBATCH --time=24:00:00\n" in found["files"]["prepare.sbatch"]
    assert json.loads(found["files"]["plan.json"])["hardware"]["num_nodes"] == 2
    assert '"num_nodes": 2' in found["files"]["submitted.yaml"]  # the job plans for what --on said
    assert "were not checked by the scheduler" in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml"]


@pytest.mark.parametrize(
    ("on", "changes", "threads"),
    [
        ("2x8xA100-80GB", OFFLOADED, 4),  # 32 CPUs of a node for its 8 processes
        ("2x8xA100-80GB", [*OFFLOADED, "--set", "launch.slurm.cpus_per_task=96"], 12),
        ("2xcpu", ["--tiny", "--set", "launch.slurm.cpus_per_task=null"], 1),  # the job has one a process
    ],
)
def test_the_threads_are_planned_for_the_cpus_of_the_job(on, changes, threads, capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1000)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000)))
    assert main(["submit", "r.yaml", "--on", on, *changes, "--dry-run", "--json"]) == 0
    plan = json.loads(json.loads(capsys.readouterr().out)["files"]["plan.json"])
    assert plan["env"]["OMP_NUM_THREADS"] == str(threads)


def test_a_job_without_a_time_limit_is_warned_of_with_the_time_that_the_plan_expects(capsys):
    words = ["submit", "r.yaml", "--on", "8xA100-80GB", "--dry-run", "--set", "trainer.max_steps=100000"]
    assert main([*words, "--set", "launch.slurm.time=null"]) == 0
    told = capsys.readouterr()
    hint = r"launch\.slurm\.time is not set: .* about [\d.e+]+ h"
    assert re.search(hint, told.err)
    assert len(re.findall(f"  # {hint}", told.out)) == 1, "in the script of the job alone"
    assert main(words) == 0
    told = capsys.readouterr()
    assert "slurm.time" not in told.out + told.err


def test_a_dry_run_does_without_a_slurm_that_is_silent(tmp_path, capsys):
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    assert main(["submit", "r.yaml", "--on", "8xA100-80GB", "--dry-run"]) == 0
    assert "were not checked by the scheduler" in capsys.readouterr().err
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/rows.jsonl").write_text('{"text": "a b c"}\n')
    assert main(["submit", "r.yaml", "--on", "8xA100-80GB"]) == 4
    assert "gives no answer" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("tiny", [False, True])
def test_each_run_of_a_sweep_is_a_rehearsal_only_where_that_was_asked_for(tiny, tmp_path, capsys):
    answers = {"sbatch": "7", "sinfo": "gpu|gpu*|infinite|4|128|512000|(null)|gpu:a100:8"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/rows.jsonl").write_text('{"text": "a b c"}\n')
    command = ["submit", "r.yaml", "--on", "8xA100-80GB", "--detach", "--output-dir", "no--tiny"]
    command += ["--sweep", "seed=1,2", "--set", "launch.slurm.setup=[echo --tiny]"]
    assert main([*command, "--tiny"] if tiny else command) == 0, capsys.readouterr().err
    for script in ("job.sbatch", "1-seed=2/job.sbatch"):
        assert ("--resume auto --tiny ||" in (tmp_path / "no--tiny" / script).read_text()) is tiny


def test_the_cpus_of_the_prepare_job_are_not_those_of_the_processes(tmp_path, capsys):
    """Where Slurm takes no node for it, that is not because of the eight processes of the other job."""
    no = "echo 'Requested node configuration is not available' >&2; exit 1"
    answers = {"sbatch": no, "sinfo": "echo 'gpu|gpu*|infinite|1|2|4000|(null)|(null)'"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    command = ["submit", "r.yaml", "--on", "8xcpu", "--tiny", "--dry-run"]
    assert main([*command, "--set", "launch.slurm.cpus_per_task=null"]) == 2
    shown = capsys.readouterr().err
    assert "launch.slurm.prepare: " in shown
    assert shown.count("launch.slurm.cpus_per_task: ") == 1


def test_the_text_of_a_dry_run_has_every_script(capsys):
    assert main(["submit", "r.yaml", "--on", "8xA100-80GB", "--dry-run", "--sweep", "seed=1,2"]) == 0
    shown = capsys.readouterr().out
    assert "prepare.sbatch\n  #!/bin/bash" in shown
    assert "#SBATCH --array=0-1\n" in shown
    assert "nothing was written or submitted" in shown


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (["--on", "8xA100-80GB"], 4, "slurm-missing"),
        (["--dry-run"], 2, "submit-hardware"),
        (["--on", "1x8GB", "--dry-run", "--set", "precision=fp32"], 3, "does-not-fit"),
        (["--on", "8xA100-80GB", "--dry-run", "--set", "launch.slurm.time=2"], 2, "slurm-time"),
        (["--on", "8xA100-80GB", "--dry-run", "--sweep", "seed"], 2, "sweep"),
        (["--on", "8xA100-80GB", "--dry-run", "--output-dir", "a$b"], 2, "run-dir-name"),
        (["--on", "4xA100-80GB", "--dry-run", "--set", "launch.slurm.gres=gpu:a100:8"], 2, "slurm-devices"),
        (["--on", "4xA100-80GB", "--dry-run", "--set", "launch.slurm.gpus_per_node=a:²"], 2, "slurm-devices"),
        pytest.param(
            ["--on", "4xA100-80GB", "--dry-run", "--set", f"launch.slurm.gres=gpu:{MANY}"],
            2,
            "slurm-devices",
            id="many digits",
        ),
        (["--on", "4xA100-80GB", "--dry-run", "--set", "launch.slurm.gpus_per_node=2"], 2, "slurm-devices"),
        (
            ["--on", "2xcpu", "--dry-run", "--tiny", "--set", "launch.slurm.gpus_per_node=2"],
            2,
            "slurm-devices",
        ),
        (["--on", "8xA100-80GB", "--dry-run", "--set", "launch.hostfile=h"], 2, "slurm-hostfile"),
        (["--follow"], 2, "not-submitted"),
        (["--cancel"], 2, "not-submitted"),
        (["--follow", "--cancel"], 2, "usage"),
        (["--to", "cloud"], 2, "usage"),
    ],
)
def test_what_is_refused(options, code, problem, capsys, tmp_path):
    assert main(["submit", "r.yaml", *options, "--json"]) == code
    assert [error["code"] for error in json.loads(capsys.readouterr().out)["errors"]] == [problem]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml"]


def test_a_sweep_over_sizes_is_refused_and_one_that_fits_nowhere_told_with_its_values(capsys):
    on = ["--on", "8xA100-80GB", "--dry-run"]
    assert main(["submit", "r.yaml", "--dry-run", "--set", "hardware.device=A100-80GB",
                 "--sweep", "hardware.num_nodes=1,2"]) == 2  # fmt: skip
    assert "one array" in capsys.readouterr().err
    assert main(["submit", "r.yaml", *on, "--sweep", "launch.slurm.partition=a,b"]) == 2
    assert "sweep another key" in capsys.readouterr().err
    assert main(["submit", "r.yaml", *on, "--sweep", "trainer.optim=adamw_torch,adam_torsh"]) == 2
    said = capsys.readouterr().err
    assert "with trainer.optim=adam_torsh: " in said
    assert "--sweep: trainer.optim: " in said
    assert "--set" not in said


def test_a_setup_that_bash_cannot_read_is_refused_with_its_line(tmp_path, capsys):
    """Also where the rest of the script has quotes enough to end what it opens."""
    slurm = 'setup: [module load a, "echo b", \'module load "cuda\']'
    (tmp_path / "r.yaml").write_text(
        RECIPE.replace("launch: {slurm: {", "launch: {slurm: {\n  " + slurm + ", ")
    )
    assert main(["submit", "r.yaml", "--on", "8xA100-80GB", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert (
        "r.yaml:6: launch.slurm.setup[2]: bash reports a syntax error: unexpected EOF while looking for"
        in said
    )


def test_two_ways_to_write_one_run_are_refused(capsys):
    on = ["--on", "8xA100-80GB", "--dry-run"]
    assert main(["submit", "r.yaml", *on, "--sweep", "data.train=[{path: rows}],[{path: ./rows}]"]) == 2
    assert "the same run" in capsys.readouterr().err


def test_a_variable_of_the_recipe_must_be_set_when_it_is_submitted(tmp_path, capsys, monkeypatch):
    (tmp_path / "r.yaml").write_text(RECIPE.replace("launch: {", "launch: {env: {T: '${ENV:MY_TOKEN}'}, "))
    on = ["--on", "8xA100-80GB", "--dry-run", "--json"]
    assert main(["submit", "r.yaml", *on]) == 2
    assert "MY_TOKEN is not set" in capsys.readouterr().out
    monkeypatch.setenv("MY_TOKEN", "value-of-a-secret")
    assert main(["submit", "r.yaml", *on]) == 0
    shown = capsys.readouterr().out
    assert "value-of-a-secret" not in shown
    assert "${ENV:MY_TOKEN}" in json.loads(shown)["files"]["submitted.yaml"]


def test_a_reference_in_a_scheduler_s_section_is_a_matter_of_its_jobs_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MY_ACCOUNT", raising=False)
    lines = "slurm: {account: '${ENV:MY_ACCOUNT}', setup: ['cd ${ENV:MY_ACCOUNT}'], "
    (tmp_path / "r.yaml").write_text(RECIPE.replace("slurm: {", lines))
    on = ["--on", "8xA100-80GB", "--json"]
    assert main(["plan", "r.yaml", *on]) == 0
    main(["submit", "r.yaml", *on, "--dry-run", "--to", "skypilot"])  # whose mounts are another matter
    assert "env-missing" not in capsys.readouterr().out
    assert main(["submit", "r.yaml", *on, "--dry-run"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [(error["code"], error["path"], error["line"]) for error in errors] == [
        ("env-missing", "launch.slurm.account", 5), ("env-missing", "launch.slurm.setup[0]", 5),
    ]  # fmt: skip
    consent = ["--set", "launch.slurm.account=ab123", "--set", "launch.slurm.setup=['cd /scratch']"]
    assert main(["submit", "r.yaml", *on, "--dry-run", *consent]) == 0
    assert "#SBATCH --account=ab123\n" in json.loads(capsys.readouterr().out)["files"]["job.sbatch"]
    assert main(["validate", "r.yaml", "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["recipes"]
    assert sum("launch.slurm." in warning for warning in checked["warnings"]) == 2
