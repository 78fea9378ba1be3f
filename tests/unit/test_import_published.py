"""Published launch lines of transformers' examples, trl, axolotl and LLaMA-Factory as recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.importing.join import import_files
from launcher.importing.writing import recipe_text

PUBLISHED = Path(__file__).parent.parent / "importing_cases" / "published"


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.sh")), ids=lambda file: file.stem)
def test_a_published_line_becomes_its_recipe(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes were made at 073e900, whose reader of shell was another one."""
    monkeypatch.chdir(PUBLISHED)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = recipe_text(import_files([file.name]), "recipe", Path())
    wanted = file.with_suffix(".yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(made) == yaml.safe_load(wanted)


def test_an_example_is_known_by_its_flags_whether_or_not_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (PUBLISHED / "glue.sh").read_text(encoding="utf-8")
    Path("run.sh").write_text(text)
    before = import_files(["run.sh"])
    Path("run_glue.py").write_text("from transformers import *\nTrainingArguments('o', learning_rate=1)\n")
    assert import_files(["run.sh"]) == before
