"""A token in any place of any file is neither written nor shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import EffilaunchError
from launcher.importing.join import import_files
from launcher.importing.writing import recipe_text

CASES = Path(__file__).parent.parent / "importing_cases"
TOKEN = "hf_" + "Zq" * 14
PASSWORD = "hunter2hunter2"
ADDRESS = f"https://me:{PASSWORD}@host.org/x"


def places(name: str) -> Iterator[str]:
    """The text of a case, each time with one value replaced."""
    text = (CASES / name).read_text(encoding="utf-8")
    patterns = {
        ".json": r'(?<=: )("[^"\n]*"|[\w.]+)|"\w+"(?=:)',
    }
    pattern = patterns.get(Path(name).suffix, r"(?m)(?<=: )[^\s].*$|^\w+(?=:)")
    for found in re.finditer(pattern, text):
        for secret in (TOKEN, ADDRESS):
            quoted = f'"{secret}"' if found[0].startswith('"') or name.endswith(".json") else secret
            yield text[: found.start()] + quoted + text[found.end() :]


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.iterdir() if path.is_file()))
def test_no_secret_is_shown(tmp_path: Path, name: str) -> None:
    count = 0
    for text in places(name):
        count += 1
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        try:
            made = import_files([str(file)])
            said = recipe_text(made, "r", tmp_path) + repr(made)
        except EffilaunchError as error:
            said = "\n".join(str(problem) for problem in error.problems)
        assert TOKEN not in said, text
        assert PASSWORD not in said, text
    assert count > 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", f'{{"zero_optimization": {TOKEN}}}'),
        ("x.yml", f"base_model: a/b\nsequence_len: 2\n{TOKEN}: {TOKEN}: {TOKEN}\n"),
    ],
)
def test_what_a_parser_stumbles_over_is_not_shown(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(EffilaunchError) as caught:
        import_files([str(file)])
    assert TOKEN not in repr(caught.value.problems)
    (problem,) = caught.value.problems
    assert problem.code != "import-unknown"
    assert problem.line is not None
