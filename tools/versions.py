"""Run the contract tests under the ends of pyproject's ranges, and the planning half under other Pythons.

`make test-versions`, or `python -m tools.versions [lowest] [highest] [3.11] [3.12] [3.13] [3.14]`.

`lowest` installs the lowest version of each range of the extras `train` and `dpo`, `highest` the newest that
the ranges and the package index allow. torch keeps the version of constraints.txt; its range is not tested.
The environments are in build/versions, on top of .venv: only what differs is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
EXTRAS = ("train", "dpo")
NOT_TESTED = ("torch", "wandb", "gguf", "pillow")
"""torch: 2 GB of wheels per version; of the others no private part is used."""
STACK_TESTS = (
    "adapter_checks", "adapter_choices", "adapter_forms", "dpo", "field_tables", "generate", "going_on",
    "memory_record", "merge_command", "models", "packing", "param_counts", "pickles", "pushing", "reward",
    "saving", "sequence_parallel", "stopping", "token_counts", "universal", "upstream_seams", "varlen",
    "weights",
)  # fmt: skip
"""In tests/contract: what calls the libraries' code that our own replaces, extends or describes."""
PLANNING_TESTS = (
    "tests/test_golden.py", "tests/test_shipped.py", "tests/unit/test_recipe_rules.py",
    "tests/unit/test_recipe_loading.py", "tests/unit/test_plan.py", "tests/unit/test_json_schema.py",
    "tests/unit/test_render.py",
)  # fmt: skip
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile")
MARKED = "not slow and not gpu and not cluster and not browser"


def ranges() -> dict[str, Requirement]:
    """The requirements of the training stack that are tested, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    words = [word for extra in EXTRAS for word in project["optional-dependencies"][extra]]
    found = {one.name: one for one in map(Requirement, words)}
    return {name: one for name, one in found.items() if name not in NOT_TESTED}


def base_ranges() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {one.name: one for one in map(Requirement, project["dependencies"])}


def lowest_of(requirements: Mapping[str, Requirement]) -> list[str]:
    """`name==version` of the lower bounds."""
    return [
        f"{name}=={bound.version}"
        for name, one in requirements.items()
        for bound in one.specifier
        if bound.operator == ">="
    ]


def installed(python: Path, names: Sequence[str]) -> str:
    code = (
        "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    )
    return subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, check=True
    ).stdout.strip()


def stack_environment(name: str, wanted: Sequence[str], base: Path) -> Path:
    """The Python of a virtual environment over .venv with other versions of the training stack."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / name], check=True)
        site = next((FOLDER / name / "lib").glob("python*/site-packages"))
        (site / "base.pth").write_text(f"{ROOT}\n{base}\n", "utf-8")
        # DeepSpeed is built with setuptools of .venv: the one of the venv module is too old for it.
        subprocess.run([python, "-m", "pip", "uninstall", "-qy", "setuptools"], check=True)
    torch = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert torch is not None
    constraints = FOLDER / "constraints.txt"
    constraints.write_text(torch[0] + "\n", "utf-8")
    pip = [python, "-m", "pip", "install", "-q", "--no-build-isolation", "-c", constraints, *wanted]
    subprocess.run(pip, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    return python


def test_stack(name: str) -> int:
    """Contract tests under one end of the ranges; the exit status of pytest."""
    found = ranges()
    wanted = lowest_of(found) if name == "lowest" else ["-U", *map(str, found.values())]
    base = Path(__import__("torch").__file__).parents[1]
    python = stack_environment(name, wanted, base)
    print(f"{name}: {installed(python, ['torch', *found])}", flush=True)
    tests = [f"tests/contract/test_{name}.py" for name in STACK_TESTS]
    return subprocess.run([python, *PYTEST, "-m", MARKED, *tests], cwd=ROOT).returncode


def test_planning(version: str) -> int:
    """Planning without the training stack, on 3.11 with the lowest base dependencies; pytest's status."""
    program = find_python(version)
    if program is None:
        print(f"Python {version}: not found, SKIPPED")
        return 0
    python = FOLDER / f"py{version}" / "bin" / "python"
    if not python.exists():
        subprocess.run([program, "-m", "venv", FOLDER / f"py{version}"], check=True)
    found = base_ranges()
    wanted = lowest_of(found) if version == "3.11" else ["-U", *map(str, found.values())]
    tools = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted, *tools], check=True)
    print(f"Python {version}: {installed(python, list(found))}", flush=True)
    # `smoke` finds its model in a package of the training stack.
    command = [python, *PYTEST, "-m", MARKED, "-k", "not smoke", *PLANNING_TESTS]
    return subprocess.run(command, cwd=ROOT).returncode


def find_python(version: str) -> str | None:
    """A Python of this minor version: on the path, else under pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [str(folder / "bin" / "python") for folder in sorted(versions.glob(f"{version}.*"))]
    candidates = [*found, shutil.which(f"python{version}")]
    for program in filter(None, candidates):
        if subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:
            return program
    return None


def test_pyodide() -> int:
    """Planning commands under Python 3.14, which is Pyodide's."""
    test = "tests/process/test_wheel.py::test_python_3_14_plans"
    return subprocess.run([sys.executable, *PYTEST, "-rs", test], cwd=ROOT).returncode


def main() -> int:
    asked = sys.argv[1:] or ["lowest", "highest", "3.11", "3.12", "3.13", "3.14"]
    codes = {}
    for name in asked:
        started = time.monotonic()
        if name in ("lowest", "highest"):
            code = test_stack(name)
        else:
            code = test_pyodide() if name == "3.14" else test_planning(name)
        codes[name] = f"{'passed' if code == 0 else 'FAILED'} in {time.monotonic() - started:.0f} s"
    print(*(f"{name}: {said}" for name, said in codes.items()), sep="\n")
    return int(any(said.startswith("FAILED") for said in codes.values()))


if __name__ == "__main__":
    sys.exit(main())
