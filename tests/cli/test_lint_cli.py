"""`effilaunch lint` in process: output, exit codes, stdin, --fix and --recipe."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from factories import BASE

from launcher.cli import main

ROOT = Path(__file__).resolve().parents[2]
WRONG = '{\n  "train_batch_size": "8",\n  "gradient_cliping": 0.5\n}\n'
RIGHT = '{\n  "train_batch_size": 8,\n  "gradient_clipping": 0.5\n}\n'
KEYS = {"file", "line", "column", "path", "code", "message", "hint", "severity"}


def called(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def wrong(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(WRONG, encoding="utf-8")
    return file


def test_clean_files_exit_0(capsys):
    code, out, err = called(capsys, "lint", *sorted((ROOT / "ds_configs").glob("*.json")))
    assert (code, out, err) == (0, "6 files: clean\n", "")


def test_findings_are_lines_of_a_compiler_and_exit_2(capsys, wrong):
    code, out, _ = called(capsys, "lint", wrong)
    first, second, total = out.splitlines()
    assert code == 2
    assert first.startswith(f"{wrong}:2:23: ds-wrong-type: ")
    assert second.startswith(f"{wrong}:3:3: ds-typo-toplevel: ")
    assert second.endswith("(did you mean `gradient_clipping`?)")
    assert total == "2 findings in 1 file"


def test_json_carries_the_contract(capsys, wrong):
    code, out, _ = called(capsys, "lint", wrong, "--json")
    data = json.loads(out)
    assert (code, data["schema_version"], data["command"]) == (2, 1, "lint")
    assert [finding.keys() for finding in data["findings"]] == [KEYS, KEYS]
    places = [(f["file"], f["line"], f["column"], f["path"], f["code"]) for f in data["findings"]]
    assert places == [
        (str(wrong), 2, 23, "train_batch_size", "ds-wrong-type"),
        (str(wrong), 3, 3, "gradient_cliping", "ds-typo-toplevel"),
    ]
    assert "fixed" not in data


def test_several_files_keep_their_order(capsys, wrong, tmp_path):
    other = tmp_path / "a.json"
    other.write_text("{", encoding="utf-8")
    _, out, _ = called(capsys, "lint", wrong, other, wrong, "--json")
    assert [Path(f["file"]).name for f in json.loads(out)["findings"]] == ["ds.json", "ds.json", "a.json"]


def test_stdin_is_a_file(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WRONG.encode())))
    code, out, _ = called(capsys, "lint", "-")
    assert code == 2
    assert out.startswith("<stdin>:2:23: ds-wrong-type")


def test_fix_writes_beside_and_leaves_the_file(capsys, wrong):
    code, out, _ = called(capsys, "lint", wrong, "--fix")
    fixed = wrong.with_name("ds.fixed.json")
    assert code == 2
    assert f"wrote {fixed}: clean" in out
    assert fixed.read_text(encoding="utf-8") == RIGHT
    assert wrong.read_text(encoding="utf-8") == WRONG
    assert called(capsys, "lint", fixed)[0] == 0


def test_fix_says_what_is_left(capsys, wrong):
    wrong.write_text(WRONG.replace("}", ', "bf16": {"enabled": true}, "fp16": {"enabled": true}}'), "utf-8")
    _, out, _ = called(capsys, "lint", wrong, "--fix", "--json")
    (entry,) = json.loads(out)["fixed"]
    assert [left["code"] for left in entry["left"]] == ["ds-fp16-and-bf16"]
    assert Path(entry["to"]).is_file()


def test_fix_never_overwrites(capsys, wrong):
    fixed = wrong.with_name("ds.fixed.json")
    fixed.write_text("mine", encoding="utf-8")
    code, out, err = called(capsys, "lint", wrong, "--fix")
    assert (code, out) == (2, "")
    assert str(fixed) in err
    assert fixed.read_text(encoding="utf-8") == "mine"


def test_fix_never_writes_two_files_into_one(capsys, wrong):
    other = wrong.with_suffix(".txt")
    other.write_text(WRONG, encoding="utf-8")
    code, _, err = called(capsys, "lint", wrong, other, "--fix")
    assert code == 2
    assert "ds.fixed.json" in err
    assert not wrong.with_name("ds.fixed.json").exists()


def test_fix_writes_nothing_for_a_clean_or_an_unfixable_file(capsys, tmp_path):
    for text, code in ((RIGHT, 0), ("{", 2)):
        file = tmp_path / f"{code}.json"
        file.write_text(text, encoding="utf-8")
        assert called(capsys, "lint", file, "--fix")[0] == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "2.json"]


@pytest.mark.parametrize("name", ["nothing.json", "."])
def test_a_file_that_cannot_be_read_is_said(capsys, tmp_path, name):
    code, _, err = called(capsys, "lint", tmp_path / name)
    assert code == 2
    assert "cannot read it" in err


def test_stdin_cannot_be_fixed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    code, _, err = called(capsys, "lint", "-", "--fix")
    assert code == 2
    assert "stdin" in err


def test_recipe_adds_what_fights_its_plan(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 77,\n"gradient_clipping": 0.3}', encoding="utf-8")
    recipe = tmp_path / "r.yaml"
    # The recipe's own base profile may be the file that is being fixed.
    recipe.write_text(f"{BASE}hardware: {{device: A100-80GB}}\nsharding: {{config: ds.json}}\n", "utf-8")
    assert called(capsys, "lint", file)[0] == 0
    code, out, err = called(capsys, "lint", file, "--recipe", recipe, "--json")
    assert code == 2, err
    assert [(f["line"], f["code"]) for f in json.loads(out)["findings"]] == [
        (1, "ds-hf-mismatch"),
        (2, "ds-hf-mismatch"),
    ]


def test_a_recipe_that_does_not_fit_here_is_compared_all_the_same(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 77}', encoding="utf-8")
    recipe = tmp_path / "r.yaml"
    full = BASE.replace("adapter: {type: lora, r: 8}\n", "")
    recipe.write_text(f"{full}precision: fp32\nhardware: {{device: T4}}\n", encoding="utf-8")
    assert called(capsys, "plan", recipe)[0] == 3
    code, out, err = called(capsys, "lint", file, "--recipe", recipe, "--json")
    assert code == 2, err
    assert "train_micro_batch_size_per_gpu" in [f["path"] for f in json.loads(out)["findings"]]


def test_a_broken_base_profile_stops_the_plan(capsys, tmp_path):
    (tmp_path / "ds.json").write_text('{\n"zero_optimisation": {"stage": 3}}', encoding="utf-8")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{BASE}hardware: {{device: A100-80GB}}\nsharding: {{config: ds.json}}\n", "utf-8")
    code, _, err = called(capsys, "plan", recipe)
    assert code == 2
    assert f"{tmp_path / 'ds.json'}:2: sharding.config: column 1: " in err
    assert "`zero_optimisation`" in err
    assert "did you mean `zero_optimization`?" in err
