"""`launch.slurm`: its traps, its rules, and the snapshot that a job runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.machine.hardware import parse_hardware
from launcher.recipe import slurm_rules
from launcher.recipe.loading import load_recipe
from launcher.recipe.slurm_rules import OWNED
from launcher.recipe.yaml_writer import snapshot

BASE = "model: {name_or_path: huggyllama/llama-7b}\ndata: {train: [{path: rows.jsonl}]}\n"


def load(folder, slurm: str, more: str = ""):
    path = folder / "r.yaml"
    path.write_text(f"{BASE}{more}launch:\n  slurm: {slurm}\n")
    return load_recipe(path)


@pytest.mark.parametrize("time", ["24:00:00", "1-00:00:00", "1-12", "90:00", "00:30:00"])
def test_times_stay_what_was_written(time, tmp_path):
    assert load(tmp_path, f"{{time: {time}, mem: 64G}}").recipe.launch.slurm.time == time


def test_plain_minutes_and_all_of_the_memory(tmp_path):
    slurm = load(tmp_path, "{time: 90, mem: 0}").recipe.launch.slurm
    assert (slurm.time, slurm.mem) == (90, 0)


WRONG = [
    ("{time: 1e3}", "launch.slurm.time"),
    ("{time: tomorrow}", "launch.slurm.time"),
    (f"{{time: '{'9' * 5000}:00'}}", "launch.slurm.time"),
    (f"{{mem: {'9' * 5000}G}}", "launch.slurm.mem"),
    *((f"{{time: {time}}}", "launch.slurm.time") for time in ("0", "'0'", "00:00:00", "-5", "true", "1.5")),
    *((f"{{mem: {size}}}", "launch.slurm.mem") for size in ("64", "-5", "true", "false", "'0'")),
    ("{mem: 64GB}", "launch.slurm.mem"),
    ("{mem: 1.5T}", "launch.slurm.mem"),
    ("{partition: $QUEUE}", "launch.slurm.partition"),
    ('{account: "a\\nb"}', "launch.slurm.account"),
    ("{nodes: 2}", "launch.slurm.nodes"),
    ("{gres: 'gpu:8', gpus_per_node: 8}", "launch.slurm.gres"),
    ("{setup: ['#SBATCH --exclusive']}", "launch.slurm.setup[0]"),
    ("{options: {nodes: 3}}", "launch.slurm.options.nodes"),
    ("{options: {mem: 3G}}", "launch.slurm.options.mem"),
    ("{options: {signal: 'B:USR1@90'}}", "launch.slurm.options.signal"),
    ("{options: {mail_type: END}}", "launch.slurm.options.mail_type"),
    ("{options: {--mail-type: END}}", "launch.slurm.options.--mail-type"),
    ("{options: {p: low}}", "launch.slurm.options.p"),
    ("{options: {exclusive: false}}", "launch.slurm.options.exclusive"),
    ("{options: {comment: $USER}}", "launch.slurm.options.comment"),
    ("{prepare: {time: soon}}", "launch.slurm.prepare.time"),
    ("{prepare: {gpus_per_node: 1}}", "launch.slurm.prepare.gpus_per_node"),
    ("{prepare: true}", "launch.slurm.prepare"),
    ("{array_limit: 0}", "launch.slurm.array_limit"),
]


@pytest.mark.parametrize(("text", "path"), WRONG, ids=[text[:60] for text, _ in WRONG])
def test_what_slurm_would_refuse_or_misread(text, path, tmp_path):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == (path, 4)
    assert "put it in quotes" not in str(problem.hint)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("ntasks_per_node: 2", "`hardware` (or --on)"),
        ("job_name: x", "effilaunch sets it"),
        ("mail_type: END", "write it as launch.slurm.options.mail-type"),
        ("prepare: {nodes: 2}", "the prepare job is one task"),
        ("partitoin: x", "did you mean `partition`?"),
    ],
)
def test_an_unknown_key_that_sbatch_knows_is_told_where_it_belongs(key, hint, tmp_path):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, f"{{{key}}}")
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("unknown-key", "unknown key")
    assert problem.hint.startswith(hint)


@pytest.mark.parametrize(
    ("name", "owned"),
    [("no-req", "no-requeue"), ("ntasks-per-n", "ntasks-per-node"), ("tasks", "tasks-per-node"),
     ("sig", "signal"), ("outp", "output"), ("cpus-per-t", "cpus-per-task")],
)  # fmt: skip
def test_the_beginning_of_an_owned_option_is_refused_like_its_name(name, owned, tmp_path):
    """sbatch takes it for the name, and of two the later one."""
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, f"{{options: {{{name}: x}}}}")
    (problem,) = caught.value.problems
    assert (problem.code, problem.hint) == ("owned-key", OWNED[owned])
    assert f"is short for --{owned}" in problem.message


@pytest.mark.parametrize(
    ("name", "some"), [("ntasks-p", "--ntasks-per-core"), ("mail", "--mail-type, --mail-user")]
)
def test_an_ambiguous_option_is_refused_as_by_sbatch(name, some, tmp_path):
    with pytest.raises(RecipeError, match=f"is ambiguous: sbatch has {some}"):
        load(tmp_path, f"{{options: {{{name}: x}}}}")


def test_other_options_may_be_short_or_unknown(tmp_path):
    options = {"mail-t": "END", "bb": "x", "mem-per-cpu": 3, "no-such-plugin": True}
    text = json.dumps({"options": options})
    assert load(tmp_path, text).recipe.launch.slurm.options == options


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no Slurm is installed")
def test_the_list_of_options_is_that_of_sbatch(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")

    def said(*words: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
        done = subprocess.run(["sbatch", *words], env=env, capture_output=True, text=True, input="")
        return done.stdout + done.stderr

    if "22.05" not in (version := said("--version")):
        pytest.skip(f"the list is of 22.05, and this is {version}")
    names = (*OWNED, *slurm_rules._FREE)
    found = {
        name
        for letter in {name[0] for name in names}
        for name in re.findall(r"'--([a-z-]{2,})'", said(f"--{letter}"))
    }
    assert found - {"cluster", "context"} <= set(names)
    assert set(names) - found <= {"job-name", "kill-on-invalid-dep", "licenses"}


KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "line",
    [f"export WANDB_API_KEY={KEY}", f"WANDB_API_KEY='{KEY}' x", f'a; MY_PASSWORD="{KEY}"',
     f"declare -x T_TOKEN+={KEY}",
     "curl https://me:secret-word@host/", "export A=hf_abcdefghijklmnopqrstuvwxyz"],
)  # fmt: skip
def test_a_secret_in_a_line_of_setup_is_refused_and_not_shown(line, tmp_path):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, "{setup: [module load x, " + json.dumps(line) + "]}")
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, problem.line) == ("secret-in-recipe", "launch.slurm.setup[1]", 4)
    assert KEY not in str(problem)


@pytest.mark.parametrize(
    "line",
    ["export WANDB_API_KEY=$(cat ~/.wandb_key)", 'export HF_TOKEN="$OTHER_NAME"', "export KEY=~/.ssh/id_rsa",
     "export API_KEY=`cat key-of-mine`", "export NCCL_SOCKET_IFNAME=ib0", "source /etc/profile",
     "x --a-key=none-at-all"],
)  # fmt: skip
def test_lines_of_setup_that_hold_no_secret(line, tmp_path):
    assert load(tmp_path, "{setup: [" + json.dumps(line) + "]}").recipe.launch.slurm.setup == [line]


@pytest.mark.parametrize("code", ["env-reference", "env-missing"])
def test_a_reference_that_sbatch_would_read_is_left_out_until_a_job_needs_it(code, tmp_path, monkeypatch):
    if code == "env-reference":
        monkeypatch.setenv("MY_ACCOUNT", "ab123")
    for section in (
        "{account: REF}",
        "{options: {comment: REF}}",
        "{prepare: {account: REF}}",
        "{gres: REF}",
    ):
        loaded = load(tmp_path, "{mem: 8G, " + section[1:].replace("REF", "'${ENV:MY_ACCOUNT}'"))
        assert [(p.code, p.line) for p in loaded.of_jobs] == [(code, 4)]
        assert loaded.recipe.launch.slurm.model_dump(exclude_unset=True) == {"mem": "8G"}


def test_a_snapshot_is_the_same_recipe_from_anywhere(tmp_path, monkeypatch):
    """With parents and overrides, absolute paths, references that are resolved later, and YAML's traps."""
    monkeypatch.setenv("MY_TOKEN", "value-of-a-secret")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "hooks.py").write_text("def format_row(row):\n    return row\n")
    (tmp_path / "parent.yaml").write_text(
        BASE + "adapter: {type: lora, r: 4, target_modules: [no, '1e-4']}\n"
    )
    path = tmp_path / "r.yaml"
    path.write_text(
        "extends: parent.yaml\npython: hooks.py\n"
        "trainer: {learning_rate: 1e-4, max_steps: 5, run_name: '24:00:00', report_to: none}\n"
        'model: {chat_template: "{{ messages }} \\u00e9 \\U0001f600 #:\'"}\n'
        "launch: {env: {T: '${ENV:MY_TOKEN}', A: 'no', B: '0x10'}, slurm: {time: 1-00:00:00}}\n"
    )
    loaded = load_recipe(path, ["trainer.max_steps=7", "data.max_length=64"])
    text = snapshot(loaded, parse_hardware("2x8xA100-80GB"))
    assert "value-of-a-secret" not in text
    elsewhere = tmp_path / "run" / "submitted.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(text)
    path.write_text("broken")
    (tmp_path / "parent.yaml").unlink()
    monkeypatch.chdir(elsewhere.parent)
    again = load_recipe(elsewhere)
    assert again.recipe.hardware.device == "A100-80GB"
    assert again.recipe.model_copy(update={"hardware": None}) == loaded.recipe
    assert (again.recipe.trainer["max_steps"], again.recipe.trainer["learning_rate"]) == (7, 1e-4)
    assert yaml.safe_load(text)["launch"]["env"]["B"] == "0x10"
