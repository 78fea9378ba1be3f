"""The commands in process: output, JSON envelope, exit codes; nothing of the user's is overwritten."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from factories import BASE

from launcher import __version__
from launcher.cli import main
from launcher.parsing import COMMANDS, parse

PLAN_KEYS = {
    "schema_version", "command", "hardware", "batch", "schedule", "settings", "fixes", "memory",
    "ds_config", "env", "files", "warnings", "model",
}  # fmt: skip
MEMORY_KEYS = {
    "device_bytes", "fits", "margin", "low", "high", "components", "total", "save_peak", "eval_peak",
    "host_bytes", "phase",
}  # fmt: skip
COMPONENTS = {
    "weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary", "context",
    "nccl",
}  # fmt: skip
FULL = BASE.replace("adapter: {type: lora, r: 8}\n", "")


ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(BASE, encoding="utf-8")
    return str(path)


def called(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def called_json(capsys, *argv):
    code, out, _ = called(capsys, *argv, "--json")
    return code, json.loads(out)


def test_plan_json_carries_the_contract(capsys, file):
    asked = ("--on", "8xA100-80GB", "--set", "sharding.engine=deepspeed")
    code, data = called_json(capsys, "plan", file, *asked)
    assert code == 0
    assert data.keys() >= PLAN_KEYS
    assert data["memory"].keys() >= MEMORY_KEYS
    assert data["memory"]["components"].keys() == COMPONENTS
    assert (data["schema_version"], data["command"][1:3]) == (1, ["-m", "deepspeed.launcher.runner"])
    assert data["hardware"]["compute_capability"] == 8.0
    assert data["files"].keys() >= {"recipe.yaml", "plan.json", "ds_config.json", "command.sh"}
    assert all(s.keys() == {"value", "source", "by", "reason"} for s in data["settings"].values())
    assert "errors" not in data


def test_an_unnamed_device_has_no_capability(capsys, file):
    _, data = called_json(capsys, "plan", file, "--on", "1x24GB")
    assert data["hardware"]["compute_capability"] is None
    assert data["settings"]["precision"]["value"] == "fp16"


def test_no_fit_is_exit_3_with_every_key_and_errors(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(FULL, encoding="utf-8")
    code, data = called_json(capsys, "plan", path, "--on", "1xT4-16GB")
    assert code == 3
    assert data.keys() >= PLAN_KEYS
    assert data["memory"]["fits"] is False
    assert data["errors"][0]["code"] == "does-not-fit"


def test_no_fit_refuses_to_write_a_bundle(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(FULL, encoding="utf-8")
    target = tmp_path / "out"
    code, _, err = called(capsys, "run", path, "--dry-run", "--on", "1xT4-16GB", "--output-dir", target)
    assert code == 3
    assert "nothing fits 1xT4-16GB" in err
    assert not target.exists()


def test_explain_names_the_line(capsys, file):
    code, out, _ = called(capsys, "plan", file, "--on", "1xA100-80GB", "--explain", "trainer.max_steps")
    assert code == 0
    assert out.startswith("trainer.max_steps = 10\n  from recipe, ")
    assert "r.yaml:4" in out


def test_explain_of_nothing_is_an_error(capsys, file):
    code, _, err = called(capsys, "plan", file, "--on", "1xA100-80GB", "--explain", "trainer.nope")
    assert code == 2
    assert "trainer.nope" in err


def test_dry_run_writes_a_whole_bundle_and_starts_nothing(capsys, file, tmp_path):
    target = tmp_path / "out"
    code, data = called_json(capsys, "run", file, "--dry-run", "--on", "8xA100-80GB", "--output-dir", target)
    assert code == 0
    names = {p.name for p in target.iterdir()}
    assert names >= {"recipe.yaml", "plan.json", "accelerate.yaml", "command.sh", "environment.json"}
    assert not (target / "COMPLETED").exists()
    assert (target / "recipe.yaml").read_text() == BASE
    assert json.loads((target / "plan.json").read_text())["batch"] == data["batch"]
    assert (target / "command.sh").stat().st_mode & 0o100


def test_a_non_empty_run_directory_is_refused_and_untouched(capsys, file, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("precious")
    code, _, err = called(capsys, "run", file, "--dry-run", "--output-dir", target, "--on", "1xA100-80GB")
    assert code == 2
    assert "is not empty" in err
    assert [p.name for p in target.iterdir()] == ["mine.txt"]


def test_a_run_directory_that_cannot_be_made(capsys, file, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    code, _, err = called(
        capsys, "run", file, "--dry-run", "--output-dir", blocker / "x", "--on", "1xA100-80GB"
    )
    assert code == 2
    assert "cannot write the run directory" in err


def test_run_refuses_absent_data_but_plan_only_warns(capsys, file):
    code, _, err = called(capsys, "run", file, "--on", "1xA100-80GB")
    assert code == 2
    assert "data.train[0].path: no such file or folder" in err
    assert "r.yaml:3" in err
    code, out, _ = called(capsys, "plan", file, "--on", "1xA100-80GB")
    assert code == 0
    assert "no such file or folder" in out


def test_a_missing_gpu_is_exit_4(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "r.yaml"
    path.write_text(BASE, encoding="utf-8")
    target = tmp_path / "out"
    code, _, err = called(capsys, "run", path, "--on", "1xA100-80GB", "--output-dir", target)
    assert code == 4
    assert "--tiny" in err
    assert not target.exists()


def test_errors_speak_json_too(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(BASE + "lr: 1\n", encoding="utf-8")
    code, data = called_json(capsys, "plan", path)
    assert code == 2
    (error,) = data["errors"]
    assert error.keys() >= {"code", "message", "file", "line", "path", "hint"}
    assert error["line"] == 5


def test_validate_tells_all_problems_of_all_recipes(capsys, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(BASE, encoding="utf-8")
    bad.write_text(BASE + "seed: many\nprecison: bf16\n", encoding="utf-8")
    code, data = called_json(capsys, "validate", good, bad)
    assert code == 2
    assert [r["valid"] for r in data["recipes"]] == [True, False]
    assert {e["path"] for e in data["errors"]} == {"seed", "precison"}


def test_validate_takes_the_changes_of_plan(capsys, tmp_path):
    good = tmp_path / "good.yaml"
    good.write_text(BASE, encoding="utf-8")
    code, data = called_json(capsys, "validate", good, "--set", "seed=many")
    assert (code, [e["path"] for e in data["errors"]]) == (2, ["seed"])


def test_validate_finds_refusals_for_the_recipes_own_hardware(capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(BASE + "precision: bf16\nhardware: {device: V100-32GB}\n", encoding="utf-8")
    code, data = called_json(capsys, "validate", path)
    assert code == 2
    assert data["errors"][0]["code"] == "fix-bf16-emulated"


@pytest.mark.parametrize("bad", ["8xA1000", "0xA100-80GB", "x", "8xA100-80GB-", ""])
def test_bad_hardware_is_one_clear_error(capsys, file, bad):
    code, _, err = called(capsys, "plan", file, "--on", bad)
    assert code == 2
    assert err.count("error:") == 1


def test_estimate_of_a_model_and_of_a_recipe(capsys, file):
    code, data = called_json(capsys, "estimate", "huggyllama/llama-7b", "--on", "8xA100-80GB")
    assert code == 0
    assert data["model"]["params"] == 6738415616
    by_name = {row["strategy"]: row for row in data["rows"]}
    totals = [by_name[f"full, ZeRO-{stage}"]["memory"]["total"] for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    code, data = called_json(capsys, "estimate", file, "--on", "8xA100-80GB", "--on", "1xA100-80GB")
    assert code == 0
    assert len({row["hardware"] for row in data["rows"]}) == 2


def test_fixes_and_one_fix(capsys):
    code, data = called_json(capsys, "fixes")
    assert code == 0
    keys = {"id", "title", "condition", "action", "reason", "source", "versions", "expired"}
    assert all(fix.keys() == keys for fix in data["fixes"])
    assert not any(fix["expired"] for fix in data["fixes"])
    code, out, _ = called(capsys, "fixes", "bf16-emulated")
    assert code == 0
    assert "capability" in out
    code, _, err = called(capsys, "fixes", "bf16-emulatd")
    assert (code, "did you mean bf16-emulated?" in err) == (2, True)


def test_a_fix_for_other_versions_is_called_expired(capsys, monkeypatch):
    monkeypatch.setattr("launcher.commands.fixes.installed_versions", lambda: {"torch": "2.4.1"})
    code, data = called_json(capsys, "fixes")
    assert code == 0
    expired = [fix["id"] for fix in data["fixes"] if fix["expired"]]
    assert expired == ["bf16-emulated", "bf16-dtype-emulated", "bf16-compute-emulated"]
    assert "expired" in called(capsys, "fixes")[1]


def test_recipes_copy_never_overwrites(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called(capsys, "recipes", "smoke", "--copy")[0] == 0
    Path("smoke.yaml").write_text("mine")
    code, _, err = called(capsys, "recipes", "smoke", "--copy")
    assert (code, Path("smoke.yaml").read_text()) == (2, "mine")
    assert "exists already" in err


def test_schema_is_a_json_schema(capsys):
    code, out, _ = called(capsys, "schema")
    assert code == 0
    assert {"model", "data", "trainer"} <= json.loads(out)["properties"].keys()


def test_version(capsys):
    assert called(capsys, "--version")[:2] == (0, f"effilaunch {__version__}\n")


def test_our_own_bug_is_exit_70_with_a_log(capsys, file, monkeypatch):
    import launcher.inputs.shown_plan as planning

    def broken(*_):
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(planning, "search_plans", broken)
    code, _, err = called(capsys, "plan", file, "--on", "1xA100-80GB")
    assert code == 70
    log = Path(next(word for word in err.split() if ".log" in word).rstrip(":"))
    assert "ZeroDivisionError: seven" in log.read_text()
    log.unlink()
    assert "Traceback" not in err


def test_generate_of_an_unfinished_run(capsys, tmp_path):
    code, _, err = called(capsys, "generate", tmp_path, "hello")
    assert (code, "no finished run" in err) == (2, True)
    _, _, err = called(capsys, "generate", tmp_path / "absent", "hello")
    assert "no such folder" in err
    (tmp_path / "plan.json").write_text("{}")
    _, _, err = called(capsys, "generate", tmp_path, "hello")
    assert f"`effilaunch report {tmp_path}`" in err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("generate R --json Hello", {"run_dir": "R", "prompt": "Hello", "json": True}),
        ("generate R --max-new-tokens 5 Hello", {"run_dir": "R", "prompt": "Hello", "max_new_tokens": 5}),
        ("generate R -- --json", {"run_dir": "R", "prompt": "--json", "json": False}),
        ("report A --output X B", {"paths": ["A", "B"], "output": "X"}),
    ],
)
def test_options_and_positionals_may_be_interleaved(words, found):
    options = parse(words.split())[1]
    assert {name: options[name] for name in found} == found


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "R", "--json", "one", "two", "three"], ["schema", "--json", "x"], ["plan", "--json"],
        ["plan", "r.yaml", "--serch", "--json"], ["no-such-command", "--json"], ["--json"],
        ["plan", "r.yaml", "--search", "--explain", "--json"],
        ["estimate", "--tensor-parallel", "x", "--json"],
    ],
)  # fmt: skip
def test_a_usage_error_is_one_problem_with_exit_status_2(words, capsys):
    code, out, _ = called(capsys, *words)
    assert code == 2
    (error,) = json.loads(out)["errors"]
    assert error["code"] == "usage"
    assert error["hint"].startswith("see `effilaunch ")


def test_no_arguments_show_the_help(capsys):
    code, out, err = called(capsys)
    assert (code, err) == (2, "")
    assert out == called(capsys, "--help")[1]


def test_options_of_every_command_are_kept(capsys):
    kept = (Path(__file__).parent / "options.txt").read_text("utf-8").splitlines()[1:]
    shown = []
    for command in COMMANDS:
        options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", called(capsys, command.name, "--help")[1], re.M)
        assert {"--help", "--json"} <= set(options)
        shown.append(" ".join([command.name, *sorted(set(options) - {"--help", "--json"})]))
    assert shown == kept


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_every_command_takes_its_options_by_name(name):
    arguments = {
        "init": [], "schema": [], "completion": ["bash"], "export": ["x", "--to", "gguf"],
    }.get(name, ["x"])  # fmt: skip
    command, options = parse([name, *arguments])
    taken = options.keys() - {"json", "quiet"}
    inspect.signature(command.function()).bind(**dict.fromkeys(taken))


def test_help_imports_little():
    code = (
        "import sys; from launcher.cli import main; main(['--help']); "
        "print(sorted({'dataclasses', 'json', 'yaml', 'launcher.errors'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.splitlines()[-1] == "[]"


NO_RUN = {"importing", "execute", "lab", "train", "knowledge.lint", "knowledge.diagnose"}
NO_ROWS = {"rows.sources", "rows.recognise", "inputs.source_rows"}
RARE = {  # what few plans have
    "files.redaction", "machine.gpus", "machine.machine_facts", "memory.traced", "planner.resuming",
    "schedulers.hostfile", "schedulers.slurm_allocation", "knowledge.doctor.examine",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["validate", "recipes/smoke.yaml"], NO_RUN | RARE | {"render"}),
        (
            ["validate", "recipes/starcoder_lora.yaml"],
            NO_RUN | RARE | NO_ROWS | {"render", "planner.adapting"},
        ),
        (["plan", "recipes/smoke.yaml", "--on", "cpu"], NO_RUN | RARE),
        (["plan", "recipes/starcoder_lora.yaml"], NO_RUN | RARE | NO_ROWS),
        (
            ["lint", "ds_configs/zero2.json"],
            {"importing", "execute", "lab", "planner", "inputs", "train", "rows"},
        ),
        (
            ["diagnose", "README.md"],
            {"importing", "execute", "lab", "planner", "inputs", "train", "memory", "rows"},
        ),
        (
            ["recipes"],
            {"importing", "execute", "lab", "planner", "inputs", "train", "memory", "recipe", "rows"},
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_command_loads_nothing_that_it_does_not_use(words, unused):
    """The second recipe's rows are on another machine."""
    code = (
        f"import sys; from launcher.cli import main; code = main({words!r}); "
        "print(code, *(name[9:] for name in sys.modules if name.startswith('launcher.')))"
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environ)
    code, *loaded = done.stdout.splitlines()[-1].split()
    assert code == "0"
    assert [name for name in loaded if any(f"{name}.".startswith(f"{one}.") for one in unused)] == []


@pytest.mark.parametrize(
    ("words", "code"), [(["plan", "--help"], 0), (["validate", "--help"], 0), (["plan"], 2)]
)
def test_a_command_that_ends_at_once_has_written_all(words, code):
    """Into a pipe, which is written to when it is flushed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "launcher.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, words[0] in done.stdout + done.stderr) == (code, True)


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "launcher"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("effilaunch ")
    done = subprocess.run([*command, "plan", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: effilaunch plan ")
