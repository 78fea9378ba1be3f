"""The shape of the house: layers, sizes, and a command line without the training stack."""

from __future__ import annotations

import ast
import json
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
MODULES = [ROOT / "effilaunch.py", *sorted((ROOT / "launcher").rglob("*.py"))]

RUN_AND_LIST = """
import json, sys
from launcher.cli import main
for words in json.loads(sys.argv[2]):
    code = main(words)
    loaded = [name for name in sys.argv[1].split(",") if name in sys.modules]
    print("LOADED", code, loaded, *words, file=sys.stderr)
"""
SMOKE, STARCODER = (str(ROOT / "recipes" / name) for name in ("smoke.yaml", "starcoder_lora.yaml"))
ZERO3 = str(ROOT / "ds_configs/zero3.json")
COMMANDS = (
    ("plan", STARCODER, "--on", "8xA100-80GB", "--json"),
    ("plan", SMOKE),
    ("plan", SMOKE, "--html", "page.html"),
    ("validate", STARCODER),
    ("estimate", STARCODER, "--on", "8xA100-80GB"),
    ("run", STARCODER, "--dry-run", "--on", "8xA100-80GB"),
    ("fixes",),
    ("recipes",),
    ("schema",),
    ("fixes", "pad-token", "--json"),
    ("completion", "bash"),
    ("init", "--model", "Qwen/Qwen3-8B", "--on", "8xA100-80GB", "--data", str(ROOT / "constraints.txt"),
     "--goal", "text"),
    ("lint", ZERO3),
    ("lint", ZERO3, "--recipe", STARCODER),
    ("diagnose", str(ROOT / "tests/corpus/known/bf16-no-device-torchrun.log")),
)  # fmt: skip


def run_and_list(*commands: tuple[str, ...], cwd: Path, before: str = "", path: str = str(ROOT)) -> list[str]:
    """`LOADED code [modules] words` of each command, run one after the other in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", before + RUN_AND_LIST, ",".join(TRAINING_STACK), json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        timeout=300,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOADED")]
    assert len(lines) == len(commands), done.stdout + done.stderr
    return lines


def test_no_command_imports_the_training_stack(tmp_path):
    """The first one that is shown is it: what it imported stays for those after it."""
    commands = (*COMMANDS, ("report", str(write_finished(tmp_path / "run"))))
    lines = run_and_list(*commands, cwd=tmp_path)
    assert not [line for line in lines if not line.startswith("LOADED 0 [] ")]


@pytest.mark.slow(share=2)
def test_doctor_asks_the_training_stack_in_a_process_of_its_own(tmp_path, request):
    pytest.importorskip("torch")
    forked = f"import sys\nsys.executable = {str(request.getfixturevalue('forks').python)!r}\n"
    (line,) = run_and_list(("doctor", SMOKE, "--on", "cpu"), cwd=tmp_path, before=forked)
    # What this machine lacks is not the question.
    assert line.startswith(("LOADED 0 [] ", "LOADED 4 [] "))


def test_the_probe_above_would_see_an_import(tmp_path):
    (tmp_path / "peft.py").write_text("", encoding="utf-8")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    lines = run_and_list(("recipes",), cwd=tmp_path, before="import peft\n", path=path)
    assert lines == ["LOADED 0 ['peft'] recipes"]


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
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        long += [f"{path.name}: {node.name}" for node in functions if node.end_lineno - node.lineno >= 50]
    assert not long


def test_no_modules_import_each_other(tmp_path):
    """Imports inside functions and for types included: each can be read, and moved, without the others."""
    import grimp
    import networkx

    graph = grimp.build_graph("launcher", cache_dir=str(tmp_path))
    edges = ((module, other) for module in graph.modules
             for other in graph.find_modules_directly_imported_by(module))  # fmt: skip
    groups = networkx.strongly_connected_components(networkx.DiGraph(edges))
    assert [sorted(group) for group in groups if len(group) > 1] == []
