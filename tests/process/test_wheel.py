"""What is released: the wheel, built from the sdist, works without the checkout, and under other Pythons."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher import __version__
from launcher.execute.run_dir import MARKER
from tools import planner_site

ROOT = Path(__file__).resolve().parents[2]
NEEDS_NO_CHECKOUT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
}


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
PAIR = json.dumps({"prompt": "two and two", "completion": "four"}) + "\n"


def run(*argv: object, cwd) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=NEEDS_NO_CHECKOUT,
        check=False,
        timeout=300,
    )


def call(*argv: object, cwd, code: int | None = 0) -> str:
    done = run(*argv, cwd=cwd)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done.stdout


def made_environment(folder: Path, python: Path | str, package: Path) -> Path:
    """The bin folder of a fresh environment that holds the wheel or sdist and its base dependencies."""
    call(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    install = ("--python", folder / "bin" / "python", "install", "-c", ROOT / "constraints.txt", package)
    call(*PIP, *install, cwd=folder.parent)
    return folder / "bin"


def other_python(minor: int) -> Path | None:
    """A Python 3.`minor` that runs. A shim of pyenv's may be there and only say that no version is chosen."""
    versions = Path(NEEDS_NO_CHECKOUT.get("PYENV_ROOT") or f"{NEEDS_NO_CHECKOUT['HOME']}/.pyenv") / "versions"
    found = [shutil.which(f"python3.{minor}"), *sorted(versions.glob(f"3.{minor}.*/bin/python"))]
    for python in filter(None, found):
        script = f"import sys, venv; sys.exit(sys.version_info[:2] != (3, {minor}))"
        if run(python, "-c", script, cwd="/").returncode == 0:
            return Path(python)
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """As `make build` makes them: the sdist, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("effilaunch-*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built):
    (found,) = built.glob("effilaunch-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return made_environment(tmp_path_factory.mktemp("environment") / "venv", sys.executable, wheel)


def sources(*folders: str) -> set[str]:
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders, cwd=ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    data = {f"launcher/_data/{name}" for name in sources("recipes", "ds_configs")}
    assert {"launcher/_data/recipes/recipe.schema.json", "launcher/_data/ds_configs/zero3.json"} <= data
    assert packed == sources("effilaunch.py", "effilaunch", "launcher") | data
    assert {"launcher/py.typed", "launcher/models/data/models.json", "launcher/report/html/page.py"} <= packed


def test_the_sdist_has_what_the_wheel_is_made_of_and_no_tests(sdist):
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    own = {"PKG-INFO", "pyproject.toml", ".gitignore", "LICENSE", "README.md", "CHANGELOG.md"}
    assert packed == sources("effilaunch.py", "effilaunch", "launcher", "recipes", "ds_configs") | own


def test_an_index_would_take_both_files(wheel, sdist, tmp_path):
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=tmp_path)
    names = {wheel.name, sdist.name}
    assert names == {f"effilaunch-{__version__}-py3-none-any.whl", f"effilaunch-{__version__}.tar.gz"}


def test_the_version_is_that_of_the_changelog():
    """The newest section of a release has the package's version, and the day of it."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"{re.escape(__version__)} - 20\d\d-\d\d-\d\d", headings[1])


@pytest.mark.slow
def test_the_sdist_installs_and_plans(sdist, tmp_path):
    made = made_environment(tmp_path / "venv", sys.executable, sdist)
    assert call(made / "effilaunch", "--version", cwd=tmp_path).split() == ["effilaunch", __version__]
    plan_without_the_stack((made / "effilaunch",), tmp_path / "here", PLANNING[:2])


def test_wheel_works_without_the_checkout(installed, tmp_path):
    effilaunch = installed / "effilaunch"
    where = call(installed / "python", "-c", "import launcher; print(launcher.__file__)", cwd=tmp_path)
    assert str(ROOT / "launcher") not in where

    listed = json.loads(call(effilaunch, "recipes", "--json", cwd=tmp_path))
    text = json.dumps(listed)
    assert all(path.stem in text for path in (ROOT / "recipes").glob("*.yaml"))

    plan = json.loads(
        call(effilaunch, "plan", "starcoder_lora", "--on", "8xA100-80GB", "--json", cwd=tmp_path)
    )
    assert plan["schema_version"] == 1
    assert plan["hardware"]["devices_per_node"] == 8
    # A base profile by name is found inside the wheel.
    plan = json.loads(call(effilaunch, "plan", "llama_7b_full_zero3", "--json", cwd=tmp_path))
    assert plan["ds_config"]["zero_optimization"]["stage"] == 3


