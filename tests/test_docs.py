"""What the documents say is true: commands exist, recipe blocks load, links resolve."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.recipe.loading import load_recipe

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
README = ROOT / "README.md"


def blocks(path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


def commands(path) -> list[list[str]]:
    """Every `effilaunch …` and `make …` line of the shell blocks, comments cut off."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] in ("effilaunch", "make")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(path):
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link.split("#")[0]).exists()]
    assert missing == []


def test_readme_shows_the_main_job_on_its_first_screen():
    first_screen = "\n".join(README.read_text(encoding="utf-8").splitlines()[:45])
    for wanted in (
        "effilaunch plan recipes/llama3_8b_qlora_24gb.yaml",
        "effilaunch run recipes/llama3_8b_qlora_24gb.yaml",
        "make smoke",
        "make test",
    ):
        assert wanted in first_screen


def test_readme_recipe_is_a_recipe(tmp_path):
    examples = blocks(README, "yaml")
    assert examples
    for number, text in enumerate(examples):
        path = tmp_path / f"example{number}.yaml"
        path.write_text(text, encoding="utf-8")
        assert load_recipe(path).recipe.model.name_or_path


@pytest.mark.parametrize("path", DOCUMENTS[:2], ids=lambda path: path.name)
def test_make_targets_exist(path):
    named = {target for line in commands(path) if line[0] == "make" for target in line[1:2]}
    assert named
    assert named <= make_targets()


def test_readme_commands_are_understood(capsys, monkeypatch, tmp_path):
    """Runs those that only look, and asks the others for their help."""
    monkeypatch.chdir(ROOT)
    lines = [line for line in commands(README) if line[0] == "effilaunch"]
    assert lines
    for _, command, *arguments in lines:
        looks = command in ("plan", "validate", "estimate", "fixes", "recipes", "schema")
        if command == "run" and "--dry-run" in arguments:
            arguments, looks = [*arguments, "--output-dir", str(tmp_path / "run")], True
        code = main([command, *arguments]) if looks else main([command, "--help"])
        assert code == 0, (command, arguments, capsys.readouterr())


def test_readme_lists_exactly_the_commands(capsys):
    table = README.read_text(encoding="utf-8").split("## Commands", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([a-z]+)", table, flags=re.MULTILINE))
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert named
    assert named == set(re.findall(r"^    ([a-z]+) ", shown, flags=re.MULTILINE))
