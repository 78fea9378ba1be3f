"""The shape of the house: layers, sizes, and a command line without the training stack."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from every import every
from reports import write_finished

ROOT = Path(__file__).resolve().parents[1]
TRAINING_STACK = (
    "torch", "transformers", "deepspeed", "accelerate", "peft", "datasets", "bitsandbytes", "trl", "wandb",
    "tensorboard", "trackio",
)  # fmt: skip
MODULES = sorted((ROOT / "launcher").rglob("*.py"))

RUN_AND_LIST = """
import sys
from launcher.cli import main
code = main(sys.argv[2:])
loaded = [name for name in sys.argv[1].split(",") if name in sys.modules]
print("LOADED", code, loaded, file=sys.stderr)
"""


def run_and_list(*arguments: str, cwd: Path) -> str:
    """The `LOADED code [modules]` line of a command that ran in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST, ",".join(TRAINING_STACK), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        timeout=120,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOADED")]
    assert lines, done.stdout + done.stderr
    return lines[0]


ROWS = ("--data", str(ROOT / "constraints.txt"), "--goal", "text")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", str(ROOT / "recipes/starcoder_lora.yaml"), "--on", "8xA100-80GB", "--json"),
        ("plan", str(ROOT / "recipes/smoke.yaml")),
        ("plan", str(ROOT / "recipes/smoke.yaml"), "--html", "page.html"),
        ("validate", str(ROOT / "recipes/starcoder_lora.yaml")),
        ("estimate", str(ROOT / "recipes/starcoder_lora.yaml"), "--on", "8xA100-80GB"),
        ("run", str(ROOT / "recipes/starcoder_lora.yaml"), "--dry-run", "--on", "8xA100-80GB"),
        ("fixes",),
        ("recipes",),
        ("schema",),
        ("fixes", "pad-token", "--json"),
        ("completion", "bash"),
        ("init", "--model", "Qwen/Qwen3-8B", "--on", "8xA100-80GB", *ROWS),
        ("lint", str(ROOT / "ds_configs/zero3.json")),
        ("lint", str(ROOT / "ds_configs/zero3.json"), "--recipe", str(ROOT / "recipes/starcoder_lora.yaml")),
        ("diagnose", str(ROOT / "tests/corpus/known/bf16-no-device-torchrun.log")),
    ],
    ids=lambda arguments: "-".join(Path(part).stem for part in arguments[:2]),
)
def test_command_never_imports_the_training_stack(arguments, tmp_path):
    assert run_and_list(*arguments, cwd=tmp_path) == "LOADED 0 []"


def test_report_never_imports_the_training_stack(tmp_path):
    run = str(write_finished(tmp_path / "run"))
    assert run_and_list("report", run, cwd=tmp_path) == "LOADED 0 []"


def test_doctor_asks_the_training_stack_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("torch")
    line = run_and_list("doctor", str(ROOT / "recipes/smoke.yaml"), "--on", "cpu", cwd=tmp_path)
    assert line in ("LOADED 0 []", "LOADED 4 []"), "and what this machine lacks is not the question"


def test_the_probe_above_would_see_an_import(tmp_path):
    (tmp_path / "peft.py").write_text("", encoding="utf-8")
    script = "import peft\n" + RUN_AND_LIST
    done = subprocess.run(
        [sys.executable, "-c", script, "peft", "recipes"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        check=False,
        timeout=120,
    )
    assert "LOADED 0 ['peft']" in done.stderr


def test_layers_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = re.search(r"(\d+) kept, 0 broken", done.stdout)
    assert kept is not None
    assert int(kept[1]) >= 4


@every("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert path.name not in ("utils.py", "helpers.py", "common.py")
    if text.strip():
        assert text.startswith('"""')


def test_there_are_modules_to_check():
    assert len(MODULES) > 20


def test_functions_stay_under_50_lines():
    long = []
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        long += [f"{path.name}: {node.name}" for node in functions if node.end_lineno - node.lineno >= 50]
    assert not long