def test_lint_diagnose_and_doctor_work_without_the_training_stack(installed, tmp_path):
    effilaunch = installed / "effilaunch"
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "gradient_cliping": 1.0}', encoding="utf-8")
    linted = call(effilaunch, "lint", "ds.json", "--json", cwd=tmp_path, code=2)
    assert [finding["code"] for finding in json.loads(linted)["findings"]] == ["ds-typo-toplevel"]

    log = ROOT / "tests/corpus/known/bf16-no-device.log"
    diagnosed = json.loads(call(effilaunch, "diagnose", log, "--json", cwd=tmp_path))
    assert [finding["id"] for finding in diagnosed["findings"]] == ["bf16-no-device"]

    checks = json.loads(call(effilaunch, "doctor", "--json", cwd=tmp_path, code=None))["checks"]
    found = {check["id"]: check for check in checks}
    assert found["torch"]["status"] == "warn"
    assert "torch" in found["torch"]["message"]
    assert found["versions"]["status"] == "ok"


def test_wheel_needs_only_the_base_dependencies(installed, tmp_path):
    listed = call(*PIP[:-1], "--python", installed / "python", "list", "--format=json", cwd=tmp_path)
    names = {package["name"].lower() for package in json.loads(listed)}
    assert {"argcomplete", "packaging", "pydantic", "pyyaml"} <= names
    assert not names & {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets"}


AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
datasets: [{path: rows.jsonl, type: alpaca}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
learning_rate: 0.0002
"""
PLANNING = [
    ("validate", "mine.yaml", "qwen3_8b_dpo", "smollm2_135m_chat"),
    ("plan", "starcoder_lora", "--on", "8xA100-80GB", "--json"),
    ("run", "mine.yaml", "--dry-run", "--output-dir", "run"),
    ("report", "run"),
    ("plan", "mine.yaml", "--html", "plan.html"),
    ("import", "axolotl.yml", "--output", "imported.yaml"),
    ("plan", "starcoder_lora", "--search"),
    ("plan", "mine.yaml", "--explain", "trainer"),
    ("estimate", "Qwen/Qwen3-8B", "--on", "8xA100-80GB"),
    ("lint", "ds.json"),
    ("fixes", "pad-token"),
    ("schema", "--json"),
    ("recipes", "qwen3_8b_lora", "--copy"),
    ("completion", "bash"),
]
"""What a machine without the training stack can do, after `init` wrote mine.yaml there."""


INIT = (
    "init", "--model", "Qwen/Qwen3-0.6B", "--data", "rows.jsonl", "--goal", "instructions",
    "--on", "1xL4-24GB", "--output", "mine.yaml", "--json",
)  # fmt: skip


def planning_folder(folder: Path) -> Path:
    """An empty folder, with the files that PLANNING reads."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(PAIR * 3, encoding="utf-8")
    (folder / "ds.json").write_text('{"train_batch_size": 8}', encoding="utf-8")
    (folder / "axolotl.yml").write_text(AXOLOTL, encoding="utf-8")
    return folder


def plan_without_the_stack(
    effilaunch: tuple[object, ...], folder: Path, commands: Sequence[Sequence[str]]
) -> None:
    """`init` and the commands in an empty folder."""
    planning_folder(folder)
    assert json.loads(call(*effilaunch, *INIT, cwd=folder))["method"] == "full"
    for words in commands:
        assert call(*effilaunch, *words, cwd=folder).strip(), words


def test_planning_commands_need_no_training_stack(installed, tmp_path):
    plan_without_the_stack((installed / "effilaunch",), tmp_path, PLANNING)


FROM_PYTHON = """\
import json
import effilaunch

print(json.dumps(effilaunch.plan("starcoder_lora", on="8xA100-80GB").to_json(), indent=2))
"""


def test_the_package_is_the_command_and_plans_the_same(installed, tmp_path):
    words = ("plan", "starcoder_lora", "--on", "8xA100-80GB", "--json")
    ours = call(installed / "python", "-m", "launcher", *words, cwd=tmp_path)
    assert ours == call(installed / "effilaunch", *words, cwd=tmp_path)
    assert ours == call(installed / "python", "-c", FROM_PYTHON, cwd=tmp_path)


def test_commands_that_train_say_what_to_install(installed, tmp_path):
    effilaunch = installed / "effilaunch"
    (tmp_path / "rows.jsonl").write_text(PAIR, encoding="utf-8")
    init = ("init", "--model", "Qwen/Qwen3-0.6B", "--data", "rows.jsonl", "--goal", "instructions")
    call(effilaunch, *init, "--on", "cpu", "--output", "mine.yaml", cwd=tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / MARKER).touch()
    (tmp_path / "run" / "plan.json").write_text(
        '{"settings": {"task": {"value": "causal-lm"}}}', encoding="utf-8"
    )
    for words in (
        ("run", "mine.yaml"),
        ("prepare", "mine.yaml"),
        ("generate", "run", "Hello"),
        ("merge", "run"),
        ("eval", "run"),
    ):
        done = run(effilaunch, *words, cwd=tmp_path)
        assert done.returncode == 4, (words, done.stdout + done.stderr)
        assert "pip install 'effilaunch[train]'" in done.stderr, (words, done.stderr)


def test_the_script_works_by_its_path_with_an_empty_environment(installed, tmp_path):
    """As pipx links it: another folder, no home, none of the environment's variables."""
    bare = ("env", "-i", "PATH=/usr/bin:/bin", installed / "effilaunch")
    assert call(*bare, "--version", cwd="/").split() == ["effilaunch", __version__]
    assert "memory of each device" in call(
        *bare, "plan", "starcoder_lora", "--on", "cpu", cwd=tmp_path, code=None
    )
    plan = json.loads(call(*bare, "plan", "starcoder_lora", "--on", "8xA100-80GB", "--json", cwd=tmp_path))
    assert plan["hardware"]["devices_per_node"] == 8


TYPED = """\
import effilaunch
from launcher.recipe.loading import load_recipe

batch: {0} = load_recipe("smoke").recipe.global_batch_size
steps: {0} = effilaunch.plan("smoke", set={{"trainer.max_steps": 3}}).steps
"""


@pytest.mark.slow
def test_a_script_of_the_user_sees_our_types(installed, tmp_path):
    pytest.importorskip("mypy")
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", installed / "python")
    for kind, code in (("int | None", 0), ("str", 1)):
        (tmp_path / "mine.py").write_text(TYPED.format(kind), encoding="utf-8")
        said = call(*mypy, "--cache-dir", tmp_path / "cache", "mine.py", cwd=tmp_path, code=code)
        assert said.count("Incompatible types in assignment") == 2 * code, said


@pytest.mark.slow
@pytest.mark.parametrize("minor", [12, 13, 14])
def test_other_pythons_plan(wheel, tmp_path, minor):
    python = other_python(minor)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} here")
    made = made_environment(tmp_path / "venv", python, wheel)
    version = call(made / "python", "-c", "import sys; print(sys.version_info[1])", cwd=tmp_path)
    assert version.strip() == str(minor)
    plan_without_the_stack((made / "python", "-m", "launcher"), tmp_path / "here", PLANNING)


def site_for_wasm(folder: Path, wheel: Path) -> Path:
    """The wheel and its base dependencies as Pyodide imports them. Skips where pip cannot bring them."""
    try:
        shutil.copytree(planner_site.dependencies(), folder)
    except planner_site.NoPlannerSite as why:
        pytest.skip(str(why))
    call(*PIP, "install", "--no-compile", "--target", folder, "--no-deps", wheel, cwd=folder.parent)
    return folder


def pyodide() -> Path:
    """The npm package's folder. Skips where it cannot be had."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed, which runs Python 3.14 as WebAssembly")
    try:
        return planner_site.pyodide()
    except planner_site.NoPlannerSite as why:
        pytest.skip(str(why))


@pytest.mark.slow(share=2)
def test_python_3_14_plans(wheel, tmp_path):
    """All that needs neither a process nor a lock on a file: WebAssembly has none."""
    folder, site = pyodide(), site_for_wasm(tmp_path / "site", wheel)
    here = planning_folder(tmp_path / "here")
    commands = [INIT, *(words for words in PLANNING if words[0] not in ("run", "report"))]
    script = ROOT / "tests" / "process" / "under_pyodide.mjs"
    said = json.loads(call("node", script, folder, site, here, json.dumps(commands), cwd=tmp_path))
    assert said["version"] == [3, 14]
    failed = [(words, done) for words, done in zip(commands, said["done"], strict=True) if done["code"]]
    assert not failed
    assert "WebAssembly" in json.loads(said["done"][0]["out"])["not_checked"]
    plan = dict(zip(map(tuple, commands), said["done"], strict=True))[PLANNING[1]]
    ours = call(sys.executable, "-m", "launcher", *PLANNING[1], cwd=here)
    assert plan_of(plan["out"]) == plan_of(ours)


def plan_of(printed: str) -> dict[str, object]:
    """What a plan decides, without the paths and versions of where it was made."""
    plan = json.loads(printed)
    return {name: plan[name] for name in ("hardware", "batch", "schedule", "memory", "ds_config", "fixes")}
